"""Attention by kernels: queries and keys turned in place, of prompts, of a token, to latents."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ....kernels.triton import (
    attention,
    attention_choice,
    decode_attention,
    head_norm,
    latent,
    rotary,
)
from ....kernels.xla.launches import call
from ....model.spec import Attention, ModelSpec, Rope
from ....ops import rotary as turning
from ....ops.attention import attention as plain_attention
from ....ops.attention import chunks
from ....ops.cache_kinds import BlockCache, CrossCache, FullCache, LatentBlockCache, LatentCache
from ....ops.caches import CacheView, CrossView
from ....ops.contract import EVERY, CacheRows, LatentQkv, LayerAttention, Seen
from ....ops.plain import last_of
from ...kernels import has_wide_heads, head_arguments, meets_latents, turn_arguments
from .cudnn import cudnn_serves
from .kernel_base import KernelBase


class KernelAttention(KernelBase):
    """Attention, and what is done to queries, keys and values before it."""

    def makes_keys(self, spec: ModelSpec, tokens: int) -> bool:
        """See `PlainOps.makes_keys`; few queries meet latent vectors themselves."""
        return not all(a.latent is None or meets_latents(a, tokens) for a in spec.attentions)

    def angles(
        self, spec: ModelSpec, params: Any, positions: jax.Array, last: jax.Array | None = None
    ) -> Any:
        """The positions, with `last` if need be: kernels turn as they read queries and keys."""
        last = last_of(self.maths, spec, positions, last)
        return positions if last is None else (positions, last)

    def _prepared(
        self, layer: LayerAttention, qkv: jax.Array, positions: jax.Array
    ) -> tuple[LayerAttention, jax.Array]:
        """Norm qkv where that is its own launch; return the layer with the norms left, and qkv."""
        a = layer.spec
        if not head_norm.is_apart(a):
            return layer, qkv
        if layer.whole is not None:
            assert a.growth is None
            query, key, _ = a.qkv_sizes
            *parts, v = jnp.split(qkv, (query, query + key), axis=-1)
            q, k = (p.reshape(*p.shape[:-1], -1, a.head_dim) for p in parts)
            normed = [x.reshape(*qkv.shape[:-1], -1) for x in self._norm_heads(layer, q, k)]
            qkv = jnp.concatenate([*normed, v], axis=-1)
        else:
            with jax.named_scope("qk_norm"):
                _, (qkv,) = call(
                    head_norm.norm_heads,
                    qkv,
                    **head_norm.arguments(a, layer.q_norm, layer.k_norm),
                    positions=None if a.growth is None else positions,
                    pdl=self.starts_early(qkv.shape[0] * qkv.shape[1]),
                    capability=self.capability,
                    written=(qkv,),
                )
        if a.clip is not None and a.clips_normed:
            qkv = qkv.clip(-a.clip, a.clip)
        return layer._replace(q_norm=None, k_norm=None), qkv

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
        slots: jax.Array | None,
        lengths: jax.Array | None = None,
        starts: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, CacheView | None]:
        """See `PlainOps._latents`; by one launch."""
        lengths = lengths if starts is None else None  # positions say where tokens of rows go
        a, rope, norm = layer.spec, layer.spec.rope, layer.latent_norm
        assert a.latent is not None and norm is not None and rope is not None
        held = [] if cache is None else [cast(Any, cache).shared]
        positions, last = angles if isinstance(angles, tuple) else (angles, None)
        ends = last if lengths is None else lengths
        with jax.named_scope("rotary"):
            _, (queries, shared, *filled) = call(
                latent.turn_latents,
                *qkv,
                positions if lengths is None else lengths[:, None],
                heads=a.heads,
                rank=a.latent.rank,
                norm=norm.weight,
                eps=norm.spec.eps,
                inv_freq=_frequencies(rope),
                scaling=rope.scaling,
                interleaved=rope.interleaved,
                cache=held[0] if held else None,
                table=_table_of(cache),
                slots=slots,
                ends=ends if rope.stretch else None,
                original=rope.original,
                stretch=rope.stretch,
                pdl=self.starts_early(qkv.shared.shape[0] * qkv.shared.shape[1]),
                capability=self.capability,
                written=(*qkv, *held),
            )
        q = queries.reshape(*queries.shape[:-1], a.heads, a.head_dim)
        if a.growth:
            at = positions if lengths is None else lengths[:, None]
            q = q * turning.growth(self.maths, at, *a.growth)[..., None, None].astype(q.dtype)
        return q, shared, cast(Any, cache)._replace(shared=filled[0]) if held else None

    def _attend_latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: jax.Array | None,
        seen: Seen = EVERY,
        starts: jax.Array | None = None,
        reach: int | None = None,
    ) -> tuple[jax.Array, CacheView | None]:
        """Latent attention of sequences: keys and values of each head are made, of one width.

        With `starts` they are made of all that the rows' slots have, up to `reach`.
        """
        a = layer.spec
        q, shared, cache = self._latents(layer, qkv, angles, cache, slots, starts=starts)
        if starts is not None:
            own = cast(Any, cache)
            shared = own.view(None, reach or own.capacity).read(slots)[0][:, 0]
        k, v = self._of_latents(layer, shared)
        width = v.shape[-1]
        most = max(width, a.head_dim)
        q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, most - x.shape[-1])]) for x in (q, k, v))
        batch, tokens = q.shape[:2]
        shape = q.dtype.itemsize, most, tokens, batch * a.heads, a.causal
        with jax.named_scope("attention"):
            y, _ = call(
                attention.attention,
                *(q, k, v),
                scale=a.scale,
                causal=a.causal,
                **seen._asdict(),
                starts=starts,
                sms=self.sms,
                config=self.configurations.find(attention_choice.tuning_key(*shape)),
                pdl=self.starts_early(batch * tokens),
                capability=self.capability,
            )
        return y[..., :width].reshape(batch, tokens, -1), cache

    def attend(
        self,
        layer: LayerAttention,
        qkv: jax.Array | LatentQkv,
        angles: Any,
        seen: Seen = EVERY,
        *,
        positions: jax.Array | None = None,
        cache: CacheView | None = None,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheView | None]:
        """See `PlainOps.attend`; what the cache holds behind the keys and values is left there."""
        if isinstance(qkv, LatentQkv):
            return self._attend_latents(layer, qkv, angles, cache, slots, seen)
        if layer.places is not None:  # by plain ops: scores gather two products more
            return self._attend_places(layer, qkv, angles, seen), cache
        a = layer.spec
        angles, last = angles if isinstance(angles, tuple) else (angles, None)
        layer, qkv = self._prepared(layer, qkv, angles)
        batch, tokens, _ = qkv.shape
        seen = chunks(self.maths, a, (batch, tokens), seen, qkv)
        known = self._known(layer.spec, cache)
        held = _held(known)
        by_cudnn = self._on_gpu and cudnn_serves(layer, qkv, seen)
        turn = self._turning(layer, qkv, known, slots, last)
        how: dict[str, Any] = self._attending(layer, qkv) | seen._asdict()
        how["positions"] = None if layer.slopes is None else positions
        # What XLA reads as well, its attention or a cache of another kind, is memory of its own.
        wide = has_wide_heads(a.head_dim)
        apart = by_cudnn or wide or (cache is not None and known is None)
        with jax.named_scope("rotary"):
            written = (*(() if apart else (qkv,)), *held)
            y, filled = call(
                rotary.rotary_append if apart else _turn_and_attend,
                qkv,
                angles,
                **({"apart": True} | turn if apart else {"turn": turn, "how": how}),
                capability=self.capability,
                written=written,
            )
            if known is not None:
                cache = _with(known, filled[len(filled) - len(held) :])
        if not apart:
            return y.reshape(batch, tokens, -1), cache
        q, k, v = y
        if cache is not None and known is None:
            assert slots is not None
            with jax.named_scope("append"):
                cache = cache.write(slots, k, v)
            k, v = (part.astype(q.dtype) for part in cache.kept(k, v))
        with jax.named_scope("attention"):
            if by_cudnn:
                y = jax.nn.dot_product_attention(
                    q, k, v, scale=a.scale, is_causal=a.causal, implementation="cudnn"
                )
            elif wide:
                how = {"causal": a.causal, "window": a.window, "positions": positions}
                how |= seen._asdict()
                y = plain_attention(self.maths, q, k, v, layer.scoring, **how)
            else:
                how |= {"capability": self.capability}
                y, _ = call(attention.attention, q, k, v, **how)
        return y.reshape(batch, tokens, -1), cache

    def _turning(
        self,
        layer: LayerAttention,
        qkv: jax.Array,
        known: FullCache | BlockCache | None,
        slots: jax.Array | None,
        last: jax.Array | None,
    ) -> dict[str, Any]:
        """The kernels' arguments to turn queries and keys [B, T, ...], and put them in a cache."""
        a, rows = layer.spec, qkv.shape[0] * qkv.shape[1]
        turn: dict[str, Any] = {"heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim}
        turn |= {"ends": last, "cache": None if known is None else known[:2]}
        turn |= {"slots": None if known is None else slots, "table": _table_of(known)}
        turn |= {"scales": tuple(_held(known)[2:]) or None, "pdl": self.starts_early(rows)}
        return turn | turn_arguments(layer, _frequencies(a.rope) if a.rope else None)

    def _attending(self, layer: LayerAttention, qkv: jax.Array) -> dict[str, Any]:
        """Arguments by which the queries of [B, T, ...] attend, but for what they see."""
        a, (batch, tokens, _) = layer.spec, qkv.shape
        shape = qkv.dtype.itemsize, a.head_dim, tokens, batch * a.heads, a.causal
        how: dict[str, Any] = {"causal": a.causal, "window": a.window, "sms": self.sms}
        how |= layer.scoring._asdict()
        how |= {"config": self.configurations.find(attention_choice.tuning_key(*shape))}
        return how | {"pdl": self.starts_early(batch * tokens)}

    def attend_rows(
        self,
        layer: LayerAttention,
        qkv: jax.Array | LatentQkv,
        angles: Any,
        rows: CacheRows,
    ) -> tuple[jax.Array, CacheView]:
        """See `PlainOps.attend_rows`; padding's keys lie behind those of its row."""
        cache, slots, starts, _, reach = rows
        if isinstance(qkv, LatentQkv) and meets_latents(layer.spec, qkv.queries.shape[1]):
            q, _, written = self._latents(layer, qkv, angles, cache, slots, starts=starts)
            y = self._meet_latents(layer, q, cast(Any, written), starts, slots, reach)
            return y, cast(CacheView, written)
        if isinstance(qkv, LatentQkv):
            where: dict[str, Any] = {"starts": starts, "reach": reach}
            y, held = self._attend_latents(layer, qkv, angles, cache, slots, **where)
            return y, cast(CacheView, held)
        known = self._known(layer.spec, cache)
        if known is None:
            return super().attend_rows(layer, qkv, self._turned(layer, angles), rows)
        positions, last = angles if isinstance(angles, tuple) else (angles, None)
        layer, qkv = self._prepared(layer, qkv, positions)
        batch, tokens, _ = qkv.shape
        segments = chunks(self.maths, layer.spec, (batch, known.capacity), EVERY, qkv).segments
        turn = self._turning(layer, qkv, known, slots, last) | {"starts": starts}
        how = self._attending(layer, qkv) | {"segments": segments}
        held = _held(known)
        with jax.named_scope("attention"):
            y, (_, *filled) = call(
                _turn_and_attend,
                qkv,
                positions,
                **{"turn": turn, "how": how},
                capability=self.capability,
                written=(qkv, *held),
            )
        return y.reshape(batch, tokens, -1), _with(known, filled)

    def _turned(self, layer: LayerAttention, angles: Any) -> dict[Any, Any]:
        """The angles of a layer as plain ops take them."""
        rope, growth = layer.spec.rope, layer.spec.growth
        positions, last = angles if isinstance(angles, tuple) else (angles, None)
        turned: dict[Any, Any] = {}
        if rope:
            tables = self.frequencies(None, rope)
            turned[rope] = turning.turns(self.maths, rope, tables, positions, last)
        if growth:
            turned[growth] = turning.growth(self.maths, positions, *growth)
        return turned

    def attend_token(
        self,
        layer: LayerAttention,
        qkv: jax.Array | LatentQkv,
        angles: Any,
        cache: CacheView,
        lengths: jax.Array,
        reach: int | None = None,
    ) -> tuple[jax.Array, CacheView]:
        """See `PlainOps.attend_token`."""
        if isinstance(qkv, LatentQkv):
            return self._attend_token_to_latents(layer, qkv, cache, lengths, reach)
        known = self._known(layer.spec, cache)
        if known is None:
            angles = self._turned(layer, angles)
            return super().attend_token(layer, qkv, angles, cache, lengths, reach)
        a = layer.spec
        layer, qkv = self._prepared(layer, qkv, lengths[:, None])
        slots, (_, kv_heads, _, dim) = len(lengths), known.k.shape
        reach = min(reach or known.capacity, known.capacity)
        shape = a.heads // kv_heads, dim, known.k.dtype.itemsize
        held = _held(known)
        key = decode_attention.tuning_key(slots * kv_heads, min(reach, a.reach or reach), *shape)
        assert self._counters is not None
        with jax.named_scope("decode_attention"):
            y, (*filled, self._counters) = call(
                decode_attention.decode_attention,
                qkv[:, 0],
                known[:2],
                lengths,
                table=_table_of(known),
                scales=tuple(held[2:]) or None,
                heads=a.heads,
                counters=self._counters,
                reach=reach,
                config=self.configurations.find(key),
                sms=self.sms,
                pdl=self.starts_early(len(lengths)),
                capability=self.capability,
                written=(*held, self._counters),
                window=a.window,
                chunk=a.chunk,
                **_head_arguments(layer),
                **layer.scoring._asdict(),
            )
        return y[:, None], _with(known, filled)

    def _attend_token_to_latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        cache: CacheView,
        lengths: jax.Array,
        reach: int | None,
    ) -> tuple[jax.Array, CacheView]:
        """Each head's value of one new token a slot, [N, 1, H value_dim], and the cache."""
        a = layer.spec
        assert a.latent is not None
        q, _, written = self._latents(layer, qkv, None, cache, None, lengths)
        shape = a.heads, a.latent.rank, q.dtype.itemsize
        key = latent.tuning_key(len(lengths), min(reach or cache.capacity, cache.capacity), *shape)
        config, held = self.configurations.find(key), cast(Any, written)
        with jax.named_scope("decode_attention"):
            return self._meet_latents(layer, q, held, lengths, None, reach, config), held

    def _meet_latents(
        self,
        layer: LayerAttention,
        q: jax.Array,
        cache: LatentCache | LatentBlockCache,
        starts: jax.Array,
        slots: jax.Array | None,
        reach: int | None,
        config: latent.LatentConfig | None = None,
    ) -> jax.Array:
        """Each head's value, [N, T, H value_dim], of turned queries [N, T, H, D] from `starts` on.

        The cache has what heads share of these tokens, too.
        """
        a, (count, tokens) = layer.spec, q.shape[:2]
        assert a.latent is not None and layer.kv is not None
        y, _ = call(
            latent.decode_latents,
            q.reshape(count, tokens, -1),
            cache.shared,
            starts,
            layer.kv.data,
            table=_table_of(cache),
            slots=slots,
            heads=a.heads,
            turning=a.latent.turning,
            scale=a.scale,
            reach=min(reach or cache.capacity, cache.capacity),
            config=config,
            sms=self.sms,
            pdl=self.starts_early(count * tokens),
            capability=self.capability,
        )
        return y.reshape(count, tokens, -1)

    def attend_kept(self, a: Attention, q: jax.Array, cache: CrossView) -> jax.Array:
        """See `contract.Ops.attend_kept`."""
        if not isinstance(cache, CrossCache):
            return super().attend_kept(a, q, cache)
        (_, kv_heads, reach, dim), slots = cache.k.shape, len(q)
        shape = a.heads // kv_heads, dim, cache.k.dtype.itemsize
        key = decode_attention.tuning_key(slots * kv_heads, reach, *shape)
        assert self._counters is not None
        with jax.named_scope("cross_attention"):
            y, (self._counters,) = call(
                decode_attention.decode_attention,
                q[:, 0],
                cache[:2],
                cache.lengths[:slots],
                heads=a.heads,
                scale=a.scale,
                softcap=a.softcap,
                counters=self._counters,
                cross=True,
                config=self.configurations.find(key),
                sms=self.sms,
                pdl=self.starts_early(slots),
                capability=self.capability,
                written=(self._counters,),
            )
        return y[:, None]


