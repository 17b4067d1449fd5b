"""Norms over the last axis."""

from .contract import Array, BlockOps, NormOf
from .maths import Maths, named


def plain_norm(m: Maths, x: Array, norm: NormOf) -> Array:
    """A norm of x [..., E], as its spec says."""
    spec, weight, bias = norm.spec, norm.weight, norm.bias
    if spec.kind == "affine":
        return x * weight + bias
    if spec.kind == "rms":
        return rms_norm(m, x, weight, spec.eps, spec.unit_offset)
    return layer_norm(m, x, weight, bias, spec.eps, spec.unit_offset)


@named("rms_norm")
def rms_norm(
    m: Maths,
    x: Array,
    weight: Array | None,
    eps: float,
    unit_offset: bool = False,
    squares: Array | None = None,
) -> Array:
    """x / rms(x) * weight over the last axis, in float32 (Zhang and Sennrich, 2019).

    With `unit_offset` times 1 + weight; None is a weight of ones. `squares` float32 [...] is the
    mean of squares of a longer axis, of which x has a share.
    """
    y = m.wide(x)
    mean = (y * y).mean(-1, keepdims=True) if squares is None else squares[..., None]
    y = y * m.rsqrt(mean + eps)
    if weight is not None:
        factor = m.wide(weight)
        y = y * (1 + factor if unit_offset else factor)
    return m.cast(y, x.dtype)


@named("layer_norm")
def layer_norm(
    m: Maths,
    x: Array,
    weight: Array,
    bias: Array | None,
    eps: float,
    unit_offset: bool = False,
) -> Array:
    """(x - mean) / std * weight + bias over the last axis, in float32 (Ba et al., 2016).

    The variance is divided by E, not by E - 1. With `unit_offset` times 1 + weight.
    """
    if weight.ndim == 1 and not unit_offset:
        return m.layer_norm(x, weight, bias, eps)
    factor = m.wide(weight)
    y = m.layer_norm(m.wide(x), None, None, eps) * (1 + factor if unit_offset else factor)
    return m.cast(y if bias is None else y + m.wide(bias), x.dtype)


def norm_shared(ops: BlockOps, x: Array, norm: NormOf, width: int) -> Array:
    """Each device's share [..., in/devices] of `width` elements, RMS-normed as all are."""
    if x.shape[-1] == width:
        return ops.norm(x, norm)
    assert norm.spec.kind == "rms"
    y = ops.maths.wide(x)
    squares = ops.sum((y * y).sum(-1)) / width
    how = norm.weight, norm.spec.eps, norm.spec.unit_offset
    return rms_norm(ops.maths, x, *how, squares)
