"""A layer as most models have it, from top to bottom.

What some models do otherwise stands beside it: in `attention`, `feed_forward`, `mixture`,
`residual` and `blocks/`. Of which of all this a layer is made, `choice` says once for a spec.
"""

from ..ops.contract import Array, Epilogue, NormOf, Unnormed
from .run import Block, Run, Step, SubLayer, activation_of, normed


def sequential(first: Step, *others: Step) -> Block:
    """A layer of sub-layers, one after another; the first one reads what a pass may keep."""

    def block(run: Run, x: Array | Unnormed) -> Array:
        x = first(run, normed(run.ops, x), run.given.spend)
        for sublayer in others:
            x = sublayer(run, x, True)
        return x

    return block


def within(sublayer: SubLayer, norm: str) -> Step:
    """x + sublayer(norm(x)): norm and sum are made by the sub-layer's own products."""

    def step(run: Run, x: Array, spend: bool) -> Array:
        return sublayer(run, x, run.norm(norm), x, spend)

    return step


def attention(
    run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
) -> Array:
    """Attention by queries, keys and values of one projection."""
    qkv = run.project("qkv", x, Epilogue(norm=norm))
    y = run.attend(qkv)
    return run.project_back("out", y, Epilogue(residual=residual, spend=spend))


def feed_forward(
    run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
) -> Array:
    """The MLP: a projection to hidden values, with its activation and gate, and one back."""
    activation, gated = activation_of(run.layer), run.layer.feeding.gated
    h = run.project("up", x, Epilogue(None, norm, activation, gated))
    return run.project_back("down", h, Epilogue(residual=residual, spend=spend))
