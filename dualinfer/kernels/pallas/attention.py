"""Attention by blocks of keys with a running softmax: of prompts, of pieces, of a token.

Queries of the heads that share a key are read together, so that a block of keys is read once for
all of them: a program's rows are its tokens of one head, then of the next. Where keys lie in a
cache, only blocks that some query of a program sees are copied.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .append import HeadNorm, Turn, turned
from .launch import LANES, Block, dot, rounded_up, run, sublanes, whole
from .product import float8

_ROWS = 256  # queries times heads of a program
_MANY_ROWS = 1024  # likewise, where heads share what is read, or all that a program makes of it
_KEYS = 512  # of a block, for many queries
_MANY_KEYS = 2048  # for those of one token
_BLOCK = 1 << 20  # bytes of keys
_NONE = -1e30  # less than any score


class Seen(NamedTuple):
    """Which keys queries see, of queries that stand at `starts` [B] and behind, int32.

    Keys from `limits` [B] on are none. A query sees those at its own place and before if `causal`,
    and of these its `window` and its own `chunk` of tokens. Keys int32 `keys` [B, S] and queries
    `queries` [B, T] see their own number alone, None of both if all are alike.
    """

    starts: jax.Array
    limits: jax.Array
    causal: bool
    window: int | None = None
    chunk: int | None = None
    queries: jax.Array | None = None
    keys: jax.Array | None = None


class Scores(NamedTuple):
    """The form of scores: times `scale`, capped softly, with a bias, beside sinks [H].

    The bias is ALiBi's, whose slopes are float32 [H], and what they count int32 `queries` [B, T]
    and `keys` [B, S]; or any float32 `bias` [B or 1, H, T, S] of the keys that `attend` reaches; or
    that of a `table` [H, 2M+1], whose column M + n is for keys n places behind the query, the first
    and the last for those that lie farther, too. Every row starts at 0 then.
    """

    scale: float
    softcap: float | None = None
    sinks: jax.Array | None = None
    slopes: jax.Array | None = None
    queries: jax.Array | None = None
    keys: jax.Array | None = None
    bias: jax.Array | None = None
    table: jax.Array | None = None


class Packed(NamedTuple):
    """Queries that a product gave, of so many heads, with keys and values or what else behind them.

    The kernel norms and turns them as `append` does, by cosines and sines [B or 1, T, D].
    """

    heads: int
    turn: Turn | None
    norm: HeadNorm | None


class Made(NamedTuple):
    """The matrices by which each head makes keys and values of vectors that all heads share.

    `keys` [H, own, rank] make the first elements of a head's key of the first `rank` elements of a
    vector [rank + turning], which are followed by the others as they are: D is own + turning.
    `values` [H, Dv, rank] make its value.
    """

    keys: jax.Array
    values: jax.Array


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    seen: Seen,
    scores: Scores,
    *,
    slots: jax.Array | None = None,
    table: jax.Array | None = None,
    scales: Sequence[jax.Array] | None = None,
    values: int = 0,
    made: Made | None = None,
    packed: Packed | None = None,
    reach: int | None = None,
    interpret: bool,
) -> jax.Array:
    """Attention [B, T, H, Dv] of q [B, T, H, D] to keys and values [N, K, S, D] and [N, K, S, Dv].

    Row b reads int32 `slots` [B] of them, its own number if None; or blocks `table` [B, blocks] of
    [blocks, K, size, D]. `v` None are the first `values` elements of the keys, or the values
    that `made` makes of them. With float32 `scales`, two of [N, K, S] or [blocks, K, size], keys
    and values are codes, int8 or floats of 8 bits. No key that is seen lies at `reach` or behind;
    None says nothing. A query that sees nothing gives zeros. Keys may be wider than q, with zeros.
    With `packed` q are [B, T, H D and more], if `takes_packed` says so.
    """
    # Of products; the result is as q is given. Codes of 8 bits are exact in bfloat16.
    dtype = jnp.promote_types(q.dtype, jnp.bfloat16 if scales is not None else k.dtype)
    given = q.dtype
    if packed is not None:
        heads, dim = packed.heads, k.shape[3]
    else:
        q = q.astype(dtype)
        width_of_q = k.shape[3] - (0 if made is None else made.keys.shape[2] - made.keys.shape[1])
        q = jnp.pad(q, ((0, 0),) * 3 + ((0, width_of_q - q.shape[3]),))
        heads, dim = q.shape[2:]
    batch, tokens = q.shape[:2]
    kv_heads, size, width = k.shape[1], k.shape[2], values or (v if v is not None else k).shape[3]
    if made is not None:
        kv_heads, width = heads, made.values.shape[1]
    group = heads // kv_heads
    own = _tokens_of(tokens, group, q.dtype, _ROWS if made is None and not values else _MANY_ROWS)
    padded = rounded_up(tokens, own)
    rows = rounded_up(own * group, sublanes(q.dtype))
    whole_tiles = own % sublanes(q.dtype) == 0  # of each head: q is read as it lies
    blocks_of_rows = padded // own
    keys = size if table is not None else min(size, _keys_of(tokens, k))
    total = size * table.shape[1] if table is not None else size
    total = total if reach is None else min(reach, total)
    steps = pl.cdiv(total, keys)
    near = min(total, seen.window or total, seen.chunk or total)
    # Of a query and a key; a whole sequence's sees half of them.
    pairs = tokens * near if tokens < total or not seen.causal else (tokens + 1) * near // 2

    def by_rows(x: jax.Array) -> jax.Array:
        """[B, T, K, G, ...] as [B, K, rows of all programs, ...]."""
        x = jnp.pad(x, ((0, 0), (0, padded - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
        count, _, kv, of_each, *rest = x.shape
        x = x.reshape(count, blocks_of_rows, own, kv, of_each, *rest)
        x = jnp.moveaxis(x, (3, 4), (1, 3)).reshape(count, kv, blocks_of_rows, -1, *rest)
        x = jnp.pad(x, (*[(0, 0)] * 3, (0, rows - own * of_each), *[(0, 0)] * len(rest)))
        return x.reshape(count, kv, -1, *rest)

    def column(x: jax.Array) -> jax.Array:
        """int [B, T] as [B, 1, rows of all programs, 1]."""
        return by_rows(jnp.broadcast_to(x[:, :, None, None, None], (*x.shape, 1, group, 1)))

    def of_heads(x: jax.Array) -> jax.Array:
        """float32 [H] as [K, rows, 1]."""
        x = jnp.broadcast_to(
            x.astype(jnp.float32).reshape(kv_heads, group, 1), (kv_heads, group, own)
        )
        x = jnp.pad(x.reshape(kv_heads, -1), ((0, 0), (0, rows - own * group)))
        return x[..., None]

    def bounds(b: Any, i: Any, starts: Any, limits: Any) -> tuple[Any, Any]:
        """The first and the last block of keys that a program sees."""
        first, stop = 0, limits[b]
        begin = starts[b] + i * own
        if seen.causal:
            stop = jnp.minimum(stop, begin + own)
        if seen.window is not None:
            first = _div(jnp.maximum(begin - seen.window + 1, 0), keys)
        if seen.chunk is not None:
            chunk = _div(begin, seen.chunk) * seen.chunk
            first = jnp.maximum(first, _div(chunk, keys))
        return first, jnp.maximum(_div(stop + keys - 1, keys) - 1, 0)

    def block(b: Any, i: Any, j: Any, starts: Any, limits: Any) -> Any:
        first, final = bounds(b, i, starts, limits)
        return jnp.minimum(jnp.maximum(j, first), final)

    def of_keys(b: Any, h: Any, i: Any, j: Any, *given: Any) -> tuple[Any, ...]:
        starts, limits, places = given
        h = h if made is None else 0
        j = block(b, i, j, starts, limits)
        return (places[b, j], h, 0, 0) if table is not None else (places[b], h, j, 0)

    def shape_of(dim: int) -> tuple[int | None, ...]:
        """The shape of a program's queries, or of its results, of so many elements each."""
        if packed is not None:
            return None, own, group * dim
        return (None, group, own, dim) if whole_tiles else (None, None, rows, dim)

    def of_queries(b: Any, h: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return (b, h, i, 0) if packed is None else (b, i, h)

    def of_places(b: Any, h: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        assert packed is not None and packed.turn is not None
        return 0 if len(packed.turn.cos) == 1 else b, i, 0

    def of_scales(b: Any, h: Any, i: Any, j: Any, *given: Any) -> tuple[Any, ...]:
        first, head, at, _ = of_keys(b, h, i, j, *given)
        return first, head, 0, at

    def of_row(b: Any, h: Any, i: Any, j: Any, *given: Any) -> tuple[Any, ...]:
        return b, 0, block(b, i, j, *given[:2])

    if packed is not None:
        queries = q
    elif whole_tiles:
        queries = jnp.pad(q, ((0, 0), (0, padded - tokens), (0, 0), (0, 0))).swapaxes(1, 2)
    else:
        queries = by_rows(q.reshape(batch, tokens, kv_heads, group, dim))
    names = ["q", "at", "k"]
    at = column(jnp.arange(padded, dtype=jnp.int32)[None])
    inputs = [
        Block(queries, shape_of(dim), of_queries),
        Block(at, (None, None, rows, 1), lambda b, h, i, j, *_: (0, 0, i, 0)),
        Block(k, (None, None, keys, k.shape[3]), of_keys),
    ]
    if packed is not None and packed.turn is not None:
        names += ["cos", "sin", "pairs"]
        for x in packed.turn[:2]:
            inputs.append(Block(x, (None, own, dim), of_places))
        inputs.append(whole(jnp.asarray(packed.turn.pairs)))
    if packed is not None and packed.norm is not None:
        names += [f"norm_q{i}" for i in range(len(packed.norm.queries))]
        inputs += [whole(weight.reshape(1, dim)) for weight in packed.norm.queries]
    if v is not None:
        names.append("v")
        inputs.append(Block(v, (None, None, keys, width), of_keys))
    if made is not None:
        names += ["of_keys", "of_values"]
        for each in made:
            shape = (None, *each.shape[1:])
            inputs.append(Block(each.astype(q.dtype), shape, lambda b, h, i, j, *_: (h, 0, 0)))
    for name, scale in zip(("k_scale", "v_scale"), scales or (), strict=False):
        names.append(name)
        inputs.append(Block(scale[:, :, None], (None, None, 1, keys), of_scales))
    for name, pair in (("own", seen), ("place", scores)):
        if pair.queries is None or pair.keys is None:
            continue
        names += [f"{name}_q", f"{name}_k"]
        shape = (None, None, rows, 1)
        inputs.append(Block(column(pair.queries), shape, lambda b, h, i, j, *_: (b, 0, i, 0)))
        inputs.append(Block(pair.keys[:, None], (None, 1, keys), of_row))
    for name, each in (("slopes", scores.slopes), ("sinks", scores.sinks)):
        if each is not None:
            names.append(name)
            inputs.append(Block(of_heads(each), (None, rows, 1), lambda b, h, i, j, *_: (h, 0, 0)))

    if scores.table is not None:
        unit, low, high = _distances(scores.table, own, keys)
        most = scores.table.shape[1] // 2
        first = jnp.arange(-low, high + 1)[:, None, None] * unit  # of a block's first key
        distances = first + jnp.arange(keys) - jnp.arange(own)[:, None]
        near_blocks = scores.table.astype(jnp.float32)[:, distances.clip(-most, most) + most]
        near_blocks = near_blocks.reshape(kv_heads, group, low + high + 1, own, keys)
        near_blocks = near_blocks.swapaxes(1, 2).reshape(kv_heads, -1, group * own, keys)
        more = [(0, 0)] * 2 + [(0, rows - own * group), (0, 0)]

        def of_distance(b: Any, h: Any, i: Any, j: Any, *given: Any) -> tuple[Any, ...]:
            away = _div(block(b, i, j, *given[:2]) * keys - i * own, unit)
            return h, jnp.minimum(jnp.maximum(away, -low), high) + low, 0, 0

        names.append("bias")
        inputs.append(Block(jnp.pad(near_blocks, more), (None, None, rows, keys), of_distance))
    if (bias := scores.bias) is not None:
        one = len(bias) == 1  # for all rows
        bias = bias.swapaxes(1, 2).reshape(len(bias), tokens, kv_heads, group, -1)
        bias, shape = by_rows(bias), (None, None, rows, keys)
        parts = keys % LANES != 0  # [B, K, steps, rows, keys], for Mosaic cuts an axis at lanes
        if parts:
            bias = jnp.pad(bias, (*[(0, 0)] * 3, (0, steps * keys - bias.shape[-1])))
            bias = bias.reshape(*bias.shape[:3], steps, keys).swapaxes(2, 3)
            shape = (None, None, None, rows, keys)

        def of_bias(b: Any, h: Any, i: Any, j: Any, *given: Any) -> tuple[Any, ...]:
            b, j = 0 if one else b, block(b, i, j, *given[:2])
            return (b, h, j, i, 0) if parts else (b, h, i, j)

        names.append("bias")
        inputs.append(Block(bias, shape, of_bias))

    def body(starts: Any, limits: Any, _: Any, *refs: Any) -> None:
        results = ["out", "most", "total", "sums", *(["turned"] if packed is not None else [])]
        ref = dict(zip([*names, *results], refs, strict=True))
        b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        first, final = bounds(b, i, starts, limits)

        @pl.when(j == 0)
        def _() -> None:
            ref["most"][...] = jnp.full((rows, 1), _NONE, jnp.float32)
            ref["total"][...] = jnp.zeros((rows, 1), jnp.float32)
            ref["sums"][...] = jnp.zeros((rows, width), jnp.float32)
            if packed is not None:
                x = ref["q"][...].astype(jnp.float32)
                x = jnp.concatenate([x[:, g * dim : (g + 1) * dim] for g in range(group)])
                ref["turned"][...] = turned(ref, x, "q", packed.norm, q.dtype).astype(dtype)

        @pl.when((j >= first) & (j <= final))
        def _() -> None:
            _step(ref, starts[b], limits[b], j * keys)

        @pl.when(j == steps - 1)
        def _() -> None:
            most, total, sums = ref["most"][...], ref["total"][...], ref["sums"][...]
            if "sinks" in ref:
                sinks = ref["sinks"][...]
                new = jnp.maximum(most, sinks)
                share = jnp.exp(most - new)
                total, sums = total * share + jnp.exp(sinks - new), sums * share
            y = sums / jnp.where(total == 0, 1, total)
            if packed is not None:
                y = jnp.concatenate([y[g * own : (g + 1) * own] for g in range(group)], 1)
            ref["out"][...] = y.astype(given).reshape(ref["out"].shape)

    def _step(ref: Any, start: Any, limit: Any, base: Any) -> None:
        key, value = _values(ref["k"][...], dtype), None
        own_q = ref["q" if packed is None else "turned"][...].reshape(rows, dim)
        if made is None:
            found = dot(own_q, key) * scores.scale
        else:
            found, value = _by_made(ref, own_q, key)
            found = found * scores.scale
        if "k_scale" in ref:
            found = found * ref["k_scale"][...]
        if scores.softcap is not None:
            found = jnp.tanh(found / scores.softcap) * scores.softcap
        column = base + jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        place = start + ref["at"][...]
        visible = column < limit
        if seen.causal:
            visible = visible & (column <= place)
        if seen.window is not None:
            visible = visible & (column > place - seen.window)
            if not seen.causal:
                visible = visible & (column < place + seen.window)
        if seen.chunk is not None:  # of one token, or of rows that lie in one
            visible = visible & (column >= place - jax.lax.rem(place, jnp.int32(seen.chunk)))
        if "own_q" in ref:
            visible = visible & (ref["own_q"][...] == ref["own_k"][...])
        if "slopes" in ref:
            away = column - place
            if "place_q" in ref:
                away = ref["place_k"][...] - ref["place_q"][...]
            found = found + ref["slopes"][...] * away.astype(jnp.float32)
        if "bias" in ref:
            found = found + ref["bias"][...]
        found = jnp.where(visible, found, _NONE)
        most = ref["most"][...]
        new = jnp.maximum(most, found.max(-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(found - new), 0.0)
        share = jnp.exp(most - new)
        ref["most"][...] = new
        ref["total"][...] = ref["total"][...] * share + weights.sum(-1, keepdims=True)
        if value is None:
            value = key[:, :width] if "v" not in ref else _values(ref["v"][...], dtype)
        inside = base + jax.lax.broadcasted_iota(jnp.int32, (keys, 1), 0) < limit
        value = jnp.where(inside, value, jnp.zeros_like(value))
        if "v_scale" in ref:
            weights = weights * jnp.where(visible, ref["v_scale"][...], 0.0)
        ref["sums"][...] = ref["sums"][...] * share + _times(weights.astype(value.dtype), value)

    between, flops = rows * keys * 12, batch * heads * pairs * (dim + width)
    if made is not None:
        between += keys * (dim + width) * 6
        flops += batch * heads * blocks_of_rows * keys * steps * made.keys.shape[2] * (dim + width)
    if table is not None:
        places_of_keys = table.astype(jnp.int32)
    else:
        places_of_keys = jnp.arange(batch, dtype=jnp.int32) if slots is None else slots
    shape_of_all = (batch, tokens, heads * width) if packed else (*queries.shape[:3], width)
    out = jax.ShapeDtypeStruct(shape_of_all, given)
    scratch = [((rows, 1), jnp.float32), ((rows, 1), jnp.float32), ((rows, width), jnp.float32)]
    if packed is not None:
        scratch.append(((rows, dim), dtype))
        between += 4 * rows * dim * 4
    (y,) = run(
        body,
        "attention",
        (batch, kv_heads, blocks_of_rows, steps),
        inputs,
        [Block(out, shape_of(width), of_queries)],
        scratch=scratch,
        prefetch=[x.astype(jnp.int32) for x in (seen.starts, seen.limits, places_of_keys)],
        parallel=[True, True, True, False],
        between=between,
        flops=2 * flops,
        interpret=interpret,
    )
    if packed is not None:
        return y.reshape(batch, tokens, heads, width)
    if whole_tiles:
        return y.swapaxes(1, 2)[:, :tokens]
    y = y.reshape(batch, kv_heads, blocks_of_rows, rows, width)[:, :, :, : own * group]
    y = y.reshape(batch, kv_heads, blocks_of_rows, group, own, width).transpose(0, 2, 4, 1, 3, 5)
    return y.reshape(batch, padded, heads, width)[:, :tokens]


def takes_packed(tokens: int, heads: int, k: jax.Array, v: jax.Array, dtype: Any) -> bool:
    """True if `attend` takes packed queries: so many tokens, a row, of heads of keys [N, K, S, D].

    A program's fill its tiles.
    """
    own = _tokens_of(tokens, heads // k.shape[1], dtype, _ROWS)
    filled = own % sublanes(dtype) == 0 and tokens % own == 0
    return filled and all(x.shape[3] % LANES == 0 for x in (k, v))


def by_distance(tokens: int, heads: int, table: jax.Array, k: jax.Array, dtype: Any) -> bool:
    """True if so many tokens of `attend` have more blocks than a `table` has different ones.

    Keys k are [N, K, S, D].
    """
    own = _tokens_of(tokens, heads // k.shape[1], dtype, _ROWS)
    keys = min(k.shape[2], _keys_of(tokens, k))
    _, low, high = _distances(table, own, keys)
    return low + high + 1 < pl.cdiv(tokens, own) * pl.cdiv(k.shape[2], keys)


def _distances(table: jax.Array, own: int, keys: int) -> tuple[int, int, int]:
    """How blocks of `own` queries by `keys` keys differ by a table of distances.

    A block's first key lies a multiple of the first number behind its first query; so many blocks
    that lie before, and behind, have numbers of their own, and all farther ones those of the last.
    """
    unit, most = math.gcd(own, keys), table.shape[1] // 2
    return unit, pl.cdiv(most + keys, unit), pl.cdiv(most + own, unit)


def makes_heads(tokens: int, dim: int, width: int, rank: int, turning: int) -> bool:
    """True if keys and values of heads are better made than not, of `Made`'s sizes.

    Else each query is multiplied with all of a vector, and so are its weights: for few tokens that
    is less.
    """
    own = min(tokens, _MANY_ROWS)
    return own * (2 * rank + turning - dim - width) > rank * (dim - turning + width)


def _by_made(ref: Any, q: jax.Array, shared: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Products of a head's queries with its keys of vectors `shared`, and its values of these."""
    rank = ref["of_keys"].shape[-1]
    vectors, turning = shared[:, :rank], shared[:, rank:]
    own = q.shape[1] - turning.shape[1]
    key, value = (dot(vectors, ref[name][...]).astype(q.dtype) for name in ("of_keys", "of_values"))
    return dot(q[:, :own], key) + dot(q[:, own:], turning), value


def _tokens_of(tokens: int, group: int, dtype: Any, most: int) -> int:
    """Tokens whose queries a program has, in at most so many rows.

    They fill tiles of rows: of each head, or where these are too many of all that share a key.
    """
    if tokens == 1:
        return 1
    least = sublanes(dtype)
    if tokens < least or least * group > most:
        least //= math.gcd(least, group)
    return min(rounded_up(tokens, least), max(least, most // group // least * least))


def _keys_of(tokens: int, k: jax.Array) -> int:
    """Keys of a block."""
    count = _MANY_KEYS if tokens == 1 else _KEYS
    while count > LANES and count * k.shape[3] * k.dtype.itemsize > _BLOCK:
        count //= 2
    return count


def _div(a: Any, b: int) -> Any:
    """a // b of int32, not negative or a multiple of b, which Mosaic lowers for any chip."""
    return jax.lax.div(a, jnp.int32(b))


def _values(x: jax.Array, dtype: Any) -> jax.Array:
    """Keys or values in a dtype, of codes without their scale."""
    if x.dtype == jnp.uint8:
        return float8(x, "fp8_e4m3").astype(dtype)
    return x.astype(dtype)


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, K] times b [K, N] in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
