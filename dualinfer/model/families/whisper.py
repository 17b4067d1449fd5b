"""Whisper: an encoder of log-mel spectrograms, a decoder of text. HF source: models/whisper."""

from collections.abc import Iterable
from dataclasses import replace

from ...blocks.spectrograms import Spectrograms
from .. import rows as make
from ..spec import Head, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .bart import side_layers
from .fields import ConfigFields

CLASSES = {"whisper": ("WhisperForConditionalGeneration", "WhisperModel")}
_BIASED = ("q", "v")  # a bias of keys would change no weight


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Whisper model."""
    norm = Norm("layer", 1e-5)  # HF leaves torch's default
    embed, vocab, mel = (fields.size(n) for n in ("d_model", "vocab_size", "num_mel_bins"))
    frames, positions = fields.size("max_source_positions"), fields.size("max_target_positions")
    activation = fields.activation("activation_function")
    fields.ignore("scale_embedding")  # HF computes the factor, and uses it nowhere
    fields.ignore("dropout", "attention_dropout", "activation_dropout", "init_std")
    fields.ignore("encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers")
    fields.ignore("is_encoder_decoder", "median_filter_width", "forced_decoder_ids")
    # Of its heads for classes, and of training.
    fields.ignore("use_weighted_layer_sum", "classifier_proj_size", "apply_spec_augment")
    for what in ("time", "feature"):
        fields.ignore(*(f"mask_{what}_{name}" for name in ("prob", "length", "min_masks")))
    has_head = architecture == "WhisperForConditionalGeneration"

    def stack(side: str, count: int) -> ModelSpec:
        decodes = side == "decoder"
        return ModelSpec(
            family="whisper",
            architecture=architecture,
            vocab=vocab,
            embed=embed,
            layers=side_layers(fields, side, activation, norm, "pre"),
            max_positions=count,
            positions=Positions(count),
            packs=False,
            final_norm=norm,
            senses=None if decodes else Spectrograms(mel),
        )

    encoder, decoder = stack("encoder", frames), stack("decoder", positions)
    start, axes = fields.take("decoder_start_token_id"), "vocab embed"
    spec = replace(decoder, head=Head("causal") if has_head else None, encoder=encoder, start=start)
    embedding = "model.decoder.embed_tokens.weight"
    outer = [row("embed.weight", axes, (embedding, axes))]
    for side, ours, axis in (
        ("decoder", "", "positions"),
        ("encoder", "encoder.", "source_positions"),
    ):
        stored = (f"model.{side}.embed_positions.weight", f"{axis} embed")
        table = row(f"{ours}positions.weight", f"{axis} embed", stored)
        outer.append(replace(table, fixed=side == "encoder"))  # sines, which HF has frozen
        outer += make.norm(norm, f"{ours}final_norm", f"model.{side}.layer_norm")
    for name, inputs in (("conv1", "mel"), ("conv2", "embed_in")):
        hf = f"model.encoder.{name}"
        axes_of = f"source_embed source_{inputs} source_taps"
        outer.append(row(f"encoder.{name}.kernel", axes_of, (f"{hf}.weight", axes_of)))
        outer.append(row(f"encoder.{name}.bias", "source_embed", (f"{hf}.bias", "source_embed")))
    fields.flag("tie_word_embeddings", True)
    head = row("head.weight", axes, ("proj_out.weight", axes))
    decoder_rows = tuple(_layer(norm, "model.decoder.layers.{i}.", crosses=True))
    encoder_rows = tuple(_layer(norm, "model.encoder.layers.{i}.", crosses=False))
    return spec, WeightTable(
        spec,
        tuple(outer),
        (decoder_rows,) * len(spec.layers) + (encoder_rows,) * len(encoder.layers),
        base="model.",
        unused=() if has_head else (r"^proj_out\.",),
        tied=((head, embedding),) if has_head else (),
    )


def _layer(norm: Norm, hf: str, crosses: bool) -> Iterable[Row]:
    yield from make.joined("qkv", hf + "self_attn.{p}", make.QKV, True, _BIASED)
    yield from make.linear("out", f"{hf}self_attn.out_proj", "embed q")
    yield from make.norm(norm, "attn_norm", f"{hf}self_attn_layer_norm")
    if crosses:
        yield from make.cross(hf + "encoder_attn.{p}", make.QKV, "out_proj", True, _BIASED)
        yield from make.norm(norm, "cross_norm", f"{hf}encoder_attn_layer_norm")
    yield from make.linear("up", f"{hf}fc1", "ffn embed")
    yield from make.linear("down", f"{hf}fc2", "embed ffn")
    yield from make.norm(norm, "mlp_norm", f"{hf}final_layer_norm")
