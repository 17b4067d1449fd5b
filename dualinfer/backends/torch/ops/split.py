"""The kernels' ops of one rank of several: what it sums with the others, and what it gathers."""

from collections.abc import Mapping

import torch

from ....kernels.triton import embedding
from ....kernels.triton.mixture import Mixture
from ....kernels.triton.tuning import Configurations
from ....model.spec import ModelSpec
from ....model.weights import Weight
from ....ops.contract import ALONE, Epilogue, Routing, Weights
from ....ops.embedding import places_of, scale_of, shares_rows
from ....ops.mixtures import biases
from ...kernels import serves_product
from ..exchange import Exchange
from ..parallel import Split
from ..profiling import named
from .kernels import KernelOps, reads_tables
from .schemes import SCHEMES


class SplitKernelOps(KernelOps):
    """KernelOps where each rank has a share of the model. Sums of few values are one launch.

    Without an `exchange` all of them are NCCL's.
    """

    split: Split

    def __init__(
        self,
        device: torch.device,
        configurations: Configurations,
        split: Split,
        exchange: Exchange | None,
    ):
        super().__init__(device, configurations, split)
        self.exchange = exchange
        self._own: dict[int, torch.Tensor] = {}  # made now: a graph's capture allows no copy
        layers = () if split.plan is None else split.plan.table.spec.all_layers
        for count in {layer.experts for layer in layers} - {0}:
            if (own := split.own_experts(count)) is not None:
                self._own[count] = torch.tensor(own, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """See `PlainOps.clear`; later sums would be NCCL's."""
        super().clear()
        self.exchange = None

    @property
    def implementations(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The implementation of each op, sums over ranks included."""
        sums = "NCCL"
        if self.exchange is not None:
            sums = f"Triton, peer to peer, up to {self.exchange.capacity:,} values; NCCL above"
        return {**super().implementations, "sum over ranks": sums}

    @named("embed")
    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `PlainOps.embed`; what is not split is added once, after the sum."""
        if not shares_rows(w["embed.weight"]) or not reads_tables(spec, w):
            return super().embed(spec, w, ids, positions, token_types)
        table = w["embed.weight"].data
        scale = scale_of(self.maths, spec, table.dtype)
        x = embedding.embed(ids, table, scale=scale, first=self.split.first)
        added = None
        if spec.positions.rows:
            at = places_of(self.maths, spec, positions)
            added = embedding.embed(at, w["positions.weight"].data)
        if token_types is not None and spec.embedding.types == "vocab":
            x += embedding.embed(token_types, table, first=self.split.first)
        elif token_types is not None:
            types = embedding.embed(token_types, w["token_types.weight"].data)
            added = types if added is None else added + types
        return self._sum(x, None, added, x.dtype)

    def tokens(self, ids: torch.Tensor, table: Weight) -> torch.Tensor:
        """See `contract.BlockOps.tokens`."""
        if table.scheme is not None:
            return super().tokens(ids, table)
        x = embedding.embed(ids, table.data, first=self.split.first)
        return self._sum(x, None, None, x.dtype)

    @named("matmul")
    def row_product(
        self, x: torch.Tensor, weight: Weight, epilogue: Epilogue = ALONE
    ) -> torch.Tensor:
        """See `PlainOps.row_product`; few rows are summed in float32, by a kernel."""
        assert epilogue.norm is None, "x is a share of what is normed"
        x, weight = SCHEMES.share_input(x, weight, self.split.most)
        values = x.numel() // x.shape[-1] * weight.shape[0]
        wide = serves_product(x, weight, ALONE) and self._exchange_for(values) is not None
        partial = self.linear(x, weight, Epilogue(wide=wide))
        return self._sum(partial, epilogue.bias, epilogue.residual, x.dtype)

    def own_experts(self, count: int) -> torch.Tensor | None:
        """See `KernelOps.own_experts`."""
        return self._own.get(count)

    def _mixed(
        self,
        x: torch.Tensor,
        mixture: Mixture,
        routing: Routing,
        epilogue: Epilogue,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `KernelOps._mixed`; few values are summed in float32, by a kernel."""
        bias, residual = mixture.down_bias, epilogue.residual
        epilogue = epilogue._replace(residual=None, wide=self._exchange_for(x.numel()) is not None)
        y = self.own_part(x, mixture._replace(down_bias=None), routing, epilogue, partial)
        if bias is not None:
            added = biases(self.maths, bias, routing).to(x.dtype)
            residual = added if residual is None else residual + added
        return self._sum(y, None, residual, x.dtype)

    @named("gather")
    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """See `PlainOps.gather_logits`."""
        rows = logits.numel() // logits.shape[-1]
        exchange = self._exchange_for(rows * max(self.split.vocab))
        if exchange is None:
            return super().gather_logits(logits)
        return exchange.gather_vocab(logits, self.starts_early(rows))

    def _sum(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """residual + the sum over ranks of x, which may be overwritten, + bias, in `dtype`."""
        exchange = self._exchange_for(x.numel())
        if exchange is not None:
            early = self.starts_early(x.numel() // x.shape[-1])
            return exchange.sum(x, bias, residual, dtype, early)
        y = self.split.sum(x).to(dtype)
        if bias is not None:
            y = y + bias
        return y if residual is None else residual + y

    def _exchange_for(self, values: int) -> Exchange | None:
        """The exchange for so many values of each rank; None where NCCL does it."""
        return self.exchange if self.exchange and self.exchange.serves(values) else None
