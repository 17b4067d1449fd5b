"""Tensor parallelism's seams; with one device, as now, each is the identity."""

import jax

from ...weights import Weight
from .plain import PlainOps


def row_product(
    ops: PlainOps,
    x: jax.Array,
    weight: Weight,
    bias: Weight | None,
    residual: jax.Array | None,
) -> jax.Array:
    """A row-parallel product: each device's share summed, then bias and residual added once.

    With one device the product takes both itself, which saves roundings and launches.
    """
    return reduce(ops.linear(x, weight, bias, residual=residual))


def reduce(x: jax.Array) -> jax.Array:
    """The sum of `x` over devices."""
    return x


def gather_logits(logits: jax.Array) -> jax.Array:
    """Logits over the whole vocabulary from each device's share of it."""
    return logits