def _turn_and_attend(
    qkv: Any, positions: Any, *, turn: Mapping[str, Any], how: Mapping[str, Any]
) -> Any:
    """Queries and keys normed and turned in place, the cache filled, and attention of them all.

    Those that are turned with `starts` attend to what the cache has.
    """
    rotary.rotary_append(qkv, positions, **turn)
    heads, kv_heads = turn["heads"], turn["kv_heads"]
    split = qkv.unflatten(-1, (heads + 2 * kv_heads, turn["head_dim"]))
    q, k, v = split.split((heads, kv_heads, kv_heads), dim=2)
    if turn.get("starts") is None:
        return attention.attention(q, k, v, **how)
    held, scales = turn["cache"], turn["scales"]
    if turn["table"] is None:
        held = [x.transpose(1, 2) for x in held]
        scales = None if scales is None else tuple(x.transpose(1, 2) for x in scales)
    where = {name: turn[name] for name in ("table", "slots", "starts")}
    return attention.attention(q, *held, scales=scales, **where, **how)


@lru_cache(maxsize=64)
def _frequencies(rope: Rope) -> np.ndarray:
    """float32 [R/2] or [2, R/2], the same array each time, so that a step holds it once."""
    return np.array(rope.tables, np.float32)


def _table_of(cache: Any) -> jax.Array | None:
    return cache.table if isinstance(cache, BlockCache | LatentBlockCache) else None


def _held(cache: FullCache | BlockCache | None) -> list[jax.Array]:
    """The arrays that kernels change: keys and values and, of codes, their scales."""
    if cache is None:
        return []
    parts = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    return [part for part in parts if part is not None]


def _with(cache: FullCache | BlockCache, held: list[jax.Array]) -> FullCache | BlockCache:
    """The cache with other arrays in the place of `_held`."""
    return cache._replace(**dict(zip(("k", "v", "k_scale", "v_scale"), held, strict=False)))


def _head_arguments(layer: LayerAttention) -> dict[str, Any]:
    rope = layer.spec.rope
    return head_arguments(layer, _frequencies(rope) if rope else None)
