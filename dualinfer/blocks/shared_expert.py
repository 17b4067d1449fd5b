"""Mixtures whose expert of all tokens is scaled (Cohere)."""

from dataclasses import dataclass

from ..decoder.mixture import shared_of
from ..decoder.run import Run
from ..model.spec import Mixing
from ..ops.contract import Array, NormOf


@dataclass(frozen=True)
class SharedScaled(Mixing):
    """A `scale` on the output of the expert of all tokens (Cohere's mean of the two)."""

    scale: float

    def shared(self, run: Run, x: Array, norm: NormOf | None) -> Array:
        """See `Mixing`."""
        return shared_of(run, x, norm) * self.scale
