"""The torch decoder on Triton's kernels, interpreted on the CPU, against the one on plain torch."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import dualinfer  # noqa: E402
from dualinfer.backends import served  # noqa: E402
from dualinfer.backends import torch as backend  # noqa: E402
from dualinfer.backends.torch.ops.kernels import KernelOps  # noqa: E402
from dualinfer.kernels.triton import linear, norm  # noqa: E402
from dualinfer.model.spec import Norm  # noqa: E402
from dualinfer.ops.contract import NormOf  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import relative_rms, slow_but  # noqa: E402

VOCAB = 97
# The interpreter takes milliseconds for each program: few heads, and no more layers than kinds.
_LLAMA = {"hidden_size": 24, "intermediate_size": 33, "num_attention_heads": 2}
_LLAMA |= {"num_key_value_heads": 1, "num_hidden_layers": 1}
_OPT = {"hidden_size": 24, "ffn_dim": 33, "num_attention_heads": 2, "num_hidden_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "llama-gqa": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": {"n_embd": 24, "n_head": 2, "n_layer": 1},
    "opt": _OPT | {"word_embed_proj_dim": 24},
    "opt-post": _OPT | {"word_embed_proj_dim": 20},
    "gptj": {"n_embd": 28, "n_head": 2, "n_layer": 1},
    "gpt-neo": {"hidden_size": 24, "num_heads": 2},
    "neox": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
    "bloom": {"hidden_size": 30, "n_head": 3, "n_layer": 1},
    "gemma2": {"hidden_size": 24, "intermediate_size": 33, "num_attention_heads": 2}
    | {"num_key_value_heads": 1},
}
# Sinks in both kernels of attention, beside windows that are shorter than the batch.
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1},
    "llama4, one expert": {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1},
    "olmoe, clipped": {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    | {"num_hidden_layers": 1, "intermediate_size": 7},
    "phimoe": {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    | {"num_hidden_layers": 1, "intermediate_size": 7},
}
# A gate on what heads give; a mean of experts and shared ones, which are not in one launch; a bias
# of logits for the choice.
MIXTURES |= dict.fromkeys(("afmoe", "cohere2_moe", "kolibri1"), MIXTURES["gpt_oss"])
ENCODER = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
INJECTED = {"dtype": "fp32", "replace_with_kernel_inject": True}
NO_EOS = {"eos_token_id": None, "pad_token_id": 0}
# The interpreter divides in NumPy, which warns of what IEEE 754 defines.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")


def tiny(name: str, **changes: Any) -> Any:
    """A tiny HF model, or mixture, with a small vocabulary."""
    return make_model(name, vocab_size=VOCAB, **changes)


@pytest.fixture
def engines(monkeypatch):
    """A function from a tiny model to engines of it: by the kernels, and by plain torch."""

    def make(name: str, **changes: Any):
        model = tiny(name, **changes)
        plain = dualinfer.init_inference(model, use_triton=False, **INJECTED)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_make_ops", lambda config, spec, device, _: KernelOps(device))
            fast = dualinfer.init_inference(model, **INJECTED)
        assert all("Triton" in fast.report().ops[op] for op in ("matmul", "router"))
        assert "Triton" not in plain.report().ops["matmul"]
        return fast, plain

    return make


def batch(tokens: int = 14) -> dict[str, np.ndarray]:
    """Two rows of ids, the second one with padding on its left."""
    ids = np.random.default_rng(1).integers(3, VOCAB, (2, tokens))
    mask = np.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_same_outputs(fast: Any, plain: Any, call: dict[str, np.ndarray], name: str) -> None:
    seen = call["attention_mask"] > 0
    found, wanted = (np.asarray(e(**call)[name])[seen] for e in (fast, plain))
    assert relative_rms(found, wanted) < 3e-6


# Kolibri's kernels are interpreted on JAX, whose launches are the same.
@pytest.mark.parametrize("name", slow_but(CASES, [n for n in CASES | MIXTURES if n != "kolibri1"]))
def test_kernels_give_what_plain_torch_gives(name, engines, monkeypatch):
    fast, plain = engines(name, **(CASES | MIXTURES)[name])
    call = batch()
    with monkeypatch.context() as patch:  # float32's many rows go to cuBLAS else
        patch.setattr(linear, "serves", lambda *shape: True)
        assert_same_outputs(fast, plain, call, "logits")
    # One row, whose norms are fused into the products; then two, the second one shorter.
    for prompts in ({"input_ids": call["input_ids"][:1]}, call):
        made, expected = (
            np.asarray(e.generate(**prompts, max_new_tokens=3, do_sample=False, **NO_EOS))
            for e in (fast, plain)
        )
        np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("name", ["bert", "bert-masked"])
def test_encoders_take_masks_and_token_types(name, engines, monkeypatch):
    fast, plain = engines(name, **ENCODER)
    call = batch()
    call["token_type_ids"] = (np.arange(14) > 6).astype(np.int64)[None].repeat(2, 0)
    output = "logits" if name == "bert-masked" else "last_hidden_state"
    assert_same_outputs(fast, plain, call, output)
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    assert_same_outputs(fast, plain, call, output)


@pytest.mark.parametrize(
    "sampling",
    [
        {"seed": 3},
        {"seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
        {"seed": 4, "repetition_penalty": 1.4, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_sampled_text_is_that_of_the_plain_sampler(sampling, engines):
    fast, plain = engines("llama-gqa", **CASES["llama-gqa"])
    made, expected = (
        np.asarray(e.generate(**batch(7), max_new_tokens=6, do_sample=True, **sampling))
        for e in (fast, plain)
    )
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("made", [False, True])
def test_a_norm_whose_weight_a_pass_computes_reads_nothing_early(made, monkeypatch):
    """The kernel in front may be the one that writes the weight."""
    ops, seen = KernelOps(torch.device("cpu")), []
    monkeypatch.setattr(ops, "pdl", True)
    monkeypatch.setattr(norm, "rms_norm", lambda *_, pdl, **__: seen.append(pdl))
    ops.norm(torch.ones(2, 24), NormOf(Norm("rms", 1e-6), torch.ones(24), None, made))
    assert seen == [not made]


def test_kernels_are_asked_of_each_weight_once(monkeypatch):
    """A live model that has changed is read into the memory that they were told of."""
    asked, find = [], served._packed
    monkeypatch.setattr(served, "_packed", lambda weight: asked.append(weight) or find(weight))
    monkeypatch.setattr(backend, "_make_ops", lambda config, spec, device, _: KernelOps(device))
    model, ids = tiny("llama-gqa", **{**_LLAMA, "hidden_size": 32}), batch(4)["input_ids"][:1]
    with dualinfer.init_inference(model, **INJECTED, quant="int8") as engine:
        before = np.asarray(engine(ids).logits)
        found = len(asked)
        assert 4 <= found <= 6  # four products of a layer, perhaps the embedding and the head
        assert np.array_equal(engine(ids).logits, before)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.neg_()
        engine.refresh()
        after = np.asarray(engine(ids).logits)
        assert len(asked) == found
    with dualinfer.init_inference(model, **INJECTED, quant="int8") as engine:
        assert np.array_equal(engine(ids).logits, after) and not np.array_equal(after, before)


def test_weights_that_gemma_3n_computes_are_known_as_such(monkeypatch):
    """Those of the norm of its coefficients: a learned scale over the width."""
    seen, fast = set(), KernelOps._normed

    def watched(ops: Any, x: Any, own: NormOf, *more: Any, **options: Any) -> Any:
        seen.add(own.made)
        return fast(ops, x, own, *more, **options)

    monkeypatch.setattr(KernelOps, "_normed", watched)
    monkeypatch.setattr(backend, "_make_ops", lambda config, spec, device, _: KernelOps(device))
    with dualinfer.init_inference(make_model("gemma3n"), **INJECTED) as engine:
        engine(np.ones((1, 2), np.int64))
    assert seen == {False, True}
