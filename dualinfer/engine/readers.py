"""Readers of a forward pass's arguments: each model has the one of its kind of input."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ..backends.base import ForwardInputs
from ..model.spec import ModelSpec
from .images import OF_PATCHES, make_image_inputs, make_tower_inputs
from .inputs import Text, Wanted, make_forward_inputs
from .pairs import make_pair_inputs
from .source import NAMES

_SPANS = "start_positions", "end_positions"
_TEXT = "input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds"


class Asked(NamedTuple):
    """Holds what a caller asks of a pass: the results that are `wanted`, but for losses.

    Positions that start anew may `pack` sequences, images are `interpolate`d, and `pad` is the
    model's id.
    """

    wanted: Wanted
    pack: bool
    interpolate: Any
    pad: int | None


# The inputs of a pass of the caller's arguments by name.
Reader: TypeAlias = Callable[[ModelSpec, dict[str, Any], Asked], ForwardInputs]


def read_by(spec: ModelSpec, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a forward that a model reads, and others that were given."""
    spans = spec.head is not None and spec.head.kind == "span"
    known: dict[str, Any] = {
        **dict.fromkeys(_SPANS, spans),
        **dict.fromkeys(NAMES, spec.crosses),
        "pixel_values": spec.sees,
        **dict.fromkeys(OF_PATCHES, spec.reads_patches),
        "bbox": spec.embedding.boxes,
    }
    arguments = {name: value for name, value in given.items() if known.get(name, True)}
    told = (*NAMES, "pixel_values")  # by errors of their own
    others = {n: x for n, x in given.items() if n not in (*arguments, *told) and x is not None}
    return arguments, others


def _pairs(spec: ModelSpec, values: dict[str, Any], asked: Asked) -> ForwardInputs:
    return make_pair_inputs(spec, values, _wanted(values, asked), pad=asked.pad)


def _towers(spec: ModelSpec, values: dict[str, Any], asked: Asked) -> ForwardInputs:
    return make_tower_inputs(spec, values, _wanted(values, asked), asked.interpolate)


def _images(spec: ModelSpec, values: dict[str, Any], asked: Asked) -> ForwardInputs:
    wanted = _wanted(values, asked)
    return make_image_inputs(spec, values, wanted, interpolate=asked.interpolate)


def _texts(spec: ModelSpec, values: dict[str, Any], asked: Asked) -> ForwardInputs:
    text = Text._make(values.get(name) for name in (*_TEXT, "bbox"))
    return make_forward_inputs(spec, text, _wanted(values, asked), may_pack=asked.pack)


def _wanted(values: dict[str, Any], asked: Asked) -> Wanted:
    """The results that are asked for, with those that labels and ends of answers ask for."""
    ends = values.pop(_SPANS[0], None), values.pop(_SPANS[1], None)
    return asked.wanted._replace(ends=ends, labels=values.get("labels"))


def reader_of(spec: ModelSpec) -> Reader:
    """The reader of a model's kind of input."""
    if spec.crosses:
        return _pairs
    if spec.towers:
        return _towers
    return _images if spec.patches else _texts
