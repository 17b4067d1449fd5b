"""Recurrences in JAX: what keeps a state of fixed size in the place of keys and values."""

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....model.spec import Recurrence, ShortConvolution, StateSpace
from ....ops.caches import StateView
from ....ops.contract import Weights
from ..parallel import Split
from . import primitives

_CHUNK = 64  # tokens whose pairs are scored at a time


@jax.named_scope("recurrence")
def recur(
    own: Recurrence,
    w: Weights,
    x: jax.Array,
    split: Split | None,
    mask: jax.Array | None,
    segments: jax.Array | None,
    cache: StateView | None,
    slots: jax.Array | None,
    lengths: jax.Array | None,
    goes_on: bool,
) -> tuple[jax.Array, StateView | None]:
    """See `contract.Ops.recur`."""
    held: tuple[jax.Array | None, ...] = (None, None)
    if goes_on:
        assert cache is not None and slots is not None
        held = tuple(array[slots] for array in cache.arrays)
    if isinstance(own, ShortConvolution):
        first, gate, third = jnp.split(x, 3, axis=-1)
        given = first * third
        y, wide = convolve_past(own, w, _shown(given, mask), held[0], segments)
        y, states = (gate * y).astype(x.dtype), ()
    else:
        gate, given, steps = _parted(own, x)
        y, wide = convolve_past(own, w, _shown(given, mask), held[0], segments)
        steps, decays = _steps(own, w, steps)
        if lengths is not None:
            real = jnp.arange(x.shape[1]) < lengths[:, None]
            mask = real if mask is None else mask & real
        if mask is not None:  # other tokens leave a state as it is
            steps, decays = (jnp.where(mask[..., None], a, 0.0) for a in (steps, decays))
        if segments is not None:
            anew = segments[:, 1:] != segments[:, :-1]
            anew = jnp.pad(anew, ((0, 0), (1, 0)))[..., None]
            decays = jnp.where(anew, -jnp.inf, decays)
        parts = _heads(own, primitives.activation(y, own.activation))
        y, state = scan(own, *parts, steps, decays, held[1])
        y, states = _out(own, w, y, parts[0], gate, split), (state,)
    if cache is not None:
        assert slots is not None and lengths is not None
        cache = cache.keep(slots, last_tokens(own, wide, lengths), *states)
    return y, cache


@jax.named_scope("recurrence")
def recur_token(
    own: Recurrence,
    w: Weights,
    x: jax.Array,
    split: Split | None,
    cache: StateView,
    moves: jax.Array,
) -> tuple[jax.Array, StateView]:
    """See `contract.Ops.recur_token`."""
    if isinstance(own, ShortConvolution):
        first, gate, third = jnp.split(x, 3, axis=-1)
        y, wide = convolve_past(own, w, first * third, cache.arrays[0])
        return (gate * y).astype(x.dtype), cache.move(moves, wide[:, 1:])
    gate, given, steps = _parted(own, x)
    y, wide = convolve_past(own, w, given, cache.arrays[0])
    steps, decays = _steps(own, w, steps[:, 0])
    value, b, c = _heads(own, primitives.activation(y[:, 0], own.activation))
    each = own.heads // own.groups
    b, c = (jnp.repeat(part, each, axis=1) for part in (b, c))
    old = cache.arrays[1] * jnp.exp(decays)[..., None, None]
    state = old + (value * steps[..., None])[..., None] * b[:, :, None]
    y = _out(own, w, (state * c[:, :, None]).sum(-1), value, gate[:, 0], split)
    return y[:, None], cache.move(moves, wide[:, 1:], state)


