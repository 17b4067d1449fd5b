"""Quantized weights of every scheme serve every family, on both backends and over devices.

They come by a format of the tests' own, which stands in `quantization.METHODS`: no decoder, runner
or family knows of it.
"""

import hashlib
import json
import warnings
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer import CheckpointError, UnsupportedError, quantization  # noqa: E402
from dualinfer.arrays import to_numpy  # noqa: E402
from dualinfer.backends import jax as jax_backend  # noqa: E402
from dualinfer.backends import torch as torch_backend  # noqa: E402
from dualinfer.backends.jax.ops import schemes as jax_ops  # noqa: E402
from dualinfer.backends.torch.ops import schemes as torch_ops  # noqa: E402
from dualinfer.backends.torch.params import load_params  # noqa: E402
from dualinfer.checkpoint.reader import Oddities, RowReader  # noqa: E402
from dualinfer.cli.main import app  # noqa: E402
from dualinfer.model.families import describe_model  # noqa: E402
from dualinfer.model.weights import Weight, leaves_of, named_arrays, parts_of  # noqa: E402
from dualinfer.parallel.shard import fit_blocks, whole  # noqa: E402
from dualinfer.parallel.sharding import make_plan  # noqa: E402
from dualinfer.quantization import Activation, Blocks, BlockScheme  # noqa: E402
from dualinfer.quantization.packing import NIBBLES  # noqa: E402

from .cases import (  # noqa: E402
    latent,
    make_model,
    mixtures,
)
from .cases.decoders import GENERATING  # noqa: E402
from .models import BACKENDS, VOCAB, on_backends, random_ids, randomize, relative_rms  # noqa: E402
from .quantized import (  # noqa: E402
    INT8,
    INVERSE,
    ORDER,
    ROWS,
    SCHEMES,
    TENSOR,
    UNEVEN,
    dequantize,
    mixed,
    open_matrices,
    quantize,
    random_shares,
    write,
)

# One of each family, and a scheme; what is odd among them: fused, by head, transposed, tied, types.
FAMILIES = {
    **{"llama-gqa": "mixed", "mistral-window": "int4", "qwen2": "table", "qwen3": "mxfp4"},
    **{"gpt2": "fp8 blocks", "opt-post": "int4 zeros", "gptj": "nvfp4", "gpt-neo": "act-order"},
    **{
        "neox": "uint4 zeros",
        "bloom": "fp8 blocks",
        "gemma2": "fp8 tensor",
        "gemma3": "uint4 zeros",
    },
    "bert-masked": "int8",
}
# On JAX they show what others show.
REPEATING = ("mistral-window", "qwen2", "opt-post", "gptj", "gpt-neo", "gemma3")
SPLIT = (
    *(("llama-gqa", "mixed", 2), ("gpt2", "fp8 blocks", 3)),
    pytest.param("bloom", "fp8 blocks", 2, marks=pytest.mark.slow),
    ("bert-masked", "int8", 2),
    pytest.param("llama-gqa", "act-order", 2, marks=pytest.mark.slow),
)
LIMIT = 1e-5
GREEDY = {"max_new_tokens": 6, "do_sample": False}
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.usefixtures("greedy")]


def known():
    """The format in the table."""
    return mock.patch.dict(quantization.METHODS, {"arrays": open_matrices})


@pytest.fixture(autouse=True)
def formats():
    with known():
        yield


def chooser(scheme):
    return mixed if scheme == "mixed" else lambda name: SCHEMES[scheme]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, hf_model):
    """A function from a case and a scheme to checkpoints, `quantized` and `dense`."""
    made = {}

    def get(name, scheme=None):
        scheme = scheme or FAMILIES[name]
        if (name, scheme) not in made:
            made[name, scheme] = tmp_path_factory.mktemp(name)
            write(made[name, scheme], hf_model(name), chooser(scheme))
        return made[name, scheme]

    return get


def engine(path, backend="torch", tp=1, **fields):
    parallel = {"tp_size": tp, "timeout": 150}
    return dualinfer.init_inference(
        path, backend=backend, dtype="fp32", tensor_parallel=parallel, **fields
    )


def answers_of(engine, name):
    """Logits of two rows, and their continuations."""
    ids = random_ids(2, 9)
    text = engine.generate(ids, **GREEDY) if name in GENERATING else ids
    return np.asarray(engine(ids).logits), np.asarray(text)


