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
from ...contract import ALONE, LayerAttention, Neighbours, NormOf
from ..cache import LayerCache
from ..parallel import Split
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
                return norms.rms_norm(x, weight.data, spec.eps, unit_offset=spec.unit_offset, **how)
            assert bias is not None
            return norms.layer_norm(x, weight.data, bias.data, spec.eps, **how)

    def linear(self, x: jax.Array, weight: Weight, by: Neighbours = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        count = math.prod(x.shape[:-1])
        features, width = weight.data.shape
        fused = any(part is not None for part in (by.bias, by.activation, by.residual))
        if not linear.serves(count, features, width, x.dtype.itemsize, fused):
            return super().linear(x, weight, by)
        fused_norm = None
        if by.norm is not None and count <= linear.MOST_VECTORS:
            kind = "rms_offset" if by.norm.spec.unit_offset else by.norm.spec.kind
            norm_bias = None if by.norm.bias is None else by.norm.bias.data
            fused_norm = NormArguments(kind, by.norm.weight.data, norm_bias, by.norm.spec.eps)
        elif by.norm is not None:
            x = self.norm(x, by.norm)
        with jax.named_scope("matmul"):
            y, self._counters = linear.linear(
                x,
                weight.data,
                None if by.bias is None else by.bias.data,
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
        count, (features, width) = math.prod(x.shape[:-1]), weight.data.shape
        if not linear.serves(count, features, width, x.dtype.itemsize, False):
            return super().partial_product(x, weight)
        return self.linear(x, weight, Neighbours(wide=True))

    def attend(
        self,
        layer: LayerAttention,
        qkv: jax.Array,
        angles: Any,
        *,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: LayerCache | None = None,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
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
        cos, sin = angles[a.rope] if a.rope else (None, None)
        with jax.named_scope("rotary"):
            q, k, v, filled = rotary.rotary_append(
                qkv,
                cos,
                sin,
                heads=a.heads,
                kv_heads=a.kv_heads,
                cache=cache,
                slots=slots,
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
        return y.reshape(*y.shape[:2], -1), None if filled is None else LayerCache(*filled)

    def attend_token(
        self,
        layer: LayerAttention,
        qkv: jax.Array,
        angles: Any,
        cache: LayerCache,
        lengths: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """See `PlainOps.attend_token`."""
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
        return y[:, None], LayerCache(keys, values)


def _norms_of(layer: LayerAttention) -> dict[str, Any]:
    """How a layer's heads are paired and normed, as the kernels take it."""
    rope, q_norm, k_norm = layer.spec.rope, layer.q_norm, layer.k_norm
    return {
        "interleaved": rope.interleaved if rope else False,
        "q_norm": q_norm.weight.data if q_norm else None,
        "k_norm": k_norm.weight.data if k_norm else None,
        "norm_eps": q_norm.spec.eps if q_norm else 0.0,
        "norm_unit_offset": q_norm.spec.unit_offset if q_norm else False,
    }
