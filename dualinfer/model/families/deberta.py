"""DeBERTa: scores to which distances add. HF: models/deberta, models/deberta_v2."""

from dataclasses import replace
from typing import Any

from ...blocks.convolved import Convolved
from ...blocks.places import Places
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .heads import Classifier, kind_of_head, make_head, masked_head

_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_SPAN, _CHOICE = "ForQuestionAnswering", "ForMultipleChoice"
CLASSES = {
    "deberta-v2": tuple(f"DebertaV2{end}" for end in ("Model", *_HEADS, _SPAN, _CHOICE)),
    "deberta": tuple(f"Deberta{end}" for end in ("Model", *_HEADS, _SPAN)),
}
_QKV = {"q": "query_proj", "k": "key_proj", "v": "value_proj"}
_EMBEDDING = "deberta.embeddings.word_embeddings.weight"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a DeBERTa model, of the first version or a later one."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    first = fields.family == "deberta"
    width = fields.size("embedding_size", embed)
    if first or (architecture.endswith("ForMaskedLM") and not fields.flag("legacy", True)):
        fields.require("embedding_size", embed)  # there the embedding is the last projection
    fields.require("attention_head_size", head_dim)
    fields.require("talking_head", False)
    fields.ignore("pooler_hidden_size", "pooler_dropout", "cls_dropout", "padding_idx")
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "relative_attention")
    norm = Norm("layer", fields.number("layer_norm_eps"))
    positions = fields.size("max_position_embeddings")
    kinds = _kinds(fields)
    places = _places(fields, kinds, norm, positions)
    terms = len(kinds) if first else len({"c2p", "p2c"} & set(kinds))
    scale = (head_dim * (1 + terms)) ** -0.5
    attention = Attention(heads, heads, head_dim, scale, causal=False, distances=places)
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=False)
    factored, layer = width != embed, Layer(attention, mlp, norm, "post")
    head, head_rows, ties = _head(fields, architecture, norm, mlp, factored)
    layers = [layer] * fields.layers("num_hidden_layers")
    convolution = _convolution(fields, first)
    layers[0] = replace(layer, edits=(convolution,) if convolution else ())
    types = fields.take("type_vocab_size", 0)
    biased = fields.flag("position_biased_input", True)
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers),
        max_positions=positions,
        positions=Positions(positions if biased else 0),
        embedding=Embedding(
            width=width if factored else None,
            norm=norm,
            order=("tables", "project", "norm"),
            types=fields.size("type_vocab_size") if types else 0,
        ),
        head=head,
    )
    own = ["^pooler", "^classifier", "^qa_outputs", "^cls", "^lm_predictions", "^mask_predictions"]
    held = {s.name.split(".")[0] for r in (*head_rows, *(r for r, _ in ties)) for s in r.sources}
    unused = [rf"{part}\." for part in own if part[1:] not in held]
    if not ties:  # untied, a masked-LM head reads the bias beside its projection
        unused.append(r"^cls\.predictions\.bias$")
    unused += [r"embeddings\.position_ids$"] + ([] if biased else [r"embeddings\.position_emb"])
    return spec, WeightTable(
        spec,
        (*_embeddings(spec, norm), *head_rows),
        tuple(tuple(_layer(fields.family, own, norm)) for own in layers),
        base="deberta.",
        renames=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
        unused=tuple(unused),
        tied=ties,
    )


def _convolution(fields: ConfigFields, first: bool) -> Convolved | None:
    """The convolution beside the first layer (v2-xlarge); no code of the first version has one."""
    if first or not fields.take("conv_kernel_size", 0):
        fields.require("conv_kernel_size", 0)
        fields.ignore("conv_act", "conv_groups")
        return None
    taps = fields.size("conv_kernel_size")
    if not taps % 2:
        raise ModelError(
            f"config.json has conv_kernel_size={taps}; a convolution beside a layer gives as many "
            "tokens as it reads, and has an odd number of taps."
        )
    fields.require("conv_groups", 1)
    activation = fields.activation("conv_act") if fields.take("conv_act") else "tanh"
    return Convolved(taps, activation)


def _kinds(fields: ConfigFields) -> list[str]:
    """The terms added to scores, as HF names them: `c2p`, `p2c`."""
    kinds: Any = fields.take("pos_att_type", [])
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list | tuple) or not set(map(str, kinds)) <= {"c2p", "p2c", ""}:
        raise ModelError(
            f"config.json has pos_att_type={shown(kinds)}; the {fields.family} family honours c2p "
            "and p2c. Weights of other kinds have no meaning in transformers either."
        )
    return list(kinds)


