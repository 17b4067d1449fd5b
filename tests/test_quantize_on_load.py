"""`quant` and dtype="int8" quantize any model while it is loaded, on both backends alike."""

import copy
import gc
import hashlib
import json
import tracemalloc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer import CheckpointError, ConfigError, UnsupportedError  # noqa: E402
from dualinfer.arrays import to_numpy  # noqa: E402
from dualinfer.backends.jax import params as jax_params  # noqa: E402
from dualinfer.backends.jax.mesh import OneDevice  # noqa: E402
from dualinfer.backends.torch import params as torch_params  # noqa: E402
from dualinfer.checkpoint.reader import RowReader  # noqa: E402
from dualinfer.checkpoint.sources import open_checkpoint, open_module  # noqa: E402
from dualinfer.checkpoint.views import quantized as quantized_source  # noqa: E402
from dualinfer.checkpoint.views.quantized import open_quantized, quantize_by  # noqa: E402
from dualinfer.config import make_config  # noqa: E402
from dualinfer.model.families import describe_model  # noqa: E402
from dualinfer.model.load_plan import make_load_plan, marks_of  # noqa: E402
from dualinfer.model.weights import Weight, count_leaves, leaves_of, parts_of  # noqa: E402
from dualinfer.parallel.shard import fit_blocks  # noqa: E402
from dualinfer.parallel.sharding import make_plan  # noqa: E402
from dualinfer.quantization import BlockScheme, read_quantization  # noqa: E402
from dualinfer.quantization import quantize as quantizers  # noqa: E402
from dualinfer.quantization.meaning import dequantize  # noqa: E402
from dualinfer.quantization.quantize import SCHEMES, Quantizing  # noqa: E402
from dualinfer.quantization.recipe import make_recipe  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import BACKENDS, random_ids, relative_rms  # noqa: E402
from .split_models import make_model as make_split  # noqa: E402
from .test_autotp import _inputs as inputs_of_split  # noqa: E402
from .test_module_torch import inputs_of, make_hf  # noqa: E402

ASYMMETRIC = {"weight": {"num_bits": 4, "q_type": "asymmetric", "q_groups": 4}}
ASKED = ["int8", "int4", "fp8", "nvfp4", ASYMMETRIC]
GREEDY = {"max_new_tokens": 6, "do_sample": False}
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.usefixtures("greedy")]


def engine(model, backend="torch", tp=1, **fields):
    fields = {"dtype": "fp32"} | fields
    return dualinfer.init_inference(
        model,
        backend=backend,
        replace_with_kernel_inject=True,
        tensor_parallel={"tp_size": tp, "timeout": 150},
        **fields,
    )


def scheme_for(asked, width):
    if isinstance(asked, str):
        return SCHEMES[asked]
    return BlockScheme("uint4", columns=width // 4, zeros=True)


def dequantized(model, asked, plain=()):
    """A copy of a HF model whose matrices are what their codes mean."""
    source, made = open_module(model), copy.deepcopy(model)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, value in made.named_parameters():
            is_head = "lm_head" in name or (tied and "embed" in name) or (tied and "wte" in name)
            inside = ".layers." in name or ".h." in name
            if value.dim() != 2 or not (is_head or inside) or any(p in name for p in plain):
                continue
            turned = type(made.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
            scheme = SCHEMES["int8"] if is_head else scheme_for(asked, value.shape[not turned])
            matrix = dequantize(Quantizing(source, name, scheme, turned))
            value.copy_(torch.tensor(matrix.T if turned else matrix))
    return made


def hashes(engine):
    """Of every array that weights are held in, by our names; sharded ones are joined."""
    found = {}
    for i, layer in enumerate(engine.runner.params.layers):
        for name, leaf in layer.items():
            for part, array in parts_of(leaf).items():
                data = to_numpy(array)
                if data.dtype.kind in "iu":
                    found[i, name, part] = hashlib.sha256(data.tobytes()).hexdigest()
    assert found
    return found


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *(("llama-gqa", asked) for asked in ASKED),
        *(("gpt2", asked) for asked in ("int8", "mxfp4")),
        *(pytest.param("gpt2", asked, marks=pytest.mark.slow) for asked in ("int4", "fp8")),
    ],
    ids=str,
)
def test_a_model_quantized_on_load_is_what_its_codes_mean(name, asked, hf_model):
    """On both backends, which hold the same bytes; decoded through the cache."""
    model, ids = hf_model(name), random_ids(2, 9)
    with engine(dequantized(model, asked)) as dense:
        expected = np.asarray(dense(ids).logits), np.asarray(dense.generate(ids, **GREEDY))
    held = []
    for backend in BACKENDS:
        with engine(model, backend, quant=asked) as made:
            assert relative_rms(made(ids).logits, expected[0]) < 1e-5
            assert np.array_equal(made.generate(ids, **GREEDY), expected[1])
            report, held = made.report(), [*held, hashes(made)]
            assert report.weights["head"] == "int8, rows"
            assert report.parameter_bytes < (0.5 if asked in ("int8", "fp8") else 0.45) * 4 * (
                sum(p.numel() for p in model.parameters())
            )
    assert held[0] == held[1]


