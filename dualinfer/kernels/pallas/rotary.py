"""Packed queries, keys and values taken apart: head norms, rotary embedding and the KV append."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import both, cdiv, launch, load, next_power_of_2, program, store

_BLOCK = 4096  # elements of a program


class HeadPlan(NamedTuple):
    """How heads are read: their width and the block that holds it, rotary embedding and norm."""

    dim: int
    block: int
    rotary: int  # elements of a head that are rotated
    interleaved: bool
    norm_eps: float
    norm_unit_offset: bool


Turn = tuple[jax.Array, jax.Array, jax.Array]  # partner, cos, and sin with its sign


def within_head(plan: HeadPlan, d: jax.Array) -> jax.Array | None:
    """Mask of the elements d that a head has; None for all."""
    return None if plan.dim == plan.block else d < plan.dim


def turning(plan: HeadPlan, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Number of the pair to which each element d belongs, and whether it turns."""
    return d // 2 if plan.interleaved else d % (plan.rotary // 2), d < plan.rotary


def turn_of(plan: HeadPlan, d: jax.Array, cos: jax.Array, sin: jax.Array) -> Turn:
    """What `read_heads` takes: `cos` and `sin` are those of each element's pair."""
    if plan.interleaved:
        partner, first = d ^ 1, d % 2 == 0
    else:
        half = plan.rotary // 2
        first = d < half
        partner = jnp.where(first, d + half, d - half)
    turned = d < plan.rotary
    sin = jnp.where(turned, jnp.where(first, -sin, sin), 0.0)
    return jnp.where(turned, partner, d), jnp.where(turned, cos, 1.0), sin


