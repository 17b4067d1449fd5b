"""The ops of the contract by Triton kernels; plain.py has the same ones by plain torch.

Which kernel serves a call follows from its shapes alone: products with few rows read the weights
once, with everything around them fused; those with many go to cuBLAS, between fused neighbours.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ....kernels.triton import activation as activations
from ....kernels.triton import (
    attention,
    attention_choice,
    decode_attention,
    eight_bit,
    embedding,
    experts,
    head_norm,
    latent,
    linear,
    quantized,
    rotary,
    routing,
    sampling,
    thresholds,
)
from ....kernels.triton import norm as norms
from ....kernels.triton.codes import served_codes
from ....kernels.triton.eight_bit import EightBitConfig
from ....kernels.triton.experts import ExpertsConfig, Mixture
from ....kernels.triton.launch import has_pdl
from ....kernels.triton.linear import LinearConfig, NormArguments
from ....kernels.triton.quantized import QuantizedConfig
from ....kernels.triton.routing import RouteConfig
from ....kernels.triton.tuning import Configurations, Key
from ....model.spec import Attention, Experts, ModelSpec, Router
from ....model.weights import Weight
from ...base import SamplingFeatures
from ...caches import CacheView, CrossView
from ...contract import (
    ALONE,
    LatentQkv,
    LayerAttention,
    Neighbours,
    NormOf,
    Routing,
    Weights,
)
from ...mixtures import Launch, experts_launch, experts_of, route_launch, shares_launches
from ...schemes import EightBit, packed, rounds_input
from ...schemes import eight_bit as in_eight_bits
from ...slots import bucket
from ..cache import BlockCache, CrossCache, FullCache, LatentCache
from ..parallel import Split
from ..params import Params
from ..profiling import named
from ..sampler import SlotState
from . import primitives
from .plain import Chunk, PlainOps, chunks_of, last_of

# Of an expert on average, and its ffn: from there torch's products are faster on an H100.
_GROUPED_PAIRS, _GROUPED_FFN = 256, 2048
_SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def unserved(spec: ModelSpec) -> str | None:
    """What of a model is beyond the kernels, for people; None if they serve it."""
    dim = max(layer.attention.head_dim for layer in spec.layers)
    if dim > attention.LARGEST_HEAD:
        return f"a head_dim of {dim} (at most {attention.LARGEST_HEAD})"
    ranks = [a.latent.rank for a in (layer.attention for layer in spec.layers) if a.latent]
    if max(ranks, default=0) > latent.LARGEST_RANK:
        return f"latent vectors of {max(ranks)} elements (at most {latent.LARGEST_RANK})"
    if spec.embed > norms.WIDEST:
        return f"a hidden size of {spec.embed} (at most {norms.WIDEST})"
    if spec.can_generate and spec.vocab > thresholds.MOST_TOKENS:
        return f"a vocabulary of {spec.vocab} (at most {thresholds.MOST_TOKENS})"
    return None


class KernelOps(PlainOps):
    """Fused ops on a CUDA device. One object serves one runner: it holds its scratch memory."""

    cache_kinds = frozenset({FullCache.kind, BlockCache.kind, CrossCache.kind, LatentCache.kind})
    kernels = "Triton"
    reads_codes = (
        f"Triton, fused, up to {quantized.MOST_ROWS} rows; above cuBLAS, with values by Triton, or "
        "Triton in 8 bits where inputs are quantized"
    )
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
            f"Triton, fused, up to {experts.MOST_VECTORS} tokens; above by experts on the matrix "
            "units, prompts of wide ones by torch's grouped_mm; plain where several experts of a "
            "token weigh their inputs"
        ),
        "attention": "torch's cuDNN or flash attention where they can, else Triton",
        "decode_attention": "Triton, split KV, fused with rotary and append",
        "cross_attention": f"Triton, split KV, of one token; {primitives.SDPA} of more",
        "latent_attention": "Triton, split KV over latent vectors; norm, rotary and append before",
        "sampling": "Triton, threefry2x32",
    }

    def __init__(
        self,
        device: torch.device,
        configurations: Configurations | None = None,
        split: Split | None = None,
    ):
        super().__init__(split)
        self.configurations = configurations or Configurations()
        self.sms, capability = 1, 90
        self.pdl = has_pdl(torch.empty(0, device=device))
        if device.type == "cuda":
            self.sms = torch.cuda.get_device_properties(device).multi_processor_count
            major, minor = torch.cuda.get_device_capability(device)
            capability = 10 * major + minor
        self.cache_codes = served_codes(capability)
        self.device = device
        self._counters: dict[int, torch.Tensor] = {}
        self._workspaces: dict[tuple[int, int], sampling.Workspace] = {}

    @property
    def implementations(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What serves each op, and where the kernels' configurations come from."""
        return {**self._IMPLEMENTATIONS, "configurations": str(self.configurations)}

    def left_plain(self, spec: ModelSpec) -> tuple[str, ...]:
        """See `PlainOps.left_plain`."""
        return () if routing.serves_all(spec) else ("router",)

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
        types = "embed.weight" if spec.token_types_from_vocab else "token_types.weight"
        learned = spec.learned_positions > 0
        return embedding.embed(
            ids,
            table,
            positions=positions if learned else None,
            position_weight=w["positions.weight"].data if learned else None,
            position_offset=spec.position_offset,
            token_types=token_types,
            type_weight=None if token_types is None else w[types].data,
            scale=float(torch.tensor(spec.embed_scale, dtype=table.dtype)),  # as HF rounds it
        )

    @named("norm")
    def norm(
        self, x: torch.Tensor, norm: NormOf, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `PlainOps.norm`."""
        return self._normed(x, norm, residual)

    @named("norm")
    def add(self, x: torch.Tensor, y: torch.Tensor, norm: NormOf | None = None) -> torch.Tensor:
        """See `PlainOps.add`."""
        return super().add(x, y) if norm is None else self._normed(y, norm, x, after=True)

    def _normed(
        self, x: torch.Tensor, norm: NormOf, residual: torch.Tensor | None, after: bool = False
    ) -> torch.Tensor:
        spec, weight, bias = norm
        how: dict[str, Any] = {"residual": residual, "after": after}
        how["pdl"] = self.starts_early(x.numel() // x.shape[-1])
        how["unit_offset"] = spec.unit_offset
        if spec.kind == "rms":
            return norms.rms_norm(x, weight, spec.eps, **how)
        return norms.layer_norm(x, weight, bias, spec.eps, **how)

    @named("matmul")
    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        by: Neighbours = ALONE,
        config: LinearConfig | QuantizedConfig | EightBitConfig | None = None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.linear`; `config` None is the one for these shapes."""
        codes = packed(weight)
        if weight.scheme is not None and codes is None:
            return super().linear(x, weight, by)
        if by.norm is not None and not linear.fuses_norm(by.norm):
            x, by = self.norm(x, by.norm), by._replace(norm=None)
        count, rounds = x.numel() // x.shape[-1], rounds_input(weight)
        eight = in_eight_bits(weight, count, x.element_size())
        if eight is not None:
            return self._eight_bit_product(x, eight, by, config or self._measured(x, weight, by))
        if by.norm is not None and (count != 1 or rounds):
            x, by = self.norm(x, by.norm), by._replace(norm=None)
        if rounds:
            x = primitives.SCHEMES.quantize_input(x, weight)
        if not self.is_narrow(x, weight, by):
            matrix = weight.data if codes is None else quantized.values(codes, x)
            return self._wide_product(x, matrix, by)
        if config is None:
            config = self._measured(x, weight, by)
        product: Any = linear.linear if codes is None else quantized.linear
        return product(
            x,
            weight.data if codes is None else codes,
            by.bias,
            norm=NormArguments.of(by.norm),
            activation=by.activation,
            gated=by.gated,
            residual=by.residual,
            dtype=torch.float32 if by.wide else None,
            config=config,
            counters=self._zeros(linear.MOST_TILES),
            sms=self.sms,
            pdl=self.starts_early(count),
        )

    def _measured(self, x: torch.Tensor, weight: Weight, by: Neighbours) -> Any:
        return self.configurations.find(linear_key(x, weight, by))

    def _eight_bit_product(
        self, x: torch.Tensor, how: EightBit, by: Neighbours, config: Any
    ) -> torch.Tensor:
        """Many rows, by the 8-bit matrix units."""
        return eight_bit.product(
            x,
            how.weight,
            by.bias,
            block=how.block,
            scale=how.scale,
            norm=NormArguments.of(by.norm),
            activation=by.activation,
            gated=by.gated,
            residual=by.residual,
            dtype=torch.float32 if by.wide else None,
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
        by: Neighbours = ALONE,
        partial: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.experts`."""
        held = self.held_experts(x, mixture, w)
        if held is None:
            return super().experts(x, mixture, w, routing, by, partial)
        if mixture.weighs_input:
            x, by = self.norm(x, by.norm) if by.norm else x, by._replace(norm=None)
            x = (x * routing.weights).to(x.dtype)
            routing = Routing(routing.experts, torch.ones_like(routing.weights))
        return self._mixed(x, held, routing, by, partial)

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
        by: Neighbours,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        """What all experts make of x, with all that is added."""
        return self.own_part(x, mixture, routing, by, partial)

    def own_part(
        self,
        x: torch.Tensor,
        mixture: Mixture,
        routing: Routing,
        by: Neighbours,
        partial: torch.Tensor | None = None,
        config: ExpertsConfig | None = None,
    ) -> torch.Tensor:
        """What this device's experts make of x, with all that is added; float32 if `by.wide`."""
        launch = experts_launch(self, x, mixture, routing, by, partial, config)
        grouped = takes_groups(mixture, routing.experts.numel(), x)
        return self._launched(launch, product=grouped_product if grouped else None)

    def _launched(self, launch: Launch, **more: Any) -> Any:
        function, arguments, options = launch
        counters = self._zeros(linear.MOST_TILES)
        return function(*arguments, **options, **more, counters=counters, sms=self.sms)

    def is_narrow(self, x: torch.Tensor, weight: Weight, by: Neighbours = ALONE) -> bool:
        """Whether the kernel for few rows serves a product, or cuBLAS."""
        count, (features, width) = x.numel() // x.shape[-1], weight.shape
        if weight.scheme is not None:
            known = packed(weight) is not None
            return known and count <= (1 if x.element_size() == 4 else quantized.MOST_ROWS)
        fused = by.activation is not None or by.residual is not None
        return linear.serves(count, features, width, x.element_size(), fused)

    def matmul(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """See `PlainOps.matmul`; the pieces of a weight are multiplied one by one."""
        if not weight.pieces:
            return super().matmul(x, weight, bias)
        y = torch.cat([self.linear(x, piece) for piece in weight.pieces], -1)
        return y if bias is None else y + bias

    def _wide_product(self, x: torch.Tensor, matrix: torch.Tensor, by: Neighbours) -> torch.Tensor:
        """Many rows, by cuBLAS."""
        bias, residual = by.bias, by.residual
        if residual is not None and bias is None and by.activation is None:
            # addmm copies the residual first.
            add = torch.Tensor.addmm_ if by.spend else torch.addmm
            y = add(residual.flatten(0, -2), x.flatten(0, -2), matrix.t()).view(residual.shape)
        else:
            y = F.linear(x, matrix, bias)
            if by.activation is not None:
                act = activations.gated_activation if by.gated else activations.activation
                y = act(y, by.activation, pdl=self.pdl)
            if residual is not None:
                y = residual.add_(y) if by.spend else residual + y
        return y.float() if by.wide else y

    def angles(
        self,
        spec: ModelSpec,
        params: Params,
        positions: torch.Tensor,
        last: torch.Tensor | None = None,
    ) -> Any:
        """The positions, with `last` if need be: kernels turn as they read queries and keys."""
        last = last_of(spec, positions, last)
        return positions if last is None else (positions, last)

    def _heads(
        self,
        layer: LayerAttention,
        qkv: torch.Tensor,
        angles: Any,
        cache: FullCache | BlockCache | None = None,
        slots: torch.Tensor | None = None,
        start: int = 0,
    ) -> list[torch.Tensor]:
        """See `PlainOps._heads`; in place, by one launch, which fills `slots` from `start` on."""
        positions, last = angles if isinstance(angles, tuple) else (angles, None)
        a, layer = layer.spec, self._prepared(layer, qkv, positions)
        slots = None if cache is None else slots
        rotary.rotary_append(
            qkv,
            positions,
            ends=last,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            cache=None if cache is None else cache[:2],
            scales=_scales_of(cache),
            table=_table_of(cache),
            slots=slots,
            starts=torch.full_like(slots, start) if start and slots is not None else None,
            pdl=self.pdl,
            **_norms_of(layer),
        )
        return [part.unflatten(-1, (-1, a.head_dim)) for part in qkv.split(a.qkv_sizes, dim=-1)]

    def _prepared(
        self, layer: LayerAttention, qkv: torch.Tensor, positions: torch.Tensor
    ) -> LayerAttention:
        """What is left of a layer's norms for the launch that turns heads; `qkv` has the others."""
        a = layer.spec
        if not head_norm.is_apart(a):
            return layer
        if layer.whole is not None:
            assert a.growth is None
            parts = qkv.split(a.qkv_sizes, dim=-1)[:2]
            q, k = (x.unflatten(-1, (-1, a.head_dim)) for x in parts)
            for x, normed in zip((q, k), self._norm_heads(layer, q, k), strict=True):
                x.copy_(normed)
        else:
            head_norm.norm_heads(
                qkv,
                **head_norm.arguments(a, layer.q_norm, layer.k_norm),
                positions=positions,
                pdl=self.starts_early(qkv.shape[0] * qkv.shape[1]),
            )
        if a.clip is not None and a.clip_normed:
            self.clip(qkv, a.clip)
        return layer._replace(q_norm=None, k_norm=None)

    def _known(self, cache: CacheView | None) -> FullCache | BlockCache | None:
        """The cache, if kernels know its kind."""
        return cast(Any, cache) if cache is not None and self.knows(cache) else None

    def _latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: torch.Tensor | None,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PlainOps._latents`; in place, by one launch. Queries and what heads share."""
        a, rope = layer.spec, layer.spec.rope
        assert a.latent is not None and layer.latent_norm is not None and rope is not None
        positions, last = angles if isinstance(angles, tuple) else (angles, None)
        latent.turn_latents(
            *qkv,
            positions if lengths is None else lengths[:, None],
            heads=a.heads,
            rank=a.latent.rank,
            norm=layer.latent_norm.weight,
            eps=layer.latent_norm.spec.eps,
            inv_freq=layer.frequencies,
            scaling=rope.scaling,
            interleaved=rope.interleaved,
            cache=None if cache is None else cast(LatentCache, cache).shared,
            slots=slots,
            ends=last if lengths is None else lengths,
            original=rope.original,
            stretch=rope.stretch,
            pdl=self.starts_early(qkv.shared.shape[0] * qkv.shared.shape[1]),
        )
        return qkv.queries.unflatten(-1, (a.heads, -1)), qkv.shared

    def _attend_latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: torch.Tensor | None,
        chunk: Chunk | None,
        how: dict[str, Any],
    ) -> torch.Tensor:
        """`attend` with latent attention: each head's keys and values are made, of one width.

        Those of the pieces before a chunk are made anew, of what is cached.
        """
        q, shared = self._latents(layer, qkv, angles, cache, slots)
        if chunk is not None and chunk.start:
            held = cast(LatentCache, cache).shared
            shared = held[chunk.slot, None, : chunk.start + q.shape[1]]
        k, v = self._of_latents(layer, shared)
        width, dim = v.shape[-1], layer.spec.head_dim
        q, k, v = (F.pad(x, (0, max(width, dim) - x.shape[-1])) for x in (q, k, v))
        return self._attention(layer, q, k, v, how)[..., :width]

    @named("attention")
    def attend(
        self,
        layer: LayerAttention,
        qkv: torch.Tensor | LatentQkv,
        angles: Any,
        *,
        mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: CacheView | None = None,
        slots: torch.Tensor | None = None,
        chunk: Chunk | None = None,
    ) -> tuple[torch.Tensor, CacheView | None]:
        """See `PlainOps.attend`; `qkv` is changed in place."""
        start = chunk.start if chunk else 0
        how: dict[str, Any] = {"start": start, "mask": mask, "segments": segments}
        if isinstance(qkv, LatentQkv):
            y = self._attend_latents(layer, qkv, angles, cache, slots, chunk, how)
            return y.flatten(-2), cache
        if layer.places is not None:  # by primitives: scores gather two products more
            return self._attend_places(layer, qkv, angles, mask, segments), cache
        known = self._known(cache)
        q, k, v = self._heads(layer, qkv, angles, known, slots, start)
        table = scales = None
        if known is not None and chunk is not None and start:
            k, v, table, scales = known.k, known.v, _table_of(known), _scales_of(known)
            if table is not None:
                table = table[chunk.slot, None]
            else:
                k, v = (part[chunk.slot, None].transpose(1, 2) for part in (k, v))
                if scales is not None:
                    scales = tuple(part[chunk.slot, None].transpose(1, 2) for part in scales)
        elif cache is not None and known is None:
            assert slots is not None and not start, "of kinds that kernels know"
            primitives.write(cache, slots, k, v)
            k, v = (part.to(q.dtype) for part in cache.kept(k, v))
        how["positions"] = positions if layer.slopes is not None else None
        keys = start + q.shape[1]
        how["segments"] = chunks_of(layer.spec, q.shape[0], keys, q.device, mask, segments)
        return self._attention(layer, q, k, v, how, table, scales).flatten(-2), cache

    def _attention(
        self,
        layer: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        how: dict[str, Any],
        table: torch.Tensor | None = None,
        scales: Any = None,
    ) -> torch.Tensor:
        """Attention of queries [B, T, H, D]: by torch's fused kernels where they can, else ours."""
        a, positions = layer.spec, how.pop("positions", None)
        how = {"causal": a.causal, "window": a.window, **how}
        how |= {"alibi": layer.slopes, "softcap": a.softcap, "sinks": layer.sinks}
        backends = () if layer.bias is not None else attention_choice.sdpa_backends(q, **how)
        if backends:
            with sdpa_kernel([_SDPA[name] for name in backends], set_priority=True):
                return F.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    is_causal=a.causal,
                    scale=a.scale,
                    enable_gqa=a.heads != a.kv_heads,
                ).transpose(1, 2)
        how |= {"alibi_scale": layer.alibi_scale, "relative": layer.bias}
        shape = q.element_size(), q.shape[3], q.shape[1], q.shape[0] * a.heads, a.causal
        config = self.configurations.find(attention_choice.tuning_key(*shape))
        how |= {"positions": positions, "config": config, "table": table, "scales": scales}
        return attention.attention(q, k, v, scale=a.scale, sms=self.sms, pdl=self.pdl, **how)

    @named("decode_attention")
    def attend_token(
        self,
        layer: LayerAttention,
        qkv: torch.Tensor | LatentQkv,
        angles: Any,
        cache: CacheView,
        lengths: torch.Tensor,
        config: Any = None,
    ) -> tuple[torch.Tensor, CacheView]:
        """See `PlainOps.attend_token`; `config` None is the one for these shapes."""
        if isinstance(qkv, LatentQkv):
            args = layer, qkv, cast(Any, cache), lengths
            return self._attend_token_to_latents(*args, config), cache
        known = self._known(cache)
        if known is None:
            return super().attend_token(layer, qkv, angles, cache, lengths)
        a, layer = layer.spec, self._prepared(layer, qkv, lengths[:, None])
        if config is None:
            reach = min(known.capacity, a.reach or known.capacity)
            config = self._decode_config(known.k, len(lengths), a.heads, reach)
        y = decode_attention.decode_attention(
            qkv[:, 0],
            known[:2],
            lengths,
            table=_table_of(known),
            scales=_scales_of(known),
            heads=a.heads,
            scale=a.scale,
            counters=self._zeros(max(qkv.shape[0] * a.kv_heads, decode_attention.MOST_PARTS)),
            window=a.window,
            chunk=a.chunk,
            alibi=layer.slopes,
            alibi_scale=layer.alibi_scale,
            softcap=a.softcap,
            sinks=layer.sinks,
            relative=layer.bias,
            config=config,
            sms=self.sms,
            pdl=self.starts_early(len(lengths)),
            **_norms_of(layer),
        )
        return y[:, None], cache

    def _attend_token_to_latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        cache: LatentCache,
        lengths: torch.Tensor,
        config: latent.LatentConfig | None,
    ) -> torch.Tensor:
        """Each head's value of one new token a slot, [N, 1, H value_dim]."""
        a = layer.spec
        assert a.latent is not None and layer.kv is not None
        if config is None:
            shape = a.heads, a.latent.rank, cache.shared.element_size()
            key = latent.tuning_key(len(lengths), cache.capacity, *shape)
            config = self.configurations.find(key)
        self._latents(layer, qkv, None, cache, None, lengths)
        y = latent.decode_latents(
            qkv.queries,
            cache.shared,
            lengths,
            layer.kv.data,
            heads=a.heads,
            turning=a.latent.turning,
            scale=a.scale,
            config=config,
            sms=self.sms,
            pdl=self.starts_early(len(lengths)),
        )
        return y[:, None]

    def _decode_config(self, keys: torch.Tensor, slots: int, heads: int, reach: int) -> Any:
        """The configuration of a token's attention to keys [N, K, S, D], `reach` of them seen."""
        kv_heads, dim = keys.shape[1], keys.shape[3]
        shape = heads // kv_heads, dim, keys.element_size()
        key = decode_attention.tuning_key(slots * kv_heads, reach, *shape)
        return self.configurations.find(key)

    @named("cross_attention")
    def attend_kept(self, a: Attention, q: torch.Tensor, cache: CrossView) -> torch.Tensor:
        """See `contract.Ops.attend_kept`."""
        if not isinstance(cache, CrossCache):
            return super().attend_kept(a, q, cache)
        y = decode_attention.decode_attention(
            q[:, 0],
            cache[:2],
            cache.lengths,
            heads=a.heads,
            scale=a.scale,
            counters=self._zeros(max(len(q) * a.kv_heads, decode_attention.MOST_PARTS)),
            cross=True,
            config=self._decode_config(cache.k, len(q), a.heads, cache.capacity),
            sms=self.sms,
            pdl=self.starts_early(len(q)),
        )
        return y[:, None]

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
        """See `PlainOps.clear`; no graph may be replayed after it."""
        self._counters.clear()
        self._workspaces.clear()

    def starts_early(self, rows: int) -> bool:
        """Whether kernels over so many rows start before the one in front has ended.

        Between a few rows and many it is slower, as programs that wait take room from those that
        work: see docs/measured-and-left-out.md.
        """
        return self.pdl and (rows <= 4 or rows >= 64)

    # Graphs hold the addresses of scratch memory, so that none is ever replaced.
    def _zeros(self, count: int) -> torch.Tensor:
        if count not in self._counters:
            self._counters[count] = torch.zeros(count, dtype=torch.int32, device=self.device)
        return self._counters[count]

    def _workspace(self, rows: int, vocab: int) -> sampling.Workspace:
        rows = bucket(rows)
        if (rows, vocab) not in self._workspaces:
            self._workspaces[rows, vocab] = sampling.make_workspace(rows, vocab, self.device)
        return self._workspaces[rows, vocab]


