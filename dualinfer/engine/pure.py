"""Inputs of an engine's pure function: arrays that may be traced, whose values are not known.

As the modules that check a caller's arrays have it (`inputs`, `images`, `sounds`, `source`), but
for what needs values. `xp` is the arrays' module, which has NumPy's names.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from ..arrays import kind_of, to_numpy
from ..backends.base import ForwardInputs, Tokens
from ..errors import ArgumentError, LengthError, a_type
from ..model.spec import ModelSpec
from .images import OF_PATCHES, as_patches, blend_of, grid_of, resized
from .inputs import default_positions, pooling_weights
from .pairs import behind_start, last_places
from .sounds import as_tokens, count_tokens

_OF_TEXT = ("attention_mask", "position_ids", "token_type_ids", "inputs_embeds")


def make_pure_inputs(
    spec: ModelSpec, given: Mapping[str, Any], xp: Any, *, pad: int | None
) -> ForwardInputs:
    """One forward pass of HF's arguments by name, those that are None left out.

    `input_ids` is the first argument, which may be what the model reads in their place; errors call
    it tokens. `pad` fills what is shifted. Raises ArgumentError for shapes and dtypes that do not
    fit the model, and LengthError for more tokens than it has positions.
    """
    own = _Given(spec, given, xp)
    if spec.towers:
        assert spec.encoder is not None
        images, texts = _images(spec.encoder, own), _text(spec, own)
        return replace(texts, tokens=texts.tokens._replace(source=images))
    if spec.crosses:
        return _pair(spec, own, pad)
    return ForwardInputs(_images(spec, own)) if spec.patches else _text(spec, own)


class _Given(dict[str, Any]):
    """The arguments that a model reads, by name; ArgumentError for one that it does not."""

    def __init__(self, spec: ModelSpec, given: Mapping[str, Any], xp: Any) -> None:
        names, first = _names(spec)
        asked = {name: value for name, value in given.items() if value is not None}
        if "input_ids" in asked and first != "input_ids" and first not in asked:
            asked[first] = asked.pop("input_ids")
        for name in (own for own in asked if own not in names):
            called = ["tokens" if own == "input_ids" else own for own in (name, *names)]
            raise ArgumentError(
                f"{called[0]}: apply() of {spec.architecture} reads {', '.join(called[1:])}. Leave "
                "it out."
            )
        super().__init__(asked)
        self.xp, self.architecture = xp, spec.architecture

    def array(self, name: str, called: str | None = None) -> Any:
        """An argument as an array; ArgumentError where it is missing, or none."""
        value, called = self.get(name), called or name
        if value is None:
            raise ArgumentError(f"{called} is missing, which {self.architecture} reads.")
        if kind_of(value) is None:
            raise ArgumentError(f"{called} is {a_type(value)}; expected an array.")
        is_own = kind_of(value) == self.xp.__name__.partition(".")[0]
        return value if is_own else self.xp.asarray(to_numpy(value))  # it goes to the weights

    def integers(self, name: str, called: str | None = None) -> Any:
        """An argument as int32."""
        array = self.array(name, called)
        if not self.xp.issubdtype(array.dtype, self.xp.integer):
            raise ArgumentError(f"{called or name} has dtype {array.dtype}; expected integers.")
        return array.astype(self.xp.int32)

    def rows(self, name: str, shape: tuple[int, int]) -> Any:
        """Integers for each token."""
        array = self.integers(name)
        if array.shape not in (shape, (1, shape[1]), shape[1:]):
            raise ArgumentError(f"{name} has shape {array.shape}; expected {shape}.")
        return self.xp.broadcast_to(array, shape)

    def floats(self, name: str, expected: str, axes: tuple[int | None, ...]) -> Any:
        """An argument as float32 of these `axes`, a None being any extent; it may lack the first.

        Then it is one row.
        """
        array = self.array(name)
        rows = array[None] if array.ndim == len(axes) - 1 else array
        fits = rows.ndim == len(axes) and array.size
        fits = fits and all(n in (None, m) for n, m in zip(axes, rows.shape, strict=True))
        if fits and self.xp.issubdtype(array.dtype, self.xp.floating):
            return rows.astype(self.xp.float32)
        raise ArgumentError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; expected floats {expected}."
        )

    def mask(self, name: str, shape: tuple[int, int]) -> Any:
        """bool of `shape`, None where it is not given; any value but 0 shows a token."""
        if name not in self:
            return None
        visible = self.array(name) != 0
        if visible.shape != shape and not (shape[0] == 1 and visible.shape == shape[1:]):
            raise ArgumentError(
                f"{name} has shape {visible.shape}; expected {shape}, that of tokens."
            )
        return visible.reshape(shape)

    def beside_each_other(self, name: str) -> tuple["_Given", int]:
        """Arrays [B, choices, ...] as [B choices, ...], and how many choices `name` has."""
        arrays = {own: self.array(own) for own in self}
        shape = arrays[name].shape if name in arrays else ()
        if len(shape) < 3:
            raise ArgumentError(
                f"tokens has shape {shape}; a model for multiple choice expects [batch, choices, "
                "tokens]."
            )
        for own, array in arrays.items():
            if array.shape[:3] != shape[:3]:
                raise ArgumentError(f"{own} has shape {array.shape}; expected {shape[:3]}.")
        flat = copy(self)
        flat.update({own: array.reshape(-1, *array.shape[2:]) for own, array in arrays.items()})
        return flat, shape[1]


def _names(spec: ModelSpec) -> tuple[list[str], str]:
    """The names of what a model reads, and of what its first argument is."""
    images = ["pixel_values", *(OF_PATCHES if spec.reads_patches else ())]
    images += [] if spec.reads_patches or spec.crosses else ["interpolate_pos_encoding"]
    if spec.towers:
        return ["input_ids", "attention_mask", "position_ids", *images], "input_ids"
    if not spec.crosses:
        if spec.patches is not None:
            return images, "pixel_values"
        return ["input_ids", *_OF_TEXT, *(["bbox"] if spec.embedding.boxes else [])], "input_ids"
    assert spec.encoder is not None
    own = ["input_ids", "attention_mask", "inputs_embeds"]
    if spec.encoder.sounds is not None:
        own = [spec.encoder.sounds.name, *(["attention_mask"] if spec.encoder.marks else [])]
    elif spec.encoder.patches is not None:
        own = images
    more = ["decoder_input_ids", "decoder_attention_mask", "encoder_outputs"]
    return [*own, *more], own[0]


def _text(
    spec: ModelSpec,
    given: _Given,
    ids: str = "input_ids",
    mask: str = "attention_mask",
    called: str = "tokens",
) -> ForwardInputs:
    """Sequences of ids, or of embeddings in their place."""
    xp, tokens, embeds, choices = given.xp, None, None, None
    by_embeds = ids == "input_ids" and "inputs_embeds" in given
    if spec.head is not None and spec.head.kind == "choice":
        given, choices = given.beside_each_other("inputs_embeds" if by_embeds else ids)
    if by_embeds:
        if ids in given:
            raise ArgumentError("tokens and inputs_embeds were given; pass one of them.")
        if spec.reads:
            raise ArgumentError(
                f"inputs_embeds: each layer of {spec.architecture} reads an embedding of its own "
                "of every id. Pass tokens."
            )
        width = spec.extent("width")
        embeds = given.floats("inputs_embeds", f"[batch, tokens, {width}]", (None, None, width))
        shape = embeds.shape[0], embeds.shape[1]
    else:
        tokens = given.integers(ids, called)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        if tokens.ndim != 2 or not tokens.size:
            raise ArgumentError(f"{called} has shape {tokens.shape}; expected [batch, tokens].")
        shape = tokens.shape[0], tokens.shape[1]
    if spec.tokens and shape[1] > spec.tokens:
        raise LengthError(f"{called} has {shape[1]} tokens, but {spec.why_most}.")
    visible = given.mask(mask, shape)
    if visible is None and spec.hidden is not None and tokens is not None:
        visible = tokens != spec.hidden
    at = default_positions(spec, shape, tokens, visible, xp)
    if "position_ids" in given:
        if spec.alibi:
            raise ArgumentError(
                f"The {spec.family} family takes no position_ids: attention counts the tokens of "
                "attention_mask itself. Leave them out."
            )
        at = given.rows("position_ids", shape)
    weights, types = pooling_weights(spec, shape, tokens, visible, xp), _types(spec, given, shape)
    read = Tokens(tokens, at, visible, types, embeds=embeds, weights=weights)
    return ForwardInputs(read, choices=choices)


def _types(spec: ModelSpec, given: _Given, shape: tuple[int, int]) -> Any:
    """Token types int32 [B, T], with the boxes of tokens behind them where there are some."""
    xp, types = given.xp, None
    if "token_type_ids" in given:
        if not spec.token_types:
            raise ArgumentError(
                f"The {spec.family} family has no token types; leave token_type_ids out."
            )
        types = given.rows("token_type_ids", shape)
    elif spec.embedding.own_types:
        types = xp.zeros(shape, xp.int32)
    if "bbox" not in given:
        return types
    boxes = given.integers("bbox")
    if boxes.shape != (*shape, 4):
        raise ArgumentError(f"bbox has shape {boxes.shape}; expected {(*shape, 4)}.")
    assert types is not None
    return xp.concatenate((types[..., None], boxes), -1)


def _images(spec: ModelSpec, given: _Given) -> Tokens:
    """Images, cut into patches, or patches as they are."""
    xp, patches = given.xp, spec.patches
    assert patches is not None
    visible = None
    if patches.given:
        width = patches.width
        tokens = given.floats("pixel_values", f"[batch, patches, {width}]", (None, None, width))
        shape = tokens.shape[0], tokens.shape[1]
        visible = given.mask("pixel_attention_mask", shape)
        blend = resized(patches, _known(given, "spatial_shapes"), shape)
    else:
        interpolate = given.get("interpolate_pos_encoding", False)
        sizes = (None, None) if interpolate or patches.sizes == "any" else patches.image[1:]
        high, wide = sizes if sizes[0] else ("height", "width")
        expected = f"[batch, {patches.channels}, {high}, {wide}]"
        if sizes[0]:
            expected += ", or of another size with interpolate_pos_encoding=True"
        array = given.floats("pixel_values", expected, (None, patches.channels, *sizes))
        grid = grid_of(patches, array.shape)
        tokens, blend = as_patches(patches, array, grid, xp), blend_of(spec, grid)
        shape = tokens.shape[0], tokens.shape[1]
    if blend is not None:
        blend = xp.broadcast_to(xp.asarray(blend), (shape[0], *blend.shape[1:]))
    at = xp.broadcast_to(xp.arange(shape[1], dtype=xp.int32), shape)
    weights = pooling_weights(spec, shape, None, visible, xp)
    return Tokens(None, at, visible, embeds=tokens, weights=weights, blend=blend)


def _known(given: _Given, name: str) -> Any:
    """An argument in NumPy; ArgumentError where it is traced."""
    if name not in given:
        return None
    try:
        return to_numpy(given[name])
    except Exception as error:
        raise ArgumentError(
            f"{name} says how positions are interpolated, and is traced here. Pass it as a NumPy "
            "array that the traced function closes over."
        ) from error


def _pair(spec: ModelSpec, given: _Given, pad: int | None) -> ForwardInputs:
    """Inputs of an encoder, or its states, and the ids of the decoder."""
    assert spec.encoder is not None
    xp = given.xp
    source = _source(spec, given)
    ids = "decoder_input_ids"
    if ids not in given and "source" in spec.shifted and source.ids is not None:
        given[ids] = behind_start(spec, source.ids, pad, xp)
    inputs = _text(spec, given, ids, "decoder_attention_mask", ids)
    tokens = inputs.tokens._replace(source=source._replace(token_types=None, weights=None))
    if tokens.shape[0] != source.shape[0]:
        raise ArgumentError(
            f"{ids} has {tokens.shape[0]} rows and what the encoder reads {source.shape[0]}; they "
            "are pairs."
        )
    if spec.head is not None and spec.head.pooling == "eos":
        if source.ids is None:
            raise ArgumentError(f"{spec.architecture} scores the place of an end in tokens.")
        at, places = last_places(source.ids == spec.end_id), xp.arange(tokens.shape[1])
        tokens = tokens._replace(weights=(places == at[:, None]).astype(xp.float32))
    return replace(inputs, tokens=tokens)


def _source(spec: ModelSpec, given: _Given) -> Tokens:
    xp, encoder = given.xp, spec.encoder
    assert encoder is not None

    def counted(shape: tuple[int, int]) -> Any:
        return xp.broadcast_to(xp.arange(shape[1], dtype=xp.int32), shape)

    if "encoder_outputs" in given:
        sizes = (None, encoder.one_length or None, encoder.embed)
        expected = f"[batch, {encoder.one_length or 'tokens'}, {encoder.embed}]"
        states = given.floats("encoder_outputs", expected, sizes)
        shape = states.shape[0], states.shape[1]
        ids = given.integers("input_ids", "tokens") if "input_ids" in given else None
        if ids is not None and ids.shape != shape:
            raise ArgumentError(
                f"tokens has shape {ids.shape} and encoder_outputs {states.shape}; expected the "
                f"ids {shape} that the encoder has read."
            )
        visible = None
        if encoder.sounds is None and not encoder.one_length:
            visible = given.mask("attention_mask", shape)
        elif encoder.sounds and encoder.marks and "attention_mask" in given:
            visible = encoder.sounds.visible(given.array("attention_mask") != 0)
        return Tokens(ids, counted(shape), visible, states=states)
    if encoder.sounds is not None and encoder.frames:
        shape = encoder.sounds.frame_width, encoder.frames
        expected = f"[batch, {shape[0]}, {shape[1]}]"
        features = given.floats(encoder.sounds.name, expected, (None, *shape))
        places = features.shape[0], encoder.positions.rows
        return Tokens(None, counted(places), embeds=features.swapaxes(1, 2))
    if encoder.sounds is not None:
        bins = encoder.sounds.frame_width
        axes, expected = (None, None, bins), f"[batch, frames, {bins}]"
        if not bins:
            axes, expected = (None, None), "[batch, samples]"
        array = given.floats(encoder.sounds.name, expected, axes)
        count = count_tokens(spec, array.shape)
        visible = None
        if "attention_mask" in given:
            mask = given.mask("attention_mask", (array.shape[0], array.shape[1]))
            visible = encoder.sounds.visible(mask)
        tokens = as_tokens(encoder.sounds, array, count, visible, xp)
        return Tokens(None, counted(tokens.shape[:2]), visible, embeds=tokens)
    if encoder.patches is not None:
        return _images(encoder, given)
    return _text(encoder, given).tokens
