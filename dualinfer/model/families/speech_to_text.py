"""Speech2Text: an encoder of filter banks, a decoder of text. HF source: models/speech_to_text."""

from dataclasses import replace

from ...blocks.filter_banks import FilterBanks
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Embedding, Head, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .bart import layer_rows, side_layers
from .fairseq import Sinusoids
from .fields import ConfigFields

CLASSES = {"speech_to_text": ("Speech2TextForConditionalGeneration", "Speech2TextModel")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Speech2Text model."""
    norm, embed = Norm("layer", 1e-5), fields.size("d_model")  # HF leaves torch's default
    positions = {x: fields.size(f"max_{x}_positions") for x in ("source", "target")}
    activation = fields.activation("activation_function")
    scale = embed**0.5 if fields.flag("scale_embedding", True) else 1.0
    pad = fields.size("pad_token_id") if fields.take("pad_token_id") else 0
    fields.ignore("dropout", "attention_dropout", "activation_dropout", "init_std")
    fields.ignore("encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers")
    fields.ignore("is_encoder_decoder", "is_decoder", "classifier_dropout")
    has_head = architecture.endswith("ForConditionalGeneration")
    sounds = _sounds(fields)

    def stack(side: str, count: int) -> ModelSpec:
        decodes = side == "decoder"
        return ModelSpec(
            family=fields.family,
            architecture=architecture,
            vocab=fields.size("vocab_size") if decodes else 0,
            embed=embed,
            layers=side_layers(fields, side, activation, norm, "pre"),
            max_positions=count,
            # The row of the padding is that before position 0.
            positions=Positions(count, pad + 1, "rows" if decodes else "all"),
            pad_id=pad if decodes else None,
            packs=False,
            embedding=Embedding(scale, "ids" if decodes else "all"),
            final_norm=norm,
            senses=None if decodes else sounds,
        )

    encoder, spec = stack("encoder", positions["source"]), stack("decoder", positions["target"])
    start, axes = fields.take("decoder_start_token_id"), "vocab embed"
    spec = replace(spec, head=Head("causal") if has_head else None, encoder=encoder, start=start)
    embedding = "model.decoder.embed_tokens.weight"
    outer = [
        row("embed.weight", axes, (embedding, axes)),
        Row("positions.weight", ("positions", "embed"), (), constant=Sinusoids(pad)),
        # HF finds those of a sound by comparing 0 with the id of the padding.
        Row(
            "encoder.positions.weight",
            ("source_positions", "embed"),
            (),
            constant=Sinusoids(pad) if pad else 0.0,
        ),
        *make.norm(norm, "final_norm", "model.decoder.layer_norm"),
        *make.norm(norm, "encoder.final_norm", "model.encoder.layer_norm"),
    ]
    for i, shape in enumerate(("convolved heard taps1", "embed2 between taps2")):
        stored = " ".join(f"source_{x}" for x in shape.split())
        hf, out = f"model.encoder.conv.conv_layers.{i}", stored.split()[0]
        outer.append(row(f"encoder.conv{i + 1}.kernel", stored, (f"{hf}.weight", stored)))
        outer.append(row(f"encoder.conv{i + 1}.bias", out, (f"{hf}.bias", out)))
    head = row("head.weight", axes, ("lm_head.weight", axes))
    tied = has_head and fields.flag("tie_word_embeddings", True)
    if has_head and not tied:
        outer.append(head)
    fields.ignore("tie_word_embeddings")
    decoder_rows = tuple(layer_rows(norm, "model.decoder.layers.{i}.", crosses=True))
    encoder_rows = tuple(layer_rows(norm, "model.encoder.layers.{i}.", crosses=False))
    return spec, WeightTable(
        spec,
        tuple(outer),
        (decoder_rows,) * len(spec.layers) + (encoder_rows,) * len(encoder.layers),
        base="model.",
        unused=(r"embed_positions\.weights$", *(() if has_head else (r"^lm_head\.",))),
        tied=((head, embedding),) if tied else (),
    )


def _sounds(fields: ConfigFields) -> FilterBanks:
    """Read the form of the encoder's input from the config."""
    fields.require("num_conv_layers", 2)
    taps, channels = fields.take("conv_kernel_sizes"), fields.size("conv_channels")
    fits = isinstance(taps, list | tuple) and all(type(n) is int and n % 2 > 0 for n in taps)
    if not fits or len(taps) != 2 or channels % 2:
        raise ModelError(
            f"config.json has conv_kernel_sizes={shown(taps)} and conv_channels={channels}; "
            "expected two odd ints and an even one."
        )
    bins = fields.size("input_feat_per_channel") * fields.size("input_channels", 1)
    return FilterBanks(bins, channels // 2, (taps[0], taps[1]))
