"""The ops of the contract by Triton kernels, the same as torch's; plain.py has them by plain XLA.

Which kernel serves a call follows from its shapes alone: products with few rows read the weights
once, with everything around them fused; those with many are XLA's, as are prompts' norms and
activations, which XLA fuses as well.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from ....kernels.triton import (
    attention,
    attention_choice,
    decode_attention,
    eight_bit,
    embedding,
    experts,
    filters,
    head_norm,
    latent,
    linear,
    quantized,
    rotary,
    routing,
    sampling,
    thresholds,
)
from ....kernels.triton import norm as norms
from ....kernels.triton.codes import served_codes
from ....kernels.triton.experts import Mixture
from ....kernels.triton.launch import INTERPRETED
from ....kernels.triton.linear import NormArguments
from ....kernels.triton.operands import empty
from ....kernels.triton.tuning import Configurations, device_kinds, shipped
from ....kernels.xla.launches import call, capability_of
from ....model.spec import Attention, Experts, ModelSpec, Rope, Router
from ....model.weights import Weight
from ...base import SamplingFeatures
from ...caches import CacheView, CrossView
from ...contract import (
    ALONE,
    LatentQkv,
    LayerAttention,
    Neighbours,
    NormOf,
    Routing,
    Weights,
)
from ...mixtures import Launch, experts_launch, experts_of, route_launch, shares_launches
from ...schemes import EightBit, packed, rounds_input
from ...schemes import eight_bit as in_eight_bits
from ..cache import BlockCache, CrossCache, FullCache, LatentCache
from ..parallel import Split
from ..sampler import CHANGED, FILTERED, SlotState
from . import mixtures, primitives
from .cudnn import cudnn_serves
from .plain import PlainOps, chunks_of, last_of, scoring, turns

_HOPPER = 90


def unserved(spec: ModelSpec) -> str | None:
    """What of a model is beyond the kernels, for people; None if they serve it."""
    dim = max(layer.attention.head_dim for layer in spec.layers)
    if dim > attention.LARGEST_HEAD:
        return f"a head_dim of {dim} (at most {attention.LARGEST_HEAD})"
    ranks = [a.latent.rank for a in (layer.attention for layer in spec.layers) if a.latent]
    if max(ranks, default=0) > latent.LARGEST_RANK:
        return f"latent vectors of {max(ranks)} elements (at most {latent.LARGEST_RANK})"
    if spec.embed > norms.WIDEST:
        return f"a hidden size of {spec.embed} (at most {norms.WIDEST})"
    if spec.can_generate and spec.vocab > thresholds.MOST_TOKENS:
        return f"a vocabulary of {spec.vocab} (at most {thresholds.MOST_TOKENS})"
    return None


class KernelOps(PlainOps):
    """Fused ops on a GPU; where Triton is interpreted, for tests, on any device."""

    cache_kinds = frozenset({FullCache.kind, BlockCache.kind, CrossCache.kind, LatentCache.kind})
    kernels = "Triton"
    reads_codes = (
        f"Triton, fused, up to {quantized.MOST_ROWS} rows; above XLA, with values by Triton, or "
        "Triton in 8 bits where inputs are quantized"
    )
    holds_scores = False
    modes = (CHANGED, FILTERED)  # without and with the launches that look for top-k and top-p
    implementations: Mapping[str, str] = {
        **PlainOps.implementations,
        "matmul": f"Triton, fused, up to {linear.MOST_ROWS} rows; XLA above",
        "embed": "Triton",
        "rms_norm": "Triton, fused into the product of a single row; XLA for prompts",
        "layer_norm": "Triton, fused into the product of a single row; XLA for prompts",
        "qk_norm": "Triton, fused with rotary; LayerNorm, own weights and all heads as one apart",
        "rotary": "Triton, fused with the append to the cache",
        "activation": "Triton, fused into products with few rows; XLA for prompts",
        "router": "Triton, with norm and choice in one launch",
        "experts": (
            f"Triton, fused, up to {experts.MOST_VECTORS} tokens; above by experts on the matrix "
            "units; plain where several experts of a token weigh their inputs"
        ),
        "attention": "cuDNN where it can, else Triton",
        "decode_attention": "Triton, split KV, fused with rotary and append",
        "cross_attention": "Triton, split KV, of one token; XLA of more",
        "latent_attention": "Triton, split KV over latent vectors; norm, rotary and append before",
        "sampling": "Triton, threefry2x32; XLA for a prompt's first token",
    }

    def __init__(self, device: jax.Device, split: Split | None = None) -> None:
        super().__init__(split)
        self.sms = getattr(device, "core_count", None) or 132
        self.capability = capability_of(device)
        self.cache_codes = served_codes(self.capability)
        self._on_gpu = device.platform == "gpu"
        major, minor = divmod(self.capability, 10)
        kinds = device_kinds(device.device_kind, (major, minor), self.sms) if self._on_gpu else ()
        self.configurations = Configurations(shipped(kinds) if kinds else ())
        self._counters: jax.Array | None = None

    def left_plain(self, spec: ModelSpec) -> tuple[str, ...]:
        """See `PlainOps.left_plain`."""
        return () if routing.serves_all(spec) else ("router",)

    def make_scratch(self, pairs: int, mailboxes: jax.Array | None = None) -> Any:
        """Zeros by which programs that share a sum count one another."""
        return jnp.zeros(max(linear.MOST_TILES, pairs), jnp.int32)

    def using(self, scratch: Any) -> Self:
        """See `PlainOps.using`."""
        ops = copy.copy(self)
        ops._counters = scratch
        return ops

    @property
    def scratch(self) -> Any:
        """The counters, which every launch leaves at zero: in order, each takes the last one's."""
        return self._counters

    def starts_early(self, rows: int) -> bool:
        """Whether kernels over so many rows start before the one in front has ended.

        Between a few rows and many it is slower, as programs that wait take room from those that
        work: see docs/measured-and-left-out.md.
        """
        early = self._on_gpu and not INTERPRETED and self.capability >= _HOPPER
        return early and (rows <= 4 or rows >= 64)

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
    ) -> jax.Array:
        """See `PlainOps.embed`."""
        tables = [
            w[n] for n in ("embed.weight", "positions.weight", "token_types.weight") if n in w
        ]
        quantized = any(table.scheme is not None for table in tables)
        if self.split is not None or spec.embed_width or quantized:
            return super().embed(spec, w, ids, positions, token_types)
        table = w["embed.weight"].data
        types = "embed.weight" if spec.token_types_from_vocab else "token_types.weight"
        learned = spec.learned_positions > 0
        with jax.named_scope("embed"):
            return call(
                embedding.embed,
                ids,
                table,
                positions=positions if learned else None,
                position_weight=w["positions.weight"].data if learned else None,
                position_offset=spec.position_offset,
                token_types=token_types,
                type_weight=None if token_types is None else w[types].data,
                scale=float(np.asarray(spec.embed_scale, table.dtype)),  # as HF rounds it
                capability=self.capability,
            )[0]

    def norm(self, x: jax.Array, norm: NormOf, residual: jax.Array | None = None) -> jax.Array:
        """See `PlainOps.norm`."""
        rows = math.prod(x.shape[:-1])
        if rows > linear.MOST_ROWS:
            return super().norm(x, norm, residual)
        return self._normed(x, norm, residual, rows)

    def add(self, x: jax.Array, y: jax.Array, norm: NormOf | None = None) -> jax.Array:
        """See `PlainOps.add`."""
        rows = math.prod(y.shape[:-1])
        if norm is None or rows > linear.MOST_ROWS:
            return super().add(x, y, norm)
        return self._normed(y, norm, x, rows, after=True)

    def _normed(
        self,
        x: jax.Array,
        norm: NormOf,
        residual: jax.Array | None,
        rows: int,
        after: bool = False,
    ) -> jax.Array:
        spec, weight, bias = norm
        how: dict[str, Any] = {"residual": residual, "after": after}
        how["pdl"] = self.starts_early(rows)
        how |= {"capability": self.capability}
        with jax.named_scope("norm"):
            how["unit_offset"] = spec.unit_offset
            if spec.kind == "rms":
                return call(norms.rms_norm, x, weight, spec.eps, **how)[0]
            return call(norms.layer_norm, x, weight, bias, spec.eps, **how)[0]

    def linear(self, x: jax.Array, weight: Weight, by: Neighbours = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        if by.norm is not None and not linear.fuses_norm(by.norm):
            x, by = self.norm(x, by.norm), by._replace(norm=None)
        codes = packed(weight)
        count, (features, width) = math.prod(x.shape[:-1]), weight.shape
        eight = in_eight_bits(weight, count, x.dtype.itemsize)
        if eight is not None:
            return self._eight_bit_product(x, eight, by)
        if by.norm is not None and rounds_input(weight):
            x, by = self.norm(x, by.norm), by._replace(norm=None)
        if not self._serves_product(x, weight, by):
            return super().linear(*self._with_values(x, weight), by)
        if rounds_input(weight):
            x = primitives.SCHEMES.quantize_input(x, weight)
        fused_norm = None
        if by.norm is not None and count == 1:
            fused_norm = NormArguments.of(by.norm)
        elif by.norm is not None:
            x = self.norm(x, by.norm)
        features = features // 2 if by.gated else features
        size = x.dtype.itemsize
        if codes is None:
            product, key = linear.linear, linear.tuning_key(count, features, width, size, by.gated)
        else:
            product = quantized.linear
            normed = fused_norm is not None
            key = quantized.tuning_key(count, features, codes, size, by.gated, normed)
        with jax.named_scope("matmul"):
            y, (self._counters,) = call(
                product,
                x,
                weight.data if codes is None else codes,
                by.bias,
                norm=fused_norm,
                activation=by.activation,
                gated=by.gated,
                residual=by.residual,
                dtype="float32" if by.wide else None,
                config=self.configurations.find(key),
                counters=self._counters,
                sms=self.sms,
                pdl=self.starts_early(count),
                capability=self.capability,
                written=(self._counters,),
            )
        return y

    def _eight_bit_product(self, x: jax.Array, how: EightBit, by: Neighbours) -> jax.Array:
        """Many rows, by the 8-bit matrix units."""
        features, count = how.weight.data.shape[0], math.prod(x.shape[:-1])
        features = features // 2 if by.gated else features
        key = eight_bit.tuning_key(count, features, how.weight, how.block, by.gated)
        with jax.named_scope("matmul"):
            return call(
                eight_bit.product,
                x,
                how.weight,
                by.bias,
                block=how.block,
                scale=how.scale,
                norm=NormArguments.of(by.norm),
                activation=by.activation,
                gated=by.gated,
                residual=by.residual,
                dtype="float32" if by.wide else None,
                config=self.configurations.find(key),
                sms=self.sms,
                pdl=self.starts_early(count),
                capability=self.capability,
            )[0]

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
        beside: dict[str, Any] = {"bias": bias, "choice_bias": choice_bias}
        launch = route_launch(self, x, weight, router, norm, beside)
        if launch is None:
            return super().route(x, weight, router, norm=norm, **beside)
        return Routing(*self._launched("router", launch))

    def adds_shared(self, x: jax.Array, mixture: Experts, w: Weights) -> bool:
        """See `contract.BlockOps.adds_shared`."""
        return shares_launches(mixture, w, math.prod(x.shape[:-1]))

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
        own = None if self.split is None else self.split.own_experts(mixture.count)
        held = experts_of(mixture, w, self.adds_shared(x, mixture, w), own)
        if held is None:
            return super().experts(x, mixture, w, routing, by, partial)
        if mixture.weighs_input:
            x, by = self.norm(x, by.norm) if by.norm else x, by._replace(norm=None)
            x = (x * routing.weights).astype(x.dtype)
            routing = Routing(routing.experts, jnp.ones_like(routing.weights))
        return self._mixed(x, held, routing, by, partial)

    def _mixed(
        self,
        x: jax.Array,
        mixture: Mixture,
        routing: Routing,
        by: Neighbours,
        partial: jax.Array | None,
    ) -> jax.Array:
        """What all experts make of x, with all that is added."""
        if self.split is None:
            return self.own_part(x, mixture, routing, by, partial)
        bias, own = mixture.down_bias, mixture._replace(down_bias=None)
        y = self.own_part(x, own, routing, Neighbours(norm=by.norm, wide=True), partial)
        y = self.split.sum(y)
        if bias is not None:
            y = y + mixtures.biases(bias, routing)
        y = y.astype(x.dtype)
        return y if by.residual is None else by.residual + y

    def own_part(
        self,
        x: jax.Array,
        mixture: Mixture,
        routing: Routing,
        by: Neighbours,
        partial: jax.Array | None,
    ) -> jax.Array:
        """What this device's experts make of x, with all that is added; float32 if `by.wide`."""
        launch = experts_launch(self, x, mixture, routing, by, partial)
        return self._launched("experts", launch)

    def _launched(self, name: str, launch: Launch) -> Any:
        function, arguments, options = launch
        with jax.named_scope(name):
            result, (self._counters,) = call(
                function,
                *arguments,
                **options,
                counters=self._counters,
                sms=self.sms,
                capability=self.capability,
                written=(self._counters,),
            )
        return result

    def partial_product(self, x: jax.Array, weight: Weight) -> jax.Array:
        """See `PlainOps.partial_product`."""
        x, weight = self._share_input(x, weight)
        if not self._serves_product(x, weight, ALONE):
            return super().partial_product(*self._with_values(x, weight))
        return self.linear(x, weight, Neighbours(wide=True))

    def matmul(self, x: jax.Array, weight: Weight, bias: jax.Array | None) -> jax.Array:
        """See `PlainOps.matmul`; the pieces of a weight are multiplied one by one."""
        if not weight.pieces:
            return super().matmul(x, weight, bias)
        y = jnp.concatenate([self.linear(x, piece) for piece in weight.pieces], -1)
        return y if bias is None else y + bias

    def _with_values(self, x: jax.Array, weight: Weight) -> tuple[jax.Array, Weight]:
        """The operands of a plain product, without the codes that a kernel knows."""
        codes = packed(weight)
        if codes is None:
            return x, weight
        x = primitives.SCHEMES.quantize_input(x, weight)
        with jax.named_scope("values"):
            matrix, _ = call(quantized.values, codes, x, capability=self.capability)
        return x, Weight(matrix, weight.axes)

    def _serves_product(self, x: jax.Array, weight: Weight, by: Neighbours) -> bool:
        """Whether a kernel for few rows serves a product."""
        count, (features, width) = math.prod(x.shape[:-1]), weight.shape
        if weight.scheme is not None:
            known = packed(weight) is not None
            return known and count <= (1 if x.dtype.itemsize == 4 else quantized.MOST_ROWS)
        fused = by.activation is not None or by.residual is not None
        return linear.serves(count, features, width, x.dtype.itemsize, fused)

    def angles(
        self, spec: ModelSpec, params: Any, positions: jax.Array, last: jax.Array | None = None
    ) -> Any:
        """The positions, with `last` if need be: kernels turn as they read queries and keys."""
        last = last_of(spec, positions, last)
        return positions if last is None else (positions, last)

    def _prepared(
        self, layer: LayerAttention, qkv: jax.Array, positions: jax.Array
    ) -> tuple[LayerAttention, jax.Array]:
        """What is left of a layer's norms for the launch that turns heads, and qkv with others."""
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
        if a.clip is not None and a.clip_normed:
            qkv = self.clip(qkv, a.clip)
        return layer._replace(q_norm=None, k_norm=None), qkv

    def _known(self, cache: CacheView | None) -> FullCache | BlockCache | None:
        """The cache, if kernels know its kind."""
        return cast(Any, cache) if cache is not None and self.knows(cache) else None

    def _latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: jax.Array | None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, CacheView | None]:
        """See `PlainOps._latents`; by one launch."""
        a, rope, norm = layer.spec, layer.spec.rope, layer.latent_norm
        assert a.latent is not None and norm is not None and rope is not None
        held = [] if cache is None else [cast(LatentCache, cache).shared]
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
                slots=slots,
                ends=ends if rope.stretch else None,
                original=rope.original,
                stretch=rope.stretch,
                pdl=self.starts_early(qkv.shared.shape[0] * qkv.shared.shape[1]),
                capability=self.capability,
                written=(*qkv, *held),
            )
        q = queries.reshape(*queries.shape[:-1], a.heads, a.head_dim)
        return q, shared, LatentCache(*filled) if held else None

    def _attend_latents(
        self,
        layer: LayerAttention,
        qkv: LatentQkv,
        angles: Any,
        cache: CacheView | None,
        slots: jax.Array | None,
        mask: jax.Array | None,
        segments: jax.Array | None,
    ) -> tuple[jax.Array, CacheView | None]:
        """`attend` with latent attention: keys and values of each head are made, of one width."""
        a = layer.spec
        q, shared, cache = self._latents(layer, qkv, angles, cache, slots)
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
                mask=mask,
                segments=segments,
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
        *,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: CacheView | None = None,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheView | None]:
        """See `PlainOps.attend`; what the cache holds behind the keys and values is left there."""
        if isinstance(qkv, LatentQkv):
            return self._attend_latents(layer, qkv, angles, cache, slots, mask, segments)
        if layer.places is not None:  # by primitives: scores gather two products more
            return self._attend_places(layer, qkv, angles, mask, segments), cache
        a = layer.spec
        angles, last = angles if isinstance(angles, tuple) else (angles, None)
        layer, qkv = self._prepared(layer, qkv, angles)
        batch, tokens, _ = qkv.shape
        segments = chunks_of(a, batch, tokens, mask, segments)
        known = self._known(cache)
        held = _held(known)
        pools = None if known is None else known[:2]
        by_cudnn = self._on_gpu and cudnn_serves(layer, qkv, mask, segments)
        turn: dict[str, Any] = {"heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim}
        turn |= {"ends": last, "cache": pools, "slots": None if known is None else slots}
        turn |= {"table": _table_of(known), "scales": tuple(held[2:]) or None}
        turn |= {"pdl": self.starts_early(batch * tokens)} | _norms_of(layer)
        pairs = batch * a.heads
        shape = qkv.dtype.itemsize, a.head_dim, tokens, pairs, a.causal
        how: dict[str, Any] = {"causal": a.causal, "mask": mask, "segments": segments}
        how |= {"positions": None if layer.slopes is None else positions, "sms": self.sms}
        how |= {"config": self.configurations.find(attention_choice.tuning_key(*shape))}
        how |= {"pdl": turn["pdl"], "relative": layer.bias} | scoring(layer)
        # What XLA reads as well, its attention or a cache of another kind, is memory of its own.
        apart = by_cudnn or (cache is not None and known is None)
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
            cache = primitives.write(cache, slots, k, v)
            k, v = (part.astype(q.dtype) for part in cache.kept(k, v))
        with jax.named_scope("attention"):
            if by_cudnn:
                y = jax.nn.dot_product_attention(
                    q, k, v, scale=a.scale, is_causal=a.causal, implementation="cudnn"
                )
            else:
                how |= {"capability": self.capability}
                y, _ = call(attention.attention, q, k, v, **how)
        return y.reshape(batch, tokens, -1), cache

    def attend_token(
        self,
        layer: LayerAttention,
        qkv: jax.Array | LatentQkv,
        angles: Any,
        cache: CacheView,
        lengths: jax.Array,
    ) -> tuple[jax.Array, CacheView]:
        """See `PlainOps.attend_token`."""
        if isinstance(qkv, LatentQkv):
            return self._attend_token_to_latents(layer, qkv, cache, lengths)
        known = self._known(cache)
        if known is None:
            rope, growth = layer.spec.rope, layer.spec.growth
            angles, last = angles if isinstance(angles, tuple) else (angles, None)
            turned: dict[Any, Any] = {rope: turns(rope, angles, last)} if rope else {}
            if growth:
                turned[growth] = primitives.growth(angles, *growth)
            return super().attend_token(layer, qkv, turned, cache, lengths)
        a = layer.spec
        layer, qkv = self._prepared(layer, qkv, lengths[:, None])
        slots, reach, (_, kv_heads, _, dim) = len(lengths), known.capacity, known.k.shape
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
                config=self.configurations.find(key),
                sms=self.sms,
                pdl=self.starts_early(len(lengths)),
                capability=self.capability,
                written=(*held, self._counters),
                chunk=a.chunk,
                relative=layer.bias,
                **_norms_of(layer),
                **scoring(layer),
            )
        return y[:, None], _with(known, filled)

    def _attend_token_to_latents(
        self, layer: LayerAttention, qkv: LatentQkv, cache: CacheView, lengths: jax.Array
    ) -> tuple[jax.Array, CacheView]:
        """Each head's value of one new token a slot, [N, 1, H value_dim], and the cache."""
        a = layer.spec
        assert a.latent is not None and layer.kv is not None
        q, _, written = self._latents(layer, qkv, None, cache, None, lengths)
        shape = a.heads, a.latent.rank, q.dtype.itemsize
        key = latent.tuning_key(len(lengths), cache.capacity, *shape)
        with jax.named_scope("decode_attention"):
            y, _ = call(
                latent.decode_latents,
                q.reshape(qkv.queries.shape),
                cast(LatentCache, written).shared,
                lengths,
                layer.kv.data,
                heads=a.heads,
                turning=a.latent.turning,
                scale=a.scale,
                config=self.configurations.find(key),
                sms=self.sms,
                pdl=self.starts_early(len(lengths)),
                capability=self.capability,
            )
        return y[:, None], cast(CacheView, written)

    def attend_kept(self, a: Attention, q: jax.Array, cache: CrossView) -> jax.Array:
        """See `contract.Ops.attend_kept`."""
        if not isinstance(cache, CrossCache):
            return super().attend_kept(a, q, cache)
        slots, kv_heads, reach, dim = cache.k.shape
        shape = a.heads // kv_heads, dim, cache.k.dtype.itemsize
        key = decode_attention.tuning_key(slots * kv_heads, reach, *shape)
        assert self._counters is not None
        with jax.named_scope("cross_attention"):
            y, (self._counters,) = call(
                decode_attention.decode_attention,
                q[:, 0],
                cache[:2],
                cache.lengths,
                heads=a.heads,
                scale=a.scale,
                counters=self._counters,
                cross=True,
                config=self.configurations.find(key),
                sms=self.sms,
                pdl=self.starts_early(slots),
                capability=self.capability,
                written=(self._counters,),
            )
        return y[:, None]

    def advance(
        self,
        logits: jax.Array,
        state: SlotState,
        features: jax.Array | int,
        out: jax.Array,
        step: jax.Array,
    ) -> tuple[SlotState, jax.Array, jax.Array]:
        """See `PlainOps.advance`; `features` is one of `modes`, or traced."""
        if not isinstance(features, int):

            def run(mode: int) -> Any:
                ops = copy.copy(self)
                return ops.advance(logits, state, mode, out, step), ops._counters

            ways = (lambda: run(FILTERED)), (lambda: run(CHANGED))
            done, self._counters = jax.lax.cond(features == FILTERED, *ways)
            return done
        booked = ("active", "last", "length", "new", "remaining", "seen")
        bins = jnp.zeros((2, len(logits), *_BINS), jnp.uint32) if features == FILTERED else None
        assert self._counters is not None
        written = [*(getattr(state, name) for name in booked), out, step, self._counters]
        with jax.named_scope("sampling"):
            _, (*columns, out, step, self._counters) = call(
                _advance,
                logits,
                state,
                out,
                step,
                self._counters,
                bins,
                _edges() if features == FILTERED else None,
                pdl=self.starts_early(len(logits)),
                capability=self.capability,
                written=written,
            )
        return state._replace(**dict(zip(booked, columns, strict=True))), out, step

    def ended(self, state: SlotState, out: jax.Array) -> SlotState:
        """See `PlainOps.ended`; each step has marked its tokens."""
        return state


