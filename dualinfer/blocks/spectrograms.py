"""Sounds as log-mel spectrograms of one length (Whisper)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..model.spec import Sounds
from ..ops.contract import Array, BlockOps, Weights
from ..ops.convolutions import convolve


@dataclass(frozen=True)
class Spectrograms(Sounds):
    """Frames of `bins` numbers, two for each token, by two convolutions over 3 with a gelu each."""

    bins: int
    name: ClassVar[str] = "input_features"
    of_one_length: ClassVar[bool] = True
    stride: ClassVar[int] = 2
    transcribes: ClassVar[bool] = True

    @property
    def frame_width(self) -> int:
        """See `Sounds`."""
        return self.bins

    def axes(self, embed: int) -> Mapping[str, int]:
        """See `Sounds`."""
        return {"mel": self.bins, "taps": 3}

    @property
    def width(self) -> int:
        """See `Sounds`: of a frame."""
        return self.bins

    def embed(self, ops: BlockOps, w: Weights, x: Array) -> Array:
        """See `Sounds`."""
        for name, stride in (("conv1", 1), ("conv2", self.stride)):
            kernel, bias = (w[f"{name}.{part}"] for part in ("kernel", "bias"))
            x = convolve(ops.maths, x, kernel, bias, stride, "gelu")
        return x
