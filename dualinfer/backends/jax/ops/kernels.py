"""The ops of the contract by Pallas kernels; plain.py has the same ones by plain XLA.

Which kernel serves a call follows from its shapes alone: products with few rows read the weights
once, with everything around them fused; those with many are XLA's, as are prompts' norms and
activations, which XLA fuses as well.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from ....kernels.pallas import (
    attention,
    attention_choice,
    attention_options,
    decode_attention,
    linear,
    rotary,
)
from ....kernels.pallas import norm as norms
from ....kernels.pallas.linear import NormArguments
from ....model.spec import ModelSpec
from ....model.weights import Weight
from ...caches import CacheView
from ...contract import ALONE, LayerAttention, Neighbours, NormOf
from ..cache import FullCache
from ..parallel import Split
from . import primitives
from .plain import PlainOps, scoring

_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3")


def runs_kernels(device: jax.Device) -> bool:
    """True on NVIDIA's data-centre GPUs from Ampere on.

    They have more than 99 KiB of shared memory for a block, which the kernels' configurations fill.
    """
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform == "gpu" and capability in _CAPABILITIES


def unserved(spec: ModelSpec) -> str | None:
    """What of a model is beyond the kernels, for people; None if they serve it."""
    dim = max(layer.attention.head_dim for layer in spec.layers)
    if dim > attention_options.LARGEST_HEAD:
        return f"a head_dim of {dim} (at most {attention_options.LARGEST_HEAD})"
    if spec.embed > norms.WIDEST:
        return f"a hidden size of {spec.embed} (at most {norms.WIDEST})"
    return None


class KernelOps(PlainOps):
    """Fused ops on a GPU; `interpret` runs the kernels on any device, for tests."""

    cache_kinds = frozenset({FullCache.kind})
    kernels = "Pallas"
    holds_scores = False
    implementations: Mapping[str, str] = {
        **PlainOps.implementations,
        "matmul": f"Pallas, fused, up to {linear.MOST_ROWS} rows; XLA above",
        "rms_norm": "Pallas, fused into the product of one or two rows; XLA for prompts",
        "layer_norm": "Pallas, fused into the product of one or two rows; XLA for prompts",
        "rotary": "Pallas, fused with the append to the cache",
        "activation": "Pallas, fused into products with few rows; XLA for prompts",
        "attention": "cuDNN where it can, else Pallas",
        "decode_attention": "Pallas, split KV, fused with rotary and append",
    }

    def __init__(self, sms: int, interpret: bool = False, split: Split | None = None) -> None:
        super().__init__(split)
        self.sms, self.interpret = sms, interpret
        self._counters: jax.Array | None = None

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

    def norm(self, x: jax.Array, norm: NormOf, residual: jax.Array | None = None) -> jax.Array:
        """See `PlainOps.norm`."""
        if math.prod(x.shape[:-1]) > linear.MOST_ROWS:
            return super().norm(x, norm, residual)
        spec, weight, bias = norm
        how: dict[str, Any] = {"residual": residual, "interpret": self.interpret}
        with jax.named_scope("norm"):
            if spec.kind == "rms":
                return norms.rms_norm(x, weight, spec.eps, unit_offset=spec.unit_offset, **how)
            assert bias is not None
            return norms.layer_norm(x, weight, bias, spec.eps, **how)

    def linear(self, x: jax.Array, weight: Weight, by: Neighbours = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        fused = any(part is not None for part in (by.bias, by.activation, by.residual))
        if not self._serves_product(x, weight, fused):
            return super().linear(x, weight, by)
        count = math.prod(x.shape[:-1])
        fused_norm = None
        if by.norm is not None and count <= linear.MOST_VECTORS:
            kind = "rms_offset" if by.norm.spec.unit_offset else by.norm.spec.kind
            fused_norm = NormArguments(kind, by.norm.weight, by.norm.bias, by.norm.spec.eps)
        elif by.norm is not None:
            x = self.norm(x, by.norm)
        with jax.named_scope("matmul"):
            y, self._counters = linear.linear(
                x,
                weight.data,
                by.bias,
                norm=fused_norm,
                activation=by.activation,
                gated=by.gated,
                residual=by.residual,
                dtype=jnp.float32 if by.wide else None,
                counters=self._counters,
                sms=self.sms,
                interpret=self.interpret,
            )
        return y

    def partial_product(self, x: jax.Array, weight: Weight) -> jax.Array:
        """See `PlainOps.partial_product`."""
        if not self._serves_product(x, weight, False):
            return super().partial_product(x, weight)
        return self.linear(x, weight, Neighbours(wide=True))

    def _serves_product(self, x: jax.Array, weight: Weight, fused: bool) -> bool:
        """Whether a kernel serves a product; none reads quantized weights yet."""
        if weight.scheme is not None:
            return False
        count, (features, width) = math.prod(x.shape[:-1]), weight.shape
        return linear.serves(count, features, width, x.dtype.itemsize, fused)

    def attend(
        self,
        layer: LayerAttention,
        qkv: jax.Array,
        angles: Any,
        *,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: CacheView | None = None,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheView | None]:
        """See `PlainOps.attend`; what the cache holds behind the keys and values is left there."""
        a = layer.spec
        how: dict[str, Any] = {"causal": a.causal, "mask": mask, "segments": segments}
        how |= scoring(layer)
        scale = how.pop("scale")
        positions = None if how["alibi"] is None else positions
        run = {"sms": self.sms, "interpret": self.interpret}

        def cudnn_serves(q: Any, k: Any) -> bool:
            return not self.interpret and attention_choice.cudnn_serves(q, k, **how)

        as_it_is = cache is None and not (a.rope or layer.q_norm or layer.k_norm)
        if as_it_is and not cudnn_serves(*attention.packed_heads(qkv, a.heads, a.kv_heads)):
            with jax.named_scope("attention"):
                y = attention.packed_attention(
                    qkv, a.heads, a.kv_heads, scale=scale, positions=positions, **how, **run
                )
            return y.reshape(*y.shape[:2], -1), None
        full = cache if isinstance(cache, FullCache) else None
        cos, sin = angles[a.rope] if a.rope else (None, None)
        with jax.named_scope("rotary"):
            q, k, v, filled = rotary.rotary_append(
                qkv,
                cos,
                sin,
                heads=a.heads,
                kv_heads=a.kv_heads,
                cache=full,
                slots=None if full is None else slots,
                interpret=self.interpret,
                **_norms_of(layer),
            )
        with jax.named_scope("attention"):
            if cudnn_serves(q, k):
                y = jax.nn.dot_product_attention(
                    q, k, v, scale=scale, is_causal=a.causal, implementation="cudnn"
                )
            else:
                y = attention.attention(q, k, v, scale=scale, positions=positions, **how, **run)
        if full is not None and filled is not None:
            return y.reshape(*y.shape[:2], -1), FullCache(*filled)
        if cache is not None:
            assert slots is not None
            cache = primitives.write(cache, slots, k, v)
        return y.reshape(*y.shape[:2], -1), cache

    def attend_token(
        self,
        layer: LayerAttention,
        qkv: jax.Array,
        angles: Any,
        cache: CacheView,
        lengths: jax.Array,
    ) -> tuple[jax.Array, CacheView]:
        """See `PlainOps.attend_token`."""
        if not isinstance(cache, FullCache):
            return super().attend_token(layer, qkv, angles, cache, lengths)
        a, rope = layer.spec, layer.spec.rope
        assert self._counters is not None
        with jax.named_scope("decode_attention"):
            y, (keys, values), self._counters = decode_attention.decode_attention(
                qkv[:, 0],
                cache,
                lengths,
                heads=a.heads,
                counters=self._counters,
                inv_freq=jnp.array(rope.inv_freq, jnp.float32) if rope else None,
                scaling=rope.scaling if rope else 1.0,
                sms=self.sms,
                interpret=self.interpret,
                **_norms_of(layer),
                **scoring(layer),
            )
        return y[:, None], FullCache(keys, values)


def _norms_of(layer: LayerAttention) -> dict[str, Any]:
    """How a layer's heads are paired and normed, as the kernels take it."""
    rope, q_norm, k_norm = layer.spec.rope, layer.q_norm, layer.k_norm
    return {
        "interleaved": rope.interleaved if rope else False,
        "q_norm": q_norm.weight if q_norm else None,
        "k_norm": k_norm.weight if k_norm else None,
        "norm_eps": q_norm.spec.eps if q_norm else 0.0,
        "norm_unit_offset": q_norm.spec.unit_offset if q_norm else False,
    }
