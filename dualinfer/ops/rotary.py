"""Rotary embeddings: the angles by which heads turn, and turning them."""

from ..model.spec import Rope
from .contract import Array
from .maths import Maths, flat, halves, named


def turns(
    m: Maths, rope: Rope, tables: Array, positions: Array, last: Array | None = None
) -> tuple[Array, Array]:
    """Cosines and sines by which heads turn, [B, T, R/2]; `last` [B]: see `contract.Ops.angles`."""
    if last is not None and rope.by_length is not None:
        tables = rope.by_length.frequencies(m, tables, last)[:, None]
    radians = m.wide(positions[..., None]) * tables
    return m.cos(radians) * rope.scaling, m.sin(radians) * rope.scaling


def growth(m: Maths, positions: Array, beta: float, period: float, ahead: int) -> Array:
    """The factors of queries at int positions [B, T], float32 [B, T]."""
    return 1 + beta * m.log(1 + m.floor(m.wide(positions + ahead) / period))


@named("rotary")
def rotary(m: Maths, x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Rotate the start of each head of x [B, T, heads, D] by cos and sin, float32 [B, T, R/2].

    Su et al., 2021. Its R elements are halves that turn together, or pairs if `interleaved`.
    """
    size = 2 * cos.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    wide = m.wide(turning)
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else halves(wide)
    cos, sin = cos[:, :, None], sin[:, :, None]
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = m.cast(flat(m.stack(parts, -1)) if interleaved else m.join(parts, -1), x.dtype)
    return m.join((turned, rest), -1) if rest.shape[-1] else turned
