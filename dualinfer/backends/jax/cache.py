"""The JAX KV cache: one pair of arrays a layer, a row a slot, donated to every step; its room."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...memory import host_free_bytes
from ..base import CacheSpec, no_room


class LayerCache(NamedTuple):
    """One layer's keys and values, [N, K, S, D] each."""

    k: jax.Array
    v: jax.Array


Cache = list[LayerCache]


def make_cache(
    specs: Sequence[CacheSpec], slots: int, tokens: int, dtype: Any, device: jax.Device
) -> Cache:
    """Zeroed buffers: a masked value still takes part in the product as 0 * value."""
    shapes = tuple(
        (slots, s.kv_heads, tokens, dim) for s in specs for dim in (s.key_dim, s.value_dim)
    )
    buffers = _zeros(jax.device_put(np.zeros((), np.dtype(dtype)), device), shapes)
    return [LayerCache(*pair) for pair in zip(buffers[::2], buffers[1::2], strict=True)]


@partial(jax.jit, static_argnums=1)
def _zeros(zero: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    """Zeros beside `zero`, all by one call: one after another they take the host milliseconds."""
    return [jnp.broadcast_to(zero, shape) for shape in shapes]


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


def check_room(needed: int, slots: int, tokens: int, device: jax.Device) -> None:
    """Raise OutOfMemoryError if a cache of this size, of `needed` bytes, has no room."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise no_room(slots, tokens, needed, free, f"{device.platform}:{device.id}")


def grow(cache: Cache, slots: int, tokens: int) -> Cache:
    """The same contents in buffers of at least `slots` by `tokens`."""

    def pad(x: jax.Array) -> jax.Array:
        more = (max(slots - x.shape[0], 0), 0, max(tokens - x.shape[2], 0), 0)
        return jnp.pad(x, [(0, n) for n in more])

    return [LayerCache(pad(c.k), pad(c.v)) for c in cache]


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
