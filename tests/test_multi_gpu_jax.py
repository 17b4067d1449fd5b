"""Tensor parallelism of the JAX backend on real GPUs, kernels on. Two GPUs or more."""

import os

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import dualinfer  # noqa: E402

from .models import make_model, random_ids, relative_rms  # noqa: E402
from .test_gpu_pallas import executables, made_by  # noqa: E402

COUNT = 0
if os.environ.get("JAX_PLATFORMS") != "cpu":
    COUNT = len([d for d in jax.devices() if d.platform == "gpu"])
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices"),
]
GPUS = [n for n in (2, 4) if n <= COUNT]
NAMES = ("llama-gqa", "qwen3", "gpt2", "gptj", "bloom", "gemma2", "bert-masked")
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SAMPLED = {"max_new_tokens": 24, "do_sample": True, "top_k": 40, "seed": 7}


def outputs_of(name, tp, dtype):
    ids = random_ids(3, 11)
    with dualinfer.init_inference(
        make_model(name),
        backend="jax",
        dtype=dtype,
        replace_with_kernel_inject=True,
        tensor_parallel={"tp_size": tp},
    ) as engine:
        logits = np.asarray(engine(ids).logits, np.float32)
        texts = []
        if engine.can_generate():
            texts = [engine.generate(ids, **how).tolist() for how in (GREEDY, SAMPLED)]
            before = engine.report().compilations
            assert engine.generate(ids, **GREEDY).tolist() == texts[0]
            assert engine.report().compilations == before
        assert "Pallas" in str(engine.report().ops)
        return logits, texts


@pytest.fixture(scope="module")
def single():
    """What one GPU gives, by name and dtype."""
    made = {}

    def get(name, dtype):
        if (name, dtype) not in made:
            made[name, dtype] = outputs_of(name, 1, dtype)
        return made[name, dtype]

    return get


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", GPUS)
def test_float32_over_several_gpus_equals_one(single, name, tp):
    logits, texts = outputs_of(name, tp, "fp32")
    expected, expected_texts = single(name, "fp32")
    assert relative_rms(logits, expected) < 1e-5
    assert texts == expected_texts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", GPUS)
def test_bfloat16_over_several_gpus_errs_as_one_does(single, name, tp):
    reference = single(name, "fp32")[0]
    own = relative_rms(single(name, "bf16")[0], reference)
    assert relative_rms(outputs_of(name, tp, "bf16")[0], reference) < 1.1 * own


@pytest.mark.parametrize("tp", GPUS)
def test_no_cache_is_copied_by_a_step(tp):
    ids = random_ids(1, 11)
    with dualinfer.init_inference(
        make_model("llama-gqa"),
        backend="jax",
        dtype="bf16",
        replace_with_kernel_inject=True,
        tensor_parallel={"tp_size": tp},
    ) as engine:
        engine.generate(ids, **GREEDY)
        local = engine.runner._cache[0].k.addressable_shards[0].data.shape
        shape = f"bf16[{','.join(map(str, local))}]"
        (step,) = executables(engine, "decode")
        writing = made_by(step.as_text(), shape)
        assert len(writing) == len(engine.runner._cache)
        assert all("output_to_operand_aliasing" in line for line in writing)