_BINS = thresholds.COPIES.value, thresholds.BINS.value, 2  # of 8 bytes, as two words


@lru_cache(maxsize=1)
def _edges() -> np.ndarray:
    """`thresholds.scales()`, float64 as pairs of words: JAX has no doubles here."""
    return np.array(thresholds.scales(), np.float64).view(np.uint32)


def _advance(
    logits: Any, state: Any, out: Any, step: Any, counters: Any, bins: Any, edges: Any, *, pdl: bool
) -> None:
    """`sampling.sample_step`, with what its launches hand on in new memory."""
    rows, vocab = logits.shape

    def memory(dtype: str, *shape: int) -> Any:
        return empty(logits, (rows, *shape), dtype)

    work = filters.workspace_of(rows, vocab, memory, edges and edges.view("float64"))
    work = replace(work, counters=counters)
    if bins is not None:
        coarse, fine = (bins[i].view("int64") for i in range(2))
        work = replace(work, coarse=coarse, fine=fine)
    needs = SamplingFeatures(noise=bins is not None, filters=bins is not None)
    sampling.sample_step(logits, state, needs, out, step, workspace=work, pdl=pdl)


def _turn_and_attend(
    qkv: Any, positions: Any, *, turn: Mapping[str, Any], how: Mapping[str, Any]
) -> Any:
    """Queries and keys normed and turned in place, the cache filled, and attention of them all."""
    rotary.rotary_append(qkv, positions, **turn)
    heads, kv_heads = turn["heads"], turn["kv_heads"]
    split = qkv.unflatten(-1, (heads + 2 * kv_heads, turn["head_dim"]))
    q, k, v = split.split((heads, kv_heads, kv_heads), dim=2)
    return attention.attention(q, k, v, **how)


