"""Oracles of plain ops and of kernels: the same meaning from elsewhere than the text over Maths.

What a library has is that library's, in float64: PyTorch's norms, transformers' activations and
heads that turn. What none has is written by loops, as its definition reads. Nothing here imports
dualinfer, so that no mistake of ours is in both. What is left of the ops, sampling and its random
numbers, has its oracles beside its tests: transformers' processors, Random123's answers, JAX.

Names and arguments are those of `dualinfer/ops/`; weights are plain arrays and a layer's cache is a
pair (k, v). Inputs may have any float dtype. Everything is computed in float64 and returned as
float32, so that an implementation is judged by its own rounding alone. Nothing is changed in place.
"""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.nn import functional
from transformers.activations import ACT2FN, XIELUActivation
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

Array = np.ndarray
Cache = tuple[Array, Array]
_OF_HF = {"gelu_tanh": "gelu_pytorch_tanh"}  # names that are not ours


def _wide(x: Any) -> Array:
    return np.asarray(x).astype(np.float64)


def _double(x: Any) -> torch.Tensor:
    return torch.from_numpy(_wide(x))


def rms_norm(x: Array, weight: Array, eps: float, unit_offset: bool = False) -> Array:
    """PyTorch's, of x [..., E] by weight [E], or by 1 + weight."""
    y = functional.rms_norm(_double(x), x.shape[-1:], _double(weight) + unit_offset, eps)
    return y.numpy().astype(np.float32)


def layer_norm(
    x: Array, weight: Array, bias: Array | None, eps: float, unit_offset: bool = False
) -> Array:
    """PyTorch's, of x [..., E], times a weight that may be a head's own."""
    y = functional.layer_norm(_double(x), x.shape[-1:], eps=eps) * (_double(weight) + unit_offset)
    y = y if bias is None else y + _double(bias)
    return y.numpy().astype(np.float32)


