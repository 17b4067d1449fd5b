"""Several streams of one token, and heads of two streams side by side."""

from .contract import Array
from .maths import Maths, cut, flat, heads, named


def parted(m: Maths, x: Array, at: int) -> tuple[Array, Array]:
    """The first `at` elements of the last axis of x, and the others, as kernels take them."""
    return m.whole(x[..., :at]), m.whole(x[..., at:])


@named("weave")
def weave(m: Maths, count: int, first: Array, second: Array) -> Array:
    """Packed projections [B, T, 3 H D] and [B, T, 3 H E] as one, [B, T, 3 H (D + E)].

    Each of the `count` heads has its part of the first, then that of the second, whose queries are
    times (D / E)^1/2, so that the scale of the first serves both.
    """
    a, b = (heads(heads(x, 3), count) for x in (first, second))
    ratio = (first.shape[-1] / second.shape[-1]) ** 0.5
    b = m.join((b[:, :, :1] * ratio, b[:, :, 1:]), 2)
    return flat(m.join((a, b), -1), 3)


@named("weave")
def unweave(m: Maths, count: int, x: Array, second: int) -> tuple[Array, Array]:
    """The results of attention to such heads, x [B, T, H (D + E)], as [B, T, H D] and [B, T, H E].

    `second` is E.
    """
    y = heads(x, count)
    a, b = cut(y, y.shape[-1] - second, second)
    return flat(a), flat(b)
