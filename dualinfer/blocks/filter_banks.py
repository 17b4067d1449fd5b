"""Sounds as filter banks, by gated convolutions (Speech2Text)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..model.spec import Sounds
from ..ops.contract import Array, BlockOps, Weights
from ..ops.convolutions import by_taps
from ..ops.maths import Maths, flat, named


@dataclass(frozen=True)
class FilterBanks(Sounds):
    """Frames of `bins` numbers, a token of every four.

    They pass through two convolutions over `taps` each, odd and of stride 2, with zeros around the
    sequence; what one gives has twice the channels, of which the logistic function of the second
    half gates the first: `between` are then left, and at last the embedding's. A token is given as
    all that makes it: for each tap of the second convolution those of the first, bin by bin, and a
    1, or a 0 where no frame is.
    """

    bins: int
    between: int
    taps: tuple[int, int]
    name: ClassVar[str] = "input_features"

    @property
    def frame_width(self) -> int:
        """See `Sounds`."""
        return self.bins

    def axes(self, embed: int) -> Mapping[str, int]:
        """See `Sounds`."""
        near, far = self.taps
        channels = {"between": self.between, "convolved": 2 * self.between, "embed2": 2 * embed}
        return {"heard": self.bins, "taps1": near, "taps2": far, **channels}

    @property
    def width(self) -> int:
        """See `Sounds`."""
        return self.taps[1] * (self.taps[0] * self.bins + 1) + 1

    def tokens(self, count: int) -> int:
        """See `Sounds`."""
        return _halved(_halved(count))

    def visible(self, mask: np.ndarray) -> np.ndarray:
        """See `Sounds`: as many as the real frames would make."""
        counts = _halved(_halved(mask.sum(1)))
        return np.arange(self.tokens(mask.shape[1])) < counts[:, None]

    def cut(self, sounds: Any, tokens: int, xp: Any) -> Any:
        """See `Sounds`."""
        near, far = self.taps
        count = sounds.shape[1]
        between = 2 * np.arange(tokens)[:, None] - far // 2 + np.arange(far)
        at = 2 * between[..., None] - near // 2 + np.arange(near)
        there = (at >= 0) & (at < count)
        cut = sounds[:, at.clip(0, count - 1)] * there[..., None].astype(np.float32)
        cut = cut.swapaxes(-1, -2).reshape(*cut.shape[:3], -1)
        real = (between >= 0) & (between < _halved(count))
        marks = np.broadcast_to(real[None, ..., None].astype(np.float32), (*cut.shape[:3], 1))
        return xp.concatenate((cut, marks), -1)

    def embed(self, ops: BlockOps, w: Weights, x: Array) -> Array:
        """See `Sounds`."""
        first, second = ((w[f"conv{i}.kernel"], w[f"conv{i}.bias"]) for i in (1, 2))
        return _hear(ops.maths, x, first, second)


def _halved(count: Any) -> Any:
    """The number of places that one convolution leaves of so many."""
    return (count - 1) // 2 + 1


@named("hear")
def _hear(m: Maths, x: Array, first: tuple[Array, Array], second: tuple[Array, Array]) -> Array:
    """Both convolutions of tokens [B, T, W]: [B, T, E]; a kernel [out, in, taps], a bias [out]."""
    x = x[..., :-1].reshape(*x.shape[:2], second[0].shape[2], -1)
    h = m.glu(by_taps(m, x[..., :-1], *first)) * x[..., -1:]
    return m.glu(by_taps(m, flat(h.swapaxes(-1, -2)), *second))
