"""The decoder's fused ops, composed of plain XLA primitives; kernels.py has the same by Pallas.

A fused op is what one kernel can do in one reading of the weights: its neighbours (a norm before a
product; bias, activation and residual after it) are its arguments. Everything is traced. Shapes by
letter: see `spec.py`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from ...spec import Activation, Attention, ModelSpec, Norm, Rope
from ...weights import Weight
from . import ops
from .cache import LayerCache, write
from .exchange import Exchange
from .parallel import Split
from .params import Params, Weights


class NormOf(NamedTuple):
    """A norm with its weights."""

    spec: Norm
    weight: Weight
    bias: Weight | None

    @classmethod
    def named(cls, spec: Norm, w: Weights, name: str) -> "NormOf":
        """The norm whose weights begin with `name`."""
        return cls(spec, w[f"{name}.weight"], w.get(f"{name}.bias"))


class Attending(NamedTuple):
    """What one layer's attention needs beside its projections.

    `slopes` are ALiBi's where they are not those of the spec.
    """

    spec: Attention
    q_norm: NormOf | None
    k_norm: NormOf | None
    slopes: jax.Array | None = None

    @classmethod
    def of(
        cls, spec: ModelSpec, params: Params, layer: int, split: Split | None = None
    ) -> "Attending":
        """Layer number `layer`, of which a device has its share by `split`."""
        a, w = spec.layers[layer].attention, params.layers[layer]
        q_norm, k_norm = (
            NormOf.named(a.qk_norm, w, name) if a.qk_norm else None for name in ("q_norm", "k_norm")
        )
        return cls(a, q_norm, k_norm, split.slopes(layer) if split else None)

    def scoring(self) -> dict[str, Any]:
        """How attention scores the layer's keys: arguments that are facts of the layer."""
        slopes = self.slopes
        if slopes is None and self.spec.alibi is not None:
            slopes = jnp.array(self.spec.alibi, jnp.float32)
        return {
            "scale": self.spec.scale,
            "window": self.spec.window,
            "softcap": self.spec.softcap,
            "alibi": slopes,
        }


