"""The one torch decoder: every family's forward pass, read off its ModelSpec.

How a layer attends (a whole sequence, a prompt into the cache, one token from the cache) is the
`attend` function that the runner passes in; all else is the same in every case.
"""

from collections.abc import Callable

import torch

from ...spec import Layer, ModelSpec, Norm, Rope
from . import ops, parallel
from .params import Params, Weights
from .profiling import span

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CosSin = tuple[torch.Tensor, torch.Tensor]


def hidden_states(
    spec: ModelSpec,
    params: Params,
    ids: torch.Tensor,
    positions: torch.Tensor,
    token_types: torch.Tensor | None,
    attend: Attend,
    keep: bool = False,
) -> list[torch.Tensor]:
    """The last hidden state [B, T, E] for ids and positions [B, T], after the final norm.

    With `keep`, all L+1 in HF's order: the embedding, each layer's output, the last one normed.
    """
    x = _embed(spec, params.outer, ids, positions, token_types)
    ropes: dict[Rope | None, CosSin] = {
        rope: _cos_sin(rope, f, positions) for rope, f in params.frequencies.items()
    }
    kept = [x] if keep else []
    for i, layer in enumerate(spec.layers):
        with span(f"layer.{i}"):
            x = _block(layer, params.layers[i], x, ropes.get(layer.attention.rope), i, attend)
        if keep:
            kept.append(x)
    if spec.final_norm:
        x = _norm(spec.final_norm, params.outer, "final_norm", x)
    return [*kept[:-1], x] if keep else [x]


def logits(spec: ModelSpec, params: Params, x: torch.Tensor) -> torch.Tensor:
    """Scores [..., V] of hidden states [..., E]."""
    w = params.outer
    if spec.head is not None and spec.head.kind == "masked":
        assert spec.head.norm and spec.head.activation
        x = ops.matmul(x, w["head.dense.weight"], w["head.dense.bias"])
        x = _norm(spec.head.norm, w, "head.norm", ops.activation(x, spec.head.activation))
    scores = ops.matmul(x, w.get("head.weight", w["embed.weight"]), w.get("head.bias"))
    return parallel.gather_logits(scores)


def pooled(params: Params, x: torch.Tensor) -> torch.Tensor:
    """BERT's pooler: tanh of a projection of the first token, x [B, T, E] to [B, E]."""
    w = params.outer
    return torch.tanh(ops.matmul(x[:, 0], w["pooler.weight"], w["pooler.bias"]))


def _embed(
    spec: ModelSpec,
    w: Weights,
    ids: torch.Tensor,
    positions: torch.Tensor,
    token_types: torch.Tensor | None,
) -> torch.Tensor:
    x = ops.embed(ids, w["embed.weight"])
    if token_types is not None:
        table = w["embed.weight" if spec.token_types_from_vocab else "token_types.weight"]
        x = x + ops.embed(token_types, table)
    if spec.learned_positions:
        x = x + ops.embed(positions, w["positions.weight"])
    return _norm(spec.embed_norm, w, "embed_norm", x) if spec.embed_norm else x


def _cos_sin(rope: Rope, frequencies: torch.Tensor, positions: torch.Tensor) -> CosSin:
    """cos and sin of every position's angles, float32 [B, T, D/2]."""
    angles = positions[..., None].float() * frequencies
    return angles.cos() * rope.scaling, angles.sin() * rope.scaling


def _norm(norm: Norm, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    if norm.kind == "rms":
        return ops.rms_norm(x, w[f"{name}.weight"], norm.eps)
    return ops.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], norm.eps)


def _block(
    layer: Layer, w: Weights, x: torch.Tensor, rope: CosSin | None, index: int, attend: Attend
) -> torch.Tensor:
    if layer.placement == "pre":
        x = x + _attention(layer, w, _norm(layer.norm, w, "attn_norm", x), rope, index, attend)
        return x + _mlp(layer, w, _norm(layer.norm, w, "mlp_norm", x))
    x = _norm(layer.norm, w, "attn_norm", x + _attention(layer, w, x, rope, index, attend))
    return _norm(layer.norm, w, "mlp_norm", x + _mlp(layer, w, x))


def _attention(
    layer: Layer, w: Weights, x: torch.Tensor, rope: CosSin | None, index: int, attend: Attend
) -> torch.Tensor:
    a = layer.attention
    parts = ops.matmul(x, w["qkv.weight"], w.get("qkv.bias")).split(a.qkv_sizes, dim=-1)
    q, k, v = (p.unflatten(-1, (-1, a.head_dim)) for p in parts)
    if a.qk_norm:
        q, k = _norm(a.qk_norm, w, "q_norm", q), _norm(a.qk_norm, w, "k_norm", k)
    if rope:
        q, k = ops.rotary(q, *rope), ops.rotary(k, *rope)
    out = attend(index, q, k, v).flatten(-2)
    return parallel.row_product(out, w["out.weight"], w.get("out.bias"))


def _mlp(layer: Layer, w: Weights, x: torch.Tensor) -> torch.Tensor:
    h = ops.matmul(x, w["up.weight"], w.get("up.bias"))
    act = ops.gated_activation if layer.mlp.gated else ops.activation
    h = act(h, layer.mlp.activation)
    return parallel.row_product(h, w["down.weight"], w.get("down.bias"))
