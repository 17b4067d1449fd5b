"""Uses of the residual stream by layers that differ from `layer.within`."""

from ..ops.contract import Array
from .run import Block, Run, Step, SubLayer, normed


def parallel(mixing: SubLayer, feeding: SubLayer, norm: str) -> Block:
    """Both sub-layers read the block's input, the second one by this norm."""

    def block(run: Run, x: Array) -> Array:
        x = normed(run.ops, x)
        total = mixing(run, x, run.norm("attn_norm"), x, False)
        return feeding(run, x, run.norm(norm), total, True)

    return block


def bare(sublayer: SubLayer) -> Step:
    """x + sublayer(x)."""

    def step(run: Run, x: Array, spend: bool) -> Array:
        return sublayer(run, x, None, x, spend)

    return step


def added(sublayer: SubLayer, before: str | None, behind: str | None, scale: str | float) -> Step:
    """x + scale times norm(sublayer(norm(x))), with the norms that have a name.

    The scale is a number, or a learned vector by its name.
    """

    def apart(run: Run, x: Array) -> Array:
        first = None if before is None else run.norm(before)
        return sublayer(run, x, first, None, False)

    def summed(run: Run, x: Array, spend: bool) -> Array:
        assert behind is not None
        return run.ops.add(x, apart(run, x), run.norm(behind))

    def scaled(run: Run, x: Array, spend: bool) -> Array:
        factor = run.w[scale] if isinstance(scale, str) else scale
        y = apart(run, x)
        y = y if behind is None else run.ops.norm(y, run.norm(behind))
        return run.ops.add(x, y * factor)

    return summed if behind is not None and scale == 1 else scaled


def with_late(run: Run, x: Array) -> Array:
    """x and what the layer before left to be added here."""
    return run.ops.add(x, run.given.late.pop())
