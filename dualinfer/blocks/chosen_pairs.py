"""Attention by pairs of projections that each token chooses (JetMoE, arXiv:2404.07413)."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..decoder.attention import Projected
from ..decoder.run import Run
from ..model import rows as make
from ..model.spec import Attention, Router, Wiring
from ..model.weights import Row, Weight, row
from ..ops.contract import Array, BlockOps, Epilogue, NormOf, Routing
from ..ops.maths import flat, heads, named
from ..ops.projection import added


@dataclass(frozen=True)
class ChosenPairs(Wiring):
    """Of `count` pairs of projections `router` chooses.

    The first of each makes a query head for each KV head, the second reads what these heads give,
    and the results are summed by the router's weights.
    """

    count: int
    router: Router
    projects = True
    why_whole = "tokens choose query heads by pairs"

    def axes(self, a: Attention) -> dict[str, int]:
        """See `Wiring`."""
        return {"paired": self.count}

    def rows(self, hf: str) -> list[Row]:
        """The rows of the attention that HF calls `hf`."""
        stacked = [
            row(f"pairs.{ours}.weight", axes, (f"{hf}experts.{theirs}_linear.weight", axes))
            for ours, theirs, axes in (
                ("query", "input", "paired k embed"),
                ("out", "output", "paired embed k"),
            )
        ]
        return [
            *make.linear("pairs.router", f"{hf}experts.router.layer", "paired embed", bias=False),
            *make.linear("kv", f"{hf}kv_proj", "k+v embed", bias=False),
            *(replace(own, dense=True) for own in stacked),
            row("pairs.bias", "embed", (f"{hf}experts.bias", "embed")),
        ]

    def project(self, run: Run, x: Array, norm: NormOf | None) -> Projected:
        """See `Wiring`; beside is how the token chose."""
        ops, w, size = run.ops, run.w, run.layer.attending.head_dim
        x = ops.norm(x, norm) if norm else x
        routing = ops.route(x, w["pairs.router.weight"], self.router)
        q = _queries(ops, x, w["pairs.query.weight"], routing, size)
        return Projected(ops.maths.join((q, run.project("kv", x)), -1), x, None, routing)

    def project_back(self, run: Run, y: Array, made: Projected, epilogue: Epilogue) -> Array:
        """See `Wiring`."""
        own = epilogue._replace(bias=run.w["pairs.bias"])
        weight, size = run.w["pairs.out.weight"], run.layer.attending.head_dim
        return _outputs(run.ops, y, weight, made.beside, size, own)


@named("chosen_queries")
def _queries(ops: BlockOps, x: Array, weight: Weight, routing: Routing, head_dim: int) -> Array:
    """Query heads [..., K k D] of x [..., E], k of each KV head one after another.

    A head of its k is the product by a chosen one of weights [X, K D, E], in their order. Each
    device has a share of K.
    """
    m, own, matrices = ops.maths, routing.experts, ops.schemes.dequantize(weight)
    if _are_few(own, matrices):  # fewer are read than there are
        y = m.einsum("...koi,...i->...ko", matrices[own], x)
    else:
        every = m.cast(m.product(x, matrices.reshape(-1, x.shape[-1]), m.sums(x)), x.dtype)
        rows = every.reshape(-1, *matrices.shape[:2]), own.reshape(-1, own.shape[-1])
        y = m.places(*rows).reshape(*own.shape, -1)
    return flat(heads(y, width=head_dim).swapaxes(-3, -2), 3)


@named("chosen_outputs")
def _outputs(
    ops: BlockOps, y: Array, weight: Weight, routing: Routing, head_dim: int, epilogue: Epilogue
) -> Array:
    """Products of chosen weights [X, E, K D] and heads y [..., K k D]: [..., E].

    The sum over the chosen ones by the routing's weights, and over devices, which have shares of K;
    the epilogue is as of `row_product`. HF's `JetMoeMoA.reduce`.
    """
    m, own, matrices = ops.maths, routing.experts, ops.schemes.dequantize(weight)
    y = y.reshape(*y.shape[:-1], -1, own.shape[-1], head_dim)
    y = flat(y.swapaxes(-3, -2))
    if _are_few(own, matrices):
        parts = m.wide(m.einsum("...koi,...ki->...ko", matrices[own], y, dtype=m.sums(y)))
        z = (parts * routing.weights[..., None]).sum(-2)
    else:
        share = (own[..., None] == m.arange(len(matrices), y)) * routing.weights[..., None]
        spread = m.cast(m.einsum("...kx,...ki->...xi", share, m.wide(y)), y.dtype)
        z = m.product(flat(spread), flat(matrices.swapaxes(0, 1)), m.sums(y))
    return added(m, ops.sum(z), y.dtype, epilogue)


def _are_few(own: Array, matrices: Any) -> bool:
    """True if tokens choose fewer matrices, all together, than there are."""
    return prod(own.shape) <= len(matrices)