def _places(fields: ConfigFields, kinds: list[str], norm: Norm, positions: int) -> Places | None:
    relative = fields.flag("relative_attention", False)
    given = {n: fields.take(n, -1) for n in ("max_relative_positions", "position_buckets")}
    if not all(type(value) is int for value in given.values()):
        raise ModelError(f"config.json has {shown(given)}; expected ints.")
    most, buckets = given["max_relative_positions"], given["position_buckets"]
    normed = str(fields.take("norm_rel_ebd", "none")).lower()
    shared = fields.flag("share_att_key", False)
    if not relative:
        return None
    most = positions if most < 1 else most
    first = fields.family == "deberta"
    if first or buckets < 1:
        buckets = 0
    elif not 4 <= buckets < 2 * most - 2:
        raise ModelError(
            f"config.json has position_buckets={buckets} for max_relative_positions={most}; "
            "expected at least 4 buckets, and fewer than twice as many as positions."
        )
    has_norm = "layer_norm" in [part.strip() for part in normed.split("|")]
    return Places(
        span=buckets or most,
        most=most if buckets else 0,
        keys="c2p" in kinds,
        queries="p2c" in kinds,
        shared=shared and not first,
        norm=norm if has_norm and not first else None,
    )


def _embeddings(spec: ModelSpec, norm: Norm) -> list[Row]:
    hf = "deberta.embeddings."
    rows = [row("embed.weight", "vocab inner", (_EMBEDDING, "vocab inner"))]
    for ours, axis, theirs, has in (
        ("positions", "positions", "position_embeddings", spec.positions.rows),
        ("token_types", "types", "token_type_embeddings", spec.token_types),
    ):
        axes = f"{axis} inner"
        rows += [row(f"{ours}.weight", axes, (f"{hf}{theirs}.weight", axes))] if has else []
    if spec.embedding.is_factored:
        rows += make.linear("project_in", f"{hf}embed_proj", "embed width", bias=False)
    rows += make.norm(norm, "embed_norm", f"{hf}LayerNorm")
    if isinstance(spec.places, Places):
        rows += spec.places.outer_rows("deberta.encoder.")
    return rows


def _layer(family: str, layer: Layer, norm: Norm) -> list[Row]:
    hf, a = "deberta.encoder.layer.{i}.", layer.attending
    own, first = f"{hf}attention.self.", family == "deberta"
    if first:
        rows = make.by_head("qkv", f"{own}in_proj", bias=False)
        rows.append(row("qkv.bias", "q+k+v", (f"{own}q_bias", "q"), (f"{own}v_bias", "v")))
        names = "pos_proj", "pos_q_proj"
    else:
        rows = make.joined("qkv", own + "{p}", _QKV, bias=True)
        names = "pos_key_proj", "pos_query_proj"
    if isinstance(a.places, Places):
        rows += a.places.rows(own + names[0], own + names[1], bias=not first)
    rows += make.linear("out", f"{hf}attention.output.dense", "embed q")
    rows += make.norm(norm, "attn_norm", f"{hf}attention.output.LayerNorm")
    rows += make.linear("up", f"{hf}intermediate.dense", "ffn embed")
    rows += make.linear("down", f"{hf}output.dense", "embed ffn")
    for edit in layer.edits:
        assert isinstance(edit, Convolved)
        rows += edit.rows("deberta.encoder.conv.", norm)
    return rows + make.norm(norm, "mlp_norm", f"{hf}output.LayerNorm")


def _head(
    fields: ConfigFields, architecture: str, norm: Norm, mlp: Mlp, factored: bool
) -> tuple[Head | None, list[Row], tuple[tuple[Row, str], ...]]:
    """The head of a HF class, its rows, and those that HF ties."""
    legacy, tied = fields.flag("legacy", True), fields.flag("tie_word_embeddings", True)
    activation: Any = mlp.activation
    pooled = fields.activation("pooler_hidden_act")
    if architecture.endswith("ForMaskedLM"):
        hf = "cls.predictions." if legacy else "lm_predictions.lm_head."
        inner = f"{hf}transform." if legacy else hf
        names = f"{inner}dense", f"{inner}LayerNorm", f"{hf}decoder", f"{hf}bias"
        # The later head has no projection but the embedding.
        width = "width" if factored else "embed"
        return masked_head(norm, activation, names, _EMBEDDING, tied or not legacy, width)
    kind = kind_of_head(architecture)
    if kind is None:
        return None, [], ()
    if kind in ("sequence", "choice"):
        own = Classifier("classifier", "pooler.dense", pooled)
    else:
        own = Classifier("qa_outputs" if kind == "span" else "classifier")
    head, rows = make_head(fields, kind, own, "first")
    return replace(head, ways=("shares",)), rows, ()
