"""Compares two engines over the same model: hidden states layer by layer, logits, best tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import to_numpy
from ..engine.base import InferenceEngine
from ..errors import ArgumentError

# How far apart two right results may lie, as a share of the logits' RMS: every layer adds to the
# dtype's own rounding, and the backends sum in different orders.
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Difference:
    """The distance of one array from the other. `relative_rms` is RMS(a - b) / RMS(b)."""

    name: str
    max_error: float
    relative_rms: float


@dataclass(frozen=True)
class Parity:
    """The result of `compare`.

    `layers` has L+1 entries: the embedding, then each layer's output, the last one after the final
    norm; those of an encoder first. `logits` is None for a model without a head. Of `positions`
    compared, `ties` have different best tokens within `rounding` of each other, `differing` have
    ones that are not.
    """

    layers: tuple[Difference, ...]
    logits: Difference | None
    positions: int
    ties: int
    differing: int
    rounding: float

    @property
    def tokens_agree(self) -> bool:
        """True if both engines choose the same token at every position, ties aside."""
        return self.differing == 0

    @property
    def equal(self) -> bool:
        """True if tokens agree and the results lie within rounding; NaN is never equal."""
        last = self.logits or self.layers[-1]
        return self.tokens_agree and last.relative_rms <= self.rounding


def compare(engine_a: InferenceEngine, engine_b: InferenceEngine, input_ids: Any) -> Parity:
    """Compare `engine_a` with `engine_b` in one forward pass over `input_ids` [B, T].

    Raises ArgumentError if the two do not run the same architecture.
    """
    results = [_forward(e, input_ids) for e in (engine_a, engine_b)]
    (states_a, logits_a), (states_b, logits_b) = results
    if _shapes(states_a, logits_a) != _shapes(states_b, logits_b):
        raise ArgumentError(f"{engine_a} and {engine_b} are not of one architecture.")
    rounding = max(ROUNDING[e.inference_config.dtype or "float32"] for e in (engine_a, engine_b))
    layers = tuple(difference(name, a, states_b[name]) for name, a in states_a.items())
    if logits_a is None or logits_b is None:
        positions = next(iter(states_a.values()))[..., 0].size
        return Parity(layers, None, positions, 0, 0, rounding)
    a, b = (x.reshape(-1, x.shape[-1]) for x in (logits_a, logits_b))
    differing, ties = _count_differing(a, b, rounding)
    return Parity(layers, difference("logits", a, b), len(a), ties, differing, rounding)


def difference(name: str, a: np.ndarray, b: np.ndarray) -> Difference:
    """The distance of `a` from `b`, arrays of one shape, computed in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    error, size = _rms(a - b), _rms(b)
    relative = error / size if size else (0.0 if error == 0 else float("inf"))
    return Difference(name, float(np.abs(a - b).max(initial=0.0)), relative)


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """Index of the first token that differs, or at which one of them ends; None if equal."""
    if list(a) == list(b):
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def states_of(outputs: Any) -> dict[str, np.ndarray]:
    """The hidden states of HF's output by stack and layer: "embedding", "decoder layer 0"."""
    stacks = {
        stack: getattr(outputs, f"{stack.strip()}_hidden_states".lstrip("_"), None)
        for stack in ("", "encoder ", "decoder ")
    }
    for tower in ("text", "vision"):
        own = getattr(outputs, f"{tower}_model_output", None)
        stacks[f"{tower} "] = getattr(own, "hidden_states", None)
    return {
        f"{stack}layer {i - 1}" if i else f"{stack}embedding": to_numpy(state)
        for stack, states in stacks.items()
        for i, state in enumerate(states or ())
    }


def _forward(engine: InferenceEngine, ids: Any) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Hidden states by name, and logits; of an encoder-decoder both stacks read `ids`."""
    inputs = {"input_ids": to_numpy(ids)}
    if getattr(engine.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    how = {"output_hidden_states": True, "return_dict": True, "return_tuple": True}
    outputs = engine.forward(**inputs, **how)
    logits = getattr(outputs, "logits", None)
    return states_of(outputs), None if logits is None else to_numpy(logits).astype(np.float32)


def _shapes(
    states: dict[str, np.ndarray], logits: np.ndarray | None
) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...] | None]:
    shapes = {name: x.shape for name, x in states.items()}
    return shapes, None if logits is None else logits.shape


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _count_differing(a: np.ndarray, b: np.ndarray, rounding: float) -> tuple[int, int]:
    """Rows of logits [N, V] whose best tokens differ: by more than rounding, and within it.

    A difference is a tie only if both engines score the two candidates alike.
    """
    best_a, best_b = a.argmax(-1), b.argmax(-1)
    rows = np.flatnonzero(best_a != best_b)
    ties = 0
    for row in rows:
        i, j = best_a[row], best_b[row]
        gap = max(float(a[row, i]) - float(a[row, j]), float(b[row, j]) - float(b[row, i]))
        ties += gap <= rounding * _rms(b[row].astype(np.float64))
    return len(rows) - ties, ties
