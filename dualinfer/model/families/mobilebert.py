"""MobileBERT: layers within a bottleneck, of trigrams. HF source: models/mobilebert."""

from dataclasses import replace

from ...blocks.bottleneck import Bottleneck
from .. import rows as make
from ..spec import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .heads import Classifier, kind_of_head, make_head

_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_ENDS = ("Model", *_HEADS, "ForQuestionAnswering", "ForMultipleChoice")
CLASSES = {"mobilebert": tuple(f"MobileBert{end}" for end in _ENDS)}
_BASE, _POOLER = "mobilebert.", "mobilebert.pooler.dense"
_LAYER, _EMBEDDINGS = f"{_BASE}encoder.layer.{{i}}.", f"{_BASE}embeddings."
_TOKENS = f"{_EMBEDDINGS}word_embeddings.weight"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a MobileBERT model."""
    embed, narrow = fields.size("hidden_size"), fields.size("intra_bottleneck_size")
    _, heads, head_dim = fields.split("intra_bottleneck_size", "num_attention_heads")
    width, positions = fields.size("embedding_size", most=embed), "max_position_embeddings"
    fields.require("normalization_type", "no_norm")
    fields.require("true_hidden_size", narrow)
    fields.require("use_bottleneck_attention", False)
    for name in ("use_bottleneck", "key_query_shared_bottleneck"):
        fields.require(name, True)
    for name in ("trigram_input", "classifier_activation"):
        fields.require(name, True)
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    norm = Norm("affine", fields.number("layer_norm_eps"))
    attention = Attention(heads, heads, head_dim, head_dim**-0.5, causal=False)
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=False)
    own = Bottleneck(narrow, fields.size("num_feedforward_networks", most=64))
    layer = Layer(attention, mlp, norm, "post", block=own)
    head, head_rows, ties = _head(fields, architecture, mlp)
    spec = ModelSpec(
        family="mobilebert",
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=(layer,) * fields.layers("num_hidden_layers"),
        max_positions=fields.size(positions),
        positions=Positions(fields.size(positions)),
        embedding=Embedding(width=width, norm=norm, types=fields.size("type_vocab_size")),
        head=head,
    )
    outer = [row("embed.weight", "vocab width", (_TOKENS, "vocab width"))]
    outer += make.linear("project_in", f"{_EMBEDDINGS}embedding_transformation", "embed trigram")
    for ours, axis, theirs in (
        ("positions", "positions", "position_embeddings"),
        ("token_types", "types", "token_type_embeddings"),
    ):
        axes = f"{axis} embed"
        outer.append(row(f"{ours}.weight", axes, (f"{_EMBEDDINGS}{theirs}.weight", axes)))
    outer += make.norm(norm, "embed_norm", f"{_EMBEDDINGS}LayerNorm")
    unused = [r"embeddings\.position_ids$", r"^cls\.seq_relationship\."]
    pools = head is None or head.pooling is not None
    unused += [] if pools else [r"(^|\.)pooler\."]
    unused += [] if head is not None and head.kind == "masked" else [r"^cls\."]
    return spec, WeightTable(
        spec,
        (*outer, *head_rows),
        (tuple(own.rows(_LAYER, norm)),) * len(spec.layers),
        base=_BASE,
        unused=tuple(unused),
        tied=ties,
        optional="pooler.",
    )


def _head(
    fields: ConfigFields, architecture: str, mlp: Mlp
) -> tuple[Head | None, list[Row], tuple[tuple[Row, str], ...]]:
    """The head of a HF class, its rows (a base model's pooler), and those that HF ties."""
    tied, kind = fields.flag("tie_word_embeddings", True), kind_of_head(architecture)
    if architecture.endswith("ForMaskedLM"):
        hf, norm = "cls.predictions.", Norm("layer", fields.number("layer_norm_eps"))
        rows = make.linear("head.dense", f"{hf}transform.dense", "embed embed_in")
        rows += make.norm(norm, "head.norm", f"{hf}transform.LayerNorm")
        weight, bias = f"{hf}decoder.weight", f"{hf}decoder.bias"
        # The embedding, and columns of its own beside it.
        first, rest = _TOKENS if tied else weight, (f"{hf}dense.weight", "rest vocab")
        both = row("head.weight", "vocab width+rest", (first, "vocab width"), rest)
        rows.append(replace(both, dense=True))
        rows.append(row("head.bias", "vocab", (f"{hf}bias" if tied else bias, "vocab")))
        ties = (
            (row("embed.weight", "vocab width", (weight, "vocab width")), _TOKENS),
            (row("head.bias", "vocab", (bias, "vocab")), f"{hf}bias"),
        )
        assert mlp.activation != "xielu"
        return Head("masked", mlp.activation, norm), rows, ties if tied else ()
    if kind is None:
        return None, make.linear("pooler", _POOLER, "embed embed_in"), ()
    if kind in ("sequence", "choice"):
        own = Classifier("classifier", _POOLER, "tanh")
    else:
        own = Classifier("qa_outputs" if kind == "span" else "classifier")
    return (*make_head(fields, kind, own, "first"), ())
