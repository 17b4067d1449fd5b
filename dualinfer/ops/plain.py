"""The ops of the contract over Maths: what each means, on any framework and any device.

A backend's plain ops are these with its own Maths; its ops by kernels take their place one by one.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..model.spec import Attention, Experts, ModelSpec, Recurrence, Rope, Router
from ..model.weights import Weight
from . import attention, embedding, feed_forward, mixtures, recurrences, rotary
from .caches import CacheSpec, CacheView, CrossView, StateView
from .contract import (
    ALONE,
    EVERY,
    NO_ROWS,
    Array,
    CacheRows,
    Epilogue,
    LatentQkv,
    LayerAttention,
    NormOf,
    Routing,
    Seen,
    StateRows,
    Unnormed,
    Weights,
)
from .maths import KeyScoring, Maths, cut, flat, heads
from .norms import plain_norm, rms_norm
from .projection import added
from .schemes import BlockArithmetic


class PlainBlocks:
    """The ops of the decoder's blocks; see `contract.BlockOps`."""

    maths: Maths
    schemes: BlockArithmetic
    implementations: Mapping[str, str]
    cache_kinds: frozenset[str] = frozenset()  # that kernels know
    cache_codes: frozenset[str] = frozenset()  # likewise, where a cache keeps codes
    kernels = ""  # whose, for people

    def __init__(self, split: Any = None) -> None:
        self.split = split  # the backend's `Split`; None: one device has the whole model

    def left_plain(
        self, spec: ModelSpec, layers: Sequence[Weights], caches: Sequence[CacheSpec] = ()
    ) -> Mapping[str, str]:
        """The ops that kernels serve in others, not in this model; see `served`.

        `layers` are the weights of its layers, and `caches` as `cache_specs` has them, if known.
        """
        return {}

    def reads_codes(self, weight: Weight, spec: ModelSpec, layers: Sequence[Weights]) -> str | None:
        """The way kernels read a quantized weight, for people; None where they do not.

        `layers` are the weights of the model's layers, of which some are read together.
        """
        return None

    def lies(self, cache: CacheSpec) -> CacheSpec:
        """A cache as these ops keep it, whose rows may be wider than those that it is given."""
        return cache

    def knows(self, cache: CacheSpec | CacheView) -> bool:
        """True if kernels write and read a cache."""
        return cache.kind in self.cache_kinds and (
            not cache.codes or cache.codes in self.cache_codes
        )

    def makes_keys(self, spec: ModelSpec, tokens: int) -> bool:
        """True if attention to a row of so many `tokens` makes keys of all that its slot has."""
        return any(a.latent is not None for a in spec.attentions)

    def span(self, name: str) -> AbstractContextManager[Any]:
        """See `contract.BlockOps.span`."""
        return self.maths.span(name)

    def sum(self, x: Array) -> Array:
        """See `contract.BlockOps.sum`."""
        return x if self.split is None else self.split.sum(x)

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: Array,
        positions: Array,
        token_types: Array | None,
    ) -> Array:
        """See `contract.BlockOps.embed`."""
        return embedding.embed(self, spec, w, ids, positions, token_types)

    def tokens(self, ids: Array, table: Weight) -> Array:
        """See `contract.BlockOps.tokens`."""
        if self.split is None:
            return self.schemes.embed(ids, table)
        rows, here = self.split.is_here(ids)
        return self.sum(self.maths.where(here[..., None], self.schemes.embed(rows, table), 0))

    def norm(self, x: Array, norm: NormOf, residual: Array | None = None) -> Array:
        """See `contract.BlockOps.norm`."""
        return plain_norm(self.maths, x if residual is None else residual + x, norm)

    def add(self, x: Array, y: Array, norm: NormOf | None = None) -> Array:
        """See `contract.BlockOps.add`."""
        return x + (y if norm is None else self.norm(y, norm))

    def linear(self, x: Array, weight: Weight, epilogue: Epilogue = ALONE) -> Array:
        """See `contract.BlockOps.linear`."""
        y = self.matmul(
            self.normed(x, epilogue.norm) if epilogue.norm else x, weight, epilogue.bias
        )
        y = self.activated(y, epilogue)
        if epilogue.residual is not None:
            y = epilogue.residual + y
        return self.maths.wide(y) if epilogue.wide else y

    def normed(self, x: Array, norm: NormOf) -> Array:
        """The norm in front of a plain product."""
        return self.norm(x, norm)

    def matmul(self, x: Array, weight: Weight, bias: Array | None) -> Array:
        """x [..., in] times weight [out, in], plus bias [out]."""
        return self.schemes.matmul(x, weight, bias)

    def activated(self, y: Array, epilogue: Epilogue) -> Array:
        """A product with what is behind it, if anything: activation, with the gate of [..., 2F]."""
        if epilogue.activation is None:
            return y
        act = feed_forward.gated_activation if epilogue.gated else feed_forward.activation
        return act(self.maths, y, epilogue.activation)

    def read(self, x: Unnormed, weight: Weight, epilogue: Epilogue) -> tuple[Array, Array]:
        """See `contract.BlockOps.read`."""
        normed = self.norm(x.y, x.norm, x.residual)
        return self.linear(normed, weight, epilogue), normed

    def row_product(self, x: Array, weight: Weight, epilogue: Epilogue = ALONE) -> Array:
        """See `contract.BlockOps.row_product`."""
        if self.split is None:
            return self.linear(x, weight, epilogue)
        assert epilogue.norm is None, "x is a share of what is normed"
        return added(self.maths, self.sum(self.partial_product(x, weight)), x.dtype, epilogue)

    def partial_product(self, x: Array, weight: Weight) -> Array:
        """See `contract.BlockOps.partial_product`."""
        return self._part_of_sum(*self._share_input(x, weight))

    def _part_of_sum(self, x: Array, weight: Weight) -> Array:
        """A device's part of a product, which is a sum over devices, of its columns of x."""
        return self.schemes.product(x, weight, self.maths.sums(x, many=False))

    def _share_input(self, x: Array, weight: Weight) -> tuple[Array, Weight]:
        """A device's columns of a product's input, quantized as all of them, and the weight."""
        if self.split is None:
            return x, weight
        return self.schemes.share_input(x, weight, self.split.most)

    def route(
        self,
        x: Array,
        weight: Weight,
        router: Router,
        *,
        bias: Array | None = None,
        choice_bias: Array | None = None,
        norm: NormOf | None = None,
    ) -> Routing:
        """See `contract.BlockOps.route`."""
        rows = self.norm(x, norm) if norm else x
        return mixtures.route(self.schemes, rows, weight, router, bias, choice_bias)

    def experts(
        self,
        x: Array,
        mixture: Experts,
        w: Weights,
        routing: Routing,
        epilogue: Epilogue = ALONE,
        partial: Array | None = None,
    ) -> Array:
        """See `contract.BlockOps.experts`."""
        rows = self.norm(x, epilogue.norm) if epilogue.norm else x
        own = None if self.split is None else self.split.own_experts(mixture.count)
        if own is None and mixture.idle:
            own = 0, mixture.count
        y = mixtures.experts(self.schemes, rows, mixture, w, routing, self._share_input, own)
        y = y if partial is None else y + partial
        return self._mixture(x, y, w.get("experts.down.bias"), routing, epilogue)

    def _mixture(
        self, x: Array, y: Array, bias: Array | None, routing: Routing, epilogue: Epilogue
    ) -> Array:
        """The output of all experts for x, of what those of this device sum up to, y."""
        y = self.sum(y)
        if bias is not None:
            y = y + mixtures.biases(self.maths, bias, routing)
        y = self.maths.cast(y, x.dtype)
        return y if epilogue.residual is None else epilogue.residual + y

    def adds_shared(self, x: Array, mixture: Experts, w: Weights) -> bool:
        """See `contract.BlockOps.adds_shared`."""
        return False

    def xielu(self, x: Array, numbers: Sequence[Array]) -> Array:
        """See `contract.BlockOps.xielu`."""
        return feed_forward.xielu(self.maths, x, *numbers)

    def gather_logits(self, logits: Array) -> Array:
        """See `contract.BlockOps.gather_logits`."""
        return logits if self.split is None else self.split.gather_logits(logits)


