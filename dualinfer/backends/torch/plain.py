"""The decoder's fused ops, composed of plain torch primitives; kernels.py has the same by Triton.

A fused op is what one kernel can do in one reading of the weights: its neighbours (a norm before a
product; bias, activation and residual after it) are its arguments. Shapes by letter: see `spec.py`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...spec import Activation, Attention, ModelSpec, Norm, Rope
from ...weights import Weight
from ..base import SamplingFeatures
from . import ops, sampler
from .cache import LayerCache
from .parallel import Split
from .params import Params, Weights
from .sampler import SlotState

if TYPE_CHECKING:
    from .exchange import Exchange  # needs Triton


class NormOf(NamedTuple):
    """A norm with its weights."""

    spec: Norm
    weight: Weight
    bias: Weight | None

    @classmethod
    def named(cls, spec: Norm, w: Weights, name: str) -> "NormOf":
        """The norm whose weights begin with `name`."""
        return cls(spec, w[f"{name}.weight"], w.get(f"{name}.bias"))


class Attending(NamedTuple):
    """What one layer's attention needs beside its projections."""

    spec: Attention
    q_norm: NormOf | None
    k_norm: NormOf | None
    frequencies: torch.Tensor | None  # of its rotary embedding, radians per position [R/2]
    slopes: torch.Tensor | None  # of its ALiBi, float32 [H]

    @classmethod
    def of(cls, spec: ModelSpec, params: Params, layer: int) -> "Attending":
        """Layer number `layer`."""
        a, w = spec.layers[layer].attention, params.layers[layer]
        q_norm, k_norm = (
            NormOf.named(a.qk_norm, w, name) if a.qk_norm else None for name in ("q_norm", "k_norm")
        )
        frequencies = params.frequencies[a.rope] if a.rope else None
        slopes = params.slopes[a.alibi] if a.alibi else None
        return cls(a, q_norm, k_norm, frequencies, slopes)


class Chunk(NamedTuple):
    """A later piece of one prompt: its first token's position, and the slot of what came before."""

    start: int
    slot: int


