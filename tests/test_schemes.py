"""A scheme of the tests' own, int8 for each row, enters by tables alone and serves every family.

No decoder, runner or family knows of it: it stands in `quantization.METHODS`, and in `SCHEMES` of
each backend's primitives.
"""

import json
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer import CheckpointError, UnsupportedError, quantization  # noqa: E402
from dualinfer.backends import jax as jax_backend  # noqa: E402
from dualinfer.backends import torch as torch_backend  # noqa: E402
from dualinfer.backends.jax.ops import primitives as jax_ops  # noqa: E402
from dualinfer.backends.schemes import Arithmetic  # noqa: E402
from dualinfer.backends.torch.ops import primitives as torch_ops  # noqa: E402
from dualinfer.checkpoint.sources import open_module  # noqa: E402
from dualinfer.cli.main import app  # noqa: E402
from dualinfer.model.families import describe_model  # noqa: E402
from dualinfer.model.weights import Weight, make_load_plan, named_arrays, parts_of  # noqa: E402
from dualinfer.quantization import Stored  # noqa: E402

from .models import BACKENDS, GENERATING, make_model, random_ids, relative_rms  # noqa: E402

# One of each family; what is odd among them: fused, by head, transposed, tied, types, widths.
FAMILIES = (
    *("llama-gqa", "mistral-window", "qwen2", "qwen3", "gpt2", "opt-post", "gptj", "gpt-neo"),
    *("neox", "bloom", "gemma2", "gemma3", "bert-masked"),
)
# On JAX they show what others show.
REPEATING = ("mistral-window", "qwen2", "qwen3", "opt-post", "gptj", "gpt-neo")
SPLIT = ("llama-gqa", "gpt2", "bloom", "bert-masked")
LIMIT = 1e-5
GREEDY = {"max_new_tokens": 6, "do_sample": False}
pytestmark = pytest.mark.xdist_group("ranks")


@dataclass(frozen=True)
class Int8Rows:
    """int8 of a weight [out, in], and a float32 scale for each row."""

    name = "int8 rows"

    def stored(self, name, axes):
        scales = Stored("scale", f"{name}_scale", axes[:-1], ("float32",))
        return Stored("data", name, axes, ("int8",)), scales

    def shape(self, data):
        return data

    def dequantize(self, data, scale, zero):
        return data.astype(np.float32) * scale[..., None]


INT8 = Int8Rows()


def choose(config):
    return lambda name: None if name in config["plain"] else INT8


def refuse(weight):
    raise AssertionError(f"a weight of {weight.shape} was made dense")


def torch_embed(ids, weight):
    return F.embedding(ids, weight.data).to(weight.dtype) * F.embedding(ids, weight.scale[:, None])


def torch_product(x, weight):
    return F.linear(x, weight.data.to(x.dtype)) * weight.scale


def jax_embed(ids, weight):
    rows, scales = (jnp.take(a, ids, axis=0, mode="clip") for a in (weight.data, weight.scale))
    return rows.astype(weight.dtype) * scales[..., None]


def jax_product(x, weight, dtype):
    highest = lax.Precision.HIGHEST
    y = jnp.einsum("...i,oi->...o", x, weight.data.astype(x.dtype), precision=highest)
    return (y * weight.scale).astype(dtype)


TORCH = Arithmetic("plain torch, int8", refuse, torch_product, torch_embed)
JAX = Arithmetic("plain XLA, int8", refuse, jax_product, jax_embed)


@contextmanager
def known(for_torch=TORCH, for_jax=JAX):
    """The scheme in all tables; what makes a weight dense raises."""
    tables = (
        (quantization.METHODS, "int8-rows", choose),
        (torch_ops.SCHEMES, INT8.name, for_torch),
        (jax_ops.SCHEMES, INT8.name, for_jax),
    )
    with ExitStack() as stack:
        for table, name, entry in tables:
            stack.enter_context(mock.patch.dict(table, {name: entry}))
        yield