class PlainOps(PlainBlocks):
    """All that a model's steps compute with but for sampling; see `contract.Ops`."""

    def frequencies(self, params: Any, rope: Rope) -> Array:
        """float32 [R/2] of a rotary embedding, or [2, R/2] where it has two, on the device."""
        raise NotImplementedError

    def layer_attention(self, spec: ModelSpec, params: Any, index: int) -> LayerAttention:
        """See `contract.Ops.layer_attention`."""
        raise NotImplementedError

    def angles(
        self, spec: ModelSpec, params: Any, positions: Array, last: Array | None = None
    ) -> Any:
        """See `contract.Ops.angles`."""
        angles: dict[Any, Any] = {}
        last = last_of(self.maths, spec, positions, last)
        for a in spec.attentions:
            rope, growth = a.rope, a.growth
            if rope and rope not in angles:
                tables = self.frequencies(params, rope)
                angles[rope] = rotary.turns(self.maths, rope, tables, positions, last)
            if growth and growth not in angles:
                angles[growth] = rotary.growth(self.maths, positions, *growth)
        return angles

    def _heads(self, layer: LayerAttention, qkv: Array, angles: Any) -> list[Array]:
        """Queries, keys and values [B, T, heads, D] of packed ones, normed and rotated."""
        m, a = self.maths, layer.spec
        q, k, v = (heads(part, width=a.head_dim) for part in cut(qkv, *a.qkv_sizes))
        if not a.norm_turned:
            q, k = self._norm_heads(layer, q, k)
        if a.clip is not None and a.clips_normed:
            q, k, v = (part.clip(-a.clip, a.clip) for part in (q, k, v))
        if a.rope:
            cos, sin = angles[a.rope]
            if a.rope.rounded:
                cos, sin = (m.rounded(part, q.dtype) for part in (cos, sin))
            q, k = (rotary.rotary(m, x, cos, sin, a.rope.interleaved) for x in (q, k))
        if a.norm_turned:
            q, k = self._norm_heads(layer, q, k)
        if a.growth:
            q = q * m.cast(angles[a.growth][..., None, None], q.dtype)
        return [q, k, v]

    def _norm_heads(self, layer: LayerAttention, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries and keys [B, T, heads, D], normed where the layer has a norm of them."""
        m, q_norm, k_norm = self.maths, layer.q_norm, layer.k_norm
        if q_norm is None or k_norm is None:
            return q, k
        if layer.spec.qk_norm_over != "all":
            return plain_norm(m, q, q_norm), plain_norm(m, k, k_norm)
        parts = flat(q), flat(k)
        if layer.whole is None:
            a, b = plain_norm(m, parts[0], q_norm), plain_norm(m, parts[1], k_norm)
            return a.reshape(q.shape), b.reshape(k.shape)
        assert q_norm.spec.kind == "rms"
        queries, keys, part = layer.whole
        squares = [(y * y).sum(-1) for y in map(m.wide, parts)]
        sums = self.sum(m.stack((squares[0], squares[1] * part), -1))
        a, b = (
            rms_norm(m, x, n.weight, n.spec.eps, n.spec.unit_offset, sums[..., i] / width)
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
        slots: Array | None,
        lengths: Array | None = None,
        starts: Array | None = None,
    ) -> tuple[Array, Array, CacheView | None]:
        """Turned queries [B, T, H, D], what heads share [B, T, rank + turning], and the cache.

        That is what is cached: at the start of `slots`, or at `lengths` of them all, or with
        `starts` as `attend_rows` has it.
        """
        m, a, latent = self.maths, layer.spec, layer.spec.latent
        assert latent is not None and layer.latent_norm is not None and a.rope is not None
        cos, sin = angles[a.rope]
        q = heads(qkv.queries, a.heads, a.head_dim)
        q, turning = cut(q, a.head_dim - latent.turning, latent.turning)
        vector, key = cut(qkv.shared, latent.rank, latent.turning)
        turn = a.rope.interleaved
        q = m.join((q, rotary.rotary(m, turning, cos, sin, turn)), -1)
        if a.growth:
            q = q * m.cast(angles[a.growth][..., None, None], q.dtype)
        key = rotary.rotary(m, key[:, :, None], cos, sin, turn)[:, :, 0]
        shared = m.join((plain_norm(m, vector, layer.latent_norm), key), -1)
        if cache is not None and starts is not None:
            with self.span("append"):
                rows = shared[:, :, None]
                cache = self._extend(cache, slots, starts, lengths, rows, rows)
        elif cache is not None and lengths is not None:
            with self.span("append"):
                cache = self._append(cache, shared, shared, lengths)
        elif cache is not None:
            assert slots is not None
            with self.span("append"):
                cache = cache.write(slots, shared[:, :, None], shared[:, :, None])
        return q, shared, cache

    def _append(self, cache: CacheView, k: Array, v: Array, lengths: Array) -> CacheView:
        """See `CacheView.append`."""
        return cache.append(k, v, lengths)

    def _extend(
        self, cache: CacheView, slots: Array, starts: Array, lengths: Array, k: Array, v: Array
    ) -> CacheView:
        """See `CacheView.extend`."""
        return cache.extend(slots, starts, lengths, k, v)

    def _of_latents(self, layer: LayerAttention, shared: Array) -> tuple[Array, Array]:
        """Keys [B, S, H, D] and values [B, S, H, value_dim] of what heads share [B, S, ...]."""
        m, a, latent = self.maths, layer.spec, layer.spec.latent
        assert latent is not None and layer.kv is not None
        vectors, key = cut(shared, latent.rank, latent.turning)
        k, v = cut(self.linear(m.whole(vectors), layer.kv), *a.qkv_sizes[1:])
        k, v = heads(k, a.heads), heads(v, a.heads)
        key = m.broadcast(key[:, :, None], (*k.shape[:3], latent.turning))
        return m.join((k, key), -1), v

    def _absorbed(self, layer: LayerAttention, q: Array) -> Array:
        """Queries [N, H, D] as they meet what heads share: [N, H, rank + turning]."""
        m, latent = self.maths, layer.spec.latent
        assert latent is not None
        own, turning = cut(q, q.shape[-1] - latent.turning, latent.turning)
        keys, _ = matrices_of(layer)
        with self.span("head_product"):
            return m.join((m.einsum("nhd,hdo->nho", own, keys), turning), -1)

    def _values_of(self, layer: LayerAttention, y: Array) -> Array:
        """Results of heads, [N, 1, H value_dim], of means [N, H, rank] of latent vectors."""
        _, values = matrices_of(layer)
        with self.span("head_product"):
            return flat(self.maths.einsum("nhd,hod->nho", y, values))[:, None]

    def _placed(
        self, layer: LayerAttention, qkv: Array, angles: Any
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys and values of a layer, and what distances add to the products of both."""
        a = layer.spec
        assert a.places is not None
        q, k, v = self._heads(layer, qkv, angles)
        return q, k, v, a.places.added(self, a, layer.places, q, k)

    def _attend_places(self, layer: LayerAttention, qkv: Array, angles: Any, seen: Seen) -> Array:
        """Attention [B, T, H D] of an encoder's layer to whose scores distances add."""
        placed = self._placed(layer, qkv, angles)
        how: dict[str, Any] = {"scale": layer.spec.scale, **seen._asdict()}
        return flat(attention.placed_attention(self.maths, *placed, **how))

    def attend(
        self,
        layer: LayerAttention,
        qkv: Array | LatentQkv,
        angles: Any,
        seen: Seen = EVERY,
        *,
        positions: Array | None = None,
        cache: CacheView | None = None,
        slots: Array | None = None,
    ) -> tuple[Array, CacheView | None]:
        """See `contract.Ops.attend`."""
        m, a = self.maths, layer.spec
        if isinstance(qkv, LatentQkv):
            q, shared, cache = self._latents(layer, qkv, angles, cache, slots)
            k, v = self._of_latents(layer, shared)
            how: dict[str, Any] = {"causal": a.causal, **seen._asdict()}
            y = attention.attention(m, q, k, v, layer.scoring, **how)
            return flat(y), cache
        if layer.places is not None:
            return self._attend_places(layer, qkv, angles, seen), cache
        q, k, v = self._heads(layer, qkv, angles)
        if cache is not None:
            assert slots is not None
            with self.span("append"):
                cache = cache.write(slots, k, v)
            k, v = cache.kept(k, v)
        seen = attention.chunks(m, a, q.shape[:2], seen, q)
        how = {"causal": a.causal, "window": a.window, "positions": positions, **seen._asdict()}
        return flat(attention.attention(m, q, k, v, layer.scoring, **how)), cache

    def attend_rows(
        self,
        layer: LayerAttention,
        qkv: Array | LatentQkv,
        angles: Any,
        rows: CacheRows,
    ) -> tuple[Array, CacheView]:
        """See `contract.Ops.attend_rows`."""
        m, a = self.maths, layer.spec
        cache, slots, starts, lengths, reach = rows
        if isinstance(qkv, LatentQkv):
            q, _, written = self._latents(layer, qkv, angles, cache, slots, lengths, starts)
            assert written is not None
            shared, _ = _reached(written, reach).read(slots)
            k, v = self._of_latents(layer, shared[:, 0])
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            y = attention.attend_rows(m, q, k, v, starts, lengths, layer.scoring)
            return flat(y), written
        q, k, v = self._heads(layer, qkv, angles)
        with self.span("append"):
            cache = self._extend(cache, slots, starts, lengths, k, v)
        how = {"window": a.window, "chunk": a.chunk}
        held = _reached(cache, reach).read(slots)
        y = attention.attend_rows(m, q, *held, starts, lengths, layer.scoring, **how)
        return flat(y), cache

    def attend_token(
        self,
        layer: LayerAttention,
        qkv: Array | LatentQkv,
        angles: Any,
        cache: CacheView,
        lengths: Array,
        reach: int | None = None,
    ) -> tuple[Array, CacheView]:
        """See `contract.Ops.attend_token`."""
        m, a = self.maths, layer.spec
        if isinstance(qkv, LatentQkv):
            assert a.latent is not None
            q, _, written = self._latents(layer, qkv, angles, cache, None, lengths)
            assert written is not None
            q = self._absorbed(layer, q[:, 0])
            y = attention.decode_attention(m, q, written, lengths + 1, layer.scoring, reach=reach)
            return self._values_of(layer, y[..., : a.latent.rank]), written
        q, k, v = self._heads(layer, qkv, angles)
        with self.span("append"):
            cache = cache.append(k[:, 0], v[:, 0], lengths)
        how = {"window": a.window, "chunk": a.chunk, "reach": reach}
        y = attention.decode_attention(m, q[:, 0], cache, lengths + 1, layer.scoring, **how)
        return flat(y)[:, None], cache

    def attend_across(
        self,
        a: Attention,
        q: Array,
        kv: Array,
        mask: Array | None = None,
        *,
        cache: CrossView | None = None,
        slots: Array | None = None,
        lengths: Array | None = None,
    ) -> tuple[Array, CrossView | None]:
        """See `contract.Ops.attend_across`."""
        k, v = (heads(part, width=a.head_dim) for part in cut(kv, *[kv.shape[-1] // 2] * 2))
        if cache is not None:
            cache = cache.keep(slots, k, v, lengths)
        q, k, v = heads(q, width=a.head_dim), k.swapaxes(1, 2), v.swapaxes(1, 2)
        scoring = KeyScoring(a.scale, a.softcap)
        return flat(attention.cross_attention(self.maths, q, k, v, mask, scoring)), cache

    def attend_kept(self, a: Attention, q: Array, cache: CrossView) -> Array:
        """See `contract.Ops.attend_kept`."""
        m, q = self.maths, heads(q, width=a.head_dim)
        cache = cache.view(len(q), cache.capacity)
        visible = m.arange(cache.capacity, q)[None] < cache.lengths.clip(1)[:, None]
        scoring = KeyScoring(a.scale, a.softcap)
        return flat(attention.cross_attention(m, q, *cache.read(), visible, scoring))

    def recur(
        self,
        own: Recurrence,
        w: Weights,
        x: Array,
        seen: Seen = EVERY,
        rows: StateRows = NO_ROWS,
    ) -> tuple[Array, StateView | None]:
        """See `contract.Ops.recur`."""
        return recurrences.recur(self, own, w, x, seen, rows)

    def recur_token(
        self, own: Recurrence, w: Weights, x: Array, cache: StateView, moves: Array
    ) -> tuple[Array, StateView]:
        """See `contract.Ops.recur_token`."""
        return recurrences.recur_token(self, own, w, x, cache, moves)


def _reached(cache: CacheView, reach: int | None) -> CacheView:
    """The cache with the first `reach` places of each slot; all with None."""
    return cache if reach is None else cache.view(None, reach)


def matrices_of(layer: LayerAttention) -> tuple[Array, Array]:
    """Matrices of each head's key [H, D - turning, rank] and value [H, value_dim, rank]; views."""
    assert layer.kv is not None
    count, keys, data = layer.spec.heads, layer.spec.qkv_sizes[1], layer.kv.data
    k, v = data[:keys], data[keys:]
    return k.reshape(count, -1, data.shape[-1]), v.reshape(count, -1, data.shape[-1])


def last_of(m: Maths, spec: ModelSpec, positions: Array, last: Array | None) -> Array | None:
    """`last` of `angles` for each row; None where no rotary embedding asks for it."""
    if not spec.turns_by_length:
        return None
    return m.most(positions)[:, 0] if last is None else last
