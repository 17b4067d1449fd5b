"""The ops of the torch decoder, in plain torch; a kernel takes the place of one by its signature.

Their meaning is `dualinfer/kernels/reference.py`. Shapes by letter: see `model/spec`. What is done
with quantized weights is in schemes.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from ....model.spec import Activation, Rope, Waves
from ....model.weights import Weight
from ....ops.caches import CacheView
from ..profiling import named
from .schemes import SCHEMES

SDPA = "torch.nn.functional.scaled_dot_product_attention"
IMPLEMENTATIONS = {
    "matmul": "torch.nn.functional.linear",
    "embed": "torch.nn.functional.embedding",
    "rms_norm": "plain torch",
    "layer_norm": "torch.nn.functional.layer_norm",
    "qk_norm": "plain torch",
    "rotary": "plain torch",
    "activation": "torch.nn.functional",
    "router": "plain torch",
    "experts": "plain torch, one expert after another",
    "attention": f"{SDPA}; plain torch with ALiBi, a soft cap or sinks",
    "decode_attention": f"{SDPA}; plain torch with ALiBi, a soft cap or sinks",
    "cross_attention": SDPA,
    "latent_attention": f"{SDPA} over latent vectors, a head's matrices before and behind it",
    "recurrence": "plain torch",
    "sampling": "plain torch, threefry2x32",
}


@named("matmul")
def matmul(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in], plus bias [out]."""
    if weight.scheme is None:
        return F.linear(x, weight.data, bias)
    y = SCHEMES.product(x, weight, x.dtype)
    return y if bias is None else y + bias


@named("head_product")
def head_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, H, D] times each head's own weight [H, O, D]: [N, H, O]."""
    return (x.transpose(0, 1) @ weight.mT).transpose(0, 1)


@named("embed")
def embed(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Rows of weight [V, E] for ids [...]: [..., E]."""
    if weight.scheme is None:
        return F.embedding(ids, weight.data)
    return SCHEMES.embed(ids, weight)


@named("rms_norm")
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, in float32; `unit_offset`: * (1 + weight).

    `squares` float32 [...] is the mean of squares of a longer axis, of which x has a share.
    """
    y = x.float()
    mean = y.pow(2).mean(-1, keepdim=True) if squares is None else squares[..., None]
    y = y * torch.rsqrt(mean + eps)
    factor = weight.float()
    return (y * (1 + factor if unit_offset else factor)).to(x.dtype)


@named("layer_norm")
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    unit_offset: bool = False,
) -> torch.Tensor:
    """(x - mean) / std * weight + bias over the last axis; `unit_offset`: * (1 + weight)."""
    if weight.dim() == 1 and not unit_offset:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    y = y * (1 + weight.float() if unit_offset else weight.float())
    return (y if bias is None else y + bias.float()).to(x.dtype)


