"""The one JAX decoder: every family's forward pass, read off its ModelSpec. Traced, never eager.

How a layer attends (a whole sequence, a prompt into the cache, one token from the cache) is the
`attend` function that the runner passes in, and whether kernels or plain XLA compute is `ops`; all
else is the same in every case. Layers are unrolled: a scan over stacked weights runs 2.7 times
slower on an H100.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ...spec import Layer, ModelSpec
from .params import Params, Weights
from .plain import NormOf, PlainOps

Attend = Callable[[int, jax.Array], jax.Array]


def hidden_states(
    spec: ModelSpec,
    params: Params,
    ops: PlainOps,
    ids: jax.Array,
    positions: jax.Array,
    token_types: jax.Array | None,
    attend: Attend,
    keep: bool = False,
    layers: range | None = None,
    x: jax.Array | None = None,
) -> list[jax.Array]:
    """The last layer's output [B, T, E] for ids and positions [B, T], before the final norm.

    With `keep`, all L+1: the embedding and each layer's output. `attend` takes a layer's number and
    its packed queries, keys and values. With `layers` the output of the last one of these, `x`
    being what the ones before them gave, None at the first.
    """
    if x is None:
        x = ops.embed(spec, params.outer, ids, positions, token_types)
        if spec.embed_norm:
            x = ops.norm(x, NormOf.named(spec.embed_norm, params.outer, "embed_norm"))
    kept = [x]
    for i in layers or range(len(spec.layers)):
        with jax.named_scope(f"layer.{i}"):
            x = _block(spec.layers[i], params.layers[i], ops, x, i, attend)
        kept = [*kept, x] if keep else [x]
    return kept


def finished(spec: ModelSpec, params: Params, ops: PlainOps, x: jax.Array) -> jax.Array:
    """HF's last hidden state: after the final norm, in the width of the embedding."""
    norm = _final_norm(spec, params)
    if spec.embed_width:
        return ops.linear(x, params.outer["project_out.weight"], norm=norm)
    return ops.norm(x, norm) if norm else x


def logits(
    spec: ModelSpec, params: Params, ops: PlainOps, x: jax.Array, wide: bool = False
) -> jax.Array:
    """Scores [..., V] of the last layer's output [..., E]; `wide` asks for float32."""
    w = params.outer
    norm = _final_norm(spec, params)
    if spec.embed_width:
        x, norm = finished(spec, params, ops, x), None
    if spec.head is not None and spec.head.kind == "masked":
        assert spec.head.norm and spec.head.activation
        x = ops.linear(
            x,
            w["head.dense.weight"],
            w["head.dense.bias"],
            norm=norm,
            activation=spec.head.activation,
        )
        norm = NormOf.named(spec.head.norm, w, "head.norm")
    weight = w.get("head.weight", w["embed.weight"])
    scores = ops.linear(x, weight, w.get("head.bias"), norm=norm, wide=wide)
    if spec.head is not None and spec.head.softcap:
        capped = jnp.tanh(scores.astype(jnp.float32) / spec.head.softcap) * spec.head.softcap
        scores = capped.astype(scores.dtype)
    return ops.gather_logits(scores)


def pooled(params: Params, ops: PlainOps, x: jax.Array) -> jax.Array:
    """BERT's pooler: tanh of a projection of the first token, x [B, T, E] to [B, E]."""
    w = params.outer
    return ops.linear(x[:, 0], w["pooler.weight"], w["pooler.bias"], activation="tanh")


def _final_norm(spec: ModelSpec, params: Params) -> NormOf | None:
    return NormOf.named(spec.final_norm, params.outer, "final_norm") if spec.final_norm else None


def _block(
    layer: Layer, w: Weights, ops: PlainOps, x: jax.Array, index: int, attend: Attend
) -> jax.Array:
    """One layer's output."""

    def norm(name: str) -> NormOf:
        return NormOf.named(layer.norm, w, name)

    def attention(norm: NormOf | None, residual: jax.Array | None) -> jax.Array:
        """Attention of `x`, normed first where there is a norm, plus the residual if given."""
        y = attend(index, ops.linear(x, w["qkv.weight"], w.get("qkv.bias"), norm=norm))
        return ops.row_product(y, w["out.weight"], w.get("out.bias"), residual)

    def mlp(x: jax.Array, norm: NormOf | None, residual: jax.Array | None) -> jax.Array:
        """Feed-forward of `x`, likewise."""
        h = ops.linear(
            x,
            w["up.weight"],
            w.get("up.bias"),
            norm=norm,
            activation=layer.mlp.activation,
            gated=layer.mlp.gated,
        )
        return ops.row_product(h, w["down.weight"], w.get("down.bias"), residual)

    if layer.parallel:
        total = attention(norm("attn_norm"), x)
        return mlp(x, norm("attn_norm" if layer.shared_norm else "mlp_norm"), total)
    if layer.placement == "pre":
        x = attention(norm("attn_norm"), x)
        return mlp(x, norm("mlp_norm"), x)
    if layer.placement == "around":
        x = x + ops.norm(attention(norm("attn_norm"), None), norm("attn_post_norm"))
        return x + ops.norm(mlp(x, norm("mlp_norm"), None), norm("mlp_post_norm"))
    x = ops.norm(attention(None, None), norm("attn_norm"), residual=x)
    return ops.norm(mlp(x, None, None), norm("mlp_norm"), residual=x)