@pytest.fixture(autouse=True)
def scheme():
    with known():
        yield


def write(folder, model, plain=()):
    """`model` twice: quantized, and in float32 what that means."""
    config = model.config.to_dict()
    architectures = [type(model).__name__]
    _, table = describe_model(config, architectures)
    source = open_module(model)
    quantized, dense = {}, {}
    for row, names in make_load_plan(table, source).rows:
        for part, name in zip(row.sources, names, strict=True):
            array = source.read(name).numpy()
            if not row.is_weight or part.name in plain:
                quantized[part.name] = dense[part.name] = array
                continue
            order = row.permutation(part)
            matrix = array.transpose(order)
            scale = (np.abs(matrix).max(-1) / 127).astype(np.float32)
            data = np.rint(matrix / scale[:, None]).astype(np.int8)
            quantized |= {part.name: data, f"{part.name}_scale": scale}
            dense[part.name] = INT8.dequantize(data, scale, None).transpose(np.argsort(order))
    said = {"quantization_config": {"quant_method": "int8-rows", "plain": list(plain)}}
    for kind, tensors, more in (("int8", quantized, said), ("dense", dense, {})):
        (folder / kind).mkdir(parents=True)
        tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        safetensors.numpy.save_file(tensors, folder / kind / "model.safetensors")
        written = json.dumps({**config, "architectures": architectures, **more})
        (folder / kind / "config.json").write_text(written)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, hf_model):
    """A function from a case to a folder with its checkpoints, `int8` and `dense`."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write(made[name], hf_model(name))
        return made[name]

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
    """A function from a case to what torch gives of its dense checkpoint."""
    made = {}

    def get(name):
        if name not in made:
            with engine(folder(name) / "dense") as dense:
                made[name] = answers_of(dense, name)
        return made[name]

    return get


def assert_same(found, expected):
    assert relative_rms(found[0], expected[0]) < LIMIT
    assert np.array_equal(found[1], expected[1])


def stored(path):
    """The tensors of a checkpoint that one device wrote."""
    return safetensors.numpy.load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(n, b, marks=[pytest.mark.slow] if b == "jax" and n in REPEATING else [])
        for n in FAMILIES
        for b in BACKENDS
    ],
)
def test_every_family_runs_on_int8_as_on_what_it_means(
    name, backend, folder, dense_answers, tmp_path
):
    """It holds int8 alone, and saves what it read."""
    path, out = folder(name) / "int8", tmp_path / "out"
    with engine(path, backend, save_mp_checkpoint_path=str(out)) as made:
        assert_same(answers_of(made, name), dense_answers(name))
        report = made.report()
        held = [w for w in made.runner.params.leaves() if isinstance(w, Weight)]
    assert all(str(w.data.dtype).endswith("int8") for w in held) and len(held) > 5
    assert all(str(w.dtype).endswith("float32") for w in held)
    written = stored(path)
    assert report.parameter_bytes == sum(array.nbytes for array in written.values())
    scales = sum(a.size for n, a in written.items() if n.endswith("_scale"))
    assert report.parameters == sum(array.size for array in written.values()) - scales
    assert report.ops["matmul, int8 rows"].endswith("int8")
    again = stored(out)
    assert again.keys() == written.keys()
    for tensor, array in written.items():
        assert again[tensor].dtype == array.dtype and np.array_equal(again[tensor], array)
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "int8-rows", "plain": []}


def share_of(path, name, out=None):
    """What a rank of two gives, and the scales that it holds of its first layer."""
    with known(), engine(path, tp=2, save_mp_checkpoint_path=out and str(out)) as made:
        layer = made.runner.params.layers[0]
        shapes = {n: tuple(layer[f"{n}.weight"].scale.shape) for n in ("qkv", "down")}
        return answers_of(made, name), shapes


@pytest.mark.parametrize("name", SPLIT)
def test_shares_give_what_one_device_gives_and_save_it(name, folder, dense_answers, crew, tmp_path):
    path, expected = folder(name) / "int8", dense_answers(name)
    with engine(path) as made:
        layer = made.runner.params.layers[0]
        rows = {n: layer[f"{n}.weight"].shape[0] for n in ("qkv", "down")}
    for answers, shapes in crew.run(share_of, path, name, tmp_path / "torch", world=2):
        assert_same(answers, expected)
        assert shapes["qkv"][0] < rows["qkv"] and shapes["down"] == (rows["down"],)
    with engine(path, "jax", tp=2, save_mp_checkpoint_path=str(tmp_path / "jax")) as made:
        assert_same(answers_of(made, name), expected)
    for backend in BACKENDS:  # what either wrote in two files
        with engine(tmp_path / backend) as made:
            assert_same(answers_of(made, name), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_people_see_of_an_engine_has_every_part(backend, folder):
    path = folder("llama-gqa") / "int8"
    with engine(path, backend) as made:
        if backend == "torch":
            seen = dict(made.module.named_parameters())
            assert seen["layers.0.qkv.weight"].dtype == torch.int8
            assert seen["layers.0.qkv.weight_scale"].shape == (960,)
            return
        params, ids = made.params, random_ids(2, 9)
        qkv = params["layers"][0]["qkv"]
        assert (qkv["weight"].dtype, qkv["weight_scale"].shape) == ("int8", (960,))
        logits = made.apply(params, ids).logits
        assert relative_rms(logits, made(ids).logits) < LIMIT
        qkv["weight_scale"] = 2 * qkv["weight_scale"]
        assert relative_rms(made.apply(params, ids).logits, logits) > 0.01
        assert "qkv.weight: int8[q+k+v=960, embed=96] (int8 rows)" in repr(made.model)
        assert "qkv.weight_scale: float32[q+k+v=960]" in repr(made.model)

        def dequantize(weight):
            return weight.data.astype(weight.dtype) * weight.scale[:, None]

        with known(for_jax=JAX._replace(dequantize=dequantize)):
            own = made.model.layers[0].k
        key = "model.layers.0.self_attn.k_proj.weight"
        np.testing.assert_array_equal(own, stored(folder("llama-gqa") / "dense")[key])


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_read_again_come_with_their_scales(backend, hf_model, tmp_path):
    write(tmp_path, hf_model("gpt2"))
    path = tmp_path / "int8"
    with engine(path, backend) as made:
        before = named_arrays(made.runner.params.layers[1])
        before = {name: np.asarray(array).copy() for name, array in before.items()}
        tensors = {n: 2 * a if n.endswith("_scale") else a for n, a in stored(path).items()}
        (path / "model.safetensors").unlink()
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
        made.refresh()
        after = named_arrays(made.runner.params.layers[1])
        assert after.keys() == before.keys() and "qkv.weight_scale" in after
        for name, array in after.items():
            factor = 2 if name.endswith("_scale") else 1
            np.testing.assert_array_equal(np.asarray(array), factor * before[name])
        shown = (
            made.module.layers[1].qkv.weight_scale
            if backend == "jax"
            else (made.module.get_parameter("layers.1.qkv.weight_scale"))
        )
        np.testing.assert_array_equal(np.asarray(shown), 2 * before["qkv.weight_scale"])


def test_plain_weights_beside_quantized_ones_stay_plain(hf_model, tmp_path):
    """As lm_head in most checkpoints; without a product of its own a scheme's values serve."""
    plain = ("transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight")
    write(tmp_path, hf_model("gpt2"), plain)

    def dequantize(weight):
        return weight.data.to(weight.dtype) * weight.scale[:, None]

    arithmetic = Arithmetic("plain torch, over their values", dequantize)
    with known(for_torch=arithmetic), engine(tmp_path / "int8") as made:
        found = answers_of(made, "gpt2")
        schemes = [layer["up.weight"].scheme for layer in made.runner.params.layers]
    assert schemes == [INT8, None]
    with engine(tmp_path / "dense") as made:
        assert_same(found, answers_of(made, "gpt2"))


