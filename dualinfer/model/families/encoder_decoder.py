"""BERT, or ViT of images, as an encoder, and a BERT, GPT-2 or TrOCR that decodes.

HF sources: models/encoder_decoder, models/vision_encoder_decoder.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ...errors import ModelError, UnservedError, shown
from .. import rows as make
from ..spec import Layer, ModelSpec
from ..weights import Row, WeightTable
from . import bert, gpt2, trocr, vit
from .fields import ConfigFields

CLASSES = {
    "encoder-decoder": ("EncoderDecoderModel",),
    "vision-encoder-decoder": ("VisionEncoderDecoderModel",),
}
_ENCODERS = {"encoder-decoder": ("bert",), "vision-encoder-decoder": ("vit", "deit")}
_DECODERS = {"encoder-decoder": ("bert",), "vision-encoder-decoder": ("trocr", "gpt2", "bert")}
_MODULES = {"bert": bert, "gpt2": gpt2, "trocr": trocr, "vit": vit, "deit": vit}
_HEADED = {"bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel", "trocr": "TrOCRForCausalLM"}
_BARE = {"bert": "BertModel", "vit": "ViTModel", "deit": "DeiTModel"}
_CROSS = {"q": "self.query", "k": "self.key", "v": "self.value"}
_UNUSED = (
    *(r"embeddings\.(position_ids|token_type_ids|mask_token)$", r"pooler\.dense\.(weight|bias)$"),
    *(r"\.(attn|crossattention)\.(masked_)?bias$", r"embed_positions\.(weights|_float_tensor)$"),
)


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of the pair."""
    own, other = _part(fields, "decoder", _DECODERS), _part(fields, "encoder", _ENCODERS)
    fields.require("tie_encoder_decoder", False)
    fields.ignore("is_encoder_decoder", "tie_word_embeddings", "vocab_size")
    start = fields.take("decoder_start_token_id")
    spec, table = _MODULES[own.family].describe(own, _HEADED[own.family])
    encoder, encoder_table = _MODULES[other.family].describe(other, _BARE[other.family])
    width = own.take("cross_attention_hidden_size", spec.embed)
    is_wide = width != spec.embed and own.family != "trocr"  # whose keys are of that width
    if width != encoder.embed or is_wide or encoder.vocab not in (0, spec.vocab):
        raise UnservedError(
            f"config.json has an encoder of {encoder.vocab} ids and width {encoder.embed} beside a "
            f"decoder of {spec.vocab} and {spec.embed} (cross_attention_hidden_size={width}), "
            "which fused mode serves where they are equal, or where TrOCR's says the encoder's."
        )
    own.finish()
    other.finish()
    assert spec.head is not None

    def decoding(layer: Layer) -> Layer:
        across = replace(layer.attending, causal=False)
        return replace(layer, attention=replace(across, causal=True), cross=across)

    names = {"family": fields.family, "architecture": architecture, "packs": False}
    spec = replace(
        spec,
        layers=tuple(map(decoding, spec.layers)),
        head=replace(spec.head, kind="causal"),
        encoder=replace(encoder, **names),
        start=start,
        **names,
    )

    def of_encoder(name: str) -> str:
        return f"encoder.{name.removeprefix(encoder_table.base)}"

    encoder_rows = (r for r in encoder_table.outer if not r.name.startswith("pooler"))
    outer = (
        *_renamed(table.outer, _of_decoder),
        *map(_beside, _renamed(encoder_rows, of_encoder)),
    )
    cross = tuple(_renamed(_cross_rows(own.family, spec), _of_decoder))
    layers = tuple((*_renamed(rows, _of_decoder), *cross) for rows in table.layers)
    layers += tuple(tuple(_renamed(rows, of_encoder)) for rows in encoder_table.layers)
    tied = tuple((next(iter(_renamed([r], _of_decoder))), f"decoder.{n}") for r, n in table.tied)
    renames = *table.renames, *(x for x in encoder_table.renames if x not in table.renames)
    return spec, WeightTable(spec, outer, layers, renames=renames, unused=_UNUSED, tied=tied)


def _cross_rows(decoder: str, spec: ModelSpec) -> Iterable[Row]:
    """The rows of a decoder's layer for attention across, beside its others."""
    if decoder == "trocr":
        return trocr.cross_rows(spec)
    if decoder == "gpt2":
        return gpt2.cross_rows(spec)
    hf = "bert.encoder.layer.{i}.crossattention."
    return [
        *make.cross(hf + "{p}", _CROSS, "output.dense", True, width="source_embed"),
        *make.norm(spec.layers[0].norm, "cross_norm", f"{hf}output.LayerNorm"),
    ]


def _part(fields: ConfigFields, name: str, served: Mapping[str, Collection[str]]) -> ConfigFields:
    """The config of one of the two, as of a model that does not decode."""
    values = fields.take(name)
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json has {name}={shown(values)}; expected an object.")
    decodes, family = name == "decoder", values.get("model_type")
    if not isinstance(family, str) or family not in served[fields.family]:
        raise UnservedError(
            f"config.json has {name} with model_type={shown(family)}; of {fields.family} fused "
            f"mode serves {' and '.join(served[fields.family])} there."
        )
    own = ConfigFields(family, values, name)
    if family not in ("vit", "deit"):
        own.require("is_decoder", decodes)
        own.require("add_cross_attention", decodes)
    alone = {**values, "is_decoder": False, "add_cross_attention": False}
    return ConfigFields(family, alone, name)


def _of_decoder(name: str) -> str:
    return f"decoder.{name}"


def _renamed(rows: Iterable[Row], new: Callable[[str], str]) -> Iterable[Row]:
    for own in rows:
        yield replace(own, sources=tuple(replace(s, name=new(s.name)) for s in own.sources))


def _beside(own: Row) -> Row:
    """A row of the encoder's own as one of the whole; both have one vocabulary."""

    def axes(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(x if x == "vocab" else f"source_{x}" for x in names)

    sources = tuple(replace(source, axes=axes(source.axes)) for source in own.sources)
    return replace(own, name=f"encoder.{own.name}", axes=axes(own.axes), sources=sources)
