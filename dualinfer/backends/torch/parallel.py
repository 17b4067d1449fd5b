"""Tensor parallelism's seams; with one rank, as now, each is the identity."""

import torch

from ...weights import Weight
from . import ops


def row_product(x: torch.Tensor, weight: Weight, bias: Weight | None) -> torch.Tensor:
    """A row-parallel product: each rank's share summed, then the bias added once.

    With one rank the product takes the bias itself, which saves a rounding.
    """
    return reduce(ops.matmul(x, weight, bias))


def reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum of `x` over ranks."""
    return x


def gather_logits(logits: torch.Tensor) -> torch.Tensor:
    """Logits over the whole vocabulary from each rank's share of it."""
    return logits
