"""Routers and experts for `dualinfer bench ops`, beside XLA's."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...backends.jax.ops.plain import PlainOps
from ..case import OpCase
from ..mixtures import ExpertsOp, RouterOp
from .inputs import Bench, Op


def mixture(bench: Bench, own: RouterOp | ExpertsOp) -> Iterator[OpCase]:
    """Cases of the choice of experts for rows, or of what these make of them."""

    def run(ops: PlainOps, state: None, *inputs: Any) -> tuple[Any, None]:
        return own.run(ops, *inputs), state

    op = Op(bench, *own.about, lambda: (None, own.inputs(bench)))
    yield op.by_kernels("", run)
    yield op.by_plain(run)
    if isinstance(own, ExpertsOp) and own.is_quantized:
        plain = replace(op, inputs=lambda: (None, own.inputs(bench, False)))
        yield plain.by_kernels("dualinfer, plain weights", run)
