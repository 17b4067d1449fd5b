"""Heads as caches and attention take them: values as wide as keys, and one value for each head."""

import jax
import jax.numpy as jnp

from ....model.spec import LAMBDAS, Attention
from ....ops.contract import Weights
from . import primitives


@jax.named_scope("heads")
def widen(a: Attention, qkv: jax.Array) -> jax.Array:
    """See `BlockOps.widen_heads`."""
    if a.difference is not None:
        return _doubled(a, qkv)
    others, values = jnp.split(qkv, (sum(a.qkv_sizes[:2]),), axis=-1)
    heads = values.reshape(*values.shape[:-1], a.kv_heads, -1) * a.value_scale
    beside = [(0, 0)] * (heads.ndim - 1) + [(0, a.head_dim - heads.shape[-1])]
    heads = jnp.pad(heads, beside).reshape(*values.shape[:-1], -1)
    return jnp.concatenate((others, heads), axis=-1)


@jax.named_scope("heads")
def narrow(a: Attention, y: jax.Array, w: Weights) -> jax.Array:
    """See `BlockOps.narrow_heads`."""
    if a.difference is not None:
        return _subtracted(a, y, w)
    heads = y.reshape(*y.shape[:-1], a.heads, -1)[..., : a.value_dim or a.head_dim]
    return heads.reshape(*y.shape[:-1], -1)


@jax.named_scope("heads")
def bias_keys(a: Attention, qkv: jax.Array, numbers: jax.Array, w: Weights) -> jax.Array:
    """See `BlockOps.bias_keys`."""
    assert a.qk_norm is not None
    lead, ends = qkv.shape[:-1], (a.qkv_sizes[0], sum(a.qkv_sizes[:2]))
    q, k, v = (x.reshape(*lead, -1, a.head_dim) for x in jnp.split(qkv, ends, axis=-1))
    q = primitives.rms_norm(q, w["q_norm.weight"], a.qk_norm.eps)
    k = primitives.rms_norm(k, w["k_norm.weight"], a.qk_norm.eps)
    bias = jnp.exp(w["key_factor"] * jax.nn.softplus(numbers.astype(jnp.float32)))
    one_more = [(0, 0)] * (q.ndim - 1) + [(0, 1)]
    q = jnp.pad(q, one_more, constant_values=1 / a.scale)
    k = jnp.concatenate((k, bias.astype(k.dtype)[..., None]), -1)
    parts = q, k, jnp.pad(v, one_more)
    return jnp.concatenate([part.reshape(*lead, -1) for part in parts], -1)


def _doubled(a: Attention, qkv: jax.Array) -> jax.Array:
    """Each head twice, for the two values that it reads."""
    lead = qkv.shape[:-1]
    q, k, v = jnp.split(qkv, (a.qkv_sizes[0], sum(a.qkv_sizes[:2])), axis=-1)
    q = jnp.repeat(q.reshape(*lead, a.kv_heads, 1, -1), 2, axis=-2)
    k = jnp.repeat(k.reshape(*lead, a.kv_heads, 1, -1), 2, axis=-2)
    v = v.reshape(*lead, 2, -1, a.head_dim).swapaxes(-2, -3)
    parts = q, k, jnp.concatenate((v, v), axis=-3)
    return jnp.concatenate([part.reshape(*lead, -1) for part in parts], axis=-1)


def _subtracted(a: Attention, y: jax.Array, w: Weights) -> jax.Array:
    """The first half of heads minus a part of the second, each of both its values."""
    assert a.difference is not None
    q1, k1, q2, k2 = (w[name] for name in LAMBDAS)
    more, less = (
        jnp.exp((q * k).astype(jnp.float32).sum(-1)).astype(y.dtype)
        for q, k in ((q1, k1), (q2, k2))
    )
    lead = y.shape[:-1]
    heads = y.reshape(*lead, a.kv_heads, 2, -1, a.head_dim).swapaxes(-2, -3)
    first, second = jnp.split(heads.reshape(*lead, a.heads, -1), 2, axis=-2)
    left = first - (more - less + a.difference) * second
    normed = primitives.rms_norm(left, jnp.ones_like(left[..., :1]), a.difference_eps)
    return ((1 - a.difference) * normed).reshape(*lead, -1)