@pytest.fixture(scope="module")
def dense_answers(folder):
    """A function from a case and a scheme to what torch gives of its dense checkpoint."""
    made = {}

    def get(name, scheme=None):
        path = folder(name, scheme) / "dense"
        if path not in made:
            with engine(path) as dense:
                made[path] = answers_of(dense, name)
        return made[path]

    return get


def assert_same(found, expected):
    assert relative_rms(found[0], expected[0]) < LIMIT
    assert np.array_equal(found[1], expected[1])


def stored(path):
    """The tensors of a checkpoint that one device wrote."""
    return safetensors.numpy.load_file(path / "model.safetensors")


def quantized_of(params):
    return [
        own
        for leaf in params.leaves()
        for own in leaves_of(leaf)
        if isinstance(own, Weight) and own.scheme is not None
    ]


def hashes(params):
    """Of every array of quantized weights, by its name."""
    groups = {"": params.outer, **{f"{i}.": g for i, g in enumerate(params.layers)}}
    return {
        f"{prefix}{name}": hashlib.sha256(to_numpy(array).tobytes()).hexdigest()
        for prefix, group in groups.items()
        for name, array in named_arrays(
            {n: w for n, w in group.items() if getattr(w, "scheme", None) is not None}
        ).items()
    }


@pytest.mark.parametrize(("name", "backend"), on_backends(FAMILIES, REPEATING))
def test_every_family_runs_on_codes_as_on_what_they_mean(
    name, backend, folder, dense_answers, tmp_path
):
    """It holds codes alone, and saves what it read."""
    path, out = folder(name) / "quantized", tmp_path / "out"
    with engine(path, backend, save_mp_checkpoint_path=str(out)) as made:
        assert_same(answers_of(made, name), dense_answers(name))
        report, held = made.report(), quantized_of(made.runner.params)
    assert all(str(w.data.dtype).endswith("int8") for w in held) and len(held) > 5
    assert all(str(w.dtype).endswith("float32") for w in held)
    for scheme in {w.scheme for w in held}:
        assert report.ops[f"matmul, {scheme.name}"].startswith("plain")
        assert scheme.name in report.weights and scheme.name in str(report)
    written, again = stored(path), stored(out)
    assert again.keys() == written.keys()
    for tensor, array in written.items():
        assert again[tensor].dtype == array.dtype and np.array_equal(again[tensor], array)
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "arrays"


@pytest.mark.parametrize("scheme", ["mixed", "nvfp4", "mxfp4", "table", "static"])
def test_both_backends_hold_the_same_bytes(scheme, folder):
    path = folder("llama-gqa", scheme) / "quantized"
    with engine(path) as one, engine(path, "jax") as other:
        found = hashes(one.runner.params)
        assert found == hashes(other.runner.params) and len(found) > 10
        if scheme == "static":  # the input's codes are the same, too
            ids = random_ids(2, 9)
            logits = one(ids).logits
            assert relative_rms(other(ids).logits, logits) < LIMIT
            with engine(folder("llama-gqa", scheme) / "dense") as dense:
                assert relative_rms(logits, dense(ids).logits) > 1e-3


def share_of(path, name, world, out=None):
    """What a rank gives."""
    with known(), engine(path, tp=world, save_mp_checkpoint_path=out and str(out)) as made:
        return answers_of(made, name)


@pytest.mark.parametrize(("name", "scheme", "world"), SPLIT)
def test_shares_give_what_one_device_gives_and_save_it(
    name, scheme, world, folder, dense_answers, crew, tmp_path
):
    path, expected = folder(name, scheme) / "quantized", dense_answers(name, scheme)
    for answers in crew.run(share_of, path, name, world, tmp_path / "torch", world=world):
        assert_same(answers, expected)
    with engine(path, "jax", tp=world, save_mp_checkpoint_path=str(tmp_path / "jax")) as made:
        assert_same(answers_of(made, name), expected)
    for backend in BACKENDS:  # what either wrote in several files
        with engine(tmp_path / backend) as made:
            assert_same(answers_of(made, name), expected)