@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_leave_quantized_weights_to_plain_ops(backend, tmp_path, monkeypatch):
    """And run around them: norms, attention, sampling."""
    pytest.importorskip("triton")
    from dualinfer.backends.jax.ops.kernels import KernelOps as JaxOps
    from dualinfer.backends.torch.ops.kernels import KernelOps as TorchOps
    from dualinfer.backends.torch.tuning.cases import tuning_cases

    small = {"n_embd": 24, "n_head": 2, "n_layer": 1, "vocab_size": 97}
    write(tmp_path, make_model("gpt2", **small))
    ids = random_ids(2, 9, vocab=97)
    with engine(tmp_path / "dense", backend) as dense:
        expected = np.asarray(dense(ids).logits), dense.generate(ids, **GREEDY)
    monkeypatch.setattr(
        torch_backend, "_make_ops", lambda config, spec, device, _: TorchOps(device)
    )
    monkeypatch.setattr(jax_backend, "_make_ops", lambda *_: JaxOps(2, interpret=True))
    with engine(tmp_path / "int8", backend, replace_with_kernel_inject=True) as made:
        assert_same((made(ids).logits, made.generate(ids, **GREEDY)), expected)
        ops = made.report().ops
        assert ops["matmul, int8 rows"].startswith("plain") and "fused" in ops["matmul"]
        if backend == "torch":
            runner = made.runner
            keys = [p.key for p in tuning_cases(runner.spec, runner.params, runner.ops, (1,))]
            assert keys and not any("linear" in key for key in keys)


