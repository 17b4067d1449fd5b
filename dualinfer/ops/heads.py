"""Heads as caches and attention take them: values as wide as keys, and one value for each head."""

from ..model.spec import LAMBDAS, Attention
from .contract import Array, NormOf, Weights
from .maths import Maths, cut, flat, heads, named
from .norms import plain_norm, rms_norm


@named("heads")
def widen(m: Maths, a: Attention, qkv: Array) -> Array:
    """Packed qkv [B, T, ...] of `a` as `a.widened` has it.

    Values that are narrower than keys are times their scale, with zeros behind each. Heads of a
    difference are there twice, once for each value that they read.
    """
    if a.difference is not None:
        return _doubled(m, a, qkv)
    others, values = cut(qkv, sum(a.qkv_sizes[:2]), a.qkv_sizes[2])
    values = heads(values, a.kv_heads) * a.value_scale
    values = m.pad(values, -1, 0, a.head_dim - values.shape[-1])
    return m.join((others, flat(values)), -1)


@named("heads")
def narrow(m: Maths, a: Attention, y: Array, w: Weights) -> Array:
    """Results of the heads of `a.widened`, [B, T, ...], as those of `a`: [B, T, H value_dim].

    What values were widened by is left out. Of heads of a difference it is made as
    `spec.Attention` says, by the layer's vectors [D] of `LAMBDAS`: [B, T, H D].
    """
    if a.difference is not None:
        return _subtracted(m, a, y, w)
    return flat(heads(y, a.heads)[..., : a.value_dim or a.head_dim])


@named("heads")
def bias_keys(m: Maths, a: Attention, qkv: Array, numbers: Array, w: Weights) -> Array:
    """Packed qkv [B, T, ...] of `a` as `a.widened` has it, where keys are biased.

    Queries and keys are normed. Behind the elements of a key is its bias, of `numbers` [B, T, K]
    and the layer's factors [K], behind those of a query the inverse of the scale, and behind those
    of a value 0. HF's `DogeAttention`.
    """
    assert a.qk_norm is not None
    q, k, v = (heads(part, width=a.head_dim) for part in cut(qkv, *a.qkv_sizes))
    q = rms_norm(m, q, w["q_norm.weight"], a.qk_norm.eps)
    k = rms_norm(m, k, w["k_norm.weight"], a.qk_norm.eps)
    bias = m.cast(m.exp(w["key_factor"] * m.softplus(m.wide(numbers))), qkv.dtype)
    q, v = m.pad(q, -1, 0, 1, 1 / a.scale), m.pad(v, -1, 0, 1)
    k = m.join((k, bias[..., None]), -1)
    return m.join([flat(part) for part in (q, k, v)], -1)


def norm_values(m: Maths, a: Attention, qkv: Array, norm: NormOf) -> Array:
    """Packed qkv [B, T, (H+2K) D] with each head's value normed; it may be overwritten."""
    values = heads(qkv[..., -a.qkv_sizes[2] :], width=a.head_dim)
    return m.replace_last(qkv, flat(plain_norm(m, values, norm)))


def with_keys_of(m: Maths, a: Attention, q: Array, qkv: Array) -> Array:
    """The first H D elements of q, and the keys and values of packed qkv behind them, anew."""
    queries = a.qkv_sizes[0]
    return m.join((q[..., :queries], qkv[..., queries:]), -1)


def _doubled(m: Maths, a: Attention, qkv: Array) -> Array:
    """Each head twice, for the two values that it reads."""
    lead = qkv.shape[:-1]
    q, k, v = cut(qkv, *a.qkv_sizes)
    q, k = (_twice(m, x.reshape(*lead, a.kv_heads, 1, -1)) for x in (q, k))
    v = v.reshape(*lead, 2, -1, a.head_dim).swapaxes(-2, -3)
    parts = q, k, m.join((v, v), -3)
    return m.join([part.reshape(*lead, -1) for part in parts], -1)


def _twice(m: Maths, x: Array) -> Array:
    return m.broadcast(x, (*x.shape[:-2], 2, x.shape[-1]))


def _subtracted(m: Maths, a: Attention, y: Array, w: Weights) -> Array:
    """The first half of heads minus a part of the second, each of both its values."""
    assert a.difference is not None
    q1, k1, q2, k2 = (w[name] for name in LAMBDAS)
    more, less = (m.cast(m.exp(m.wide(q * k).sum(-1)), y.dtype) for q, k in ((q1, k1), (q2, k2)))
    lead = y.shape[:-1]
    y = y.reshape(*lead, a.kv_heads, 2, -1, a.head_dim).swapaxes(-2, -3)
    y = y.reshape(*lead, a.heads, -1)
    first, second = y[..., : a.heads // 2, :], y[..., a.heads // 2 :, :]
    left = first - (more - less + a.difference) * second
    return flat((1 - a.difference) * rms_norm(m, left, None, a.difference_eps))
