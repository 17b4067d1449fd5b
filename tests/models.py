"""Helpers of tests with models: weights and ids at random, distances, marks of cases."""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

VOCAB, PAD, EOS = 1001, 0, 2
A_SECOND = 2.0  # of the CPU: others use the machine as well, and two threads share a core
BACKENDS = ("torch", "jax")


def on_backends(cases: Iterable[str], repeating: Iterable[str] = ()) -> list[Any]:
    """Each case on each backend; on JAX those slow that repeat there what others show."""
    repeating = set(repeating)
    return [
        pytest.param(case, name, marks=[pytest.mark.slow] if case in repeating and late else [])
        for case in cases
        for late, name in enumerate(BACKENDS)
    ]


def slow_but(quick: Iterable[Any], cases: Iterable[Any], *more: Any) -> list[Any]:
    """Each case, with `more` parameters; those that are not `quick` show the same and are slow."""
    quick = set(quick)
    return [
        pytest.param(case, *more, marks=[] if case in quick else [pytest.mark.slow])
        for case in cases
    ]


# Families whose greedy text runs into a loop less soon with strong weights.
STRONG = ("opt", "gptj", "gpt_neox", "bloom", "gemma2", "gemma3_text")


@torch.no_grad()
def randomize(model: hf.PreTrainedModel) -> None:
    """Draw every parameter so that it shows: logits differ clearly, biases and norms count."""
    kind = model.config.model_type
    tables = ("embed", "wte", "wpe", "lm_head", *(() if kind == "opt" else ("decoder.",)))
    for name, p in model.named_parameters():
        if p.ndim > 1:
            embedding = any(part in name for part in tables)
            if kind in STRONG:
                p.normal_(0, 0.3 if embedding else 2.5 / p.shape[1] ** 0.5)
            else:
                p.normal_(0, 0.7 if embedding else 1.5 / max(p.shape) ** 0.5)
        elif name.endswith("bias"):
            p.normal_(0, 0.3)
        else:  # norms; with signs, or a tied head would repeat the last token for ever
            p.uniform_(0.4, 1.6).mul_(torch.randint(0, 2, p.shape) * 2 - 1)
            adds_one = kind.startswith("gemma") and not kind.startswith("gemma4")
            p.sub_(1.0 if adds_one else 0.0)  # whose norms add 1
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    model.tie_weights()


def random_ids(rows: int, tokens: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    """Token ids int64 [rows, tokens] that are no special ones."""
    return np.random.default_rng(seed).integers(3, vocab, (rows, tokens))


def relative_rms(result: Any, expected: Any) -> float:
    """Root mean square of the difference over that of `expected`; shapes equal, all finite."""
    a, b = (np.asarray(x, np.float64) for x in (result, expected))
    assert a.shape == b.shape, f"shape {a.shape}, expected {b.shape}"
    assert np.isfinite(a).all() and np.isfinite(b).all()
    scale = np.sqrt((b**2).mean())
    assert scale > 0
    error = float(np.sqrt(((a - b) ** 2).mean()) / scale)
    print(f"relative RMS {error:.2e}, largest error {np.abs(a - b).max():.2e}")
    return error


@contextmanager
def noted_logits(backend: str) -> Iterator[dict[int, np.ndarray]]:
    """The logits [N, V] of the steps within that sample, by position; rows have equal lengths.

    They come out of the very steps that generate runs, once the context ends.
    """
    sampler = importlib.import_module(f"dualinfer.backends.{backend}.sampler")
    by_position, original = {}, sampler.sample

    def note(position: Any, logits: Any) -> None:
        by_position[int(position[0])] = np.asarray(logits).copy()

    def sample(logits: Any, state: Any, position: Any, *how: Any) -> Any:
        if backend == "jax":
            importlib.import_module("jax").debug.callback(note, position, logits)
        else:
            note(position, logits)
        return original(logits, state, position, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "sample", sample)
        yield by_position
        if backend == "jax":
            importlib.import_module("jax").effects_barrier()
