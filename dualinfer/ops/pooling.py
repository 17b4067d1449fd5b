"""One vector of many tokens, and how vectors of two towers meet."""

from .contract import Array
from .maths import Maths, named


@named("pool")
def pool(
    m: Maths,
    x: Array,
    weights: Array,
    segments: Array | None = None,
    count: int = 1,
    largest: bool = False,
) -> Array:
    """One vector of each of `count` segments of x [B, T, E]: float32 [B, count, E].

    It is the sum of its tokens times their float32 `weights` [B, T], or with `largest` each
    element's greatest value among the tokens whose weight is not 0. int `segments` [B, T] say which
    tokens are whose, those from `count` on nobody's; without them a row is one. What has no token
    gives 0.
    """
    x = m.wide(x)
    if largest:
        owner = m.where(weights != 0, 0 if segments is None else segments, count)
        found = m.most_of(x, owner, count)
        return m.where(found == -float("inf"), 0.0, found)
    if segments is None:
        return m.pooled(weights[:, None, :], x)
    owner = m.arange(count, x)[:, None] == segments[:, None, :]
    return m.pooled(m.where(owner, weights[:, None, :], 0.0), x)


def contrast(
    m: Maths, texts: Array, images: Array, scale: Array, bias: Array | None
) -> tuple[Array, Array, Array]:
    """Cosines [N, M] of texts [N, E] and images [M, E] times e^scale, plus bias; unit vectors."""
    texts, images = (x / m.length(x) for x in (texts, images))
    scores = m.product(texts, images, texts.dtype) * m.exp(scale)
    return scores if bias is None else scores + bias, texts, images
