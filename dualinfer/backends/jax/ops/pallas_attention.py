"""Attention by Pallas' kernels: of prompts, of rows and of a token, to caches and to latents."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from ....kernels.pallas import append as appending
from ....kernels.pallas import attention as attending
from ....model.spec import Attention
from ....ops import attention, cache_codes
from ....ops.cache_kinds import (
    BlockCache,
    CrossCache,
    FullCache,
    LatentBlockCache,
    LatentCache,
    block_ends,
    changed,
    fitted,
)
from ....ops.caches import CacheSpec, CacheView, CrossView
from ....ops.contract import EVERY, CacheRows, LatentQkv, LayerAttention, Seen
from ....ops.maths import cut, flat, heads
from ....ops.plain import matrices_of
from ..maths import MATHS
from .pallas_base import PallasBase, norm_of


class PallasAttention(PallasBase):
    """Attention, and the append of a token to caches."""

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
        """See `PlainOps.attend`."""
        a, placed, scales = layer.spec, None, None
        if isinstance(qkv, LatentQkv):
            q, shared, cache = self._latents(layer, qkv, angles, cache, slots)
            k, v = self._of_latents(layer, shared)
        elif layer.places is not None:
            q, k, v, placed = self._placed(layer, qkv, angles)
        else:
            q, k, v = self._heads(layer, qkv, angles)
            if cache is not None:
                assert slots is not None
                with self.span("append"):
                    cache = cache.write(slots, k, v)
                k, v, scales = _kept(cache, k, v)
        batch, tokens = q.shape[:2]
        own: Any = _numbers(q, attention.chunks(MATHS, a, (batch, tokens), seen, q))
        first, all_of_it = jnp.zeros(batch, jnp.int32), jnp.full(batch, tokens, jnp.int32)
        between = attending.Seen(first, all_of_it, a.causal, a.window, **own)
        counted = None if layer.slopes is None else positions
        at = jnp.arange(tokens)[None] if counted is None else counted
        table, keys = layer.bias, k.swapaxes(1, 2)
        if table is not None and attending.by_distance(tokens, q.shape[2], table, keys, q.dtype):
            scores = attending.Scores(a.scale, a.softcap, layer.sinks, table=table)
        else:
            scores = _scores(layer, at, at)
        if placed is not None:
            scores = scores._replace(bias=placed * a.scale)
        if scores.slopes is not None and counted is not None:
            scores = scores._replace(queries=counted, keys=counted)
        values = v.swapaxes(1, 2)
        packed = None if placed is not None else self._packed(layer, qkv, angles, keys, values)
        read: Any = q if packed is None else qkv
        with jax.named_scope("attention"):
            y = self._by_blocks(read, keys, values, between, scores, packed=packed, scales=scales)
        return flat(y), cache

    def attend_rows(
        self,
        layer: LayerAttention,
        qkv: jax.Array | LatentQkv,
        angles: Any,
        rows: CacheRows,
    ) -> tuple[jax.Array, CacheView]:
        """See `PlainOps.attend_rows`; padding reads what is behind no row's end."""
        a, (cache, slots, starts, lengths, reach) = layer.spec, rows
        seen = attending.Seen(starts, starts + lengths, True, a.window, a.chunk)
        read = jnp.clip(slots, 0, _slots_of(cache) - 1)
        if isinstance(qkv, LatentQkv):
            q, _, written = self._latents(layer, qkv, angles, cache, slots, lengths, starts)
            with jax.named_scope("attention"):
                y = self._in_latents(layer, q, written, read, seen, reach)
            return y, cast(CacheView, written)
        q, k, v = self._heads(layer, qkv, angles)
        with self.span("append"):
            cache = self._extend(cache, slots, starts, lengths, k, v)
        scores = _scores(layer, _places_of(cache, reach), starts[:, None] + jnp.arange(q.shape[1]))
        own = cast(Any, cache)
        packed = self._packed(layer, qkv, angles, own.k, own.v)
        with jax.named_scope("attention"):
            given = q if packed is None else qkv
            y = self._in_cache(given, cache, read, seen, scores, reach, packed)
        return flat(y), cache

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
        a = layer.spec
        seen = attending.Seen(lengths, lengths + 1, True, a.window, a.chunk)
        slots = jnp.arange(len(lengths), dtype=jnp.int32)
        if isinstance(qkv, LatentQkv):
            q, _, written = self._latents(layer, qkv, angles, cache, None, lengths)
            with jax.named_scope("decode_attention"):
                y = self._in_latents(layer, q, written, slots, seen, reach)
            return y, cast(CacheView, written)
        scores = _scores(layer, _places_of(cache, reach), lengths[:, None])
        q, cache = self._appended(layer, qkv, angles, cache, lengths)
        with jax.named_scope("decode_attention"):
            y = self._in_cache(q, cache, slots, seen, scores, reach)
        return flat(y), cache

    def attend_across(
        self,
        a: Attention,
        q: jax.Array,
        kv: jax.Array,
        mask: jax.Array | None = None,
        *,
        cache: CrossView | None = None,
        slots: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, CrossView | None]:
        """See `contract.Ops.attend_across`."""
        k, v = (heads(part, width=a.head_dim) for part in cut(kv, *[kv.shape[-1] // 2] * 2))
        if cache is not None:
            cache = cache.keep(slots, k, v, lengths)
        q = heads(q, width=a.head_dim)
        batch, count = k.shape[:2]
        bounds = jnp.zeros(batch, jnp.int32), jnp.full(batch, count, jnp.int32)
        numbers = {}
        if mask is not None:
            numbers["queries"] = jnp.zeros(q.shape[:2], jnp.int32)
            numbers["keys"] = jnp.where(mask, 0, -1)
        seen = attending.Seen(*bounds, False, **numbers)
        scores = attending.Scores(a.scale, a.softcap)
        with jax.named_scope("cross_attention"):
            y = self._by_blocks(q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen, scores)
        return flat(y), cache

    def attend_kept(self, a: Attention, q: jax.Array, cache: CrossView) -> jax.Array:
        """See `contract.Ops.attend_kept`."""
        own = cast(CrossCache, cache)
        count = len(q)
        limits = own.lengths[:count]
        seen = attending.Seen(jnp.zeros_like(limits), limits, False)
        scores = attending.Scores(a.scale, a.softcap)
        with jax.named_scope("cross_attention"):
            y = self._by_blocks(heads(q, width=a.head_dim), own.k, own.v, seen, scores)
        return flat(y[..., : a.head_dim])

    def _by_blocks(
        self, q: jax.Array, k: jax.Array, v: jax.Array | None, *how: Any, **more: Any
    ) -> jax.Array:
        """Attention by the kernel."""
        return attending.attend(q, k, v, *how, **more, interpret=self.interpret)

    def _in_cache(
        self,
        q: jax.Array,
        cache: CacheView,
        slots: jax.Array,
        seen: attending.Seen,
        scores: attending.Scores,
        reach: int | None,
        packed: attending.Packed | None = None,
    ) -> jax.Array:
        """Attention of rows q [B, T, H, D], or of packed ones, to what their slots have."""
        own = cast(Any, cache)
        scales = None if own.k_scale is None else (own.k_scale, own.v_scale)
        where: dict[str, Any] = {"slots": slots}
        if isinstance(own, BlockCache):
            where = {"table": jnp.clip(own.table[slots], 0, len(own.k) - 1)}
        where |= {"scales": scales, "reach": reach, "packed": packed}
        return self._by_blocks(q, own.k, own.v, seen, scores, **where)[..., : q.shape[-1]]

    def _in_latents(
        self,
        layer: LayerAttention,
        q: jax.Array,
        cache: CacheView | None,
        slots: jax.Array,
        seen: attending.Seen,
        reach: int | None,
    ) -> jax.Array:
        """Each head's values [B, T, H value_dim] of what the slots of rows q [B, T, H, D] have.

        Of few tokens queries meet the latent vectors themselves; of many the kernel makes keys and
        values of these.
        """
        own, a, (batch, tokens) = cast(Any, cache), layer.spec, q.shape[:2]
        latent, scores = a.latent, attending.Scores(a.scale, a.softcap)
        assert latent is not None
        how: dict[str, Any] = {"slots": slots, "reach": reach}
        if isinstance(own, LatentBlockCache):
            how = {"table": jnp.clip(own.table[slots], 0, own.total - 1), "reach": reach}
        keys, values = matrices_of(layer)
        if attending.makes_heads(tokens, a.head_dim, values.shape[1], latent.rank, latent.turning):
            how["made"] = attending.Made(keys, values)
            return flat(self._by_blocks(q, own.shared[:, None], None, seen, scores, **how))
        q = self._absorbed(layer, q.reshape(batch * tokens, *q.shape[2:]))
        q, how["values"] = q.reshape(batch, tokens, *q.shape[1:]), latent.rank
        y = self._by_blocks(q, own.shared[:, None], None, seen, scores, **how)
        return self._values_of(layer, y.reshape(-1, *y.shape[2:])).reshape(batch, tokens, -1)

    def _packed(
        self, layer: LayerAttention, qkv: Any, angles: Any, keys: jax.Array, values: jax.Array
    ) -> attending.Packed | None:
        """How the kernel norms and turns the queries of packed rows; None if it does not."""
        a, norm = layer.spec, _head_norm(layer)
        if isinstance(qkv, LatentQkv) or norm is None or a.clips_normed or a.growth:
            return None
        known = attending.takes_packed(qkv.shape[1], a.heads, keys, values, qkv.dtype)
        if not known or keys.shape[3] != a.head_dim:
            return None
        own = norm if isinstance(norm, appending.HeadNorm) else None
        return attending.Packed(a.heads, _turn(a, angles, a.head_dim, qkv.dtype), own)

    def _appended(
        self,
        layer: LayerAttention,
        qkv: jax.Array,
        angles: Any,
        cache: CacheView,
        lengths: jax.Array,
    ) -> tuple[jax.Array, CacheView]:
        """Turned queries [N, 1, H, D] of one token a slot, and the cache with its key, value."""
        a, own = layer.spec, cast(Any, cache)
        norm = _head_norm(layer)
        fits = isinstance(own, FullCache) and own.codes is None and own.k.dtype == qkv.dtype
        more = own.k.shape[-1] - a.head_dim
        fits = fits and not (more and norm)
        if a.clips_normed or norm is None or not fits or not appending.serves(own.k):
            q, k, v = self._heads(layer, qkv, angles)
            with self.span("append"):
                return q, self._append(cache, k[:, 0], v[:, 0], lengths)
        turn = _turn(a, angles, a.head_dim + more, qkv.dtype)
        if turn is not None:
            cos, sin = (jnp.broadcast_to(x[:, 0], (len(qkv), x.shape[-1])) for x in turn[:2])
            turn = turn._replace(cos=cos, sin=sin)
        with jax.named_scope("rotary"):
            q, k, v = appending.append(
                jnp.pad(qkv.reshape(len(qkv), -1, a.head_dim), ((0, 0), (0, 0), (0, more))),
                own.k,
                own.v,
                jnp.clip(lengths, 0, own.capacity - 1),
                heads=a.heads,
                turn=turn,
                norm=norm if isinstance(norm, appending.HeadNorm) else None,
                interpret=self.interpret,
            )
        q = q[:, None, :, : a.head_dim]
        if a.growth:
            q = q * angles[a.growth][..., None, None].astype(q.dtype)
        return q, own._replace(k=k, v=v)

    def _append(
        self, cache: CacheView, k: jax.Array, v: jax.Array, lengths: jax.Array
    ) -> CacheView:
        """See `PlainOps._append`; a kernel for each array, which is changed in its place."""
        own = cast(Any, cache)
        in_table, latent = hasattr(own, "table"), hasattr(own, "shared")
        first = own.shared[:, None] if latent else own.k
        if not appending.serves(first):
            return super()._append(cache, k, v, lengths)
        places = lengths.clip(0, own.capacity - 1)
        rows = jnp.arange(len(lengths), dtype=jnp.int32)
        if in_table:
            rows, places = block_ends(own, lengths, k)
            rows = jnp.where(rows < 0, own.total - 1, rows)  # behind a window: where nobody reads

        def put(held: jax.Array, new: jax.Array) -> jax.Array:
            return appending.put(held, new, rows, places, interpret=self.interpret)

        if latent:
            new = fitted(MATHS, k, own.shared)
            return own._replace(shared=put(first, new)[:, 0])
        return changed(own, put, k, v)

    def _extend(
        self,
        cache: CacheView,
        slots: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> CacheView:
        """See `PlainOps._extend`; a kernel for each array, which is changed in its place."""
        own = cast(Any, cache)
        latent = hasattr(own, "shared")
        first = own.shared[:, None] if latent else own.k
        if not appending.serves(first):
            return super()._extend(cache, slots, starts, lengths, k, v)

        rows = appending.Rows(slots, starts, lengths, getattr(own, "table", None))

        def put(held: jax.Array, new: jax.Array) -> jax.Array:
            return appending.put_rows(held, new, rows, interpret=self.interpret)

        if latent:
            return own._replace(shared=put(first, fitted(MATHS, k, own.shared))[:, 0])
        return changed(own, put, k, v)


def _scores(layer: LayerAttention, keys: jax.Array, queries: jax.Array) -> attending.Scores:
    """The scores of a layer, of int positions [B or 1, S] of keys and [B or 1, T] of queries."""
    a = layer.spec
    scores = attending.Scores(a.scale, a.softcap, layer.sinks)
    if layer.bias is None and not a.alibi_rounded:
        return scores._replace(slopes=layer.slopes)
    with jax.named_scope("attention"):
        bias = attention.bias_of(MATHS, layer.scoring, keys, queries)
        return scores._replace(bias=bias.astype(jnp.float32))


def _places_of(cache: CacheView, reach: int | None) -> jax.Array:
    """The positions [1, S] of the keys that are read of a cache."""
    return jnp.arange(min(reach or cache.capacity, cache.capacity))[None]


def _kept(
    cache: CacheView, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, list[jax.Array] | None]:
    """k and v [B, T, K, D] as the cache keeps them, and the scales [B, K, T] of codes."""
    if cache.codes is None:
        return *cache.kept(k, v), None
    pairs = [cache_codes.encode(MATHS, x, cache.codes) for x in (k, v)]
    (k, _), (v, _) = pairs
    return k, v, [scale.swapaxes(1, 2) for _, scale in pairs]


def _numbers(q: jax.Array, seen: Seen) -> dict[str, jax.Array]:
    """By which numbers queries see keys: real ones of their segment; none where all are seen."""
    mask, segments = seen
    if mask is None and segments is None:
        return {}
    own = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else segments.astype(jnp.int32)
    return {"queries": own, "keys": own if mask is None else jnp.where(mask, own, -1)}


def _slots_of(cache: CacheView) -> int:
    own = cast(Any, cache)
    if isinstance(own, BlockCache | LatentBlockCache):
        return len(own.table)
    return len(own.shared if isinstance(own, LatentCache) else own.k)


def _turn(a: Attention, angles: Any, dim: int, dtype: Any) -> appending.Turn | None:
    """The turn [B or 1, T, D] of heads that lie in so many elements; None if they do not turn."""
    if not a.rope:
        return None
    cos, sin = angles[a.rope]
    if a.rope.rounded:
        cos, sin = (MATHS.rounded(x, dtype) for x in (cos, sin))
    turning, style = 2 * cos.shape[-1], a.rope.interleaved
    wide = appending.widened(cos, sin, dim, style)
    return appending.Turn(*wide, appending.pairs(dim, turning, style))


def _head_norm(layer: LayerAttention) -> appending.HeadNorm | bool | None:
    """The norm of a layer's heads as the kernel takes it; False without one, None if it is none."""
    if layer.q_norm is None or layer.k_norm is None:
        return False
    q, k = norm_of(layer.q_norm), norm_of(layer.k_norm)
    if layer.spec.qk_norm_over == "all" or q is None or k is None:
        return None
    return appending.HeadNorm(q[0], q[1], k[1], layer.spec.norm_turned)


def appends(a: Attention, cache: CacheSpec) -> bool:
    """True if one kernel turns a layer's token and puts it in the cache; see `_appended`."""
    known = cache.kind == FullCache.kind and not cache.codes and not a.clips_normed
    normed = a.qk_norm_over in ("head", "turned") and cache.key_dim == a.head_dim
    return known and (a.qk_norm is None or normed)