# HF's class, devices, and in how many parts experts are shared. Heads beside real KV heads are
# padding, or whole devices have none, as on torch where devices outnumber heads.
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14}
FALCON = {"num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": True}
FALCON |= {"num_key_value_heads": None, "intermediate_size": None}
PADDED = {
    "llama": ("Llama", GROUPED, 3, 1),
    "llama on torch": ("Llama", GROUPED, 7, 1),
    "falcon": ("Falcon", FALCON, 4, 1),
    "gpt2": ("GPT2", {"n_head": 5, "intermediate_size": None, "num_key_value_heads": None}, 4, 1),
    "qwen2_moe": ("Qwen2Moe", mixtures.ROWS["qwen2_moe"][1], 4, 2),
    "deepseek_v3": ("DeepseekV3", latent.ROWS["deepseek_v3"][1], 3, 1),
}


@pytest.mark.parametrize(("name", "joint"), [("llama", True), *((n, False) for n in PADDED)])
def test_padding_means_zero_by_any_scheme(name, joint):
    """A layer has each; its parts that lie in one array are quantized alike, or each otherwise."""
    kind, fields, size, parts = PADDED[name]
    schemes, equal = [*UNEVEN, *(SCHEMES.values() if kind == "Llama" else ())], "torch" not in name
    fields = {**mixtures.SIZES, "num_hidden_layers": len(schemes), **fields}
    config = getattr(transformers, f"{kind}Config")(**fields)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    _, table = describe_model(config.to_dict(), [kind + head])

    def choose(row, part):
        other = 0 if joint or part.index is not None else 5 * row.sources.index(part)
        return schemes[((row.layer or 0) + other) % len(schemes)]

    (codes, own), (dense, plain) = random_shares(table, choose)
    plan = make_plan(table, size, 16, equal, parts)
    for shard in plan.shards:
        if all(held.real == held.extent for layer in range(2) for held in shard.held(layer)):
            continue
        fitted = fit_blocks(own, plan.shards if equal else [shard])
        found, wanted = (
            load_params(shard, read, source, torch.float32, torch.device("cpu"))
            for read, source in ((fitted, codes), (plain, dense))
        )
        for leaf, meant in zip(found.leaves(), wanted.leaves(), strict=True):
            if isinstance(leaf, Weight):
                array = torch_ops.SCHEMES.dequantize(leaf)
                np.testing.assert_allclose(array, meant.data, rtol=1e-5, atol=0)


def hold_every_code(scheme, arrays):
    count = 1 << scheme.code.bits
    arrays["codes"].reshape(-1)[:count] = np.arange(count, dtype=np.uint8).view(
        arrays["codes"].dtype
    )


def scale_most(scheme, arrays):
    arrays["scale"][:] = ml_dtypes.finfo(arrays["scale"].dtype).max


def scale_more(scheme, arrays):
    arrays["scale"] *= arrays["scale"].dtype.type(30000)


def scale_all(scheme, arrays):
    arrays.get("outer", np.zeros(1))[:] = 3e38


def lie_far_from_zero(scheme, arrays):
    """Codes of 0 that are great numbers, since their zero point is not."""
    if "zero" in arrays:
        low, high = scheme.code.low, scheme.code.high
        arrays["codes"][:], arrays["zero"][:] = low, high
        arrays["scale"][:] = 30000


@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")  # of the reference
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "harm", [hold_every_code, scale_most, scale_more, scale_all, lie_far_from_zero]
)
def test_what_is_not_finite_once_it_is_decoded_is_told(harm, dtype):
    """Of every scheme, and of nothing else; each layer has one, and every second is harmed."""
    schemes = [s for s in (*SCHEMES.values(), *UNEVEN, BlockScheme("fp8_e5m2")) for _ in range(2)]
    fields = {**mixtures.SIZES, "num_hidden_layers": len(schemes)}
    table = describe_model(transformers.LlamaConfig(**fields).to_dict(), ["LlamaForCausalLM"])[1]

    def choose(row, _):
        return schemes[row.layer] if row.layer is not None else None

    def damage(name, arrays):
        layer = int(name.split(".")[2])
        if "down_proj" in name and layer % 2:
            harm(schemes[layer], arrays)

    (codes, plan), (dense, _) = random_shares(table, choose, damage)
    odd = {
        name
        for name in dense.names()
        if not np.isfinite(np.asarray(dense.read(name)).astype(dtype)).all()
    }
    with warnings.catch_warnings(), RowReader([whole(table)], plan, codes, dtype) as reader:
        warnings.simplefilter("ignore")
        for _ in reader:
            pass
        notes = reader.notes()
    found = reader._odd
    assert found.wrong.keys() | found.beyond.keys() == odd
    assert len(notes) == 1 + bool(found.wrong) + bool(found.beyond)
    assert odd or (harm in (scale_more, lie_far_from_zero) and dtype == "float32")


