"""Attention and sampling, composed of torch primitives; kernels.py has the same by Triton."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ....model.spec import Attention, ModelSpec, Recurrence
from ....model.weights import Weight
from ....ops.caches import CacheView, CrossView, StateView
from ....ops.contract import LatentQkv, LayerAttention, Neighbours, Weights
from ...base import SamplingFeatures
from .. import sampler
from ..params import Params
from ..sampler import SlotState
from . import primitives, recurrences
from .plain_blocks import PlainBlocks


class Chunk(NamedTuple):
    """A later piece of one prompt: its first token's position, and the slot of what came before."""

    start: int
    slot: int


class PlainOps(PlainBlocks):
    """All that a model's steps compute with, on any device; see `contract.Ops`."""

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
            q, k, v = (PlainBlocks.clip(self, part, a.clip) for part in (q, k, v))
        if a.rope:
            cos, sin = angles[a.rope]
            if a.rope.rounded:
                cos, sin = (part.to(q.dtype).float() for part in (cos, sin))
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
            return PlainBlocks.norm(self, q, q_norm), PlainBlocks.norm(self, k, k_norm)
        parts = q.flatten(-2), k.flatten(-2)
        if layer.whole is None:
            a, b = (
                PlainBlocks.norm(self, parts[0], q_norm),
                PlainBlocks.norm(self, parts[1], k_norm),
            )
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
        shared = torch.cat((PlainBlocks.norm(self, vector, layer.latent_norm), key), -1)
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

    def weigh_across(
        self,
        a: Attention,
        q: torch.Tensor,
        kv: torch.Tensor,
        heads: Sequence[int],
        mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """See `contract.Ops.weigh_across`."""
        k, _ = across_heads(a, kv)
        queries = q.unflatten(-1, (-1, a.head_dim))
        found = []
        for head in heads:
            key = k[:, :, head * k.shape[2] // queries.shape[2]]
            scores = (queries[:, :, head] * a.scale).float() @ key.float().transpose(1, 2)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None], -torch.inf)
            found.append(scores.softmax(-1))
        return found

    def attend_kept(self, a: Attention, q: torch.Tensor, cache: CrossView) -> torch.Tensor:
        """See `contract.Ops.attend_kept`."""
        at = torch.arange(cache.capacity, device=q.device)
        visible = at[None] < cache.lengths[:, None].clamp(min=1)
        q = q.unflatten(-1, (-1, a.head_dim))
        how = {"scale": a.scale, "softcap": a.softcap}
        return primitives.cross_attention(q, *cache.read(), visible, **how).flatten(-2)

    def recur(
        self,
        own: Recurrence,
        w: Weights,
        x: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        cache: StateView | None = None,
        slots: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        goes_on: bool = False,
    ) -> tuple[torch.Tensor, StateView | None]:
        """See `contract.Ops.recur`."""
        where = cache, slots, lengths, goes_on
        return recurrences.recur(own, w, x, self.split, mask, segments, *where)

    def recur_token(
        self, own: Recurrence, w: Weights, x: torch.Tensor, cache: StateView, moves: torch.Tensor
    ) -> tuple[torch.Tensor, StateView]:
        """See `contract.Ops.recur_token`."""
        return recurrences.recur_token(own, w, x, self.split, cache, moves)

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
