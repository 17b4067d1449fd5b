"""The JAX cache: each layer's arrays, a row a slot, donated to every step; its room."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from ...system.memory import host_free_bytes
from ..caches import CacheSpec, CacheView, block_table, buffers, check_kinds
from .executables import jit_few
from .mesh import WHOLE, Place


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
    """Keys and values of every token, [N, K, S, D] each."""

    k: jax.Array
    v: jax.Array
    kind = "full"

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
        more = (0, slots - len(self.k)), (0, 0), (0, tokens - self.capacity), (0, 0)
        return type(self)(jnp.pad(self.k, more), jnp.pad(self.v, more))

    def write(self, slots: jax.Array, k: jax.Array, v: jax.Array) -> Self:
        """See `CacheView.write`; zeros lie behind. Slots beyond the cache are dropped."""

        def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
            rows = jnp.pad(
                new.swapaxes(1, 2), ((0, 0), (0, 0), (0, buffer.shape[2] - new.shape[1]), (0, 0))
            )
            return buffer.at[slots].set(rows, mode="drop")

        return type(self)(put(self.k, k), put(self.v, v))

    def append(self, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Self:
        """See `CacheView.append`."""
        slots = jnp.arange(k.shape[0])
        at = jnp.minimum(lengths, self.capacity - 1)
        return type(self)(self.k.at[slots, :, at].set(k), self.v.at[slots, :, at].set(v))

    def read(self) -> tuple[jax.Array, jax.Array]:
        """See `CacheView.read`."""
        return self.k, self.v


class BlockCache(NamedTuple):
    """Keys and values in blocks of tokens, [blocks, K, size, D] each, by a table [N, blocks].

    Token s of slot n lies in block table[n, s // size] at place s % size.
    """

    k: jax.Array
    v: jax.Array
    table: jax.Array
    kind = "blocks"

    @property
    def _size(self) -> int:
        return self.k.shape[2]

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.table.shape[1] * self._size

    @classmethod
    def make(cls, spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> Self:
        """See `LayerCache.make`."""
        k, v, table = zeros(spec, slots, tokens, zero)
        return cls(k, v, jnp.asarray(block_table(table.shape)))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        old = self.table.shape
        table = block_table((slots, -(-tokens // self._size)), old)
        more = (0, table.size - self.table.size), (0, 0), (0, 0), (0, 0)
        table = jnp.asarray(table).at[: old[0], : old[1]].set(self.table)
        return type(self)(jnp.pad(self.k, more), jnp.pad(self.v, more), table)

    def write(self, slots: jax.Array, k: jax.Array, v: jax.Array) -> Self:
        """See `CacheView.write`; zeros lie behind. Slots beyond the cache are dropped."""
        blocks = self.table.at[slots].get(mode="fill", fill_value=len(self.k))

        def put(pool: jax.Array, new: jax.Array) -> jax.Array:
            rows = jnp.pad(new, ((0, 0), (0, self.capacity - new.shape[1]), (0, 0), (0, 0)))
            rows = rows.reshape(len(new), -1, self._size, *new.shape[2:]).swapaxes(2, 3)
            return pool.at[blocks].set(rows, mode="drop")

        return self._replace(k=put(self.k, k), v=put(self.v, v))

    def append(self, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Self:
        """See `CacheView.append`."""
        at = jnp.minimum(lengths, self.capacity - 1)
        blocks, at = self.table[jnp.arange(len(k)), at // self._size], at % self._size
        return self._replace(k=self.k.at[blocks, :, at].set(k), v=self.v.at[blocks, :, at].set(v))

    def read(self) -> tuple[jax.Array, jax.Array]:
        """See `CacheView.read`."""
        k, v = (pool[self.table].swapaxes(1, 2) for pool in (self.k, self.v))
        return k.reshape(*k.shape[:2], -1, k.shape[-1]), v.reshape(*v.shape[:2], -1, v.shape[-1])


KINDS: dict[str, type[Any]] = {"full": FullCache, "blocks": BlockCache}  # each a LayerCache


def zeros(spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> list[jax.Array]:
    """The arrays of a layer's layout, all zero."""
    return [
        jnp.broadcast_to(zero.astype(b.dtype) if b.dtype else zero, b.shape)
        for b in buffers(spec, slots, tokens)
    ]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Every layer's arrays, for `slots` sequences of `tokens` tokens: exactly a bucket's."""

    layers: Sequence[LayerCache]
    slots: int = field(metadata={"static": True})
    tokens: int = field(metadata={"static": True})


def split(specs: Sequence[CacheSpec], place: Place) -> list[Any]:
    """How every layer's arrays are split over devices: over KV heads, where they have them."""
    check_kinds(specs, KINDS, "jax")
    return [
        KINDS[spec.kind](*(place.split(b.heads) for b in buffers(spec, 1, 1))) for spec in specs
    ]


def make_cache(
    specs: Sequence[CacheSpec], slots: int, tokens: int, dtype: Any, place: Place
) -> Cache:
    """A new cache. `specs` are those of one device."""
    make = _make(tuple(specs), slots, tokens, place)
    return Cache(make(place.put(np.zeros((), np.dtype(dtype)))), slots, tokens)


@jit_few
def _make(
    specs: tuple[CacheSpec, ...], slots: int, tokens: int, place: Place
) -> Callable[..., list[LayerCache]]:
    """All layers' arrays by one call: one after another they take the host milliseconds."""

    def make(zero: jax.Array) -> list[LayerCache]:
        return [KINDS[spec.kind].make(spec, slots, tokens, zero) for spec in specs]

    return place.spread(make, WHOLE, split(specs, place))


def grow(cache: Cache, specs: Sequence[CacheSpec], slots: int, tokens: int, place: Place) -> Cache:
    """The same contents in a cache of `slots` by `tokens`, no smaller in either."""
    pairs = zip(specs, cache.layers, strict=True)
    layers = [_grow(spec, slots, tokens, place)(layer) for spec, layer in pairs]
    return Cache(layers, slots, tokens)


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
