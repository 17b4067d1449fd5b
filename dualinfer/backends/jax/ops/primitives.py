"""The ops of the JAX decoder, in plain XLA; a kernel takes the place of one by its signature.

Their meaning is `dualinfer/kernels/reference.py`. Shapes by letter: see `spec.py`. Profilers and
the HLO see each by its name, below the layer's. What is done with a quantized weight is looked up
in `SCHEMES` alone.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....model.spec import Activation
from ....model.weights import Weight
from ...caches import CacheView
from ...schemes import Schemes

_MANY = 64  # rows of a product
_WHOLE = 1024  # queries whose scores are held at once

IMPLEMENTATIONS = {
    "matmul": "XLA dot",
    "embed": "XLA gather",
    "rms_norm": "XLA",
    "layer_norm": "XLA",
    "rotary": "XLA",
    "activation": "XLA",
    "attention": "XLA, dense softmax",
    "decode_attention": "XLA, dense softmax",
    "sampling": "XLA, threefry2x32",
}


def einsum(equation: str, *operands: jax.Array, **kwargs) -> jax.Array:
    """jnp.einsum in which float32 means float32: no TF32 on a GPU."""
    exact = lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(equation, *operands, precision=exact, **kwargs)


SCHEMES = Schemes("jax")


def dequantize(weight: Weight) -> jax.Array:
    """The matrix that a weight stands for, in its dtype."""
    return weight.data if weight.scheme is None else SCHEMES.of(weight.scheme).dequantize(weight)


def _product(x: jax.Array, weight: Weight, dtype: Any) -> jax.Array:
    """x [..., in] times weight [out, in], summed in float32, in `dtype`."""
    product = None if weight.scheme is None else SCHEMES.of(weight.scheme).product
    if product is None:
        return einsum("...i,oi->...o", x, dequantize(weight), preferred_element_type=dtype)
    return product(x, weight, dtype)


@jax.named_scope("matmul")
def matmul(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """x [..., in] times weight [out, in], plus bias [out]; summed in float32, rounded once."""
    if bias is None and math.prod(x.shape[:-1]) > _MANY:  # else XLA writes float32 to memory first
        return _product(x, weight, x.dtype)
    y = _product(x, weight, jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


@jax.named_scope("matmul")
def partial_product(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., in] times weight [out, in] where others have the rest of `in`.

    Few rows stay float32 until all is summed.
    """
    few = math.prod(x.shape[:-1]) <= _MANY
    dtype = jnp.float32 if few else x.dtype
    return _product(x, weight, dtype)


@jax.named_scope("embed")
def embed(ids: jax.Array, weight: Weight) -> jax.Array:
    """Rows of weight [V, E] for ids [...]: [..., E]. Padding may lie outside; it is clipped."""
    rows = None if weight.scheme is None else SCHEMES.of(weight.scheme).embed
    if rows is not None:
        return rows(ids, weight)
    return jnp.take(dequantize(weight), ids, axis=0, mode="clip")


