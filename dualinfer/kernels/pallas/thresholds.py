"""Thresholds of top-k and top-p, searched for bit by bit in rows that stay in fast memory."""

from typing import Any

import jax
import jax.numpy as jnp

from .launch import BUDGET, Block, held_bytes, rounded_up, run

_ROWS = 8  # of a program: those of a tile
_LOWEST = -(1 << 31)


def serves(vocab: int) -> bool:
    """True if a program has room for rows of so many logits."""
    return 6 * held_bytes((_ROWS, vocab), jnp.float32) <= BUDGET


def filter_logits(
    logits: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """float32 logits [N, V] with -inf for what `ops.sampling.filter_logits` drops.

    int32 `top_k` and float32 `top_p` and `min_p` are [N].
    """
    count, vocab = logits.shape
    rows = rounded_up(count, _ROWS)
    k = jnp.minimum(jnp.where(top_k > 0, top_k, vocab), vocab).astype(jnp.float32)
    columns = [vocab - k, top_p.astype(jnp.float32), jnp.log(min_p).astype(jnp.float32)]
    padded = [jnp.pad(x, (0, rows - count))[:, None] for x in columns]
    padded_logits = jnp.pad(logits, ((0, rows - count), (0, 0)))

    def body(
        x_ref: Any, below_ref: Any, p_ref: Any, least_ref: Any, out_ref: Any, *work: Any
    ) -> None:
        keys_ref, shares_ref = work
        x = x_ref[...]
        keys_ref[...] = _keys(x)
        shares_ref[...] = jnp.ones_like(x)
        floor = _threshold(keys_ref, shares_ref, below_ref[...])
        best = x.max(-1, keepdims=True)
        weights = jnp.where(keys_ref[...] < floor, 0.0, jnp.exp(x - best))
        shares_ref[...] = weights / weights.sum(-1, keepdims=True)
        nucleus = _threshold(keys_ref, shares_ref, 1 - p_ref[...])
        nucleus = jnp.minimum(nucleus, _keys(best))  # the best one stays
        floor = jnp.maximum(floor, jnp.where(p_ref[...] < 1, nucleus, _LOWEST))
        dropped = (keys_ref[...] < floor) | (x < best + least_ref[...])
        out_ref[...] = jnp.where(dropped, -jnp.inf, x)

    own = Block(padded_logits, (_ROWS, vocab), lambda i: (i, 0))
    (y,) = run(
        body,
        "thresholds",
        (rows // _ROWS,),
        [own, *(Block(x, (_ROWS, 1), lambda i: (i, 0)) for x in padded)],
        [own],
        scratch=[((_ROWS, vocab), jnp.int32), ((_ROWS, vocab), jnp.float32)],
        parallel=[True],
        interpret=interpret,
    )
    return y[:count]


def _keys(x: jax.Array) -> jax.Array:
    """int32 in the order of float32 `x`: zeros are equal, NaN is the greatest."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(x != x, 0x7FFFFFFF, ordered)


def _threshold(keys: Any, weights: Any, most: jax.Array) -> jax.Array:
    """The greatest int32 [R, 1] below which `keys` [R, V] weigh at most float32 `most` [R, 1]."""

    def narrow(i: Any, found: jax.Array) -> jax.Array:
        tried = found + jax.lax.shift_left(jnp.int32(1), 31 - i)  # the first is -2^31 + 2^31
        below = jnp.where(keys[...] < tried, weights[...], 0.0).sum(-1, keepdims=True)
        return jnp.where(below <= most, tried, found)

    return jax.lax.fori_loop(0, 32, narrow, jnp.full(most.shape, _LOWEST, jnp.int32))
