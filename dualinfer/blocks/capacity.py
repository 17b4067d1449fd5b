"""Experts that serve so many tokens of a sequence (Switch Transformers, arXiv:2101.03961)."""

from dataclasses import dataclass

from ..decoder.run import Run
from ..model.spec import Experts, Mixing
from ..ops.contract import Routing
from ..ops.mixtures import fill


@dataclass(frozen=True)
class Capacity(Mixing):
    """An expert serves `tokens` of a sequence in one pass, the first that choose it.

    Others that do get nothing of it.
    """

    tokens: int
    sees_others = True

    def routed(self, run: Run, routing: Routing) -> Routing:
        """See `Mixing`."""
        own = run.layer.feeding
        assert isinstance(own, Experts)
        return fill(run.ops.maths, routing, own.count, self.tokens, *run.given.seen)
