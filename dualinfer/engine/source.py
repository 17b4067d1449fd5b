"""The input of an encoder: ids, spectrograms, sounds, images, or the states that it gave before."""

from collections.abc import Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..arrays import kind_of, to_numpy
from ..backends.base import Tokens
from ..errors import ArgumentError, LengthError, a_type
from ..model.spec import ModelSpec
from .checks import check_ids, check_mask, read_array
from .images import make_image_inputs
from .inputs import Text, Wanted, make_forward_inputs
from .prompts import Prompts, make_prompts
from .sounds import check_sounds, visible_of_frames

# Of these models alone.
NAMES = ("decoder_input_ids", "decoder_attention_mask", "input_features", "encoder_outputs")
NAMES += ("input_values",)
HEARD = ("input_features", "input_values")
# How an encoder's images are read: no scores come of them.
_OTHERS = (*HEARD, "pixel_values")  # what encoders read in the place of ids


def encoder_states(outputs: Any) -> Any:
    """The array in what a caller gives as `encoder_outputs`: HF's output, a tuple, or the array.

    Of an output of a whole pass it is the encoder's. What is none of these comes back as it is.
    Raises ArgumentError for one with a mask of its own that hides tokens (HF's Moonshine).
    """
    if isinstance(outputs, Mapping):
        mask = outputs.get("attention_mask")
        if kind_of(mask) is not None and not np.asarray(to_numpy(mask)).all():
            raise ArgumentError(
                "encoder_outputs has an attention_mask of its own, which hides tokens. Pass "
                "encoder_outputs.last_hidden_state, and the attention_mask that the encoder had."
            )
        names = "encoder_last_hidden_state", "last_hidden_state"
        return next((outputs[name] for name in names if outputs.get(name) is not None), outputs)
    if isinstance(outputs, tuple | list) and outputs:
        return outputs[0]
    return outputs


def check_states(spec: ModelSpec, states: Any) -> np.ndarray:
    """The encoder's output as float32 [B, S, E]; ArgumentError for what does not fit."""
    assert spec.encoder is not None
    size, most = spec.encoder.embed, spec.encoder.one_length
    expected = f"[batch, {most or 'tokens'}, {size}]"
    if kind_of(states) is None:
        raise ArgumentError(
            f"encoder_outputs is {a_type(states)}; expected the encoder's last hidden "
            f"state {expected}: an array, a tuple that begins with it, or HF's BaseModelOutput."
        )
    array = read_array(states, "encoder_outputs", "rows differ in length; pad them.")
    fits = array.ndim == 3 and array.shape[2] == size and array.size
    if not fits or (most and array.shape[1] != most):
        raise ArgumentError(
            f"encoder_outputs has a last hidden state of shape {array.shape}; expected {expected}."
        )
    if array.dtype != ml_dtypes.bfloat16 and array.dtype.kind != "f":
        raise ArgumentError(f"encoder_outputs has dtype {array.dtype}; expected floats.")
    return array.astype(np.float32)


def make_encoded(spec: ModelSpec, states: Any, given: Mapping[str, Any]) -> Prompts:
    """As `make_source`, of what the encoder gave: rows are float32 [S, E], without padding."""
    assert spec.encoder is not None
    array = check_states(spec, states)
    _refuse_beside(given, ("input_ids", "inputs", "inputs_embeds", *_OTHERS))
    visible = _shown_states(spec, given["attention_mask"], array)
    rows = list(array)
    if visible is not None:
        rows = [row[keep] for row, keep in zip(array, visible, strict=True)]
    kind = kind_of(states) or "list"
    like = states if kind == "torch" else None
    return Prompts(tuple(rows), np.empty((len(rows), 0), np.int64), kind, like)


def _shown_states(spec: ModelSpec, mask: Any, states: np.ndarray) -> np.ndarray | None:
    """The places of states [B, S, E] that layers see, bool [B, S]; None for all, as in HF.

    Decoders of sounds and images of one length see all of them in any case. Of other sounds the
    mask is that of the frames.
    """
    assert spec.encoder is not None
    shape = states.shape[0], states.shape[1]
    if spec.encoder.sounds is not None and spec.encoder.marks:
        return None if mask is None else visible_of_frames(spec.encoder.sounds, mask, shape)
    visible = None if spec.encoder.one_length else check_mask(mask, shape)
    if visible is not None and not visible.any(1).all():
        row = int(np.argmin(visible.any(1)))
        raise ArgumentError(f"attention_mask hides every token of row {row}.")
    return None if visible is None or visible.all() else visible


