"""Tensor parallelism's seams; with one rank, as now, each is the identity."""

import torch

from ...weights import Weight
from .plain import PlainOps


def row_product(
    ops: PlainOps,
    x: torch.Tensor,
    weight: Weight,
    bias: Weight | None,
    residual: torch.Tensor | None,
    spend: bool = False,
) -> torch.Tensor:
    """A row-parallel product: each rank's share summed, then bias and residual added once.

    With one rank the product takes both itself, which saves roundings and launches.
    """
    return reduce(ops.linear(x, weight, bias, residual=residual, spend=spend))


def reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum of `x` over ranks."""
    return x


def gather_logits(logits: torch.Tensor) -> torch.Tensor:
    """Logits over the whole vocabulary from each rank's share of it."""
    return logits
