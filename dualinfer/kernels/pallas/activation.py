"""Activations in what both of Mosaic's lowerings have, where XLA's way is another."""

import jax
import jax.numpy as jnp


def gelu(x: jax.Array) -> jax.Array:
    """GELU by the error function, of float32."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def relu(x: jax.Array) -> jax.Array:
    """The larger of x and 0, without a rule of its own for derivatives."""
    return jnp.maximum(x, 0)


def relu2(x: jax.Array) -> jax.Array:
    """The square of `relu`."""
    return relu(x) * relu(x)
