"""Attention of whole prompts: FlashAttention-2's loop over keys, with every kind of mask.

Dao, 2023 ("FlashAttention-2"). A program owns block_m queries of one head. Blocks of keys that all
its queries see pass without a mask; only those at the diagonal, the window's edge and the end are
masked. Scores are kept in units of log2, so that exp2 serves.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .attention_choice import Config, attention_configs
from .attention_options import Options, check_arrays
from .launch import both, cdiv, dot, launch, load, next_power_of_2, program, store

_LOG2E = math.log2(math.e)
_L2_BYTES = 16 << 20  # of keys and values that are read at a time; an H100 has 50 MB


class _Plan(NamedTuple):
    """What a kernel is made for."""

    tokens: int
    heads: int
    firsts: tuple[int, int, int]  # of queries, keys and values among the heads of their arrays
    group: int
    dim: int
    parts: tuple[tuple[int, int], ...]  # first element and extent of the blocks that hold a head
    scale: float
    softcap: float | None
    window: int | None
    causal: bool
    pairs: int
    section: int  # pairs whose programs run together
    block_m: int
    block_n: int


Parts = tuple[jax.Array, ...]
State = tuple[jax.Array, jax.Array, Parts]  # greatest score, sum of weights, sums of values


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    config: Config | None = None,
    sms: int = 132,
    interpret: bool = False,
    **options: Any,
) -> jax.Array:
    """Attention of q [B, T, H, D] to the keys and values k and v [B, T, K, D]: [B, T, H, D].

    `options` are those of `Options`. The output of queries beyond `lengths` is finite, and zero in
    blocks that lie wholly there. Keys and values that are hidden are read all the same and must be
    finite. `sms` is the device's number of multiprocessors.
    """
    check_arrays(q, k, v)
    heads = q.shape[2], k.shape[2]
    return _attend((q, k, v), heads, (0, 0, 0), Options(**options), config, sms, interpret)


def packed_heads(qkv: jax.Array, heads: int, kv_heads: int) -> tuple[Any, Any]:
    """What queries [B, T, H, D] and keys [B, T, K, D] in qkv [B, T, (H + 2 K) D] are like."""
    count = heads + 2 * kv_heads
    if qkv.ndim != 3 or qkv.shape[2] % count:
        raise ValueError(f"qkv {qkv.shape}: expected [B, T, {count} D].")
    batch, tokens, width = qkv.shape
    q, k = (
        jax.ShapeDtypeStruct((batch, tokens, n, width // count), qkv.dtype)
        for n in (heads, kv_heads)
    )
    return q, k


def packed_attention(
    qkv: jax.Array,
    heads: int,
    kv_heads: int,
    *,
    config: Config | None = None,
    sms: int = 132,
    interpret: bool = False,
    **options: Any,
) -> jax.Array:
    """As `attention`, of packed qkv [B, T, (H + 2 K) D] as a product left it: [B, T, H, D]."""
    q, k = packed_heads(qkv, heads, kv_heads)
    check_arrays(q, k, k)
    packed = qkv.reshape(*qkv.shape[:2], heads + 2 * kv_heads, q.shape[3])
    firsts = 0, heads, heads + kv_heads
    how = Options(**options), config, sms, interpret
    return _attend((packed, packed, packed), (heads, kv_heads), firsts, *how)


def _attend(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    head_counts: tuple[int, int],
    firsts: tuple[int, int, int],
    options: Options,
    config: Config | None,
    sms: int,
    interpret: bool,
) -> jax.Array:
    """Attention of queries, keys and values that begin at heads `firsts` of `arrays`."""
    (batch, tokens, _, dim), dtype = arrays[0].shape, arrays[0].dtype
    heads, kv_heads = head_counts
    options.check(batch, tokens, heads)
    out = jax.ShapeDtypeStruct((batch, tokens, heads, dim), dtype)
    if not out.size:
        return jnp.zeros(out.shape, dtype)
    pairs, group = batch * heads, heads // kv_heads
    if config is None:
        shape = {"itemsize": dtype.itemsize, "head_dim": dim, "tokens": tokens, "pairs": pairs}
        config = attention_configs(**shape, processors=sms)[0]
    together = _L2_BYTES // (2 * tokens * dim * dtype.itemsize)
    plan = _Plan(
        tokens=tokens,
        heads=heads,
        firsts=firsts,
        group=group,
        dim=dim,
        parts=_split(dim),
        scale=options.scale,
        softcap=options.softcap,
        window=options.window,
        causal=options.causal,
        pairs=pairs,
        section=min(pairs, group * max(1, together)),
        block_m=config.block_m,
        block_n=config.block_n,
    )
    (y,) = launch(
        _kernel(plan),
        (cdiv(tokens, config.block_m) * pairs,),
        *arrays,
        None if options.mask is None else options.mask.astype(jnp.int8),
        *(options.segments, options.positions, options.alibi, options.sinks, options.lengths),
        out=[out],
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    return y


def _split(dim: int) -> tuple[tuple[int, int], ...]:
    """Blocks that hold a head: 80 is 64 + 16; one where a second would be as large."""
    main = max(1 << (dim.bit_length() - 1), 16)
    if dim <= main:
        return ((0, main),)
    rest = max(next_power_of_2(dim - main), 16)
    return ((0, 2 * main),) if rest == main else ((0, main), (main, rest))


# Numbers of Python stay such: JAX 0.11 makes constants of them whose quotients do not lower.
def _blocks(count: Any, size: int) -> Any:
    """How many whole blocks `count`, at least 0, holds."""
    return count // size if isinstance(count, int) else jax.lax.div(count, jnp.int32(size))


def _greater(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def _tanh(x: jax.Array, accurate: bool) -> jax.Array:
    power = jnp.exp2(-2 * _LOG2E * jnp.abs(x))  # exp(-2|x|)
    y = (1 - power) / (1 + power)
    y = jnp.where(x < 0, -y, y)
    if accurate:  # 1 - power cancels near 0; there the series is good to float32
        z = x * x
        series = 1 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835))))
        y = jnp.where(jnp.abs(x) < 0.25, x * series, y)
    return y


@cache
def _kernel(plan: _Plan) -> Callable[..., None]:
    tokens, block_m, block_n, window = plan.tokens, plan.block_m, plan.block_n, plan.window

    def columns(first: int, extent: int) -> tuple[jax.Array, jax.Array | None]:
        """Elements of a head, and which of them exist: None says all."""
        d = first + jnp.arange(extent)[None, :]
        return d, None if first + extent <= plan.dim else d < plan.dim

    def read(ref: Any, b: Any, rows: jax.Array, head: Any, there: jax.Array | None) -> Parts:
        """Rows of one head of [B, T, heads, D]; 0 outside of `there` and beyond D."""
        tiles = []
        for part in plan.parts:
            d, exists = columns(*part)
            inside = both(None if there is None else there[:, None], exists)
            if inside is not None:
                inside = jnp.broadcast_to(inside, (rows.shape[0], part[1]))
            tiles.append(load(ref, (b, rows[:, None], head, d), inside))
        return tuple(tiles)

    def _attention_kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        mask_ref: Any,
        segments_ref: Any,
        positions_ref: Any,
        slopes_ref: Any,
        sinks_ref: Any,
        lengths_ref: Any,
        out_ref: Any,
    ) -> None:
        # The programs of a section's heads run together and share the L2 cache; the last blocks of
        # queries, which are the longest if causal, run first.
        blocks = cdiv(tokens, block_m)
        first = program(0) // (plan.section * blocks) * plan.section
        within = program(0) - first * blocks
        width = jnp.minimum(plan.section, plan.pairs - first)
        pair = first + within % width
        m = (blocks - 1 - within // width) * block_m
        b, head = pair // plan.heads, pair % plan.heads
        q_head = head + plan.firsts[0]
        k_head, v_head = (head // plan.group + first for first in plan.firsts[1:])

        rows = m + jnp.arange(block_m)
        row_there = None if tokens % block_m == 0 else rows < tokens
        q = read(q_ref, b, rows, q_head, row_there)
        optional = mask_ref is not None or segments_ref is not None
        accurate = q_ref.dtype == jnp.float32
        slope = None if slopes_ref is None else load(slopes_ref, (head,)) * _LOG2E
        q_segment = None if segments_ref is None else load(segments_ref, (b, rows), row_there, 0)
        q_position = rows if positions_ref is None else load(positions_ref, (b, rows), row_there, 0)

        # Keys lo..end-1 are seen by some query of the block, those of full_lo..full_hi-1 by all.
        end: Any = tokens
        if lengths_ref is not None:
            end = jnp.minimum(end, load(lengths_ref, (b,)).astype(jnp.int32))
        alive = m < end
        hi = jnp.minimum(end, m + block_m) if plan.causal else end
        full_hi = _blocks(jnp.minimum(end, m + 1) if plan.causal else end, block_n) * block_n
        lo: Any = 0
        full_lo: Any = 0
        if window is not None:
            lo = _blocks(jnp.maximum(m + 1 - window, 0), block_n) * block_n
            edge = jnp.maximum(m + block_m - window + block_n - 1, 0)
            full_lo = jnp.maximum(_blocks(edge, block_n) * block_n, lo)
        if optional:  # then no block is seen by all
            full_lo = full_hi = lo
        else:
            full_hi = jnp.where(alive, *map(jnp.int32, (_greater(full_hi, full_lo), full_lo)))
        lower = _blocks(full_lo - lo, block_n)
        upper = _blocks(_greater(hi - full_hi, 0) + block_n - 1, block_n)
        masked = jnp.where(alive, jnp.int32(lower + upper), jnp.int32(0))

        factor = plan.scale * _LOG2E if plan.softcap is None else plan.softcap * _LOG2E
        rest = factor if slopes_ref is None else 1.0  # what makes `scored` units of log2

        def scored(s: jax.Array, distance: Callable[[], jax.Array]) -> jax.Array:
            if plan.softcap is not None:
                s = _tanh(s * (plan.scale / plan.softcap), accurate)
            return s if slope is None else s * factor + slope * distance().astype(jnp.float32)

        def step(n: jax.Array, state: State, all_seen: bool) -> State:
            """The state after the keys n..n+block_n-1."""
            top, total, sums = state
            key = n + jnp.arange(block_n)
            there = None if all_seen else key < end
            k = read(k_ref, b, key, k_head, there)
            s = sum((dot(x, y.T) for x, y in zip(q[1:], k[1:], strict=True)), dot(q[0], k[0].T))

            def distance() -> jax.Array:
                at = key if positions_ref is None else load(positions_ref, (b, key), there, 0)
                return at[None, :] - q_position[:, None]

            s = scored(s, distance)
            if there is not None:
                seen = there
                if mask_ref is not None:
                    seen = seen & (load(mask_ref, (b, key), there, 0) != 0)
                seen = seen[None, :]
                if plan.causal:
                    seen = seen & (key[None, :] <= rows[:, None])
                if window is not None:
                    seen = seen & (key[None, :] > rows[:, None] - window)
                if q_segment is not None:
                    segment = load(segments_ref, (b, key), there, 0)
                    seen = seen & (segment[None, :] == q_segment[:, None])
                s = jnp.where(seen, s, -jnp.inf)
            new_top = jnp.maximum(top, s.max(1) * rest)
            base = new_top
            if not all_seen:  # -inf minus -inf, in a row that has seen nothing yet, is NaN
                base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            p = jnp.exp2(s * rest - base[:, None])
            shrink = jnp.exp2(top - base)
            v = read(v_ref, b, key, v_head, there)
            weights = p.astype(v_ref.dtype)
            sums = tuple(
                x * shrink[:, None] + dot(weights, y) for x, y in zip(sums, v, strict=True)
            )
            return new_top, total * shrink + p.sum(1), sums

        def at_edges(i: jax.Array, state: State) -> State:
            n = jnp.where(i < lower, lo + i * block_n, full_hi + (i - lower) * block_n)
            return step(n, state, all_seen=False)

        zeros = jnp.zeros((block_m,), jnp.float32)
        empty = tuple(jnp.zeros((block_m, extent), jnp.float32) for _, extent in plan.parts)
        state: State = zeros - jnp.inf, zeros, empty
        state = jax.lax.fori_loop(0, masked, at_edges, state)
        if not optional:
            count = _blocks(full_hi - full_lo, block_n)
            state = jax.lax.fori_loop(
                0, count, lambda i, x: step(full_lo + i * block_n, x, all_seen=True), state
            )

        def see_themselves(state: State) -> State:
            """The state in which queries that have seen nothing see themselves."""
            top, total, sums = state
            blind = total == 0
            k = read(k_ref, b, rows, k_head, row_there)
            products = [
                (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(1)
                for x, y in zip(q, k, strict=True)
            ]
            s = scored(sum(products[1:], products[0]), lambda: zeros) * rest
            v = read(v_ref, b, rows, v_head, row_there)
            own = (
                jnp.where(blind[:, None], y.astype(jnp.float32), x)
                for x, y in zip(sums, v, strict=True)
            )
            return jnp.where(blind, s, top), jnp.where(blind, 1.0, total), tuple(own)

        if mask_ref is not None:
            state = jax.lax.cond(
                alive & (jnp.where(state[1] == 0, 1, 0).max() != 0),
                lambda: see_themselves(state),
                lambda: state,
            )

        top, total, sums = state
        if sinks_ref is not None:
            sink = load(sinks_ref, (head,)) * _LOG2E
            base = jnp.maximum(top, sink)
            shrink = jnp.exp2(top - base)
            total = total * shrink + jnp.exp2(sink - base)
            sums = tuple(x * shrink[:, None] for x in sums)
        share = 1 / jnp.where(total == 0, 1.0, total)  # 0 in rows beyond a sequence's length
        for x, part in zip(sums, plan.parts, strict=True):
            d, exists = columns(*part)
            inside = both(None if row_there is None else row_there[:, None], exists)
            if inside is not None:
                inside = jnp.broadcast_to(inside, x.shape)
            store(out_ref, (b, rows[:, None], head, d), x * share[:, None], inside)

    return _attention_kernel