class PlainOps:
    """Fused ops on any device, as primitives of XLA."""

    implementations: Mapping[str, str] = ops.IMPLEMENTATIONS

    def __init__(self, split: Split | None = None) -> None:
        self.split = split  # None: a device has the whole model
        self.exchange: Exchange | None = None  # peer to peer, of kernels alone
        if split is not None:
            self.implementations = {**self.implementations, "sum over devices": "XLA"}

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

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
    ) -> jax.Array:
        """Embedded tokens [B, T, E], with positions and token types where the model has them."""
        x = self._tokens(ids, w["embed.weight"])
        if spec.embed_scale != 1:
            x = x * jnp.asarray(spec.embed_scale, x.dtype)
        if spec.embed_width:
            x = ops.matmul(x, w["project_in.weight"])
        if token_types is not None:
            if spec.token_types_from_vocab:
                x = x + self._tokens(token_types, w["embed.weight"])
            else:
                x = x + ops.embed(token_types, w["token_types.weight"])
        if spec.learned_positions:
            x = x + ops.embed(positions + spec.position_offset, w["positions.weight"])
        return x

    def _tokens(self, ids: jax.Array, weight: Weight) -> jax.Array:
        """Rows of the embedding, of which each device has some."""
        if self.split is None:
            return ops.embed(ids, weight)
        rows, here = self.split.is_here(ids)
        return self.split.sum(jnp.where(here[..., None], ops.embed(rows, weight), 0))

    def norm(self, x: jax.Array, norm: NormOf, residual: jax.Array | None = None) -> jax.Array:
        """`x` [..., E], plus the residual if given, normed over the last axis."""
        if residual is not None:
            x = residual + x
        if norm.spec.kind == "rms":
            return ops.rms_norm(x, norm.weight, norm.spec.eps, norm.spec.unit_offset)
        assert norm.bias is not None
        return ops.layer_norm(x, norm.weight, norm.bias, norm.spec.eps)

    def linear(
        self,
        x: jax.Array,
        weight: Weight,
        bias: Weight | None = None,
        *,
        norm: NormOf | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        residual: jax.Array | None = None,
        wide: bool = False,
    ) -> jax.Array:
        """residual + activation(norm(x) weight^T + bias): x [..., in] to [..., out].

        With `gated` the product holds gate, then up, and gives activation(gate) * up, half as wide.
        `wide` asks for float32 results.
        """
        y = ops.matmul(PlainOps.norm(self, x, norm) if norm else x, weight, bias)
        if activation is not None:
            y = (ops.gated_activation if gated else ops.activation)(y, activation)
        if residual is not None:
            y = residual + y
        return y.astype(jnp.float32) if wide else y

    def row_product(
        self, x: jax.Array, weight: Weight, bias: Weight | None, residual: jax.Array | None
    ) -> jax.Array:
        """residual + x weight^T + bias, where each device has a share of the columns.

        Bias and residual are added once, after the sum over devices.
        """
        if self.split is None:
            return self.linear(x, weight, bias, residual=residual)
        y = self.split.sum(self.partial_product(x, weight))
        if bias is not None:
            y = y + bias.data.astype(y.dtype)
        y = y.astype(x.dtype)
        return y if residual is None else residual + y

    def partial_product(self, x: jax.Array, weight: Weight) -> jax.Array:
        """x weight^T of this device's columns, before the sum; float32 where rows are few."""
        return ops.partial_product(x, weight)

    def gather_logits(self, logits: jax.Array) -> jax.Array:
        """Logits [..., V] from each device's share of the vocabulary."""
        return logits if self.split is None else self.split.gather_logits(logits)

    def angles(self, spec: ModelSpec, positions: jax.Array) -> Any:
        """What `attend` and `attend_token` need of the tokens' positions [B, T], once a pass."""
        found: dict[Rope, tuple[jax.Array, jax.Array]] = {}
        for layer in spec.layers:
            rope = layer.attention.rope
            if rope and rope not in found:
                frequencies = jnp.array(rope.inv_freq, jnp.float32)
                turned = positions[..., None].astype(jnp.float32) * frequencies
                found[rope] = jnp.cos(turned) * rope.scaling, jnp.sin(turned) * rope.scaling
        return found

    def _heads(self, layer: Attending, qkv: jax.Array, angles: Any) -> list[jax.Array]:
        """Queries, keys and values [B, T, heads, D] of packed ones, normed and rotated."""
        a = layer.spec
        query, key, _ = a.qkv_sizes
        parts = jnp.split(qkv, (query, query + key), axis=-1)
        q, k, v = (p.reshape(*p.shape[:-1], -1, a.head_dim) for p in parts)
        if layer.q_norm and layer.k_norm:
            q, k = (PlainOps.norm(self, x, n) for x, n in ((q, layer.q_norm), (k, layer.k_norm)))
        if a.rope:
            cos, sin = angles[a.rope]
            q, k = (ops.rotary(part, cos, sin, a.rope.interleaved) for part in (q, k))
        return [q, k, v]

    def attend(
        self,
        layer: Attending,
        qkv: jax.Array,
        angles: Any,
        *,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: LayerCache | None = None,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attention of whole sequences, packed qkv [B, T, (H+2K) D] to [B, T, H D], and the cache.

        `positions` [B, T] are what ALiBi counts, None for 0 to T-1. With `cache`, keys and values
        are in it from the start of its `slots` [B]; slots that it does not have are left out.
        """
        q, k, v = self._heads(layer, qkv, angles)
        if cache is not None:
            assert slots is not None
            cache = write(cache, slots, k, v)
        y = ops.attention(
            q,
            k,
            v,
            causal=layer.spec.causal,
            mask=mask,
            segments=segments,
            positions=positions,
            **layer.scoring(),
        )
        return y.reshape(*y.shape[:2], -1), cache

    def attend_token(
        self,
        layer: Attending,
        qkv: jax.Array,
        angles: Any,
        cache: LayerCache,
        lengths: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """Attention of one new token a slot, qkv [N, 1, (H+2K) D] to [N, 1, H D], and the cache.

        Its key and value are in the cache at position lengths[n].
        """
        q, k, v = self._heads(layer, qkv, angles)
        cache = ops.append(cache, k[:, 0], v[:, 0], lengths)
        y = ops.decode_attention(q[:, 0], cache, lengths + 1, **layer.scoring())
        return y.reshape(len(lengths), 1, -1), cache
