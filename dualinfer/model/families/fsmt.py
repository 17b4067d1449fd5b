"""FSMT: fairseq's translators of WMT, with a vocabulary for each language. HF: models/fsmt."""

from dataclasses import replace

from ..spec import Embedding, Head, ModelSpec, Norm, Positions
from ..weights import Row, Source, WeightTable, row
from .bart import WRITTEN, layer_rows, side_layers
from .fairseq import Sinusoids
from .fields import ConfigFields

# HF's FSMTModel gives logits in the place of a hidden state.
CLASSES = {"fsmt": ("FSMTForConditionalGeneration",)}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an FSMT model."""
    norm = Norm("layer", 1e-5)  # HF leaves torch's default
    embed, positions = fields.size("d_model"), fields.size("max_position_embeddings")
    activation = fields.activation("activation_function")
    scale = embed**0.5 if fields.flag("scale_embedding", True) else 1.0
    # The row before position 0.
    pad = fields.size("pad_token_id") if fields.take("pad_token_id") else 0
    start = fields.take("decoder_start_token_id")
    fields.require("tie_word_embeddings", False)
    fields.ignore("dropout", "attention_dropout", "activation_dropout", "init_std", "langs")
    fields.ignore("encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers", "vocab_size")
    fields.ignore("is_encoder_decoder", "decoder", *WRITTEN)

    def stack(side: str, vocab: str) -> ModelSpec:
        decodes = side == "decoder"
        return ModelSpec(
            family="fsmt",
            architecture=architecture,
            vocab=fields.size(vocab),
            embed=embed,
            layers=side_layers(fields, side, activation, norm, "post"),
            max_positions=positions,
            positions=Positions(positions, pad + 1, "rows"),
            pad_id=pad,
            hides=decodes,
            packs=False,
            embedding=Embedding(scale),
        )

    encoder, decoder = stack("encoder", "src_vocab_size"), stack("decoder", "tgt_vocab_size")
    spec = replace(decoder, head=Head("causal"), encoder=encoder, start=start, shifted=())
    axes, source = "vocab embed", "source_vocab embed"
    outer = [
        row("embed.weight", axes, ("model.decoder.embed_tokens.weight", axes)),
        row("encoder.embed.weight", source, ("model.encoder.embed_tokens.weight", source)),
        row("head.weight", axes, ("model.decoder.output_projection.weight", axes)),
    ]
    for side, ours, axis in (
        ("decoder", "", "positions"),
        ("encoder", "encoder.", "source_positions"),
    ):
        stored = Source(f"model.{side}.embed_positions.weight", (axis, "embed"))
        table = Row(f"{ours}positions.weight", stored.axes, (), constant=Sinusoids(pad))
        outer.append(replace(table, others=(stored,)))
    decoder_rows = tuple(layer_rows(norm, "model.decoder.layers.{i}.", crosses=True))
    encoder_rows = tuple(layer_rows(norm, "model.encoder.layers.{i}.", crosses=False))
    return spec, WeightTable(
        spec,
        tuple(outer),
        (decoder_rows,) * len(spec.layers) + (encoder_rows,) * len(encoder.layers),
        base="model.",
    )