def share_of(model, asked):
    with engine(model, quant=asked, tp=2) as made:
        return np.asarray(made(random_ids(2, 9)).logits)


@pytest.mark.parametrize("asked", ["int4", "nvfp4"])
def test_two_devices_give_what_one_does(asked, hf_model, crew):
    model, ids = hf_model("llama-gqa"), random_ids(2, 9)
    with engine(model, quant=asked) as made:
        expected = np.asarray(made(ids).logits)
    with engine(model, "jax", quant=asked, tp=2) as made:
        assert relative_rms(made(ids).logits, expected) < 1e-5
    # A copy: what goes to other processes is moved to memory that they share.
    for logits in crew.run(share_of, copy.deepcopy(model), asked, world=2):
        assert relative_rms(logits, expected) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_as_a_dtype_is_int8_weights(backend, hf_model):
    model, ids = hf_model("llama-gqa"), random_ids(1, 5)
    with (
        engine(model, backend, dtype=torch.int8) as one,
        engine(model, backend, quant="int8") as two,
    ):
        assert np.array_equal(np.asarray(one(ids).logits), np.asarray(two(ids).logits))
        assert one.inference_config.quant.scheme == "int8"
        assert one.report().dtype == "float32"


def test_projections_of_attention_may_stay_plain(hf_model):
    model, ids = hf_model("llama-gqa"), random_ids(2, 9)
    plain = ("q_proj", "k_proj", "v_proj")
    with engine(dequantized(model, "int8", plain)) as dense:
        expected = np.asarray(dense(ids).logits)
    quant = {"scheme": "int8", "qkv": {"enabled": False}}
    with engine(model, quant=quant) as made:
        assert relative_rms(made(ids).logits, expected) < 1e-5
        leaves = made.runner.params.layers[0]
        assert leaves["qkv.weight"].scheme is None and leaves["out.weight"].scheme is not None


def test_inputs_are_quantized_where_that_is_asked_for(hf_model):
    model, ids = hf_model("llama-gqa"), random_ids(2, 9)
    with engine(model, quant="int8") as made, engine(model) as exact:
        alone = relative_rms(made(ids).logits, exact(ids).logits)
        with engine(model, quant={"activation": {"enabled": True}}) as both:
            assert both.runner.params.layers[0]["up.weight"].scheme.activation.codes == "int8"
            assert relative_rms(both(ids).logits, exact(ids).logits) > 1.1 * alone


def test_models_of_other_values_have_other_marks(hf_model, monkeypatch):
    """As processes compare them, for which nothing is quantized."""
    monkeypatch.setattr(Quantizing, "_make", lambda _: pytest.fail("a matrix was quantized"))
    model = hf_model("llama-gqa")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[-1, -1] += 1
    marks = []
    for own in (model, other, copy.deepcopy(model)):
        source, plan = opened(own, "int4")
        marks.append([np.asarray(m).tolist() for m in marks_of(source, plan)])
    assert marks[0] == marks[2] != marks[1]