def _refuse_beside(given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    asked = [name for name in names if given.get(name) is not None]
    if asked:
        raise ArgumentError(
            f"{asked[0]} and encoder_outputs were given; the encoder has read what it gave. Leave "
            f"{asked[0]} out."
        )


def _states_source(spec: ModelSpec, given: Mapping[str, Any]) -> Tokens:
    """A source that the encoder has read before, for one forward pass.

    Its ids are given where the decoder reads them, or where they tell what is scored.
    """
    assert spec.encoder is not None
    states = check_states(spec, given["encoder_outputs"])
    shape = states.shape[0], states.shape[1]
    reads_ids = "source" in spec.shifted or (spec.head is not None and spec.head.pooling == "eos")
    others = () if reads_ids else ("input_ids",)
    _refuse_beside(given, (*others, "inputs_embeds", "token_type_ids", *_OTHERS))
    ids = given["input_ids"]
    if ids is not None:
        ids = check_ids(ids, "input_ids", spec.encoder.vocab)
        if ids.shape != shape:
            raise ArgumentError(
                f"input_ids has shape {ids.shape} and encoder_outputs {states.shape}; expected the "
                f"ids {shape} that the encoder has read."
            )
    at = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy()
    visible = _shown_states(spec, given["attention_mask"], states)
    return Tokens(ids, at, visible, states=states)


def check_features(
    spec: ModelSpec, features: Any, first: Any, any_length: bool = False
) -> np.ndarray:
    """Log-mel spectrograms as float32 [B, frames, mel], of HF's [B, mel, frames].

    HF's first argument may be them too. Unless of `any_length` they have those frames that the
    encoder reads at once. Raises ArgumentError for what does not fit.
    """
    assert spec.encoder is not None and spec.encoder.sounds is not None
    bins = spec.encoder.sounds.frame_width
    if features is None:
        features = first
    elif first is not None:
        raise ArgumentError(
            f"input_ids: the encoder of {spec.architecture} reads input_features alone; the "
            "decoder's ids are decoder_input_ids."
        )
    expected: tuple[Any, Any] = bins, "frames" if any_length else spec.encoder.frames
    if features is None or kind_of(features) is None:
        raise ArgumentError(
            f"input_features is {'missing' if features is None else type(features).__name__}; "
            f"expected an array [batch, {expected[0]}, {expected[1]}], as HF's processor gives it."
        )
    array = read_array(features, "input_features", "rows differ in shape.")
    array = array[None] if array.ndim == 2 else array
    fits = array.ndim == 3 and array.size and array.shape[1] == expected[0]
    fits = fits and (any_length or array.shape[2] == expected[1])
    if not fits or (array.dtype != ml_dtypes.bfloat16 and array.dtype.kind != "f"):
        raise ArgumentError(
            f"input_features has shape {array.shape} and dtype {array.dtype}; expected floats "
            f"[batch, {expected[0]}, {expected[1]}], as HF's processor gives them."
        )
    return np.ascontiguousarray(array.astype(np.float32).swapaxes(1, 2))


def make_source(spec: ModelSpec, ids: Any, mask: Any, pad: int | None) -> Prompts:
    """The encoder's tokens for each sequence, without padding, which the mask alone tells.

    As in HF, without a mask every token counts, but for the id that the encoder hides. Raises
    ArgumentError as `make_prompts`, and LengthError for more tokens than it has positions.
    """
    assert spec.encoder is not None
    hides = spec.encoder.hidden
    if ids is None:
        raise ArgumentError("input_ids is missing; generate needs what the encoder reads.")
    if kind_of(ids) not in (None, "list") and mask is None:
        mask = check_ids(ids, "input_ids", spec.encoder.vocab) != (-1 if hides is None else hides)
    source = make_prompts(ids, mask, spec.encoder.vocab, 0 if pad is None else pad, ())
    most = spec.encoder.positions.rows
    longest = max(source.lengths)
    if most and longest > most:
        raise LengthError(
            f"input_ids has {longest} tokens, but the encoder has {most} positions. Shorten it."
        )
    return source


def counts_hidden(spec: ModelSpec, ids: Any, mask: Any) -> bool:
    """True where positions count tokens before others that the mask hides, as HF's count ids.

    Of a source without them they would be others.
    """
    assert spec.encoder is not None
    pad = spec.encoder.pad_id
    if spec.encoder.positions.counted != "rows" or mask is None or kind_of(ids) is None:
        return False
    tokens = [check_ids(row, "input_ids", spec.encoder.vocab)[0] for row in ids]
    shown = [np.asarray(to_numpy(row)).reshape(-1) != 0 for row in mask]
    return any(
        ((~seen & (row != pad)).cumsum() * seen).any()
        for row, seen in zip(tokens, shown, strict=True)
    )


class SourceReader(Protocol):
    """A kind of input of an encoder: `given` are HF's arguments by name."""

    reads_ids: bool

    def whole(self, spec: ModelSpec, given: Mapping[str, Any]) -> Tokens:
        """The tokens of one pass of the encoder. Raises as `make_pair_inputs`."""
        ...

    def rows(self, spec: ModelSpec, given: Mapping[str, Any], pad: int | None) -> Prompts:
        """The input of each sequence of a call of generate, without padding that is told."""
        ...


class _Ids:
    reads_ids = True

    def whole(self, spec: ModelSpec, given: Mapping[str, Any]) -> Tokens:
        assert spec.encoder is not None
        text = Text(given["input_ids"], given["attention_mask"], types=given["token_type_ids"])
        text = text._replace(embeds=given["inputs_embeds"])
        return make_forward_inputs(spec.encoder, text, Wanted(), may_pack=False).tokens

    def rows(self, spec: ModelSpec, given: Mapping[str, Any], pad: int | None) -> Prompts:
        return make_source(spec, given["input_ids"], given["attention_mask"], pad)


class _Frames:
    reads_ids = False

    def whole(self, spec: ModelSpec, given: Mapping[str, Any]) -> Tokens:
        assert spec.encoder is not None
        frames = check_features(spec, given["input_features"], given["input_ids"])
        return Tokens(None, _counted(len(frames), spec.encoder.positions.rows), embeds=frames)

    def rows(self, spec: ModelSpec, given: Mapping[str, Any], pad: int | None) -> Prompts:
        features, first = given["input_features"], given["input_ids"]
        return _rows(check_features(spec, features, first), first if features is None else features)


class _Sounds:
    reads_ids = False

    def _read(self, spec: ModelSpec, given: Mapping[str, Any]) -> Any:
        assert spec.encoder is not None and spec.encoder.sounds is not None
        heard = given[spec.encoder.sounds.name]
        first = given["input_ids"] if heard is None else heard
        return *check_sounds(spec, heard, given["input_ids"], given["attention_mask"]), first

    def whole(self, spec: ModelSpec, given: Mapping[str, Any]) -> Tokens:
        tokens, real, _ = self._read(spec, given)
        return Tokens(None, _counted(*tokens.shape[:2]), real, embeds=tokens)

    def rows(self, spec: ModelSpec, given: Mapping[str, Any], pad: int | None) -> Prompts:
        tokens, _, like = self._read(spec, given)
        return _rows(tokens, like)


class _Images:
    reads_ids = False

    def whole(self, spec: ModelSpec, given: Mapping[str, Any]) -> Tokens:
        assert spec.encoder is not None
        return make_image_inputs(spec.encoder, given, Wanted(), is_part=True).tokens

    def rows(self, spec: ModelSpec, given: Mapping[str, Any], pad: int | None) -> Prompts:
        assert spec.encoder is not None
        names = "input_ids", "pixel_values", "attention_mask"
        own = {name: given[name] for name in names}
        images = make_image_inputs(spec.encoder, own, Wanted(), is_part=True).tokens
        assert images.embeds is not None
        pixels = given["pixel_values"]
        return _rows(images.embeds, given["input_ids"] if pixels is None else pixels)


class _States:
    reads_ids = False

    def whole(self, spec: ModelSpec, given: Mapping[str, Any]) -> Tokens:
        return _states_source(spec, given)

    def rows(self, spec: ModelSpec, given: Mapping[str, Any], pad: int | None) -> Prompts:
        return make_encoded(spec, given["encoder_outputs"], given)


def source_reader(spec: ModelSpec, given: Mapping[str, Any]) -> SourceReader:
    """The reader of a model's kind of source; states that are given take its place."""
    assert spec.encoder is not None
    if given.get("encoder_outputs") is not None:
        return _States()
    if spec.encoder.sounds is not None:
        return _Sounds() if spec.encoder.marks else _Frames()
    return _Images() if spec.encoder.patches is not None else _Ids()


def _counted(rows: int, tokens: int) -> np.ndarray:
    """Positions int32 [rows, tokens] from 0 on."""
    return np.broadcast_to(np.arange(tokens, dtype=np.int32), (rows, tokens)).copy()


def _rows(arrays: np.ndarray, given: Any) -> Prompts:
    """Rows of floats as prompts, for answers in the framework of what was given."""
    kind = kind_of(given) or "list"
    like = given if kind == "torch" else None
    return Prompts(tuple(arrays), np.empty((len(arrays), 0), np.int64), kind, like)