def test_values_beyond_the_dtype_are_told_apart_from_nan():
    odd = Oddities(type("Source", (), {"description": "m.safetensors"})(), "float16")
    odd.look("far", np.array([1e6, 1], np.float32))
    odd.look("near", np.array([65504, -65504], np.float32))
    odd.look("wide", np.array([1e6], np.float32), "float32")
    odd.look("none", np.array([1, np.nan], np.float32))
    with pytest.warns(UserWarning, match="bf16' or 'fp32'"), pytest.warns(match="Was the training"):
        notes = odd.notes()
    assert notes == (
        "NaN or inf in 1 of the tensors of m.safetensors: none",
        "values beyond float16 in 1 of the tensors of m.safetensors: far",
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_that_are_no_numbers_are_told_and_give_none(backend, folder, tmp_path):
    path, key = folder("llama-gqa", "fp8 tensor") / "quantized", "model.layers.1.mlp.up_proj.weight"
    tensors = stored(path)
    tensors[f"{key}.codes"][3, 5] = 0x7F
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=f"NaN or inf in 1 of the tensors .*: {key}") as warned:
        made = engine(tmp_path, backend)
    with made:
        assert any("NaN or inf in 1" in note for note in made.report().notes)
        assert np.isnan(np.asarray(made(random_ids(1, 3)).logits)).all()
    assert len(warned) == 1


def by_layer(name):
    """Outputs by activation order, by rows, and of inputs whose largest element gives the scale."""
    layer = int(name.split(".")[2]) if ".o_proj" in name else None
    return None if layer is None else (ORDER, ROWS, INVERSE)[layer]


@pytest.mark.parametrize("kind", ["Llama", "BitNet"])
def test_heads_of_padding_change_no_answer(kind, tmp_path):
    """JAX: query heads of padding read a real KV head; BitNet norms what all heads give as one."""
    torch.manual_seed(0)  # some inputs lie between two codes, which rounding tells apart
    sizes = {"num_hidden_layers": 3 if kind == "Llama" else 1, "vocab_size": VOCAB}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**mixtures.SIZES | sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    randomize(model)
    if kind == "Llama":
        write(tmp_path, model, by_layer)
        model = tmp_path / "quantized"
    with engine(model, "jax") as one, engine(model, "jax", tp=4) as four:
        if kind == "Llama":
            assert_same(answers_of(four, "llama-gqa"), answers_of(one, "llama-gqa"))
        else:
            ids = random_ids(2, 9)
            assert relative_rms(four(ids).logits, one(ids).logits) < LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_people_see_of_an_engine_has_every_part(backend, folder):
    path = folder("llama-gqa") / "quantized"
    with engine(path, backend) as made:
        if backend == "torch":
            seen = dict(made.module.named_parameters())
            assert seen["layers.0.qkv.weight_q"].dtype == torch.uint8
            assert seen["layers.0.qkv.weight_v"].dtype == torch.float32
            assert seen["layers.0.qkv.weight_k_zero"].shape[1] == 3
            return
        params, ids = made.params, random_ids(2, 9)
        qkv = params["layers"][0]["qkv"]
        logits = made.apply(params, ids).logits
        assert relative_rms(logits, made(ids).logits) < LIMIT
        qkv["weight_q_scale"] = 2 * qkv["weight_q_scale"]
        assert relative_rms(made.apply(params, ids).logits, logits) > 0.01
        assert "(int4, groups of 16)" in repr(made.model)
        own = made.model.layers[0].k
        key = "model.layers.0.self_attn.k_proj.weight"
        np.testing.assert_allclose(own, stored(folder("llama-gqa") / "dense")[key], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_read_again_come_with_their_scales(backend, hf_model, tmp_path):
    write(tmp_path, hf_model("gpt2"), lambda name: None if "mlp" in name else INT8)
    path = tmp_path / "quantized"
    with engine(path, backend) as made:
        before = named_arrays(made.runner.params.layers[1])
        before = {name: np.asarray(array).copy() for name, array in before.items()}
        tensors = {n: 2 * a if n.endswith(".scale") else a for n, a in stored(path).items()}
        (path / "model.safetensors").unlink()
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
        made.refresh()
        after = named_arrays(made.runner.params.layers[1])
        assert after.keys() == before.keys() and "qkv.weight_scale" in after
        for name, array in after.items():
            factor = 2 if name.endswith("_scale") else 1
            np.testing.assert_array_equal(np.asarray(array), factor * before[name])
        assert made.runner.params.layers[1]["up.weight"].scheme is None


@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(("scheme", "backend"), on_backends(["mixed", "static"], ["static"]))
def test_kernels_read_quantized_weights(backend, scheme, tmp_path, monkeypatch):
    """Plain ops serve what kernels do not know: an order by activation."""
    pytest.importorskip("triton")
    from dualinfer.backends.torch.ops.kernels import KernelOps as TorchOps
    from dualinfer.backends.torch.tuning.cases import tuning_cases

    from .kernels.jax_ops import interpreted_ops

    small = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 97}
    write(tmp_path, make_model("llama-gqa", **small), chooser(scheme))
    ids = random_ids(2, 9, vocab=97)
    plain = "quantized" if scheme == "static" else "dense"
    with engine(tmp_path / plain, backend) as made:
        expected = np.asarray(made(ids).logits), made.generate(ids, **GREEDY)
    monkeypatch.setattr(
        torch_backend, "_make_ops", lambda config, spec, device, _: TorchOps(device)
    )
    monkeypatch.setattr(jax_backend, "_make_ops", lambda *_: interpreted_ops())
    with engine(tmp_path / "quantized", backend, replace_with_kernel_inject=True) as made:
        assert_same((made(ids).logits, made.generate(ids, **GREEDY)), expected)
        ops = {key: how for key, how in made.report().ops.items() if key.startswith("matmul,")}
        assert all(("plain" if "order" in key else "Triton") in ops[key] for key in ops) and ops
        if backend == "torch":
            runner = made.runner
            keys = [p.key for p in tuning_cases(runner.spec, runner.params, runner.ops, (1,))]
            assert any(key[0] == "quantized_linear" for key in keys)