def _shown(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return x if mask is None else x * mask[..., None].astype(x.dtype)


def convolve_past(
    own: Recurrence,
    w: Weights,
    x: jax.Array,
    past: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Each channel of x [B, T, C] over itself and what came before, and x with that in front.

    The first is float32. `past` [B, taps - 1, C] came before; None for zeros. The second result is
    [B, taps - 1 + T, C].
    """
    tokens, before = x.shape[1], own.taps - 1
    front = ((0, 0), (before, 0))
    wide = jnp.pad(x, (*front, (0, 0))) if past is None else jnp.concatenate((past, x), 1)
    owners = None if segments is None else jnp.pad(segments, front, constant_values=-1)
    kernel, bias = w["recurrence_kernel"].astype(jnp.float32), w.get("recurrence_kernel_bias")
    total = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for i in range(own.taps):
        near = wide[:, i : i + tokens].astype(jnp.float32)
        if owners is not None:
            near = near * (owners[:, i : i + tokens] == segments)[..., None]
        total = total + near * kernel[:, i]
    return total, wide


def last_tokens(own: Recurrence, wide: jax.Array, lengths: jax.Array) -> jax.Array:
    """The taps - 1 tokens before the end of each sequence, of `convolve_past`'s second result."""
    at = lengths[:, None] + jnp.arange(own.taps - 1)
    return jnp.take_along_axis(wide, at[..., None], axis=1)


def _parted(own: StateSpace, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gates [..., width], what is convolved [..., C], and the heads' numbers [..., heads]."""
    if own.scales is not None:
        sizes = own.width, own.width, own.shared, own.shared, own.heads
        parts = zip(_cut(x, *sizes), own.scales, strict=True)
        x = jnp.concatenate([part * scale for part, scale in parts], -1)
    gate, given, steps = _cut(x, own.width, own.channels, own.heads)
    return gate, given, steps


def _steps(own: StateSpace, w: Weights, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A head's step, and the logarithm of what its state is times: float32 [..., heads] each."""
    steps = jax.nn.softplus(numbers.astype(jnp.float32) + w["state_step_bias"])
    if own.limits != (0.0, float("inf")):
        steps = jnp.clip(steps, *own.limits)
    return steps, -steps * jnp.exp(w["state_decay"])


def _heads(own: StateSpace, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs [..., heads, head_dim], and B and C [..., groups, state], of what was convolved."""
    value, b, c = _cut(x, own.width, own.shared, own.shared)
    b, c = (part.reshape(*part.shape[:-1], own.groups, -1) for part in (b, c))
    return value.reshape(*value.shape[:-1], own.heads, -1), b, c


def scan(
    own: StateSpace,
    x: jax.Array,
    b: jax.Array,
    c: jax.Array,
    steps: jax.Array,
    decays: jax.Array,
    state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """What states give of sequences, [B, T, heads, head_dim], and the last ones; all float32.

    `x`, `b` and `c` as `_heads` gives them, `steps` and `decays` as `_steps`; `state` [B, heads,
    head_dim, state] is the one before, None for zeros. Of a chunk of tokens all pairs are scored,
    and a state goes from chunk to chunk.
    """
    (batch, tokens), each = x.shape[:2], own.heads // own.groups
    if state is None:
        state = jnp.zeros((batch, own.heads, own.head_dim, own.state), jnp.float32)
    size = min(_CHUNK, tokens)
    below = jnp.tril(jnp.ones((size, size), bool))

    def chunked(part: jax.Array, *heads: int) -> jax.Array:
        """Chunks first, [chunks, B, size, ...], the last one filled up with zeros."""
        missing = -tokens % size
        part = jnp.pad(part, ((0, 0), (0, missing), *[(0, 0)] * (part.ndim - 2)))
        return part.reshape(batch, -1, size, *heads, *part.shape[2 + len(heads) // 2 :]).swapaxes(
            0, 1
        )

    def advance(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        value, b, c, decay = chunk
        # Sums of decays between two tokens, each by itself: differences of sums would round.
        spans = jnp.moveaxis(decay, 1, -1)[..., None]
        spans = jnp.cumsum(jnp.where(jnp.tril(below, -1), spans, 0.0), -2)
        spans = jnp.exp(jnp.where(below, spans, -jnp.inf))
        scores = _einsum("blgs,bmgs->bglm", c, b)[:, :, None] * spans
        y = _einsum("bgrlm,bmgrp->blgrp", scores, value)
        since = jnp.exp(jnp.cumsum(decay, 1))
        y = y + _einsum("blgs,bgrps->blgrp", c, state) * since[..., None]
        left = value * jnp.moveaxis(spans[..., -1, :], -1, 1)[..., None]
        state = state * since[:, -1, ..., None, None] + _einsum("bmgrp,bmgs->bgrps", left, b)
        return state, y

    heads = own.groups, each
    chunks = chunked(x * steps[..., None], *heads), chunked(b), chunked(c), chunked(decays, *heads)
    state, y = lax.scan(advance, state.reshape(batch, *heads, *state.shape[2:]), chunks)
    y = y.swapaxes(0, 1).reshape(batch, -1, own.heads, own.head_dim)[:, :tokens]
    return y, state.reshape(batch, own.heads, own.head_dim, own.state)


def _einsum(formula: str, *parts: jax.Array) -> jax.Array:
    return jnp.einsum(formula, *parts, precision=lax.Precision.HIGHEST)


def _cut(x: jax.Array, *sizes: int) -> list[jax.Array]:
    """Parts of these sizes along the last axis."""
    return jnp.split(x, list(accumulate(sizes))[:-1], axis=-1)


def _out(
    own: StateSpace,
    w: Weights,
    y: jax.Array,
    x: jax.Array,
    gate: jax.Array,
    split: Split | None,
) -> jax.Array:
    """What heads give, y and x float32 [..., heads, head_dim], gated and normed: [..., width]."""
    y = (y + x * w["state_skip"][:, None]).reshape(gate.shape)
    gates = primitives.activation(gate.astype(jnp.float32), "silu")
    if not own.gated_last:
        y = y * gates
    if own.norm is not None:
        if own.width < own.normed:  # devices share what is normed
            assert split is not None
            mean = split.sum(jnp.square(y).sum(-1, keepdims=True)) / own.normed
            y = y * lax.rsqrt(mean + own.norm.eps)
        else:
            parts = y.reshape(*y.shape[:-1], -1, own.normed)
            mean = jnp.square(parts).mean(-1, keepdims=True)
            y = (parts * lax.rsqrt(mean + own.norm.eps)).reshape(gate.shape)
        y = y * w["state_norm.weight"].astype(jnp.float32)
    if own.gated_last:
        y = y * gates
    return (y if own.out_scale == 1 else y * own.out_scale).astype(gate.dtype)
