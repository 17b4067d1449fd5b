"""Attention and MLPs with factors (Falcon-H1)."""

from dataclasses import dataclass

from ..decoder.run import Run, SubLayer, activation_of
from ..model.spec import Activation, Edit
from ..ops.contract import Array, Epilogue, NormOf
from ..ops.feed_forward import activation
from ..ops.maths import Maths, halves


@dataclass(frozen=True)
class ScaledAttention(Edit):
    """A `factor` that multiplies attention's output, beside a recurrence."""

    factor: float

    def attention(self, sublayer: SubLayer) -> SubLayer:
        """See `Edit`."""

        def scaled(
            run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
        ) -> Array:
            y = sublayer(run, x, norm, None, False) * self.factor
            return y if residual is None else run.ops.add(residual, y)

        return scaled


@dataclass(frozen=True)
class ScaledMlp(Edit):
    """Factors of an MLP's gates before the activation, `of_gate`, and of its output, `of_all`."""

    of_gate: float
    of_all: float

    def feeding(self, sublayer: SubLayer) -> SubLayer:
        """See `Edit`."""
        return self._scaled

    def _scaled(
        self, run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        h = run.project("up", x, Epilogue(norm=norm))
        h = _gate_scaled(run.ops.maths, h, activation_of(run.layer), self.of_gate)
        y = run.project_back("down", h) * self.of_all
        return y if residual is None else run.ops.add(residual, y)


def _gate_scaled(m: Maths, h: Array, kind: Activation, scale: float) -> Array:
    """activation(scale * gate) * up of gates and ups h [..., 2 F]: [..., F]."""
    gate, up = halves(h)
    return activation(m, gate * scale, kind) * up
