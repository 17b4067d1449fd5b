"""The ops of the contract by Triton kernels, the same as torch's; plain.py has them by plain XLA.

Which kernel serves a call follows from its shapes alone: products with few rows read the weights
once, with everything around them fused; those with many are XLA's, as are prompts' norms and
activations, which XLA fuses as well. GELU by the error function and LayerNorm of a sum take XLA
twice as long, and are ours.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....kernels.triton import activation as activations
from ....kernels.triton import (
    eight_bit,
    embedding,
    experts_choice,
    filters,
    linear,
    quantized,
    sampling,
    thresholds,
)
from ....kernels.triton import norm as norms
from ....kernels.triton.linear import NormArguments
from ....kernels.triton.mixture import Mixture
from ....kernels.triton.operands import empty
from ....kernels.xla.launches import call
from ....model.spec import Experts, ModelSpec, Recurrence, Router
from ....model.weights import Weight
from ....ops.cache_kinds import BlockCache, CrossCache, FullCache, LatentBlockCache, LatentCache
from ....ops.caches import CacheSpec, StateView
from ....ops.contract import (
    ALONE,
    EVERY,
    NO_ROWS,
    Epilogue,
    NormOf,
    Routing,
    Seen,
    StateRows,
    Unnormed,
    Weights,
)
from ....ops.embedding import scale_of
from ....ops.norms import plain_norm
from ....ops.recurrence_kernels import Launch
from ...base import SamplingFeatures
from ...kernels import (
    experts_launch,
    experts_of,
    few_rows_launch,
    fused_sequence,
    fused_token,
    left_plain,
    linear_key,
    reads_unnormed,
    route_launch,
    serves_product,
    shares_launches,
)
from ...served import EightBit, describe_codes, served
from ..sampler import CHANGED, FILTERED, SlotState
from .kernel_attention import KernelAttention
from .plain import PlainOps
from .schemes import SCHEMES


class KernelOps(KernelAttention):
    """Fused ops on a GPU, see `KernelBase`."""

    cache_kinds = frozenset(
        own.kind for own in (FullCache, BlockCache, CrossCache, LatentCache, LatentBlockCache)
    )
    kernels = "Triton"
    launches = True
    holds_scores = False
    modes = (CHANGED, FILTERED)  # without and with the launches that look for top-k and top-p
    implementations: Mapping[str, str] = {
        **PlainOps.implementations,
        "matmul": f"Triton, fused, up to {linear.MOST_ROWS} rows; XLA above",
        "embed": "Triton",
        "rms_norm": "Triton, fused into the product of a single row; XLA for prompts",
        "layer_norm": (
            "Triton, fused into the product of a single row, or with a sum in front; XLA for others"
        ),
        "qk_norm": "Triton, fused with rotary; LayerNorm, own weights and all heads as one apart",
        "rotary": "Triton, fused with the append to the cache",
        "activation": "Triton, fused into products with few rows; XLA for prompts, but for GELU",
        "router": "Triton, with norm and choice in one launch",
        "experts": (
            f"Triton, fused, up to {experts_choice.MOST_VECTORS} tokens; above by experts on the "
            "matrix units"
        ),
        "attention": "cuDNN where it can, else Triton",
        "decode_attention": "Triton, split KV, fused with rotary and append",
        "cross_attention": "Triton, split KV, of one token; XLA of more",
        "latent_attention": "Triton, split KV over latent vectors; norm, rotary and append before",
        "recurrence": "Triton, with the convolution before and the norm behind it",
        "sampling": "Triton, threefry2x32; XLA for a prompt's first token",
    }

    def reads_codes(self, weight: Weight, spec: ModelSpec, layers: Sequence[Weights]) -> str | None:
        """See `PlainOps.reads_codes`."""
        few = f"Triton, fused, up to {quantized.MOST_ROWS} rows"
        return describe_codes(weight, f"{few}; above XLA, with values by Triton")

    def left_plain(
        self, spec: ModelSpec, layers: Sequence[Weights], caches: Sequence[CacheSpec] = ()
    ) -> Mapping[str, str]:
        """See `PlainOps.left_plain`."""
        return left_plain(spec, layers)

    def recur(
        self,
        own: Recurrence,
        w: Weights,
        x: jax.Array,
        seen: Seen = EVERY,
        rows: StateRows = NO_ROWS,
    ) -> tuple[jax.Array, StateView | None]:
        """See `contract.Ops.recur`."""
        with jax.named_scope("recurrence"):
            found = fused_sequence(self, own, w, x, seen, rows)
        return found or super().recur(own, w, x, seen, rows)

    def recur_token(
        self, own: Recurrence, w: Weights, x: jax.Array, cache: StateView, moves: jax.Array
    ) -> tuple[jax.Array | Unnormed, StateView]:
        """See `contract.Ops.recur_token`."""
        with jax.named_scope("recurrence"):
            found = fused_token(self, own, w, x, cache, moves)
        return found or super().recur_token(own, w, x, cache, moves)

    def launch(
        self, launch: Launch, written: Sequence[jax.Array] = (), counts: bool = False
    ) -> tuple[Any, Sequence[jax.Array]]:
        """See `kernels.Launcher.launch`."""
        own = [self._counters] if counts else []
        y, after = call(
            launch.function,
            *launch.arguments,
            **launch.options,
            **({"counters": self._counters} if counts else {}),
            capability=self.capability,
            written=(*written, *own),
        )
        if counts:
            *after, self._counters = after
        return y, after

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
        if self.split is not None or not spec.embedding.adds_tables or quantized:
            return super().embed(spec, w, ids, positions, token_types)
        table = w["embed.weight"].data
        types = "embed.weight" if spec.embedding.types == "vocab" else "token_types.weight"
        learned = spec.positions.rows > 0
        scale = scale_of(self.maths, spec, table.dtype)
        with jax.named_scope("embed"):
            return call(
                embedding.embed,
                ids,
                table,
                positions=positions if learned else None,
                position_weight=w["positions.weight"].data if learned else None,
                position_offset=spec.positions.offset,
                token_types=token_types,
                type_weight=None if token_types is None else w[types].data,
                scale=scale,
                capability=self.capability,
            )[0]

    def _norms(self, norm: NormOf, rows: int, *, in_front: bool) -> bool:
        """See `FusedOps._norms`."""
        fused = norm.spec.kind == "layer" and in_front
        return norm.spec.kind != "affine" and (rows <= linear.MOST_ROWS or fused)

    def _normed(
        self, x: jax.Array, norm: NormOf, residual: jax.Array | None, after: bool = False
    ) -> jax.Array:
        """See `FusedOps._normed`."""
        spec, weight, bias, made = norm
        how: dict[str, Any] = {"residual": residual, "after": after}
        how["pdl"] = not made and self.starts_early(math.prod(x.shape[:-1]))
        how |= {"capability": self.capability}
        with jax.named_scope("norm"):
            how["unit_offset"] = spec.unit_offset
            if spec.kind == "rms":
                return call(norms.rms_norm, x, weight, spec.eps, **how)[0]
            return call(norms.layer_norm, x, weight, bias, spec.eps, **how)[0]

    def linear(self, x: jax.Array, weight: Weight, epilogue: Epilogue = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        if epilogue.norm is not None and not linear.fuses_norm(epilogue.norm):
            x, epilogue = self.norm(x, epilogue.norm), epilogue._replace(norm=None)
        count, own = math.prod(x.shape[:-1]), served(weight)
        eight = own.in_eight_bits(count, x.dtype.itemsize)
        if eight is not None:
            config = self.configurations.find(linear_key(x, weight, epilogue))
            return self._eight_bit_product(x, eight, epilogue, config)
        if epilogue.norm is not None and own.rounds:
            x, epilogue = self.norm(x, epilogue.norm), epilogue._replace(norm=None)
        if not serves_product(x, weight, epilogue):
            return super().linear(*self._with_values(x, weight), epilogue)
        if own.rounds:
            x = SCHEMES.quantize_input(x, weight)
        if epilogue.norm is not None and count != 1:
            x, epilogue = self.norm(x, epilogue.norm), epilogue._replace(norm=None)
        return self._launched("matmul", few_rows_launch(self, x, weight, epilogue))

    def normed(self, x: jax.Array, norm: NormOf) -> jax.Array:
        """See `PlainOps.normed`; XLA makes it within what surrounds the product."""
        return plain_norm(self.maths, x, norm)

    def read(self, x: Unnormed, weight: Weight, epilogue: Epilogue) -> tuple[jax.Array, jax.Array]:
        """See `contract.BlockOps.read`; one launch for a single row."""
        if not reads_unnormed(x, weight):
            return super().read(x, weight, epilogue)
        launch = few_rows_launch(
            self, x.y, weight, epilogue._replace(norm=x.norm), before=x.residual
        )
        return self._launched("matmul", launch)

    def _eight_bit_product(
        self, x: jax.Array, how: EightBit, epilogue: Epilogue, config: Any
    ) -> jax.Array:
        """Many rows, by the 8-bit matrix units."""
        with jax.named_scope("matmul"):
            return call(
                eight_bit.product,
                x,
                how.weight,
                epilogue.bias,
                block=how.block,
                scale=how.scale,
                norm=NormArguments.of(epilogue.norm),
                activation=epilogue.activation,
                gated=epilogue.gated,
                residual=epilogue.residual,
                dtype="float32" if epilogue.wide else None,
                config=config,
                sms=self.sms,
                pdl=self.starts_early(math.prod(x.shape[:-1])),
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
        epilogue: Epilogue = ALONE,
        partial: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.experts`."""
        own = None if self.split is None else self.split.own_experts(mixture.count)
        held = experts_of(mixture, w, self.adds_shared(x, mixture, w), own)
        if held is None:
            return super().experts(x, mixture, w, routing, epilogue, partial)
        return self._mixed(x, held, routing, epilogue, partial)

    def _mixed(
        self,
        x: jax.Array,
        mixture: Mixture,
        routing: Routing,
        epilogue: Epilogue,
        partial: jax.Array | None,
    ) -> jax.Array:
        """The output of all experts for x, with all that is added."""
        if self.split is None:
            return self.own_part(x, mixture, routing, epilogue, partial)
        bias, own = mixture.down_bias, mixture._replace(down_bias=None)
        y = self.own_part(x, own, routing, Epilogue(norm=epilogue.norm, wide=True), partial)
        return self._mixture(x, y, bias, routing, epilogue)

    def own_part(
        self,
        x: jax.Array,
        mixture: Mixture,
        routing: Routing,
        epilogue: Epilogue,
        partial: jax.Array | None,
    ) -> jax.Array:
        """The sum of this device's experts over x, with all that is added; float32 if asked."""
        launch = experts_launch(self, x, mixture, routing, epilogue, partial)
        return self._launched("experts", launch)

    def _multiplies(self, x: jax.Array, weight: Weight) -> bool:
        """See `FusedOps._multiplies`."""
        return serves_product(x, weight, ALONE)

    def matmul(self, x: jax.Array, weight: Weight, bias: jax.Array | None) -> jax.Array:
        """See `PlainOps.matmul`."""
        few = math.prod(x.shape[:-1]) <= linear.MOST_ROWS
        if bias is None or weight.pieces or few or not self._on_gpu or _is_padded(x, bias):
            return super().matmul(x, weight, bias)
        # cuBLAS adds the bias before it rounds; XLA has it do so where no float32 is asked for.
        return super().matmul(x, weight, None) + bias.astype(x.dtype)

    def activated(self, y: jax.Array, epilogue: Epilogue) -> jax.Array:
        """See `PlainOps.activated`."""
        if epilogue.gated or epilogue.activation != "gelu":
            return super().activated(y, epilogue)
        how: dict[str, Any] = {"pdl": self.starts_early(math.prod(y.shape[:-1]))}
        with jax.named_scope("activation"):
            return call(activations.activation, y, "gelu", **how, capability=self.capability)[0]

    def _with_values(self, x: jax.Array, weight: Weight) -> tuple[jax.Array, Weight]:
        """See `FusedOps._with_values`: without the codes that a kernel knows."""
        codes = served(weight).codes
        if codes is None:
            return x, weight
        x = SCHEMES.quantize_input(x, weight)
        with jax.named_scope("values"):
            matrix, _ = call(quantized.values, codes, x, capability=self.capability)
        return x, Weight(matrix, weight.axes)

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


def _is_padded(x: jax.Array, bias: jax.Array) -> bool:
    """True if XLA pads what cuBLAS multiplies; a bias then comes behind a slice, rounded twice."""
    return bool(x.shape[-1] % 8 or bias.shape[-1] % 8)


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
