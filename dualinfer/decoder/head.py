"""Turn the last layer's output into results: final norm, scores of a head, embeddings of texts."""

from typing import Any

from ..model.spec import Head, ModelSpec, Pooled, Probe
from ..ops.contract import Array, BlockOps, Epilogue, NormOf, Ops, Params, Projection
from ..ops.feed_forward import softcap
from ..ops.pooling import pool
from ..ops.projection import project, project_by


def outputs(
    spec: ModelSpec,
    params: Params,
    ops: Ops,
    states: list[Array],
    keep: bool,
    kept: Array | None = None,
    weights: Array | None = None,
) -> dict[str, Any]:
    """HF's outputs of a whole pass, by name, from what `hidden_states` gave; `keep` as there.

    With int `kept` [K] logits are those of these tokens of each row. float32 `weights` [B, T] are
    those of the tokens that a head pools.
    """
    states = [_tokens(spec, ops, x) for x in states]
    last, result = states[-1], {}
    if spec.has_logits:
        result["logits"] = logits(spec, params, ops, last if kept is None else last[:, kept])
    if keep or not spec.has_logits:
        last = last_hidden_state(spec, params, ops, last)
    if spec.head is None:
        result["last_hidden_state"] = last
        if "pooler.weight" in params.outer:
            result["pooler_output"] = pooled(params, ops, last)
        if spec.pooled is not None:
            assert weights is not None
            result[spec.vector_name] = _vector(spec.pooled, params, ops, last, weights)
    elif not spec.has_logits:
        result |= _scores(spec.head, params, ops, last, weights)
    if keep:
        name = "decoder_hidden_states" if spec.crosses else "hidden_states"
        shown = states[1:] if spec.states == "late" else states[:-1]
        result[name] = (*shown, states[-1] if spec.states == "raw" else last)
        if spec.block is not None:
            result[name] = spec.block.hidden(states, last)
    return result


def _tokens(spec: ModelSpec, ops: BlockOps, x: Array) -> Array:
    """The tokens' own stream [B, T, E]."""
    return x if spec.block is None else spec.block.tokens(ops, spec, x)


def _vector(own: Pooled, params: Params, ops: Ops, x: Array, weights: Array) -> Array:
    """One vector [B, W] of each sequence of x [B, T, E], of what `weights` [B, T] choose."""
    w = params.outer
    if own.probe is not None:
        return _probed(own.probe, params, ops, x, weights)
    y = ops.maths.cast(pool(ops.maths, x, weights), x.dtype)[:, 0]
    if own.norm is not None:
        y = ops.norm(y, NormOf.named(own.norm, w, "pooled_norm"))
    if "projection.weight" not in w:
        return y
    return project(ops, w, "projection", y)


def _probed(probe: Probe, params: Params, ops: Ops, x: Array, weights: Array) -> Array:
    """Pool the tokens whose weight is not 0 by a learned query."""
    w, queries = params.outer, probe.attention.qkv_sizes[0]

    token = project(ops, w, "probe.qkv", w["probe.token"][None, None])[..., :queries]
    query = ops.maths.broadcast(token, (x.shape[0], 1, queries))
    mask = weights >= weights[:, :1]  # rows that a bucket added see all
    kv = project(ops, w, "probe.qkv", x)[..., queries:]
    y, _ = ops.attend_across(probe.attention, query, kv, mask)
    y = project(ops, w, "probe.out", y)
    norm = NormOf.named(probe.norm, w, "probe.norm")
    assert probe.mlp.activation != "xielu"
    h = project(ops, w, "probe.up", y, Epilogue(norm=norm, activation=probe.mlp.activation))
    return project(ops, w, "probe.down", h, Epilogue(residual=y))[:, 0]


