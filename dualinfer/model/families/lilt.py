"""LiLT: RoBERTa with a second stream, of where tokens lie on a page. HF source: models/lilt."""

from ...blocks.boxes import Boxes
from ...blocks.page import Page
from ...errors import ModelError
from .. import rows as make
from ..spec import Attention, Embedding, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable
from .fields import ConfigFields
from .heads import Classifier, kind_of_head, make_head

_ENDS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
CLASSES = {"lilt": tuple(f"Lilt{end}" for end in ("Model", *_ENDS))}
_BASE, _LAYER = "lilt.", "lilt.encoder.layer.{i}."


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a LiLT model."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    ratio, ffn = fields.size("channel_shrink_ratio"), fields.size("intermediate_size")
    if embed % 6 or head_dim % ratio or ffn < ratio:
        raise ModelError(
            f"config.json has hidden_size={embed}, {heads} heads, intermediate_size={ffn} and "
            f"channel_shrink_ratio={ratio}; expected a width of six equal parts, and heads of a "
            "multiple of the ratio."
        )
    positions, pad = fields.size("max_position_embeddings"), fields.take("pad_token_id", 0)
    if type(pad) is not int or not 0 <= pad < positions - 1:
        raise ModelError(f"config.json has pad_token_id={pad!r}; expected an id of the vocabulary.")
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    fields.require("position_embedding_type", "absolute")
    norm, mlp = Norm("layer", fields.number("layer_norm_eps")), fields.activation("hidden_act")
    page = Page(embed // ratio, ffn // ratio, head_dim // ratio)
    both = head_dim + page.head_dim
    attention = Attention(heads, heads, both, head_dim**-0.5, causal=False)
    layer = Layer(attention, Mlp(ffn, mlp, gated=False), norm, "post", block=page)
    kind, pooler = kind_of_head(architecture), f"{_BASE}pooler.dense"
    head, head_rows = None, make.linear("pooler", pooler, "embed embed_in")
    if kind == "sequence":
        own = Classifier("classifier.out_proj", "classifier.dense", "tanh")
        head, head_rows = make_head(fields, kind, own, "first")
    elif kind is not None:
        own = Classifier("qa_outputs" if kind == "span" else "classifier")
        head, head_rows = make_head(fields, kind, own, None)
    boxes = Boxes(fields.size("max_2d_position_embeddings"), added=False)
    spec = ModelSpec(
        family="lilt",
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=(layer,) * fields.layers("num_hidden_layers"),
        max_positions=positions - pad - 1,
        positions=Positions(positions, counted="ids"),
        pad_id=pad,
        embedding=Embedding(norm=norm, types=fields.size("type_vocab_size"), entry=boxes),
        head=head,
    )
    return spec, WeightTable(
        spec,
        (
            *_embeddings(norm),
            *page.outer_rows(boxes, f"{_BASE}layout_embeddings.", norm),
            *head_rows,
        ),
        (tuple(page.rows(_LAYER, norm)),) * len(spec.layers),
        base=_BASE,
        unused=(r"embeddings\.position_ids$", *(() if head is None else (r"(^|\.)pooler\.",))),
        optional="pooler.",
    )


def _embeddings(norm: Norm) -> list[Row]:
    hf = f"{_BASE}embeddings."
    tables = [
        ("embed", "vocab embed", f"{hf}word_embeddings"),
        ("positions", "positions embed", f"{hf}position_embeddings"),
        ("token_types", "types embed", f"{hf}token_type_embeddings"),
    ]
    return make.tables(tables) + make.norm(norm, "embed_norm", f"{hf}LayerNorm")
