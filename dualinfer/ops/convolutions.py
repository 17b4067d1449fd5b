"""Tokens and their neighbours in time, of one sequence: what lies around counts as zeros.

With int `segments` [B, T] a neighbour of another segment counts as zeros as well. Taps are odd.
"""

from collections.abc import Iterator

from ..model.spec import Activation
from .contract import Array
from .feed_forward import activation
from .maths import Maths, flat, heads, named


@named("convolution")
def convolution(
    m: Maths,
    x: Array,
    kernel: Array,
    bias: Array,
    stride: int,
    segments: Array | None = None,
) -> Array:
    """x [B, T, in] with kernel [out, in, taps] over time, plus bias [out]: [B, T / stride, out].

    It is over each token and its taps // 2 neighbours on either side. `segments` are for a stride
    of 1.
    """
    if segments is None:
        return m.convolution(x, kernel, bias, stride)
    near = m.join(list(_near(m, x, kernel.shape[2], segments)), -1)
    y = m.product(near, flat(kernel.swapaxes(1, 2)), m.sums(x), bias)
    return m.cast(y, x.dtype)


def convolve(
    m: Maths,
    x: Array,
    kernel: Array,
    bias: Array,
    stride: int,
    kind: Activation,
    segments: Array | None = None,
) -> Array:
    """The activation of a `convolution`."""
    return activation(m, convolution(m, x, kernel, bias, stride, segments), kind)


@named("convolve_each")
def convolve_each(m: Maths, x: Array, kernel: Array, segments: Array | None = None) -> Array:
    """Each element of x [B, T, E] over time by a kernel of its own, kernel [E, taps]."""
    total = m.zeros(x.shape, m.sums(x), x)
    by = m.cast(kernel, total.dtype)
    for i, near in enumerate(_near(m, x, kernel.shape[1], segments)):
        total = m.add_product(total, near, by[:, i])
    return m.cast(total, x.dtype)


@named("mix_spans")
def mix_spans(m: Maths, x: Array, scores: Array, taps: int, segments: Array | None = None) -> Array:
    """Heads of x [B, T, H D] over time: sums of `taps` tokens by the softmax of scores.

    These are [B, T, H taps]. HF's class is `ConvBertSelfAttention`.
    """
    weights = m.softmax(m.cast(heads(scores, width=taps), m.sums(x)))
    total = heads(m.zeros(x.shape, weights.dtype, x), weights.shape[-2])
    for i, near in enumerate(_near(m, x, taps, segments)):
        total = m.add_product(total, near.reshape(total.shape), weights[..., i, None])
    return m.cast(flat(total), x.dtype)


@named("trigrams")
def trigrams(m: Maths, x: Array, segments: Array | None) -> Array:
    """Of each token of x [B, T, W] the next one, itself and the one before: [B, T, 3 W]."""
    before, itself, after = _near(m, x, 3, segments)
    return m.join((after, itself, before), -1)


def _near(m: Maths, x: Array, taps: int, segments: Array | None) -> Iterator[Array]:
    """x [B, T, E] moved by each of `taps` steps of time, from the past to the future."""
    aside, tokens = taps // 2, x.shape[1]
    wide = m.pad(x, 1, aside, aside)
    owners = None if segments is None else m.pad(segments, 1, aside, aside, -1)
    for i in range(taps):
        near = wide[:, i : i + tokens]
        if owners is not None and i != aside:
            near = m.where((owners[:, i : i + tokens] == segments)[..., None], near, 0)
        yield near


def by_taps(m: Maths, x: Array, kernel: Array, bias: Array | None) -> Array:
    """x [..., in taps] times a kernel [out, in, taps], plus bias [out]."""
    y = m.product(x, kernel.reshape(len(kernel), -1), m.sums(x), bias)
    return m.cast(y, x.dtype)