@jax.named_scope("rms_norm")
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, unit_offset: bool = False) -> jax.Array:
    """x / rms(x) * weight over the last axis, in float32; `unit_offset`: * (1 + weight)."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32)
    return (y * (1 + factor if unit_offset else factor)).astype(x.dtype)


@jax.named_scope("layer_norm")
def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / std * weight + bias over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@jax.named_scope("rotary")
def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False) -> jax.Array:
    """Rotate the start of each head of x [B, T, heads, D] by cos and sin, float32 [B, T, R/2].

    Its R elements are halves that turn together, or pairs if `interleaved`.
    """
    turning, rest = jnp.split(x, (2 * cos.shape[-1],), axis=-1)
    wide = turning.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    parts = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        turned = jnp.stack(parts, axis=-1).reshape(turning.shape)
    else:
        turned = jnp.concatenate(parts, axis=-1)
    return jnp.concatenate((turned.astype(x.dtype), rest), axis=-1)


@jax.named_scope("activation")
def activation(x: jax.Array, kind: Activation) -> jax.Array:
    """An activation by our name of it, in float32."""
    y = x.astype(jnp.float32)
    if kind == "silu":
        y = jax.nn.silu(y)
    elif kind == "gelu":
        y = jax.nn.gelu(y, approximate=False)
    elif kind == "gelu_tanh":
        y = jax.nn.gelu(y, approximate=True)
    elif kind == "quick_gelu":
        y = y * jax.nn.sigmoid(1.702 * y)
    elif kind == "relu":
        y = jax.nn.relu(y)
    else:
        y = jnp.tanh(y)
    return y.astype(x.dtype)


@jax.named_scope("gated_activation")
def gated_activation(x: jax.Array, kind: Activation) -> jax.Array:
    """activation(gate) * up for x [..., 2F] that holds gate, then up."""
    gate, up = jnp.split(x, 2, axis=-1)
    return activation(gate, kind) * up


@jax.named_scope("attention")
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    mask: jax.Array | None = None,
    segments: jax.Array | None = None,
    alibi: jax.Array | None = None,
    positions: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of whole sequences: q [B, T, H, D], k and v [B, T, K, D] to [B, T, H, D].

    `mask` bool [B, T] hides keys, `segments` int [B, T] separates packed sequences. A query that
    would see nothing sees itself, so that it stays finite. `alibi` and `sinks` are float32 [H],
    `positions` int [B, T] are what the slopes of `alibi` count.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    keys_at = jnp.arange(tokens)[None] if positions is None else positions

    def rows(part: jax.Array, start: Any) -> jax.Array:
        """The result for the queries `part` [B, R, K, G, D] from row `start` on."""
        at = start + jnp.arange(part.shape[1])
        scores = einsum("btkgd,bskd->bkgts", part, k, preferred_element_type=jnp.float32)
        scores = _capped(scores * scale, softcap)
        if alibi is not None:
            ahead = (keys_at[:, None, :] - keys_at[:, at, None]).astype(jnp.float32)
            scores += alibi.reshape(kv_heads, -1, 1, 1) * ahead[:, None, None]
        visible = visible_keys(tokens, causal, window, mask, segments, at)
        weights = _softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), sinks)
        return einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)

    if tokens <= _WHOLE or tokens % _WHOLE:
        return rows(grouped, 0).reshape(q.shape)
    # Scores of all queries at once would take B * H * T * T floats.
    parts = grouped.reshape(batch, -1, _WHOLE, *grouped.shape[2:]).swapaxes(0, 1)
    starts = jnp.arange(0, tokens, _WHOLE)
    out = lax.map(lambda pair: rows(*pair), (parts, starts))
    return out.swapaxes(0, 1).reshape(q.shape)


def _capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax of scores [B, K, G, ..., S] over the last axis, each head's sink [H] beside them."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    heads = scores.shape[1:3]
    beside = sinks.reshape(*heads, *(1,) * (scores.ndim - 3))
    beside = jnp.broadcast_to(beside, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate((scores, beside), axis=-1), axis=-1)[..., :-1]


def visible_keys(
    tokens: int,
    causal: bool,
    window: int | None,
    mask: jax.Array | None,
    segments: jax.Array | None,
    rows: jax.Array,
) -> jax.Array:
    """bool [B or 1, R, T]: whether a query at `rows` [R] (second axis) sees a key (last axis)."""
    at = jnp.arange(tokens)
    visible = jnp.ones((1, len(rows), tokens), bool)
    if causal:
        visible &= at[None, :] <= rows[:, None]
    if window is not None:
        visible &= at[None, :] > rows[:, None] - window
    if mask is not None:
        visible = visible & mask[:, None, :]
    if segments is not None:
        visible = visible & (segments[:, rows, None] == segments[:, None, :])
    blind = ~visible.any(axis=-1, keepdims=True)
    return visible | (blind & (at[None, :] == rows[:, None]))


@jax.named_scope("append")
def write(cache: CacheView, slots: jax.Array, k: jax.Array, v: jax.Array) -> CacheView:
    """See `CacheView.write`."""
    return cache.write(slots, k, v)


@jax.named_scope("append")
def append(cache: CacheView, k: jax.Array, v: jax.Array, lengths: jax.Array) -> CacheView:
    """See `CacheView.append`."""
    return cache.append(k, v, lengths)


@jax.named_scope("decode_attention")
def decode_attention(
    q: jax.Array,
    cache: CacheView,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    alibi: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one query a slot, q [N, H, D], to the `lengths` [N] cached tokens: [N, H, D].

    The query is the last of them. `alibi` and `sinks` are float32 [H].
    """
    slots, heads, dim = q.shape
    keys, values = cache.read()
    kv_heads = keys.shape[1]
    at = jnp.arange(cache.capacity)[None]
    visible = at < lengths[:, None]
    if window is not None:
        visible &= at >= lengths[:, None] - window
    grouped = q.reshape(slots, kv_heads, heads // kv_heads, dim)
    scores = einsum("nkgd,nksd->nkgs", grouped, keys, preferred_element_type=jnp.float32)
    scores = _capped(scores * scale, softcap)
    if alibi is not None:
        ahead = (at - (lengths[:, None] - 1)).astype(jnp.float32)
        scores += alibi.reshape(kv_heads, -1, 1) * ahead[:, None, None]
    weights = _softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), sinks)
    return einsum("nkgs,nksd->nkgd", weights.astype(values.dtype), values).reshape(q.shape)
