"""BERT as an encoder, and another BERT that decodes. HF: models/encoder_decoder, models/bert."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ...errors import ModelError, UnservedError, shown
from ..spec import Layer, ModelSpec
from ..weights import Row, WeightTable
from . import bert
from . import rows as make
from .fields import ConfigFields

CLASSES = {"encoder-decoder": ("EncoderDecoderModel",)}
_CROSS = {"q": "self.query", "k": "self.key", "v": "self.value"}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of the pair."""
    own, other = (_part(fields, side) for side in ("decoder", "encoder"))
    fields.require("tie_encoder_decoder", False)
    fields.ignore("is_encoder_decoder", "tie_word_embeddings")
    start = fields.take("decoder_start_token_id")
    spec, table = bert.describe(own, "BertForMaskedLM")
    encoder, encoder_table = bert.describe(other, "BertModel")
    width = own.take("cross_attention_hidden_size", spec.embed)
    if width != encoder.embed or encoder.vocab != spec.vocab:
        raise UnservedError(
            f"config.json has an encoder of {encoder.vocab} ids and width {encoder.embed} beside a "
            f"decoder of {spec.vocab} and {width}, which fused mode serves where they are equal."
        )
    own.finish()
    other.finish()
    assert spec.head is not None

    def decoding(layer: Layer) -> Layer:
        return replace(
            layer, attention=replace(layer.attention, causal=True), cross=layer.attention
        )

    names = {"family": fields.family, "architecture": architecture, "packs": False}
    spec = replace(
        spec,
        layers=tuple(map(decoding, spec.layers)),
        head=replace(spec.head, kind="causal"),
        encoder=replace(encoder, **names),
        start=start,
        **names,
    )
    hf = "decoder.bert.encoder.layer.{i}.crossattention."
    cross = [
        *make.cross(hf + "{p}", _CROSS, "output.dense", True, width="source_embed"),
        *make.norm(spec.layers[0].norm, "cross_norm", f"{hf}output.LayerNorm"),
    ]
    encoder_rows = (r for r in encoder_table.outer if not r.name.startswith("pooler"))
    outer = (
        *_renamed(table.outer, _of_decoder),
        *map(_beside, _renamed(encoder_rows, _of_encoder)),
    )
    layers = tuple((*_renamed(rows, _of_decoder), *cross) for rows in table.layers)
    layers += tuple(tuple(_renamed(rows, _of_encoder)) for rows in encoder_table.layers)
    tied = tuple((next(iter(_renamed([r], _of_decoder))), f"decoder.{n}") for r, n in table.tied)
    unused = r"embeddings\.(position_ids|token_type_ids)$", r"pooler\.dense\.(weight|bias)$"
    return spec, WeightTable(spec, outer, layers, renames=table.renames, unused=unused, tied=tied)


def _part(fields: ConfigFields, name: str) -> ConfigFields:
    """The config of one of the two, as of a BERT that does not decode."""
    values = fields.take(name)
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json has {name}={shown(values)}; expected an object.")
    decodes = name == "decoder"
    own = ConfigFields("bert", values)
    if values.get("model_type") != "bert":
        raise UnservedError(
            f"config.json has {name} with model_type={shown(values.get('model_type'))}; fused mode "
            "serves pairs of bert alone."
        )
    own.require("is_decoder", decodes)
    own.require("add_cross_attention", decodes)
    return ConfigFields("bert", {**values, "is_decoder": False, "add_cross_attention": False})


def _of_decoder(name: str) -> str:
    return f"decoder.{name}"


def _of_encoder(name: str) -> str:
    return f"encoder.{name.removeprefix('bert.')}"


def _renamed(rows: Iterable[Row], new: Callable[[str], str]) -> Iterable[Row]:
    for own in rows:
        yield replace(own, sources=tuple(replace(s, name=new(s.name)) for s in own.sources))


def _beside(own: Row) -> Row:
    """A row of the encoder's own as one of the whole; both have one vocabulary."""

    def axes(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(x if x == "vocab" else f"source_{x}" for x in names)

    sources = tuple(replace(source, axes=axes(source.axes)) for source in own.sources)
    return replace(own, name=f"encoder.{own.name}", axes=axes(own.axes), sources=sources)
