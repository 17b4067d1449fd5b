"""Every step of models by Pallas' kernels, lowered without a device; no kernel is run.

What is shown is that JAX lowers each kernel to Mosaic's dialect, with blocks that a TPU's tiles
allow, and what each holds. tests/test_tpu.py compiles them, where libtpu is installed.
"""

import re
from typing import Any

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import dualinfer  # noqa: E402
from dualinfer.backends import jax as backend  # noqa: E402
from dualinfer.backends.jax import ahead  # noqa: E402
from dualinfer.backends.jax.ops.pallas import PallasOps  # noqa: E402
from dualinfer.backends.jax.ops.pallas_gpu import PallasGpuOps  # noqa: E402
from dualinfer.kernels.pallas import launch  # noqa: E402

from ..cases import make_model  # noqa: E402
from ..models import slow_but  # noqa: E402
from ..test_kernel_ops import CASES, MIXTURES, VOCAB, tiny  # noqa: E402

_LLAMA = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2}
_LLAMA |= {"num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 128}
# What a step of each kind is made of, besides sampling.
DENSE = {"prefill": {"attention", "product"}, "decode": {"append", "attention", "product"}}


@pytest.mark.parametrize("quant", [None, "int8", "fp8", "int8_w8a8", "int4"])
@pytest.mark.parametrize("count", [1, 3])
def test_products_lower_for_a_gpu_by_mosaic(quant, count, monkeypatch):
    """Those of steps and of prompts: of qkv, out, gate with up, down and the head.

    A token has its attention besides, behind the append of its key and value.
    """
    assert calls_of_a_gpu(monkeypatch, count, quant=quant) == {"prefill": 5, "decode": 7}


@pytest.mark.parametrize(("quant", "calls"), [("int8", 5), ("int4", 1)])
def test_products_of_a_row_lower_for_other_gpus(quant, calls, monkeypatch):
    """Of codes with a scale for each row; of a prompt the head alone, which reads one token."""
    found = calls_of_a_gpu(monkeypatch, quant=quant, hopper=False)
    assert found == {"prefill": 1, "decode": calls}


def calls_of_a_gpu(monkeypatch: pytest.MonkeyPatch, *asked: Any, **more: Any) -> dict[str, int]:
    """Kernels that steps call, by the steps' names, as lowered for a GPU; see `steps_of_a_gpu`."""
    calls = {}
    for name, (function, args) in steps_of_a_gpu(monkeypatch, *asked, **more).items():
        exported = jax.export.export(jax.jit(function), platforms=["cuda"])(*args)
        calls[name] = exported.mlir_module().count("@mosaic_gpu")
    return calls


def steps_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, count: int = 1, hopper: bool = True, **more: Any
) -> dict[str, tuple[Any, Any]]:
    """Steps of so many sequences by Mosaic GPU, and their arguments' shapes, by their names."""
    model, steps = make_model("llama-gqa", vocab_size=768, **_LLAMA), {}
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_make_ops", lambda *args: PallasGpuOps(args[3], hopper=hopper))
        engine = dualinfer.init_inference(model, backend="jax", dtype="bf16", **more)
    for job in ahead.jobs(engine.runner, ahead.Wanted((count,), (40,), 4), 4):
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.args)
        key: Any = job.key
        steps[key[0]] = job.function, args
    return steps


def lowered(
    model: Any, monkeypatch: pytest.MonkeyPatch, dtype: str = "bf16", **more: Any
) -> dict[str, set[str]]:
    """The kernels of a model's steps by the steps' names, as they are lowered for a TPU."""
    counts: dict[str, int] = {}
    check = launch.check_room

    def counted(name: str, *what: Any) -> int:
        counts[name] = check(name, *what)
        return counts[name]

    found: dict[str, set[str]] = {}
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_make_ops", lambda *args: PallasOps(args[3]))
        patch.setattr(launch, "check_room", counted)
        engine = dualinfer.init_inference(model, backend="jax", dtype=dtype, **more)
        for job in ahead.jobs(engine.runner, ahead.Wanted((2,), (40,), 4), 4):
            args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.args)
            exported = jax.export.export(jax.jit(job.function), platforms=["tpu"])(*args)
            assert exported.platforms == ("tpu",)
            kernels = re.findall(r'kernel_name = "(\w+)"', exported.mlir_module())
            key: Any = job.key
            found[key[0]] = set(kernels) - {"thresholds"}
            assert "thresholds" in kernels
    assert counts and max(counts.values()) <= launch.BUDGET
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_steps_of_a_tpus_sizes_lower(dtype, monkeypatch):
    """Heads of 128 and features in multiples of 128."""
    model = make_model("llama-gqa", vocab_size=512, **_LLAMA)
    assert lowered(model, monkeypatch, dtype) == DENSE


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_steps_with_codes_lower(quant, monkeypatch):
    """Weights in codes, and keys and values in codes, whose turn is XLA's."""
    model = make_model("llama-gqa", vocab_size=512, **_LLAMA)
    found = lowered(model, monkeypatch, quant=quant, kv_cache_dtype="int8")
    both = {"attention", "norm", "product"}
    assert found == {"prefill": both, "decode": both | {"put"}}


@pytest.mark.parametrize(
    ("name", "kernel"), [("falcon with alibi", "attention"), ("mamba2", "state")]
)
def test_other_steps_lower(name, kernel, monkeypatch):
    """Scores with numbers of distances, which come by blocks; a token into states."""
    assert kernel in lowered(make_model(name), monkeypatch)["decode"]


# tests/test_tpu.py compiles steps of every family, where libtpu is.
ODD = ("gpt_oss", "olmoe, clipped", "bloom", "gemma2")


@pytest.mark.parametrize("name", slow_but(ODD[:1], ODD))
def test_steps_of_odd_sizes_lower(name, monkeypatch):
    """Of the sizes of tests, which are no multiples of anything."""
    found = lowered(tiny(name, **(CASES | MIXTURES)[name]), monkeypatch)
    own = {"append"} if "clipped" in name else set()  # XLA's, behind the clip
    assert all(DENSE[step] - own <= kernels for step, kernels in found.items())
    assert ("experts" in found["decode"]) == (name in MIXTURES)
    assert VOCAB % launch.LANES
