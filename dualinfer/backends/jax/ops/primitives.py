"""The ops of the JAX decoder, in plain XLA; a kernel takes the place of one by its signature.

Their meaning is `dualinfer/kernels/reference.py`. Shapes by letter: see `model/spec`. Profilers and
the HLO see each by its name, below the layer's. What is done with quantized weights is
in schemes.py.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....model.spec import Activation, Rope, Waves
from ....model.weights import Weight
from ....ops.caches import CacheView
from .schemes import SCHEMES, einsum

_MANY = 64  # rows of a product
_POOLED = 1024  # tokens that are pooled as one
_WHOLE = 1024  # queries whose scores are held at once

IMPLEMENTATIONS = {
    "matmul": "XLA dot",
    "embed": "XLA gather",
    "rms_norm": "XLA",
    "layer_norm": "XLA",
    "qk_norm": "XLA",
    "rotary": "XLA",
    "activation": "XLA",
    "router": "XLA",
    "experts": "XLA, in blocks of one expert's",
    "attention": "XLA, dense softmax",
    "decode_attention": "XLA, dense softmax",
    "cross_attention": "XLA, dense softmax",
    "latent_attention": "XLA over latent vectors, a head's matrices before and behind it",
    "recurrence": "XLA",
    "sampling": "XLA, threefry2x32",
}


@jax.named_scope("matmul")
def matmul(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """x [..., in] times weight [out, in], plus bias [out]; summed in float32, rounded once."""
    if bias is None and math.prod(x.shape[:-1]) > _MANY:  # else XLA writes float32 to memory first
        return SCHEMES.product(x, weight, x.dtype)
    y = SCHEMES.product(x, weight, jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


@jax.named_scope("head_product")
def head_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [N, H, D] times each head's own weight [H, O, D]: [N, H, O]."""
    return einsum("nhd,hod->nho", x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


@jax.named_scope("matmul")
def partial_product(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., in] times weight [out, in] where others have the rest of `in`.

    Few rows stay float32 until all is summed.
    """
    few = math.prod(x.shape[:-1]) <= _MANY
    dtype = jnp.float32 if few else x.dtype
    return SCHEMES.product(x, weight, dtype)


@jax.named_scope("embed")
def embed(ids: jax.Array, weight: Weight) -> jax.Array:
    """Rows of weight [V, E] for ids [...]: [..., E]. Padding may lie outside; it is clipped."""
    return SCHEMES.embed(ids, weight)


@jax.named_scope("rms_norm")
def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    unit_offset: bool = False,
    squares: jax.Array | None = None,
) -> jax.Array:
    """x / rms(x) * weight over the last axis, in float32; `unit_offset`: * (1 + weight).

    `squares` float32 [...] is the mean of squares of a longer axis, of which x has a share.
    """
    y = x.astype(jnp.float32)
    mean = jnp.mean(y * y, axis=-1, keepdims=True) if squares is None else squares[..., None]
    y = y * lax.rsqrt(mean + eps)
    factor = weight.astype(jnp.float32)
    return (y * (1 + factor if unit_offset else factor)).astype(x.dtype)


@jax.named_scope("layer_norm")
def layer_norm(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    eps: float,
    unit_offset: bool = False,
) -> jax.Array:
    """(x - mean) / std * weight + bias over the last axis, in float32.

    With `unit_offset` times 1 + weight.
    """
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32)
    y = y * (1 + factor if unit_offset else factor)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def frequencies(rope: Rope, last: jax.Array) -> jax.Array:
    """float32 [B, R/2] by which sequences turn whose last token's positions are int `last` [B].

    Of a `rope` that asks for their length.
    """
    own = jnp.array(rope.inv_freq, jnp.float32)
    if rope.long:
        return jnp.where((last >= rope.original)[:, None], jnp.array(rope.long, jnp.float32), own)
    length = jnp.maximum(last + 1, rope.original).astype(jnp.float32)
    base = rope.stretch * length / rope.original - (rope.stretch - 1)
    share = jnp.arange(len(own), dtype=jnp.float32) / (len(own) - 1)
    return own * base[:, None] ** -share


def growth(positions: jax.Array, beta: float, period: float, ahead: int) -> jax.Array:
    """What queries at int positions [B, T] are multiplied with, float32 [B, T]."""
    return 1 + beta * jnp.log(1 + jnp.floor((positions + ahead).astype(jnp.float32) / period))


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
    elif kind == "relu2":
        y = jnp.square(jax.nn.relu(y))
    else:
        y = jnp.tanh(y)
    return y.astype(x.dtype)


@jax.named_scope("activation")
def xielu(
    x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array, beta: jax.Array, eps: jax.Array
) -> jax.Array:
    """xIELU in float32; see `reference.xielu`."""
    y, *numbers = (a.astype(jnp.float32) for a in (x, alpha_p, alpha_n, beta, eps))
    alpha_p, alpha_n, beta, eps = numbers
    above = y * (jax.nn.softplus(alpha_p) * y + beta)
    below = (jnp.expm1(jnp.minimum(y, eps)) - y) * (beta + jax.nn.softplus(alpha_n)) + beta * y
    return jnp.where(y > 0, above, below).astype(x.dtype)


@jax.named_scope("convolution")
def convolution(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    stride: int,
    segments: jax.Array | None = None,
) -> jax.Array:
    """x [B, T, in] with kernel [out, in, taps] over time, zeros around it, plus bias [out].

    With `segments` [B, T] those of a token's neighbours that are of another count as zeros.
    """
    aside = kernel.shape[2] // 2
    if segments is None:
        exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        how: Any = {"dimension_numbers": ("NWC", "OIW", "NWC"), "precision": exact}
        return lax.conv_general_dilated(x, kernel, (stride,), [(aside, aside)], **how) + bias
    around = ((0, 0), (aside, aside))
    wide, owners = jnp.pad(x, (*around, (0, 0))), jnp.pad(segments, around, constant_values=-1)
    y, tokens = jnp.zeros((), jnp.float32), x.shape[1]
    for i in range(kernel.shape[2]):
        own = (owners[:, i : i + tokens] == segments)[..., None]
        near = jnp.where(own, wide[:, i : i + tokens], 0)
        wide_sum: Any = {"preferred_element_type": jnp.float32}
        y = y + einsum("bti,oi->bto", near, kernel[..., i], **wide_sum)
    return (y + bias).astype(x.dtype)


@jax.named_scope("trigrams")
def trigrams(x: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Of each token of x [B, T, W] the next one, itself and the one before: [B, T, 3 W].

    Zeros stand for those beyond a row, or in another of its `segments` [B, T].
    """
    behind, ahead = ((0, 0), (0, 1), (0, 0)), ((0, 0), (1, 0), (0, 0))
    after, before = jnp.pad(x[:, 1:], behind), jnp.pad(x[:, :-1], ahead)
    if segments is not None:
        same = (segments[:, 1:] == segments[:, :-1])[..., None]
        after = jnp.where(jnp.pad(same, behind), after, 0)
        before = jnp.where(jnp.pad(same, ahead), before, 0)
    return jnp.concatenate((after, x, before), -1)


@jax.named_scope("weave")
def weave(heads: int, first: jax.Array, second: jax.Array) -> jax.Array:
    """Packed projections [B, T, 3 H D] and [B, T, 3 H E] as one, head by head: [B, T, 3 H (D + E)].

    Queries of the second are times (D / E)^1/2, so that the scale of the first serves both.
    """
    batch, tokens, width = first.shape
    a, b = (x.reshape(batch, tokens, 3, heads, -1) for x in (first, second))
    ratio = (width / second.shape[-1]) ** 0.5
    b = jnp.concatenate((b[:, :, :1] * ratio, b[:, :, 1:]), 2)
    return jnp.concatenate((a, b), -1).reshape(batch, tokens, -1)


@jax.named_scope("weave")
def unweave(heads: int, x: jax.Array, second: int) -> tuple[jax.Array, jax.Array]:
    """The parts of heads [B, T, H (D + E)]: the first D and the `second` E elements of each."""
    batch, tokens, _ = x.shape
    y = x.reshape(batch, tokens, heads, -1)
    a, b = y[..., :-second], y[..., -second:]
    return a.reshape(batch, tokens, -1), b.reshape(batch, tokens, -1)


@jax.named_scope("gated_activation")
def gated_activation(x: jax.Array, kind: Activation) -> jax.Array:
    """activation(gate) * up for x [..., 2F] that holds gate, then up."""
    gate, up = jnp.split(x, 2, axis=-1)
    return activation(gate, kind) * up


def gate_within(x: jax.Array, kind: Activation, limit: float) -> jax.Array:
    """As `gated_activation`, of activation(gate) up to `limit`, and up within it."""
    gate, up = jnp.split(x, 2, axis=-1)
    return jnp.minimum(activation(gate, kind), limit) * jnp.clip(up, -limit, limit)


def _near(x: jax.Array, taps: int, segments: jax.Array | None) -> Iterator[jax.Array]:
    """x [B, T, E] moved by each of `taps` steps of time; zeros come in, and for other segments."""
    aside, tokens = taps // 2, x.shape[1]
    around = (0, 0), (aside, aside)
    wide = jnp.pad(x, (*around, (0, 0)))
    owners = None if segments is None else jnp.pad(segments, around, constant_values=-1)
    for i in range(taps):
        near = wide[:, i : i + tokens]
        if owners is not None:
            near = near * (owners[:, i : i + tokens] == segments)[..., None].astype(x.dtype)
        yield near


@jax.named_scope("convolve_each")
def convolve_each(x: jax.Array, kernel: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """See `BlockOps.convolve_each`."""
    total, by = jnp.zeros(x.shape, jnp.float32), kernel.astype(jnp.float32)
    for i, near in enumerate(_near(x, kernel.shape[1], segments)):
        total = total + near.astype(jnp.float32) * by[:, i]
    return total.astype(x.dtype)


@jax.named_scope("mix_spans")
def mix_spans(
    x: jax.Array, scores: jax.Array, taps: int, segments: jax.Array | None = None
) -> jax.Array:
    """See `BlockOps.mix_spans`."""
    lead = x.shape[:-1]
    weights = jax.nn.softmax(scores.reshape(*lead, -1, taps).astype(jnp.float32), -1)
    total = jnp.zeros((*lead, weights.shape[-2], x.shape[-1] // weights.shape[-2]), jnp.float32)
    for i, near in enumerate(_near(x, taps, segments)):
        total = total + near.reshape(total.shape).astype(jnp.float32) * weights[..., i, None]
    return total.astype(x.dtype).reshape(x.shape)


@jax.named_scope("patches")
def patches(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Patches [B, T, C h w] of images times kernel [E, C, h, w], plus bias [E]: [B, T, E]."""
    flat = kernel.reshape(len(kernel), -1)
    y = einsum("btc,ec->bte", x, flat, preferred_element_type=jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


@jax.named_scope("hear")
def hear(
    x: jax.Array, first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """What two gated convolutions make of tokens [B, T, W] as `spec.Sounds` has them: [B, T, E].

    Each is a kernel [out, in, taps] and a bias [out].
    """
    x = x[..., :-1].reshape(*x.shape[:2], second[0].shape[2], -1)
    h = jax.nn.glu(_heard(x[..., :-1], *first)) * x[..., -1:]
    return jax.nn.glu(_heard(h.swapaxes(-1, -2).reshape(*h.shape[:2], -1), *second))


@jax.named_scope("hear")
def hear_waves(
    own: Waves,
    x: jax.Array,
    norm: tuple[jax.Array, jax.Array],
    first: tuple[jax.Array, None],
    second: tuple[jax.Array, jax.Array],
    third: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """As `hear`, of tokens as `spec.Waves` has them; `norm` is a weight and a bias [E]."""
    x = x[..., :-1].reshape(*x.shape[:2], own.windows, -1)
    counts = x[..., -1:].astype(jnp.float32)
    h = jnp.tanh(_heard(x[..., :-1], *first)).astype(jnp.float32)
    over: Any = {"axis": (1, 2, 3), "keepdims": True}
    count = jnp.maximum(counts.sum(**over) * h.shape[-1], 1)
    mean = (h * counts).sum(**over) / count
    variance = (jnp.square(h - mean) * counts).sum(**over) / count
    h = (h[:, :, : own.seen] - mean) * lax.rsqrt(variance + own.eps)
    h = (h * norm[0].astype(jnp.float32) + norm[1].astype(jnp.float32)).astype(x.dtype)
    # Over places that a token sees, the taps of the second convolution for each of the third.
    starts = [own.strides[1] * i for i in range(own.taps[2])]
    h = jnp.stack([h[:, :, i : i + own.taps[1]] for i in starts], 2).swapaxes(-1, -2)
    h = activation(_heard(h.reshape(*h.shape[:3], -1), *second), "gelu").swapaxes(-1, -2)
    return activation(_heard(h.reshape(*h.shape[:2], -1), *third), "gelu")


def _heard(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x [..., in taps] times a kernel [out, in, taps], plus bias [out]."""
    flat = kernel.reshape(len(kernel), -1)
    y = einsum("...c,ec->...e", x, flat, preferred_element_type=jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


@jax.named_scope("blend")
def blend(by: jax.Array, weight: Weight) -> jax.Array:
    """Float32 [..., E]: sums of the rows of weight [P, E], times `by` [..., P]."""
    rows = embed(jnp.arange(by.shape[-1]), weight).astype(jnp.float32)
    return jnp.matmul(by, rows, precision=lax.Precision.HIGHEST)


@jax.jit
def contrast(
    texts: jax.Array, images: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cosines [N, M] of texts [N, E] and images [M, E] times e^scale, plus bias; unit vectors."""
    texts, images = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (texts, images))
    scores = jnp.matmul(texts, images.T, precision=lax.Precision.HIGHEST) * jnp.exp(scale)
    return scores if bias is None else scores + bias, texts, images


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
    alibi_scale: float | None = None,
    positions: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    relative: jax.Array | None = None,
) -> jax.Array:
    """Attention of whole sequences: q [B, T, H, D], k and v [B, T, K, D] to [B, T, H, D].

    Values may have another width than keys, and then the result has it. `mask` bool [B, T] hides
    keys, `segments` int [B, T] separates packed sequences. A query that would see nothing sees
    itself, so that it stays finite. `alibi` and `sinks` are float32 [H], `positions` int [B, T] are
    what the slopes of `alibi` count, `alibi_scale` as in `alibi_bias`. k and v may be float32 where
    q is not, as a cache in codes keeps them. `relative` [H, 2M+1] is as in `relative_bias`.
    """
    dtype, q = q.dtype, q.astype(k.dtype)
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
            bias = alibi_bias(alibi, keys_at, keys_at[:, at], alibi_scale)
            scores += bias.reshape(bias.shape[0], kv_heads, -1, *bias.shape[2:])
        if relative is not None:
            bias = relative_bias(relative, jnp.arange(tokens)[None], at[None])
            scores += bias.reshape(1, kv_heads, -1, *bias.shape[2:])
        visible = visible_keys(tokens, causal, window, mask, segments, at)
        weights = _softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), sinks)
        return einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)

    if tokens <= _WHOLE or tokens % _WHOLE:
        return rows(grouped, 0).reshape(*q.shape[:-1], -1).astype(dtype)
    # Scores of all queries at once would take B * H * T * T floats.
    parts = grouped.reshape(batch, -1, _WHOLE, *grouped.shape[2:]).swapaxes(0, 1)
    starts = jnp.arange(0, tokens, _WHOLE)
    out = lax.map(lambda pair: rows(*pair), (parts, starts))
    return out.swapaxes(0, 1).reshape(*q.shape[:-1], -1).astype(dtype)


def alibi_bias(
    slopes: jax.Array, keys: jax.Array, queries: jax.Array, scale: float | None
) -> jax.Array:
    """What ALiBi adds to scores, float32 [B, H, T, S], of int positions [B, S] and [B, T].

    Slopes [H] times how far a key lies ahead; with `scale` its product with the difference of
    slopes times positions, both rounded to bfloat16.
    """
    if scale is None:
        ahead = (keys[:, None, :] - queries[:, :, None]).astype(jnp.float32)
        return slopes[:, None, None] * ahead[:, None]

    def rounded(x: jax.Array) -> jax.Array:  # a cast there and back is none to XLA
        return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)

    def at(positions: jax.Array) -> jax.Array:
        return rounded(slopes[:, None] * rounded(positions)[:, None])

    return (at(keys)[:, :, None, :] - at(queries)[..., None]) * scale


def relative_bias(table: jax.Array, keys: jax.Array, queries: jax.Array) -> jax.Array:
    """What distances add to scores, float32 [B, H, T, S], of int positions [B, S] and [B, T].

    Column M + n of the table [H, 2M+1] is for keys that lie n tokens behind the query; the first
    and the last are also for those that lie farther.
    """
    most = table.shape[1] // 2
    away = jnp.clip(keys[:, None, :] - queries[:, :, None], -most, most) + most
    return table[:, away].swapaxes(0, 1).astype(jnp.float32)


@jax.named_scope("attention")
def disentangled_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array | None,
    queries: jax.Array | None,
    *,
    scale: float,
    mask: jax.Array | None,
    segments: jax.Array | None,
) -> jax.Array:
    """Attention of whole sequences, to whose scores distances add: [B, T, H, D] as q, k and v.

    Keys and queries [H, 2N+1, D] are of keys that lie -N to N tokens behind the query, or farther.
    `mask` and `segments` are as in `attention`. Scores are float32 (DeBERTa, arXiv:2006.03654).
    """
    at, wide = jnp.arange(q.shape[1]), jnp.float32
    scores = einsum("bthd,bshd->bhts", q, k, preferred_element_type=wide)

    def added(x: jax.Array, table: jax.Array, away: jax.Array) -> jax.Array:
        """Each row of x [B, T, H, D] with the row of the table of each distance: [B, H, T, T]."""
        near = table.shape[1] // 2
        products = einsum("bthd,hpd->bhtp", x, table, preferred_element_type=wide)
        return jnp.take_along_axis(products, (jnp.clip(away, -near, near) + near)[None, None], -1)

    if keys is not None:
        scores += added(q, keys, at[None, :] - at[:, None])
    if queries is not None:
        scores += added(k, queries, at[:, None] - at[None, :]).swapaxes(-1, -2)
    visible = visible_keys(q.shape[1], False, None, mask, segments, at)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores * scale, -jnp.inf), axis=-1)
    return einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)


@jax.named_scope("cross_attention")
def cross_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Attention to other sequences: q [B, T, H, D], k and v [B, K, S, D] to [B, T, H, D].

    bool `visible` [B, S] shows keys, None all. `softcap` as in `attention`.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    scores = einsum("btkgd,bksd->bkgts", grouped, k, preferred_element_type=jnp.float32) * scale
    scores = _capped(scores, softcap)
    if visible is not None:
        scores = jnp.where(visible[:, None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return einsum("bkgts,bksd->btkgd", weights, v).reshape(q.shape)


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


@jax.named_scope("pool")
def pool(
    x: jax.Array,
    weights: jax.Array,
    segments: jax.Array | None = None,
    count: int = 1,
    largest: bool = False,
) -> jax.Array:
    """See `contract.BlockOps.pool`."""
    x = x.astype(jnp.float32)
    if segments is None:
        segments = jnp.zeros(weights.shape, jnp.int32)
    if largest:
        nobody = jnp.where(weights != 0, segments, count)
        out = jnp.full((x.shape[0], count, x.shape[2]), -jnp.inf)
        out = out.at[jnp.arange(len(x))[:, None], nobody].max(x, mode="drop")
        return jnp.where(jnp.isneginf(out), 0.0, out)
    owner = jnp.arange(count)[None, :, None] == segments[:, None, :]
    shares = jnp.where(owner, weights[:, None, :], 0.0)
    if count == 1:
        return (shares[:, 0, :, None] * x).sum(1, keepdims=True)
    # A product of many tokens and few results leaves a GPU idle: parts of them run side by side.
    parts = x.shape[1] // _POOLED if x.shape[1] % _POOLED == 0 else 1
    shares = shares.reshape(*shares.shape[:2], parts, -1)
    x = x.reshape(x.shape[0], parts, -1, x.shape[2])
    return einsum("bmnt,bnte->bnme", shares, x).sum(1)


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
        if not causal:
            visible &= at[None, :] < rows[:, None] + window
    if mask is not None:
        visible = visible & mask[:, None, :]
    if segments is not None:
        visible = visible & (segments[:, rows, None] == segments[:, None, :])
    blind = ~visible.any(axis=-1, keepdims=True)
    return visible | (blind & (at[None, :] == rows[:, None]))


def chunks(size: int, keys: int, mask: jax.Array | None, segments: jax.Array | None) -> jax.Array:
    """Segments int [B or 1, keys] of `size` keys each, from the first that `mask` shows.

    Within given ones they lie where HF has them, by the place in the row.
    """
    at = jnp.arange(keys, dtype=jnp.int32)[None]
    if mask is not None:
        at = at - (jnp.cumsum(mask, axis=-1) == 0).sum(axis=-1, keepdims=True, dtype=jnp.int32)
    own = at // size
    return own if segments is None else segments * keys + own


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
    chunk: int | None = None,
    alibi: jax.Array | None = None,
    alibi_scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    relative: jax.Array | None = None,
) -> jax.Array:
    """Attention of one query a slot, q [N, H, D], to the `lengths` [N] cached tokens: [N, H, D].

    The query is the last of them, and sees those of its own `chunk` of tokens. `alibi` and `sinks`
    are float32 [H], `alibi_scale` as in `alibi_bias`, `relative` as in `attention`.
    """
    slots, heads, dim = q.shape
    keys, values = cache.read()
    dtype, q = q.dtype, q.astype(keys.dtype)
    kv_heads = keys.shape[1]
    at = jnp.arange(cache.capacity)[None]
    visible = at < lengths[:, None]
    if window is not None:
        visible &= at >= lengths[:, None] - window
    if chunk is not None:
        visible &= at >= (lengths[:, None] - 1) // chunk * chunk
    grouped = q.reshape(slots, kv_heads, heads // kv_heads, dim)
    scores = einsum("nkgd,nksd->nkgs", grouped, keys, preferred_element_type=jnp.float32)
    scores = _capped(scores * scale, softcap)
    if alibi is not None:
        bias = alibi_bias(alibi, at, lengths[:, None] - 1, alibi_scale)
        scores += bias.reshape(slots, kv_heads, -1, cache.capacity)
    if relative is not None:
        bias = relative_bias(relative, at, lengths[:, None] - 1)
        scores += bias.reshape(slots, kv_heads, -1, cache.capacity)
    weights = _softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), sinks)
    y = einsum("nkgs,nksd->nkgd", weights.astype(values.dtype), values)
    return y.reshape(q.shape).astype(dtype)