@lru_cache(maxsize=64)
def _frequencies(rope: Rope) -> np.ndarray:
    """float32 [R/2] or [2, R/2], the same array each time, so that a step holds it once."""
    return np.array(rope.tables, np.float32)


def _table_of(cache: FullCache | BlockCache | None) -> jax.Array | None:
    return cache.table if isinstance(cache, BlockCache) else None


def _held(cache: FullCache | BlockCache | None) -> list[jax.Array]:
    """What kernels change: keys and values and, of codes, their scales."""
    if cache is None:
        return []
    parts = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    return [part for part in parts if part is not None]


def _with(cache: FullCache | BlockCache, held: list[jax.Array]) -> FullCache | BlockCache:
    """The cache with other arrays in the place of `_held`."""
    return cache._replace(**dict(zip(("k", "v", "k_scale", "v_scale"), held, strict=False)))


def _norms_of(layer: LayerAttention) -> dict[str, Any]:
    """How a layer's queries and keys are normed and turned, as the kernels take it."""
    rope, q_norm, k_norm = layer.spec.rope, layer.q_norm, layer.k_norm
    return {
        "inv_freq": _frequencies(rope) if rope else None,
        "scaling": rope.scaling if rope else 1.0,
        "interleaved": rope.interleaved if rope else False,
        "q_norm": q_norm.weight if q_norm else None,
        "k_norm": k_norm.weight if k_norm else None,
        "norm_eps": q_norm.spec.eps if q_norm else 0.0,
        "norm_unit_offset": q_norm.spec.unit_offset if q_norm else False,
        "norm_turned": layer.spec.norm_turned,
        "original": rope.original if rope else 0,
        "stretch": rope.stretch if rope else 0.0,
    }
