"""The JAX KV cache: one pair of arrays a layer, a row a slot, donated to every step; its room."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...parallel.agreement import Peers
from ...system.memory import host_free_bytes
from ..base import CacheSpec, no_room
from .executables import jit_few
from .mesh import WHOLE, Place


class LayerCache(NamedTuple):
    """One layer's keys and values, [N, K, S, D] each."""

    k: jax.Array
    v: jax.Array


Cache = list[LayerCache]


def make_cache(
    specs: Sequence[CacheSpec], slots: int, tokens: int, dtype: Any, place: Place
) -> Cache:
    """Zeroed buffers: a masked value still takes part in the product as 0 * value.

    `specs` are those of one device.
    """
    shapes = tuple(
        (slots, s.kv_heads, tokens, dim) for s in specs for dim in (s.key_dim, s.value_dim)
    )
    buffers = _zeros(shapes, place)(place.put(np.zeros((), np.dtype(dtype))))
    return [LayerCache(*pair) for pair in zip(buffers[::2], buffers[1::2], strict=True)]


@jit_few
def _zeros(shapes: tuple[tuple[int, ...], ...], place: Place) -> Callable[..., list[jax.Array]]:
    """Zeros beside a zero, all by one call: one after another they take the host milliseconds."""

    def make(zero: jax.Array) -> list[jax.Array]:
        return [jnp.broadcast_to(zero, shape) for shape in shapes]

    return place.spread(make, WHOLE, place.over_heads)


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
    found = [free_bytes(device) for device in place.devices]
    free = None if None in found else min(n for n in found if n is not None)
    return free // len(found) if free and place.device.platform == "cpu" else free  # the host's


def check_room(needed: int, slots: int, tokens: int, place: Place, peers: Peers) -> None:
    """Raise OutOfMemoryError if a cache of this size, of `needed` bytes a device, has no room.

    All of `peers` must call it: where one has no room, it is raised in all.
    """
    said = peers.tell("Making a cache", free=least_free_bytes(place))["free"]
    free = min((n for n in said if n is not None), default=None)
    if free is not None and needed > free:
        raise no_room(slots, tokens, needed, free, place.name)


def grow(cache: Cache, slots: int, tokens: int, place: Place) -> Cache:
    """The same contents in buffers of at least `slots` by `tokens`."""

    def pad(x: jax.Array) -> jax.Array:
        return _pad((max(slots - x.shape[0], 0), 0, max(tokens - x.shape[2], 0), 0), place)(x)

    return [LayerCache(pad(c.k), pad(c.v)) for c in cache]


@jit_few
def _pad(more: tuple[int, ...], place: Place) -> Callable[[jax.Array], jax.Array]:
    """A buffer with so many zeros behind each axis."""

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, n) for n in more])

    return place.spread(pad, place.over_heads, place.over_heads)


def write(cache: LayerCache, slots: jax.Array, k: jax.Array, v: jax.Array) -> LayerCache:
    """The cache with k and v [B, T, K, D] of whole prompts at the start of `slots` [B], then zeros.

    The sequence that had the slot before may have left values that are not finite. Slots beyond the
    cache are dropped.
    """

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        rows = jnp.pad(
            new.swapaxes(1, 2), ((0, 0), (0, 0), (0, buffer.shape[2] - new.shape[1]), (0, 0))
        )
        return buffer.at[slots].set(rows, mode="drop")

    return LayerCache(put(cache.k, k), put(cache.v, v))
