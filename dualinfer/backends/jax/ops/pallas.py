"""The ops of the contract by Pallas' kernels, for TPUs; plain.py has them by plain XLA.

Which kernel serves a call follows from its shapes alone. What a kernel cannot serve of a call goes
to plain ops, and `implementations` and `left_plain` say so.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.pallas import activation as activations
from ....kernels.pallas import experts as mixing
from ....kernels.pallas import norm as norming
from ....kernels.pallas import product as products
from ....kernels.pallas import state as states
from ....kernels.pallas import thresholds
from ....model.spec import Activation, Experts, ModelSpec, Recurrence, Router
from ....model.weights import Weight
from ....ops import mixtures
from ....ops.caches import CacheSpec, StateView
from ....ops.contract import ALONE, Epilogue, NormOf, Routing, Weights
from ....ops.recurrence_kernels import SteppedRecurrence
from ....ops.schemes import of_each, rounds_input
from ....quantization import BlockScheme
from .. import sampler
from ..maths import MATHS
from .pallas_attention import PallasAttention, appends
from .pallas_base import norm_of
from .plain import IMPLEMENTATIONS
from .schemes import SCHEMES

_FEW = products.MOST_ROWS


class PallasOps(PallasAttention):
    """Fused ops on a TPU; with `interpret`, for tests, on any device."""

    kernels = "Pallas"
    holds_scores = False
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

    # What is told of them

    def reads_codes(self, weight: Weight, spec: ModelSpec, layers: Sequence[Weights]) -> str | None:
        """See `PlainOps.reads_codes`; a layer's experts are read by a kernel if all are."""
        codes = None if weight.pieces else codes_of(weight)
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
        layers_of = [
            (spec.layers[i].attending, own)
            for (i, part), own in zip(spec.caches if caches else (), caches, strict=False)
            if part == "attention"
        ]
        appended = [appends(a, own) for a, own in layers_of]
        if not all(appended):
            for op in ("rotary", "qk_norm"):
                left[op] = "for some layers" if any(appended) else ""
        return left

    # Products and norms

    def _norms(self, norm: NormOf, rows: int, *, in_front: bool) -> bool:
        """See `FusedOps._norms`."""
        return rows <= _FEW and norm_of(norm) is not None

    def _normed(
        self, x: jax.Array, norm: NormOf, residual: jax.Array | None, after: bool = False
    ) -> jax.Array:
        """See `FusedOps._normed`."""
        own = norm_of(norm)
        assert own is not None
        rows = None if residual is None else residual.reshape(-1, x.shape[-1])
        with jax.named_scope("norm"):
            how: dict[str, Any] = {"after": after, "interpret": self.interpret}
            y = norming.norm(x.reshape(-1, x.shape[-1]), own[0], own[1], rows, **how)
        return y.reshape(x.shape)

    def linear(self, x: jax.Array, weight: Weight, epilogue: Epilogue = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        count = math.prod(x.shape[:-1])
        matrix = None if weight.pieces else matrix_of(weight, 2 if epilogue.gated else 1)
        if matrix is None or not products.serves(count, matrix, epilogue.gated, x.dtype.itemsize):
            return super().linear(x, weight, epilogue)
        own = None
        if epilogue.norm is not None:
            own = None if rounds_input(weight) else norm_of(epilogue.norm)
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
        matrix = None if weight.pieces else matrix_of(weight)
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
        matrix = None if weight.pieces or rounds_input(weight) else matrix_of(weight)
        coded = isinstance(matrix, products.Codes)
        size = x.dtype.itemsize if matrix is None or coded else matrix.dtype.itemsize
        if matrix is None or not products.serves(count, matrix, False, size):
            how: dict[str, Any] = {"bias": bias, "choice_bias": choice_bias, "norm": norm}
            return super().route(x, weight, router, **how)
        own = None
        if norm is not None:
            own = norm_of(norm) if coded or matrix.dtype == x.dtype else None
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
        up, down = (matrix_of(w[f"experts.{name}.weight"]) for name in ("up", "down"))
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

    # Sampling

    def filtered(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
    ) -> jax.Array:
        """See `sampler.filter_logits`."""
        if not thresholds.serves(logits.shape[-1]):
            return sampler.filter_logits(logits, top_k, top_p, min_p)
        return thresholds.filter_logits(logits, top_k, top_p, min_p, interpret=self.interpret)


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


def matrix_of(weight: Weight, parts: int = 1) -> Any:
    """A matrix as the kernel takes it, whose rows are of `parts`; None if it knows no such."""
    return weight.data if weight.scheme is None else codes_of(weight, parts)


def codes_of(weight: Weight, parts: int = 1) -> products.Codes | None:
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
    found = [codes_of(weight) for weight in weights]
    return all(codes is not None and mixing.serves_codes(codes, 4) for codes in found)
