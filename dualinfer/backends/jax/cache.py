"""The JAX cache: each layer's arrays, a row a slot, donated to every step; its room."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.caches import CacheSpec, CacheView, Room, block_table, buffers, check_kinds
from ...system.memory import host_free_bytes
from .executables import jit_few
from .mesh import WHOLE, Place
from .ops.schemes import CACHE_CODES


class LayerCache(CacheView, Protocol):
    """One layer's arrays; its class is the kind. A named tuple, as its layout has them.

    Everything is traced, of one device's share: arrays have the KV heads of this device.
    """

    @classmethod
    def make(cls, spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> Self:
        """Finite arrays: a masked value still takes part in the product as 0 * value.

        `zero` is a scalar of the model's dtype.
        """
        ...

    def grown(self, slots: int, tokens: int) -> Self:
        """The same contents in arrays of this size, no smaller in either."""
        ...


class FullCache(NamedTuple):
    """Keys and values of every token, [N, K, S, D] each; of codes their scales, [N, K, S] each."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    kind = "full"

    @property
    def codes(self) -> str | None:
        """See `CacheView.codes`."""
        return codes_of(self.k)

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.k.shape[2]

    @classmethod
    def make(cls, spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> Self:
        """See `LayerCache.make`."""
        return cls(*zeros(spec, slots, tokens, zero))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        more = slots - len(self.k), 0, tokens - self.capacity
        return jax.tree.map(lambda x: padded(x, more), self)

    def write(self, slots: jax.Array, k: jax.Array, v: jax.Array) -> Self:
        """See `CacheView.write`; zeros lie behind. Slots beyond the cache are dropped."""

        def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
            rows = padded(new, (0, buffer.shape[2] - new.shape[1])).swapaxes(1, 2)
            return buffer.at[slots].set(rows, mode="drop")

        return changed(self, put, k, v)

    def append(self, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Self:
        """See `CacheView.append`."""
        slots = jnp.arange(k.shape[0])
        at = jnp.minimum(lengths, self.capacity - 1)
        return changed(self, lambda buffer, new: buffer.at[slots, :, at].set(new), k, v)

    def kept(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `CacheView.kept`."""
        return kept(self, k, v)

    def read(self) -> tuple[jax.Array, jax.Array]:
        """See `CacheView.read`."""
        if self.k_scale is None:
            return self.k, self.v
        return CACHE_CODES.values(self.k, self.k_scale), CACHE_CODES.values(self.v, self.v_scale)


class BlockCache(NamedTuple):
    """Keys and values in blocks of tokens, [blocks, K, size, D] each, by a table [N, blocks].

    Token s of slot n lies in block table[n, s // size] at place s % size. Of codes there are their
    scales, [blocks, K, size] each.
    """

    k: jax.Array
    v: jax.Array
    table: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    kind = "blocks"

    @property
    def codes(self) -> str | None:
        """See `CacheView.codes`."""
        return codes_of(self.k)

    @property
    def _size(self) -> int:
        return self.k.shape[2]

    @property
    def _pools(self) -> FullCache:
        return FullCache(self.k, self.v, self.k_scale, self.v_scale)

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.table.shape[1] * self._size

    @classmethod
    def make(cls, spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> Self:
        """See `LayerCache.make`."""
        k, v, table, *scales = zeros(spec, slots, tokens, zero)
        return cls(k, v, jnp.asarray(block_table(table.shape)), *scales)

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        old = self.table.shape
        table = block_table((slots, -(-tokens // self._size)), old)
        more = (table.size - self.table.size,)
        table = jnp.asarray(table).at[: old[0], : old[1]].set(self.table)
        k, v, *scales = jax.tree.map(lambda x: padded(x, more), self._pools)
        return type(self)(k, v, table, *scales)

    def write(self, slots: jax.Array, k: jax.Array, v: jax.Array) -> Self:
        """See `CacheView.write`; zeros lie behind. Slots beyond the cache are dropped."""
        blocks = self.table.at[slots].get(mode="fill", fill_value=len(self.k))

        def put(pool: jax.Array, new: jax.Array) -> jax.Array:
            rows = padded(new, (0, self.capacity - new.shape[1]))
            rows = rows.reshape(len(new), -1, self._size, *new.shape[2:]).swapaxes(2, 3)
            return pool.at[blocks].set(rows, mode="drop")

        return changed(self, put, k, v)

    def append(self, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Self:
        """See `CacheView.append`."""
        at = jnp.minimum(lengths, self.capacity - 1)
        blocks, at = self.table[jnp.arange(len(k)), at // self._size], at % self._size
        return changed(self, lambda pool, new: pool.at[blocks, :, at].set(new), k, v)

    def kept(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `CacheView.kept`."""
        return kept(self, k, v)

    def read(self) -> tuple[jax.Array, jax.Array]:
        """See `CacheView.read`."""

        def rows(pool: jax.Array) -> jax.Array:
            x = pool[self.table].swapaxes(1, 2)
            return x.reshape(*x.shape[:2], -1, *x.shape[4:])

        return jax.tree.map(rows, self._pools).read()


class CrossCache(NamedTuple):
    """What slots keep of an encoder's output: keys, values [N, K, S, D] and how many, int32 [N]."""

    k: jax.Array
    v: jax.Array
    lengths: jax.Array
    kind = "cross"
    codes = None

    @property
    def capacity(self) -> int:
        """See `CrossView.capacity`."""
        return self.k.shape[2]

    @classmethod
    def make(cls, spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> Self:
        """See `LayerCache.make`."""
        return cls(*zeros(spec, slots, tokens, zero))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        more = slots - len(self.k), 0, tokens - self.capacity
        k, v = (padded(x, more) for x in self[:2])
        return type(self)(k, v, padded(self.lengths, more[:1]))

    def keep(self, slots: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Self:
        """See `CrossView.keep`; zeros lie behind. Slots beyond the cache are dropped."""

        def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
            rows = padded(new, (0, buffer.shape[2] - new.shape[1])).swapaxes(1, 2)
            return buffer.at[slots].set(rows, mode="drop")

        counts = self.lengths.at[slots].set(lengths.astype(self.lengths.dtype), mode="drop")
        return type(self)(put(self.k, k), put(self.v, v), counts)

    def read(self) -> tuple[jax.Array, jax.Array]:
        """See `CrossView.read`."""
        return self.k, self.v


class LatentCache(NamedTuple):
    """What all heads share of every token, [N, S, rank + turning]; it keeps no codes."""

    shared: jax.Array
    kind, codes = "latent", None

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.shared.shape[1]

    @classmethod
    def make(cls, spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> Self:
        """See `LayerCache.make`."""
        return cls(*zeros(spec, slots, tokens, zero))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        return type(self)(padded(self.shared, (slots - len(self.shared), tokens - self.capacity)))

    def write(self, slots: jax.Array, k: jax.Array, v: jax.Array) -> Self:
        """See `CacheView.write`; zeros lie behind. Slots beyond the cache are dropped."""
        rows = padded(k[:, :, 0], (0, self.capacity - k.shape[1]))
        return type(self)(self.shared.at[slots].set(rows, mode="drop"))

    def append(self, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Self:
        """See `CacheView.append`."""
        at = jnp.minimum(lengths, self.capacity - 1)
        return type(self)(self.shared.at[jnp.arange(len(k)), at].set(k[:, 0]))

    def kept(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `CacheView.kept`."""
        return k, v

    def read(self) -> tuple[jax.Array, jax.Array]:
        """See `CacheView.read`."""
        keys = self.shared[:, None]
        return keys, keys


class StateCache(NamedTuple):
    """What a recurrence keeps: the last tokens that it convolves, [N, taps - 1, C].

    And, if it is a state space, its state, float32 [N, heads, head_dim, state].
    """

    past: jax.Array
    state: jax.Array | None = None
    kind, codes = "state", None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """See `StateView.arrays`."""
        return (self.past,) if self.state is None else (self.past, self.state)

    @classmethod
    def make(cls, spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> Self:
        """See `LayerCache.make`."""
        return cls(*zeros(spec, slots, tokens, zero))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        return type(self)(*(padded(x, (slots - len(x),)) for x in self.arrays))

    def keep(self, slots: jax.Array, *arrays: jax.Array) -> Self:
        """See `StateView.keep`. Slots beyond the cache are dropped."""
        pairs = zip(self.arrays, arrays, strict=True)
        return type(self)(*(held.at[slots].set(new, mode="drop") for held, new in pairs))

    def move(self, moves: jax.Array, *arrays: jax.Array) -> Self:
        """See `StateView.move`."""
        pairs = zip(self.arrays, arrays, strict=True)
        return type(self)(*(jnp.where(_over(moves, new), new, held) for held, new in pairs))


KINDS: dict[str, type[Any]] = {  # each a LayerCache, or like one
    "full": FullCache,
    "blocks": BlockCache,
    "cross": CrossCache,
    "latent": LatentCache,
    "state": StateCache,
}


def _over(moves: jax.Array, x: jax.Array) -> jax.Array:
    """`moves` [N], of as many axes as x [N, ...] has."""
    return moves.reshape(-1, *[1] * (x.ndim - 1))


def codes_of(k: jax.Array) -> str | None:
    """What keys are kept in where these are codes."""
    return {"uint8": "fp8_e4m3", "int8": "int8"}.get(k.dtype.name)


def changed(
    cache: Any, put: Callable[[jax.Array, jax.Array], jax.Array], k: jax.Array, v: jax.Array
) -> Any:
    """The cache with each array as `put` makes it of the array and of what new heads give it.

    Heads are [..., D]; arrays are keys, values and, of codes, their scales.
    """
    if cache.codes is None:
        return cache._replace(k=put(cache.k, k), v=put(cache.v, v))
    (k, k_scale), (v, v_scale) = (CACHE_CODES.encode(x, cache.codes) for x in (k, v))
    scales = {"k_scale": put(cache.k_scale, k_scale), "v_scale": put(cache.v_scale, v_scale)}
    return cache._replace(k=put(cache.k, k), v=put(cache.v, v), **scales)


def kept(cache: Any, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `CacheView.kept`."""
    codes = cache.codes
    return (k, v) if codes is None else (CACHE_CODES.kept(k, codes), CACHE_CODES.kept(v, codes))


def padded(x: jax.Array, more: Sequence[int]) -> jax.Array:
    """`x` with zeros behind, so many along each of the first axes."""
    return jnp.pad(x, [(0, by) for by in (*more, *[0] * (x.ndim - len(more)))])


def zeros(spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> list[jax.Array]:
    """The arrays of a layer's layout, all zero."""
    return [
        jnp.broadcast_to(zero.astype(b.dtype) if b.dtype else zero, b.shape)
        for b in buffers(spec, slots, tokens)
    ]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Every layer's arrays, for `slots` sequences of `tokens` tokens: exactly a bucket's.

    The cross caches, of `encoded` places each, are the last.
    """

    layers: Sequence[Any]
    slots: int = field(metadata={"static": True})
    tokens: int = field(metadata={"static": True})
    encoded: int = field(default=0, metadata={"static": True})

    @property
    def room(self) -> Room:
        """What it has room for."""
        return Room(self.slots, self.tokens, self.encoded)


def split(specs: Sequence[CacheSpec], place: Place) -> list[Any]:
    """How every layer's arrays are split over devices: over KV heads, where they have them."""
    check_kinds(specs, KINDS, "jax")
    return [
        KINDS[spec.kind](*(place.split(b.heads) for b in buffers(spec, 1, 1))) for spec in specs
    ]


def make_cache(specs: Sequence[CacheSpec], room: Room, dtype: Any, place: Place) -> Cache:
    """A new cache. `specs` are those of one device."""
    make = _make(tuple(specs), room, place)
    return Cache(make(place.put(np.zeros((), np.dtype(dtype)))), *room)


@jit_few
def _make(specs: tuple[CacheSpec, ...], room: Room, place: Place) -> Callable[..., list[Any]]:
    """All layers' arrays by one call: one after another they take the host milliseconds."""

    def make(zero: jax.Array) -> list[Any]:
        return [KINDS[s.kind].make(s, room.slots, room.of(s), zero) for s in specs]

    return place.spread(make, WHOLE, split(specs, place))


def grow(cache: Cache, specs: Sequence[CacheSpec], room: Room, place: Place) -> Cache:
    """The same contents in a cache of `room`, no smaller in anything."""
    pairs = zip(specs, cache.layers, strict=True)
    layers = [_grow(spec, room.slots, room.of(spec), place)(layer) for spec, layer in pairs]
    return Cache(layers, *room)


@jit_few
def _grow(
    spec: CacheSpec, slots: int, tokens: int, place: Place
) -> Callable[[LayerCache], LayerCache]:
    """One layer's arrays, grown."""

    def grown(layer: LayerCache) -> LayerCache:
        return layer.grown(slots, tokens)

    (lies,) = split([spec], place)
    return place.spread(grown, (lies,), lies)


def free_bytes(device: jax.Device) -> int | None:
    """Bytes that JAX may still allocate on `device`; None if that is unknown.

    On a GPU of its own share of the card (XLA_PYTHON_CLIENT_MEM_FRACTION).
    """
    if device.platform == "cpu":
        return host_free_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def least_free_bytes(place: Place) -> int | None:
    """Bytes that JAX may still allocate on each of this process's devices."""
    amounts = [free_bytes(device) for device in place.devices]
    free = None if None in amounts else min(n for n in amounts if n is not None)
    return free // len(amounts) if free and place.device.platform == "cpu" else free  # the host's