def test_checkpoints_that_do_not_fit_their_scheme_are_refused(folder, tmp_path):
    path = folder("bert-masked") / "quantized"
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    key = "bert.encoder.layer.0.intermediate.dense.weight"

    def refused(match, **changes):
        tensors = {**stored(path), **changes}
        tensors = {name: array for name, array in tensors.items() if array is not None}
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=match):
            engine(tmp_path)

    refused(f"missing 1: {key}.scale", **{f"{key}.scale": None})
    refused(r"its scales are \(99, 1\), expected", **{f"{key}.scale": np.ones((99, 1), np.float32)})
    refused("misshaped 1: ", **{f"{key}.codes": np.ones((3, 5), np.int8)})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "other"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"\(other\)"):
        engine(tmp_path)


def test_the_plan_counts_the_bytes_of_quantized_weights(folder):
    path = folder("llama-gqa") / "quantized"
    with engine(path) as made:
        size = made.report().parameter_bytes
    said = CliRunner().invoke(app, ["plan", str(path), "--tp", "1", "--dtype", "float32"])
    assert said.exit_code == 0, said.output
    assert f" {size / 2**10:.1f} KiB " in said.output, said.output


def test_every_part_of_a_leaf_is_found_by_its_name():
    beside = {"scale": np.ones((2, 1))}
    weight = Weight(np.ones((2, 3), np.int8), ("out", "in"), INT8, beside, "float32")
    assert list(parts_of(weight)) == ["data", "scale"]
    assert list(named_arrays({"a.weight": weight, "a.bias": np.ones(2)})) == [
        *("a.weight", "a.weight_scale", "a.bias")
    ]


def test_packed_codes_lie_in_the_order_that_kernels_read():
    """Nibble j of 32-bit word c is column 4 j + c, of 32."""
    codes = np.random.default_rng(0).integers(0, 16, (3, 60), np.uint8)
    wide = np.pad(codes, ((0, 0), (0, 4)))
    packed = BlockScheme("uint4").code.pack(codes)
    words = packed.view("<u4").reshape(3, 2, 4)
    for j in range(8):
        for c in range(4):
            np.testing.assert_array_equal(
                words[..., c] >> (4 * j) & 15, wide.reshape(3, 2, 32)[..., 4 * j + c]
            )
    np.testing.assert_array_equal(NIBBLES.unpack(packed, np.stack), wide)
    signed = BlockScheme("int4").code.pack(codes.view(np.int8) - np.int8(8))
    np.testing.assert_array_equal(NIBBLES.unpack(signed, np.stack)[:, :60], codes)
    assert (NIBBLES.unpack(signed, np.stack)[:, 60:] == 8).all()  # zero
    assert [NIBBLES.width(n) for n in (1, 32, 33)] == [16, 16, 32]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scheme", [INT8, ROWS, TENSOR], ids=lambda scheme: scheme.name)
