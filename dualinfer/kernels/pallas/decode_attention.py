"""Attention of one new token a sequence: norm, rotary, KV append and split-KV softmax in a launch.

The cached tokens of a sequence are split over programs, as flash-decoding does; the last program
of a KV head to end joins their results, in their order, so that no second launch is needed and the
bits are the same every time.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .activation import activate
from .launch import (
    arrivals,
    both,
    cdiv,
    dot,
    forget,
    launch,
    load,
    next_power_of_2,
    program,
    store,
)
from .rotary import HeadPlan, Turn, read_heads, turn_of, turning, within_head

JOINED = 8192  # float32 elements of partial results that the joining program holds at once


class DecodeConfig(NamedTuple):
    """Tokens read at a time, warps, programs over which a sequence is split, reads in flight."""

    block: int
    warps: int
    splits: int
    stages: int = 3


class _Plan(NamedTuple):
    """What a kernel is made for."""

    heads: HeadPlan
    scaling: float
    kv_heads: int
    group: int
    capacity: int
    scale: float
    softcap: float | None
    window: int | None
    splits: int
    block_g: int
    block_s: int
    block_d: int
    interpret: bool


def _turn(plan: _Plan, d: jax.Array, length: jax.Array, frequencies_ref: Any) -> Turn | None:
    """How elements d of the token at position `length` turn."""
    if not plan.heads.rotary:
        return None
    pair, turned = turning(plan.heads, d)
    angle = length.astype(jnp.float32) * load(frequencies_ref, (pair,), turned)
    return turn_of(plan.heads, d, jnp.cos(angle) * plan.scaling, jnp.sin(angle) * plan.scaling)


@cache
def _kernel(plan: _Plan) -> Callable[..., None]:
    group, block_s, splits = plan.group, plan.block_s, plan.splits
    rows_shape, block_shape = (plan.block_g,), (plan.block_g, plan.block_d)

    def _decode_attention_kernel(
        qkv_ref: Any,
        lengths_ref: Any,
        _keys: Any,
        _values: Any,
        _counters: Any,
        frequencies_ref: Any,
        q_norm_ref: Any,
        k_norm_ref: Any,
        slopes_ref: Any,
        sinks_ref: Any,
        y_ref: Any,
        k_ref: Any,
        v_ref: Any,
        counters_ref: Any = None,
        partial_ref: Any = None,
    ) -> None:
        pair, split = program(0), program(1)
        slot, kv_head = pair // plan.kv_heads, pair % plan.kv_heads
        d = jnp.arange(plan.block_d)[None, :]
        g = jnp.arange(plan.block_g)
        fits, real = within_head(plan.heads, d), None if group == plan.block_g else g < group
        inside = both(None if real is None else real[:, None], fits)
        length = jnp.minimum(load(lengths_ref, (slot,)), plan.capacity - 1)
        turn = _turn(plan, d, length, frequencies_ref)
        begin = 0 if plan.window is None else jnp.maximum(length + 1 - plan.window, 0)
        share = pl.cdiv(pl.cdiv(length - begin, block_s), splits) * block_s
        first = begin + split * share
        last = jnp.minimum(first + share, length)

        q_heads = kv_head * group + g
        q = read_heads(plan.heads, qkv_ref, slot, q_heads[:, None], d, inside, turn, q_norm_ref)
        q = q.astype(qkv_ref.dtype)
        slope = None
        if slopes_ref is not None:
            slope = load(slopes_ref, (q_heads,), real).astype(jnp.float32)[:, None]

        def capped(score: jax.Array) -> jax.Array:
            score = score * plan.scale
            if plan.softcap is None:
                return score
            return plan.softcap * activate(score / plan.softcap, "tanh")

        def nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
            zeros = jnp.zeros(rows_shape, jnp.float32)
            return zeros - jnp.inf, zeros, jnp.zeros(block_shape, jnp.float32)

        def new_token() -> tuple[jax.Array, jax.Array, jax.Array]:
            row = jnp.full((1, 1), plan.kv_heads * group + kv_head, jnp.int32)
            k = read_heads(plan.heads, qkv_ref, slot, row, d, fits, turn, k_norm_ref).astype(
                k_ref.dtype
            )
            v = load(qkv_ref, (slot, row + plan.kv_heads, d), fits)
            store(k_ref, (slot, kv_head, length, d), k, fits)
            store(v_ref, (slot, kv_head, length, d), v, fits)
            score = capped((q.astype(jnp.float32) * k.astype(jnp.float32)).sum(1))
            value = jnp.broadcast_to(v.astype(jnp.float32), block_shape)
            if sinks_ref is None:
                return score, jnp.ones(rows_shape, jnp.float32), value
            sink = load(sinks_ref, (q_heads,), real, -jnp.inf).astype(jnp.float32)
            top = jnp.maximum(score, sink)
            weight = jnp.exp(score - top)
            return top, weight + jnp.exp(sink - top), value * weight[:, None]

        def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, acc = carry
            s = first + i * block_s + jnp.arange(block_s)
            there = both((s < last)[:, None], fits)
            k = load(k_ref, (slot, kv_head, s[:, None], d), there)
            v = load(v_ref, (slot, kv_head, s[:, None], d), there)
            if plan.block_g == 1:
                score = (q.astype(jnp.float32) * k.astype(jnp.float32)).sum(1)[None, :]
            else:
                score = dot(q, k.T)
            score = capped(score)
            if slope is not None:
                score = score + slope * (s - length).astype(jnp.float32)[None, :]
            score = jnp.where((s < last)[None, :], score, -jnp.inf)
            higher = jnp.maximum(top, score.max(1))
            kept = jnp.exp(top - higher)
            weight = jnp.exp(score - higher[:, None])
            total = total * kept + weight.sum(1)
            if plan.block_g == 1:
                # The one row of weights stands across the tokens' axis.
                column = weight.reshape(block_s, 1)
                new = (column * v.astype(jnp.float32)).sum(0)[None, :]
            else:
                new = dot(weight.astype(v.dtype), v)
            return higher, total, acc * kept[:, None] + new

        if splits == 1:
            start = new_token()
        else:
            start = jax.lax.cond(split == splits - 1, new_token, nothing)
        count = pl.cdiv(jnp.maximum(last - first, 0), block_s)
        top, total, acc = jax.lax.fori_loop(0, count, block, start)

        if splits == 1:
            store(y_ref, (slot, q_heads[:, None], d), acc / total[:, None], inside)
            return
        rows = None if real is None else real[:, None]
        store(partial_ref, (pair, split, g[:, None], d), acc, rows)
        store(partial_ref, (pair, split, g, plan.block_d), total, real)
        store(partial_ref, (pair, split, g, plan.block_d + 1), top, real)

        @pl.when(arrivals(counters_ref, pair, plan.interpret) == splits - 1)
        def _() -> None:
            forget(counters_ref, pair)
            _join(plan, partial_ref, y_ref, pair)

    return _decode_attention_kernel


def _join(plan: _Plan, partial_ref: Any, y_ref: Any, pair: jax.Array) -> None:
    """Write the heads of a slot and KV head, from what its splits have left."""
    parts = next_power_of_2(plan.splits)
    many = max(min(JOINED // (parts * plan.block_d), next_power_of_2(plan.group)), 1)
    p, d = jnp.arange(parts)[:, None], jnp.arange(plan.block_d)
    there = None if parts == plan.splits else p < plan.splits
    block_there = None if there is None else there[:, :, None]
    slot, first = pair // plan.kv_heads, pair % plan.kv_heads * plan.group

    def heads(i: Any, _: None) -> None:
        h = jnp.minimum(i * many + jnp.arange(many), plan.group - 1)  # the last more than once
        at = pair, p, h[None, :]
        tops = load(partial_ref, (*at, plan.block_d + 1), there, -jnp.inf, shared=True)
        totals = load(partial_ref, (*at, plan.block_d), there, shared=True)
        at = pair, p[:, :, None], h[None, :, None], d[None, None, :]
        sums = load(partial_ref, at, block_there, shared=True)
        weight = jnp.exp(tops - tops.max(0)[None, :])
        y = (weight[:, :, None] * sums).sum(0) / (weight * totals).sum(0)[:, None]
        store(y_ref, (slot, first + h[:, None], d[None, :]), y, within_head(plan.heads, d[None, :]))

    jax.lax.fori_loop(0, cdiv(plan.group, many), heads, None)


def decode_attention(
    qkv: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    lengths: jax.Array,
    *,
    heads: int,
    scale: float,
    counters: jax.Array,
    window: int | None = None,
    alibi: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    inv_freq: jax.Array | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float = 0.0,
    norm_unit_offset: bool = False,
    config: DecodeConfig | None = None,
    sms: int = 132,
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """Attention of one new token a slot: packed qkv [N, (H + 2K) D] to y [N, H D].

    The new token's position is lengths[n], int32: queries and keys are normed over D with `q_norm`
    and `k_norm` [D] if given, rotated by that position times `inv_freq` float32 [R/2] (R <= D), and
    key and value are written to the cache, a pair [N, K, S, D]. A full slot overwrites its last
    place. `window`, `alibi`, `softcap` and `sinks` as in `attention`. `counters` int32 [N K or
    more] are 0, and are again when the launch has ended. Results are y, the cache and the counters,
    the last two in the memory of the arguments.
    """
    keys, values = cache
    _check(qkv, keys, values, lengths, heads, counters, inv_freq)
    slots, kv_heads, capacity, dim = keys.shape
    group, itemsize = heads // kv_heads, qkv.dtype.itemsize
    if config is None:
        config = default_config(slots * kv_heads, capacity, dim, itemsize, sms)
    plan = _Plan(
        heads=HeadPlan(
            dim=dim,
            block=max(16, next_power_of_2(dim)),
            rotary=0 if inv_freq is None else 2 * inv_freq.shape[0],
            interleaved=interleaved,
            norm_eps=norm_eps,
            norm_unit_offset=norm_unit_offset,
        ),
        scaling=scaling,
        kv_heads=kv_heads,
        group=group,
        capacity=capacity,
        scale=scale,
        softcap=softcap,
        window=window,
        splits=config.splits,
        # The matrix units take 16 rows and more, and what they read is fetched ahead; float32,
        # which they do not take, would pay for the rows that are not there.
        block_g=max(16, next_power_of_2(group)) if group > 1 or itemsize == 2 else 1,
        block_s=config.block,
        block_d=max(16, next_power_of_2(dim)),
        interpret=interpret,
    )
    out = [jax.ShapeDtypeStruct((slots, heads, dim), qkv.dtype)]
    out += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)]
    aliases = {2: 1, 3: 2}
    if config.splits > 1:
        # The sums, their weight and exponent; two more, so that rows begin at 16 bytes.
        shape = slots * kv_heads, config.splits, group, plan.block_d + 4
        out += [jax.ShapeDtypeStruct(counters.shape, counters.dtype)]
        out += [jax.ShapeDtypeStruct(shape, jnp.float32)]
        aliases[4] = 3
    y, keys, values, *rest = launch(
        _kernel(plan),
        (slots * kv_heads, config.splits),
        *(qkv.reshape(slots, heads + 2 * kv_heads, dim), lengths, keys, values),
        *(counters if config.splits > 1 else None, inv_freq, q_norm, k_norm, alibi, sinks),
        out=out,
        warps=config.warps,
        stages=config.stages,
        aliases=aliases,
        interpret=interpret,
    )
    return y.reshape(slots, heads * dim), (keys, values), rest[0] if rest else counters


def default_config(pairs: int, capacity: int, dim: int, itemsize: int, sms: int) -> DecodeConfig:
    """A configuration for `pairs` of slot and KV head that nobody measured: two programs an SM."""
    block = 16 if dim * itemsize > 256 else 32 if capacity <= 512 else 64  # as registers allow
    splits = max(1, min(round(2 * sms / pairs), cdiv(capacity, block), 32))
    return DecodeConfig(block, 4, splits, 2 if splits > 1 else 3)


def _check(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    heads: int,
    counters: jax.Array,
    inv_freq: jax.Array | None,
) -> None:
    """Raise ValueError for arguments that the kernel would misread."""
    slots, kv_heads, _, dim = keys.shape
    width = (heads + 2 * kv_heads) * dim
    if qkv.shape != (slots, width):
        raise ValueError(
            f"qkv {qkv.shape} does not fit {heads} heads and a cache {keys.shape}: "
            f"({slots}, {width}) is expected."
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} heads are no multiple of {kv_heads} KV heads.")
    if keys.shape != values.shape:
        raise ValueError(f"Keys {keys.shape} and values {values.shape}: both must be the same.")
    if keys.dtype != qkv.dtype or values.dtype != qkv.dtype:
        raise ValueError(f"qkv is {qkv.dtype}, the cache {keys.dtype} and {values.dtype}.")
    if lengths.shape != (slots,):
        raise ValueError(f"lengths {lengths.shape}: one for each of {slots} slots, please.")
    if counters.ndim != 1 or counters.size < slots * kv_heads or counters.dtype != jnp.int32:
        raise ValueError(
            f"counters are {counters.shape} {counters.dtype}; {slots * kv_heads} or more int32 are "
            "needed."
        )
    if inv_freq is not None and 2 * inv_freq.shape[0] > dim:
        raise ValueError(f"{inv_freq.shape[0]} frequencies turn more than {dim} elements.")
