"""Layers whose sub-layers are scaled by a number (Granite, MiniCPM)."""

from dataclasses import dataclass

from ..decoder.residual import added
from ..decoder.run import Step, SubLayer
from ..model.spec import Edit


@dataclass(frozen=True)
class ScaledSums(Edit):
    """A `factor` that multiplies what a sub-layer adds."""

    factor: float

    def step(
        self, step: Step, name: str, sublayer: SubLayer, norm: str | None, behind: str | None
    ) -> Step:
        """See `Edit`."""
        return added(sublayer, norm, behind, self.factor)
