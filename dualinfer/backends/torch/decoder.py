"""The one torch decoder: every family's forward pass, read off its ModelSpec.

How a layer attends (a whole sequence, a prompt into the cache, one token from the cache) is the
`attend` function that the runner passes in, and whether kernels or plain torch compute is `ops`;
all else is the same in every case.
"""

from collections.abc import Callable

import torch

from ...spec import Layer, ModelSpec
from .params import Params, Weights
from .plain import NormOf, PlainOps
from .profiling import span

Attend = Callable[[int, torch.Tensor], torch.Tensor]


def hidden_states(
    spec: ModelSpec,
    params: Params,
    ops: PlainOps,
    ids: torch.Tensor,
    positions: torch.Tensor,
    token_types: torch.Tensor | None,
    attend: Attend,
    keep: bool = False,
) -> list[torch.Tensor]:
    """The last layer's output [B, T, E] for ids and positions [B, T], before the final norm.

    With `keep`, all L+1: the embedding and each layer's output. `attend` takes a layer's number and
    its packed queries, keys and values.
    """
    x = ops.embed(spec, params.outer, ids, positions, token_types)
    if spec.embed_norm:
        x = ops.norm(x, NormOf.named(spec.embed_norm, params.outer, "embed_norm"))
    kept = [x]
    for i, layer in enumerate(spec.layers):
        with span(f"layer.{i}"):
            x = _block(layer, params.layers[i], ops, x, i, attend, spend=not keep)
        kept = [*kept, x] if keep else [x]
    return kept


def finished(spec: ModelSpec, params: Params, ops: PlainOps, x: torch.Tensor) -> torch.Tensor:
    """HF's last hidden state: after the final norm, in the width of the embedding."""
    norm = _final_norm(spec, params)
    if spec.embed_width:
        return ops.linear(x, params.outer["project_out.weight"], norm=norm)
    return ops.norm(x, norm) if norm else x


def logits(
    spec: ModelSpec, params: Params, ops: PlainOps, x: torch.Tensor, wide: bool = False
) -> torch.Tensor:
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
        capped = torch.tanh(scores.float() / spec.head.softcap) * spec.head.softcap
        scores = capped.to(scores.dtype)
    return ops.gather_logits(scores)


def pooled(params: Params, ops: PlainOps, x: torch.Tensor) -> torch.Tensor:
    """BERT's pooler: tanh of a projection of the first token, x [B, T, E] to [B, E]."""
    w = params.outer
    return ops.linear(x[:, 0], w["pooler.weight"], w["pooler.bias"], activation="tanh")


def _final_norm(spec: ModelSpec, params: Params) -> NormOf | None:
    return NormOf.named(spec.final_norm, params.outer, "final_norm") if spec.final_norm else None


def _block(
    layer: Layer,
    w: Weights,
    ops: PlainOps,
    x: torch.Tensor,
    index: int,
    attend: Attend,
    spend: bool,
) -> torch.Tensor:
    """One layer's output; with `spend` its input may be overwritten."""

    def norm(name: str) -> NormOf:
        return NormOf.named(layer.norm, w, name)

    def attention(norm: NormOf | None, residual: torch.Tensor | None, spend: bool) -> torch.Tensor:
        """Attention of `x`, normed first where there is a norm, plus the residual if given."""
        qkv = ops.linear(x, w["qkv.weight"], w.get("qkv.bias"), norm=norm)
        y = attend(index, qkv)
        out = w["out.weight"], w.get("out.bias")
        return ops.row_product(y, *out, residual, spend)

    def mlp(x: torch.Tensor, norm: NormOf | None, residual: torch.Tensor | None) -> torch.Tensor:
        """Feed-forward of `x`, likewise; the residual may be overwritten."""
        h = ops.linear(
            x,
            w["up.weight"],
            w.get("up.bias"),
            norm=norm,
            activation=layer.mlp.activation,
            gated=layer.mlp.gated,
        )
        down = w["down.weight"], w.get("down.bias")
        return ops.row_product(h, *down, residual, spend=True)

    if layer.parallel:
        total = attention(norm("attn_norm"), x, spend=False)
        return mlp(x, norm("attn_norm" if layer.shared_norm else "mlp_norm"), total)
    if layer.placement == "pre":
        x = attention(norm("attn_norm"), x, spend)
        return mlp(x, norm("mlp_norm"), x)
    if layer.placement == "around":
        x = x + ops.norm(attention(norm("attn_norm"), None, spend), norm("attn_post_norm"))
        return x + ops.norm(mlp(x, norm("mlp_norm"), None), norm("mlp_post_norm"))
    x = ops.norm(attention(None, None, spend), norm("attn_norm"), residual=x)
    return ops.norm(mlp(x, None, None), norm("mlp_norm"), residual=x)