def read_heads(
    plan: HeadPlan,
    qkv_ref: Any,
    token: jax.Array,
    head: jax.Array,
    d: jax.Array,
    inside: jax.Array | None,
    turn: Turn | None,
    norm_ref: Any,
) -> jax.Array:
    """Float32 heads [rows, block] of qkv [tokens, heads, dim], normed if there is a norm, rotated.

    One of `token` and `head` is a column, d a row.
    """

    def read(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = load(qkv_ref, (token, head, at), inside).astype(jnp.float32)
        if norm_ref is None:
            return x, x
        weight = load(norm_ref, (at,), within_head(plan, d)).astype(jnp.float32)
        return x, x * (weight + 1.0 if plan.norm_unit_offset else weight)

    x, y = read(d)
    if turn is not None:
        partner, cos, sin = turn
        y = y * cos + read(partner)[1] * sin
    if norm_ref is None:
        return y
    return y * jax.lax.rsqrt((x * x).sum(1, keepdims=True) / plan.dim + plan.norm_eps)


@cache
def _kernel(
    plan: HeadPlan, rows: int, tokens: int, prompt: int, heads: int, kv_heads: int, slots: int
) -> Callable[..., None]:
    def _rotary_append_kernel(
        qkv_ref: Any,
        cos_ref: Any,
        sin_ref: Any,
        q_norm_ref: Any,
        k_norm_ref: Any,
        slots_ref: Any,
        _keys: Any,
        _values: Any,
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        *cache_refs: Any,
    ) -> None:
        token = (program(0) * rows + jnp.arange(rows))[:, None]
        head = program(1)
        d = jnp.arange(plan.block)[None, :]
        there = None if tokens % rows == 0 else token < tokens
        inside = both(there, within_head(plan, d))
        if inside is not None:
            inside = jnp.broadcast_to(inside, (rows, plan.block))
        turn = None
        if plan.rotary:
            pair, turned = turning(plan, d)
            mask = turned if there is None else turned & there
            mask = jnp.broadcast_to(mask, (rows, plan.block))
            turn = turn_of(plan, d, *(load(x, (token, pair), mask) for x in (cos_ref, sin_ref)))

        def keep(cache_ref: Any, kv_head: jax.Array, x: jax.Array) -> None:
            """Into the cache, unless the row stands for no prompt."""
            number = jax.lax.div(token, jnp.int32(prompt))
            slot = load(slots_ref, (jnp.minimum(number, tokens // prompt - 1),))
            valid = slot < slots if there is None else (slot < slots) & there
            # What is left out points behind the end: interpreted, masked elements are written too.
            at = jnp.where(valid, token - number * prompt, cache_ref.shape[2])
            mask = both(jnp.broadcast_to(valid, (rows, plan.block)), inside)
            store(cache_ref, (jnp.minimum(slot, slots - 1), kv_head, at, d), x, mask)

        @pl.when(head < heads)
        def _() -> None:
            x = read_heads(plan, qkv_ref, token, head, d, inside, turn, q_norm_ref)
            store(q_ref, (token, head, d), x, inside)

        @pl.when((head >= heads) & (head < heads + kv_heads))
        def _() -> None:
            x = read_heads(plan, qkv_ref, token, head, d, inside, turn, k_norm_ref)
            store(k_ref, (token, head - heads, d), x, inside)
            if cache_refs:
                keep(cache_refs[0], head - heads, x)

        @pl.when(head >= heads + kv_heads)
        def _() -> None:
            x = load(qkv_ref, (token, head, d), inside)
            store(v_ref, (token, head - heads - kv_heads, d), x, inside)
            if cache_refs:
                keep(cache_refs[1], head - heads - kv_heads, x)

    return _rotary_append_kernel


def rotary_append(
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    heads: int,
    kv_heads: int,
    cache: tuple[jax.Array, jax.Array] | None = None,
    slots: jax.Array | None = None,
    interleaved: bool = False,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float = 0.0,
    norm_unit_offset: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """q [B, T, H, D], k and v [B, T, K, D] of packed qkv [B, T, (H + 2K) D], and the cache.

    Queries and keys are normed over D with `q_norm` and `k_norm` [D] if given, and turned by `cos`
    and `sin`, float32 [B, T, R/2] with R <= D, if given. With a cache, a pair [N, K, S, D], keys
    and values are written in place to the start of `slots` int32 [B]; what lies behind them stays
    as it is, and a slot of N or more is left out.
    """
    batch, prompt, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    if dim * (heads + 2 * kv_heads) != width:
        raise ValueError(f"qkv {qkv.shape} does not hold {heads} heads and twice {kv_heads}.")
    if (cache is None) != (slots is None):
        raise ValueError("A cache goes with slots, and slots with a cache.")
    if cache is not None and (
        cache[0].shape != cache[1].shape
        or cache[0].shape[1::2] != (kv_heads, dim)
        or cache[0].shape[2] < prompt
    ):
        raise ValueError(
            f"cache {cache[0].shape} and {cache[1].shape} cannot hold {prompt} tokens of "
            f"{kv_heads} heads of {dim}."
        )
    tokens = batch * prompt
    plan = HeadPlan(
        dim=dim,
        block=max(16, next_power_of_2(dim)),
        rotary=0 if cos is None else 2 * cos.shape[-1],
        interleaved=interleaved,
        norm_eps=norm_eps,
        norm_unit_offset=norm_unit_offset,
    )
    rows = max(1, min(next_power_of_2(tokens), _BLOCK // plan.block))
    angles = [None if x is None else x.reshape(tokens, -1) for x in (cos, sin)]
    keys, values = cache if cache is not None else (None, None)
    counts = (heads, kv_heads, kv_heads)
    out = [jax.ShapeDtypeStruct((tokens, n, dim), qkv.dtype) for n in counts]
    out += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values) if x is not None]
    q, k, v, *filled = launch(
        _kernel(plan, rows, tokens, prompt, heads, kv_heads, 0 if keys is None else len(keys)),
        (cdiv(tokens, rows), heads + 2 * kv_heads),
        *(qkv.reshape(tokens, heads + 2 * kv_heads, dim), *angles, q_norm, k_norm, slots),
        *(keys, values),
        out=out,
        aliases=None if cache is None else {6: 3, 7: 4},
        interpret=interpret,
    )
    q, k, v = (x.reshape(batch, prompt, n, dim) for x, n in zip((q, k, v), counts, strict=True))
    return q, k, v, (filled[0], filled[1]) if filled else None
