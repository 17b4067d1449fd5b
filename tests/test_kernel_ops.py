"""The torch decoder on Triton's kernels, interpreted on the CPU, against the one on plain torch."""

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

NAMES = ["llama-gqa", "qwen3-mixed", "gpt2-inverse"]


@pytest.fixture
def kernel_engine(monkeypatch, hf_model):
    """A function from a case to an engine whose runner has the kernels' ops."""
    import dualinfer
    from dualinfer.backends import torch as backend
    from dualinfer.backends.torch.kernels import KernelOps

    monkeypatch.setattr(backend, "_make_ops", lambda config, device: KernelOps(device))

    def make(name):
        return dualinfer.init_inference(
            hf_model(name), dtype="fp32", replace_with_kernel_inject=True
        )

    return make


@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_what_plain_torch_gives(name, kernel_engine, engine_of):
    plain, fast = engine_of(name, "torch"), kernel_engine(name)
    ids = np.random.default_rng(1).integers(3, 1000, (2, 19))
    mask = np.ones_like(ids)
    mask[1, :7] = 0
    found, wanted = (np.asarray(e(ids, attention_mask=mask).logits) for e in (fast, plain))
    error = np.sqrt(((found - wanted)[mask > 0] ** 2).mean() / (wanted[mask > 0] ** 2).mean())
    assert error < 1e-6
    for sampling in ({}, {"do_sample": True, "top_k": 20, "top_p": 0.9, "seed": 3}):
        made, expected = (
            e.generate(ids, attention_mask=mask, max_new_tokens=6, **sampling) for e in (fast, plain)
        )
        np.testing.assert_array_equal(np.asarray(made), np.asarray(expected))