def test_each_matrix_is_quantized_once_a_few_rows_at_a_time(hf_model, monkeypatch):
    model, made, reads = hf_model("llama-gqa"), [], []
    whole, read = Quantizing._make, Quantizing._read
    monkeypatch.setattr(quantizers, "_READ", 1000)
    monkeypatch.setattr(Quantizing, "_make", lambda s, part: made.append(s._name) or whole(s, part))

    def spy(*args):
        rows = read(*args)
        reads.append(rows.size)
        return rows

    monkeypatch.setattr(Quantizing, "_read", spy)
    with engine(model, quant="int4"):
        assert len(made) == len(set(made)) > 10
        assert max(reads) <= max(1000, 300)


def opened(model, asked, folder=None):
    """The source of a model's quantized weights, its folder's or its own, and the plan of rows."""
    config = json.loads((folder / "config.json").read_text()) if folder else model.config.to_dict()
    _, table = describe_model(config, [type(model).__name__])
    source = open_checkpoint(folder) if folder else open_module(model)
    if asked:
        recipe = make_recipe(make_config({"quant": asked}, {}).quant)
        matrices = quantize_by(recipe, table, source)
    else:
        matrices = read_quantization(config)(source)
    source, table = open_quantized(source, table, matrices)
    return source, make_load_plan(table, source)


def unpacked(array, matrix, part, width):
    if part or matrix is None or matrix.scheme.code.bits == 8:
        return array
    return matrix.scheme.code.packing.unpack(array, np.stack)[:, :width]


ROWS_OF_FOUR_BITS = {"weight": {"num_bits": 4, "q_groups": 1}}
EVEN = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


@pytest.mark.parametrize("asked", [*ASKED, ROWS_OF_FOUR_BITS], ids=str)
@pytest.mark.parametrize("name", ["llama-gqa", "even", "gpt2", "bloom"])
def test_a_rank_quantizes_its_own_share_to_the_same_codes(name, asked, hf_model, monkeypatch):
    """About half of all elements for each of two, where shares end with groups."""
    even = name == "even"
    changes = EVEN | {"num_key_value_heads": 2, "vocab_size": 512}
    model = make_model("llama-gqa", **changes) if even else hf_model(name)
    made, read = [], []
    quantize, rows = quantizers.quantize, Quantizing._read

    def count(*args):
        made.append(quantize(*args))
        return made[-1]

    monkeypatch.setattr(quantizers, "quantize", count)
    monkeypatch.setattr(Quantizing, "_read", lambda *a: read.append(rows(*a)) or read[-1])
    whole, plan = opened(model, asked)
    for row, names in plan.rows:
        for found in names if row.scheme else ():
            whole.read(found)
    total = sum(part.codes.size for part in made)
    monkeypatch.setattr(whole, "_matrices", {n: Whole(m) for n, m in whole._matrices.items()})
    shares = []
    for shard in make_plan(plan.table, 2).shards:
        source, _ = opened(model, asked)
        own = fit_blocks(plan, [shard])
        reads = [
            (found, read)
            for row, names in own.rows
            for part, found in zip(row.sources, names, strict=True)
            for read in (shard.reads(row, part) if row.scheme else ())
        ]
        made.clear(), read.clear()
        given = [source.read(found, one.index) for found, one in reads]
        shares.append((sum(m.codes.size for m in made), sum(r.size for r in read)))
        for (found, one), array in zip(reads, given, strict=True):
            key, _, part = found.partition(":")
            matrix, shape = whole.matrix(key), whole.shape(found)
            kept = unpacked(whole.read(found), matrix, part, shape[-1])[one.index]
            assert np.array_equal(unpacked(array, matrix, part, kept.shape[-1]), kept), found
    if even:
        slack = 1.3 if asked == ROWS_OF_FOUR_BITS else 1
        assert all(0.4 * total < codes <= 0.5 * slack * total for codes, _ in shares)
        if asked in ("int4", ASYMMETRIC):
            assert all(elements <= 0.5 * total for _, elements in shares)


class Whole:
    """A matrix that was quantized at once, and stays."""

    inputs_first = False

    def __init__(self, matrix):
        self.scheme, self.shape, self.stored = matrix.scheme, matrix.shape, matrix.stored
        everything = slice(None)
        self._codes = matrix.codes(everything, everything)
        held = matrix.scale(), matrix.zero(), matrix.outer()
        self.scale, self.zero, self.outer = (lambda array=array: array for array in held)

    def codes(self, rows, columns):
        return self._codes[rows, columns]


