"""A token's attention to keys and values in caches on NVIDIA's Hopper GPUs, by Mosaic GPU.

Several programs share the keys of a slot and head: each folds tiles of them that asynchronous
copies bring to a ring in shared memory, and what they found is joined behind. The queries of a
group are rows of one product by the tensor cores. Another kernel puts keys and values in caches.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_TILE = 64  # keys of a tile, rows of a product, and columns that one copy takes away
_ROWS = 8  # of a tile of shared memory as copies and products have it, 128 bytes each
_WIDEST = 256  # elements of a key or a value: what is summed is in registers
_RING = 64 << 10  # bytes of keys and values on their way to a program, of two tiles or more
_NARROW = 128  # elements, up to which a multiprocessor's shared memory has two programs, else one
_LOG2E = math.log2(math.e)


class Read(NamedTuple):
    """Which keys a token reads: those of its `window`, of its own `chunk`, or all before it."""

    window: int | None = None
    chunk: int | None = None


_EVERY = Read()


def serves(k: Any, v: Any, heads: int, dtype: Any) -> bool:
    """True if `attend` takes so many heads of this dtype to k, v [M, K, S, D]; shapes will do."""
    known = jnp.dtype(dtype).itemsize == 2 and k.dtype == v.dtype == jnp.dtype(dtype)
    fits = all(x.shape[3] % _TILE == 0 and x.shape[3] <= _WIDEST for x in (k, v))
    return known and fits and k.shape[2] % _TILE == 0 and heads <= _TILE * k.shape[1]


def splits_of(pairs: int, tokens: int, programs: int) -> int:
    """Those of so many programs that share the keys of each pair of slot and head."""
    return max(1, min(-(-programs // pairs), -(-tokens // _TILE)))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    read: Read = _EVERY,
    table: jax.Array | None = None,
    reach: int | None = None,
    sms: int = 132,
    interpret: Any = None,
) -> jax.Array:
    """Attention of one query a slot, q [N, H, D], to its cached keys: [N, H, E] in q's dtype.

    Keys k [M, K, S, D] and values v [M, K, S, E] are those of slots, or blocks of S tokens that
    int32 `table` [N, blocks] names. int32 `lengths` [N] count the keys, the query's own the last;
    no slot has more than `reach`. Float32 `sinks` [H] are as in `KeyScoring`.
    """
    count, heads, dim = q.shape
    kv_heads, size, width = *k.shape[1:3], v.shape[3]
    capacity = size * (1 if table is None else table.shape[1])
    group = heads // kv_heads
    rows = -(-group // _ROWS) * _ROWS
    programs = sms * (2 if max(dim, width) <= _NARROW else 1)
    splits = splits_of(count * kv_heads, min(reach or capacity, capacity), programs)
    grouped = q.reshape(count, kv_heads, group, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    inputs = [grouped, k, v, lengths.astype(jnp.int32)]
    if table is not None:
        inputs.append(jnp.clip(table, 0, len(k) - 1).astype(jnp.int32).reshape(-1))
    shape = count, kv_heads, splits, rows
    slots = max(2, _RING // (_TILE * (dim + width) * q.dtype.itemsize))
    lines = _lines(q.dtype)

    def token_attention(*refs: Any, **memory: Any) -> None:
        score = partial(_score, scale=scale, softcap=softcap)
        how = {"capacity": capacity, "score": score, "read": read, "interpret": interpret}
        _fold(*refs, **memory, **how)

    y, weight = plgpu.kernel(
        token_attention,
        out_type=[
            jax.ShapeDtypeStruct((*shape, width), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        scratch_types={
            "queries": plgpu.SMEM((_TILE, dim), q.dtype, transforms=lines),
            "keys": plgpu.SMEM((slots, _TILE, dim), q.dtype, transforms=lines),
            "values": plgpu.SMEM((slots, _TILE, width), q.dtype, transforms=lines),
            "part": plgpu.SMEM((_TILE, _TILE), jnp.float32, transforms=_lines(jnp.float32)),
            "found": plgpu.SMEM((_TILE,), jnp.float32),
            "asked": plgpu.Barrier(),
            "with_keys": plgpu.Barrier(num_barriers=slots),
            "with_values": plgpu.Barrier(num_barriers=slots),
        },
        grid=shape[:3],
        grid_names=("slot", "head", "split"),
        interpret=interpret,
    )(*inputs)
    y = _joined(y[:, :, :, :group], weight[:, :, :, :group], sinks)
    return y.reshape(count, heads, width).astype(q.dtype)


def put(
    k: jax.Array,
    v: jax.Array,
    new: tuple[jax.Array, jax.Array],
    rows: jax.Array,
    places: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Arrays k and v [M, K, S, D] of a cache with `new` [N, K, D] each, in their memory.

    new[n] goes to place int32 places[n] of row int32 rows[n]; no two n have one row that is read.
    For what `jax.jit` traces alone.
    """

    def body(*refs: Any) -> None:
        types = [plgpu.SMEM(x.shape[1:], x.dtype) for x in given]
        pl.run_scoped(partial(moved, *refs), *types, plgpu.Barrier(num_arrivals=len(given)))

    def moved(*refs: Any) -> None:
        """A slot's key and value, by shared memory."""
        new, (rows, places), held = refs[:2], refs[2:4], refs[4:6]
        *between, there = refs[6:]
        n = lax.axis_index("slot")
        for source, own in zip(new, between, strict=True):
            plgpu.copy_gmem_to_smem(source.at[n], own, there)
        plgpu.barrier_wait(there)
        for own, to in zip(between, held, strict=True):
            plgpu.copy_smem_to_gmem(own, to.at[rows[n], :, places[n]])
        plgpu.wait_smem_to_gmem(0)

    given = [x.astype(k.dtype) for x in new]
    held = [jax.new_ref(x, memory_space=plgpu.GMEM) for x in (k, v)]
    mesh = plgpu.Mesh(grid=(len(rows),), grid_names=("slot",))
    how: dict[str, Any] = {"compiler_params": plgpu.CompilerParams(), "interpret": interpret}
    kernel: Any = pl.kernel  # not plgpu.kernel, through which no reference passes
    kernel(body, mesh=mesh, name="put", **how)(
        *given, rows.astype(jnp.int32), places.astype(jnp.int32), *held
    )
    return jax.freeze(held[0]), jax.freeze(held[1])


