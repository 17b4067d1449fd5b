"""A token's attention by Pallas' kernels for NVIDIA's GPUs, to caches in slots and in blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.pallas import token_attention
from ....model.spec import Attention, ModelSpec
from ....ops.cache_kinds import BlockCache, FullCache, block_ends
from ....ops.caches import BLOCK, CacheSpec, CacheView
from ....ops.contract import LatentQkv, LayerAttention, Weights
from ....ops.maths import flat
from ..parallel import Split
from .fused import FusedOps


class PallasGpuAttention(FusedOps):
    """The base of ops on a GPU from Hopper on, which has `sms` multiprocessors.

    A token's attention is by instructions that Hopper has alone. With `interpret`, for tests, the
    kernels run on any device.
    """

    def __init__(
        self,
        split: Split | None = None,
        *,
        sms: int = 132,
        hopper: bool = True,
        interpret: Any = None,
    ) -> None:
        super().__init__(split)
        self._sms, self._hopper, self._interpret = sms, hopper, interpret

    def left_plain(
        self, spec: ModelSpec, layers: Sequence[Weights], caches: Sequence[CacheSpec] = ()
    ) -> Mapping[str, str]:
        """See `PlainOps.left_plain`."""
        known = [
            self._hopper and _reads(spec.layers[i].attending, own)
            for (i, part), own in zip(spec.caches if caches else (), caches, strict=False)
            if part == "attention"
        ]
        if all(known):
            return {}
        return {"decode_attention": "for some layers" if any(known) else ""}

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
        if isinstance(qkv, LatentQkv) or not self._folds(layer, cache, qkv.dtype):
            return super().attend_token(layer, qkv, angles, cache, lengths, reach)
        a, scoring = layer.spec, layer.scoring
        q, k, v = self._heads(layer, qkv, angles)
        with self.span("append"):
            own = self._with_token(cache, k[:, 0], v[:, 0], lengths)
        with jax.named_scope("decode_attention"):
            y = token_attention.attend(
                q[:, 0],
                own.k,
                own.v,
                lengths + 1,
                scale=scoring.scale,
                softcap=scoring.softcap,
                sinks=scoring.sinks,
                read=token_attention.Read(a.window, a.chunk),
                table=own.table[: len(lengths)] if isinstance(own, BlockCache) else None,
                reach=reach,
                sms=self._sms,
                interpret=self._interpret,
            )
        return flat(y)[:, None], own

    def _folds(self, layer: LayerAttention, cache: CacheView, dtype: Any) -> bool:
        """True if a kernel has the attention of a layer's token of this dtype to such a cache."""
        scoring = layer.scoring
        if not (self._hopper and isinstance(cache, FullCache | BlockCache)):
            return False
        if cache.codes is not None or scoring.alibi is not None or scoring.relative is not None:
            return False
        return token_attention.serves(cache.k, cache.v, layer.spec.heads, dtype)

    def _with_token(
        self, cache: CacheView, k: jax.Array, v: jax.Array, lengths: jax.Array
    ) -> FullCache | BlockCache:
        """The cache with a key and value [N, K, D] of each slot, in its memory."""
        assert isinstance(cache, FullCache | BlockCache)
        rows = jnp.arange(len(lengths), dtype=jnp.int32)
        places = lengths.clip(0, cache.capacity - 1)
        if isinstance(cache, BlockCache):
            rows, places = block_ends(cache, lengths, k)
            rows = jnp.where(rows < 0, cache.total - 1, rows)  # behind a window: nobody reads it
        held = token_attention.put(
            cache.k, cache.v, (k, v), rows, places, interpret=self._interpret
        )
        return cache._replace(k=held[0], v=held[1])


def _reads(a: Attention, cache: CacheSpec) -> bool:
    """True if a kernel has a token's attention to such a cache, in 16 bits; see `_folds`."""
    if cache.kind not in (FullCache.kind, BlockCache.kind) or cache.codes is not None:
        return False
    if a.alibi is not None or a.distances is not None:
        return False
    k, v = (
        jax.ShapeDtypeStruct((1, cache.kv_heads, BLOCK, n), jnp.bfloat16)
        for n in (cache.key_dim, cache.value_dim)
    )
    return token_attention.serves(k, v, a.heads, jnp.bfloat16)
