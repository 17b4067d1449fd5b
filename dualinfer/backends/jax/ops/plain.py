"""Attention and sampling, composed of XLA's primitives; kernels.py has the same by Triton."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....model.spec import Attention, ModelSpec, Recurrence, Rope
from ....model.weights import Weight, leaves_of
from ....ops.caches import CacheView, CrossView, StateView
from ....ops.contract import LatentQkv, LayerAttention, Neighbours, Weights
from ....ops.schemes import rounds_input
from .. import sampler
from ..params import Params
from ..sampler import SlotState
from . import primitives, recurrences
from .plain_blocks import PlainBlocks


def turns(
    rope: Rope, positions: jax.Array, last: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines by which heads turn, [B, T, R/2]; `last` [B]: see `contract.Ops.angles`."""
    frequencies = jnp.array(rope.inv_freq, jnp.float32)
    if rope.original:
        assert last is not None
        frequencies = primitives.frequencies(rope, last)[:, None]
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rope.scaling, jnp.sin(angles) * rope.scaling


class PlainOps(PlainBlocks):
    """All that a model's steps compute with, on any device; see `contract.Ops`."""

    def layer_attention(self, spec: ModelSpec, params: Params, index: int) -> LayerAttention:
        """See `contract.Ops.layer_attention`; the ops make their own frequencies."""
        a = spec.layers[index].attention
        slopes = self.split.slopes(spec, index) if self.split else None
        if slopes is None and a.alibi is not None:
            slopes = jnp.array(a.alibi, jnp.float32)
        whole = self.split.whole(spec, index) if self.split else None
        w = params.layers[index]
        layer = LayerAttention.named(a, w, params.outer, slopes=slopes, whole=whole)
        if self.split is None:
            return layer
        # Else what heads of padding give meets zeros alone.
        weights = [own for leaf in w.values() for own in leaves_of(leaf) if isinstance(own, Weight)]
        if spec.layers[index].sub_norms or any(map(rounds_input, weights)):
            layer = layer._replace(sinks=self.split.sinks(spec, index, layer.sinks))
        return layer

    def angles(
        self,
        spec: ModelSpec,
        params: Params,
        positions: jax.Array,
        last: jax.Array | None = None,
    ) -> Any:
        """See `contract.Ops.angles`."""
        angles: dict[Any, Any] = {}
        last = last_of(spec, positions, last)
        for layer in spec.layers:
            rope, growth = layer.attention.rope, layer.attention.growth
            if rope and rope not in angles:
                angles[rope] = turns(rope, positions, last)
            if growth and growth not in angles:
                angles[growth] = primitives.growth(positions, *growth)
        return angles

    def _heads(self, layer: LayerAttention, qkv: jax.Array, angles: Any) -> list[jax.Array]:
        """Queries, keys and values [B, T, heads, D] of packed ones, normed and rotated."""
        a = layer.spec
        query, key, _ = a.qkv_sizes
        parts = jnp.split(qkv, (query, query + key), axis=-1)
        q, k, v = (p.reshape(*p.shape[:-1], -1, a.head_dim) for p in parts)
        if not a.norm_turned:
            q, k = self._norm_heads(layer, q, k)
        if a.clip is not None and a.clip_normed:
            q, k, v = (PlainBlocks.clip(self, part, a.clip) for part in (q, k, v))
        if a.rope:
            cos, sin = angles[a.rope]
            if a.rope.rounded:
                kind = jnp.finfo(q.dtype)
                cos, sin = (lax.reduce_precision(x, kind.nexp, kind.nmant) for x in (cos, sin))
            q, k = (primitives.rotary(part, cos, sin, a.rope.interleaved) for part in (q, k))
        if a.norm_turned:
            q, k = self._norm_heads(layer, q, k)
        if a.growth:
            q = q * angles[a.growth][..., None, None].astype(q.dtype)
        return [q, k, v]

    def _norm_heads(
        self, layer: LayerAttention, q: jax.Array, k: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Queries and keys [B, T, heads, D], normed where the layer has a norm of them."""
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if q_norm is None or k_norm is None:
            return q, k
        if layer.spec.qk_norm_over != "all":
            return PlainBlocks.norm(self, q, q_norm), PlainBlocks.norm(self, k, k_norm)
        parts = [x.reshape(*x.shape[:-2], -1) for x in (q, k)]
        if layer.whole is None:
            a, b = (
                PlainBlocks.norm(self, parts[0], q_norm),
                PlainBlocks.norm(self, parts[1], k_norm),
            )
            return a.reshape(q.shape), b.reshape(k.shape)
        assert self.split is not None and q_norm.spec.kind == "rms"
        queries, keys, part = layer.whole
        squares = [jnp.sum(jnp.square(x.astype(jnp.float32)), -1) for x in parts]
        sums = self.split.sum(jnp.stack((squares[0], squares[1] * part), -1))
        a, b = (
            primitives.rms_norm(x, n.weight, n.spec.eps, n.spec.unit_offset, sums[..., i] / width)
            for i, (x, n, width) in enumerate(
                zip(parts, (q_norm, k_norm), (queries, keys), strict=True)
            )
        )
        return a.reshape(q.shape), b.reshape(k.shape)

    def _latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: jax.Array | None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, CacheView | None]:
        """Turned queries [B, T, H, D], what heads share [B, T, rank + turning], and the cache.

        That is what is cached: at the start of `slots`, or at `lengths` of them all.
        """
        a, latent = layer.spec, layer.spec.latent
        assert latent is not None and layer.latent_norm is not None and a.rope is not None
        cos, sin = angles[a.rope]
        q = qkv.queries.reshape(*qkv.queries.shape[:-1], a.heads, a.head_dim)
        q, turning = jnp.split(q, (a.head_dim - latent.turning,), axis=-1)
        vector, key = jnp.split(qkv.shared, (latent.rank,), axis=-1)
        turn = a.rope.interleaved
        q = jnp.concatenate((q, primitives.rotary(turning, cos, sin, turn)), axis=-1)
        if a.growth:
            q = q * angles[a.growth][..., None, None].astype(q.dtype)
        key = primitives.rotary(key[:, :, None], cos, sin, turn)[:, :, 0]
        shared = jnp.concatenate((PlainBlocks.norm(self, vector, layer.latent_norm), key), axis=-1)
        if cache is not None and lengths is not None:
            cache = primitives.append(cache, shared, shared, lengths)
        elif cache is not None:
            assert slots is not None
            cache = primitives.write(cache, slots, shared[:, :, None], shared[:, :, None])
        return q, shared, cache

    def _of_latents(self, layer: LayerAttention, shared: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [B, S, H, D] and values [B, S, H, value_dim] of what heads share [B, S, ...]."""
        a, latent = layer.spec, layer.spec.latent
        assert latent is not None and layer.kv is not None
        vectors, key = jnp.split(shared, (latent.rank,), axis=-1)
        k, v = jnp.split(self.linear(vectors, layer.kv), (a.qkv_sizes[1],), axis=-1)
        k, v = (x.reshape(*x.shape[:-1], a.heads, -1) for x in (k, v))
        key = jnp.broadcast_to(key[:, :, None], (*k.shape[:3], latent.turning))
        return jnp.concatenate((k, key), axis=-1), v

    def _absorbed(self, layer: LayerAttention, q: jax.Array) -> jax.Array:
        """Queries [N, H, D] as they meet what heads share: [N, H, rank + turning]."""
        latent = layer.spec.latent
        assert latent is not None
        own, turning = jnp.split(q, (q.shape[-1] - latent.turning,), axis=-1)
        keys, _ = matrices_of(layer)
        own = primitives.head_product(own, keys.swapaxes(-1, -2))
        return jnp.concatenate((own, turning), axis=-1)

    def _values_of(self, layer: LayerAttention, y: jax.Array) -> jax.Array:
        """What heads give, [N, 1, H value_dim], of means [N, H, rank] of latent vectors."""
        _, values = matrices_of(layer)
        return primitives.head_product(y, values).reshape(len(y), 1, -1)

    def _attend_places(
        self,
        layer: LayerAttention,
        qkv: jax.Array,
        angles: Any,
        mask: jax.Array | None,
        segments: jax.Array | None,
    ) -> jax.Array:
        """Attention [B, T, H D] of an encoder's layer to whose scores distances add."""
        a, places = layer.spec, layer.places
        assert places is not None and a.places is not None
        q, k, v = self._heads(layer, qkv, angles)
        near, farthest = min(q.shape[1] - 1, a.places.farthest), a.places.farthest
        rows = places.table[:, farthest - near : farthest + near + 1].T
        if places.norm is not None:
            rows = self.norm(rows, places.norm)

        def heads(made: tuple[Weight, jax.Array | None] | None, part: int) -> jax.Array | None:
            """Keys or queries [H, 2 near + 1, D] of distances."""
            if made is None:
                return None
            y = self.linear(rows, made[0], Neighbours(made[1]))
            if places.shared:
                width = a.heads * a.head_dim
                y = y[:, part * width : (part + 1) * width]
            return y.reshape(len(y), -1, a.head_dim).swapaxes(0, 1)

        return primitives.disentangled_attention(
            *(q, k, v, heads(places.keys, 1), heads(places.queries, 0)),
            scale=a.scale,
            mask=mask,
            segments=segments,
        ).reshape(*q.shape[:2], -1)

    def attend(
        self,
        layer: LayerAttention,
        qkv: jax.Array | LatentQkv,
        angles: Any,
        *,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: CacheView | None = None,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheView | None]:
        """See `contract.Ops.attend`; slots that the cache does not have are left out."""
        if isinstance(qkv, LatentQkv):
            q, shared, cache = self._latents(layer, qkv, angles, cache, slots)
            k, v = self._of_latents(layer, shared)
            how: dict[str, Any] = {"mask": mask, "segments": segments}
            scale, causal = layer.spec.scale, layer.spec.causal
            y = primitives.attention(q, k, v, scale=scale, causal=causal, **how)
            return y.reshape(*y.shape[:2], -1), cache
        if layer.places is not None:
            return self._attend_places(layer, qkv, angles, mask, segments), cache
        q, k, v = self._heads(layer, qkv, angles)
        if cache is not None:
            assert slots is not None
            cache = primitives.write(cache, slots, k, v)
            k, v = cache.kept(k, v)
        segments = chunks_of(layer.spec, q.shape[0], q.shape[1], mask, segments)
        y = primitives.attention(
            q,
            k,
            v,
            causal=layer.spec.causal,
            mask=mask,
            segments=segments,
            positions=positions,
            relative=layer.bias,
            **scoring(layer),
        )
        return y.reshape(*y.shape[:2], -1), cache

    def attend_token(
        self,
        layer: LayerAttention,
        qkv: jax.Array | LatentQkv,
        angles: Any,
        cache: CacheView,
        lengths: jax.Array,
    ) -> tuple[jax.Array, CacheView]:
        """See `contract.Ops.attend_token`."""
        if isinstance(qkv, LatentQkv):
            latent = layer.spec.latent
            assert latent is not None
            q, _, written = self._latents(layer, qkv, angles, cache, None, lengths)
            assert written is not None
            q = self._absorbed(layer, q[:, 0])
            y = primitives.decode_attention(q, written, lengths + 1, scale=layer.spec.scale)
            return self._values_of(layer, y[..., : latent.rank]), written
        q, k, v = self._heads(layer, qkv, angles)
        cache = primitives.append(cache, k[:, 0], v[:, 0], lengths)
        y = primitives.decode_attention(
            q[:, 0],
            cache,
            lengths + 1,
            chunk=layer.spec.chunk,
            relative=layer.bias,
            **scoring(layer),
        )
        return y.reshape(len(lengths), 1, -1), cache

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
        k, v = across_heads(a, kv)
        if cache is not None:
            cache = cache.keep(slots, k, v, lengths)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        heads = q.reshape(*q.shape[:2], -1, a.head_dim)
        y = primitives.cross_attention(heads, k, v, mask, scale=a.scale, softcap=a.softcap)
        return y.reshape(q.shape), cache

    def weigh_across(
        self,
        a: Attention,
        q: jax.Array,
        kv: jax.Array,
        heads: Sequence[int],
        mask: jax.Array | None = None,
    ) -> list[jax.Array]:
        """See `contract.Ops.weigh_across`."""
        k, _ = across_heads(a, kv)
        queries = q.reshape(*q.shape[:2], -1, a.head_dim)
        found = []
        for head in heads:
            key = k[:, :, head * k.shape[2] // queries.shape[2]].astype(jnp.float32)
            query = (queries[:, :, head] * a.scale).astype(jnp.float32)
            scores = jnp.einsum("btd,bsd->bts", query, key, precision=jax.lax.Precision.HIGHEST)
            if mask is not None:
                scores = jnp.where(mask[:, None], scores, -jnp.inf)
            found.append(jax.nn.softmax(scores, axis=-1))
        return found

    def attend_kept(self, a: Attention, q: jax.Array, cache: CrossView) -> jax.Array:
        """See `contract.Ops.attend_kept`."""
        visible = jnp.arange(cache.capacity)[None] < jnp.maximum(cache.lengths, 1)[:, None]
        heads = q.reshape(*q.shape[:2], -1, a.head_dim)
        how = {"scale": a.scale, "softcap": a.softcap}
        y = primitives.cross_attention(heads, *cache.read(), visible, **how)
        return y.reshape(q.shape)

    def recur(
        self,
        own: Recurrence,
        w: Weights,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        cache: StateView | None = None,
        slots: jax.Array | None = None,
        lengths: jax.Array | None = None,
        goes_on: bool = False,
    ) -> tuple[jax.Array, StateView | None]:
        """See `contract.Ops.recur`."""
        where = cache, slots, lengths, goes_on
        return recurrences.recur(own, w, x, self.split, mask, segments, *where)

    def recur_token(
        self, own: Recurrence, w: Weights, x: jax.Array, cache: StateView, moves: jax.Array
    ) -> tuple[jax.Array, StateView]:
        """See `contract.Ops.recur_token`."""
        return recurrences.recur_token(own, w, x, self.split, cache, moves)

    def sample(
        self,
        logits: jax.Array,
        state: SlotState,
        position: jax.Array,
        features: jax.Array | int,
    ) -> jax.Array:
        """See `contract.Ops.sample`; `features` is a mode of `sampler`."""
        return sampler.sample(logits, state, position, features)

    def advance(
        self,
        logits: jax.Array,
        state: SlotState,
        features: jax.Array | int,
        out: jax.Array,
        step: jax.Array,
    ) -> tuple[SlotState, jax.Array, jax.Array]:
        """See `contract.Ops.advance`; `features` as in `sample`, `step` int32 [N] is the row.

        What the state has seen lacks the tokens of `out` until `ended`.
        """
        return *sampler.advance(logits, state, features, out, step[0]), step + 1

    def ended(self, state: SlotState, out: jax.Array) -> SlotState:
        """The state after some steps, which gave the tokens `out` [R, N]."""
        return state._replace(seen=sampler.mark(state.seen, out))


def matrices_of(layer: LayerAttention) -> tuple[jax.Array, jax.Array]:
    """What makes each head's key [H, D - turning, rank] and value [H, value_dim, rank]."""
    assert layer.kv is not None
    keys, values = jnp.split(layer.kv.data, (layer.spec.qkv_sizes[1],))
    heads = layer.spec.heads
    k, v = (x.reshape(heads, -1, x.shape[-1]) for x in (keys, values))
    return k, v


def chunks_of(
    a: Attention, batch: int, keys: int, mask: jax.Array | None, segments: jax.Array | None
) -> jax.Array | None:
    """The segments [batch, keys] that whole sequences see, where the layer sees chunks of them."""
    if a.chunk is None or keys <= a.chunk:
        return segments
    return jnp.broadcast_to(primitives.chunks(a.chunk, keys, mask, segments), (batch, keys))


def across_heads(a: Attention, kv: jax.Array) -> list[jax.Array]:
    """Keys and values [B, S, K, D] of packed ones [B, S, 2 K D]."""
    return [x.reshape(*x.shape[:2], -1, a.head_dim) for x in jnp.split(kv, 2, axis=-1)]


def last_of(spec: ModelSpec, positions: jax.Array, last: jax.Array | None) -> jax.Array | None:
    """`last` of `angles` for each row; None where no rotary embedding asks for it."""
    if not spec.turns_by_length:
        return None
    return positions.max(1) if last is None else last


def scoring(layer: LayerAttention) -> dict[str, Any]:
    """How attention scores the layer's keys: arguments that are facts of the layer."""
    a = layer.spec
    alibi = {"alibi": layer.slopes, "alibi_scale": layer.alibi_scale}
    shared = {"window": a.window, "softcap": a.softcap, "sinks": layer.sinks}
    return {"scale": a.scale, **shared, **alibi}
