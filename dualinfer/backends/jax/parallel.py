"""Tensor parallelism's seams; with one device, as now, each is the identity."""

import jax

from ...weights import Weight
from . import ops


def row_product(x: jax.Array, weight: Weight, bias: Weight | None) -> jax.Array:
    """A row-parallel product: each device's share summed, then the bias added once.

    With one device the product takes the bias itself, which saves a rounding.
    """
    return reduce(ops.matmul(x, weight, bias))


def reduce(x: jax.Array) -> jax.Array:
    """The sum of `x` over devices."""
    return x


def gather_logits(logits: jax.Array) -> jax.Array:
    """Logits over the whole vocabulary from each device's share of it."""
    return logits
