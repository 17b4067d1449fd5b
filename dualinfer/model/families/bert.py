"""BERT: post-norm encoder with token types, pooler or masked-LM head. HF source: models/bert."""

from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from .fields import ConfigFields


def architectures(model_type: str) -> tuple[str, ...]:
    """HF class names served, the default first."""
    return "BertModel", "BertForMaskedLM"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a BERT encoder."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    layers, vocab = fields.layers("num_hidden_layers"), fields.size("vocab_size")
    ffn, types = fields.size("intermediate_size"), fields.size("type_vocab_size")
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
    attention = Attention(heads, heads, head_dim, head_dim**-0.5, causal=False)
    spec = ModelSpec(
        family="bert",
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=(Layer(attention, Mlp(ffn, activation, gated=False), norm, "post"),) * layers,
        max_positions=positions,
        learned_positions=positions,
        token_types=types,
        embed_norm=norm,
        head=Head("masked", activation, norm) if masked else None,
    )
    embeddings = "bert.embeddings."
    rows = [
        row("embed.weight", "vocab embed", (f"{embeddings}word_embeddings.weight", "vocab embed")),
        row(
            "positions.weight",
            "positions embed",
            (f"{embeddings}position_embeddings.weight", "positions embed"),
        ),
        row(
            "token_types.weight",
            "types embed",
            (f"{embeddings}token_type_embeddings.weight", "types embed"),
        ),
    ]
    norms = [("embed_norm", f"{embeddings}LayerNorm")]
    linears = []
    for i in range(layers):
        ours, hf = f"layers.{i}.", f"bert.encoder.layer.{i}."
        for part, axes in (("weight", "{} embed"), ("bias", "{}")):
            names = (("q", "query"), ("k", "key"), ("v", "value"))
            parts = [
                (f"{hf}attention.self.{hf_name}.{part}", axes.format(p)) for p, hf_name in names
            ]
            rows.append(row(f"{ours}qkv.{part}", axes.format("q+k+v"), *parts))
        linears += [
            (ours + "out", hf + "attention.output.dense", "embed", "q"),
            (ours + "up", hf + "intermediate.dense", "ffn", "embed"),
            (ours + "down", hf + "output.dense", "embed", "ffn"),
        ]
        norms += [
            (ours + "attn_norm", hf + "attention.output.LayerNorm"),
            (ours + "mlp_norm", hf + "output.LayerNorm"),
        ]
    tied_rows = ()
    if masked:
        predictions = "cls.predictions."
        linears.append(("head.dense", predictions + "transform.dense", "embed", "embed"))
        norms.append(("head.norm", predictions + "transform.LayerNorm"))
        weight = row("head.weight", "vocab embed", (predictions + "decoder.weight", "vocab embed"))
        bias = row("head.bias", "vocab", (predictions + "decoder.bias", "vocab"))
        if tied:
            rows.append(row("head.bias", "vocab", (predictions + "bias", "vocab")))
            tied_rows = (
                (weight, embeddings + "word_embeddings.weight"),
                (bias, predictions + "bias"),
            )
        else:
            rows += [weight, bias]
    else:
        linears.append(("pooler", "bert.pooler.dense", "embed", "embed"))
    for ours, hf, out, into in linears:
        # A square matrix needs two axis names to tell its sides apart.
        into_name = "embed_in" if out == into else into
        rows.append(
            row(f"{ours}.weight", f"{out} {into_name}", (f"{hf}.weight", f"{out} {into_name}"))
        )
        rows.append(row(f"{ours}.bias", out, (f"{hf}.bias", out)))
    for ours, hf in norms:
        rows += [row(f"{ours}.{p}", "embed", (f"{hf}.{p}", "embed")) for p in ("weight", "bias")]
    table = WeightTable(
        rows=tuple(rows),
        sizes={
            "vocab": vocab,
            "embed": embed,
            "embed_in": embed,
            "positions": positions,
            "types": types,
            "q": embed,
            "k": embed,
            "v": embed,
            "ffn": ffn,
        },
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