def test_checkpoints_that_do_not_fit_their_scheme_are_refused(folder, tmp_path):
    path = folder("llama-gqa")
    (tmp_path / "config.json").write_bytes((path / "int8" / "config.json").read_bytes())
    key = "model.layers.0.mlp.up_proj.weight"

    def refused(error, match, **changes):
        tensors = {**stored(path / "int8"), **changes}
        tensors = {name: array for name, array in tensors.items() if array is not None}
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(error, match=match):
            engine(tmp_path)

    whole = stored(path / "dense")[key]
    refused(CheckpointError, f"missing 1: {key}_scale", **{f"{key}_scale": None})
    refused(CheckpointError, "up_proj.weight is float32, expected int8", **{key: whole})
    short = np.ones(99, np.float32)
    refused(
        CheckpointError,
        r"up_proj.weight_scale is \(99,\), expected \(100,\)",
        **{f"{key}_scale": short},
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["plain"] = [key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"gate_proj.* are one weight here"):
        engine(tmp_path)
    for backend, table in (("torch", torch_ops.SCHEMES), ("jax", jax_ops.SCHEMES)):
        with mock.patch.dict(table, clear=True), pytest.raises(UnsupportedError, match="int8 rows"):
            engine(path / "int8", backend)


def test_the_plan_counts_the_bytes_of_quantized_weights(folder):
    path = folder("llama-gqa") / "int8"
    size = sum(array.nbytes for array in stored(path).values())
    said = CliRunner().invoke(app, ["plan", str(path), "--tp", "1", "--dtype", "float32"])
    assert said.exit_code == 0, said.output
    assert f" {size / 2**10:.1f} KiB " in said.output, said.output


def test_every_part_of_a_leaf_is_found_by_its_name():
    weight = Weight(np.ones((2, 3), np.int8), ("out", "in"), INT8, np.ones(2), stands_for="float32")
    assert list(parts_of(weight)) == ["data", "scale"]
    assert list(named_arrays({"a.weight": weight, "a.bias": np.ones(2)})) == [
        *("a.weight", "a.weight_scale", "a.bias")
    ]
