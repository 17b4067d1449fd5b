"""Experts that read their input times its weight (Llama 4)."""

from dataclasses import dataclass, replace

from ..decoder.mixture import route, shared_of
from ..decoder.run import Run
from ..model.spec import Experts, Mixing
from ..ops.contract import Array, Epilogue, NormOf, Routing


@dataclass(frozen=True)
class WeighedInputs(Mixing):
    """A chosen expert reads what a token gives times its weight; results are summed as they are."""

    def sublayer(
        self, run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        """See `Mixing`: one choice after another, each as experts of one a token."""
        own, ops, m = run.layer.feeding, run.ops, run.ops.maths
        assert isinstance(own, Experts)
        routing = route(run, x, norm)
        partial = shared_of(run, x, norm) if own.shared else None
        read = x if norm is None else ops.norm(x, norm)
        alone = own
        if own.router.chosen > 1:
            alone = replace(own, router=replace(own.router, chosen=1))
        for i in range(own.router.chosen):
            weights = routing.weights[..., i : i + 1]
            one = Routing(m.whole(routing.experts[..., i : i + 1]), m.whole(weights * 0 + 1))
            epilogue = Epilogue(residual=residual, spend=spend or i > 0)
            scaled = m.cast(read * weights, x.dtype)
            residual = ops.experts(scaled, alone, run.w, one, epilogue, partial)
            partial = None
        return residual
