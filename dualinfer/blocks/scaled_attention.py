"""Attention beside a recurrence, with a factor (Falcon-H1)."""

from dataclasses import dataclass

from ..decoder.run import Run, SubLayer
from ..model.spec import Edit
from ..ops.contract import Array, NormOf


@dataclass(frozen=True)
class ScaledAttention(Edit):
    """A `factor` that multiplies attention's output."""

    factor: float

    def attention(self, sublayer: SubLayer) -> SubLayer:
        """See `Edit`."""

        def scaled(
            run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
        ) -> Array:
            y = sublayer(run, x, norm, None, False) * self.factor
            return y if residual is None else run.ops.add(residual, y)

        return scaled
