"""Make one vector of a text's hidden states: pooling, dense layers, normalizing, prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from ..errors import ArgumentError, shown
from .spec import Activation

# As sentence-transformers names them.
POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling: float32 `weight` [out, in] and `bias` [out], then activation."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: Activation | None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The layer's float32 output [N, out] of x [N, in]."""
        y = x @ self.weight.T
        y = y if self.bias is None else y + self.bias
        return y.astype(np.float32) if self.activation is None else _ACTIVATIONS[self.activation](y)


_ACTIVATIONS: dict[str, Any] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
}
DENSE_ACTIVATIONS = frozenset(_ACTIVATIONS)
assert set(get_args(Activation)) >= DENSE_ACTIVATIONS


@dataclass(frozen=True)
class TextEmbedding:
    """A model folder's way from texts to vectors; the defaults are those of no folder.

    `pooling` is one of POOLINGS. Without `include_prompt` the tokens of a prompt are not pooled.
    `layers` are Dense, or None for normalizing to length 1. `max_length` cuts texts. `prompts` go
    before each text, by name, the one of `default_prompt` where the caller names none. Of a vector
    the first `truncate_dim` numbers stay (Matryoshka), None for all. `unknown` is what to tell a
    caller who names no pooling, where the folder should say it and does not.
    """

    pooling: str = "mean"
    include_prompt: bool = True
    layers: tuple[Dense | None, ...] = ()
    max_length: int | None = None
    lower: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    truncate_dim: int | None = None
    unknown: str | None = None

    def prompt(self, text: str | None, name: str | None) -> str:
        """The prompt before each text, as the caller passes it or names it; "" for none."""
        if text is not None:
            if name is not None:
                raise ArgumentError("prompt and prompt_name were both given; pass one of them.")
            if not isinstance(text, str):
                raise ArgumentError(f"prompt={shown(text)}; expected a str.")
            return text
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise ArgumentError(f"prompt_name={shown(name)}: the model names {known}.")
        return self.prompts[name]


def check_pooling(pooling: Any) -> str:
    """`pooling` if it is one of POOLINGS; else ArgumentError."""
    if not isinstance(pooling, str) or pooling not in POOLINGS:
        raise ArgumentError(f"pooling={shown(pooling)}; expected one of {', '.join(POOLINGS)}.")
    return pooling


def pooling_weights(pooling: str, lengths: Sequence[int], skipped: int = 0) -> list[np.ndarray]:
    """float32 [T] for each length T: what each token of a text counts, a `skipped` prompt nothing.

    sentence-transformers: `models/Pooling.py`. For "max" they say which tokens take part. Of a text
    that is all prompt "cls" and "max" pool it whole, and the others nothing: its vector is 0.
    """
    return [_weights(pooling, tokens, skipped) for tokens in lengths]


def _weights(pooling: str, tokens: int, skipped: int) -> np.ndarray:
    """The pooling weights of one text's tokens."""
    weights, first = np.zeros(tokens, np.float32), skipped if skipped < tokens else 0
    if pooling == "cls":
        weights[first] = 1
    elif pooling == "max":
        weights[first:] = 1
    elif skipped >= tokens:
        return weights
    elif pooling == "lasttoken":
        weights[-1] = 1
    elif pooling == "weightedmean":
        total = (tokens * (tokens + 1) - first * (first + 1)) / 2
        weights[first:] = np.arange(first + 1, tokens + 1) / total
    else:
        count = tokens - first
        weights[first:] = 1 / (count if pooling == "mean" else count**0.5)
    return weights


def normalized(x: np.ndarray) -> np.ndarray:
    """float32 [N, E], each row divided by its length."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
