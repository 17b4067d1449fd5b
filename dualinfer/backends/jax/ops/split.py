"""The kernels' ops of one device of several: what it sums with the others, and what it gathers."""

import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from ....kernels.triton.mixture import Mixture
from ....model.weights import Weight
from ....ops.contract import ALONE, Epilogue, Routing
from ....ops.mixtures import biases
from ..exchange import Exchange
from ..parallel import Split
from .kernels import KernelOps
from .schemes import SCHEMES


class SplitKernelOps(KernelOps):
    """KernelOps where each device has a share of the model. Sums of few values are one launch.

    Without an `exchange`, for the reason `obstacle`, and in traces without its mailboxes, all of
    them are XLA's.
    """

    split: Split

    def __init__(
        self,
        device: jax.Device,
        split: Split,
        exchange: Exchange | None,
        obstacle: str = "",
    ) -> None:
        super().__init__(device, split)
        self.exchange = exchange
        self._row: jax.Array | None = None
        sums = f"XLA: {obstacle}"
        if exchange is not None:
            sums = f"Triton, peer to peer, up to {exchange.capacity:,} values; XLA above"
        self.implementations = {**self.implementations, "sum over devices": sums}

    def make_scratch(self, pairs: int, mailboxes: jax.Array | None = None) -> Any:
        """See `KernelOps.make_scratch`; with them, this device's row of the table."""
        return super().make_scratch(pairs), None if mailboxes is None else mailboxes[0]

    def using(self, scratch: Any) -> Self:
        """See `PlainOps.using`."""
        ops = super().using(scratch[0])
        ops._row = scratch[1]
        return ops

    @property
    def scratch(self) -> Any:
        """The counters, by which exchanges come one after another as well, and the row."""
        return self._counters, self._row

    def given_up(self) -> jax.Array | None:
        """See `PlainOps.given_up`."""
        if self.exchange is None or self._row is None:
            return None
        assert self._counters is not None
        return self.exchange.given_up(self._row, self._counters, pdl=self.starts_early(1))

    def row_product(self, x: jax.Array, weight: Weight, epilogue: Epilogue = ALONE) -> jax.Array:
        """See `PlainOps.row_product`; where it is an exchange it is rounded once."""
        if not self._serves(math.prod(x.shape[:-1]) * weight.shape[0]):
            return super().row_product(x, weight, epilogue)
        assert epilogue.norm is None, "x is a share of what is normed"
        x, weight = SCHEMES.share_input(x, weight, self.split.most)
        y = self.partial_product(x, weight)
        return self._sum(y, epilogue.bias, epilogue.residual, x.dtype)

    def _mixed(
        self,
        x: jax.Array,
        mixture: Mixture,
        routing: Routing,
        epilogue: Epilogue,
        partial: jax.Array | None,
    ) -> jax.Array:
        """See `KernelOps._mixed`; where it is an exchange it is rounded once."""
        if not self._serves(x.size):
            return super()._mixed(x, mixture, routing, epilogue, partial)
        bias, own, residual = mixture.down_bias, mixture._replace(down_bias=None), epilogue.residual
        y = self.own_part(x, own, routing, Epilogue(norm=epilogue.norm, wide=True), partial)
        if bias is not None:
            added = biases(self.maths, bias, routing).astype(x.dtype)
            residual = added if residual is None else residual + added
        return self._sum(y, None, residual, x.dtype)

    def tokens(self, ids: jax.Array, table: Weight) -> jax.Array:
        """See `contract.BlockOps.tokens`."""
        if not self._serves(ids.size * table.shape[1]):
            return super().tokens(ids, table)
        rows, here = self.split.is_here(ids)
        x = jnp.where(here[..., None], self.schemes.embed(rows, table), 0)
        return self._sum(x, None, None, x.dtype)

    def gather_logits(self, logits: jax.Array) -> jax.Array:
        """See `PlainOps.gather_logits`; XLA's where a device has no part of the vocabulary."""
        vocab, width = self.split.plan.table.spec.vocab, logits.shape[-1]
        everywhere = vocab > width * (self.split.plan.size - 1)
        if not everywhere or not self._serves(logits.size):
            return super().gather_logits(logits)
        assert self.exchange is not None
        with jax.named_scope("gather"):
            return self._exchanged(self.exchange.gather, logits, vocab)

    def _sum(
        self, x: jax.Array, bias: jax.Array | None, residual: jax.Array | None, dtype: Any
    ) -> jax.Array:
        assert self.exchange is not None
        with jax.named_scope("reduce"):
            return self._exchanged(self.exchange.sum, x, bias, residual, dtype)

    def _exchanged(self, exchange: Callable[..., Any], x: jax.Array, *how: Any) -> jax.Array:
        early = self.starts_early(x.size // x.shape[-1])
        y, self._counters = exchange(x, self._row, self._counters, *how, pdl=early)
        return y

    def _serves(self, values: int) -> bool:
        """True if so many values are exchanged by a kernel."""
        return self.exchange is not None and self._row is not None and self.exchange.serves(values)
