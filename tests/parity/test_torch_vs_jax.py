"""The two backends against each other: layer by layer, and token by token through the cache."""

import importlib

import numpy as np
import pytest

import dualinfer
from dualinfer.backends.base import Request

from ..cases.decoders import CASES
from ..models import BACKENDS, VOCAB, random_ids, relative_rms, slow_but

LIMIT = 1e-5
LAYERWISE = ("llama-gqa", "llama-yarn-factor", "qwen2-mixed", "gpt2-inverse", "bert", "bert-masked")
# What attends in other ways: the rest repeat these, by other norms and MLPs.
CACHED = ("llama-gqa", "qwen3-mixed", "gpt-neo", "bloom", "gemma2")
REPEATING = ("llama-mqa", "mistral-window", "gpt2-inverse", "opt-post", "gptj", "neox-sequential")
PROMPTS, TOKENS = (9, 1, 4), 40


@pytest.mark.parametrize("name", LAYERWISE, scope="session")
@pytest.mark.parametrize("padded", [False, True])
def test_hidden_states_agree_layer_by_layer(name, padded, engine_of):
    ids, mask = random_ids(3, 15, seed=2), np.ones((3, 15), int)
    if padded:
        mask[1, :3] = mask[2, 10:] = 0
    kwargs = {"attention_mask": mask if padded else None, "output_hidden_states": True}
    one, other = (engine_of(name, backend)(ids, **kwargs) for backend in BACKENDS)
    assert one.keys() == other.keys()
    assert len(one.hidden_states) == len(other.hidden_states) > 1
    keep = mask == 1
    for a, b in zip(one.hidden_states, other.hidden_states, strict=True):
        assert relative_rms(a[keep], b[keep]) < LIMIT
    if CASES[name].has_head:
        assert relative_rms(one.logits[keep], other.logits[keep]) < LIMIT


def decode_forced(engine, texts, monkeypatch):
    """Logits [N, T, V] that the engine's cache gives when it is made to continue with `texts`.

    NaN before the last prompt token of each row. Sampling is replaced by reading the next token, so
    that both backends and the whole-sequence forward see the same past at every position.
    """
    backend = engine.inference_config.backend
    module = importlib.import_module(f"dualinfer.backends.{backend}.sampler")
    found = np.full((len(texts), TOKENS, VOCAB), np.nan, np.float32)

    def note(logits, position):
        for row, at in enumerate(np.asarray(position)[: len(texts)]):
            if at <= TOKENS and np.isnan(found[row, at - 1]).all():
                found[row, at - 1] = np.asarray(logits)[row]

    def torch_sample(logits, state, position, features):
        import torch

        note(logits, position)
        rows = torch.arange(len(position)).clamp(max=len(texts) - 1)
        return torch.tensor(texts)[rows, position.clamp(max=TOKENS - 1)]

    def jax_sample(logits, state, position, *how):
        import jax
        import jax.numpy as jnp

        jax.debug.callback(note, logits, position, ordered=True)
        rows = jnp.minimum(jnp.arange(len(position)), len(texts) - 1)
        forced = jnp.asarray(texts, jnp.int32)[rows, jnp.minimum(position, TOKENS - 1)]
        return forced.astype(jnp.int32)

    monkeypatch.setattr(module, "sample", torch_sample if backend == "torch" else jax_sample)
    requests = [
        Request(np.asarray(text[:prompt], np.int32), TOKENS - prompt + 1)
        for text, prompt in zip(texts, PROMPTS, strict=True)
    ]
    runner = engine.runner
    slots = list(range(len(requests)))
    tokens = [runner.prefill(requests, slots).fetch()]
    for steps in (1, 5, 32, 32):
        tokens.append(runner.decode(steps).fetch()[:, : len(texts)])
    runner.release(slots)
    if backend == "jax":
        importlib.import_module("jax").effects_barrier()
    taken = np.concatenate(tokens)
    for row, prompt in enumerate(PROMPTS):
        made = taken[:, row][taken[:, row] >= 0]
        np.testing.assert_array_equal(made[: TOKENS - prompt], texts[row][prompt:])
    return found


@pytest.mark.parametrize("name", slow_but(CACHED, [*CACHED, *REPEATING]))
def test_each_position_through_the_cache_equals_the_whole_sequence(name, hf_model, monkeypatch):
    texts = random_ids(len(PROMPTS), TOKENS, seed=4)
    found = {}
    for backend in BACKENDS:
        engine = dualinfer.init_inference(hf_model(name), backend=backend, kernel_inject=True)
        found[backend] = decode_forced(engine, texts, monkeypatch)
        whole = np.asarray(engine(texts).logits)
        for row, prompt in enumerate(PROMPTS):
            assert np.isnan(found[backend][row, : prompt - 1]).all()
            for at in range(prompt - 1, TOKENS):
                assert relative_rms(found[backend][row, at], whole[row, at]) < LIMIT, (backend, at)
    for row, prompt in enumerate(PROMPTS):
        one, other = (found[b][row, prompt - 1 :] for b in BACKENDS)
        assert relative_rms(one, other) < LIMIT
