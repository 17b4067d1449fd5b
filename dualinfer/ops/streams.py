"""Several streams of one token, and heads of two streams side by side."""

from .contract import Array
from .maths import Maths, cut, flat, heads, named


def mix_streams(m: Maths, coefficients: Array, x: Array) -> Array:
    """Streams x [A, B, T, E], and to stream j added all i times coefficients [B, T, A j + i].

    HF's `Gemma3nTextAltUp.predict`.
    """
    return x + m.einsum("btji,ibte->jbte", heads(coefficients, len(x)), x)


def correct_streams(m: Maths, x: Array, coefficients: Array, change: Array) -> Array:
    """Streams x [A, B, T, E], to each added `change` [B, T, E] times its coefficient [B, T, A].

    HF's `Gemma3nTextAltUp.correct`.
    """
    return x + m.moveaxis(coefficients, -1, 0)[..., None] * change


def add_to_rest(m: Maths, x: Array, y: Array) -> Array:
    """Streams x [A, B, T, E], to all but the first y [B, T, E] added."""
    return m.join((x[:1], x[1:] + y), 0)


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