class Live(TorchDispatchMode):
    """The most bytes of torch tensors that were alive at once, of those made or used within."""

    def __init__(self):
        super().__init__()
        self.most, self._seen = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, made)) if isinstance(t, torch.Tensor)]
        self._seen = [ref for ref in self._seen if ref() is not None]
        self._seen += [weakref.ref(t) for t in tensors]
        storages = [t.untyped_storage() for t in (ref() for ref in self._seen) if t is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.most = max(self.most, sum(sizes.values()))
        return made


@contextmanager
def watched(backend, monkeypatch):
    """A list, to which comes the most bytes that the CPU, as a device, ever held within."""
    if backend == "torch":
        with Live() as live:
            yield (most := [])
        most.append(live.most)
        return
    gc.collect()
    before, sums = {id(a) for a in jax.live_arrays()}, []

    def sampling(function):
        def call(*args, **kwargs):
            made = function(*args, **kwargs)
            sums.append(sum(a.nbytes for a in jax.live_arrays() if id(a) not in before))
            return made

        return call

    with monkeypatch.context() as patch:
        jax_numpy = (jax.numpy, "concatenate")
        for owner, name in ((jax_params, "to_jax"), (jax_params, "_padded"), jax_numpy):
            patch.setattr(owner, name, sampling(getattr(owner, name)))
        yield (most := [])
    most.append(max(sums))


def load(backend, source, plan):
    """A backend's params on the CPU, and the bytes of all and of the largest layer."""
    tp_plan = make_plan(plan.table)
    if backend == "torch":
        given = plan, source, torch.float32, torch.device("cpu")
        params = torch_params.load_params(tp_plan.shards[0], *given)
    else:
        place = OneDevice(jax.devices("cpu")[0])
        given = place, tp_plan, plan, source, jax.numpy.dtype("float32")
        params, _, _ = jax_params.load_params(*given)
    outer, *layers = (
        count_leaves(group.values())["parameter_bytes"] for group in (params.outer, *params.layers)
    )
    return params, outer + sum(layers), max(layers)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, its folder, and that of the same in int4."""
    changes = {"num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    model, folder = make_model("llama-gqa", **EVEN | changes | sizes), tmp_path_factory.mktemp("a")
    model.save_pretrained(folder / "plain")
    with engine(model, quant="int4") as made:
        made.save_pretrained(folder / "int4")
    return model, folder / "plain", folder / "int4"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asked", ["int4", "int8", None], ids=str)
def test_a_device_holds_a_layer_beside_the_quantized_weights_at_most(
    backend, asked, folders, monkeypatch
):
    """While weights are quantized, and while quantized ones are read; a layer as it is held."""
    model, plain, quantized = folders
    with watched(backend, monkeypatch) as most:
        _, held, layer = load(backend, *opened(model, asked, plain if asked else quantized))
    assert held <= most[0] <= held + 1.2 * layer


@pytest.mark.parametrize("asked", ["int4", pytest.param(None, marks=pytest.mark.slow)], ids=str)
def test_the_host_holds_a_layer_and_no_matrix_of_unpacked_codes(asked, folders, monkeypatch):
    """A layer as it will be held, of which one matrix' codes of 4 bits, unpacked, are 0.44."""
    model, plain, quantized = folders
    folder = plain if asked else quantized
    _, _, layer = load("torch", *opened(model, asked, folder))
    for module in (quantizers, quantized_source):
        monkeypatch.setattr(module, "_AT_ONCE", 1 << 13)
    monkeypatch.setattr(quantizers, "_READ", 1 << 15)
    monkeypatch.setattr(quantizers, "_THREADS", 1)

    def peak():
        source, plan = opened(model, asked, folder)
        tracemalloc.start()
        with RowReader(make_plan(plan.table).shards, plan, source, shown=False) as reader:
            for _ in reader:  # which a device would take
                pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # Threads may read ahead of one another.
    assert any(peak() <= 1.6 * layer for _ in range(12))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_holds_the_model_afterwards(backend):
    model = make_model("llama-gqa")
    gone = weakref.ref(model.model.layers[0].mlp.up_proj)
    with engine(model, backend, quant="int4") as made:
        made(random_ids(1, 5))
    del model, made
    gc.collect()
    assert gone() is None


def test_weights_read_again_are_quantized_again():
    model = make_model("llama-gqa")
    ids = random_ids(1, 5)
    with engine(model, quant="int8") as made:
        before = np.asarray(made(ids).logits)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(2)
        made.refresh()
        after = np.asarray(made(ids).logits)
        assert relative_rms(after, before) > 1e-3
    with engine(model, quant="int8") as new:
        assert np.array_equal(np.asarray(new(ids).logits), after)


def test_a_groups_size_says_what_their_number_does_and_small_groups_are_warned_of():
    def scheme_of(**weight):
        recipe = make_recipe(make_config({"quant": {"weight": weight}}, {}).quant)
        return recipe.scheme_of("w", (5, 96))

    for more in ({"num_bits": 4}, {"q_type": "asymmetric"}):
        assert scheme_of(group_size=24, **more) == scheme_of(q_groups=4, **more)
    for asked in ({"q_groups": 32}, {"group_size": 3}):
        with pytest.warns(UserWarning, match=r"groups of 3 take about 9\.33 bits a weight"):
            scheme_of(num_bits=4, **asked)
    with pytest.warns(UserWarning, match=r"q_groups=32: .* by group_size"):
        scheme_of(num_bits=8, q_groups=32)


REFUSED = [
    ({"weight": {"q_groups": 7}}, r"q_groups=7: rows of .* have 96 elements"),
    ({"weight": {"quantized_initialization": {"num_bits": 4}}}, "quantized_initialization"),
    ({"weight": {"post_init_quant": {"a": {}}}}, "post_init_quant"),
    ({"weight": {"enabled": False}}, r"quant.weight.enabled=False"),
    ({"scheme": "int4", "weight": {"num_bits": 8}}, r"quant.scheme='int4'.*Give one"),
    ({"scheme": "fp8", "activation": {"num_bits": 8}}, "inputs become integers"),
    ({"activation": {"num_bits": 4}}, "activation.num_bits=4"),
    ({"activation": {"q_groups": 2}}, "activation.q_groups=2"),
    ({"weight": {"q_groups": 4, "group_size": 24}}, "group_size=24: q_groups says the same"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=str)
def test_what_cannot_be_honoured_is_refused_by_name(asked, said, hf_model):
    with pytest.raises(ConfigError, match=said):
        engine(hf_model("llama-gqa"), quant=asked)


@pytest.mark.parametrize("part", ["q_proj", "o_proj"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w[0].clone(), "misshaped"),
        (lambda w: w[None].clone(), "misshaped"),
        (lambda w: w.to(torch.int64), "is int64, expected"),
    ],
    ids=["one axis", "three axes", "integers"],
)
def test_what_is_no_matrix_of_floats_is_refused_as_without_quant(
    change, said, part, hf_model, tmp_path
):
    model = hf_model("llama-gqa")
    model.config.save_pretrained(tmp_path)
    name, tensors = f"{part}.weight", {k: v.clone() for k, v in model.state_dict().items()}
    name = next(key for key in tensors if key.endswith(name))
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        engine(tmp_path, quant="int8")


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    model = make_model("llama-gqa", tie_word_embeddings=False)
    with engine(model, quant="int8") as made:
        made.save_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="quant is given, and the weights of"):
        engine(tmp_path / "out", quant="int4")


