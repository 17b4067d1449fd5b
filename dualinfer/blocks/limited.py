"""Feed-forwards whose hidden values are limited (Step 3.7)."""

from collections.abc import Callable
from dataclasses import dataclass

from ..decoder.mixture import Shared, shared_of
from ..decoder.run import Run, SubLayer, activation_of
from ..model.spec import Activation, Edit, Mixing
from ..ops.contract import Array, Epilogue, NormOf
from ..ops.feed_forward import gate_within
from ..ops.maths import Maths


@dataclass(frozen=True)
class LimitedMlp(Edit):
    """activation(gate) is at most `limit`, and ups are at most as far from 0."""

    limit: float

    def feeding(self, sublayer: SubLayer) -> SubLayer:
        """See `Edit`."""
        return self._limited

    def _limited(
        self, run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        h = run.project("up", x, Epilogue(norm=norm))
        h = gate_within(run.ops.maths, h, activation_of(run.layer), self.limit)
        return run.project_back("down", h, Epilogue(residual=residual, spend=spend))


@dataclass(frozen=True)
class Limited(Mixing):
    """As `LimitedMlp`, by a limit in the experts, and `of_all` in the one that all tokens have.

    None is for none.
    """

    limit: float | None
    of_all: float | None

    @property
    def shared(self) -> Shared | None:
        """See `Mixing`."""
        return None if self.of_all is None else self._shared

    def _shared(self, run: Run, x: Array, norm: NormOf | None) -> Array:
        return shared_of(run, x, norm, self.of_all)

    @property
    def hidden(self) -> Callable[[Maths, Array, Activation], Array] | None:
        """See `Mixing`."""
        return None if self.limit is None else self._hidden

    def _hidden(self, m: Maths, h: Array, activation: Activation) -> Array:
        assert self.limit is not None
        return gate_within(m, h, activation, self.limit)
