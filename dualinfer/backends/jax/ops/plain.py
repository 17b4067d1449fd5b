"""The ops of the contract, composed of XLA's primitives; kernels.py has the same by Triton.

Everything is traced.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import jax
import jax.numpy as jnp

from ....model.spec import Activation, Attention, Experts, ModelSpec, Rope, Router
from ....model.weights import Weight
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
from ..exchange import Exchange
from ..parallel import Split
from ..params import Params
from ..sampler import SlotState
from . import mixtures, primitives


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


class PlainOps:
    """Fused ops on any device, as primitives of XLA; see `contract.Ops`."""

    cache_kinds: frozenset[str] = frozenset()  # that kernels know
    cache_codes: frozenset[str] = frozenset()  # likewise, where a cache keeps codes
    implementations: Mapping[str, str] = primitives.IMPLEMENTATIONS
    kernels = ""  # whose, for people
    reads_codes: str | None = None  # by kernels: how, for people
    holds_scores = True  # of all pairs of tokens, while a layer attends
    modes: tuple[int, ...] = ()  # of sampling, that want loops of their own; none: one has them all

    def __init__(self, split: Split | None = None) -> None:
        self.split = split  # None: a device has the whole model
        self.exchange: Exchange | None = None  # peer to peer, of kernels alone
        if split is not None:
            self.implementations = {**self.implementations, "sum over devices": "XLA"}

    def left_plain(self, spec: ModelSpec) -> tuple[str, ...]:
        """The ops that kernels serve in other models, and not in this one."""
        return ()

    def knows(self, cache: CacheSpec | CacheView) -> bool:
        """Whether kernels write and read a cache."""
        return cache.kind in self.cache_kinds and (
            not cache.codes or cache.codes in self.cache_codes
        )

    def make_scratch(self, pairs: int, mailboxes: jax.Array | None = None) -> Any:
        """What `using` needs for so many pairs of slot and KV head; a pytree, perhaps empty.

        `mailboxes` are those of `Params`, this device's row [1, ...].
        """
        return None

    def using(self, scratch: Any) -> Self:
        """These ops for one trace; `scratch` of the result is what a next one goes on with."""
        return self

    @property
    def scratch(self) -> Any:
        """Scratch memory after the ops traced so far."""
        return None

    def given_up(self) -> jax.Array | None:
        """int32 [1], not 0 once this device gave up an exchange; None where there is none."""
        return None

    def span(self, name: str) -> AbstractContextManager[Any]:
        """See `contract.BlockOps.span`."""
        return jax.named_scope(name)

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
    ) -> jax.Array:
        """See `contract.BlockOps.embed`."""
        x = self._tokens(ids, w["embed.weight"])
        if spec.embed_scale != 1:
            x = x * jnp.asarray(spec.embed_scale, x.dtype)
        return self._with_positions(spec, w, x, positions, token_types)

    def embed_given(
        self,
        spec: ModelSpec,
        w: Weights,
        embeds: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
        blend: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.embed_given`."""
        if spec.patches is not None:
            embeds = primitives.patches(embeds, w["patches.kernel"], w.get("patches.bias"))
            if learned := spec.patches.learned:
                shape = len(embeds), learned, embeds.shape[-1]
                first = w["class_token"]
                if spec.patches.registers:
                    first = jnp.concatenate((first[None], w["registers"]))
                first = jnp.broadcast_to(first, shape)
                embeds = jnp.concatenate((first, embeds[:, learned:]), axis=1)
        if spec.scales_embeds:
            embeds = embeds * jnp.asarray(spec.embed_scale, embeds.dtype)
        return self._with_positions(spec, w, embeds, positions, token_types, blend)

    def embed_trigrams(
        self,
        spec: ModelSpec,
        w: Weights,
        x: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
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
        x: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
        blend: jax.Array | None = None,
    ) -> jax.Array:
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
            return x + primitives.blend(blend, w["positions.weight"])[None].astype(x.dtype)
        if spec.learned_positions:
            x = x + primitives.embed(positions + spec.position_offset, w["positions.weight"])
        return x

    def _boxes(self, w: Weights, token_types: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Types of tokens, and rows for left, upper, right, lower, height and width."""
        boxes = jnp.zeros((*token_types.shape, 4), jnp.int32)
        if token_types.ndim == 3:
            token_types, boxes = token_types[..., 0], token_types[..., 1:]
        left, upper, right, lower = (boxes[..., i] for i in range(4))
        edges = ("x", left), ("y", upper), ("x", right), ("y", lower)
        sides = ("h", lower - upper), ("w", right - left)
        rows = [primitives.embed(at, w[f"boxes.{x}.weight"]) for x, at in (*edges, *sides)]
        return token_types, rows

    def embed_page(
        self, spec: ModelSpec, w: Weights, positions: jax.Array, token_types: jax.Array
    ) -> jax.Array:
        """See `contract.BlockOps.embed_page`."""
        _, boxes = self._boxes(w, token_types)
        by = Neighbours(w["page_project.bias"])
        y = PlainOps.linear(self, self.join(*boxes), w["page_project.weight"], by)
        return y + primitives.embed(positions, w["page_positions.weight"])

    def _tokens(self, ids: jax.Array, weight: Weight) -> jax.Array:
        """Rows of the embedding, of which each device has some."""
        if self.split is None:
            return primitives.embed(ids, weight)
        rows, here = self.split.is_here(ids)
        return self.split.sum(jnp.where(here[..., None], primitives.embed(rows, weight), 0))

    def read_by_layers(
        self, spec: ModelSpec, w: Weights, ids: jax.Array, x: jax.Array
    ) -> jax.Array:
        """See `contract.BlockOps.read_by_layers`."""
        own = self._tokens(ids, w["layers_embed.weight"])
        each = spec.layers[0].reads
        own = own * jnp.asarray(each**0.5, own.dtype)
        y = self.linear(x, w["layers_project.weight"]) * spec.embed**-0.5
        y, own = (part.reshape(*part.shape[:-1], -1, each) for part in (y, own))
        y = PlainOps.norm(self, y, NormOf.named(spec.layers[0].norm, w, "layers_norm"))
        return jnp.moveaxis((y + own) * 2**-0.5, -2, 0)

    def norm(self, x: jax.Array, norm: NormOf, residual: jax.Array | None = None) -> jax.Array:
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
        x: jax.Array,
        weights: jax.Array,
        segments: jax.Array | None = None,
        count: int = 1,
        largest: bool = False,
    ) -> jax.Array:
        """See `contract.BlockOps.pool`."""
        return primitives.pool(x, weights, segments, count, largest)

    def repeat(self, x: jax.Array, rows: int) -> jax.Array:
        """See `contract.BlockOps.repeat`."""
        return jnp.broadcast_to(x, (rows, *x.shape[1:]))

    def weave(self, heads: int, first: jax.Array, second: jax.Array) -> jax.Array:
        """See `contract.BlockOps.weave`."""
        return primitives.weave(heads, first, second)

    def unweave(self, heads: int, x: jax.Array, second: int) -> tuple[jax.Array, jax.Array]:
        """See `contract.BlockOps.unweave`."""
        return primitives.unweave(heads, x, second)

    def parted(self, x: jax.Array, at: int) -> tuple[jax.Array, jax.Array]:
        """See `contract.BlockOps.parted`."""
        return x[..., :at], x[..., at:]

    def join(self, *parts: jax.Array) -> jax.Array:
        """See `contract.BlockOps.join`."""
        return jnp.concatenate(parts, -1)

    def like(self, x: jax.Array, other: jax.Array) -> jax.Array:
        """See `contract.BlockOps.like`."""
        return x.astype(other.dtype)

    def linear(self, x: jax.Array, weight: Weight, by: Neighbours = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        y = self.matmul(PlainOps.norm(self, x, by.norm) if by.norm else x, weight, by.bias)
        if by.activation is not None:
            y = (primitives.gated_activation if by.gated else primitives.activation)(
                y, by.activation
            )
        if by.residual is not None:
            y = by.residual + y
        return y.astype(jnp.float32) if by.wide else y

    def read(self, x: Unnormed, weight: Weight, by: Neighbours) -> tuple[jax.Array, jax.Array]:
        """See `contract.BlockOps.read`."""
        normed = self.norm(x.y, x.norm, x.residual)
        return self.linear(normed, weight, by), normed

    def matmul(self, x: jax.Array, weight: Weight, bias: jax.Array | None) -> jax.Array:
        """x [..., in] times weight [out, in], plus bias [out]."""
        return primitives.matmul(x, weight, bias)

    def row_product(self, x: jax.Array, weight: Weight, by: Neighbours = ALONE) -> jax.Array:
        """See `contract.BlockOps.row_product`."""
        if self.split is None:
            return self.linear(x, weight, by)
        y = self.split.sum(self.partial_product(x, weight))
        if by.bias is not None:
            y = y + by.bias.astype(y.dtype)
        y = y.astype(x.dtype)
        return y if by.residual is None else by.residual + y

    def partial_product(self, x: jax.Array, weight: Weight) -> jax.Array:
        """See `contract.BlockOps.partial_product`; float32 where rows are few."""
        return primitives.partial_product(*self._share_input(x, weight))

    def _share_input(self, x: jax.Array, weight: Weight) -> tuple[jax.Array, Weight]:
        """A device's columns of a product's input, quantized as all of them, and the weight."""
        if self.split is None:
            return x, weight
        return primitives.SCHEMES.share_input(x, weight, self.split.most)

    def route(
        self,
        x: jax.Array,
        weight: Weight,
        router: Router,
        *,
        bias: jax.Array | None = None,
        choice_bias: jax.Array | None = None,
        norm: NormOf | None = None,
    ) -> Routing:
        """See `contract.BlockOps.route`."""
        rows = self.norm(x, norm) if norm else x
        return mixtures.route(rows, weight, router, bias, choice_bias)

    def blend(self, routing: Routing, sides: Routing, expert: int) -> Routing:
        """See `contract.BlockOps.blend`."""
        return mixtures.blend(routing, sides.weights, expert)

    def fill(
        self,
        routing: Routing,
        count: int,
        capacity: int,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> Routing:
        """See `contract.BlockOps.fill`."""
        return mixtures.fill(routing, count, capacity, mask, segments)

    def experts(
        self,
        x: jax.Array,
        mixture: Experts,
        w: Weights,
        routing: Routing,
        by: Neighbours = ALONE,
        partial: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.experts`."""
        rows = self.norm(x, by.norm) if by.norm else x
        own = None if self.split is None else self.split.own_experts(mixture.count)
        y = mixtures.experts(rows, mixture, w, routing, self._share_input, own)
        if partial is not None:
            y = y + partial.astype(jnp.float32)
        if self.split is not None:
            y = self.split.sum(y)
        if (bias := w.get("experts.down.bias")) is not None:
            y = y + mixtures.biases(bias, routing)
        y = y.astype(x.dtype)
        return y if by.residual is None else by.residual + y

    def adds_shared(self, x: jax.Array, mixture: Experts, w: Weights) -> bool:
        """See `contract.BlockOps.adds_shared`."""
        return False

    def gate(
        self, y: jax.Array, x: jax.Array, weight: Weight, norm: NormOf | None = None
    ) -> jax.Array:
        """See `contract.BlockOps.gate`."""
        gate = self.linear(x, weight, Neighbours(norm=norm, wide=True))
        return (y.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(y.dtype)

    def add(self, x: jax.Array, y: jax.Array, norm: NormOf | None = None) -> jax.Array:
        """See `contract.BlockOps.add`."""
        return x + (y if norm is None else self.norm(y, norm))

    def norm_values(self, a: Attention, qkv: jax.Array, norm: NormOf) -> jax.Array:
        """See `contract.BlockOps.norm_values`."""
        others, values = jnp.split(qkv, (qkv.shape[-1] - a.qkv_sizes[2],), axis=-1)
        heads = values.reshape(*values.shape[:-1], -1, a.head_dim)
        normed = PlainOps.norm(self, heads, norm).reshape(values.shape)
        return jnp.concatenate((others, normed), axis=-1)

    def with_keys_of(self, a: Attention, q: jax.Array, qkv: jax.Array) -> jax.Array:
        """See `contract.BlockOps.with_keys_of`."""
        queries = a.qkv_sizes[0]
        return jnp.concatenate((q[..., :queries], qkv[..., queries:]), axis=-1)

    def clip(self, x: jax.Array, limit: float) -> jax.Array:
        """See `contract.BlockOps.clip`."""
        return jnp.clip(x, -limit, limit)

    def xielu(self, x: jax.Array, numbers: Sequence[jax.Array]) -> jax.Array:
        """See `contract.BlockOps.xielu`."""
        return primitives.xielu(x, *numbers)

    def convolve(
        self,
        x: jax.Array,
        kernel: jax.Array,
        bias: jax.Array,
        stride: int,
        activation: Activation,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.convolve`."""
        y = primitives.convolution(x, kernel, bias, stride, segments)
        return primitives.activation(y, activation)

    def softcap(self, logits: jax.Array, cap: float) -> jax.Array:
        """See `contract.BlockOps.softcap`."""
        return (jnp.tanh(logits.astype(jnp.float32) / cap) * cap).astype(logits.dtype)

    def gather_logits(self, logits: jax.Array) -> jax.Array:
        """See `contract.BlockOps.gather_logits`."""
        return logits if self.split is None else self.split.gather_logits(logits)

    def layer_attention(self, spec: ModelSpec, params: Params, index: int) -> LayerAttention:
        """See `contract.Ops.layer_attention`; the ops make their own frequencies."""
        a = spec.layers[index].attention
        slopes = self.split.slopes(spec, index) if self.split else None
        if slopes is None and a.alibi is not None:
            slopes = jnp.array(a.alibi, jnp.float32)
        whole = self.split.whole(spec, index) if self.split else None
        return LayerAttention.named(
            a, params.layers[index], params.outer, slopes=slopes, whole=whole
        )

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
            q, k, v = (PlainOps.clip(self, part, a.clip) for part in (q, k, v))
        if a.rope:
            cos, sin = angles[a.rope]
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
            return PlainOps.norm(self, q, q_norm), PlainOps.norm(self, k, k_norm)
        parts = [x.reshape(*x.shape[:-2], -1) for x in (q, k)]
        if layer.whole is None:
            a, b = PlainOps.norm(self, parts[0], q_norm), PlainOps.norm(self, parts[1], k_norm)
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
        shared = jnp.concatenate((PlainOps.norm(self, vector, layer.latent_norm), key), axis=-1)
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

    def attend_kept(self, a: Attention, q: jax.Array, cache: CrossView) -> jax.Array:
        """See `contract.Ops.attend_kept`."""
        visible = jnp.arange(cache.capacity)[None] < jnp.maximum(cache.lengths, 1)[:, None]
        heads = q.reshape(*q.shape[:2], -1, a.head_dim)
        how = {"scale": a.scale, "softcap": a.softcap}
        y = primitives.cross_attention(heads, *cache.read(), visible, **how)
        return y.reshape(q.shape)

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