def test_products_of_large_inputs_are_those_of_the_values(scheme, dtype):
    """Sums of codes would pass the largest float16, and those of what they mean do not."""
    rng = np.random.default_rng(0)
    arrays = quantize(scheme, 0.01 * rng.standard_normal((24, 512)).astype(np.float32))
    x = (100 * rng.standard_normal((3, 512))).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = x @ dequantize(scheme, arrays).T
    held = {"data": scheme.code.pack(arrays.pop("codes")), **arrays}
    step = float(ml_dtypes.finfo(dtype).eps)
    for to, ops in ((torch.from_numpy, torch_ops.SCHEMES), (jax.numpy.asarray, jax_ops.SCHEMES)):
        kind = getattr(torch if ops is torch_ops.SCHEMES else jax.numpy, dtype)
        eight = {n: a.view(np.uint8) if n == "zero" else a for n, a in held.items()}
        beside = {name: to(np.ascontiguousarray(a)) for name, a in eight.items()}
        data, blocks = beside.pop("data"), Blocks(scheme.rows, scheme.columns, 512)
        weight = Weight(data, ("out", "in"), scheme, beside, kind, blocks)
        given = to(x).to(kind) if ops is torch_ops.SCHEMES else to(x).astype(kind)
        found = ops.product(given, weight, given.dtype)
        found = found.float().numpy() if ops is torch_ops.SCHEMES else np.asarray(found, np.float32)
        assert relative_rms(found, expected) < max(2 * step, 1e-5)


INPUTS = {  # ours, and compressed-tensors' arguments of the same
    "int8": (Activation("int8"), {"type": "int", "strategy": "token"}),
    "zero points": (
        Activation("int8", zeros=True),
        {"type": "int", "strategy": "token", "symmetric": False},
    ),
    "fp8": (Activation("fp8_e4m3"), {"type": "float", "strategy": "token"}),
    "fp8 groups": (
        Activation("fp8_e4m3", block=32),
        {"type": "float", "strategy": "group", "group_size": 32},
    ),
    "nvfp4": (
        Activation("fp4_e2m1", block=16, outer=True),
        {
            **{"type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
            **{"num_bits": 4, "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn},
        },
    ),
    "mxfp4": (
        Activation("fp4_e2m1", block=32, powers=True),
        {
            **{"type": "float", "strategy": "group", "group_size": 32, "num_bits": 4},
            **{"scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
        },
    ),
    "static": (
        Activation("fp8_e4m3", dynamic=False),
        {"type": "float", "strategy": "tensor", "dynamic": False},
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_are_quantized_as_compressed_tensors_does(kind, dtype):
    """Bit for bit, on both backends."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    how, said = INPUTS[kind]
    args = QuantizationArgs(**{"num_bits": 8, "dynamic": True, "symmetric": True, **said})
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 7, 96)) * np.exp(rng.standard_normal((2, 7, 1)))
    x[0, 0] = 0
    x = torch.tensor(x).to(getattr(torch, dtype))
    factor = torch.tensor([256.0]) if how.outer else None
    given = {"input": 1 / factor.numpy()[0]} if how.outer else {}
    if how.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), factor)
    else:
        scale, zero = torch.tensor([0.02]).to(x.dtype), None
        given = {"input": scale.float().numpy()[0]}
    expected = fake_quantize(x, scale, zero, args, factor).float().numpy()
    scheme = BlockScheme("int8", activation=how)
    own = Weight(None, ("out", "in"), scheme, {n: torch.tensor(a) for n, a in given.items()})
    found = torch_ops.SCHEMES.quantize_input(x, own)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found.float().numpy(), expected)
    own = Weight(None, ("out", "in"), scheme, {n: jax.numpy.asarray(a) for n, a in given.items()})
    call = jax.jit(lambda x: jax_ops.SCHEMES.quantize_input(x, own).astype("float32"))
    found = call(jax.numpy.asarray(x.float().numpy(), dtype))
    np.testing.assert_array_equal(np.asarray(found), expected)