def _lines(dtype: Any) -> tuple[Any, ...]:
    """How products and copies want rows of a dtype in shared memory."""
    line = 128
    tiling = plgpu.TilingTransform((_ROWS, line // jnp.dtype(dtype).itemsize))
    return tiling, plgpu.SwizzleTransform(line)


def _score(s: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Scores of products of queries and keys, times log2(e)."""
    if softcap is None:
        return s * (scale * _LOG2E)
    return jnp.tanh(s * (scale / softcap)) * (softcap * _LOG2E)


def _laid(x: jax.Array, layout: Any, interpret: Any) -> jax.Array:
    """x so in registers; the interpreter knows no layouts."""
    return x if interpret is not None else plgpu.layout_cast(x, layout)


def _product(a: Any, b: Any, columns: int, turned: bool = False, *, interpret: Any) -> jax.Array:
    """float32 a b, or a b^T, of 64 rows.

    The interpreter's wgmma takes no b^T and no a in registers: there it is XLA's product.
    """
    if interpret is not None:
        dims = ((1,), (1 if turned else 0,)), ((), ())
        a = a if isinstance(a, jax.Array) else a[...]
        return lax.dot_general(a, b[...], dims, preferred_element_type=jnp.float32)

    def multiply(total: Any) -> jax.Array:
        plgpu.wgmma(total, a, b.transpose((1, 0)) if turned else b)
        return total[...]

    sums: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, sums((_TILE, columns), jnp.float32))


def _fold(
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    *rest: Any,
    queries: Any,
    keys: Any,
    values: Any,
    part: Any,
    found: Any,
    asked: Any,
    with_keys: Any,
    with_values: Any,
    capacity: int,
    score: Callable[[jax.Array], jax.Array],
    read: Read,
    interpret: Any,
) -> None:
    """The mean of a program's share of a slot's values, and the logarithm of what it weighs."""
    *table, out, weight = rest
    n, head, split = (lax.axis_index(name) for name in ("slot", "head", "split"))
    splits, rows, width = out.shape[2:]
    size, slots, dtype = k.shape[2], keys.shape[0], queries.dtype
    product = partial(_product, interpret=interpret)
    length = lengths[n]
    end, first = jnp.minimum(length, capacity), jnp.int32(0)
    if read.window is not None:
        first = jnp.maximum(length - read.window, 0)
    if read.chunk is not None:
        first = jnp.maximum(first, lax.div(length - 1, jnp.int32(read.chunk)) * read.chunk)
    low, high = lax.div(first, jnp.int32(_TILE)), lax.div(end + (_TILE - 1), jnp.int32(_TILE))
    share = lax.div(high - low + (splits - 1), jnp.int32(splits))
    low = low + split * share
    count = jnp.minimum(high - low, share)  # none where that is negative

    def fetch(i: Any, slot: Any) -> None:
        row, place = n, (low + i) * _TILE
        if table:
            block = lax.div(place, jnp.int32(size))
            row, place = table[0][n * (capacity // size) + block], place - block * size
        at = row, head, pl.ds(place, _TILE)
        plgpu.copy_gmem_to_smem(k.at[at], keys.at[slot], with_keys.at[slot])
        plgpu.copy_gmem_to_smem(v.at[at], values.at[slot], with_values.at[slot])

    def seen(at: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
        place = lax.broadcasted_iota(jnp.int32, shape, axis)
        place = at + _laid(place, plgpu.Layout.WGMMA, interpret)
        return (place >= first) & (place < end)

    def turn(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        y, most, total = carry
        slot, at = lax.rem(i, jnp.int32(slots)), (low + i) * _TILE
        plgpu.barrier_wait(with_keys.at[slot])
        s = score(product(queries, keys.at[slot], _TILE, turned=True))
        s = jnp.where(seen(at, s.shape, 1), s, -jnp.inf)
        peak = jnp.maximum(most, s.max(axis=1))
        fade = jnp.exp2(most - peak)
        p = jnp.exp2(s - lax.broadcast_in_dim(peak, s.shape, [0]))
        total = total * fade + p.sum(axis=1)
        plgpu.barrier_wait(with_values.at[slot])

        @pl.when((at < first) | (at + _TILE > end))
        def _() -> None:
            """Zeros, where others may have left what times a weight of 0 is none."""
            own = values.at[slot]
            own[...] = jnp.where(seen(at, own.shape, 0), own[...], jnp.zeros((), dtype))
            plgpu.commit_smem()

        y = y * lax.broadcast_in_dim(fade, y.shape, [0])
        y = y + product(p.astype(dtype), values.at[slot], width)
        # Before it asks, every lane waits for the others, which have read the slot, too.
        pl.when(i + slots < count)(lambda: fetch(i + slots, slot))
        return y, peak, total

    @pl.when(count > 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q.at[n, head], queries.at[pl.ds(0, rows)], asked)

    for slot in range(slots):
        pl.when(slot < count)(partial(fetch, slot, slot))
    pl.when(count > 0)(lambda: plgpu.barrier_wait(asked))
    of_rows = plgpu.Layout.WGMMA.reduce(1)
    start = (
        _laid(jnp.zeros((_TILE, width), jnp.float32), plgpu.Layout.WGMMA, interpret),
        _laid(jnp.full((_TILE,), -jnp.inf, jnp.float32), of_rows, interpret),
        _laid(jnp.zeros((_TILE,), jnp.float32), of_rows, interpret),
    )
    y, most, total = lax.fori_loop(0, jnp.maximum(count, 0), turn, start)
    found[...] = most + jnp.log(total) * _LOG2E
    y = y * lax.broadcast_in_dim(jnp.where(total > 0, 1 / total, 0.0), y.shape, [0])
    for at in range(0, width, _TILE):
        part[...] = y[:, at : at + _TILE]
        plgpu.commit_smem()
        own = out.at[n, head, split, :, pl.ds(at, _TILE)]
        plgpu.copy_smem_to_gmem(part.at[pl.ds(0, rows)], own)
        plgpu.wait_smem_to_gmem(0)
    plgpu.copy_smem_to_gmem(found.at[pl.ds(0, rows)], weight.at[n, head, split])
    plgpu.wait_smem_to_gmem(0)


def _joined(y: jax.Array, weight: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """The mean [N, K, G, E] of means [N, K, splits, G, E], by logarithms to base 2 of weights."""
    most, more = weight.max(axis=2, keepdims=True), jnp.zeros(())
    if sinks is not None:
        sink = (sinks.astype(jnp.float32) * _LOG2E).reshape(1, y.shape[1], 1, -1)
        most = jnp.maximum(most, sink)
        more = jnp.exp2(sink - most)[:, :, 0]
    factor = jnp.exp2(weight - most)
    return (y * factor[..., None]).sum(axis=2) / (factor.sum(axis=2) + more)[..., None]
