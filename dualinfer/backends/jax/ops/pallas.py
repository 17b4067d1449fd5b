"""The ops of the contract by Pallas' kernels, for TPUs; plain.py has them by plain XLA.

Which kernel serves a call follows from its shapes alone. What a kernel cannot serve of a call goes
to plain ops, and `implementations` and `left_plain` say so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from ....kernels.pallas import activation as activations
from ....kernels.pallas import append as appending
from ....kernels.pallas import attention as attending
from ....kernels.pallas import experts as mixing
from ....kernels.pallas import norm as norming
from ....kernels.pallas import product as products
from ....kernels.pallas import state as states
from ....kernels.pallas import thresholds
from ....kernels.pallas.launch import LANES
from ....model.spec import Activation, Attention, Experts, ModelSpec, Recurrence, Router
from ....model.weights import Weight
from ....ops import attention, mixtures
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
from ....ops.caches import CacheSpec, CacheView, CrossView, StateView
from ....ops.contract import (
    ALONE,
    Epilogue,
    LatentQkv,
    LayerAttention,
    NormOf,
    Routing,
    SteppedRecurrence,
    Weights,
)
from ....ops.maths import cut, flat, heads
from ....ops.norms import layer_norm, rms_norm
from ....ops.plain import matrices_of
from ....ops.schemes import of_each, rounds_input
from ....quantization import BlockScheme
from .. import sampler
from ..maths import MATHS
from ..parallel import Split
from .fused import FusedOps
from .plain import IMPLEMENTATIONS
from .schemes import SCHEMES

_FEW = products.MOST_ROWS


class PallasOps(FusedOps):
    """Fused ops on a TPU; with `interpret`, for tests, on any device."""

    kernels = "Pallas"
    holds_scores = False
    grain = LANES  # of the rows of caches
    cache_kinds = frozenset(
        own.kind for own in (FullCache, BlockCache, CrossCache, LatentCache, LatentBlockCache)
    )
    cache_codes = frozenset({"int8", "fp8_e4m3"})
    implementations: Mapping[str, str] = {
        **IMPLEMENTATIONS,
        "matmul": f"Pallas, fused, up to {_FEW} rows; XLA above",
        "rms_norm": "Pallas, fused into products with few rows; XLA for prompts",
        "layer_norm": "Pallas, fused into products with few rows; XLA for prompts",
        "qk_norm": "Pallas, fused with rotary, of a token; XLA for prompts",
        "rotary": "Pallas, fused with the append to the cache, of a token; XLA for prompts",
        "activation": "Pallas, fused into products with few rows; XLA for prompts",
        "router": f"Pallas, with its norm, up to {_FEW} rows; the choice by XLA",
        "experts": "Pallas, rows sorted by expert",
        "attention": "Pallas, by blocks of keys",
        "decode_attention": "Pallas, by blocks of keys, behind rotary and append",
        "cross_attention": "Pallas, by blocks of keys",
        "latent_attention": "Pallas over latent vectors; a head's matrices by XLA, or Pallas",
        "recurrence": "Pallas, a token into its state; XLA for all before and behind, and prompts",
        "sampling": "XLA, threefry2x32; thresholds of filters by Pallas",
    }

    def __init__(self, split: Split | None = None, *, interpret: bool = False) -> None:
        super().__init__(split)
        self.interpret = interpret

    # What is told of them

    def reads_codes(self, weight: Weight, spec: ModelSpec, layers: Sequence[Weights]) -> str | None:
        """See `PlainOps.reads_codes`; a layer's experts are read by a kernel if all are."""
        codes = None if weight.pieces else _codes(weight)
        if codes is not None and weight.data.ndim > 2:
            known = (
                self._runs_experts(own.mlp, w)
                for own, w in zip(spec.all_layers, layers, strict=False)
                if isinstance(own.mlp, Experts) and any(leaf is weight for leaf in w.values())
            )
            return "Pallas, rows sorted by expert" if any(known) else None
        if codes is None or not products.serves(1, codes, False, 2):
            return None
        return f"Pallas, fused, up to {_FEW} rows; above XLA, which makes values of them"

    def left_plain(
        self, spec: ModelSpec, layers: Sequence[Weights], caches: Sequence[CacheSpec] = ()
    ) -> Mapping[str, str]:
        """See `PlainOps.left_plain`."""
        left = {}
        known = [
            self._runs_experts(own.mlp, layers[i])
            for i, own in enumerate(spec.all_layers)
            if isinstance(own.mlp, Experts)
        ]
        if not all(known):
            left["experts"] = "for some layers" if any(known) else ""
        recurrences = [own.recurrence for own in spec.layers if own.recurrence is not None]
        stepped = [isinstance(own, SteppedRecurrence) for own in recurrences]
        if not all(stepped):
            left["recurrence"] = "for some layers" if any(stepped) else ""
        attending = [
            (spec.layers[i].attending, own)
            for (i, part), own in zip(spec.caches if caches else (), caches, strict=False)
            if part == "attention"
        ]
        appended = [_appends(a, own) for a, own in attending]
        if not all(appended):
            for op in ("rotary", "qk_norm"):
                left[op] = "for some layers" if any(appended) else ""
        return left

    def lies(self, cache: CacheSpec) -> CacheSpec:
        """See `PlainOps.lies`: a TPU turns arrays whose rows fill no tiles, and kernels read rows.

        Each call would turn all of such a cache, and turn it back.
        """
        if cache.kind not in self.cache_kinds:
            return cache
        key, value = (-(-n // self.grain) * self.grain for n in (cache.key_dim, cache.value_dim))
        return replace(cache, key_dim=key, value_dim=value)

    # Products and norms

    def _norms(self, norm: NormOf, rows: int, *, in_front: bool) -> bool:
        """See `FusedOps._norms`."""
        return rows <= _FEW and _norm_of(norm) is not None

    def _normed(
        self, x: jax.Array, norm: NormOf, residual: jax.Array | None, after: bool = False
    ) -> jax.Array:
        """See `FusedOps._normed`."""
        own = _norm_of(norm)
        assert own is not None
        rows = None if residual is None else residual.reshape(-1, x.shape[-1])
        with jax.named_scope("norm"):
            how: dict[str, Any] = {"after": after, "interpret": self.interpret}
            y = norming.norm(x.reshape(-1, x.shape[-1]), own[0], own[1], rows, **how)
        return y.reshape(x.shape)

    def linear(self, x: jax.Array, weight: Weight, epilogue: Epilogue = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        count = math.prod(x.shape[:-1])
        matrix = None if weight.pieces else _matrix(weight, 2 if epilogue.gated else 1)
        if matrix is None or not products.serves(count, matrix, epilogue.gated, x.dtype.itemsize):
            return super().linear(x, weight, epilogue)
        own = None
        if epilogue.norm is not None:
            own = None if rounds_input(weight) else _norm_of(epilogue.norm)
            rows = x.reshape(count, -1)
            if own is None or not products.norms(rows, matrix, epilogue.gated):
                x, own = self.norm(x, epilogue.norm), None
        if rounds_input(weight):
            x = SCHEMES.quantize_input(x, weight)
        act, residual = epilogue.activation, epilogue.residual
        with jax.named_scope("matmul"):
            y = products.product(
                x.reshape(count, -1),
                matrix,
                dtype=jnp.float32 if epilogue.wide else x.dtype,
                bias=epilogue.bias,
                norm=own[0] if own else None,
                norm_weights=own[1] if own else (),
                activation=None if act is None else partial(in_kernel, act),
                gated=epilogue.gated,
                residual=None if residual is None else residual.reshape(count, -1),
                interpret=self.interpret,
            )
        return y.reshape(*x.shape[:-1], -1)

    def _multiplies(self, x: jax.Array, weight: Weight) -> bool:
        """See `FusedOps._multiplies`."""
        matrix = None if weight.pieces else _matrix(weight)
        count, itemsize = math.prod(x.shape[:-1]), x.dtype.itemsize
        return matrix is not None and products.serves(count, matrix, False, itemsize)

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
        """See `contract.BlockOps.route`; the norm is the product's where dtypes are one."""
        count = math.prod(x.shape[:-1])
        matrix = None if weight.pieces or rounds_input(weight) else _matrix(weight)
        coded = isinstance(matrix, products.Codes)
        size = x.dtype.itemsize if matrix is None or coded else matrix.dtype.itemsize
        if matrix is None or not products.serves(count, matrix, False, size):
            how: dict[str, Any] = {"bias": bias, "choice_bias": choice_bias, "norm": norm}
            return super().route(x, weight, router, **how)
        own = None
        if norm is not None:
            own = _norm_of(norm) if coded or matrix.dtype == x.dtype else None
            if own is None or not products.norms(x.reshape(count, -1), matrix, False):
                x, own = self.norm(x, norm), None
        if not coded and matrix.dtype != x.dtype:
            x, matrix = MATHS.wide(x), MATHS.wide(matrix)
        with jax.named_scope("router"):
            scores = products.product(
                x.reshape(count, -1),
                matrix,
                dtype=jnp.float32,
                bias=bias,
                norm=own[0] if own else None,
                norm_weights=own[1] if own else (),
                interpret=self.interpret,
            )
        scores = scores.reshape(*x.shape[:-1], -1)
        return mixtures.routed(self.maths, scores, router, choice_bias)

    def experts(
        self,
        x: jax.Array,
        mixture: Experts,
        w: Weights,
        routing: Routing,
        epilogue: Epilogue = ALONE,
        partial: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.experts`."""
        if not self._runs_experts(mixture, w):
            return super().experts(x, mixture, w, routing, epilogue, partial)
        rows = self.norm(x, epilogue.norm) if epilogue.norm else x
        up, down = (_matrix(w[f"experts.{name}.weight"]) for name in ("up", "down"))
        count = routing.experts.shape[-1]
        how: dict[str, Any] = {"up_bias": w.get("experts.up.bias"), "interpret": self.interpret}
        run: Any = mixing.in_codes
        maths, chosen = self.maths, routing.experts.reshape(-1, count)
        own: Any = None if self.split is None else self.split.own_experts(mixture.count)
        if own is None and mixture.idle:
            own = 0, mixture.count
        if own is not None:  # others have no weights, or are other devices'
            here = (chosen >= own[0]) & (chosen < own[1])
            chosen = jnp.where(here, chosen - own[0], len(w["experts.down.weight"].data))
        if not isinstance(up, products.Codes):
            run, maths, how["gated"] = mixing.experts, _KERNEL_MATHS, mixture.gated
        else:
            weights = [w[f"experts.{name}.weight"] for name in ("up", "down")]
            how["rounded"] = (
                lambda x, own: SCHEMES.quantize_input(x, of_each(weights[0], own)),
                lambda h, own: SCHEMES.quantize_input(
                    *self._share_input(h, of_each(weights[1], own))
                ),
            )
        with jax.named_scope("experts"):
            parts = run(
                rows.reshape(-1, rows.shape[-1]),
                up,
                down,
                chosen,
                hidden=lambda h: mixtures.hidden(maths, h, mixture),
                **how,
            )
            parts = parts.reshape(*routing.experts.shape, -1)
            y = mixtures.weighted(self.maths, parts, routing.weights)
        y = y if partial is None else y + partial
        return self._mixture(x, y, w.get("experts.down.bias"), routing, epilogue)

    def _runs_experts(self, mixture: Experts, w: Weights) -> bool:
        """True if a kernel runs a layer's experts.

        Of those that devices share out the inputs of down are rounded by numbers of all devices,
        which have other rows.
        """
        shares = self.split and self.split.plan.own_experts(mixture.count)
        rounds = rounds_input(w["experts.down.weight"])
        return not (shares and rounds) and _knows_experts(w)

    def recur_token(
        self, own: Recurrence, w: Weights, x: jax.Array, cache: StateView, moves: jax.Array
    ) -> tuple[jax.Array, StateView]:
        """See `PlainOps.recur_token`; the kernel has the states of all slots, and moves them."""
        *rest, state = cache.arrays
        if not isinstance(own, SteppedRecurrence) or not states.serves(state):
            return super().recur_token(own, w, x, cache, moves)
        with jax.named_scope("recurrence"):
            step, finish, kept = own.stepped(self, w, x, tuple(held[: len(x)] for held in rest))
            y, state = states.take_in(*step, state, moves, interpret=self.interpret)
            made: Any = type(cache)
            if rest:
                rest = made(*rest).move(moves, *kept).arrays
            return finish(y), made(*rest, state)

    # Attention

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
        """See `PlainOps.attend`."""
        a, placed = layer.spec, None
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
                k, v = cache.kept(k, v)
        batch, tokens = q.shape[:2]
        segments = attention.chunks(MATHS, a, (batch, tokens), mask, segments, q)
        numbers = {} if segments is None and mask is None else _numbers(q, segments, mask)
        first, all_of_it = jnp.zeros(batch, jnp.int32), jnp.full(batch, tokens, jnp.int32)
        own: Any = numbers
        seen = attending.Seen(first, all_of_it, a.causal, a.window, **own)
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
        with jax.named_scope("attention"):
            y = self._by_blocks(q, keys, v.swapaxes(1, 2), seen, scores)
        return flat(y), cache

    def attend_rows(
        self,
        layer: LayerAttention,
        qkv: jax.Array | LatentQkv,
        angles: Any,
        cache: CacheView,
        slots: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        reach: int | None = None,
    ) -> tuple[jax.Array, CacheView]:
        """See `PlainOps.attend_rows`; padding reads what is behind no row's end."""
        a = layer.spec
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
        with jax.named_scope("attention"):
            y = self._in_cache(q, cache, read, seen, scores, reach)
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
        """Attention by the kernel, in the keys' dtype where that is wider than q's."""
        dtype = jnp.promote_types(q.dtype, k.dtype) if more.get("scales") is None else jnp.float32
        y = attending.attend(q.astype(dtype), k, v, *how, **more, interpret=self.interpret)
        return y.astype(q.dtype)

    def _in_cache(
        self,
        q: jax.Array,
        cache: CacheView,
        slots: jax.Array,
        seen: attending.Seen,
        scores: attending.Scores,
        reach: int | None,
    ) -> jax.Array:
        """Attention of rows q [B, T, H, D] to what their slots have."""
        own = cast(Any, cache)
        scales = None if own.k_scale is None else (own.k_scale, own.v_scale)
        where: dict[str, Any] = {"slots": slots}
        if isinstance(own, BlockCache):
            where = {"table": jnp.clip(own.table[slots], 0, len(own.k) - 1)}
        where |= {"scales": scales, "reach": reach}
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
        turn = None
        if a.rope:
            cos, sin = (x[:, 0] for x in angles[a.rope])
            if a.rope.rounded:
                cos, sin = (MATHS.rounded(x, qkv.dtype) for x in (cos, sin))
            cos, sin = (jnp.broadcast_to(x, (len(qkv), x.shape[-1])) for x in (cos, sin))
            turning, style = 2 * cos.shape[-1], a.rope.interleaved
            wide = appending.widened(cos, sin, a.head_dim + more, style)
            turn = appending.Turn(*wide, appending.pairs(a.head_dim + more, turning, style))
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

        def put(held: jax.Array, new: jax.Array) -> jax.Array:
            where = slots, starts, lengths, getattr(own, "table", None)
            return appending.put_rows(held, new, *where, interpret=self.interpret)

        if latent:
            return own._replace(shared=put(first, fitted(MATHS, k, own.shared))[:, 0])
        return changed(own, put, k, v)

    # Sampling

    def filtered(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
    ) -> jax.Array:
        """See `sampler.filter_logits`."""
        if not thresholds.serves(logits.shape[-1]):
            return sampler.filter_logits(logits, top_k, top_p, min_p)
        return thresholds.filter_logits(logits, top_k, top_p, min_p, interpret=self.interpret)


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


def _numbers(
    q: jax.Array, segments: jax.Array | None, mask: jax.Array | None
) -> dict[str, jax.Array]:
    """By which numbers queries see keys: those of their segment which the mask shows."""
    own = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else segments.astype(jnp.int32)
    return {"queries": own, "keys": own if mask is None else jnp.where(mask, own, -1)}


def _slots_of(cache: CacheView) -> int:
    own = cast(Any, cache)
    if isinstance(own, BlockCache | LatentBlockCache):
        return len(own.table)
    return len(own.shared if isinstance(own, LatentCache) else own.k)


def _norm_of(norm: NormOf) -> tuple[Any, list[jax.Array]] | None:
    """A norm as kernels take it: a function of rows and weights, and these; None if it is none."""
    spec, weights = norm.spec, [norm.weight, norm.bias]
    if spec.kind == "affine" or any(x is not None and x.ndim != 1 for x in weights):
        return None
    if spec.kind == "layer" and norm.weight is None:
        return None

    def made(x: jax.Array, *given: jax.Array) -> jax.Array:
        rest = list(given)
        weight, bias = (None if own is None else rest.pop(0) for own in weights)
        if spec.kind == "rms":
            return rms_norm(MATHS, x, weight, spec.eps, spec.unit_offset)
        return layer_norm(MATHS, x, cast(Any, weight), bias, spec.eps, spec.unit_offset)

    return made, [x for x in weights if x is not None]


def _head_norm(layer: LayerAttention) -> appending.HeadNorm | bool | None:
    """The norm of a layer's heads as the kernel takes it; False without one, None if it is none."""
    if layer.q_norm is None or layer.k_norm is None:
        return False
    q, k = _norm_of(layer.q_norm), _norm_of(layer.k_norm)
    if layer.spec.qk_norm_over == "all" or q is None or k is None:
        return None
    return appending.HeadNorm(q[0], q[1], k[1], layer.spec.norm_turned)


def _appends(a: Attention, cache: CacheSpec) -> bool:
    """True if one kernel turns a layer's token and puts it in the cache; see `_appended`."""
    known = cache.kind == FullCache.kind and not cache.codes and not a.clips_normed
    normed = a.qk_norm_over in ("head", "turned") and cache.key_dim == a.head_dim
    return known and (a.qk_norm is None or normed)


_OWN = {"gelu": activations.gelu, "relu": activations.relu, "relu2": activations.relu2}


def in_kernel(kind: Activation, y: jax.Array) -> jax.Array:
    """An activation of float32 as kernels compute it."""
    return _OWN[kind](y) if kind in _OWN else MATHS.activation(y, kind)


class _KernelMaths(type(MATHS)):
    """JAX's Maths within a kernel."""

    def activation(self, a: jax.Array, kind: Activation) -> jax.Array:
        """See `Maths`."""
        return in_kernel(kind, a)


_KERNEL_MATHS = _KernelMaths()


def _matrix(weight: Weight, parts: int = 1) -> Any:
    """A matrix as the kernel takes it, whose rows are of `parts`; None if it knows no such."""
    return weight.data if weight.scheme is None else _codes(weight, parts)


def _codes(weight: Weight, parts: int = 1) -> products.Codes | None:
    """A matrix of codes as the kernel takes it; None if it knows no such."""
    scheme = weight.scheme
    if not isinstance(scheme, BlockScheme) or scheme.groups:
        return None
    rows, columns, width = weight.blocks
    features, zero = weight.data.shape[-2], weight.beside.get("zero")
    shared = products.shares(rows, features // parts)

    def of_rows(x: jax.Array) -> jax.Array:
        if rows == 1 or shared:
            return x
        whole = x.shape[-2] * (rows or features)
        spread = jnp.repeat(x, rows or features, -2, total_repeat_length=whole)
        return spread[..., :features, :]

    scale = weight.beside["scale"]
    if scheme.scale_dtype.startswith("float8"):
        scale = MATHS.float8(scale, scheme.scale_dtype)
    return products.Codes(
        weight.data,
        of_rows(scale),
        None if zero is None else of_rows(zero),
        weight.beside.get("outer"),
        scheme.codes,
        0 if columns >= width else columns,
        width,
        0 if scheme.zeros else scheme.code.raised,
        scheme.table,
        rows if shared else 1,
    )


def _knows_experts(w: Weights) -> bool:
    """True if a kernel does what a layer's experts do, with matrices of floats or both of codes."""
    weights = [w[f"experts.{name}.weight"] for name in ("up", "down")]
    if any(weight.pieces for weight in weights):
        return False
    if all(weight.scheme is None for weight in weights):
        return True
    found = [_codes(weight) for weight in weights]
    return all(codes is not None and mixing.serves_codes(codes, 4) for codes in found)
