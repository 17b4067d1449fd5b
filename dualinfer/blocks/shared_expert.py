"""Mixtures whose expert of all tokens is scaled (Cohere) or limited (Step 3.7)."""

from collections.abc import Callable
from dataclasses import dataclass

from ..decoder.mixture import Shared, shared_of
from ..decoder.run import Run
from ..model.spec import Activation, Mixing
from ..ops.contract import Array, NormOf
from ..ops.feed_forward import gate_within
from ..ops.maths import Maths


@dataclass(frozen=True)
class SharedScaled(Mixing):
    """A `scale` on the output of the expert of all tokens (Cohere's mean of the two)."""

    scale: float

    def shared(self, run: Run, x: Array, norm: NormOf | None) -> Array:
        """See `Mixing`."""
        return shared_of(run, x, norm) * self.scale


@dataclass(frozen=True)
class Limited(Mixing):
    """activation(gate) is at most a limit, and ups are at most as far from 0 (Step 3.7).

    That is `limit` in the experts, and `of_all` in the one that all tokens have; None for none.
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
