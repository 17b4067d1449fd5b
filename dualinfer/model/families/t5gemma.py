"""T5Gemma: Gemma 2 as an encoder that looks both ways and a decoder. HF source: models/t5gemma."""

from collections.abc import Iterable
from dataclasses import replace

from ...errors import ModelError
from .. import rows as make
from ..spec import Attention, Layer, ModelSpec, Norm
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .gemma import KINDS, Gemma2

CLASSES = {
    "t5gemma": ("T5GemmaForConditionalGeneration", "T5GemmaModel", "T5GemmaEncoderModel"),
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a T5Gemma model; its stacks may differ in width."""
    own, other = (fields.part(side, fields.family) for side in ("decoder", "encoder"))
    fields.ignore("is_encoder_decoder", "dropout_rate", "classifier_dropout_rate")
    fields.ignore("attention_dropout", "vocab_size")  # HF reads those of the parts
    bias = own.flag("attention_bias", False), other.flag("attention_bias", False)
    start = own.take("bos_token_id")
    spec, encoder = _stack(own, architecture), _stack(other, "T5GemmaModel")
    own.require("cross_attention_hidden_size", encoder.embed)
    if encoder.vocab != spec.vocab:
        raise ModelError(
            f"config.json has an encoder of {encoder.vocab} ids and a decoder of {spec.vocab} "
            "(vocab_size); expected as many."
        )
    own.finish()
    other.finish()
    decoder_layers = tuple(
        replace(x, cross=replace(x.attending, causal=False, near=None, rope=None))
        for x in spec.layers
    )
    encoder = replace(
        encoder,
        layers=tuple(replace(x, attention=_both_ways(x)) for x in encoder.layers),
        pad_id=other.take("pad_token_id"),
        hides=True,
    )
    if architecture == "T5GemmaEncoderModel":
        encoder = replace(encoder, architecture=architecture)
        return encoder, _encoder_alone(fields, encoder, bias[1])
    scores = spec.head and replace(spec.head, loss="counted", ways=("keeps",))
    spec = replace(spec, layers=decoder_layers, encoder=encoder, start=start, head=scores)
    norm, axes = spec.layers[0].norm, "vocab embed"
    embedding = "model.decoder.embed_tokens.weight"
    source = "vocab source_embed"
    outer = [
        row("embed.weight", axes, (embedding, axes)),
        row("encoder.embed.weight", source, ("model.encoder.embed_tokens.weight", source)),
        *make.norm(norm, "final_norm", "model.decoder.norm"),
        *make.norm(
            encoder.layers[0].norm, "encoder.final_norm", "model.encoder.norm", "source_embed"
        ),
    ]
    head = row("head.weight", axes, ("lm_head.out_proj.weight", axes))
    tied = fields.flag("tie_word_embeddings", True)
    if spec.head is not None and not tied:
        outer.append(head)
    rows, encoder_rows = (
        tuple(_layer(norm, f"model.{side}.layers.{{i}}.", biased, side == "decoder"))
        for side, biased in zip(("decoder", "encoder"), bias, strict=True)
    )
    return spec, WeightTable(
        spec,
        tuple(outer),
        (rows,) * len(spec.layers) + (encoder_rows,) * len(encoder.layers),
        base="model.",
        unused=() if spec.head else (r"^lm_head\.",),
        tied=((head, embedding),) if spec.head and tied else (),
    )


def _encoder_alone(fields: ConfigFields, spec: ModelSpec, bias: bool) -> WeightTable:
    """The table of the encoder without a decoder."""
    norm, axes, hf = spec.layers[0].norm, "vocab embed", "model.encoder."
    fields.ignore("tie_word_embeddings")
    outer = row("embed.weight", axes, (f"{hf}embed_tokens.weight", axes))
    return WeightTable(
        spec,
        (outer, *make.norm(norm, "final_norm", f"{hf}norm")),
        (tuple(_layer(norm, hf + "layers.{i}.", bias, crosses=False)),) * len(spec.layers),
        base="model.",
        unused=(r"^(model\.)?decoder\.", r"^lm_head\."),
    )


def _stack(fields: ConfigFields, architecture: str) -> ModelSpec:
    """A stack as Gemma 2 has it."""
    fields.ignore("is_decoder", "is_encoder_decoder", "dropout_rate")
    spec, _ = Gemma2(KINDS["gemma2"], fields).describe(architecture)
    return replace(spec, packs=False)


def _both_ways(layer: Layer) -> Attention:
    """An encoder's attention; its window is of so many tokens on either side of the query's own."""
    window = layer.attending.window
    return replace(layer.attending, causal=False, near=None if window is None else window + 1)


def _layer(norm: Norm, hf: str, bias: bool, crosses: bool) -> Iterable[Row]:
    yield from make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias)
    yield from make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias)
    parts = [("attn", "self_attn"), ("mlp", "feedforward")]
    if crosses:
        parts.insert(1, ("cross", "cross_attn"))
        names = hf + "cross_attn.{p}", make.QKV, "o_proj"
        yield from make.cross(*names, bias, width="source_embed")
    for ours, theirs in parts:
        yield from make.norm(norm, f"{ours}_norm", f"{hf}pre_{theirs}_layernorm")
        yield from make.norm(norm, f"{ours}_post_norm", f"{hf}post_{theirs}_layernorm")
    yield from make.joined("up", hf + "mlp.{p}", make.GATE_UP, bias=False)
    yield from make.linear("down", f"{hf}mlp.down_proj", "embed up", bias=False)