def takes_groups(mixture: Mixture, pairs: int, x: torch.Tensor) -> bool:
    """Whether torch's products of groups are faster than our tiles for so many pairs."""
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
    """Whether a kernel embeds: no product comes between (OPT-350m's), and no table is quantized."""
    tables = (w[n] for n in ("embed.weight", "positions.weight", "token_types.weight") if n in w)
    return not spec.embed_width and all(table.scheme is None for table in tables)


def linear_key(x: torch.Tensor, weight: Weight, by: Neighbours) -> Key:
    """The tuning key of a product by a kernel."""
    count, (features, width) = x.numel() // x.shape[-1], weight.shape
    features = features // 2 if by.gated else features
    eight = in_eight_bits(weight, count, x.element_size())
    if eight is not None:
        return eight_bit.tuning_key(count, features, eight.weight, eight.block, by.gated)
    codes = packed(weight)
    if codes is not None:
        return quantized.tuning_key(
            count, features, codes, x.element_size(), by.gated, by.norm is not None
        )
    return linear.tuning_key(count, features, width, x.element_size(), by.gated)


def _table_of(cache: FullCache | BlockCache | None) -> torch.Tensor | None:
    return cache.table if isinstance(cache, BlockCache) else None


def _scales_of(cache: FullCache | BlockCache | None) -> Any:
    """Those of keys and values; None where these are no codes."""
    return None if cache is None or cache.codes is None else (cache.k_scale, cache.v_scale)


def _norms_of(layer: LayerAttention) -> dict[str, Any]:
    """How a layer's queries and keys are normed and turned, as the kernels take it."""
    rope, q_norm, k_norm = layer.spec.rope, layer.q_norm, layer.k_norm
    return {
        "inv_freq": layer.frequencies,
        "scaling": rope.scaling if rope else 1.0,
        "interleaved": rope.interleaved if rope else False,
        "q_norm": q_norm.weight if q_norm else None,
        "k_norm": k_norm.weight if k_norm else None,
        "norm_eps": q_norm.spec.eps if q_norm else 0.0,
        "norm_unit_offset": q_norm.spec.unit_offset if q_norm else False,
        "norm_turned": layer.spec.norm_turned,
        "original": rope.original if rope else 0,
        "stretch": rope.stretch if rope else 0.0,
    }
