"""What a pass of the decoder asks of the kernels that are tuned, noted instead of computed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ....kernels.triton import experts, routing
from ....kernels.triton.mixture import Mixture
from ....kernels.triton.tuning import Key
from ....model.spec import Activation, Attention, Experts, Gate, ModelSpec, Router
from ....model.weights import Weight
from ....ops.contract import ALONE, Neighbours, NormOf, Routing, Unnormed, Weights
from ....ops.schemes import eight_bit, rounds_input
from ...kernels import linear_key, reads_unnormed, serves_product
from ..ops.kernels import KernelOps, takes_groups


class ProductCall(NamedTuple):
    """A product with few rows, but for x and the values of the residual."""

    weight: Weight
    by: Neighbours


class RouterCall(NamedTuple):
    """A router, but for x."""

    weight: Weight
    router: Router
    beside: dict[str, Any]


class ExpertsCall(NamedTuple):
    """What a layer's experts make of x, but for the values of x, routing and residual."""

    held: Mixture
    chosen: int
    by: Neighbours
    x: torch.Tensor


class Recorder:
    """Ops of the contract that launch nothing: they note what a pass asks of tuned kernels.

    Those are products with few rows, routers and experts. What they give is empty, of the right
    shape; `ops` says which kernel would serve.
    """

    def __init__(self, ops: KernelOps):
        self.ops = ops
        self.products: dict[Key, list[ProductCall]] = {}
        self.routers: dict[Key, list[RouterCall]] = {}
        self.mixtures: dict[Key, list[ExpertsCall]] = {}

    def span(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
    ) -> torch.Tensor:
        dtype = w["embed.weight"].dtype
        return torch.empty((*ids.shape, spec.embed), dtype=dtype, device=ids.device)

    def embed_given(
        self,
        spec: ModelSpec,
        w: Weights,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        blend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.embed(spec, w, positions, positions, token_types)

    def embed_trigrams(
        self,
        spec: ModelSpec,
        w: Weights,
        x: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.embed(spec, w, positions, positions, token_types)

    def read_by_layers(
        self, spec: ModelSpec, w: Weights, ids: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        self.linear(x, w["layers_project.weight"])
        return x.new_empty((len(spec.layers), *ids.shape, spec.layers[0].reads))

    def norm(
        self, x: torch.Tensor, norm: NormOf, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x

    def widen_heads(self, a: Attention, qkv: torch.Tensor) -> torch.Tensor:
        return qkv.new_empty((*qkv.shape[:-1], sum(a.widened.qkv_sizes)))

    def bias_keys(
        self, a: Attention, qkv: torch.Tensor, numbers: torch.Tensor, w: Weights
    ) -> torch.Tensor:
        return self.widen_heads(a, qkv)

    def narrow_heads(self, a: Attention, y: torch.Tensor, w: Weights) -> torch.Tensor:
        return y.new_empty((*y.shape[:-1], a.heads * a.head_widths[2]))

    def norm_shared(self, x: torch.Tensor, norm: NormOf, width: int) -> torch.Tensor:
        return x

    def linear(self, x: torch.Tensor, weight: Weight, by: Neighbours = ALONE) -> torch.Tensor:
        if x.numel() > x.shape[-1] or rounds_input(weight):
            by = by._replace(norm=None)  # a launch of its own
        count = x.numel() // x.shape[-1]
        if serves_product(x, weight, by) or eight_bit(weight, count, x.element_size()):
            product = ProductCall(weight, by)
            self.products.setdefault(linear_key(x, weight, by), []).append(product)
        return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if by.gated else 1)))

    def read(
        self, x: Unnormed, weight: Weight, by: Neighbours
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by = by._replace(norm=x.norm) if reads_unnormed(x, weight) else by
        return self.linear(x.y, weight, by), x.y

    def row_product(self, x: torch.Tensor, weight: Weight, by: Neighbours = ALONE) -> torch.Tensor:
        return self.linear(x, weight, by)

    def partial_product(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return self.linear(x, weight)

    def chosen_queries(
        self, x: torch.Tensor, weight: Weight, routing: Routing, head_dim: int
    ) -> torch.Tensor:
        heads = routing.experts.shape[-1] * weight.shape[1]
        return x.new_empty((*x.shape[:-1], heads))

    def chosen_outputs(
        self, y: torch.Tensor, weight: Weight, routing: Routing, head_dim: int, by: Neighbours
    ) -> torch.Tensor:
        return y.new_empty((*y.shape[:-1], weight.shape[1]))

    def route(
        self,
        x: torch.Tensor,
        weight: Weight,
        router: Router,
        *,
        bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        norm: NormOf | None = None,
    ) -> Routing:
        if weight.scheme is None and routing.serves(router, weight.shape[0]):
            beside = {"bias": bias, "choice_bias": choice_bias, "norm": norm}
            count, (total, width) = x.numel() // x.shape[-1], weight.shape
            key = routing.tuning_key(count, total, width, weight.dtype.itemsize)
            self.routers.setdefault(key, []).append(RouterCall(weight, router, beside))
        shape = *x.shape[:-1], router.chosen
        return Routing(x.new_zeros(shape, dtype=torch.int32), x.new_empty(shape))

    def blend(self, routing: Routing, sides: Routing, expert: int) -> Routing:
        return routing

    def fill(
        self,
        routing: Routing,
        count: int,
        capacity: int,
        mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> Routing:
        return routing

    def experts(
        self,
        x: torch.Tensor,
        mixture: Experts,
        w: Weights,
        routing: Routing,
        by: Neighbours = ALONE,
        partial: torch.Tensor | None = None,
    ) -> torch.Tensor:
        held, count = self.ops.held_experts(x, mixture, w), x.numel() // x.shape[-1]
        chosen = mixture.per_token
        if held is not None and not takes_groups(held, count * chosen, x):
            by = by._replace(norm=None) if mixture.weighs_input else by
            key = experts.tuning_key(count, chosen, held, x.element_size())
            self.mixtures.setdefault(key, []).append(ExpertsCall(held, chosen, by, x))
        return x

    def adds_shared(self, x: torch.Tensor, mixture: Experts, w: Weights) -> bool:
        return self.ops.adds_shared(x, mixture, w)

    def gate(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weight: Weight,
        norm: NormOf | None = None,
        by: Gate = "sigmoid",
    ) -> torch.Tensor:
        self.linear(x, weight, Neighbours(norm=norm, wide=True))
        return y

    def add(self, x: torch.Tensor, y: torch.Tensor, norm: NormOf | None = None) -> torch.Tensor:
        return x

    def norm_values(self, a: Attention, qkv: torch.Tensor, norm: NormOf) -> torch.Tensor:
        return qkv

    def with_keys_of(self, a: Attention, q: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        return qkv

    def clip(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        return x

    def stack(self, *parts: torch.Tensor) -> torch.Tensor:
        return torch.stack(parts)

    def mix_streams(self, coefficients: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x

    def correct_streams(
        self, x: torch.Tensor, coefficients: torch.Tensor, change: torch.Tensor
    ) -> torch.Tensor:
        return x

    def add_to_rest(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x

    def gate_sparsely(
        self, h: torch.Tensor, by: Activation, deviations: float, width: int
    ) -> torch.Tensor:
        return h.new_empty((*h.shape[:-1], h.shape[-1] // 2))

    def times_logistic(self, y: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return y

    def gate_within(self, h: torch.Tensor, by: Activation, limit: float) -> torch.Tensor:
        return h.new_empty((*h.shape[:-1], h.shape[-1] // 2))

    def gate_scaled(self, h: torch.Tensor, by: Activation, scale: float) -> torch.Tensor:
        return h.new_empty((*h.shape[:-1], h.shape[-1] // 2))

    def pool(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        segments: torch.Tensor | None = None,
        count: int = 1,
        largest: bool = False,
    ) -> torch.Tensor:
        return x[:, :count]

    def take_rows(self, table: Weight, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty((*ids.shape, table.shape[1]), dtype=table.dtype, device=ids.device)

    def embed_page(
        self, spec: ModelSpec, w: Weights, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        weight = w["page_positions.weight"]
        shape = *positions.shape, weight.shape[1]
        return torch.empty(shape, dtype=weight.dtype, device=positions.device)

    def weave(self, heads: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.cat((first, second), -1)

    def unweave(
        self, heads: int, x: torch.Tensor, second: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., : -heads * second], x[..., -heads * second :]

    def parted(self, x: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., :at], x[..., at:]

    def join(self, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts, -1)

    def like(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x

    def xielu(self, x: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        return x

    def convolve_each(
        self, x: torch.Tensor, kernel: torch.Tensor, segments: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x

    def mix_spans(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        taps: int,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return x

    def convolve(
        self,
        x: torch.Tensor,
        kernel: torch.Tensor,
        bias: torch.Tensor,
        stride: int,
        activation: Activation,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return x.new_empty((x.shape[0], x.shape[1] // stride, kernel.shape[0]))

    def softcap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        return logits

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
