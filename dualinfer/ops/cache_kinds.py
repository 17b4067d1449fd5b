"""The work of each kind of cache on its arrays, once over Maths; backends ask `kinds_over`.

A class is a named tuple of its layout's arrays, of which some may be views: the first slots, with
room for fewer tokens. Where arrays are memory, what is written changes them and stays in its place,
and nothing waits for the device, so that steps can be captured. Where they are values, all is
traced, of one device's share, and slots beyond the cache are dropped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from . import cache_codes, caches
from .caches import CacheView
from .maths import Maths

Array: TypeAlias = Any
_NONE: Any = None  # `kinds_over` makes classes that have one


class LayerCache(CacheView, Protocol):
    """One layer's cache as its owner takes it; a state and a cross cache are like one."""

    def grown(self, slots: int, tokens: int) -> Self:
        """The same contents in new arrays of this size, no smaller in either."""
        ...

    def taken(self, slot: Array | int, tokens: int) -> Self:
        """A cache of one slot, with the first `tokens` places of `slot`: views where there are."""
        ...

    def given(self, slot: Array | int, own: Self) -> Self:
        """The cache with what another of one slot has in the first places of `slot`."""
        ...


class FullCache(NamedTuple):
    """Keys and values of every token, [N, K, S, D] each; of codes their scales, [N, K, S] each."""

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None
    kind, maths = "full", _NONE

    @property
    def codes(self) -> str | None:
        """See `CacheView.codes`."""
        return codes_of(self.k)

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.k.shape[2]

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        more = slots - len(self.k), 0, tokens - self.capacity
        return over(self, lambda x: self.maths.grow(x, more))

    def view(self, slots: int | None, tokens: int) -> Self:
        """See `CacheView.view`."""
        return over(self, lambda x: x[:slots, :, :tokens])

    def write(self, slots: Array, k: Array, v: Array) -> Self:
        """See `CacheView.write`; zeros lie behind."""

        def put(x: Array, new: Array) -> Array:
            return self.maths.put_rows(x, slots, new.swapaxes(1, 2), 2)

        return changed(self, put, k, v)

    def extend(self, slots: Array, starts: Array, lengths: Array, k: Array, v: Array) -> Self:
        """See `CacheView.extend`."""
        m, (rows, at, there) = self.maths, places_of(self, slots, starts, lengths, k)
        return changed(
            self, lambda x, new: m.put_some(x, (rows, slice(None), at), new, there), k, v
        )

    def append(self, k: Array, v: Array, lengths: Array) -> Self:
        """See `CacheView.append`."""
        m, at = self.maths, lengths.clip(max=self.capacity - 1)
        places = m.arange(len(k), k), slice(None), at
        return changed(self, lambda x, new: m.put(x, places, new), k, v)

    def kept(self, k: Array, v: Array) -> tuple[Array, Array]:
        """See `CacheView.kept`."""
        return kept(self, k, v)

    def taken(self, slot: Array | int, tokens: int) -> Self:
        """See `LayerCache.taken`."""
        return over(self, lambda x: x[slot][:, :tokens][None])

    def given(self, slot: Array | int, own: Self) -> Self:
        """See `LayerCache.given`."""
        places = slice(None), slice(own.capacity)
        return with_of(self, own, lambda x, y: self.maths.put(x, (slot, *places), y[0]))

    def read(self, slots: Array | None = None) -> tuple[Array, Array]:
        """See `CacheView.read`; no copy of every slot but of codes."""
        return values_of(self, self if slots is None else over(self, lambda x: x[slots]))


