"""Routers and experts for `dualinfer bench ops`, beside torch's."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ...backends.torch.maths import MATHS
from ...ops.contract import Routing
from ...ops.mixtures import hidden
from ..case import EPS, OpCase
from ..mixtures import ExpertsOp, RouterOp
from .inputs import Bench, Op


def router(bench: Bench, own: RouterOp) -> Iterator[OpCase]:
    """Cases of the choice of experts for rows; torch's product is in the dtype of its input."""
    how = own.shape.experts.router

    def ours(*inputs: Any) -> Routing:
        return own.run(bench.ops, *inputs)

    def theirs(x: Any, weight: Any, bias: Any, scale: Any) -> Routing:
        logits = F.linear(F.rms_norm(x, (own.shape.embed,), scale, EPS), weight, bias).float()
        scores = logits if how.score == "chosen" else logits.softmax(-1)
        weights, experts = scores.topk(how.chosen, -1)
        if how.score == "chosen":
            weights = weights.softmax(-1)
        elif how.over_sum is not None:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights)

    op = Op(*own.about, partial(own.inputs, bench))
    yield op.by("", ours)
    yield op.by("torch", theirs)


def experts(bench: Bench, own: ExpertsOp) -> Iterator[OpCase]:
    """Cases of experts on rows; torch's products by groups find pairs in the order of experts."""

    def ours(*inputs: Any) -> torch.Tensor:
        return own.run(bench.ops, *inputs)

    def grouped() -> tuple[Any, ...]:
        x, residual, scale, matrices, biases, chosen, weights = own.inputs(bench, False)
        order = chosen.flatten().argsort(stable=True)
        by_expert = chosen.flatten()[order]
        ends = by_expert.bincount(minlength=own.shape.experts.count).cumsum(0).int()
        biases = {part: None if b is None else b[by_expert] for part, b in biases.items()}
        return x, residual, scale, matrices, biases, order, order.argsort(), ends, weights

    def theirs(
        x: Any,
        residual: Any,
        scale: Any,
        matrices: Any,
        biases: Any,
        order: Any,
        places: Any,
        ends: Any,
        weights: Any,
    ) -> torch.Tensor:
        def product(rows: torch.Tensor, part: str) -> torch.Tensor:
            y = F.grouped_mm(rows, matrices[part].transpose(1, 2), offs=ends)
            return y if biases[part] is None else y + biases[part]

        k = weights.shape[-1]
        rows = F.rms_norm(x, (own.shape.embed,), scale, EPS).flatten(0, 1)
        h = hidden(MATHS, product(rows[order // k], "up"), own.shape.experts)
        parts = product(h, "down")[places].view(*weights.shape, -1)
        return residual + (parts * weights[..., None]).sum(-2).to(x.dtype)

    name, description, moved, flops = own.about
    op = Op(name, description, moved, flops, partial(own.inputs, bench))
    yield op.by("", ours)
    if own.is_quantized:
        plain = Op(name, description, moved, flops, partial(own.inputs, bench, False))
        yield plain.by("dualinfer, plain weights", ours)
    known = bench.dtype == torch.bfloat16 or bench.device.type == "cpu"
    reason = "" if known else "torch's grouped_mm takes bfloat16 on a GPU"
    reference = "torch, grouped_mm" + (", plain weights" if own.is_quantized else "")
    peer = Op(name, description, moved, flops, grouped).by(reference, theirs)
    yield replace(peer, obstacle=reason)
