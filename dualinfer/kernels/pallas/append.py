"""One token's queries and keys normed and turned, and its keys and values put into the cache."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from .launch import LANES, Block, run, sublanes, whole


class Turn(NamedTuple):
    """How heads turn: float32 `cos` and `sin` [N, D], and the matrix [D, D] that pairs elements.

    x turned is x cos + (x pairs) sin, where what does not turn has a cosine of 1 and a sine of 0.
    """

    cos: jax.Array
    sin: jax.Array
    pairs: np.ndarray


class HeadNorm(NamedTuple):
    """How heads are normed: a function of float32 [heads, D] and of its weights [1, D].

    `queries` and `keys` are these weights, [D] each. With `turned` it comes behind the turn.
    """

    function: Callable[..., jax.Array]
    queries: Sequence[jax.Array]
    keys: Sequence[jax.Array]
    turned: bool = False


def widened(
    cos: jax.Array, sin: jax.Array, dim: int, interleaved: bool
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [..., D] for each element of a head, of [..., R/2] of its pairs."""

    def wide(x: jax.Array, rest: float) -> jax.Array:
        both = jnp.repeat(x, 2, -1) if interleaved else jnp.concatenate((x, x), -1)
        more = [(0, 0)] * (x.ndim - 1) + [(0, dim - both.shape[-1])]
        return jnp.pad(both, more, constant_values=rest)

    return wide(cos, 1.0), wide(sin, 0.0)


def pairs(dim: int, turning: int, interleaved: bool) -> np.ndarray:
    """float32 [D, D], by which each of the first `turning` elements meets its partner."""
    matrix = np.zeros((dim, dim), np.float32)
    half = turning // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        matrix[b, a], matrix[a, b] = -1, 1
    return matrix


def serves(k: jax.Array) -> bool:
    """True if keys [N, K, S, D] of a cache lie as the kernel writes them."""
    return k.shape[2] % min(sublanes(k.dtype), k.shape[2]) == 0


def put(
    held: jax.Array,
    new: jax.Array,
    rows: jax.Array,
    places: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """A cache's array [M, K, S, D] or [M, K, S] with `new` [N, K, D] or [N, K], in its memory.

    new[n] goes to place int32 places[n] of row int32 rows[n]; no two n have one row that is read.
    XLA's scatter into some of these turns the whole array, and back.
    """
    if held.dtype == jnp.uint8:  # whose bits no chip stores of an int32
        cast = jax.lax.bitcast_convert_type
        given = cast(held, jnp.int8), cast(new, jnp.int8), rows, places
        return cast(put(*given, interpret=interpret), jnp.uint8)
    heads, tokens, *rest = held.shape[1:]
    size = min(sublanes(held.dtype), tokens) if rest else _lanes_of(tokens)
    shape = heads, size, *rest
    wide = jnp.int32 if held.dtype == jnp.int8 else jnp.float32

    def at(n: Any, rows: Any, places: Any) -> tuple[Any, ...]:
        return rows[n], 0, jax.lax.div(places[n], jnp.int32(size)), *(0 for _ in rest)

    def body(rows: Any, places: Any, ref: Any, new: Any, out: Any) -> None:
        place = jax.lax.rem(places[pl.program_id(0)], jnp.int32(size))
        here = jax.lax.broadcasted_iota(jnp.int32, shape, 1) == place
        spread = jnp.broadcast_to(new[...].astype(wide), shape)
        out[...] = jnp.where(here, spread, ref[...].astype(wide)).astype(held.dtype)

    block = Block(held, (None, *shape), at)
    new = new.astype(held.dtype).reshape(len(new), heads, 1, *rest)
    (y,) = run(
        body,
        "put",
        (len(new),),
        [block, Block(new, (None, *new.shape[1:]), lambda n, *_: (n, *(0,) * (new.ndim - 1)))],
        [block],
        prefetch=[rows.astype(jnp.int32), places.astype(jnp.int32)],
        changes={0: 0},
        interpret=interpret,
    )
    return y


def _lanes_of(tokens: int) -> int:
    return LANES if tokens % LANES == 0 else tokens


def append(
    qkv: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    heads: int,
    turn: Turn | None,
    norm: HeadNorm | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [N, H, D] of packed qkv [N, H + 2K, D], and the cache with the keys and values.

    These go to places int32 `lengths` [N] of k and v [more than N, K, S, D], in their memory where
    nothing else reads it.
    """
    count, packed, dim = qkv.shape
    kv_heads, size = k.shape[1], min(sublanes(k.dtype), k.shape[2])
    names = ["qkv", "k", "v"]
    inputs = [Block(qkv, (None, packed, dim), lambda n, at: (n, 0, 0))]
    inputs += [
        Block(
            x,
            (None, kv_heads, size, dim),
            lambda n, at: (n, 0, jax.lax.div(at[n], jnp.int32(size)), 0),
        )
        for x in (k, v)
    ]
    changed = inputs[1:]
    if turn is not None:
        names += ["cos", "sin", "pairs"]
        for x in turn[:2]:
            inputs.append(Block(x[:, None], (None, 1, dim), lambda n, at: (n, 0, 0)))
        inputs.append(whole(jnp.asarray(turn.pairs)))
    if norm is not None:
        for name, weights in (("q", norm.queries), ("k", norm.keys)):
            for i, weight in enumerate(weights):
                names.append(f"norm_{name}{i}")
                inputs.append(Block(weight.reshape(1, dim), (1, dim), lambda n, at: (0, 0)))

    def normed(ref: Any, x: jax.Array, name: str) -> jax.Array:
        assert norm is not None
        weights = [
            ref[f"norm_{name}{i}"][...].astype(jnp.float32) for i in range(len(norm.queries))
        ]
        return norm.function(x, *weights).astype(qkv.dtype).astype(jnp.float32)

    def body(at: Any, *refs: Any) -> None:
        ref = dict(zip([*names, "out_q", "out_k", "out_v"], refs, strict=True))
        x = ref["qkv"][...].astype(jnp.float32)
        found = {"q": x[:heads], "k": x[heads : heads + kv_heads]}
        for name, part in found.items():
            if norm is not None and not norm.turned:
                part = normed(ref, part, name)
            if turn is not None:
                other = jax.lax.dot(
                    part,
                    ref["pairs"][...],
                    precision=jax.lax.Precision.HIGHEST,
                    preferred_element_type=jnp.float32,
                )
                part = part * ref["cos"][...] + other * ref["sin"][...]
                part = part.astype(qkv.dtype).astype(jnp.float32)
            if norm is not None and norm.turned:
                part = normed(ref, part, name)
            found[name] = part
        ref["out_q"][...] = found["q"].astype(qkv.dtype)
        place = jax.lax.rem(at[pl.program_id(0)], jnp.int32(size))
        here = jax.lax.broadcasted_iota(jnp.int32, (kv_heads, size, dim), 1) == place
        for name, new in (("k", found["k"]), ("v", x[heads + kv_heads :])):
            held = ref[name][...]
            spread = jnp.broadcast_to(new[:, None], (kv_heads, size, dim))
            ref[f"out_{name}"][...] = jnp.where(here, spread, held.astype(jnp.float32)).astype(
                held.dtype
            )

    out = jax.ShapeDtypeStruct((count, heads, dim), qkv.dtype)
    q, k, v = run(
        body,
        "append",
        (count,),
        inputs,
        [Block(out, (None, heads, dim), lambda n, at: (n, 0, 0)), *changed],
        prefetch=[lengths.astype(jnp.int32)],
        changes={1: 1, 2: 2},
        parallel=[True],
        interpret=interpret,
    )
    return q, k, v
