"""What becomes of the last layer's output: final norm, logits, pooled output."""

from typing import Any

from ..backends.contract import Array, BlockOps, Neighbours, NormOf, Params
from ..model.spec import ModelSpec


def outputs(
    spec: ModelSpec,
    params: Params,
    ops: BlockOps,
    states: list[Array],
    keep: bool,
    kept: Array | None = None,
) -> dict[str, Any]:
    """HF's outputs of a whole pass, by name, from what `hidden_states` gave; `keep` as there.

    With int `kept` [K] logits are those of these tokens of each row.
    """
    last, result = states[-1], {}
    if spec.head:
        result["logits"] = logits(spec, params, ops, last if kept is None else last[:, kept])
    if keep or not spec.head:
        last = last_hidden_state(spec, params, ops, last)
    if not spec.head:
        result["last_hidden_state"] = last
    if "pooler.weight" in params.outer:
        result["pooler_output"] = pooled(params, ops, last)
    if keep:
        name = "decoder_hidden_states" if spec.encoder else "hidden_states"
        result[name] = (*states[:-1], last)
    return result


def last_hidden_state(spec: ModelSpec, params: Params, ops: BlockOps, x: Array) -> Array:
    """HF's last hidden state: after the final norm, in the width of the embedding."""
    norm = _final_norm(spec, params)
    if spec.embed_width:
        return ops.linear(x, params.outer["project_out.weight"], Neighbours(norm=norm))
    return ops.norm(x, norm) if norm else x


def logits(spec: ModelSpec, params: Params, ops: BlockOps, x: Array, wide: bool = False) -> Array:
    """Scores [..., V] of the last layer's output [..., E]; `wide` asks for float32."""
    w, head = params.outer, spec.head
    norm = _final_norm(spec, params)
    if spec.embed_width:
        x, norm = last_hidden_state(spec, params, ops, x), None
    if head is not None and head.kind == "masked":
        assert head.norm and head.activation
        by = Neighbours(w["head.dense.bias"], norm, head.activation)
        x = ops.linear(x, w["head.dense.weight"], by)
        norm = NormOf.named(head.norm, w, "head.norm")
    weight = w.get("head.weight", w["embed.weight"])
    scores = ops.linear(x, weight, Neighbours(w.get("head.bias"), norm, wide=wide))
    if head is not None and head.scale != 1:
        scores = scores * head.scale
    if head is not None and head.softcap:
        scores = ops.softcap(scores, head.softcap)
    return ops.gather_logits(scores)


def pooled(params: Params, ops: BlockOps, x: Array) -> Array:
    """BERT's pooler: tanh of a projection of the first token, x [B, T, E] to [B, E]."""
    w = params.outer
    by = Neighbours(w["pooler.bias"], activation="tanh")
    return ops.linear(x[:, 0], w["pooler.weight"], by)


def _final_norm(spec: ModelSpec, params: Params) -> NormOf | None:
    return NormOf.named(spec.final_norm, params.outer, "final_norm") if spec.final_norm else None
