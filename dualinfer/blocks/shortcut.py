"""Mixtures that are added behind the next layer, and experts without weights (LongCat)."""

from dataclasses import dataclass

from ..decoder.mixture import route, weighed
from ..decoder.run import Run
from ..model.spec import Experts, Mixing
from ..ops.contract import Array, Epilogue, NormOf


@dataclass(frozen=True)
class Shortcut(Mixing):
    """The expert that all tokens have is the layer's MLP (arXiv:2509.01322).

    What the others give is added behind the next layer. Behind them the router knows `idle` more,
    without weights: such a one gives what it reads.
    """

    idle: int
    leaves = True
    sums = 1

    def sublayer(
        self, run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        """See `Mixing`."""
        own, ops = run.layer.feeding, run.ops
        assert isinstance(own, Experts) and norm is not None
        x = ops.norm(x, norm)
        routing = route(run, x, None)
        y = weighed(run, x, None, routing, None, Epilogue(spend=True))
        if self.idle:
            passed = (routing.weights * (routing.experts >= own.count)).sum(-1)[..., None] * x
            y = ops.add(y, ops.maths.cast(passed, y.dtype))
        run.given.late.append(y)
        h = run.project("shared.up", x, Epilogue(activation=own.activation, gated=own.gated))
        return run.project_back("shared.down", h, Epilogue(residual=residual, spend=spend))