def rotary(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """x [B, T, heads, D] as Llama turns it, or if `interleaved` GPT-J; what is behind R stays."""
    size = 2 * cos.shape[-1]
    part, c, s = _double(x[..., :size]), _double(cos), _double(sin)
    if interleaved:
        turned = gptj.apply_rotary_pos_emb(part, s, c)
    else:
        both = (torch.cat((a, a), -1) for a in (c, s))
        turned, _ = llama.apply_rotary_pos_emb(part, part, *both, unsqueeze_dim=2)
    return np.concatenate((turned.numpy(), _wide(x[..., size:])), -1).astype(np.float32)


def activation(x: Array, kind: str) -> Array:
    """transformers' function of the name."""
    return ACT2FN[_OF_HF.get(kind, kind)](_double(x)).numpy().astype(np.float32)


def xielu(x: Array, alpha_p: Array, alpha_n: Array, beta: Array, eps: Array) -> Array:
    """transformers' class, with these numbers."""
    module = XIELUActivation(dtype=torch.float64)
    module.alpha_p.data, module.alpha_n.data = _double(alpha_p), _double(alpha_n)
    module.beta, module.eps = _double(beta), _double(eps)
    with torch.no_grad():
        return module._xielu_python(_double(x)).numpy().astype(np.float32)


def gated_activation(x: Array, kind: str) -> Array:
    """f(gate) * up for x [..., 2F] that holds gate, then up (Shazeer, 2020): [..., F]."""
    gate, up = _double(x).chunk(2, -1)
    return (ACT2FN[_OF_HF.get(kind, kind)](gate) * up).numpy().astype(np.float32)


def matmul(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [..., in] times weight [out, in], plus bias [out]: [..., out]."""
    y = np.einsum("...i,oi->...o", _wide(x), _wide(weight))
    if bias is not None:
        y = y + _wide(bias)
    return y.astype(np.float32)


def route(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    choice_bias: Array | None = None,
    *,
    chosen: int,
    score: str = "softmax",
    groups: int = 1,
    groups_chosen: int = 1,
    group_score: str = "max",
    renormalized: bool = False,
    eps: float = 0.0,
    scale: float = 1.0,
    jitter: float = 0.0,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """The experts, int32 [..., k], that rows of x [..., E] choose by weight [X, E], and weights.

    Experts ascend; their weights are float32. `model.spec.Router` says what the numbers mean.
    Scores are those of float32 logits, so that ties are ties in every implementation.
    """
    logits = _wide(matmul(x, weight, bias))
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    scores = logits
    if score == "sigmoid":
        scores = _sigmoid(logits)
    elif score == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    choice = scores if choice_bias is None else scores + _wide(choice_bias)
    by_group = choice.reshape(*choice.shape[:-1], groups, -1)
    best = np.sort(by_group, -1)[..., -(2 if group_score == "two" else 1) :].sum(-1)
    ranks = np.argsort(np.argsort(-best, -1, kind="stable"), -1)
    choice = np.where(ranks[..., None] < groups_chosen, by_group, -np.inf).reshape(choice.shape)
    experts = np.sort(np.argsort(-choice, -1, kind="stable")[..., :chosen], -1)
    weights = np.take_along_axis(scores, experts, -1)
    if score == "chosen":
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    elif score == "gates":
        weights = _sigmoid(weights)
    elif score == "sparse":
        weights = np.empty(experts.shape)
        for at in np.ndindex(logits.shape[:-1]):
            weights[at] = _sparse(logits[at], experts[at], jitter)
    if renormalized:
        weights /= weights.sum(-1, keepdims=True) + eps
    return experts.astype(np.int32), (weights * scale).astype(np.float32)


def _sparse(logits: Array, experts: Array, jitter: float) -> Array:
    """The weights of two experts of one row, by the logits of all."""
    found, rest = {}, list(range(len(logits)))
    for own in sorted(experts, key=lambda x: (-logits[x], x)):
        best = logits[own]
        far = [best - logits[x] > 2 * jitter * max(abs(logits[x]), best) for x in rest]
        near = [x for x, is_far in zip(rest, far, strict=True) if not is_far]
        found[own] = 1 / np.exp(logits[near] - best).sum()
        rest.remove(own)
    return np.array([found[x] for x in experts])


def _sigmoid(x: Array) -> Array:
    return torch.sigmoid(torch.from_numpy(x)).numpy()


def blend(experts: Array, weights: Array, sides: Array, expert: int) -> tuple[Array, Array]:
    """Experts [..., k] and weights with `expert` behind, whose weight is sides [..., 1].

    The others' are times sides [..., 0].
    """
    own = np.full((*experts.shape[:-1], 1), expert, np.int32)
    both = np.concatenate([weights * sides[..., :1], sides[..., 1:]], -1)
    return np.concatenate([experts, own], -1), both.astype(np.float32)


def fill(
    experts: Array,
    weights: Array,
    capacity: int,
    mask: Array | None = None,
    segments: Array | None = None,
) -> Array:
    """`weights` [B, T, k], 0 where `capacity` tokens before have chosen that one of `experts`.

    Those count that are of the same of int `segments` [B, T], and that bool `mask` [B, T] shows.
    """
    out, taken = weights.copy(), {}
    for b, t, k in np.ndindex(experts.shape):
        key = b, 0 if segments is None else segments[b, t], experts[b, t, k]
        if taken.get(key, 0) >= capacity:
            out[b, t, k] = 0
        taken[key] = taken.get(key, 0) + (mask is None or mask[b, t])
    return out


def experts(
    x: Array,
    up: Array,
    down: Array,
    up_bias: Array | None,
    down_bias: Array | None,
    chosen: Array,
    weights: Array,
    *,
    activation: str,
    gated: bool,
    limit: float | None = None,
    offset: float = 0.0,
) -> Array:
    """The sum of what the `chosen` experts [..., k] make of x [..., E], by their weights [..., k].

    up [X, 2F, E] holds gate, then up, or without gates [X, F, E]; down is [X, E, F]. An expert that
    no row chose is not read. `model.spec.Experts` says what `limit` and `offset` mean.
    """
    f = ACT2FN[_OF_HF.get(activation, activation)]
    y = np.zeros((*x.shape[:-1], down.shape[1]))
    for at in np.ndindex(*chosen.shape):
        own, row = chosen[at], at[:-1]
        h = _wide(up[own]) @ _wide(x[row])
        if up_bias is not None:
            h = h + _wide(up_bias[own])
        gate, value = np.split(h, 2) if gated else (h, np.ones(1) - offset)
        if limit is not None:
            gate = np.minimum(gate, limit)
            value = np.clip(value, -limit, limit)
        part = _wide(down[own]) @ (f(torch.from_numpy(gate)).numpy() * (value + offset))
        if down_bias is not None:
            part = part + _wide(down_bias[own])
        y[row] += float(weights[at]) * part
    return y.astype(np.float32)


def visible_keys(
    tokens: int,
    causal: bool,
    window: int | None = None,
    mask: Array | None = None,
    segments: Array | None = None,
) -> Array:
    """bool [B or 1, T, T]: whether a query (second last axis) sees a key (last axis).

    With `causal` no query sees the future. `window` counts the tokens seen, the query's own and
    those before it; without `causal` it holds on either side. A key whose `mask` [B, T] is False
    is seen by no query; queries and keys of different `segments` [B, T] do not see each other. A
    query left with no key at all sees itself.
    """
    position = np.arange(tokens)
    age = position[:, None] - position[None, :]  # how far a key lies before the query
    seen = np.full((1, tokens, tokens), True)
    if causal:
        seen = seen & (age >= 0)
    if window is not None:
        seen = seen & ((age if causal else np.abs(age)) < window)
    if mask is not None:
        seen = seen & mask[:, None, :]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    return seen | ((age == 0) & ~seen.any(-1, keepdims=True))


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    mask: Array | None = None,
    segments: Array | None = None,
    alibi: Array | None = None,
    alibi_scale: float | None = None,
    positions: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    relative: Array | None = None,
) -> Array:
    """Mean of the visible values, weighted by softmax(scale q k); see `visible_keys`.

    Vaswani et al., 2017: q [B, T, H, D], k and v [B, T, K, D] to [B, T, H, D]; values may have
    another width than keys, and the result has it then. Query head h reads
    KV head h // G (Ainslie et al., 2023). `softcap` c makes a score c tanh(score / c) (Gemma 2).
    `alibi` [H] adds slope times (the key's position - the query's), with `positions` [B, T], by
    default 0 to T-1 (Press et al., 2022); `alibi_scale` c times the difference of slope times
    position, with each position and each product rounded to bfloat16 (Falcon). `sinks` [H] is a
    score of no value at all, which takes its part of the softmax. `relative` [H, 2M+1] adds its
    column M + n for a key that lies n tokens behind the query, the first or the last column for one
    that lies farther (T5, Raffel et al., 2020). All in this order, before the mask.
    """
    batch, tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    seen = np.broadcast_to(
        visible_keys(tokens, causal, window, mask, segments), (batch, tokens, tokens)
    )
    out = np.empty((*q.shape[:-1], v.shape[-1]), np.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = _wide(k[b, :, h // group]), _wide(v[b, :, h // group])
            scores = _capped(_wide(q[b, :, h]) @ keys.T * scale, softcap)
            if alibi is not None:
                at = np.arange(tokens) if positions is None else positions[b].astype(np.int64)
                scores = scores + _alibi(alibi[h], alibi_scale, at[None, :], at[:, None])
            if relative is not None:
                at = np.arange(tokens)
                scores = scores + _relative(relative[h], at[None, :] - at[:, None])
            weights = _weights(np.where(seen[b], scores, -np.inf), sinks, h)
            out[b, :, h] = weights @ values
    return out.astype(np.float32)


def decode_attention(
    q: Array,
    cache: Cache,
    lengths: Array,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    alibi: Array | None = None,
    alibi_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    relative: Array | None = None,
) -> Array:
    """Attention of one query a slot, q [N, H, D], to its cached tokens: [N, H, D].

    Slot n has lengths[n] tokens, at least 1, and the query is the last of them; with `window` it
    sees that many of the last ones, with `chunk` those of its own so many tokens. The rest of the
    cache, a pair [N, K, S, D], is never read. `alibi`, `alibi_scale`, `softcap`, `sinks` and
    `relative` as in `attention`; a token's position is its place in the cache.
    """
    slots, heads, _ = q.shape
    group = heads // cache[0].shape[1]
    out = np.empty(q.shape, np.float64)
    for n in range(slots):
        end = int(lengths[n])
        start = 0 if window is None else max(0, end - window)
        start = start if chunk is None else (end - 1) // chunk * chunk
        for h in range(heads):
            keys = _wide(cache[0][n, h // group, start:end])
            values = _wide(cache[1][n, h // group, start:end])
            scores = _capped(keys @ _wide(q[n, h]) * scale, softcap)
            if alibi is not None:
                scores = scores + _alibi(alibi[h], alibi_scale, np.arange(start, end), end - 1)
            if relative is not None:
                scores = scores + _relative(relative[h], np.arange(start, end) - (end - 1))
            out[n, h] = _weights(scores, sinks, h) @ values
    return out.astype(np.float32)


def cross_attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Array | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Array:
    """Attention to other sequences: q [B, T, H, D], k and v [B, K, S, D] to [B, T, H, D].

    bool `visible` [B, S] shows keys, one at least in each row; None shows all. `softcap` as in
    `attention`.
    """
    batch, _, heads, _ = q.shape
    group = heads // k.shape[1]
    out = np.empty(q.shape, np.float64)
    for b in range(batch):
        shown = slice(None) if visible is None else visible[b]
        for h in range(heads):
            keys, values = _wide(k[b, h // group, shown]), _wide(v[b, h // group, shown])
            scores = _capped(_wide(q[b, :, h]) @ keys.T * scale, softcap)
            out[b, :, h] = _softmax(scores) @ values
    return out.astype(np.float32)


def _alibi(slope: Any, scale: float | None, keys: Array, queries: Any) -> Array:
    """What a head's ALiBi adds to the scores of keys and queries at these positions."""
    if scale is None:
        return float(slope) * (keys - queries)

    def at(positions: Any) -> Array:
        rounded = _wide(np.asarray(positions, np.float32).astype(ml_dtypes.bfloat16))
        return _wide((float(slope) * rounded).astype(ml_dtypes.bfloat16))

    return scale * (at(keys) - at(queries))


def _relative(row: Array, behind: Array) -> Array:
    """What a head's row [2M+1] adds for keys so many tokens behind the query."""
    most = len(row) // 2
    return _wide(row)[np.clip(behind, -most, most) + most]


def _capped(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def _weights(scores: Array, sinks: Array | None, head: int) -> Array:
    """Softmax over the last axis, with the head's sink beside the scores."""
    if sinks is None:
        return _softmax(scores)
    beside = np.full((*scores.shape[:-1], 1), float(sinks[head]))
    return _softmax(np.concatenate([scores, beside], axis=-1))[..., :-1]


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def pool(
    x: Array, weights: Array, segments: Array | None = None, count: int = 1, largest: bool = False
) -> Array:
    """Of x [B, T, E] the sum of each segment's tokens times their `weights` [B, T]: [B, count, E].

    With `largest` each element's greatest value among tokens whose weight is not 0. int `segments`
    [B, T] number a row's segments, None for one; those from `count` on, and what has no token,
    give nothing, which is 0.
    """
    out = np.zeros((x.shape[0], count, x.shape[2]), np.float64)
    for b, n in np.ndindex(out.shape[:2]):
        own = weights[b] != 0
        own = own if segments is None else own & (segments[b] == n)
        if own.any():
            part = _wide(x[b, own])
            out[b, n] = part.max(0) if largest else _wide(weights[b, own]) @ part
    return out.astype(np.float32)


def convolution(
    x: Array,
    kernel: Array,
    bias: Array,
    stride: int,
    segments: Array | None = None,
) -> Array:
    """x [B, T, in] with kernel [out, in, taps] around every token whose place is one of `stride`'s.

    Zeros stand for what lies beyond a row, or in another of its int `segments` [B, T].
    """
    batch, tokens, _ = x.shape
    taps, places = kernel.shape[2], range(0, tokens, stride)
    out = np.zeros((batch, len(places), len(kernel)), np.float64)
    for b, i, tap in np.ndindex(batch, len(places), taps):
        t = places[i]
        near = t + tap - taps // 2
        is_there = 0 <= near < tokens
        if is_there and (segments is None or segments[b, near] == segments[b, t]):
            out[b, i] += _wide(kernel[..., tap]) @ _wide(x[b, near])
    return (out + _wide(bias)).astype(x.dtype)


def trigrams(x: Array, segments: Array | None) -> Array:
    """Of each token of x [B, T, W] the next one, itself and the one before: [B, T, 3 W].

    Zeros stand for those beyond a row, or in another of its int `segments` [B, T].
    """
    batch, tokens, _ = x.shape
    out = np.zeros((batch, tokens, 3, x.shape[2]), x.dtype)
    for b, t, i in np.ndindex(batch, tokens, 3):
        near = t + 1 - i
        if 0 <= near < tokens and (segments is None or segments[b, near] == segments[b, t]):
            out[b, t, i] = x[b, near]
    return out.reshape(batch, tokens, -1)


def weave(count: int, first: Array, second: Array) -> Array:
    """Packed [B, T, 3 H D] and [B, T, 3 H E] as [B, T, 3 H (D + E)], head by head.

    Queries of the second are times (D / E)^1/2.
    """
    one, other = (x.shape[-1] // (3 * count) for x in (first, second))
    parts = []
    for i in range(3 * count):
        factor = (one / other) ** 0.5 if i < count else 1.0
        parts.append(_wide(first[..., i * one : (i + 1) * one]))
        parts.append(_wide(second[..., i * other : (i + 1) * other]) * factor)
    return np.concatenate(parts, -1).astype(first.dtype)


def encode_heads(x: Array, codes: str) -> tuple[Array, Array]:
    """Codes of heads x [..., D], "fp8_e4m3" as bytes or "int8", and their scales float32 [...].

    A head's largest magnitude has the code 448 or 127. Divisions are those of float32, codes the
    nearest, ties to even. A head whose scale is below 2**-100 is zero, with scale 0.
    """
    x = np.asarray(x).astype(np.float32)
    largest = np.float32(448 if codes == "fp8_e4m3" else 127)
    scale = np.abs(x).max(-1) / largest
    scale = np.where(scale < np.float32(2.0**-100), np.float32(0), scale)
    a = x / np.where(scale == 0, np.float32(1), scale)[..., None]
    a = a.clip(-largest, largest)
    if codes == "int8":
        return np.rint(a).astype(np.int8), scale
    return a.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale


def decode_heads(data: Array, scale: Array) -> Array:
    """float32 heads [..., D] that codes of `encode_heads` mean."""
    if data.dtype == np.uint8:
        data = data.view(ml_dtypes.float8_e4m3fn)
    return data.astype(np.float32) * scale[..., None]


def read_blocks(pool: Array, table: Array) -> Array:
    """Tokens [N, K, S, D] by position, of a pool [blocks, K, size, D] by a table int [N, any].

    A negative entry stands for a block of zeros.
    """
    slots, blocks = table.shape
    _, heads, size, dim = pool.shape
    out = np.zeros((slots, heads, blocks * size, dim), pool.dtype)
    for n, i in np.ndindex(slots, blocks):
        if table[n, i] >= 0:
            out[n, :, i * size : (i + 1) * size] = pool[table[n, i]]
    return out


def append(cache: Cache, k: Array, v: Array, lengths: Array) -> Cache:
    """The cache, a pair [N, K, S, D], with k and v [N, K, D] at position lengths[n] of slot n.

    A slot that is full has ended; what happens to its last position does not matter, but no other
    slot is touched.
    """
    keys, values = cache[0].copy(), cache[1].copy()
    for n, length in enumerate(lengths):
        at = min(int(length), keys.shape[2] - 1)
        keys[n, :, at], values[n, :, at] = k[n], v[n]
    return keys, values


def filter_logits(logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Logits [N, V] with -inf for every token that a filter of its row [N] drops, in HF's order.

    Top-k (0 is off) keeps the k best (Fan et al., 2018). Top-p (1 is off) keeps a token as long as
    the better ones have less than p of the probability (Holtzman et al., 2019). Min-p (0 is off)
    keeps a token that has at least min_p of the best one's probability (Nguyen et al., 2024).
    Each sees the probabilities that the filters before it left over. Of equally likely tokens all
    stay or none. The best one always stays.
    """
    kept = logits.astype(np.float32)
    for row, k, p, least in zip(kept, top_k, top_p, min_p, strict=True):
        if 0 < k < len(row):
            row[row < sorted(row)[-k]] = -np.inf
        if p < 1:
            probability = _softmax(_wide(row))
            order = np.argsort(-probability)
            better = np.cumsum(probability[order]) - probability[order]
            stay = max(np.count_nonzero(better < p), 1)
            worst = row[order[stay - 1]]
            row[row < worst] = -np.inf
        if least > 0:
            probability = _softmax(_wide(row))
            row[probability < least * probability.max()] = -np.inf
    return kept
