"""Experts that several devices share out, whole or cut by width as well, on both backends."""

import numpy as np
import pytest

import dualinfer
from dualinfer import init_inference

from .mixtures import VOCAB, make
from .models import random_ids, relative_rms

FUSED = {"dtype": "fp32", "replace_with_kernel_inject": True}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def shared(case, backend, devices, parts):
    """Logits and text of a model that so many devices share, its experts in so many parts."""
    model, ids = made(case), random_ids(2, 11, vocab=VOCAB)
    how = {"backend": backend, "tensor_parallel": {"tp_size": devices}, "moe": {"ep_size": parts}}
    with init_inference(model, **how, **FUSED) as engine:
        logits, text = np.asarray(engine(ids).logits), None
        if backend == "torch":  # on JAX it takes seconds to compile
            text = np.asarray(engine.generate(ids, **GREEDY))
        return logits, text


def made(case):
    if case.startswith("latent: "):
        from .latent import make as make_latent

        return make_latent(case.removeprefix("latent: "))
    return make(case)


_CASES = [
    ("qwen2_moe", "torch", 3, 3, True),
    ("qwen2_moe", "jax", 4, 2, True),
    ("qwen2_moe", "torch", 2, 2, False),
    ("qwen2_moe", "torch", 4, 2, False),
    ("qwen2_moe", "torch", 4, 4, False),
    ("qwen2_moe", "jax", 2, 2, False),
    ("qwen2_moe", "jax", 3, 3, False),
    ("gpt_oss", "torch", 3, 3, False),
    ("gpt_oss", "torch", 4, 2, False),
    ("gpt_oss", "jax", 4, 2, False),
    ("glm4_moe", "torch", 4, 2, False),
    ("glm4_moe", "jax", 3, 3, False),
    ("granitemoe", "torch", 2, 2, False),
    ("mixtral", "jax", 2, 2, False),
]
SHARED = [pytest.param(*case, marks=[] if quick else [pytest.mark.slow]) for *case, quick in _CASES]


@pytest.mark.xdist_group("ranks")  # whose processes live through a run
@pytest.mark.parametrize(("case", "backend", "devices", "parts"), SHARED)
def test_experts_in_parts_give_what_one_device_gives(case, backend, devices, parts, crew):
    if backend == "torch":
        found = crew.run(shared, case, backend, devices, parts, world=devices)
    else:
        found = [shared(case, backend, devices, parts)]
    logits, text = shared(case, backend, 1, 1)
    for ours, own in found:
        assert relative_rms(ours, logits) < 1e-5
        np.testing.assert_array_equal(own, text)
