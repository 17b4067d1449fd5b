"""Attention by kernels: queries and keys turned in place, of prompts, of a token, to latents."""

from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ....kernels.triton import (
    attention,
    attention_choice,
    decode_attention,
    head_norm,
    latent,
    rotary,
)
from ....model.spec import Attention, ModelSpec
from ....ops import rotary as turning
from ....ops.attention import attention as plain_attention
from ....ops.attention import chunks
from ....ops.cache_kinds import BlockCache, CrossCache, FullCache, LatentBlockCache, LatentCache
from ....ops.caches import CacheView, CrossView
from ....ops.contract import EVERY, CacheRows, LatentQkv, LayerAttention, Seen
from ....ops.plain import last_of
from ...kernels import has_wide_heads, head_arguments, meets_latents, turn_arguments
from ..params import Params
from ..profiling import named, span
from .kernel_base import KernelBase

_SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class KernelAttention(KernelBase):
    """Attention, and what is done to queries, keys and values before it."""

    def makes_keys(self, spec: ModelSpec, tokens: int) -> bool:
        """See `PlainOps.makes_keys`; few queries meet latent vectors themselves."""
        return not all(a.latent is None or meets_latents(a, tokens) for a in spec.attentions)

    def angles(
        self,
        spec: ModelSpec,
        params: Params,
        positions: torch.Tensor,
        last: torch.Tensor | None = None,
    ) -> Any:
        """The positions, with `last` if need be: kernels turn as they read queries and keys."""
        last = last_of(self.maths, spec, positions, last)
        return positions if last is None else (positions, last)

    def _heads(
        self,
        layer: LayerAttention,
        qkv: torch.Tensor,
        angles: Any,
        cache: FullCache | BlockCache | None = None,
        slots: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """See `PlainOps._heads`; in place, by one launch, which fills `slots` from `starts` on."""
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
            starts=starts,
            pdl=self.pdl,
            **turn_arguments(layer, layer.frequencies),
        )
        return [part.unflatten(-1, (-1, a.head_dim)) for part in qkv.split(a.qkv_sizes, dim=-1)]

    def _prepared(
        self, layer: LayerAttention, qkv: torch.Tensor, positions: torch.Tensor
    ) -> LayerAttention:
        """Norm `qkv` where that is a launch of its own; return the layer with the norms left."""
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
        if a.clip is not None and a.clips_normed:
            qkv.clamp_(-a.clip, a.clip)
        return layer._replace(q_norm=None, k_norm=None)

    def _known(self, a: Attention, cache: CacheView | None) -> FullCache | BlockCache | None:
        """The cache, if kernels know its kind and take the layer's heads."""
        if cache is None or has_wide_heads(a.head_dim) or not self.knows(cache):
            return None
        return cast(Any, cache)

    def _latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: torch.Tensor | None,
        lengths: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, CacheView | None]:
        """See `PlainOps._latents`; in place, by one launch."""
        a, rope = layer.spec, layer.spec.rope
        lengths = lengths if starts is None else None  # positions say where tokens of rows go
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
            cache=None if cache is None else cast(Any, cache).shared,
            table=_table_of(cast(Any, cache)),
            slots=slots,
            ends=last if lengths is None else lengths,
            original=rope.original,
            stretch=rope.stretch,
            pdl=self.starts_early(qkv.shared.shape[0] * qkv.shared.shape[1]),
        )
        if a.growth:
            at = positions if lengths is None else lengths[:, None]
            growth = turning.growth(self.maths, at, *a.growth)
            qkv.queries.mul_(growth[..., None].to(qkv.queries.dtype))
        return qkv.queries.unflatten(-1, (a.heads, -1)), qkv.shared, cache

    def _attend_latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: torch.Tensor | None,
        how: dict[str, Any],
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Latent attention of sequences: each head's keys and values are made, of one width.

        With `starts` they are made of all that the rows' slots have.
        """
        q, shared, _ = self._latents(layer, qkv, angles, cache, slots, starts=starts)
        if starts is not None:
            shared, how = cast(Any, cache).read(slots)[0][:, 0], {**how, "starts": starts}
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
        seen: Seen = EVERY,
        *,
        positions: torch.Tensor | None = None,
        cache: CacheView | None = None,
        slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, CacheView | None]:
        """See `PlainOps.attend`; `qkv` is changed in place."""
        if isinstance(qkv, LatentQkv):
            y = self._attend_latents(layer, qkv, angles, cache, slots, seen._asdict())
            return y.flatten(-2), cache
        if layer.places is not None:  # by plain ops: scores gather two products more
            return self._attend_places(layer, qkv, angles, seen), cache
        known = self._known(layer.spec, cache)
        q, k, v = self._heads(layer, qkv, angles, known, slots)
        if cache is not None and known is None:
            assert slots is not None
            with span("append"):
                cache = cache.write(slots, k, v)
            k, v = (part.to(q.dtype) for part in cache.kept(k, v))
        how: dict[str, Any] = {"positions": positions if layer.slopes is not None else None}
        how |= chunks(self.maths, layer.spec, (q.shape[0], q.shape[1]), seen, q)._asdict()
        return self._attention(layer, q, k, v, how).flatten(-2), cache

    @named("attention")
    def attend_rows(
        self,
        layer: LayerAttention,
        qkv: torch.Tensor | LatentQkv,
        angles: Any,
        rows: CacheRows,
    ) -> tuple[torch.Tensor, CacheView]:
        """See `contract.Ops.attend_rows`; `qkv` is changed in place, padding's keys lie behind."""
        cache, slots, starts, lengths, reach = rows
        cache = cache if reach is None else cache.view(None, reach)
        if isinstance(qkv, LatentQkv) and meets_latents(layer.spec, qkv.queries.shape[1]):
            self._latents(layer, qkv, angles, cache, slots, starts=starts)
            return self._meet_latents(layer, qkv.queries, cast(Any, cache), starts, slots), cache
        if isinstance(qkv, LatentQkv):
            y = self._attend_latents(layer, qkv, angles, cache, slots, {}, starts)
            return y.flatten(-2), cache
        known = self._known(layer.spec, cache)
        if known is None:
            return super().attend_rows(layer, qkv, angles, CacheRows(cache, slots, starts, lengths))
        q, _, _ = self._heads(layer, qkv, angles, known, slots, starts)
        how: dict[str, Any] = {"starts": starts, "slots": slots, "table": _table_of(known)}
        k, v, scales = known.k, known.v, _scales_of(known)
        if how["table"] is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            scales = None if scales is None else tuple(x.transpose(1, 2) for x in scales)
        shape = q.shape[0], cache.capacity
        segments = chunks(self.maths, layer.spec, shape, EVERY, q).segments
        how |= {"scales": scales, "segments": segments}
        return self._attention(layer, q, k, v, how).flatten(-2), cache

    def _attention(
        self,
        layer: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        how: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of queries [B, T, H, D]: by torch's fused kernels where they can, else ours.

        They can not where `how` has `starts`, and keys and values are a cache's.
        """
        a, positions = layer.spec, how.pop("positions", None)
        if has_wide_heads(q.shape[-1]):
            assert "starts" not in how
            how |= {"causal": a.causal, "window": a.window, "positions": positions}
            return plain_attention(self.maths, q, k, v, layer.scoring, **how)
        how, scoring = {"causal": a.causal, "window": a.window, **how}, layer.scoring
        backends: tuple[str, ...] = ()
        if scoring.relative is None and "starts" not in how:
            asked = {name: getattr(scoring, name) for name in ("alibi", "softcap", "sinks")}
            backends = attention_choice.sdpa_backends(q, **how, **asked)
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
        how |= scoring._asdict()
        shape = q.element_size(), q.shape[3], q.shape[1], q.shape[0] * a.heads, a.causal
        config = self.configurations.find(attention_choice.tuning_key(*shape))
        how |= {"positions": positions, "config": config}
        return attention.attention(q, k, v, sms=self.sms, pdl=self.pdl, **how)

    @named("decode_attention")
    def attend_token(
        self,
        layer: LayerAttention,
        qkv: torch.Tensor | LatentQkv,
        angles: Any,
        cache: CacheView,
        lengths: torch.Tensor,
        reach: int | None = None,
        config: Any = None,
    ) -> tuple[torch.Tensor, CacheView]:
        """See `PlainOps.attend_token`; `config` None is the one for these shapes."""
        cache = cache if reach is None else cache.view(None, reach)
        if isinstance(qkv, LatentQkv):
            args = layer, qkv, cast(Any, cache), lengths
            return self._attend_token_to_latents(*args, config), cache
        known = self._known(layer.spec, cache)
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
            counters=self._zeros(max(qkv.shape[0] * a.kv_heads, decode_attention.MOST_PARTS)),
            window=a.window,
            chunk=a.chunk,
            config=config,
            sms=self.sms,
            pdl=self.starts_early(len(lengths)),
            **head_arguments(layer, layer.frequencies),
            **layer.scoring._asdict(),
        )
        return y[:, None], cache

    def _attend_token_to_latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        cache: LatentCache | LatentBlockCache,
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
        return self._meet_latents(layer, qkv.queries, cache, lengths, None, config)

    def _meet_latents(
        self,
        layer: LayerAttention,
        queries: torch.Tensor,
        cache: LatentCache | LatentBlockCache,
        starts: torch.Tensor,
        slots: torch.Tensor | None,
        config: latent.LatentConfig | None = None,
    ) -> torch.Tensor:
        """Each head's value, [N, T, H value_dim], of turned queries [N, T, H D] from `starts` on.

        The cache has what heads share of these tokens, too.
        """
        a, rows = layer.spec, queries.shape[0] * queries.shape[1]
        assert a.latent is not None and layer.kv is not None
        y = latent.decode_latents(
            queries,
            cache.shared,
            starts,
            layer.kv.data,
            table=_table_of(cache),
            slots=slots,
            heads=a.heads,
            turning=a.latent.turning,
            scale=a.scale,
            config=config,
            sms=self.sms,
            pdl=self.starts_early(rows),
        )
        return y.unflatten(0, queries.shape[:2])

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
            softcap=a.softcap,
            counters=self._zeros(max(len(q) * a.kv_heads, decode_attention.MOST_PARTS)),
            cross=True,
            config=self._decode_config(cache.k, len(q), a.heads, cache.capacity),
            sms=self.sms,
            pdl=self.starts_early(len(q)),
        )
        return y[:, None]


def _table_of(cache: Any) -> torch.Tensor | None:
    return cache.table if isinstance(cache, BlockCache | LatentBlockCache) else None


def _scales_of(cache: FullCache | BlockCache | None) -> Any:
    """The scales of keys and values; None where these are no codes."""
    return None if cache is None or cache.codes is None else (cache.k_scale, cache.v_scale)