def _scores(
    head: Head, params: Params, ops: BlockOps, x: Array, weights: Array | None
) -> dict[str, Array]:
    """Run a head for labels over the last hidden state [B, T, E]: HF's outputs by name."""
    w, norm = params.outer, None

    def vectors(x: Array) -> Array:
        assert weights is not None
        if head.pooling == "beside":  # the first token's weight is 1, and those of patches follow
            both = pool(ops.maths, x, weights, (weights.cumsum(1) > 1) * 1, 2)
            return ops.maths.cast(both, x.dtype).reshape(x.shape[0], -1)
        return ops.maths.cast(pool(ops.maths, x, weights), x.dtype)[:, 0]

    if head.pooling and head.pooling != "late":
        x = vectors(x)
    if head.activation:
        x = project(ops, w, "head.dense", x, Epilogue(activation=head.activation))
    if head.norm:
        norm = NormOf.named(head.norm, w, "head.norm")
    scores = project(ops, w, "head", x, Epilogue(norm=norm))
    if head.pooling == "late":
        scores = vectors(scores)
    if head.kind == "span":
        return {"start_logits": scores[..., 0], "end_logits": scores[..., 1]}
    return {"logits": scores[..., 0] if head.kind == "replaced" else scores}


def joined_towers(
    texts: dict[str, Any], images: dict[str, Any], scores: Array, text: Array, image: Array
) -> dict[str, Any]:
    """HF's outputs of a model of two towers: of each its own, and `scores` [N, M] of both.

    `text` [N, W] and `image` [M, W] are their vectors of length 1.
    """
    return {
        "logits_per_image": scores.T,
        "logits_per_text": scores,
        "text_embeds": text,
        "image_embeds": image,
        "text_model_output": texts,
        "vision_model_output": images,
    }


def embeddings(
    spec: ModelSpec,
    params: Params,
    ops: BlockOps,
    x: Array,
    weights: Array,
    segments: Array,
    how: tuple[int, bool],
) -> dict[str, Array]:
    """Vectors [B, M, W] of the texts that are packed in each row, of the last layer's output.

    `how` has M, and whether each element's largest value is taken; the rest is as in
    `pooling.pool`.
    """
    last = last_hidden_state(spec, params, ops, _tokens(spec, ops, x))
    return {"embeddings": pool(ops.maths, last, weights, segments, *how)}


def last_hidden_state(spec: ModelSpec, params: Params, ops: BlockOps, x: Array) -> Array:
    """HF's last hidden state: after the final norm, in the width of the embedding."""
    norm = _final_norm(spec, params)
    if spec.projects:
        return project(ops, params.outer, "project_out", x, Epilogue(norm=norm))
    return ops.norm(x, norm) if norm else x


def logits(spec: ModelSpec, params: Params, ops: BlockOps, x: Array, wide: bool = False) -> Array:
    """Scores [..., V] of the last layer's output [..., E]; `wide` asks for float32."""
    w, head = params.outer, spec.head
    norm = _final_norm(spec, params)
    if spec.projects:
        x, norm = last_hidden_state(spec, params, ops, x), None
    if head is not None and head.activation:
        assert head.norm
        x = project(ops, w, "head.dense", x, Epilogue(None, norm, head.activation))
        norm = NormOf.named(head.norm, w, "head.norm")
    own = Projection(w.get("head.weight", w["embed.weight"]), w.get("head.bias"))
    scores = project_by(ops, own, x, Epilogue(norm=norm, wide=wide))
    if head is not None and head.scale != 1:
        scores = scores * head.scale
    if head is not None and head.softcap:
        scores = softcap(ops.maths, scores, head.softcap)
    return ops.gather_logits(scores)


def pooled(params: Params, ops: BlockOps, x: Array) -> Array:
    """BERT's pooler: tanh of a projection of the first token, x [B, T, E] to [B, E]."""
    return project(ops, params.outer, "pooler", x[:, 0], Epilogue(activation="tanh"))


def _final_norm(spec: ModelSpec, params: Params) -> NormOf | None:
    return NormOf.named(spec.final_norm, params.outer, "final_norm") if spec.final_norm else None
