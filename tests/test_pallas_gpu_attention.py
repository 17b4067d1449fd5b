"""The JAX decoder with a token's attention by Mosaic GPU, simulated, against plain XLA."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.backends import jax as backend  # noqa: E402
from dualinfer.backends.jax import ahead  # noqa: E402
from dualinfer.backends.jax.ops.pallas_gpu import PallasGpuOps  # noqa: E402
from dualinfer.backends.jax.ops.plain import IMPLEMENTATIONS  # noqa: E402
from dualinfer.kernels.pallas import token_attention  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import noted_logits, relative_rms, slow_but  # noqa: E402

_MODEL = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 64}
_MODEL |= {"num_key_value_heads": 2, "num_hidden_layers": 1}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
VOCAB = 97
LENGTHS = {"one": (61,), "three": (5, 70, 33)}  # the first goes on in another tile
RESERVED: dict[str, Any] = {
    "grown": None,
    "slots": {"slots": 3, "tokens": 100},
    "blocks": {"slots": 3, "cache_tokens": 640},
}
CASES = [(caches, batch) for caches in RESERVED for batch in LENGTHS]
init_inference: Any = dualinfer.init_inference


@pytest.fixture(scope="module")
def engines():
    """An engine by kernels for a GPU, simulated, and one by plain XLA."""
    model = make_model("llama-gqa", vocab_size=VOCAB, **_MODEL)
    simulated = {"sms": 2, "interpret": InterpretGPUParams()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_make_ops", lambda *args: PallasGpuOps(args[3], **simulated))
        fast = init_inference(model, backend="jax", dtype="bf16")
    assert "Mosaic GPU" in fast.report().ops["decode_attention"]
    return fast, init_inference(model, backend="jax", dtype="bf16", kernels="xla")


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("case", slow_but(CASES[1::2], CASES), ids=", ".join)
def test_texts_and_logits_are_those_of_plain_xla(case, engines, monkeypatch):
    """In caches of slots that grow or are reserved, and in blocks."""
    caches, batch = case
    calls, attend = [], token_attention.attend

    def noted(*args: Any, table: Any, **how: Any) -> Any:
        calls.append(table is not None)
        return attend(*args, table=table, **how)

    monkeypatch.setattr(token_attention, "attend", noted)
    draw = np.random.default_rng(2)
    prompts = [draw.integers(3, VOCAB, n).tolist() for n in LENGTHS[batch]]
    texts, logits = [], []
    for engine in engines:
        if RESERVED[caches] is not None:
            engine.reserve(**RESERVED[caches], prefix_cache=False)
        with noted_logits("jax") as found:
            texts.append(engine.generate(prompts, max_new_tokens=4, **GREEDY))
        logits.append(np.stack([found[at][: len(prompts)] for at in sorted(found)]))
    assert calls and set(calls) == {caches == "blocks"}
    np.testing.assert_array_equal(texts[0], texts[1])
    assert len(logits[0]) >= 3 and relative_rms(*logits) < 1e-2


def test_a_token_of_two_devices_lowers_with_its_cache_in_place(monkeypatch):
    """Within a shard_map, where each device has heads of its own; a put for each layer's pair."""
    model = make_model("llama-gqa", vocab_size=VOCAB, **_MODEL)
    monkeypatch.setattr(backend, "_make_ops", lambda *args: PallasGpuOps(args[3]))
    split: dict[str, Any] = {"tensor_parallel": {"tp_size": 2}}
    engine = init_inference(model, backend="jax", dtype="bf16", **split)
    jobs: list[Any] = ahead.jobs(engine.runner, ahead.Wanted((3,), (40,), 4), 4)
    (job,) = [job for job in jobs if job.key[0] == "decode"]
    traced = jax.jit(job.function).trace(*job.args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2  # put and attend: these sizes' products are XLA's
    assert text.count("output_operand_alias<") == 2


@pytest.mark.parametrize("why", ["no Hopper", "codes", "odd heads"])
def test_what_no_kernel_attends_to_is_told(why, monkeypatch):
    sizes = _MODEL | {"head_dim": 80 if why == "odd heads" else 64}
    model = make_model("llama-gqa", vocab_size=VOCAB, **sizes)
    how = {"hopper": why != "no Hopper"}
    monkeypatch.setattr(backend, "_make_ops", lambda *args: PallasGpuOps(args[3], **how))
    codes = {"kv_cache_dtype": "int8"} if why == "codes" else {}
    engine = init_inference(model, backend="jax", dtype="bf16", **codes)
    assert engine.report().ops["decode_attention"] == IMPLEMENTATIONS["decode_attention"]
