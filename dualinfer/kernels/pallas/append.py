"""Keys and values put into a cache, in its memory: of a token, turned with its queries, or of rows.

XLA's scatter into arrays of several heads turns all that there is, and back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .launch import LANES, Block, run, sublanes, whole

_TILE = 1 << 20  # bytes of an array's part as values of 32 bits


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


class Rows(NamedTuple):
    """The places of rows of tokens [B, T]: row b's token t goes to place starts[b] + t of slots[b].

    That is if t is below lengths[b], int32 [B] all, and there are this slot and this place. Slots
    are rows of an array, or those of int32 `table` [N, blocks], which names the rows that have a
    slot's places, S each; none has those of a negative one.
    """

    slots: jax.Array
    starts: jax.Array
    lengths: jax.Array
    table: jax.Array | None = None


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


def turned(
    ref: Mapping[str, Any], x: jax.Array, name: str, norm: HeadNorm | None, dtype: Any
) -> jax.Array:
    """float32 heads [N, D] in a kernel, normed and turned, each rounded to a dtype.

    `ref` are references to cosines and sines [N or 1, D], "cos" and "sin", and to "pairs", if
    heads turn, and to the weights of the norm of those of this `name`, "norm_q0".
    """

    def rounded(y: jax.Array) -> jax.Array:
        return y.astype(dtype).astype(jnp.float32)

    def normed(y: jax.Array) -> jax.Array:
        assert norm is not None
        weights = (ref[f"norm_{name}{i}"][...] for i in range(len(norm.queries)))
        return rounded(norm.function(y, *(weight.astype(jnp.float32) for weight in weights)))

    if norm is not None and not norm.turned:
        x = normed(x)
    if "pairs" in ref:
        other = jax.lax.dot(
            x,
            ref["pairs"][...],
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        cos, sin = (ref[part][...] for part in ("cos", "sin"))
        if len(cos) not in (1, len(x)):  # of tokens, which each head has
            cos, sin = (jnp.concatenate([part] * (len(x) // len(part))) for part in (cos, sin))
        x = rounded(x * cos + other * sin)
    return normed(x) if norm is not None and norm.turned else x


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
    """
    heads, tokens, *rest = held.shape[1:]
    size = min(sublanes(held.dtype), tokens) if rest else _lanes_of(tokens)
    shape = heads, size, *rest
    wide = _wide(held)

    def at(n: Any, rows: Any, places: Any) -> tuple[Any, ...]:
        return rows[n], 0, jax.lax.div(places[n], jnp.int32(size)), *(0 for _ in rest)

    def body(rows: Any, places: Any, ref: Any, new: Any, out: Any) -> None:
        place = jax.lax.rem(places[pl.program_id(0)], jnp.int32(size))
        here = jax.lax.broadcasted_iota(jnp.int32, shape, 1) == place
        spread = jnp.broadcast_to(new[...].astype(wide), shape)
        out[...] = _merged(here, spread, ref[...])

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


def put_rows(held: jax.Array, new: jax.Array, rows: Rows, *, interpret: bool) -> jax.Array:
    """A cache's array [M, K, S, D] with `rows` of tokens `new` [B, T, K, D], in its memory.

    Without D for scales. Rows of one slot lie side by side, in their order.
    """
    (heads, tokens, *rest), (batch, count) = held.shape[1:], new.shape[:2]
    size = _tile_of(held, count) if rest else _lanes_of(tokens)
    shape, wide, steps = (heads, size, *rest), _wide(held), pl.cdiv(count - 1, size) + 1
    starts = rows.starts.astype(jnp.int32)
    places = _tiles_of(held, rows._replace(starts=starts), size, steps)
    new = new.astype(held.dtype)
    if not rest:  # lanes are turned in whole tiles alone
        source = jnp.arange(steps * size)[None] - (starts % size)[:, None]
        new = jnp.take_along_axis(new, source.clip(0, count - 1)[..., None], 1)
    new = jnp.pad(new, ((0, 0), (0, -new.shape[1] % size), *[(0, 0)] * (new.ndim - 2)))
    parts = new.shape[1] // size
    new = new.swapaxes(1, 2) if rest else new.reshape(batch, parts, size, heads).swapaxes(2, 3)

    def at(n: Any, rows: Any, tiles: Any, *_: Any) -> tuple[Any, ...]:
        return rows[n], 0, tiles[n], *(0 for _ in rest)

    def of_new(behind: int) -> Block:
        """The part of the rows that begins in a program's tile, or in one that lies before."""

        def number(n: Any, *given: Any) -> tuple[Any, ...]:
            own = given[2][n]
            step = jax.lax.rem(own, jnp.int32(steps)) - behind
            step = jnp.minimum(jnp.maximum(step, 0), parts - 1)
            own = jax.lax.div(own, jnp.int32(steps))
            return (own, 0, step, 0) if rest else (own, step, 0, 0)

        return Block(new, (None, *shape) if rest else (None, None, *shape), number)

    def body(
        rows: Any, tiles: Any, _: Any, low: Any, high: Any, turn: Any, ref: Any, *refs: Any
    ) -> None:
        *news, out = refs
        n = pl.program_id(0)
        before = jnp.maximum(n - 1, 0)
        again = (n > 0) & (rows[n] == rows[before]) & (tiles[n] == tiles[before])
        place = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        x = news[0][...].astype(wide)
        if rest:
            x = jnp.where(place >= size - turn[n], news[1][...].astype(wide), x)
            x = pltpu.roll(x, turn[n], 1)
        here = (place >= low[n]) & (place < high[n])

        @pl.when(again)
        def _() -> None:
            out[...] = _merged(here, x, out[...])

        @pl.when(~again)
        def _() -> None:
            out[...] = _merged(here, x, ref[...])

    block = Block(held, (None, *shape), at)
    (y,) = run(
        body,
        "put_rows",
        (batch * steps,),
        [block, of_new(0), *([of_new(1)] if rest else [])],
        [block],
        prefetch=places,
        changes={0: 0},
        between=16 * math.prod(shape),
        interpret=interpret,
    )
    return y