class BlockCache(NamedTuple):
    """Keys and values in blocks of tokens, [blocks, K, size, D] each, by a table [N, blocks].

    Token s of slot n lies in block table[n, s // size] at place s % size. Of codes there are their
    scales, [blocks, K, size] each.
    """

    k: Array
    v: Array
    table: Array
    k_scale: Array | None = None
    v_scale: Array | None = None
    kind, maths = "blocks", _NONE

    @property
    def codes(self) -> str | None:
        """See `CacheView.codes`."""
        return codes_of(self.k)

    @property
    def size(self) -> int:
        """The number of tokens of a block."""
        return self.k.shape[2]

    @property
    def total(self) -> int:
        """The number of blocks, of all slots."""
        return len(self.k)

    @property
    def _pools(self) -> FullCache:
        return FullCache(self.k, self.v, self.k_scale, self.v_scale)

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.table.shape[1] * self.size

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        table, more = grown_table(self, slots, tokens)
        k, v, *scales = over(self._pools, lambda x: self.maths.grow(x, more))
        return type(self)(k, v, table, *scales)

    def view(self, slots: int | None, tokens: int) -> Self:
        """See `CacheView.view`."""
        return self._replace(table=self.table[:slots, : -(-tokens // self.size)])

    def write(self, slots: Array, k: Array, v: Array) -> Self:
        """See `CacheView.write`; zeros lie behind in the last block."""
        blocks = blocks_of(self, slots, k)

        def put(pool: Array, new: Array) -> Array:
            return self.maths.put(pool, blocks, in_blocks(self, new).swapaxes(2, 3))

        return changed(self, put, k, v)

    def extend(self, slots: Array, starts: Array, lengths: Array, k: Array, v: Array) -> Self:
        """See `CacheView.extend`."""
        m, (blocks, at, there) = self.maths, block_places(self, slots, starts, lengths, k)
        where = blocks, slice(None), at
        return changed(self, lambda pool, new: m.put_some(pool, where, new, there), k, v)

    def append(self, k: Array, v: Array, lengths: Array) -> Self:
        """See `CacheView.append`."""
        m, (blocks, at) = self.maths, block_ends(self, lengths, k)
        places = blocks, slice(None), at
        return changed(self, lambda pool, new: m.put(pool, places, new), k, v)

    def kept(self, k: Array, v: Array) -> tuple[Array, Array]:
        """See `CacheView.kept`."""
        return kept(self, k, v)

    def taken(self, slot: Array | int, tokens: int) -> Self:
        """See `LayerCache.taken`; whole blocks."""
        there = self.table[slot][: -(-tokens // self.size)]
        pools = over(self._pools, lambda pool: pool[there])
        return self._replace(**pools._asdict(), table=self.table[:1, : len(there)])

    def given(self, slot: Array | int, own: Self) -> Self:
        """See `LayerCache.given`."""
        here = self.table[slot][: len(own.k)]
        pools = with_of(self._pools, own._pools, lambda x, y: self.maths.put(x, here, y))
        return self._replace(**pools._asdict())

    def read(self, slots: Array | None = None) -> tuple[Array, Array]:
        """See `CacheView.read`; a copy."""
        table = self.table if slots is None else self.table[slots]

        def rows(pool: Array) -> Array:
            x = pool[table].swapaxes(1, 2)
            return x.reshape(*x.shape[:2], -1, *x.shape[4:])

        return values_of(self, over(self._pools, rows))


class CrossCache(NamedTuple):
    """An encoder's output as slots keep it: keys, values [N, K, S, D] and how many, int32 [N]."""

    k: Array
    v: Array
    lengths: Array
    kind, codes, maths = "cross", None, _NONE

    @property
    def capacity(self) -> int:
        """See `CrossView.capacity`."""
        return self.k.shape[2]

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        m, more = self.maths, (slots - len(self.k), 0, tokens - self.capacity)
        k, v = (m.grow(x, more) for x in self[:2])
        return type(self)(k, v, m.grow(self.lengths, more[:1]))

    def view(self, slots: int | None, tokens: int) -> Self:
        """See `CacheView.view`."""
        k, v = (x[:slots, :, :tokens] for x in self[:2])
        return type(self)(k, v, self.lengths[:slots])

    def keep(self, slots: Array, k: Array, v: Array, lengths: Array) -> Self:
        """See `CrossView.keep`; zeros lie behind."""
        m = self.maths
        pairs = (self.k, k), (self.v, v)
        k, v = (m.put_rows(x, slots, fitted(m, new, x).swapaxes(1, 2), 2) for x, new in pairs)
        counts = m.cast(lengths, self.lengths.dtype)
        return type(self)(k, v, m.put(self.lengths, slots, counts))

    def read(self) -> tuple[Array, Array]:
        """See `CrossView.read`; no copy."""
        return self.k, self.v


class LatentCache(NamedTuple):
    """The vectors that all heads share of every token, [N, S, rank + turning], never in codes."""

    shared: Array
    kind, codes, maths = "latent", None, _NONE

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.shared.shape[1]

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        more = slots - len(self.shared), tokens - self.capacity
        return type(self)(self.maths.grow(self.shared, more))

    def view(self, slots: int | None, tokens: int) -> Self:
        """See `CacheView.view`."""
        return type(self)(self.shared[:slots, :tokens])

    def write(self, slots: Array, k: Array, v: Array) -> Self:
        """See `CacheView.write`; zeros lie behind."""
        rows = fitted(self.maths, k[:, :, 0], self.shared)
        return type(self)(self.maths.put_rows(self.shared, slots, rows, 1))

    def extend(self, slots: Array, starts: Array, lengths: Array, k: Array, v: Array) -> Self:
        """See `CacheView.extend`."""
        m, (rows, at, there) = self.maths, places_of(self, slots, starts, lengths, k)
        new = fitted(m, k[:, :, 0], self.shared)
        return type(self)(m.put_some(self.shared, (rows, at), new, there))

    def append(self, k: Array, v: Array, lengths: Array) -> Self:
        """See `CacheView.append`."""
        m, at = self.maths, lengths.clip(max=self.capacity - 1)
        new = fitted(m, k[:, 0], self.shared)
        return type(self)(m.put(self.shared, (m.arange(len(k), k), at), new))

    def kept(self, k: Array, v: Array) -> tuple[Array, Array]:
        """See `CacheView.kept`."""
        return k, v

    def taken(self, slot: Array | int, tokens: int) -> Self:
        """See `LayerCache.taken`."""
        return type(self)(self.shared[slot][:tokens][None])

    def given(self, slot: Array | int, own: Self) -> Self:
        """See `LayerCache.given`."""
        places = slot, slice(own.capacity)
        return type(self)(self.maths.put(self.shared, places, own.shared[0]))

    def read(self, slots: Array | None = None) -> tuple[Array, Array]:
        """See `CacheView.read`; no copy of every slot."""
        keys = (self.shared if slots is None else self.shared[slots])[:, None]
        return keys, keys


class LatentBlockCache(NamedTuple):
    """The vectors that all heads share of every token, in blocks [blocks, size, rank + turning].

    By a table [N, blocks], as that of a `BlockCache`; never in codes.
    """

    shared: Array
    table: Array
    kind, codes, maths = "latent_blocks", None, _NONE

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.table.shape[1] * self.size

    @property
    def size(self) -> int:
        """The number of tokens of a block."""
        return self.shared.shape[1]

    @property
    def total(self) -> int:
        """The number of blocks, of all slots."""
        return len(self.shared)

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        table, more = grown_table(self, slots, tokens)
        return type(self)(self.maths.grow(self.shared, more), table)

    def view(self, slots: int | None, tokens: int) -> Self:
        """See `CacheView.view`."""
        return self._replace(table=self.table[:slots, : -(-tokens // self.size)])

    def write(self, slots: Array, k: Array, v: Array) -> Self:
        """See `CacheView.write`; zeros lie behind in the last block."""
        rows = in_blocks(self, fitted(self.maths, k[:, :, 0], self.shared))
        return self._replace(shared=self.maths.put(self.shared, blocks_of(self, slots, k), rows))

    def extend(self, slots: Array, starts: Array, lengths: Array, k: Array, v: Array) -> Self:
        """See `CacheView.extend`."""
        *where, there = block_places(self, slots, starts, lengths, k)
        new = fitted(self.maths, k[:, :, 0], self.shared)
        return self._replace(shared=self.maths.put_some(self.shared, tuple(where), new, there))

    def append(self, k: Array, v: Array, lengths: Array) -> Self:
        """See `CacheView.append`."""
        where = block_ends(self, lengths, k)
        new = fitted(self.maths, k[:, 0], self.shared)
        return self._replace(shared=self.maths.put(self.shared, where, new))

    def kept(self, k: Array, v: Array) -> tuple[Array, Array]:
        """See `CacheView.kept`."""
        return k, v

    def taken(self, slot: Array | int, tokens: int) -> Self:
        """See `LayerCache.taken`; whole blocks."""
        there = self.table[slot][: -(-tokens // self.size)]
        return type(self)(self.shared[there], self.table[:1, : len(there)])

    def given(self, slot: Array | int, own: Self) -> Self:
        """See `LayerCache.given`."""
        here = self.table[slot][: len(own.shared)]
        return self._replace(shared=self.maths.put(self.shared, here, own.shared))

    def read(self, slots: Array | None = None) -> tuple[Array, Array]:
        """See `CacheView.read`; a copy."""
        x = self.shared[self.table if slots is None else self.table[slots]]
        keys = x.reshape(len(x), 1, -1, x.shape[-1])
        return keys, keys


class StateCache(NamedTuple):
    """The states of a recurrence: as many arrays as its `layout` has, a row a slot."""

    first: Array
    second: Array | None = None
    third: Array | None = None
    fourth: Array | None = None
    kind, codes, maths = "state", None, _NONE

    @property
    def arrays(self) -> tuple[Array, ...]:
        """See `StateView.arrays`."""
        return tuple(array for array in self if array is not None)

    def of(self, *arrays: Array) -> Self:
        """See `StateView.of`."""
        return type(self)(*arrays)

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        return over(self, lambda x: self.maths.grow(x, (slots - len(x),)))

    def view(self, slots: int | None, tokens: int) -> Self:
        """See `CacheView.view`."""
        return over(self, lambda x: x[:slots])

    def taken(self, slot: Array | int, tokens: int) -> Self:
        """See `LayerCache.taken`; the state, whatever the number of tokens."""
        return over(self, lambda x: x[slot][None])

    def given(self, slot: Array | int, own: Self) -> Self:
        """See `LayerCache.given`."""
        return with_of(self, own, lambda x, y: self.maths.put(x, slot, y[0]))

    def keep(self, slots: Array, *arrays: Array) -> Self:
        """See `StateView.keep`."""
        pairs = zip(self.arrays, arrays, strict=True)
        cast = self.maths.cast
        return type(self)(*(self.maths.put(a, slots, cast(b, a.dtype)) for a, b in pairs))

    def move(self, moves: Array, *arrays: Array) -> Self:
        """See `StateView.move`."""
        m = self.maths

        def moved(held: Array, new: Array) -> Array:
            own = moves.reshape(-1, *[1] * (held.ndim - 1))
            first = ... if len(moves) == len(held) else slice(len(moves))
            return m.put(held, first, m.where(own, m.cast(new, held.dtype), held[first]))

        return type(self)(*map(moved, self.arrays, arrays))


KINDS = (FullCache, BlockCache, CrossCache, LatentCache, LatentBlockCache, StateCache)


def kinds_over(maths: Maths) -> dict[str, type[Any]]:
    """Each kind's class over a framework's Maths; they are LayerCaches, or like one."""
    return {own.kind: type(own.__name__, (own,), {"maths": maths}) for own in KINDS}


def places_of(
    cache: Any, slots: Array, starts: Array, lengths: Array, new: Array
) -> tuple[Array, Array, Array]:
    """Slots, places and which tokens go there, [B, T] each, of rows `new` [B, T, ...]."""
    m, shape = cache.maths, new.shape[:2]
    tokens = m.arange(shape[1], new)[None]
    at = starts[:, None] + tokens
    there = (tokens < lengths[:, None]) & (at < cache.capacity)
    return m.broadcast(slots[:, None], shape), at, there


def blocks_of(cache: Any, slots: Array, new: Array) -> Array:
    """The blocks [B, some] that have rows `new` [B, T, ...] of slots [B] from their start."""
    rows = cache.maths.rows_or(cache.table, slots, cache.total)
    return rows[:, : -(-new.shape[1] // cache.size)]


def in_blocks(cache: Any, new: Array) -> Array:
    """Rows [B, T, ...] as blocks [B, some, size, ...], with zeros behind."""
    more = -new.shape[1] % cache.size
    rows = cache.maths.grow(new, (0, more))
    return rows.reshape(len(new), -1, cache.size, *new.shape[2:])


def block_places(
    cache: Any, slots: Array, starts: Array, lengths: Array, new: Array
) -> tuple[Array, Array, Array]:
    """Blocks, places in them and which tokens go there, [B, T] each, of rows `new` [B, T, ...]."""
    m, (_, at, there) = cache.maths, places_of(cache, slots, starts, lengths, new)
    places = at.clip(max=cache.capacity - 1)
    blocks = m.along(m.rows_or(cache.table, slots, cache.total), places // cache.size)
    return blocks, places % cache.size, there & (blocks >= 0)


def block_ends(cache: Any, lengths: Array, new: Array) -> tuple[Array, Array]:
    """Blocks, and places in them, [N] each, of `new` tokens [N, ...] at position lengths[n]."""
    m, at = cache.maths, lengths.clip(max=cache.capacity - 1)
    return cache.table[m.arange(len(new), new), at // cache.size], at % cache.size


def grown_table(cache: Any, slots: int, tokens: int) -> tuple[Array, tuple[int]]:
    """The table for more slots and tokens, and how many more blocks it names."""
    m, (held, blocks) = cache.maths, cache.table.shape
    table = caches.block_table((slots, -(-tokens // cache.size)), (held, blocks))
    new = m.put(m.of_numpy(table, cache.table), (slice(held), slice(blocks)), cache.table)
    return new, (table.size - held * blocks,)


def codes_of(k: Array) -> str | None:
    """The name of the codes that keys are kept in; None where they are no codes."""
    names = {dtype: codes for codes, dtype in caches.CODE_DTYPES.items()}
    return names.get(str(k.dtype).removeprefix("torch."))


def over(cache: Any, change: Callable[[Array], Array]) -> Any:
    """The cache with each of its arrays changed."""
    return type(cache)(*(x if x is None else change(x) for x in cache))


def with_of(cache: Any, own: Any, change: Callable[[Array, Array], Array]) -> Any:
    """The cache with each of its arrays changed by the one of another."""
    pairs = zip(cache, own, strict=True)
    return type(cache)(*(x if x is None else change(x, y) for x, y in pairs))


def changed(cache: Any, put: Callable[[Array, Array], Array], k: Array, v: Array) -> Any:
    """The cache with each array as `put` makes it of the array and of what new heads give it.

    Heads are [..., D]; arrays are keys, values and, of codes, their scales.
    """
    k, v = fitted(cache.maths, k, cache.k), fitted(cache.maths, v, cache.v)
    if cache.codes is None:
        return cache._replace(k=put(cache.k, k), v=put(cache.v, v))
    (k, k_scale), (v, v_scale) = (cache_codes.encode(cache.maths, x, cache.codes) for x in (k, v))
    scales = {"k_scale": put(cache.k_scale, k_scale), "v_scale": put(cache.v_scale, v_scale)}
    return cache._replace(k=put(cache.k, k), v=put(cache.v, v), **scales)


def fitted(m: Maths, new: Array, held: Array) -> Array:
    """New rows [..., D] as wide as those that are held, [..., D] or wider, with zeros behind."""
    more = held.shape[-1] - new.shape[-1]
    return m.pad(new, -1, 0, more) if more else new


def kept(cache: Any, k: Array, v: Array) -> tuple[Array, Array]:
    """See `CacheView.kept`."""
    if cache.codes is None:
        return k, v
    k, v = (cache_codes.kept(cache.maths, x, cache.codes) for x in (k, v))
    return k, v


def values_of(cache: Any, held: Any) -> tuple[Array, Array]:
    """Keys and values of the arrays `held`, which may be codes."""
    if held.k_scale is None:
        return held.k, held.v
    m = cache.maths
    pairs = (held.k, held.k_scale), (held.v, held.v_scale)
    k, v = (cache_codes.values(m, data, scale) for data, scale in pairs)
    return k, v