def runs_itself(model, **fields):
    return dualinfer.init_inference(model, **{"backend": "torch", "dtype": "fp32"} | fields)


def held_in(module):
    return {path: part.held for path, part in module.named_modules() if hasattr(part, "held")}


def arrays_of(module):
    """Every array of codes and scales, by its name and its kind."""
    return {
        (path, part): to_numpy(array)
        for path, weight in held_in(module).items()
        for part, array in parts_of(weight).items()
    }


def meant_by(model, asked, plain=()):
    """A copy of a module whose linear layers have what their codes mean, by NumPy alone."""
    source, made = open_module(model), copy.deepcopy(model)
    with torch.no_grad():
        for path, part in made.named_modules():
            turned = type(part).__name__ == "Conv1D"
            if not (isinstance(part, nn.Linear) or turned) or path in plain:
                continue
            scheme = scheme_for(asked, part.weight.shape[not turned])
            if path == "lm_head":
                scheme = SCHEMES["int8"]
            matrix = dequantize(Quantizing(source, f"{path}.weight", scheme, turned))
            part.weight.copy_(torch.tensor(matrix.T if turned else matrix))
    return made.eval()


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("name", ["t5", "vit"])
def test_a_module_that_runs_itself_is_what_its_codes_mean(name, asked):
    """Of families that fused mode does not know; T5's head is its embedding, and stays plain."""
    module, inputs = make_hf(name), inputs_of(name)
    dense = meant_by(module, asked, plain=("lm_head",))
    with torch.no_grad(), runs_itself(module, quant=asked) as made:
        assert made.module is module
        assert relative_rms(made(**inputs).logits, dense(**inputs).logits) < 5e-6
        report = made.report()
        name_of = scheme_for(asked, 4).name if asked is not ASYMMETRIC else "uint4"
        assert any(kind.startswith(name_of) for kind in report.weights)
        if name == "t5":
            ids = inputs["input_ids"]
            expected = dense.generate(input_ids=ids, **GREEDY)
            assert torch.equal(made.generate(input_ids=ids, **GREEDY), expected)
            assert report.weights["head"] == "float32"
            assert any("stay plain, 1: lm_head" in note for note in report.notes)