def frequencies(rope: Rope, tables: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """float32 [B, R/2] by which sequences turn whose last token's positions are int `last` [B].

    Of a `rope` that asks for their length; `tables` are its own, on the device.
    """
    if rope.long:
        short, long = tables
        return torch.where((last >= rope.original)[:, None], long, short)
    length = (last + 1).clamp(min=rope.original).float()
    base = rope.stretch * length / rope.original - (rope.stretch - 1)
    share = torch.arange(len(tables), device=tables.device) / (len(tables) - 1)
    return tables * base[:, None] ** -share


def growth(positions: torch.Tensor, beta: float, period: float, ahead: int) -> torch.Tensor:
    """What queries at int positions [B, T] are multiplied with, float32 [B, T]."""
    return 1 + beta * torch.log(1 + torch.floor((positions + ahead).float() / period))


@named("rotary")
def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the start of each head of x [B, T, heads, D] by cos and sin, float32 [B, T, R/2].

    Its R elements are halves that turn together, or pairs if `interleaved`.
    """
    size = 2 * cos.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    wide = turning.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@named("activation")
def activation(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """An activation by our name of it."""
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return F.relu(x).square()
    return torch.tanh(x)


@named("activation")
def xielu(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
) -> torch.Tensor:
    """xIELU in float32; see `reference.xielu`."""
    y, beta = x.float(), beta.float()
    above = y * (F.softplus(alpha_p.float()) * y + beta)
    below = torch.expm1(torch.minimum(y, eps.float())) - y
    below = below * (beta + F.softplus(alpha_n.float())) + beta * y
    return torch.where(y > 0, above, below).to(x.dtype)


@named("convolution")
def convolution(
    x: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor,
    stride: int,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [B, T, in] with kernel [out, in, taps] over time, zeros around it, plus bias [out].

    With `segments` [B, T] those of a token's neighbours that are of another count as zeros.
    """
    aside = kernel.shape[2] // 2
    if segments is None:
        y = F.conv1d(x.transpose(1, 2), kernel, bias, stride, padding=aside)
        return y.transpose(1, 2).contiguous()
    wide, tokens = F.pad(x, (0, 0, aside, aside)), x.shape[1]
    owners, near = F.pad(segments, (aside, aside), value=-1), []
    for i in range(kernel.shape[2]):
        own = owners[:, i : i + tokens] == segments
        near.append(wide[:, i : i + tokens] * own[..., None])
    return F.linear(torch.cat(near, -1), kernel.transpose(1, 2).flatten(1), bias)


@named("trigrams")
def trigrams(x: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
    """Of each token of x [B, T, W] the next one, itself and the one before: [B, T, 3 W].

    Zeros stand for those beyond a row, or in another of its `segments` [B, T].
    """
    after, before = F.pad(x[:, 1:], (0, 0, 0, 1)), F.pad(x[:, :-1], (0, 0, 1, 0))
    if segments is not None:
        same = (segments[:, 1:] == segments[:, :-1])[..., None]
        after = after * F.pad(same, (0, 0, 0, 1))
        before = before * F.pad(same, (0, 0, 1, 0))
    return torch.cat((after, x, before), -1)


@named("weave")
def weave(heads: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Packed projections [B, T, 3 H D] and [B, T, 3 H E] as one, head by head: [B, T, 3 H (D + E)].

    Queries of the second are times (D / E)^1/2, so that the scale of the first serves both.
    """
    batch, tokens, width = first.shape
    a, b = (x.reshape(batch, tokens, 3, heads, -1) for x in (first, second))
    ratio = (width / second.shape[-1]) ** 0.5
    b = torch.cat((b[:, :, :1] * ratio, b[:, :, 1:]), 2)
    return torch.cat((a, b), -1).reshape(batch, tokens, -1)


@named("weave")
def unweave(heads: int, x: torch.Tensor, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of heads [B, T, H (D + E)]: the first D and the `second` E elements of each."""
    batch, tokens, _ = x.shape
    y = x.reshape(batch, tokens, heads, -1)
    a, b = y[..., :-second], y[..., -second:]
    return a.reshape(batch, tokens, -1), b.reshape(batch, tokens, -1)


@named("gated_activation")
def gated_activation(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """activation(gate) * up for x [..., 2F] that holds gate, then up."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate, kind) * up


def gate_within(x: torch.Tensor, kind: Activation, limit: float) -> torch.Tensor:
    """As `gated_activation`, of activation(gate) up to `limit`, and up within it."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate, kind).clamp(max=limit) * up.clamp(-limit, limit)


def _near(x: torch.Tensor, taps: int, segments: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """x [B, T, E] moved by each of `taps` steps of time; zeros come in, and for other segments."""
    aside, tokens = taps // 2, x.shape[1]
    wide = F.pad(x, (0, 0, aside, aside))
    owners = None if segments is None else F.pad(segments, (aside, aside), value=-1)
    for i in range(taps):
        near = wide[:, i : i + tokens]
        if owners is not None:
            near = near * (owners[:, i : i + tokens] == segments)[..., None]
        yield near


@named("convolve_each")
def convolve_each(
    x: torch.Tensor, kernel: torch.Tensor, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """See `BlockOps.convolve_each`."""
    total = torch.zeros_like(x)
    for i, near in enumerate(_near(x, kernel.shape[1], segments)):
        total = torch.addcmul(total, near, kernel[:, i])
    return total


@named("mix_spans")
def mix_spans(
    x: torch.Tensor, scores: torch.Tensor, taps: int, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """See `BlockOps.mix_spans`."""
    weights = scores.unflatten(-1, (-1, taps)).softmax(-1)
    heads, total = weights.shape[-2], torch.zeros_like(x).unflatten(-1, (weights.shape[-2], -1))
    for i, near in enumerate(_near(x, taps, segments)):
        total = torch.addcmul(total, near.unflatten(-1, (heads, -1)), weights[..., i, None])
    return total.flatten(-2)


@named("patches")
def patches(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Patches [B, T, C h w] of images times kernel [E, C, h, w], plus bias [E]: [B, T, E]."""
    return F.linear(x, kernel.flatten(1), bias)


@named("hear")
def hear(
    x: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """What two gated convolutions make of tokens [B, T, W] as `spec.Sounds` has them: [B, T, E].

    Each is a kernel [out, in, taps] and a bias [out].
    """
    x = x[..., :-1].unflatten(-1, (second[0].shape[2], -1))
    h = F.glu(F.linear(x[..., :-1], first[0].flatten(1), first[1])) * x[..., -1:]
    return F.glu(F.linear(h.mT.flatten(-2), second[0].flatten(1), second[1]))


@named("hear")
def hear_waves(
    own: Waves,
    x: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor],
    first: tuple[torch.Tensor, None],
    second: tuple[torch.Tensor, torch.Tensor],
    third: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """As `hear`, of tokens as `spec.Waves` has them; `norm` is a weight and a bias [E]."""
    x = x[..., :-1].unflatten(-1, (own.windows, -1))
    counts = x[..., -1:].float()
    h = torch.tanh(F.linear(x[..., :-1], first[0].flatten(1))).float()
    over: Any = {"dim": (1, 2, 3), "keepdim": True}
    count = (counts.sum(**over) * h.shape[-1]).clamp(min=1)
    mean = (h * counts).sum(**over) / count
    variance = ((h - mean).square() * counts).sum(**over) / count
    h = (h[:, :, : own.seen] - mean) * torch.rsqrt(variance + own.eps)
    h = (h * norm[0].float() + norm[1].float()).to(x.dtype)
    # Over places that a token sees, the taps of the second convolution for each of the third.
    h = h.unfold(2, own.taps[1], own.strides[1]).flatten(-2)
    h = F.gelu(F.linear(h, second[0].flatten(1), second[1]))
    return F.gelu(F.linear(h.mT.flatten(-2), third[0].flatten(1), third[1]))


@named("blend")
def blend(by: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Float32 [..., E]: sums of the rows of weight [P, E], times `by` [..., P]."""
    rows = embed(torch.arange(by.shape[-1], device=by.device), weight)
    return by @ rows.float()


@named("contrast")
def contrast(
    texts: torch.Tensor, images: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cosines [N, M] of texts [N, E] and images [M, E] times e^scale, plus bias; unit vectors."""
    texts, images = (x / x.norm(dim=-1, keepdim=True) for x in (texts, images))
    scores = texts @ images.T * scale.exp()
    return scores if bias is None else scores + bias, texts, images


@named("attention")
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    alibi_scale: float | None = None,
    positions: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    relative: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of whole sequences: q [B, T, H, D], k and v [B, T, K, D] to [B, T, H, D].

    Values may have another width than keys, and then the result has it. `mask` bool [B, T] hides
    keys, `segments` int [B, T] separates packed sequences. A query that would see nothing sees
    itself, so that it stays finite. `alibi` and `sinks` are float32 [H], `positions` int [B, T] are
    what the slopes of `alibi` count, `alibi_scale` as in `alibi_bias`. k and v may be float32 where
    q is not, as a cache in codes keeps them. `relative` [H, 2M+1] is as in `relative_bias`.
    """
    dtype, q = q.dtype, q.to(k.dtype)
    if alibi is not None or softcap is not None or sinks is not None:
        at = torch.arange(q.shape[1], device=q.device)[None] if positions is None else positions
        bias = None if alibi is None else alibi_bias(alibi, at, at, alibi_scale)
        visible = visible_keys(q.shape[1], q.device, causal, window, mask, segments)
        query, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        out = _dense_attention(query, keys, values, visible, scale, bias, softcap, sinks)
        return out.transpose(1, 2).to(dtype)
    visible = None
    windowed = window is not None and window < q.shape[1]
    if mask is not None or segments is not None or windowed:
        visible = visible_keys(q.shape[1], q.device, causal, window, mask, segments)
    if relative is not None:
        at = torch.arange(q.shape[1], device=q.device)[None]
        bias = relative_bias(relative, at, at).to(q.dtype)
        if visible is None and causal:
            visible = visible_keys(q.shape[1], q.device, causal, None, None, None)
        visible = bias if visible is None else bias.masked_fill(~visible, float("-inf"))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible,
        is_causal=causal and visible is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).to(dtype)


def alibi_bias(
    slopes: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """What ALiBi adds to scores, float32 [B, H, T, S], of int positions [B, S] and [B, T].

    Slopes [H] times how far a key lies ahead; with `scale` its product with the difference of
    slopes times positions, both rounded to bfloat16.
    """
    if scale is None:
        return slopes[:, None, None] * (keys[:, None, :] - queries[:, :, None])[:, None]

    def at(positions: torch.Tensor) -> torch.Tensor:
        return (slopes[:, None] * positions.bfloat16().float()[:, None]).bfloat16().float()

    return (at(keys)[:, :, None, :] - at(queries)[..., None]) * scale


def relative_bias(table: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """What distances add to scores, [B, H, T, S], of int positions [B, S] and [B, T].

    Column M + n of the table [H, 2M+1] is for keys that lie n tokens behind the query; the first
    and the last are also for those that lie farther.
    """
    most = table.shape[1] // 2
    away = (keys[:, None, :] - queries[:, :, None]).clamp(-most, most) + most
    return table[:, away].transpose(0, 1)


@named("attention")
def disentangled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor | None,
    queries: torch.Tensor | None,
    *,
    scale: float,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of whole sequences, to whose scores distances add: [B, T, H, D] as q, k and v.

    Keys and queries [H, 2N+1, D] are of keys that lie -N to N tokens behind the query, or farther.
    `mask` and `segments` are as in `attention`. Scores are float32 (DeBERTa, arXiv:2006.03654).
    """
    at, shape = torch.arange(q.shape[1], device=q.device), (q.shape[0], q.shape[2], -1, -1)
    query, key, value = (x.transpose(1, 2).float() for x in (q, k, v))
    scores = query @ key.mT

    def added(x: torch.Tensor, table: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
        """Each row of x [B, H, T, D] with the row of the table of each distance [T, T]."""
        near = table.shape[1] // 2
        index = (away.clamp(-near, near) + near).expand(shape)
        return (x @ table.float().mT).gather(-1, index)

    if keys is not None:
        scores = scores + added(query, keys, at[None, :] - at[:, None])
    if queries is not None:
        scores = scores + added(key, queries, at[:, None] - at[None, :]).mT
    visible = visible_keys(q.shape[1], q.device, False, None, mask, segments)
    weights = (scores * scale).masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2).to(q.dtype)


@named("cross_attention")
def cross_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention to other sequences: q [B, T, H, D], k and v [B, K, S, D] to [B, T, H, D].

    bool `visible` [B, S] shows keys, None all. `softcap` as in `attention`.
    """
    if softcap is not None:
        if visible is None:
            visible = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        shown = visible[:, None, None]
        capped = _dense_attention(q.transpose(1, 2), k, v, shown, scale, None, softcap, None)
        return capped.transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=None if visible is None else visible[:, None, None],
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[1],
    )
    return out.transpose(1, 2)


def _dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What SDPA has no arguments for: q [B, H, T, D], k and v [B, K, S, D] to [B, H, T, D].

    `visible` bool [B or 1, 1, T, S]; `bias` [B or 1, H, T, S] is added to capped scores.
    Scores are float32, as HF has them where it matters (GPT-Neo, Gemma 2).
    """
    batch, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    # The query heads of one KV head are rows of one product: no copy of the keys for GQA.
    rows = q.reshape(batch, kv_heads, -1, dim).float()
    scores = (rows @ k.float().transpose(-1, -2)).view(batch, heads, tokens, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        beside = sinks[:, None, None].expand(batch, heads, tokens, 1)
        scores = torch.cat((scores, beside), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights.reshape(batch, kv_heads, -1, v.shape[2]) @ v).view(batch, heads, tokens, -1)


@named("pool")
def pool(
    x: torch.Tensor,
    weights: torch.Tensor,
    segments: torch.Tensor | None = None,
    count: int = 1,
    largest: bool = False,
) -> torch.Tensor:
    """See `contract.BlockOps.pool`. Sums are one product, whose order does not change by runs."""
    x = x.float()
    if segments is None:
        segments = torch.zeros(weights.shape, dtype=torch.int64, device=x.device)
    if largest:
        nobody = torch.where(weights != 0, segments.long().clamp(max=count), count)
        out = x.new_full((x.shape[0], count + 1, x.shape[2]), float("-inf"))
        out = out.scatter_reduce(1, nobody[..., None].expand_as(x), x, "amax")[:, :count]
        return torch.where(out.isneginf(), 0.0, out)
    owner = torch.arange(count, device=x.device)[None, :, None] == segments[:, None, :]
    return torch.where(owner, weights[:, None, :], 0.0) @ x


def visible_keys(
    tokens: int,
    device: torch.device,
    causal: bool,
    window: int | None,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> torch.Tensor:
    """bool [B or 1, 1, T, T]: whether a query (second last axis) sees a key (last axis)."""
    at = torch.arange(tokens, device=device)
    visible = torch.ones(1, tokens, tokens, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (at[None, :] <= at[:, None])
    if window is not None:
        visible = visible & (at[None, :] > at[:, None] - window)
        if not causal:
            visible = visible & (at[None, :] < at[:, None] + window)
    if mask is not None:
        visible = visible & mask[:, None, :]
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])
    if mask is not None:
        itself = torch.eye(tokens, dtype=torch.bool, device=device)
        visible = visible | (itself & ~visible.any(-1, keepdim=True))
    return visible[:, None]


def chunks(
    size: int,
    keys: int,
    device: torch.device,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> torch.Tensor:
    """Segments int [B or 1, keys] of `size` keys each, from the first that `mask` shows.

    Within given ones they lie where HF has them, by the place in the row.
    """
    at = torch.arange(keys, device=device)[None]
    if mask is not None:
        at = at - (mask.cumsum(-1) == 0).sum(-1, keepdim=True)
    own = torch.div(at, size, rounding_mode="floor")
    return own if segments is None else segments * keys + own


@named("append")
def write(cache: CacheView, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> CacheView:
    """See `CacheView.write`; in place."""
    return cache.write(slots, k, v)


@named("append")
def append(cache: CacheView, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> CacheView:
    """See `CacheView.append`; in place."""
    return cache.append(k, v, lengths)


@named("decode_attention")
def decode_attention(
    q: torch.Tensor,
    cache: CacheView,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    alibi: torch.Tensor | None = None,
    alibi_scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    relative: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query a slot, q [N, H, D], to the `lengths` [N] cached tokens: [N, H, D].

    The query is the last of them, and sees those of its own `chunk` of tokens. `alibi` and `sinks`
    are float32 [H], `alibi_scale` as in `alibi_bias`, `relative` as in `attention`.
    """
    slots, heads, dim = q.shape
    keys, values = cache.read()
    dtype, q = q.dtype, q.to(keys.dtype)
    kv_heads = keys.shape[1]
    at = torch.arange(cache.capacity, device=q.device)
    visible = at[None] < lengths[:, None]
    if window is not None:
        visible = visible & (at[None] >= lengths[:, None] - window)
    if chunk is not None:
        first = torch.div(lengths - 1, chunk, rounding_mode="floor") * chunk
        visible = visible & (at[None] >= first[:, None])
    if alibi is not None or softcap is not None or sinks is not None:
        bias, mask = None, visible[:, None, None]
        if alibi is not None:
            bias = alibi_bias(alibi, at[None], lengths[:, None] - 1, alibi_scale)
        query = q[:, :, None]
        out = _dense_attention(query, keys, values, mask, scale, bias, softcap, sinks)
        return out[:, :, 0].to(dtype)
    visible = visible[:, None, None, :]
    if relative is not None:
        bias = relative_bias(relative, at[None], lengths[:, None] - 1).to(q.dtype)
        visible = bias.view(slots, kv_heads, -1, cache.capacity).masked_fill(
            ~visible, float("-inf")
        )
    # The query heads of one KV head are rows of one product: no copy of the cache for GQA.
    out = F.scaled_dot_product_attention(
        q.view(slots, kv_heads, heads // kv_heads, dim),
        keys,
        values,
        attn_mask=visible,
        scale=scale,
    )
    return out.reshape(slots, heads, dim).to(dtype)
