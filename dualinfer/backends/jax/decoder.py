"""The one JAX decoder: every family's forward pass, read off its ModelSpec. Traced, never eager.

How a layer attends (a whole sequence, a prompt into the cache, one token from the cache) is the
`attend` function that the runner passes in; all else is the same in every case. Layers are
unrolled: a scan over stacked weights runs 2.7 times slower on an H100.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...spec import Attention, Layer, ModelSpec, Norm, Rope
from . import ops, parallel
from .params import Params, Weights

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
CosSin = tuple[jax.Array, jax.Array]


def hidden_states(
    spec: ModelSpec,
    params: Params,
    ids: jax.Array,
    positions: jax.Array,
    token_types: jax.Array | None,
    attend: Attend,
    keep: bool = False,
) -> list[jax.Array]:
    """The last hidden state [B, T, E] for ids and positions [B, T], after the final norm.

    With `keep`, all L+1 in HF's order: the embedding, each layer's output, the last one normed. The
    last one has the width of the embedding where that is another than the layers'.
    """
    x = _embed(spec, params.outer, ids, positions, token_types)
    ropes: dict[Rope | None, CosSin] = {
        rope: _cos_sin(rope, positions) for rope in {s.attention.rope for s in spec.layers} if rope
    }
    kept = [x] if keep else []
    for i, layer in enumerate(spec.layers):
        with jax.named_scope(f"layer.{i}"):
            x = _block(layer, params.layers[i], x, ropes.get(layer.attention.rope), i, attend)
        if keep:
            kept.append(x)
    if spec.final_norm:
        x = _norm(spec.final_norm, params.outer, "final_norm", x)
    if spec.embed_width:
        x = ops.matmul(x, params.outer["project_out.weight"])
    return [*kept[:-1], x] if keep else [x]


def logits(spec: ModelSpec, params: Params, x: jax.Array) -> jax.Array:
    """Scores [..., V] of hidden states [..., E]."""
    w = params.outer
    if spec.head is not None and spec.head.kind == "masked":
        assert spec.head.norm and spec.head.activation
        x = ops.matmul(x, w["head.dense.weight"], w["head.dense.bias"])
        x = _norm(spec.head.norm, w, "head.norm", ops.activation(x, spec.head.activation))
    scores = ops.matmul(x, w.get("head.weight", w["embed.weight"]), w.get("head.bias"))
    if spec.head is not None and spec.head.softcap:
        wide = scores.astype(jnp.float32) / spec.head.softcap
        scores = (jnp.tanh(wide) * spec.head.softcap).astype(scores.dtype)
    return parallel.gather_logits(scores)


def pooled(params: Params, x: jax.Array) -> jax.Array:
    """BERT's pooler: tanh of a projection of the first token, x [B, T, E] to [B, E]."""
    w = params.outer
    return jnp.tanh(ops.matmul(x[:, 0], w["pooler.weight"], w["pooler.bias"]))


def scoring(attention: Attention) -> dict[str, Any]:
    """How attention ops score a layer's keys: their arguments that are facts of the layer."""
    slopes = attention.alibi
    return {
        "scale": attention.scale,
        "window": attention.window,
        "softcap": attention.softcap,
        "alibi": None if slopes is None else jnp.array(slopes, jnp.float32),
    }


def _embed(
    spec: ModelSpec,
    w: Weights,
    ids: jax.Array,
    positions: jax.Array,
    token_types: jax.Array | None,
) -> jax.Array:
    x = ops.embed(ids, w["embed.weight"])
    if spec.embed_scale != 1:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)
    if spec.embed_width:
        x = ops.matmul(x, w["project_in.weight"])
    if token_types is not None:
        table = w["embed.weight" if spec.token_types_from_vocab else "token_types.weight"]
        x = x + ops.embed(token_types, table)
    if spec.learned_positions:
        x = x + ops.embed(positions + spec.position_offset, w["positions.weight"])
    return _norm(spec.embed_norm, w, "embed_norm", x) if spec.embed_norm else x


def _cos_sin(rope: Rope, positions: jax.Array) -> CosSin:
    """cos and sin of every position's angles, float32 [B, T, R/2]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.array(rope.inv_freq, jnp.float32)
    return jnp.cos(angles) * rope.scaling, jnp.sin(angles) * rope.scaling


def _norm(norm: Norm, w: Weights, name: str, x: jax.Array) -> jax.Array:
    if norm.kind == "rms":
        return ops.rms_norm(x, w[f"{name}.weight"], norm.eps, norm.unit_offset)
    return ops.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], norm.eps)


def _block(
    layer: Layer, w: Weights, x: jax.Array, rope: CosSin | None, index: int, attend: Attend
) -> jax.Array:
    def norm(name: str, x: jax.Array) -> jax.Array:
        return _norm(layer.norm, w, name, x)

    def attention(x: jax.Array) -> jax.Array:
        return _attention(layer, w, x, rope, index, attend)

    if layer.parallel:
        read = norm("attn_norm", x)
        return (
            x + attention(read) + _mlp(layer, w, read if layer.shared_norm else norm("mlp_norm", x))
        )
    if layer.placement == "pre":
        x = x + attention(norm("attn_norm", x))
        return x + _mlp(layer, w, norm("mlp_norm", x))
    if layer.placement == "around":
        x = x + norm("attn_post_norm", attention(norm("attn_norm", x)))
        return x + norm("mlp_post_norm", _mlp(layer, w, norm("mlp_norm", x)))
    x = norm("attn_norm", x + attention(x))
    return norm("mlp_norm", x + _mlp(layer, w, x))


def _attention(
    layer: Layer, w: Weights, x: jax.Array, rope: CosSin | None, index: int, attend: Attend
) -> jax.Array:
    a = layer.attention
    fused = ops.matmul(x, w["qkv.weight"], w.get("qkv.bias"))
    query, key, _ = a.qkv_sizes
    parts = jnp.split(fused, (query, query + key), axis=-1)
    q, k, v = (p.reshape(*p.shape[:-1], -1, a.head_dim) for p in parts)
    if a.qk_norm:
        q, k = _norm(a.qk_norm, w, "q_norm", q), _norm(a.qk_norm, w, "k_norm", k)
    if rope:
        assert a.rope
        q, k = (ops.rotary(part, *rope, a.rope.interleaved) for part in (q, k))
    out = attend(index, q, k, v)
    return parallel.row_product(
        out.reshape(*out.shape[:-2], -1), w["out.weight"], w.get("out.bias")
    )


def _mlp(layer: Layer, w: Weights, x: jax.Array) -> jax.Array:
    h = ops.matmul(x, w["up.weight"], w.get("up.bias"))
    act = ops.gated_activation if layer.mlp.gated else ops.activation
    h = act(h, layer.mlp.activation)
    return parallel.row_product(h, w["down.weight"], w.get("down.bias"))
