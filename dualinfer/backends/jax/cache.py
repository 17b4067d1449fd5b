"""The JAX cache: each layer's arrays, a row a slot, donated to every step; its room."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.cache_kinds import LayerCache, kinds_over
from ...ops.caches import Buffer, CacheSpec, Room, buffers, check_kinds
from ...system.memory import host_free_bytes
from .executables import jit_few
from .maths import MATHS
from .mesh import WHOLE, Place

KINDS = kinds_over(MATHS)


def made(spec: CacheSpec, slots: int, tokens: int, zero: jax.Array) -> LayerCache:
    """A layer's new cache; finite: a masked value still takes part in a product as 0 * value.

    `zero` is a scalar of the model's dtype.
    """

    def new(b: Buffer) -> jax.Array:
        if b.first is not None:
            return jnp.asarray(b.first(b.shape))
        return jnp.broadcast_to(zero.astype(b.dtype) if b.dtype else zero, b.shape)

    return KINDS[spec.kind](*map(new, buffers(spec, slots, tokens)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Every layer's arrays, for `slots` sequences of `tokens` tokens: exactly a bucket's.

    The cross caches, of `encoded` places each, are the last. Layers whose blocks are those of all
    slots have one `table`, which lies here, since an array is donated once; those of layers that
    forget, as `forgets` says of each, have the `near` one.
    """

    layers: Sequence[Any]
    slots: int = field(metadata={"static": True})
    tokens: int = field(metadata={"static": True})
    encoded: int = field(default=0, metadata={"static": True})
    blocks: tuple[int, ...] = field(default=(), metadata={"static": True})
    forgets: tuple[bool, ...] = field(default=(), metadata={"static": True})
    table: Any = None
    near: Any = None

    @property
    def room(self) -> Room:
        """The room that the cache has."""
        return Room(self.slots, self.tokens, self.encoded)

    @property
    def key(self) -> tuple[int, ...]:
        """The part of an executable's key that says which cache it takes."""
        return (*self.room, *self.blocks)

    def opened(self) -> list[Any]:
        """Every layer's cache, with the table of those that have one; None stays so."""
        if self.table is None:
            return list(self.layers)
        pairs = zip(self.layers, self.forgets, strict=False)  # of a step over the first few layers
        tables = self.table, self.near
        return [own and own._replace(table=tables[forgets]) for own, forgets in pairs]

    def holding(self, layers: Sequence[Any]) -> "Cache":
        """The cache with others of `opened` in the place of its layers."""
        if self.table is not None:
            layers = [own and own._replace(table=None) for own in layers]
        return replace(self, layers=layers)

    def like(self, layers: Sequence[Any], table: Any) -> "Cache":
        """The same tree with something else in the places of its arrays."""
        both = (None if own is None else table for own in (self.table, self.near))
        return replace(self, layers=layers, **dict(zip(("table", "near"), both, strict=True)))


def split(specs: Sequence[CacheSpec], place: Place) -> list[Any]:
    """The split of every layer's arrays over devices: over KV heads, where they have them."""
    check_kinds(specs, KINDS, "jax")
    return [
        _without_table(spec, KINDS[spec.kind](*(place.split(b.heads) for b in buffers(spec, 1, 1))))
        for spec in specs
    ]


def _without_table(spec: CacheSpec, layer: Any) -> Any:
    return layer._replace(table=None) if spec.blocks else layer


def make_cache(specs: Sequence[CacheSpec], room: Room, dtype: Any, place: Place) -> Cache:
    """A new cache, yet without a table of its blocks. `specs` are those of one device."""
    make = _make(tuple(specs), room, place)
    blocks = tuple(dict.fromkeys(spec.blocks for spec in specs if spec.blocks))
    forgets = tuple(spec.forgets for spec in specs) if blocks else ()
    return Cache(make(place.put(np.zeros((), np.dtype(dtype)))), *room, blocks, forgets)


@jit_few
def _make(specs: tuple[CacheSpec, ...], room: Room, place: Place) -> Callable[..., list[Any]]:
    """All layers' arrays by one call: one after another they take the host milliseconds."""

    def make(zero: jax.Array) -> list[Any]:
        return [_without_table(s, made(s, room.slots, room.of(s), zero)) for s in specs]

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


def copied(cache: Cache, pair: jax.Array, tokens: int) -> Cache:
    """The cache with the first `tokens` places of slot pair[0] in slot pair[1], too."""

    @jax.jit  # so that layers that are alike are traced and lowered once, here and below
    def one(layer: LayerCache, pair: jax.Array) -> LayerCache:
        return layer.given(pair[1], layer.taken(pair[0], tokens))

    return replace(cache, layers=[one(layer, pair) for layer in cache.layers])


def taken(cache: Cache, slot: jax.Array, tokens: int, near: int = 0) -> Cache:
    """The first `tokens` places of a slot, a cache of one slot for each layer.

    Of layers that forget the first `near` ones, by a table that begins there.
    """

    @partial(jax.jit, static_argnums=2)
    def one(layer: LayerCache, slot: jax.Array, count: int) -> LayerCache:
        return layer.taken(slot, count)

    forgets = cache.forgets or [False] * len(cache.layers)
    pairs = zip(cache.opened(), forgets, strict=True)
    own = cache.holding([one(layer, slot, near if own else tokens) for layer, own in pairs])
    return replace(own, table=None, near=None)


def given(cache: Cache, own: Cache, slot: jax.Array) -> Cache:
    """The cache with what `taken` gave in a slot."""

    @jax.jit
    def one(layer: LayerCache, slot: jax.Array, part: LayerCache) -> LayerCache:
        return layer.given(slot, part)

    pairs = zip(cache.opened(), own.layers, strict=True)
    return cache.holding([one(layer, slot, part) for layer, part in pairs])


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