def _tiles_of(held: jax.Array, given: Rows, size: int, steps: int) -> list[jax.Array]:
    """What each program of `put_rows` changes, int32 [B * steps] each.

    A tile of so many places, by row and number; the program whose rows are its own; the first place
    and the one behind the last; and how far rows are turned. A program that changes nothing has the
    tile of the last one that does, so that none is read or written for it.
    """
    slots, starts, lengths, table = given
    tokens, total = held.shape[2], len(held) if table is None else len(table)
    tiles = starts[:, None] // size + jnp.arange(steps, dtype=jnp.int32)
    each = tokens // size  # of a row
    capacity = each * (1 if table is None else table.shape[1])
    slot, inside = slots.clip(0, total - 1)[:, None], tiles.clip(0, capacity - 1)
    rows, numbers = jnp.broadcast_to(slot, tiles.shape), inside
    if table is not None:
        rows, numbers = table[slot, inside // each], inside % each
    low = jnp.maximum(starts[:, None] - tiles * size, 0)
    high = jnp.minimum((starts + lengths)[:, None] - tiles * size, size)
    there = (
        (low < high) & (tiles < capacity) & (rows >= 0) & ((slots >= 0) & (slots < total))[:, None]
    )
    turn = jnp.broadcast_to((starts % size)[:, None], tiles.shape)
    there, own = there.reshape(-1), jnp.arange(there.size, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(there, own, -1))
    last = jnp.where(last < 0, jnp.argmax(there), last)
    rows = rows.reshape(-1)[last].clip(0, len(held) - 1)
    numbers, turn = numbers.reshape(-1)[last], turn.reshape(-1)[last]
    low, high = (jnp.where(there, x.reshape(-1), 0) for x in (low, high))
    return [x.astype(jnp.int32) for x in (rows, numbers, last, low, high, turn)]


def _merged(here: jax.Array, x: jax.Array, rest: jax.Array) -> jax.Array:
    """x where it is `here`, of 32 bits, and elsewhere the rest, in whose dtype both are."""
    y = jnp.where(here, x, rest.astype(x.dtype))
    if rest.dtype == jnp.uint8:  # no chip stores it of 32 bits
        return jax.lax.bitcast_convert_type(y.astype(jnp.int8), jnp.uint8)
    return y.astype(rest.dtype)


def _wide(held: jax.Array) -> Any:
    """The dtype of 32 bits that holds the values of an array."""
    return jnp.int32 if held.dtype.itemsize == 1 else jnp.float32


def _tile_of(held: jax.Array, count: int) -> int:
    """Places of an array [M, K, S, D] that a program changes, of rows of so many tokens."""
    heads, tokens, dim = held.shape[1:]
    size = min(sublanes(held.dtype), tokens)
    while size < count and tokens % (2 * size) == 0 and 8 * heads * size * dim <= _TILE:
        size *= 2
    return size


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
            names += [f"norm_{name}{i}" for i in range(len(weights))]
            inputs += [whole(weight.reshape(1, dim)) for weight in weights]

    def body(at: Any, *refs: Any) -> None:
        ref = dict(zip([*names, "out_q", "out_k", "out_v"], refs, strict=True))
        x = ref["qkv"][...].astype(jnp.float32)
        found = {"q": x[:heads], "k": x[heads : heads + kv_heads]}
        for name, part in found.items():
            found[name] = turned(ref, part, name, norm, qkv.dtype)
        ref["out_q"][...] = found["q"].astype(qkv.dtype)
        place = jax.lax.rem(at[pl.program_id(0)], jnp.int32(size))
        here = jax.lax.broadcasted_iota(jnp.int32, (kv_heads, size, dim), 1) == place
        for name, new in (("k", found["k"]), ("v", x[heads + kv_heads :])):
            held = ref[name][...]
            spread = jnp.broadcast_to(new[:, None], (kv_heads, size, dim))
            ref[f"out_{name}"][...] = _merged(here, spread, held)

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
