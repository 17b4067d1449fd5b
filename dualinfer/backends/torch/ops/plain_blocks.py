"""The ops of the decoder's blocks, composed of torch primitives; kernels.py has them by Triton."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ....model.spec import Activation, Attention, Experts, Gate, ModelSpec, Router, Waves
from ....model.weights import Weight
from ....ops.caches import CacheSpec, CacheView
from ....ops.contract import ALONE, Neighbours, NormOf, Routing, Unnormed, Weights
from ..parallel import Split
from ..profiling import span
from . import heads, mixtures, primitives
from .schemes import SCHEMES

if TYPE_CHECKING:
    from ..exchange import Exchange


class PlainBlocks:
    """Fused ops on any device, primitives of torch one after another; see `contract.BlockOps`."""

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

    def left_plain(self, spec: ModelSpec, layers: Sequence[Weights]) -> Mapping[str, str]:
        """The ops that kernels serve in others, not in this model; see `served`.

        `layers` are the weights of its layers.
        """
        return {}

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
        table = w["embed.weight"]
        x = primitives.embed(ids, table) if spec.own_vocab else self._tokens(ids, table)
        if spec.embed_scale != 1:
            x = x * embed_scale(spec, x.dtype)
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
        if spec.sounds is not None:
            names = [f"conv{i + 1}" for i in range(len(spec.sounds.taps))]
            kernels: Any = [(w[f"{name}.kernel"], w.get(f"{name}.bias")) for name in names]
            if isinstance(spec.sounds, Waves):
                norm = w["sound_norm.weight"], w["sound_norm.bias"]
                embeds = primitives.hear_waves(spec.sounds, embeds, norm, *kernels)
            else:
                embeds = primitives.hear(embeds, *kernels)
        if spec.scales_embeds:
            embeds = embeds * embed_scale(spec, embeds.dtype)
        return self._with_positions(spec, w, embeds, positions, token_types, blend)

    def take_rows(self, table: Weight, ids: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.take_rows`."""
        return primitives.embed(ids, table)

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
        x = PlainBlocks.linear(self, x, w["project_in.weight"], by)
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
            x = PlainBlocks.norm(self, x, NormOf.named(spec.embed_norm, w, "embed_norm"))
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
            return x + primitives.blend(blend, w["positions.weight"]).to(x.dtype)
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
        y = PlainBlocks.linear(self, self.join(*boxes), w["page_project.weight"], by)
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
        own = own * torch.tensor(each**0.5, dtype=own.dtype, device="cpu")
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

    def norm_shared(self, x: torch.Tensor, norm: NormOf, width: int) -> torch.Tensor:
        """See `contract.BlockOps.norm_shared`."""
        if self.split is None:
            return self.norm(x, norm)
        assert norm.spec.kind == "rms"
        squares = self.split.sum(x.float().square().sum(-1)) / width
        return primitives.rms_norm(x, norm.weight, norm.spec.eps, norm.spec.unit_offset, squares)

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

    def stack(self, *parts: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.stack`."""
        return torch.stack(parts)

    def mix_streams(self, coefficients: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.mix_streams`."""
        by = coefficients.unflatten(-1, (len(x), len(x)))
        return x + torch.einsum("btji,ibte->jbte", by, x)

    def correct_streams(
        self, x: torch.Tensor, coefficients: torch.Tensor, change: torch.Tensor
    ) -> torch.Tensor:
        """See `contract.BlockOps.correct_streams`."""
        return x + coefficients.movedim(-1, 0)[..., None] * change

    def add_to_rest(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.add_to_rest`."""
        return torch.cat((x[:1], x[1:] + y))

    def gate_sparsely(
        self, h: torch.Tensor, by: Activation, deviations: float, width: int
    ) -> torch.Tensor:
        """See `contract.BlockOps.gate_sparsely`."""
        gates, ups = h.float().chunk(2, -1)
        sums = torch.stack((gates.sum(-1), gates.square().sum(-1)), -1)
        mean, square = ((sums if self.split is None else self.split.sum(sums)) / width).unbind(-1)
        least = mean + deviations * (square - mean * mean).clamp(min=0).sqrt()
        gates = torch.relu(gates - least[..., None]).to(h.dtype)
        return primitives.activation(gates, by) * ups.to(h.dtype)

    def gate_within(self, h: torch.Tensor, by: Activation, limit: float) -> torch.Tensor:
        """See `contract.BlockOps.gate_within`."""
        return primitives.gate_within(h, by, limit)

    def gate_scaled(self, h: torch.Tensor, by: Activation, scale: float) -> torch.Tensor:
        """See `contract.BlockOps.gate_scaled`."""
        gate, up = h.chunk(2, -1)
        return primitives.activation(gate * scale, by) * up

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
        x, weight = SCHEMES.share_input(x, weight, self.split.most)
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
        return SCHEMES.share_input(x, weight, self.split.most)

    def chosen_queries(
        self, x: torch.Tensor, weight: Weight, routing: Routing, head_dim: int
    ) -> torch.Tensor:
        """See `contract.BlockOps.chosen_queries`."""
        return mixtures.chosen_queries(x, weight.data, routing, head_dim)

    def chosen_outputs(
        self, y: torch.Tensor, weight: Weight, routing: Routing, head_dim: int, by: Neighbours
    ) -> torch.Tensor:
        """See `contract.BlockOps.chosen_outputs`."""
        y = mixtures.chosen_outputs(y, weight.data, routing, head_dim)
        if self.split is not None:
            y = self.split.sum(y)
        if by.bias is not None:
            y = y + by.bias
        return y if by.residual is None else by.residual + y

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
        if own is None and mixture.zeros:
            own = 0, mixture.count
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
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weight: Weight,
        norm: NormOf | None = None,
        by: Gate = "sigmoid",
    ) -> torch.Tensor:
        """See `contract.BlockOps.gate`."""
        gate = self.linear(x, weight, Neighbours(norm=norm, wide=True))
        gate = gate.sigmoid() if by == "sigmoid" else F.softplus(gate)
        if 1 < gate.shape[-1] < y.shape[-1]:
            gate = gate.repeat_interleave(y.shape[-1] // gate.shape[-1], -1)
        return (y * gate).to(y.dtype)

    def times_logistic(self, y: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.times_logistic`."""
        return (y * gates.float().sigmoid()).to(y.dtype)

    def add(self, x: torch.Tensor, y: torch.Tensor, norm: NormOf | None = None) -> torch.Tensor:
        """See `contract.BlockOps.add`."""
        return x + (y if norm is None else self.norm(y, norm))

    def norm_values(self, a: Attention, qkv: torch.Tensor, norm: NormOf) -> torch.Tensor:
        """See `contract.BlockOps.norm_values`."""
        values = qkv[..., -a.qkv_sizes[2] :].unflatten(-1, (-1, a.head_dim))
        values.copy_(PlainBlocks.norm(self, values, norm))
        return qkv

    def with_keys_of(self, a: Attention, q: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.with_keys_of`."""
        queries = a.qkv_sizes[0]
        return torch.cat((q[..., :queries], qkv[..., queries:]), -1)

    def widen_heads(self, a: Attention, qkv: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.widen_heads`."""
        return heads.widen(a, qkv)

    def bias_keys(
        self, a: Attention, qkv: torch.Tensor, numbers: torch.Tensor, w: Weights
    ) -> torch.Tensor:
        """See `contract.BlockOps.bias_keys`."""
        return heads.bias_keys(a, qkv, numbers, w)

    def narrow_heads(self, a: Attention, y: torch.Tensor, w: Weights) -> torch.Tensor:
        """See `contract.BlockOps.narrow_heads`."""
        return heads.narrow(a, y, w)

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

    def convolve_each(
        self, x: torch.Tensor, kernel: torch.Tensor, segments: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `contract.BlockOps.convolve_each`."""
        return primitives.convolve_each(x, kernel, segments)

    def mix_spans(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        taps: int,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contract.BlockOps.mix_spans`."""
        return primitives.mix_spans(x, scores, taps, segments)

    def softcap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """See `contract.BlockOps.softcap`."""
        return (torch.tanh(logits.float() / cap) * cap).to(logits.dtype)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """See `contract.BlockOps.gather_logits`."""
        return logits if self.split is None else self.split.gather_logits(logits)


def embed_scale(spec: ModelSpec, dtype: torch.dtype) -> float:
    """What multiplies embedded tokens, rounded to their `dtype` where HF rounds it."""
    if not spec.rounds_scale:
        return spec.embed_scale
    return torch.tensor(spec.embed_scale, dtype=dtype, device="cpu").item()