@pytest.mark.parametrize("asked", ["int8", "int4", "nvfp4"])
def test_a_module_that_runs_itself_holds_what_fused_mode_does(asked):
    model, ids = make_model("llama-gqa", tie_word_embeddings=False), random_ids(2, 9)
    with engine(model, quant=asked) as fused:
        params = fused.runner.params
        expected, logits = params.layers[1]["out.weight"], np.asarray(fused(ids).logits)
        with runs_itself(model, quant=asked) as made:
            held = held_in(made.module)
            ours = {
                "layers.1.out": held["model.layers.1.self_attn.o_proj"],
                "head": held["lm_head"],
            }
            for own, other in (
                (ours["layers.1.out"], expected),
                (ours["head"], params.outer["head.weight"]),
            ):
                assert own.scheme == other.scheme
                for part, array in parts_of(own).items():
                    assert torch.equal(array, parts_of(other)[part])
            assert relative_rms(made(ids).logits, logits) < 1e-5
            assert made.report().weights["head"] == "int8, rows"
            assert "int8, rows" in repr(made.module.lm_head)
            with pytest.raises(UnsupportedError, match="is quantized by dualinfer, and save_pre"):
                model.save_pretrained("unused")


def test_a_folder_of_an_unknown_family_is_quantized_as_the_module_is(tmp_path):
    """In bfloat16, whose dtype its scales have, whatever the model computes in."""
    from transformers import RoCBertConfig, RoCBertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    config = RoCBertConfig(**sizes, intermediate_size=64, max_position_embeddings=40)
    module = RoCBertForMaskedLM(config).eval().to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    with runs_itself(module, quant="int4", dtype="fp32") as live:
        expected = arrays_of(live.module)
    with runs_itself(tmp_path, quant="int4", dtype="fp32") as made:
        assert list(made.report().weights) == ["float32", "int4, groups of 64", "head"]
        found = arrays_of(made.module)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(array, expected[key]) for key, array in found.items())
    assert found["roc_bert.encoder.layer.0.attention.self.query", "scale"].dtype == "bfloat16"


def split_modules(names, asked):
    """Of each model: how far two ranks are from one process, and whether the text is the same."""
    found = {}
    for name in names:
        whole, part = make_split(name), make_split(name)
        inputs = inputs_of_split(name)
        with runs_itself(part, quant=asked, tensor_parallel={"tp_size": 2}) as two:
            logits = two(**inputs).logits
            kinds = {type(m).__name__ for m in part.modules() if hasattr(m, "held")}
            text = two.generate(inputs["input_ids"], **GREEDY).tolist()
            with dualinfer.init_inference(
                whole, backend="torch", dtype="fp32", quant=asked, tensor_parallel={"tp_size": 1}
            ) as one:
                error = relative_rms(logits, one(**inputs).logits)
                same = text == one.generate(inputs["input_ids"], **GREEDY).tolist()
        found[name] = error, same, sorted(kinds)
    return found


