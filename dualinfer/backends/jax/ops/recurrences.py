"""Recurrences in JAX: what keeps a state of fixed size in the place of keys and values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ....model.spec import Recurrence
from ...caches import StateView
from ...contract import Weights


@jax.named_scope("recurrence")
def recur(
    own: Recurrence,
    w: Weights,
    x: jax.Array,
    mask: jax.Array | None,
    segments: jax.Array | None,
    cache: StateView | None,
    slots: jax.Array | None,
    lengths: jax.Array | None,
    goes_on: bool,
) -> tuple[jax.Array, StateView | None]:
    """See `contract.Ops.recur`."""
    held = None
    if goes_on:
        assert cache is not None and slots is not None
        held = tuple(array[slots] for array in cache.arrays)
    first, gate, third = jnp.split(x, 3, axis=-1)
    x = first * third
    if mask is not None:
        x = x * mask[..., None].astype(x.dtype)
    y, wide = convolve_past(own, w, x, held[0] if held else None, segments)
    if cache is not None:
        assert slots is not None and lengths is not None
        cache = cache.keep(slots, last_tokens(own, wide, lengths))
    return gate * y, cache


@jax.named_scope("recurrence")
def recur_token(
    own: Recurrence, w: Weights, x: jax.Array, cache: StateView, moves: jax.Array
) -> tuple[jax.Array, StateView]:
    """See `contract.Ops.recur_token`."""
    first, gate, third = jnp.split(x, 3, axis=-1)
    y, wide = convolve_past(own, w, first * third, cache.arrays[0])
    return gate * y, cache.move(moves, wide[:, 1:])


def convolve_past(
    own: Recurrence,
    w: Weights,
    x: jax.Array,
    past: jax.Array | None = None,
    segments: jax.Array | None = None,
    then: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Each channel of x [B, T, C] over itself and what came before, and x with that in front.

    `past` [B, taps - 1, C] came before; None for zeros. Sums, and what `then` makes of them, are
    float32. The second result is [B, taps - 1 + T, C].
    """
    tokens, before = x.shape[1], own.taps - 1
    front = ((0, 0), (before, 0))
    wide = jnp.pad(x, (*front, (0, 0))) if past is None else jnp.concatenate((past, x), 1)
    owners = None if segments is None else jnp.pad(segments, front, constant_values=-1)
    kernel, total = w["recurrence_kernel"].astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
    for i in range(own.taps):
        near = wide[:, i : i + tokens].astype(jnp.float32)
        if owners is not None:
            near = near * (owners[:, i : i + tokens] == segments)[..., None]
        total = total + near * kernel[:, i]
    if (bias := w.get("recurrence_kernel_bias")) is not None:
        total = total + bias.astype(jnp.float32)
    return (then(total) if then else total).astype(x.dtype), wide


def last_tokens(own: Recurrence, wide: jax.Array, lengths: jax.Array) -> jax.Array:
    """The taps - 1 tokens before the end of each sequence, of `convolve_past`'s second result."""
    at = lengths[:, None] + jnp.arange(own.taps - 1)
    return jnp.take_along_axis(wide, at[..., None], axis=1)
