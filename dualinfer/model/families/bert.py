"""BERT: post-norm encoder with token types, pooler or masked-LM head. HF source: models/bert."""

from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable, row
from . import rows as make
from .fields import ConfigFields

CLASSES = {"bert": ("BertModel", "BertForMaskedLM")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a BERT encoder."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    positions = fields.size("max_position_embeddings")
    norm = Norm("layer", fields.number("layer_norm_eps"))
    activation = fields.activation("hidden_act")
    tied = fields.flag("tie_word_embeddings", True)
    masked = architecture == "BertForMaskedLM"
    fields.require("is_decoder", False)
    fields.require("add_cross_attention", False)
    fields.require("position_embedding_type", "absolute")
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    # The first TensorFlow release wrote these; no implementation reads them.
    fields.ignore("directionality", "pooler_fc_size", "pooler_num_attention_heads")
    fields.ignore("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type")
    block = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5, causal=False),
        Mlp(fields.size("intermediate_size"), activation, gated=False),
        norm,
        "post",
    )
    spec = ModelSpec(
        family="bert",
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=(block,) * fields.layers("num_hidden_layers"),
        max_positions=positions,
        learned_positions=positions,
        token_types=fields.size("type_vocab_size"),
        embed_norm=norm,
        head=Head("masked", activation, norm) if masked else None,
    )
    hf = "bert.encoder.layer.{i}."
    layer = [
        *make.joined("qkv", hf + "attention.self.{p}", _QKV, bias=True),
        *make.linear("out", f"{hf}attention.output.dense", "embed q"),
        *make.linear("up", f"{hf}intermediate.dense", "ffn embed"),
        *make.linear("down", f"{hf}output.dense", "embed ffn"),
        *make.norm(norm, "attn_norm", f"{hf}attention.output.LayerNorm"),
        *make.norm(norm, "mlp_norm", f"{hf}output.LayerNorm"),
    ]
    embeddings = "bert.embeddings."
    outer = [
        row(f"{ours}.weight", f"{axis} embed", (f"{embeddings}{theirs}.weight", f"{axis} embed"))
        for ours, axis, theirs in (
            ("embed", "vocab", "word_embeddings"),
            ("positions", "positions", "position_embeddings"),
            ("token_types", "types", "token_type_embeddings"),
        )
    ]
    outer += make.norm(norm, "embed_norm", f"{embeddings}LayerNorm")
    head, tied_rows = _head(tied, norm, embeddings) if masked else (_POOLER, ())
    table = WeightTable(
        spec,
        (*outer, *head),
        (tuple(layer),) * len(spec.layers),
        base="bert.",
        renames=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
        # Checkpoints of the pre-training task hold every head; a model reads its own.
        unused=(r"embeddings\.(position_ids|token_type_ids)$", r"^cls\.seq_relationship\.")
        + ((r"^(bert\.)?pooler\.",) if masked else (r"^cls\.predictions\.",))
        + ((r"^cls\.predictions\.bias$",) if masked and not tied else ()),
        tied=tied_rows,
        # HF builds BertModel(add_pooling_layer=False) too, and saves no pooler then.
        optional="pooler.",
    )
    return spec, table


_QKV = {"q": "query", "k": "key", "v": "value"}
_SQUARE = "embed embed_in"  # two names tell the sides of a square matrix apart
_POOLER = make.linear("pooler", "bert.pooler.dense", _SQUARE)


def _head(tied: bool, norm: Norm, embeddings: str) -> tuple[list[Row], tuple[tuple[Row, str], ...]]:
    """The masked-LM head's rows, and those that HF ties to others."""
    hf = "cls.predictions."
    rows = make.linear("head.dense", f"{hf}transform.dense", _SQUARE)
    rows += make.norm(norm, "head.norm", f"{hf}transform.LayerNorm")
    weight, bias = make.linear("head", f"{hf}decoder", "vocab embed")
    if not tied:
        return [*rows, weight, bias], ()
    own = row("head.bias", "vocab", (f"{hf}bias", "vocab"))
    twins = ((weight, f"{embeddings}word_embeddings.weight"), (bias, f"{hf}bias"))
    return [*rows, own], twins