@pytest.mark.parametrize(
    "asked",
    ["int4", {"activation": {"q_type": "asymmetric"}}, {"weight": {"q_type": "asymmetric"}}],
    ids=str,
)
def test_a_split_module_gives_what_the_whole_one_does(asked, crew):
    """A share of columns ends within a group, and scales of inputs are those of all columns.

    Symmetric ones put an input's least value on a tie.
    """
    names = ["llama", "gpt2", "t5, gated"]
    for found in crew.run(split_modules, names, asked, world=2):
        assert all(error < 1e-5 and same for error, same, _ in found.values()), found
        assert {"_QuantizedColumn", "_QuantizedRow"} <= {*found["llama"][2]}


def test_a_module_stays_whole_when_quantizing_fails():
    module = make_hf("vit")
    with torch.no_grad():
        module.classifier.weight[0, 0] = float("nan")  # the last one
    before = {name: (p, p.clone()) for name, p in module.named_parameters()}
    with pytest.raises(CheckpointError, match=r"classifier.weight .* no finite numbers"):
        runs_itself(module, quant="int8")
    assert not held_in(module)
    for name, p in module.named_parameters():
        assert p is before[name][0] and torch.equal(p.nan_to_num(), before[name][1].nan_to_num())


def test_what_is_no_linear_layer_of_its_own_stays_plain():
    """A layer with a hook, one read by a fused operation, one that is an embedding."""
    module = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "hooked": nn.Linear(8, 8),
            "attention": nn.MultiheadAttention(8, 2),
            "embed": nn.Embedding(5, 8),
            "head": nn.Linear(8, 5, bias=False),
        }
    )
    module["head"].weight = module["embed"].weight
    module["hooked"].register_forward_hook(lambda *_: None)
    with runs_itself(module, quant="fp8") as made:
        assert [*held_in(module)] == ["plain"]
        notes = " ".join(made.report().notes)
        assert "1: head" in notes and "hooked" in notes and "attention.out_proj" in notes


def test_quantized_layers_are_copied_and_keep_scales_where_others_are_cast():
    module = nn.Sequential(nn.Linear(8, 8, bias=False))
    with runs_itself(module, quant="int8", dtype="bf16") as made:
        x = torch.randn(3, 8, dtype=torch.bfloat16)
        expected = made(x)
        twin = copy.deepcopy(module).half()
        assert twin[0].held.beside["scale"].dtype == torch.float32
        assert torch.equal(twin(x), expected)
        assert torch.equal(module[0].weight, twin[0].weight)


MODULES_REFUSED = [
    (lambda: nn.Conv1d(2, 2, 1), ConfigError, {}, "has no linear layer"),
    (lambda: nn.Linear(8, 6), ConfigError, {"weight": {"q_groups": 3}}, "q_groups=3"),
    (lambda: nn.Linear(8, 6), ConfigError, {"qkv": {"enabled": False}}, "quant.qkv.enabled"),
]


@pytest.mark.parametrize(("make", "kind", "asked", "said"), MODULES_REFUSED)
def test_a_module_that_cannot_be_quantized_is_refused_by_name(make, kind, asked, said):
    with pytest.raises(kind, match=said):
        runs_itself(nn.Sequential(make()), quant={"enabled": True, **asked})


def test_a_module_that_is_quantized_is_not_quantized_again():
    module = nn.Sequential(nn.Linear(8, 6))
    with runs_itself(module, quant="int8"):
        pass
    with pytest.raises(UnsupportedError, match="quant is given, and parts of the Sequential"):
        runs_itself(module, quant="int8")


def test_a_flax_module_is_not_quantized():
    from flax import nnx

    with pytest.raises(ConfigError, match=r"quant=.*Use backend='torch'"):
        dualinfer.init_inference(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), backend="jax", quant="int8")


def test_the_head_is_int8_whatever_the_layers_are(hf_model):
    with engine(hf_model("llama-gqa"), quant="int4") as made:
        leaves = [own for leaf in made.runner.params.leaves() for own in leaves_of(leaf)]
        schemes = [leaf.scheme.codes for leaf in leaves if isinstance(leaf, Weight) and leaf.scheme]
        assert schemes.count("int8") == 1 and schemes.count("int4") > 5
