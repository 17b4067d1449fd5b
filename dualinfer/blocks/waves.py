"""Sounds as samples (Moonshine)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..model.spec import Sounds
from ..ops.contract import Array, BlockOps, Weights
from ..ops.convolutions import by_taps
from ..ops.maths import Maths, flat, named


@dataclass(frozen=True)
class Waves(Sounds):
    """Samples, a token of every 384.

    They pass through convolutions over `taps`, by `strides`, without anything around the sequence.
    The first one has the embedding's channels and no bias, and its tanh is normed by the mean and
    the variance of all of a row, padding too, and a factor and a bias for each channel; the second
    one has twice the channels, and the gelu of both is taken. A token is given as the samples of
    `windows` places of the first convolution, each with a 1 behind where it counts in the mean.
    """

    taps: ClassVar[tuple[int, int, int]] = (127, 7, 3)
    strides: ClassVar[tuple[int, int, int]] = (64, 3, 2)
    eps: ClassVar[float] = 1e-5
    name: ClassVar[str] = "input_values"

    @property
    def own(self) -> int:
        """Places of the first convolution that a token has for itself."""
        return self.strides[1] * self.strides[2]

    @property
    def seen(self) -> int:
        """Places of the first convolution of which a token is made."""
        return self.strides[1] * (self.taps[2] - 1) + self.taps[1]

    @property
    def windows(self) -> int:
        """Places that a token has or sees, and at most so many behind the last token's."""
        return self.seen + self.own - 1

    def axes(self, embed: int) -> Mapping[str, int]:
        """See `Sounds`."""
        return {f"taps{i + 1}": n for i, n in enumerate(self.taps)} | {"embed2": 2 * embed}

    @property
    def width(self) -> int:
        """See `Sounds`."""
        return self.windows * (self.taps[0] + 1) + 1

    def tokens(self, count: int) -> int:
        """See `Sounds`."""
        for taps, stride in zip(self.taps, self.strides, strict=True):
            count = max(0, (count - taps) // stride + 1)
        return count

    def visible(self, mask: np.ndarray) -> np.ndarray:
        """See `Sounds`: by the first sample of each."""
        return mask[:, :: self.own * self.strides[0]][:, : self.tokens(mask.shape[1])]

    def cut(self, sounds: Any, tokens: int, xp: Any) -> Any:
        """See `Sounds`."""
        count, (taps, stride) = sounds.shape[1], (self.taps[0], self.strides[0])
        windows = np.arange(self.windows)
        places = self.own * np.arange(tokens)[:, None] + windows
        at = (stride * places[..., None] + np.arange(taps)).clip(0, count - 1)
        counted = (windows < self.own) | (np.arange(tokens)[:, None] == tokens - 1)
        counted = counted & (places <= (count - taps) // stride)
        shape = len(sounds), *places.shape, 1
        marks = np.broadcast_to(counted[None, ..., None].astype(np.float32), shape)
        return xp.concatenate((sounds[:, at], marks), -1)

    def embed(self, ops: BlockOps, w: Weights, x: Array) -> Array:
        """See `Sounds`."""
        norm = w["sound_norm.weight"], w["sound_norm.bias"]
        kernels: Any = [(w[f"conv{i}.kernel"], w.get(f"conv{i}.bias")) for i in (1, 2, 3)]
        return _hear(ops.maths, self, x, norm, *kernels)


@named("hear")
def _hear(
    m: Maths,
    own: Waves,
    x: Array,
    norm: tuple[Array, Array],
    first: tuple[Array, None],
    second: tuple[Array, Array],
    third: tuple[Array, Array],
) -> Array:
    """The convolutions of tokens [B, T, W]: [B, T, E]; `norm` is a weight and a bias [E]."""
    x = x[..., :-1].reshape(*x.shape[:2], own.windows, -1)
    counts, over = m.wide(x[..., -1:]), (1, 2, 3)
    h = m.wide(m.tanh(by_taps(m, x[..., :-1], *first)))
    count = (counts.sum(over, keepdims=True) * h.shape[-1]).clip(1)
    mean = (h * counts).sum(over, keepdims=True) / count
    away = h - mean
    variance = (away * away * counts).sum(over, keepdims=True) / count
    h = away[:, :, : own.seen] * m.rsqrt(variance + own.eps)
    h = m.cast(h * m.wide(norm[0]) + m.wide(norm[1]), x.dtype)
    # Over places that a token sees, the taps of the second convolution for each of the third.
    h = flat(m.windows(h, 2, own.taps[1], own.strides[1]))
    h = m.activation(by_taps(m, h, *second), "gelu")
    return m.activation(by_taps(m, flat(h.swapaxes(-1, -2)), *third), "gelu")
