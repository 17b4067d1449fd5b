"""The ops of the contract by Triton kernels; plain.py has the same ones by plain torch.

Which kernel serves a call follows from its shapes alone: products with few rows read the weights
once, with everything around them fused; those with many go to cuBLAS, between fused ops.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import torch
from torch.nn import functional as F

from ....kernels.triton import activation as activations
from ....kernels.triton import (
    eight_bit,
    embedding,
    experts_choice,
    linear,
    quantized,
    sampling,
)
from ....kernels.triton import norm as norms
from ....kernels.triton.eight_bit import EightBitConfig
from ....kernels.triton.experts_choice import ExpertsConfig
from ....kernels.triton.linear import LinearConfig, NormArguments
from ....kernels.triton.mixture import Mixture
from ....kernels.triton.quantized import QuantizedConfig
from ....kernels.triton.routing import RouteConfig
from ....kernels.triton.tuning import Configurations
from ....model.spec import Experts, ModelSpec, Recurrence, Router
from ....model.weights import Weight
from ....ops.cache_kinds import BlockCache, CrossCache, FullCache, LatentBlockCache, LatentCache
from ....ops.caches import CacheSpec, StateView
from ....ops.contract import (
    ALONE,
    EVERY,
    NO_ROWS,
    Epilogue,
    NormOf,
    Routing,
    Seen,
    StateRows,
    Unnormed,
    Weights,
)
from ....ops.embedding import scale_of
from ....ops.recurrence_kernels import Launch
from ...base import SamplingFeatures
from ...kernels import (
    experts_launch,
    experts_of,
    few_rows_launch,
    fused_sequence,
    fused_token,
    left_plain,
    linear_key,
    reads_unnormed,
    route_launch,
    serves_product,
    shares_launches,
)
from ...served import EightBit, describe_codes, served
from ...slots import bucket
from ..maths import MATHS
from ..parallel import Split
from ..profiling import named, span
from ..sampler import SlotState
from .kernel_attention import KernelAttention
from .plain import SDPA, PlainOps
from .schemes import SCHEMES

# Of an expert on average, and its ffn: from there torch's products are faster on an H100.
_GROUPED_PAIRS, _GROUPED_FFN = 256, 2048


class KernelOps(KernelAttention):
    """Fused ops on a CUDA device, see `KernelBase`."""

    cache_kinds = frozenset(
        own.kind for own in (FullCache, BlockCache, CrossCache, LatentCache, LatentBlockCache)
    )
    kernels = "Triton"
    _IMPLEMENTATIONS: Mapping[str, str] = {
        **PlainOps.implementations,
        "matmul": f"Triton, fused, up to {linear.MOST_ROWS} rows; cuBLAS above",
        "embed": "Triton",
        "rms_norm": "Triton, fused into the product of a single row",
        "layer_norm": "Triton, fused into the product of a single row",
        "qk_norm": "Triton, fused with rotary; LayerNorm, own weights and all heads as one apart",
        "rotary": "Triton, fused with the append to the cache",
        "activation": "Triton, fused into products with few rows",
        "router": "Triton, with norm and choice in one launch",
        "experts": (
            f"Triton, fused, up to {experts_choice.MOST_VECTORS} tokens; above by experts on the "
            "matrix units, prompts of wide ones by torch's grouped_mm"
        ),
        "attention": "torch's cuDNN or flash attention where they can, else Triton",
        "decode_attention": "Triton, split KV, fused with rotary and append",
        "cross_attention": f"Triton, split KV, of one token; {SDPA} of more",
        "latent_attention": "Triton, split KV over latent vectors; norm, rotary and append before",
        "recurrence": "Triton, with the convolution before and the norm behind it",
        "sampling": "Triton, threefry2x32",
    }

    def __init__(
        self,
        device: torch.device,
        configurations: Configurations | None = None,
        split: Split | None = None,
    ):
        super().__init__(device, configurations, split)
        self._workspaces: dict[tuple[int, int], sampling.Workspace] = {}

    @property
    def implementations(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The implementation of each op, and where the kernels' configurations come from."""
        return {**self._IMPLEMENTATIONS, "configurations": str(self.configurations)}

    def reads_codes(self, weight: Weight, spec: ModelSpec, layers: Sequence[Weights]) -> str | None:
        """See `PlainOps.reads_codes`."""
        few = f"Triton, fused, up to {quantized.MOST_ROWS} rows"
        return describe_codes(weight, f"{few}; above cuBLAS, with values by Triton")

    def left_plain(
        self, spec: ModelSpec, layers: Sequence[Weights], caches: Sequence[CacheSpec] = ()
    ) -> Mapping[str, str]:
        """See `PlainOps.left_plain`."""
        return left_plain(spec, layers)

    @named("recurrence")
    def recur(
        self,
        own: Recurrence,
        w: Weights,
        x: torch.Tensor,
        seen: Seen = EVERY,
        rows: StateRows = NO_ROWS,
    ) -> tuple[torch.Tensor, StateView | None]:
        """See `contract.Ops.recur`."""
        found = fused_sequence(self, own, w, x, seen, rows)
        return found or super().recur(own, w, x, seen, rows)

    @named("recurrence")
    def recur_token(
        self,
        own: Recurrence,
        w: Weights,
        x: torch.Tensor,
        cache: StateView,
        moves: torch.Tensor,
    ) -> tuple[torch.Tensor | Unnormed, StateView]:
        """See `contract.Ops.recur_token`."""
        found = fused_token(self, own, w, x, cache, moves)
        return found or super().recur_token(own, w, x, cache, moves)

    def launch(
        self, launch: Launch, written: Sequence[torch.Tensor] = (), counts: bool = False
    ) -> tuple[Any, Sequence[torch.Tensor]]:
        """See `kernels.Launcher.launch`; in place."""
        how = {"counters": self._zeros(linear.MOST_TILES)} if counts else {}
        return launch.function(*launch.arguments, **launch.options, **how), written

    @named("embed")
    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `PlainOps.embed`; it does not start early, as it reads what sampling wrote."""
        if not reads_tables(spec, w):
            return super().embed(spec, w, ids, positions, token_types)
        table = w["embed.weight"].data
        types = "embed.weight" if spec.embedding.types == "vocab" else "token_types.weight"
        learned = spec.positions.rows > 0
        scale = scale_of(MATHS, spec, table.dtype)
        return embedding.embed(
            ids,
            table,
            positions=positions if learned else None,
            position_weight=w["positions.weight"].data if learned else None,
            position_offset=spec.positions.offset,
            token_types=token_types,
            type_weight=None if token_types is None else w[types].data,
            scale=scale,
        )

    @named("norm")
    def norm(
        self, x: torch.Tensor, norm: NormOf, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `PlainOps.norm`."""
        if norm.spec.kind == "affine":
            return super().norm(x, norm, residual)
        return self._normed(x, norm, residual)

    @named("norm")
    def add(self, x: torch.Tensor, y: torch.Tensor, norm: NormOf | None = None) -> torch.Tensor:
        """See `PlainOps.add`."""
        return super().add(x, y) if norm is None else self._normed(y, norm, x, after=True)

    def _normed(
        self, x: torch.Tensor, norm: NormOf, residual: torch.Tensor | None, after: bool = False
    ) -> torch.Tensor:
        spec, weight, bias, made = norm
        how: dict[str, Any] = {"residual": residual, "after": after}
        how["pdl"] = not made and self.starts_early(x.numel() // x.shape[-1])
        how["unit_offset"] = spec.unit_offset
        if spec.kind == "rms":
            return norms.rms_norm(x, weight, spec.eps, **how)
        return norms.layer_norm(x, weight, bias, spec.eps, **how)

    @named("matmul")
    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        epilogue: Epilogue = ALONE,
        config: LinearConfig | QuantizedConfig | EightBitConfig | None = None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.linear`; `config` None is the one for these shapes."""
        own = served(weight)
        if not own.known:
            return super().linear(x, weight, epilogue)
        if epilogue.norm is not None and not linear.fuses_norm(epilogue.norm):
            x, epilogue = self.norm(x, epilogue.norm), epilogue._replace(norm=None)
        count = x.numel() // x.shape[-1]
        eight = own.in_eight_bits(count, x.element_size())
        if eight is not None:
            return self._eight_bit_product(
                x, eight, epilogue, config or self._measured(x, weight, epilogue)
            )
        if epilogue.norm is not None and (count != 1 or own.rounds):
            x, epilogue = self.norm(x, epilogue.norm), epilogue._replace(norm=None)
        if own.rounds:
            x = SCHEMES.quantize_input(x, weight)
        if not serves_product(x, weight, epilogue):
            matrix = weight.data if own.dense else quantized.values(own.codes, x)
            return self._wide_product(x, matrix, epilogue)
        return self._launched(few_rows_launch(self, x, weight, epilogue, config))

    def read(
        self, x: Unnormed, weight: Weight, epilogue: Epilogue
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `contract.BlockOps.read`; one launch for a single row."""
        if not reads_unnormed(x, weight):
            return super().read(x, weight, epilogue)
        launch = few_rows_launch(
            self, x.y, weight, epilogue._replace(norm=x.norm), before=x.residual
        )
        with span("matmul"):
            return self._launched(launch)

    def _measured(self, x: torch.Tensor, weight: Weight, epilogue: Epilogue) -> Any:
        return self.configurations.find(linear_key(x, weight, epilogue))

    def _eight_bit_product(
        self, x: torch.Tensor, how: EightBit, epilogue: Epilogue, config: Any
    ) -> torch.Tensor:
        """Many rows, by the 8-bit matrix units."""
        return eight_bit.product(
            x,
            how.weight,
            epilogue.bias,
            block=how.block,
            scale=how.scale,
            norm=NormArguments.of(epilogue.norm),
            activation=epilogue.activation,
            gated=epilogue.gated,
            residual=epilogue.residual,
            dtype=torch.float32 if epilogue.wide else None,
            config=config,
            sms=self.sms,
            pdl=self.pdl,
        )

    @named("activation")
    def xielu(self, x: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `contract.BlockOps.xielu`."""
        return activations.xielu(x, *numbers, pdl=self.starts_early(x.numel() // x.shape[-1]))

    @named("router")
    def route(
        self,
        x: torch.Tensor,
        weight: Weight,
        router: Router,
        *,
        bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        norm: NormOf | None = None,
        config: RouteConfig | None = None,
    ) -> Routing:
        """See `contract.BlockOps.route`; `config` None is the one for these shapes."""
        beside: dict[str, Any] = {"bias": bias, "choice_bias": choice_bias}
        launch = route_launch(self, x, weight, router, norm, beside, config)
        if launch is None:
            return super().route(x, weight, router, norm=norm, **beside)
        return Routing(*self._launched(launch))

    def adds_shared(self, x: torch.Tensor, mixture: Experts, w: Weights) -> bool:
        """See `contract.BlockOps.adds_shared`."""
        return shares_launches(mixture, w, x.numel() // x.shape[-1])

    @named("experts")
    def experts(
        self,
        x: torch.Tensor,
        mixture: Experts,
        w: Weights,
        routing: Routing,
        epilogue: Epilogue = ALONE,
        partial: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.experts`."""
        held = self.held_experts(x, mixture, w)
        if held is None:
            return super().experts(x, mixture, w, routing, epilogue, partial)
        return self._mixed(x, held, routing, epilogue, partial)

    def held_experts(self, x: torch.Tensor, mixture: Experts, w: Weights) -> Mixture | None:
        """A layer's experts on this device as the kernels take them for x; None if they do not."""
        own = self.own_experts(mixture.count)
        return experts_of(mixture, w, self.adds_shared(x, mixture, w), own)

    def own_experts(self, count: int) -> torch.Tensor | None:
        """From which to before which of `count` experts are here, int32 [2]; None for all."""
        return None

    def _mixed(
        self,
        x: torch.Tensor,
        mixture: Mixture,
        routing: Routing,
        epilogue: Epilogue,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        """The output of all experts for x, with all that is added."""
        return self.own_part(x, mixture, routing, epilogue, partial)

    def own_part(
        self,
        x: torch.Tensor,
        mixture: Mixture,
        routing: Routing,
        epilogue: Epilogue,
        partial: torch.Tensor | None = None,
        config: ExpertsConfig | None = None,
    ) -> torch.Tensor:
        """The sum of this device's experts over x, with all that is added; float32 if asked."""
        launch = experts_launch(self, x, mixture, routing, epilogue, partial, config)
        grouped = takes_groups(mixture, routing.experts.numel(), x)
        return self._launched(launch, product=grouped_product if grouped else None)

    def partial_product(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """See `contract.BlockOps.partial_product`."""
        return self.linear(*self._share_input(x, weight))

    def matmul(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """See `PlainOps.matmul`; the pieces of a weight are multiplied one by one."""
        if not weight.pieces:
            return super().matmul(x, weight, bias)
        y = torch.cat([self.linear(x, piece) for piece in weight.pieces], -1)
        return y if bias is None else y + bias

    def _wide_product(
        self, x: torch.Tensor, matrix: torch.Tensor, epilogue: Epilogue
    ) -> torch.Tensor:
        """Many rows, by cuBLAS."""
        bias, residual = epilogue.bias, epilogue.residual
        if residual is not None and bias is None and epilogue.activation is None:
            # addmm copies the residual first.
            add = torch.Tensor.addmm_ if epilogue.spend else torch.addmm
            y = add(residual.flatten(0, -2), x.flatten(0, -2), matrix.t()).view(residual.shape)
        else:
            y = F.linear(x, matrix, bias)
            if epilogue.activation is not None:
                act = activations.gated_activation if epilogue.gated else activations.activation
                y = act(y, epilogue.activation, pdl=self.pdl)
            if residual is not None:
                y = residual.add_(y) if epilogue.spend else residual + y
        return y.float() if epilogue.wide else y

    def sample(
        self,
        logits: torch.Tensor,
        state: SlotState,
        position: torch.Tensor,
        features: SamplingFeatures,
    ) -> torch.Tensor:
        """See `PlainOps.sample`."""
        work = self._workspace(*logits.shape)
        return sampling.sample(
            logits, state, position, features, workspace=work, pdl=self.starts_early(len(logits))
        )

    @named("sampling")
    def advance(
        self,
        logits: torch.Tensor,
        state: SlotState,
        features: SamplingFeatures,
        out: torch.Tensor,
        step: torch.Tensor,
    ) -> tuple[SlotState, torch.Tensor, torch.Tensor]:
        """See `PlainOps.advance`."""
        work = self._workspace(*logits.shape)
        sampling.sample_step(
            logits, state, features, out, step, workspace=work, pdl=self.starts_early(len(logits))
        )
        return state, out, step

    def launches_of(self, features: SamplingFeatures) -> Hashable:
        """See `PlainOps.launches_of`; rows without noise or a penalty pass the same kernel."""
        return features.noise and features.filters

    def clear(self) -> None:
        """See `PlainOps.clear`."""
        super().clear()
        self._workspaces.clear()

    def apart(self) -> Self:
        """See `PlainOps.apart`."""
        own = super().apart()
        own._workspaces = {}
        return own

    def _workspace(self, rows: int, vocab: int) -> sampling.Workspace:
        rows = bucket(rows)
        if (rows, vocab) not in self._workspaces:
            self._workspaces[rows, vocab] = sampling.make_workspace(rows, vocab, self.device)
        return self._workspaces[rows, vocab]


def takes_groups(mixture: Mixture, pairs: int, x: torch.Tensor) -> bool:
    """True if torch's products of groups are faster than our tiles for so many pairs."""
    known = x.dtype == torch.bfloat16 and x.device.type == "cuda" and hasattr(F, "grouped_mm")
    if not known or isinstance(mixture.up, quantized.Packed) or mixture.own is not None:
        return False
    (total, _, width), features = mixture.up.shape, mixture.features
    large = pairs >= _GROUPED_PAIRS * total and features >= _GROUPED_FFN
    return large and width % 8 == 0 and features % 8 == 0  # its rows begin at 16 bytes


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of x times the weights [X, out, in] of their groups, which end at `ends`."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def reads_tables(spec: ModelSpec, w: Weights) -> bool:
    """True if a kernel embeds: nothing comes between (OPT-350m), and no table is quantized."""
    tables = (w[n] for n in ("embed.weight", "positions.weight", "token_types.weight") if n in w)
    return spec.embedding.adds_tables and all(table.scheme is None for table in tables)
