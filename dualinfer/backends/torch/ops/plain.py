"""The ops of the contract, composed of torch primitives; kernels.py has the same by Triton."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....model.spec import Activation, Attention, Experts, ModelSpec, Router
from ....model.weights import Weight
from ...base import SamplingFeatures
from ...caches import CacheSpec, CacheView, CrossView
from ...contract import (
    ALONE,
    LatentQkv,
    LayerAttention,
    Neighbours,
    NormOf,
    Routing,
    Unnormed,
    Weights,
)
from .. import sampler
from ..parallel import Split
from ..params import Params
from ..profiling import span
from ..sampler import SlotState
from . import mixtures, primitives

if TYPE_CHECKING:
    from ..exchange import Exchange


class Chunk(NamedTuple):
    """A later piece of one prompt: its first token's position, and the slot of what came before."""

    start: int
    slot: int


class PlainOps:
    """Fused ops on any device, as primitives of torch one after another; see `contract.Ops`."""

    cache_kinds: frozenset[str] = frozenset()  # that kernels know
    cache_codes: frozenset[str] = frozenset()  # likewise, where a cache keeps codes
    implementations: Mapping[str, str] = primitives.IMPLEMENTATIONS
    kernels = ""  # whose, for people
    reads_codes: str | None = None  # by kernels: how, for people

    def __init__(self, split: Split | None = None):
        self.split = split  # None: one rank has the whole model
        self.exchange: Exchange | None = None  # peer to peer, of kernels alone

    def clear(self) -> None:
        """Let go of memory on the device."""

    def left_plain(self, spec: ModelSpec) -> tuple[str, ...]:
        """The ops that kernels serve in other models, and not in this one."""
        return ()

    def knows(self, cache: CacheSpec | CacheView) -> bool:
        """Whether kernels write and read a cache; then `attend` takes chunks."""
        return cache.kind in self.cache_kinds and (
            not cache.codes or cache.codes in self.cache_codes
        )

    def span(self, name: str) -> AbstractContextManager[Any]:
        """See `contract.BlockOps.span`: `dualinfer::name`."""
        return span(name)

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.embed`."""
        x = self._tokens(ids, w["embed.weight"])
        if spec.embed_scale != 1:
            x = x * torch.tensor(spec.embed_scale, dtype=x.dtype)
        return self._with_positions(spec, w, x, positions, token_types)

    def embed_given(
        self,
        spec: ModelSpec,
        w: Weights,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        blend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.embed_given`."""
        if spec.patches is not None:
            embeds = primitives.patches(embeds, w["patches.kernel"], w.get("patches.bias"))
            if learned := spec.patches.learned:
                first = w["class_token"]
                if spec.patches.registers:
                    first = torch.cat((first[None], w["registers"]))
                first = first.expand(len(embeds), learned, -1)
                embeds = torch.cat((first, embeds[:, learned:]), dim=1)
        if spec.scales_embeds:
            embeds = embeds * torch.tensor(spec.embed_scale, dtype=embeds.dtype)
        return self._with_positions(spec, w, embeds, positions, token_types, blend)

    def embed_trigrams(
        self,
        spec: ModelSpec,
        w: Weights,
        x: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.embed_trigrams`."""
        if x.ndim == 2:
            x = self._tokens(x, w["embed.weight"])
        x = primitives.trigrams(x, segments)
        by = Neighbours(w["project_in.bias"])
        x = PlainOps.linear(self, x, w["project_in.weight"], by)
        return self._with_positions(spec, w, x, positions, token_types)

    def _with_positions(
        self,
        spec: ModelSpec,
        w: Weights,
        x: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        blend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embedded tokens in the layers' width, plus their types and positions."""
        if spec.normed == "tokens":
            assert spec.embed_norm is not None
            x = PlainOps.norm(self, x, NormOf.named(spec.embed_norm, w, "embed_norm"))
        if spec.projects:
            x = primitives.matmul(x, w["project_in.weight"])
        if token_types is not None:
            if spec.boxes:
                token_types, boxes = self._boxes(w, token_types)
                if spec.page is None:
                    for rows in boxes:
                        x = x + rows
            if spec.token_types_from_vocab:
                x = x + self._tokens(token_types, w["embed.weight"])
            else:
                x = x + primitives.embed(token_types, w["token_types.weight"])
        if blend is not None:
            return x + primitives.blend(blend, w["positions.weight"])[None].to(x.dtype)
        if spec.learned_positions:  # ended slots stay where they are, free ones at 0
            at = positions.clamp(max=spec.learned_positions - 1)
            x = x + primitives.embed(at + spec.position_offset, w["positions.weight"])
        return x

    def _boxes(
        self, w: Weights, token_types: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Types of tokens, and rows for left, upper, right, lower, height and width."""
        boxes = token_types.new_zeros((*token_types.shape, 4))
        if token_types.ndim == 3:
            token_types, boxes = token_types[..., 0], token_types[..., 1:]
        left, upper, right, lower = (boxes[..., i] for i in range(4))
        edges = ("x", left), ("y", upper), ("x", right), ("y", lower)
        sides = ("h", lower - upper), ("w", right - left)
        rows = [primitives.embed(at, w[f"boxes.{x}.weight"]) for x, at in (*edges, *sides)]
        return token_types, rows

    def embed_page(
        self, spec: ModelSpec, w: Weights, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """See `contract.BlockOps.embed_page`."""
        _, boxes = self._boxes(w, token_types)
        by = Neighbours(w["page_project.bias"])
        y = PlainOps.linear(self, self.join(*boxes), w["page_project.weight"], by)
        at = positions.clamp(max=spec.learned_positions - 1)
        return y + primitives.embed(at, w["page_positions.weight"])

    def _tokens(self, ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Rows of the embedding, of which each rank has some."""
        if self.split is None:
            return primitives.embed(ids, weight)
        rows, here = self.split.is_here(ids)
        vectors = primitives.embed(rows, weight)
        return self.split.sum(torch.where(here[..., None], vectors, 0))

    def read_by_layers(
        self, spec: ModelSpec, w: Weights, ids: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """See `contract.BlockOps.read_by_layers`."""
        own = self._tokens(ids, w["layers_embed.weight"])
        each = spec.layers[0].reads
        own = own * torch.tensor(each**0.5, dtype=own.dtype)
        y = self.linear(x, w["layers_project.weight"]) * spec.embed**-0.5
        y, own = (part.unflatten(-1, (-1, each)) for part in (y, own))
        y = self.norm(y, NormOf.named(spec.layers[0].norm, w, "layers_norm"))
        return ((y + own) * 2**-0.5).movedim(-2, 0).contiguous()

    def norm(
        self, x: torch.Tensor, norm: NormOf, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `contract.BlockOps.norm`."""
        if residual is not None:
            x = residual + x
        if norm.spec.kind == "affine":
            return x * norm.weight + norm.bias
        if norm.spec.kind == "rms":
            return primitives.rms_norm(x, norm.weight, norm.spec.eps, norm.spec.unit_offset)
        return primitives.layer_norm(
            x, norm.weight, norm.bias, norm.spec.eps, norm.spec.unit_offset
        )

    def pool(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        segments: torch.Tensor | None = None,
        count: int = 1,
        largest: bool = False,
    ) -> torch.Tensor:
        """See `contract.BlockOps.pool`."""
        return primitives.pool(x, weights, segments, count, largest)

    def repeat(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """See `contract.BlockOps.repeat`."""
        return x.expand(rows, *x.shape[1:])

    def weave(self, heads: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.weave`."""
        return primitives.weave(heads, first, second)

    def unweave(
        self, heads: int, x: torch.Tensor, second: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `contract.BlockOps.unweave`."""
        return primitives.unweave(heads, x, second)

    def parted(self, x: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `contract.BlockOps.parted`."""
        return x[..., :at].contiguous(), x[..., at:].contiguous()

    def join(self, *parts: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.join`."""
        return torch.cat(parts, -1)

    def like(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.like`."""
        return x.to(other.dtype)

    def linear(self, x: torch.Tensor, weight: Weight, by: Neighbours = ALONE) -> torch.Tensor:
        """See `contract.BlockOps.linear`."""
        y = self.matmul(self.norm(x, by.norm) if by.norm else x, weight, by.bias)
        if by.activation is not None:
            y = (primitives.gated_activation if by.gated else primitives.activation)(
                y, by.activation
            )
        if by.residual is not None:
            y = by.residual + y
        return y.float() if by.wide else y

    def read(
        self, x: Unnormed, weight: Weight, by: Neighbours
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `contract.BlockOps.read`."""
        normed = self.norm(x.y, x.norm, x.residual)
        return self.linear(normed, weight, by), normed

    def matmul(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., in] times weight [out, in], plus bias [out]."""
        return primitives.matmul(x, weight, bias)

    def row_product(self, x: torch.Tensor, weight: Weight, by: Neighbours = ALONE) -> torch.Tensor:
        """See `contract.BlockOps.row_product`."""
        if self.split is None:
            return self.linear(x, weight, by)
        x, weight = primitives.SCHEMES.share_input(x, weight, self.split.most)
        y = self.split.sum(self.linear(x, weight))
        if by.bias is not None:
            y = y + by.bias
        return y if by.residual is None else by.residual + y

    def partial_product(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """See `contract.BlockOps.partial_product`."""
        return self.linear(*self._share_input(x, weight))

    def _share_input(self, x: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, Weight]:
        """A rank's columns of a product's input, quantized as all of them, and the weight."""
        if self.split is None:
            return x, weight
        return primitives.SCHEMES.share_input(x, weight, self.split.most)

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
        """See `contract.BlockOps.route`."""
        return mixtures.route(self.norm(x, norm) if norm else x, weight, router, bias, choice_bias)

    def blend(self, routing: Routing, sides: Routing, expert: int) -> Routing:
        """See `contract.BlockOps.blend`."""
        return mixtures.blend(routing, sides.weights, expert)

    def fill(
        self,
        routing: Routing,
        count: int,
        capacity: int,
        mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> Routing:
        """See `contract.BlockOps.fill`."""
        return mixtures.fill(routing, count, capacity, mask, segments)

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
        rows = self.norm(x, by.norm) if by.norm else x
        own = None if self.split is None else self.split.own_experts(mixture.count)
        y = mixtures.experts(rows, mixture, w, routing, self._share_input, own)
        if partial is not None:
            y = y + partial
        if self.split is not None:
            y = self.split.sum(y)
        if (bias := w.get("experts.down.bias")) is not None:
            y = y + mixtures.biases(bias, routing)
        y = y.to(x.dtype)
        return y if by.residual is None else by.residual + y

    def adds_shared(self, x: torch.Tensor, mixture: Experts, w: Weights) -> bool:
        """See `contract.BlockOps.adds_shared`."""
        return False

    def gate(
        self, y: torch.Tensor, x: torch.Tensor, weight: Weight, norm: NormOf | None = None
    ) -> torch.Tensor:
        """See `contract.BlockOps.gate`."""
        gate = self.linear(x, weight, Neighbours(norm=norm, wide=True))
        return (y * gate.sigmoid()).to(y.dtype)

    def add(self, x: torch.Tensor, y: torch.Tensor, norm: NormOf | None = None) -> torch.Tensor:
        """See `contract.BlockOps.add`."""
        return x + (y if norm is None else self.norm(y, norm))

    def norm_values(self, a: Attention, qkv: torch.Tensor, norm: NormOf) -> torch.Tensor:
        """See `contract.BlockOps.norm_values`."""
        values = qkv[..., -a.qkv_sizes[2] :].unflatten(-1, (-1, a.head_dim))
        values.copy_(PlainOps.norm(self, values, norm))
        return qkv

    def with_keys_of(self, a: Attention, q: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.with_keys_of`."""
        queries = a.qkv_sizes[0]
        return torch.cat((q[..., :queries], qkv[..., queries:]), -1)

    def clip(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        """See `contract.BlockOps.clip`."""
        return x.clamp_(-limit, limit)

    def xielu(self, x: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `contract.BlockOps.xielu`."""
        return primitives.xielu(x, *numbers)

    def convolve(
        self,
        x: torch.Tensor,
        kernel: torch.Tensor,
        bias: torch.Tensor,
        stride: int,
        activation: Activation,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.convolve`."""
        y = primitives.convolution(x, kernel, bias, stride, segments)
        return primitives.activation(y, activation)

    def softcap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """See `contract.BlockOps.softcap`."""
        return (torch.tanh(logits.float() / cap) * cap).to(logits.dtype)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.gather_logits`."""
        return logits if self.split is None else self.split.gather_logits(logits)

    def layer_attention(self, spec: ModelSpec, params: Params, index: int) -> LayerAttention:
        """See `contract.Ops.layer_attention`."""
        a = spec.layers[index].attention
        frequencies = params.frequencies[a.rope] if a.rope else None
        slopes = params.slopes[a.alibi] if a.alibi else None
        whole = self.split.whole(spec, index) if self.split else None
        return LayerAttention.named(
            a, params.layers[index], params.outer, frequencies, slopes, whole
        )

    def angles(
        self,
        spec: ModelSpec,
        params: Params,
        positions: torch.Tensor,
        last: torch.Tensor | None = None,
    ) -> Any:
        """See `contract.Ops.angles`."""
        angles: dict[Any, Any] = {}
        last = last_of(spec, positions, last)
        for rope, frequencies in params.frequencies.items():
            if last is not None and rope.original:
                frequencies = primitives.frequencies(rope, frequencies, last)[:, None]
            radians = positions[..., None].float() * frequencies
            angles[rope] = radians.cos() * rope.scaling, radians.sin() * rope.scaling
        for growth in {layer.attention.growth for layer in spec.layers}:
            if growth:
                angles[growth] = primitives.growth(positions, *growth)
        return angles

    def _heads(self, layer: LayerAttention, qkv: torch.Tensor, angles: Any) -> list[torch.Tensor]:
        """Queries, keys and values [B, T, heads, D] of packed ones, normed and rotated."""
        a = layer.spec
        q, k, v = (part.unflatten(-1, (-1, a.head_dim)) for part in qkv.split(a.qkv_sizes, dim=-1))
        if not a.norm_turned:
            q, k = self._norm_heads(layer, q, k)
        if a.clip is not None and a.clip_normed:
            q, k, v = (PlainOps.clip(self, part, a.clip) for part in (q, k, v))
        if a.rope:
            cos, sin = angles[a.rope]
            q, k = (primitives.rotary(x, cos, sin, a.rope.interleaved) for x in (q, k))
        if a.norm_turned:
            q, k = self._norm_heads(layer, q, k)
        if a.growth:
            q = q * angles[a.growth][..., None, None].to(q.dtype)
        return [q, k, v]

    def _norm_heads(
        self, layer: LayerAttention, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [B, T, heads, D], normed where the layer has a norm of them."""
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if q_norm is None or k_norm is None:
            return q, k
        if layer.spec.qk_norm_over != "all":
            return PlainOps.norm(self, q, q_norm), PlainOps.norm(self, k, k_norm)
        parts = q.flatten(-2), k.flatten(-2)
        if layer.whole is None:
            a, b = PlainOps.norm(self, parts[0], q_norm), PlainOps.norm(self, parts[1], k_norm)
            return a.view_as(q), b.view_as(k)
        assert self.split is not None and q_norm.spec.kind == "rms"
        queries, keys, part = layer.whole
        squares = [x.float().square().sum(-1) for x in parts]
        sums = self.split.sum(torch.stack((squares[0], squares[1] * part), -1))
        a, b = (
            primitives.rms_norm(x, n.weight, n.spec.eps, n.spec.unit_offset, total / width)
            for x, n, total, width in zip(
                parts, (q_norm, k_norm), sums.unbind(-1), (queries, keys), strict=True
            )
        )
        return a.view_as(q), b.view_as(k)

    def _latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: torch.Tensor | None,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turned queries [B, T, H, D], and what heads share [B, T, rank + turning], as is cached.

        It goes to the cache, if there is one: to the start of `slots`, or at `lengths` of them all.
        """
        a, latent = layer.spec, layer.spec.latent
        assert latent is not None and layer.latent_norm is not None and a.rope is not None
        cos, sin = angles[a.rope]
        q = qkv.queries.unflatten(-1, (a.heads, a.head_dim))
        q, turning = q.split((a.head_dim - latent.turning, latent.turning), -1)
        vector, key = qkv.shared.split((latent.rank, latent.turning), -1)
        turn = a.rope.interleaved
        q = torch.cat((q, primitives.rotary(turning, cos, sin, turn)), -1)
        if a.growth:
            q = q * angles[a.growth][..., None, None].to(q.dtype)
        key = primitives.rotary(key[:, :, None], cos, sin, turn)[:, :, 0]
        shared = torch.cat((PlainOps.norm(self, vector, layer.latent_norm), key), -1)
        if cache is not None and lengths is not None:
            primitives.append(cache, shared, shared, lengths)
        elif cache is not None:
            assert slots is not None
            primitives.write(cache, slots, shared[:, :, None], shared[:, :, None])
        return q, shared

    def _of_latents(
        self, layer: LayerAttention, shared: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, S, H, D] and values [B, S, H, value_dim] of what heads share [B, S, ...]."""
        a, latent = layer.spec, layer.spec.latent
        assert latent is not None and layer.kv is not None
        vectors, key = shared.split((latent.rank, latent.turning), -1)
        _, keys, values = a.qkv_sizes
        k, v = self.linear(vectors.contiguous(), layer.kv).split((keys, values), -1)
        k, v = k.unflatten(-1, (a.heads, -1)), v.unflatten(-1, (a.heads, -1))
        return torch.cat((k, key[:, :, None].expand(*k.shape[:3], -1)), -1), v

    def _absorbed(self, layer: LayerAttention, q: torch.Tensor) -> torch.Tensor:
        """Queries [N, H, D] as they meet what heads share: [N, H, rank + turning]."""
        latent = layer.spec.latent
        assert latent is not None
        own, turning = q.split((q.shape[-1] - latent.turning, latent.turning), -1)
        keys, _ = matrices_of(layer)
        return torch.cat((primitives.head_product(own, keys.mT), turning), -1)

    def _values_of(self, layer: LayerAttention, y: torch.Tensor) -> torch.Tensor:
        """What heads give, [N, 1, H value_dim], of means [N, H, rank] of latent vectors."""
        _, values = matrices_of(layer)
        return primitives.head_product(y, values).flatten(-2)[:, None]

    def _attend_places(
        self,
        layer: LayerAttention,
        qkv: torch.Tensor,
        angles: Any,
        mask: torch.Tensor | None,
        segments: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention [B, T, H D] of an encoder's layer to whose scores distances add."""
        a, places = layer.spec, layer.places
        assert places is not None and a.places is not None
        q, k, v = self._heads(layer, qkv, angles)
        near, farthest = min(q.shape[1] - 1, a.places.farthest), a.places.farthest
        rows = places.table[:, farthest - near : farthest + near + 1].T
        if places.norm is not None:
            rows = self.norm(rows.contiguous(), places.norm)

        def heads(
            made: tuple[Weight, torch.Tensor | None] | None, part: int
        ) -> torch.Tensor | None:
            """Keys or queries [H, 2 near + 1, D] of distances."""
            if made is None:
                return None
            y = self.linear(rows, made[0], Neighbours(made[1]))
            if places.shared:
                width = a.heads * a.head_dim
                y = y[:, part * width : (part + 1) * width]
            return y.unflatten(-1, (-1, a.head_dim)).transpose(0, 1)

        return primitives.disentangled_attention(
            *(q, k, v, heads(places.keys, 1), heads(places.queries, 0)),
            scale=a.scale,
            mask=mask,
            segments=segments,
        ).flatten(-2)

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
        """See `contract.Ops.attend`; the cache is written in place.

        With `chunk` keys and values go behind what the cache holds, which is attended to as well.
        """
        assert chunk is None, "plain ops take whole prompts"
        a = layer.spec
        if isinstance(qkv, LatentQkv):
            q, shared = self._latents(layer, qkv, angles, cache, slots)
            k, v = self._of_latents(layer, shared)
            how: dict[str, Any] = {"mask": mask, "segments": segments}
            y = primitives.attention(q, k, v, scale=a.scale, causal=a.causal, **how)
            return y.flatten(-2), cache
        if layer.places is not None:
            return self._attend_places(layer, qkv, angles, mask, segments), cache
        q, k, v = self._heads(layer, qkv, angles)
        if cache is not None:
            assert slots is not None
            primitives.write(cache, slots, k, v)
            k, v = cache.kept(k, v)
        segments = chunks_of(a, q.shape[0], q.shape[1], q.device, mask, segments)
        y = primitives.attention(
            q,
            k,
            v,
            scale=a.scale,
            causal=a.causal,
            window=a.window,
            mask=mask,
            segments=segments,
            alibi=layer.slopes,
            alibi_scale=layer.alibi_scale,
            positions=positions,
            softcap=a.softcap,
            sinks=layer.sinks,
            relative=layer.bias,
        )
        return y.flatten(-2), cache

    def attend_token(
        self,
        layer: LayerAttention,
        qkv: torch.Tensor | LatentQkv,
        angles: Any,
        cache: CacheView,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, CacheView]:
        """See `contract.Ops.attend_token`; the cache is written in place."""
        a = layer.spec
        if isinstance(qkv, LatentQkv):
            assert a.latent is not None
            q, _ = self._latents(layer, qkv, angles, cache, None, lengths)
            q = self._absorbed(layer, q[:, 0])
            y = primitives.decode_attention(q, cache, lengths + 1, scale=a.scale)
            return self._values_of(layer, y[..., : a.latent.rank]), cache
        q, k, v = self._heads(layer, qkv, angles)
        primitives.append(cache, k[:, 0], v[:, 0], lengths)
        y = primitives.decode_attention(
            q[:, 0],
            cache,
            lengths + 1,
            scale=a.scale,
            window=a.window,
            chunk=a.chunk,
            alibi=layer.slopes,
            alibi_scale=layer.alibi_scale,
            softcap=a.softcap,
            sinks=layer.sinks,
            relative=layer.bias,
        )
        return y.flatten(-2)[:, None], cache

    def attend_across(
        self,
        a: Attention,
        q: torch.Tensor,
        kv: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        cache: CrossView | None = None,
        slots: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, CrossView | None]:
        """See `contract.Ops.attend_across`."""
        k, v = across_heads(a, kv)
        if cache is not None:
            cache = cache.keep(slots, k, v, lengths)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        q = q.unflatten(-1, (-1, a.head_dim))
        y = primitives.cross_attention(q, k, v, mask, scale=a.scale, softcap=a.softcap)
        return y.flatten(-2), cache

    def attend_kept(self, a: Attention, q: torch.Tensor, cache: CrossView) -> torch.Tensor:
        """See `contract.Ops.attend_kept`."""
        at = torch.arange(cache.capacity, device=q.device)
        visible = at[None] < cache.lengths[:, None].clamp(min=1)
        q = q.unflatten(-1, (-1, a.head_dim))
        how = {"scale": a.scale, "softcap": a.softcap}
        return primitives.cross_attention(q, *cache.read(), visible, **how).flatten(-2)

    def sample(
        self,
        logits: torch.Tensor,
        state: SlotState,
        position: torch.Tensor,
        features: SamplingFeatures,
    ) -> torch.Tensor:
        """See `contract.Ops.sample`."""
        return sampler.sample(logits, state, position, features)

    def advance(
        self,
        logits: torch.Tensor,
        state: SlotState,
        features: SamplingFeatures,
        out: torch.Tensor,
        step: torch.Tensor,
    ) -> tuple[SlotState, torch.Tensor, torch.Tensor]:
        """See `contract.Ops.advance`; all is written in place, as `sampler.advance` says."""
        sampler.advance(logits, state, features, out, step)
        return state, out, step

    def launches_of(self, features: SamplingFeatures) -> Hashable:
        """What of `features` tells launches of `advance` apart: a graph serves one such kind."""
        return features


def matrices_of(layer: LayerAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """What makes each head's key [H, D - turning, rank] and value [H, value_dim, rank]; views."""
    assert layer.kv is not None
    _, keys, values = layer.spec.qkv_sizes
    k, v = layer.kv.data.split((keys, values))
    return k.unflatten(0, (layer.spec.heads, -1)), v.unflatten(0, (layer.spec.heads, -1))


def chunks_of(
    a: Attention,
    batch: int,
    keys: int,
    device: torch.device,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> torch.Tensor | None:
    """The segments [batch, keys] that whole sequences see, where the layer sees chunks of them."""
    if a.chunk is None or keys <= a.chunk:
        return segments
    return primitives.chunks(a.chunk, keys, device, mask, segments).expand(batch, keys)


def across_heads(a: Attention, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, S, K, D] of packed ones [B, S, 2 K D]."""
    k, v = kv.unflatten(-1, (2, -1, a.head_dim)).unbind(2)
    return k, v


def last_of(
    spec: ModelSpec, positions: torch.Tensor, last: torch.Tensor | None
) -> torch.Tensor | None:
    """`last` of `angles` for each row; None where no rotary embedding asks for it."""
    if not spec.turns_by_length:
        return None
    return positions.amax(1) if last is None else last
