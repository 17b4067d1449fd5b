"""Recurrences: what keeps a state of fixed size in the place of keys and values."""

from typing import Any

from ..model.spec import Recurrence, ShortConvolution, StateSpace
from .caches import StateView
from .contract import Array, BlockOps, Weights
from .maths import Maths, cut, flat, heads, named

_CHUNK = 64  # tokens whose pairs are scored at a time


@named("recurrence")
def recur(
    ops: BlockOps,
    own: Recurrence,
    w: Weights,
    x: Array,
    mask: Array | None,
    segments: Array | None,
    cache: StateView | None,
    slots: Array | None,
    lengths: Array | None,
    goes_on: bool,
) -> tuple[Array, StateView | None]:
    """See `contract.Ops.recur`."""
    m = ops.maths
    held: tuple[Array | None, ...] = (None, None)
    if goes_on:
        assert cache is not None and slots is not None
        held = tuple(array[slots] for array in cache.arrays)
    if isinstance(own, ShortConvolution):
        first, gate, third = cut(x, *[x.shape[-1] // 3] * 3)
        given = first * third
        y, wide = convolve_past(m, own, w, _shown(given, mask), held[0], segments)
        y, states = m.cast(gate * y, x.dtype), ()
    else:
        gate, given, steps = _parted(m, own, x)
        y, wide = convolve_past(m, own, w, _shown(given, mask), held[0], segments)
        steps, decays = _steps(m, own, w, steps)
        if lengths is not None:
            real = m.arange(x.shape[1], x) < lengths[:, None]
            mask = real if mask is None else mask & real
        if mask is not None:  # other tokens leave a state as it is
            steps, decays = (m.where(mask[..., None], a, 0.0) for a in (steps, decays))
        if segments is not None:
            anew = m.pad(segments[:, 1:] != segments[:, :-1], 1, 1, 0)[..., None]
            decays = m.where(anew, -float("inf"), decays)
        parts = _heads(own, m.activation(y, own.activation))
        y, state = scan(m, own, *parts, steps, decays, held[1])
        y, states = _out(ops, own, w, y, parts[0], gate), (state,)
    if cache is not None:
        assert slots is not None and lengths is not None
        cache = cache.keep(slots, last_tokens(m, own, wide, lengths), *states)
    return y, cache


@named("recurrence")
def recur_token(
    ops: BlockOps, own: Recurrence, w: Weights, x: Array, cache: StateView, moves: Array
) -> tuple[Array, StateView]:
    """See `contract.Ops.recur_token`."""
    m = ops.maths
    if isinstance(own, ShortConvolution):
        first, gate, third = cut(x, *[x.shape[-1] // 3] * 3)
        y, wide = convolve_past(m, own, w, first * third, cache.arrays[0])
        return m.cast(gate * y, x.dtype), cache.move(moves, wide[:, 1:])
    gate, given, steps = _parted(m, own, x)
    y, wide = convolve_past(m, own, w, given, cache.arrays[0])
    steps, decays = _steps(m, own, w, steps[:, 0])
    value, b, c = _heads(own, m.activation(y[:, 0], own.activation))
    held, rows, groups = cache.arrays[1], len(x), (own.groups, own.heads // own.groups)
    old = (held * m.exp(decays)[..., None, None]).reshape(rows, *groups, *held.shape[2:])
    added = (value * steps[..., None]).reshape(rows, *groups, -1, 1)
    state = m.add_product(old, added, b[:, :, None, None])
    y = (state * c[:, :, None, None]).sum(-1).reshape(rows, own.heads, -1)
    y = _out(ops, own, w, y, value, gate[:, 0])
    return y[:, None], cache.move(moves, wide[:, 1:], state.reshape(held.shape))


def _shown(x: Array, mask: Array | None) -> Array:
    return x if mask is None else x * mask[..., None]


def convolve_past(
    m: Maths,
    own: Recurrence,
    w: Weights,
    x: Array,
    past: Array | None = None,
    segments: Array | None = None,
) -> tuple[Array, Array]:
    """Each channel of x [B, T, C] over itself and what came before, and x with that in front.

    The first is float32. `past` [B, taps - 1, C] came before; None for zeros. The second result is
    [B, taps - 1 + T, C].
    """
    tokens, before = x.shape[1], own.taps - 1
    wide = m.pad(x, 1, before, 0) if past is None else m.join((past, x), 1)
    owners = None if segments is None else m.pad(segments, 1, before, 0, -1)
    kernel, bias = m.wide(w["recurrence_kernel"]), w.get("recurrence_kernel_bias")
    total = m.zeros((), m.float32, x) if bias is None else m.wide(bias)
    for i in range(own.taps):
        near = wide[:, i : i + tokens]
        if owners is not None:
            near = near * (owners[:, i : i + tokens] == segments)[..., None]
        total = total + near * kernel[:, i]
    return total, wide


def last_tokens(m: Maths, own: Recurrence, wide: Array, lengths: Array) -> Array:
    """The taps - 1 tokens before the end of each sequence, of `convolve_past`'s second result."""
    return m.places(wide, lengths[:, None] + m.arange(own.taps - 1, wide))


def _parted(m: Maths, own: StateSpace, x: Array) -> list[Array]:
    """Gates [..., width], what is convolved [..., C], and the heads' numbers [..., heads]."""
    if own.scales is not None:
        sizes = own.width, own.width, own.shared, own.shared, own.heads
        parts = zip(cut(x, *sizes), own.scales, strict=True)
        x = m.join([part * scale for part, scale in parts], -1)
    return cut(x, own.width, own.channels, own.heads)


def _steps(m: Maths, own: StateSpace, w: Weights, numbers: Array) -> tuple[Array, Array]:
    """A head's step, and the logarithm of what its state is times: float32 [..., heads] each."""
    steps = m.softplus(m.wide(numbers) + w["state_step_bias"])
    if own.limits != (0.0, float("inf")):
        steps = m.clip(steps, *own.limits)
    return steps, -steps * m.exp(w["state_decay"])


def _heads(own: StateSpace, x: Array) -> tuple[Array, Array, Array]:
    """Inputs [..., heads, head_dim], and B and C [..., groups, state], of what was convolved."""
    value, b, c = cut(x, own.width, own.shared, own.shared)
    return heads(value, own.heads), heads(b, own.groups), heads(c, own.groups)


def scan(
    m: Maths,
    own: StateSpace,
    x: Array,
    b: Array,
    c: Array,
    steps: Array,
    decays: Array,
    state: Array | None,
) -> tuple[Array, Array]:
    """Results of states over sequences, [B, T, heads, head_dim], and the last ones; all float32.

    `x`, `b` and `c` as `_heads` gives them, `steps` and `decays` as `_steps`; `state` [B, heads,
    head_dim, state] is the one before, None for zeros. Of a chunk of tokens all pairs are scored,
    and a state goes from chunk to chunk.
    """
    rows, by_group = len(x), (own.groups, own.heads // own.groups)
    shape = own.head_dim, own.state
    if state is None:
        first = m.zeros((rows, *by_group, *shape), m.float32, x)
    else:
        first = state.reshape(rows, *by_group, *shape)

    def advance(last: Array, value: Array, b: Array, c: Array, decay: Array) -> tuple[Array, Any]:
        at = m.arange(value.shape[1], value)
        before, upto = at[:, None] > at, at[:, None] >= at
        # Sums of decays between two tokens, each by itself: differences of sums would round.
        spans = m.where(before, m.moveaxis(decay, 1, -1)[..., None], 0.0).cumsum(-2)
        spans = m.exp(m.where(upto, spans, -float("inf")))
        scores = m.einsum("blgs,bmgs->bglm", c, b)[:, :, None] * spans
        y = m.einsum("bgrlm,bmgrp->blgrp", scores, value)
        since = m.exp(decay.cumsum(1))
        y = y + m.einsum("blgs,bgrps->blgrp", c, last) * since[..., None]
        left = value * m.moveaxis(spans[..., -1, :], -1, 1)[..., None]
        last = last * since[:, -1, ..., None, None] + m.einsum("bmgrp,bmgs->bgrps", left, b)
        return last, y

    x = x * steps[..., None]
    x, decays = x.reshape(*x.shape[:2], *by_group, -1), decays.reshape(*x.shape[:2], *by_group)
    y, last = m.scan(advance, first, (x, b, c, decays), _CHUNK)
    return y.reshape(*y.shape[:2], own.heads, -1), last.reshape(rows, own.heads, *shape)


def _out(ops: BlockOps, own: StateSpace, w: Weights, y: Array, x: Array, gate: Array) -> Array:
    """Results of heads, y and x float32 [..., heads, head_dim], gated and normed: [..., width]."""
    m = ops.maths
    y = flat(y + x * w["state_skip"][:, None])
    gates = m.activation(m.wide(gate), "silu")
    if not own.gated_last:
        y = y * gates
    if own.norm is not None:
        if own.width < own.normed:  # devices share what is normed
            mean = ops.sum((y * y).sum(-1, keepdims=True)) / own.normed
            y = y * m.rsqrt(mean + own.norm.eps)
        else:
            parts = heads(y, width=own.normed)
            mean = (parts * parts).mean(-1, keepdims=True)
            y = flat(parts * m.rsqrt(mean + own.norm.eps))
        y = y * m.wide(w["state_norm.weight"])
    if own.gated_last:
        y = y * gates
    return m.cast(y if own.out_scale == 1 else y * own.out_scale, gate.dtype)
