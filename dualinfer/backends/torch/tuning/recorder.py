"""Note what a pass of the decoder asks of the kernels that are tuned, instead of computing."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ....kernels.triton import experts, routing
from ....kernels.triton.mixture import Mixture
from ....kernels.triton.tuning import Key
from ....model.spec import Experts, ModelSpec, Router
from ....model.weights import Weight
from ....ops.contract import ALONE, Epilogue, NormOf, Routing, Unnormed, Weights
from ...kernels import linear_key, reads_unnormed, serves_product
from ...served import served
from ..ops.kernels import KernelOps, takes_groups
from ..ops.plain import PlainOps


class ProductCall(NamedTuple):
    """A product with few rows, but for x and the values of the residual."""

    weight: Weight
    epilogue: Epilogue


class RouterCall(NamedTuple):
    """A router, but for x."""

    weight: Weight
    router: Router
    beside: dict[str, Any]


class ExpertsCall(NamedTuple):
    """A call of a layer's experts for x, but for the values of x, routing and residual."""

    held: Mixture
    chosen: int
    epilogue: Epilogue
    x: torch.Tensor


class Recorder(PlainOps):
    """Plain ops of which those note what a pass asks of tuned kernels that these serve.

    They are products with few rows, routers and experts; norms, which lie between, do nothing. What
    they give is empty, of the right shape; `ops` says which kernel would serve.
    """

    def __init__(self, ops: KernelOps):
        super().__init__()
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

    def norm(
        self, x: torch.Tensor, norm: NormOf, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x

    def linear(self, x: torch.Tensor, weight: Weight, epilogue: Epilogue = ALONE) -> torch.Tensor:
        own, count = served(weight), x.numel() // x.shape[-1]
        if count > 1 or own.rounds:
            epilogue = epilogue._replace(norm=None)  # a launch of its own
        if serves_product(x, weight, epilogue) or own.in_eight_bits(count, x.element_size()):
            product = ProductCall(weight, epilogue)
            self.products.setdefault(linear_key(x, weight, epilogue), []).append(product)
        return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if epilogue.gated else 1)))

    def read(
        self, x: Unnormed, weight: Weight, epilogue: Epilogue
    ) -> tuple[torch.Tensor, torch.Tensor]:
        epilogue = epilogue._replace(norm=x.norm) if reads_unnormed(x, weight) else epilogue
        return self.linear(x.y, weight, epilogue), x.y

    def row_product(
        self, x: torch.Tensor, weight: Weight, epilogue: Epilogue = ALONE
    ) -> torch.Tensor:
        return self.linear(x, weight, epilogue)

    def partial_product(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return self.linear(x, weight)

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

    def experts(
        self,
        x: torch.Tensor,
        mixture: Experts,
        w: Weights,
        routing: Routing,
        epilogue: Epilogue = ALONE,
        partial: torch.Tensor | None = None,
    ) -> torch.Tensor:
        held, count = self.ops.held_experts(x, mixture, w), x.numel() // x.shape[-1]
        chosen = mixture.per_token
        if held is not None and not takes_groups(held, count * chosen, x):
            key = experts.tuning_key(count, chosen, held, x.element_size())
            self.mixtures.setdefault(key, []).append(ExpertsCall(held, chosen, epilogue, x))
        return x

    def adds_shared(self, x: torch.Tensor, mixture: Experts, w: Weights) -> bool:
        return self.ops.adds_shared(x, mixture, w)

    def add(self, x: torch.Tensor, y: torch.Tensor, norm: NormOf | None = None) -> torch.Tensor:
        return x

    def xielu(self, x: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        return x