class PlainOps:
    """Fused ops on any device, as primitives of torch one after another."""

    takes_chunks = False  # whether `attend` can go on behind what the cache holds already
    implementations: Mapping[str, str] = ops.IMPLEMENTATIONS

    def __init__(self, split: Split | None = None):
        self.split = split  # None: one rank has the whole model
        self.exchange: Exchange | None = None  # peer to peer, of kernels alone

    def clear(self) -> None:
        """Let go of memory on the device."""

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
    ) -> torch.Tensor:
        """Embedded tokens [B, T, E], with positions and token types where the model has them."""
        x = self._tokens(ids, w["embed.weight"])
        if spec.embed_scale != 1:
            x = x * torch.tensor(spec.embed_scale, dtype=x.dtype)
        if spec.embed_width:
            x = ops.matmul(x, w["project_in.weight"])
        if token_types is not None:
            if spec.token_types_from_vocab:
                x = x + self._tokens(token_types, w["embed.weight"])
            else:
                x = x + ops.embed(token_types, w["token_types.weight"])
        if spec.learned_positions:  # ended slots stay where they are, free ones at 0
            at = positions.clamp(max=spec.learned_positions - 1)
            x = x + ops.embed(at + spec.position_offset, w["positions.weight"])
        return x

    def _tokens(self, ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Rows of the embedding, of which each rank has some."""
        if self.split is None:
            return ops.embed(ids, weight)
        rows, here = self.split.is_here(ids)
        found = ops.embed(rows, weight)
        return self.split.sum(torch.where(here[..., None], found, 0))

    def norm(
        self, x: torch.Tensor, norm: NormOf, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [..., E], plus the residual if given, normed over the last axis."""
        if residual is not None:
            x = residual + x
        if norm.spec.kind == "rms":
            return ops.rms_norm(x, norm.weight, norm.spec.eps, norm.spec.unit_offset)
        assert norm.bias is not None
        return ops.layer_norm(x, norm.weight, norm.bias, norm.spec.eps)

    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: Weight | None = None,
        *,
        norm: NormOf | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        spend: bool = False,
        wide: bool = False,
    ) -> torch.Tensor:
        """residual + activation(norm(x) weight^T + bias): x [..., in] to [..., out].

        With `gated` the product holds gate, then up, and gives activation(gate) * up, half as wide.
        With `spend` the residual may become the result. `wide` asks for float32 results.
        """
        y = ops.matmul(self.norm(x, norm) if norm else x, weight, bias)
        if activation is not None:
            y = (ops.gated_activation if gated else ops.activation)(y, activation)
        if residual is not None:
            y = residual + y
        return y.float() if wide else y

    def row_product(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: Weight | None,
        residual: torch.Tensor | None,
        spend: bool = False,
    ) -> torch.Tensor:
        """residual + x weight^T + bias, where each rank has a share of the columns.

        Bias and residual are added once, after the sum over ranks. `spend` as in `linear`.
        """
        if self.split is None:
            return self.linear(x, weight, bias, residual=residual, spend=spend)
        y = self.split.sum(self.linear(x, weight))
        if bias is not None:
            y = y + bias.data
        return y if residual is None else residual + y

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] from each rank's share of the vocabulary."""
        return logits if self.split is None else self.split.gather_logits(logits)

    def angles(self, params: Params, positions: torch.Tensor) -> Any:
        """What `attend` and `attend_token` need of the tokens' positions [B, T], once a pass."""
        angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        for rope, frequencies in params.frequencies.items():
            turned = positions[..., None].float() * frequencies
            angles[rope] = turned.cos() * rope.scaling, turned.sin() * rope.scaling
        return angles

    def _heads(self, layer: Attending, qkv: torch.Tensor, angles: Any) -> list[torch.Tensor]:
        """Queries, keys and values [B, T, heads, D] of packed ones, normed and rotated."""
        a = layer.spec
        q, k, v = (part.unflatten(-1, (-1, a.head_dim)) for part in qkv.split(a.qkv_sizes, dim=-1))
        if layer.q_norm and layer.k_norm:
            q, k = self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)
        if a.rope:
            cos, sin = angles[a.rope]
            q, k = (ops.rotary(x, cos, sin, a.rope.interleaved) for x in (q, k))
        return [q, k, v]

    def attend(
        self,
        layer: Attending,
        qkv: torch.Tensor,
        angles: Any,
        *,
        mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: LayerCache | None = None,
        slots: torch.Tensor | None = None,
        chunk: Chunk | None = None,
    ) -> torch.Tensor:
        """Attention of whole sequences, packed qkv [B, T, (H+2K) D] to [B, T, H D].

        `positions` [B, T] are what ALiBi counts, None for 0 to T-1.
        With `cache`, the keys and values are written to the start of its `slots` [B], or with
        `chunk` behind what is there, which is then attended to as well.
        """
        assert chunk is None, "plain ops take whole prompts"
        a = layer.spec
        q, k, v = self._heads(layer, qkv, angles)
        if cache is not None:
            assert slots is not None
            ops.write(cache, k, v, slots)
        y = ops.attention(
            q,
            k,
            v,
            scale=a.scale,
            causal=a.causal,
            window=a.window,
            mask=mask,
            segments=segments,
            alibi=layer.slopes,
            positions=positions,
            softcap=a.softcap,
        )
        return y.flatten(-2)

    def attend_token(
        self,
        layer: Attending,
        qkv: torch.Tensor,
        angles: Any,
        cache: LayerCache,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one new token a slot, qkv [N, 1, (H+2K) D] to [N, 1, H D].

        Its key and value are written to the cache at position lengths[n].
        """
        a = layer.spec
        q, k, v = self._heads(layer, qkv, angles)
        ops.append(cache, k[:, 0], v[:, 0], lengths)
        y = ops.decode_attention(
            q[:, 0],
            cache,
            lengths + 1,
            scale=a.scale,
            window=a.window,
            alibi=layer.slopes,
            softcap=a.softcap,
        )
        return y.flatten(-2)[:, None]

    def sample(
        self,
        logits: torch.Tensor,
        state: SlotState,
        position: torch.Tensor,
        features: SamplingFeatures,
    ) -> torch.Tensor:
        """The next token [N] from float32 logits [N, V]; see `sampler.sample`."""
        return sampler.sample(logits, state, position, features)

    def advance(
        self,
        logits: torch.Tensor,
        state: SlotState,
        features: SamplingFeatures,
        out: torch.Tensor,
        step: torch.Tensor,
    ) -> None:
        """Choose each slot's next token from float32 logits [N, V]; see `sampler.advance`."""
        sampler.advance(logits, state, features, out, step)
