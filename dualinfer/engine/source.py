"""The inputs of an encoder-decoder: its encoder's sequences, and how its decoder's begin."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import kind_of, to_numpy
from ..backends.base import NO_LABEL, ForwardInputs
from ..errors import ArgumentError, LengthError, a_type, shown
from ..model.spec import ModelSpec
from .checks import check_ids, check_mask, read_array
from .images import make_image_inputs
from .inputs import make_forward_inputs, text_alone
from .prompts import Prompts, make_prompts
from .sounds import check_sounds, visible_of_frames

# Of these models alone.
NAMES = ("decoder_input_ids", "decoder_attention_mask", "input_features", "encoder_outputs")
NAMES += ("input_values",)
_HEARD = ("input_features", "input_values")
# How an encoder's images are read: no scores come of them.
_ALONE: dict[str, Any] = {
    **{"output_hidden_states": False, "logits_to_keep": None, "loss_count": None},
    "is_part": True,
}
_OTHERS = (*_HEARD, "pixel_values")  # what encoders read in the place of ids


def refuse_names(spec: ModelSpec, given: Mapping[str, Any]) -> None:
    """Raise ArgumentError where a model is given what only one with an encoder, or ears, reads."""
    asked = [name for name in NAMES if given.get(name) is not None]
    if asked and not spec.crosses and asked[0] in _HEARD:
        raise ArgumentError(f"{asked[0]}: {spec.architecture} reads input_ids{text_alone(spec)}")
    if asked and not spec.crosses:
        raise ArgumentError(
            f"{asked[0]}: {spec.architecture} has no encoder, so that input_ids are all it reads. "
            "Leave it out."
        )
    for name in _HEARD:
        if given.get(name) is None or not spec.crosses or spec.encoder is None:
            continue
        own = spec.encoder.sounds.name if spec.encoder.sounds else _HEARD[0]
        if spec.encoder.hears and own != name:
            raise ArgumentError(
                f"{name}: the encoder of {spec.architecture} reads {own}. Pass these."
            )
        if not spec.encoder.hears:
            own, what = ("pixel_values", "images") if spec.sees else ("input_ids", "ids")
            raise ArgumentError(
                f"{name}: the encoder of {spec.architecture} reads {what}. Pass {own}."
            )


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
    if spec.encoder.sounds is not None:
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


def _states_source(spec: ModelSpec, given: Mapping[str, Any]) -> ForwardInputs:
    """A source that the encoder has read before, for one forward pass.

    Its ids are given where the decoder reads them, or where they tell what is scored.
    """
    assert spec.encoder is not None
    states = check_states(spec, given["encoder_outputs"])
    shape = states.shape[0], states.shape[1]
    reads_ids = spec.repeats or (spec.head is not None and spec.head.pooling == "eos")
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
    return ForwardInputs(ids, at, visible, states=states)


def make_pair_inputs(
    spec: ModelSpec,
    given: Mapping[str, Any],
    *,
    pad: int | None,
    loss_count: Any,
    logits_to_keep: Any,
    output_hidden_states: bool,
    ends: tuple[Any, Any] = (None, None),
    problem: Any = None,
) -> ForwardInputs:
    """One forward pass of an encoder-decoder, of HF's arguments by name.

    Without `decoder_input_ids` they are the labels, if these are ids, or what the encoder reads
    where the model `repeats` it, shifted as in HF, `pad` in the place of -100.
    Raises ArgumentError for what does not fit the model, and LengthError for more tokens than it
    has positions.
    """
    assert spec.encoder is not None
    if given.get("position_ids") is not None:
        raise ArgumentError(
            f"position_ids: {spec.architecture} counts its tokens itself, as in HF. Leave them out."
        )
    what = (given["input_ids"], given["attention_mask"], None, given["token_type_ids"])
    how: dict[str, Any] = {"output_hidden_states": output_hidden_states, "may_pack": False}
    if given.get("encoder_outputs") is not None:
        source = _states_source(spec, given)
    elif spec.encoder.mel:
        frames = check_features(spec, given["input_features"], given["input_ids"])
        places = np.arange(spec.encoder.learned_positions, dtype=np.int32)
        at = np.broadcast_to(places, (len(frames), len(places))).copy()
        source = ForwardInputs(None, at, embeds=frames)
    elif spec.encoder.sounds is not None:
        heard = given[spec.encoder.sounds.name]
        what = heard, given["input_ids"], given["attention_mask"]
        tokens, real = check_sounds(spec, *what)
        places = np.arange(tokens.shape[1], dtype=np.int32)
        at = np.broadcast_to(places, tokens.shape[:2]).copy()
        source = ForwardInputs(None, at, real, embeds=tokens)
    elif spec.encoder.patches is not None:
        source = make_image_inputs(spec.encoder, {**given, "labels": None}, **_ALONE)
    else:
        source = make_forward_inputs(spec.encoder, *what, given["inputs_embeds"], **how)
    if source.token_types is not None and source.token_types.any():
        raise ArgumentError(
            f"token_type_ids: the encoder of {spec.architecture} reads those of type 0 alone here. "
            "Leave them out."
        )
    if source.mask is not None and not source.mask.any(1).all():
        raise ArgumentError(
            f"attention_mask hides every token of row {int(np.argmin(source.mask.any(1)))}."
        )
    ids, labels = given["decoder_input_ids"], given["labels"]
    if ids is None:
        to_shift = labels if spec.has_logits and spec.shifts else None
        if to_shift is None and spec.repeats:
            to_shift = source.ids
        if to_shift is None:
            way = ", or labels, of which they are made" if spec.shifts else ""
            raise ArgumentError(
                f"decoder_input_ids is missing: pass the ids that the decoder reads{way}."
            )
        ids = shifted(spec, to_shift, pad)
    mask = given["decoder_attention_mask"]
    how |= {"logits_to_keep": logits_to_keep, "loss_count": loss_count}
    how |= {"ends": ends, "problem": problem}
    name = "decoder_input_ids"
    inputs = make_forward_inputs(spec, ids, mask, None, None, None, labels, name=name, **how)
    if inputs.shape[0] != source.shape[0]:
        raise ArgumentError(
            f"decoder_input_ids has {inputs.shape[0]} rows and input_ids {source.shape[0]}; they "
            "are pairs."
        )
    if spec.head is not None and spec.head.pooling == "eos":
        inputs = replace(inputs, weights=_at_last_eos(spec, source, inputs.shape[1]))
    return replace(inputs, source=source)


def _at_last_eos(spec: ModelSpec, source: ForwardInputs, tokens: int) -> np.ndarray:
    """float32 [B, tokens]: 1 where the encoder reads its last id of an end."""
    assert spec.head is not None
    if source.ids is None:
        raise ArgumentError(
            f"{spec.architecture} scores the place of the last id {spec.head.eos} (eos_token_id) "
            "in input_ids, and none were given. Pass input_ids."
        )
    ends = source.ids == spec.head.eos
    counts = ends.sum(1)
    if not counts[0] or (counts != counts[0]).any():
        raise ArgumentError(
            f"{spec.architecture} scores the place of the last id {spec.head.eos} (eos_token_id), "
            f"of which the rows of input_ids have {shown(counts.tolist())}. As in HF, expected as "
            "many in each row, and at least one."
        )
    at = last_places(ends)
    if (at >= tokens).any():
        raise ArgumentError(
            f"decoder_input_ids has {tokens} tokens, but input_ids end at token {int(at.max())}, "
            f"where {spec.architecture} reads its score. Leave decoder_input_ids out."
        )
    return (np.arange(tokens) == at[:, None]).astype(np.float32)


def check_features(
    spec: ModelSpec, features: Any, first: Any, any_length: bool = False
) -> np.ndarray:
    """Log-mel spectrograms as float32 [B, frames, mel], of HF's [B, mel, frames].

    HF's first argument may be them too. Unless of `any_length` they have those frames that the
    encoder reads at once. Raises ArgumentError for what does not fit.
    """
    assert spec.encoder is not None
    if features is None:
        features = first
    elif first is not None:
        raise ArgumentError(
            f"input_ids: the encoder of {spec.architecture} reads input_features alone; the "
            "decoder's ids are decoder_input_ids."
        )
    expected: tuple[Any, Any] = spec.encoder.mel, "frames" if any_length else spec.encoder.frames
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


def shifted(spec: ModelSpec, labels: Any, pad: int | None) -> np.ndarray:
    """Decoder ids of labels [B, T], as HF makes them: one further, behind the id of a start.

    Without such an id the last one that is no `pad` comes first (mBART's language).
    """
    array = np.asarray(to_numpy(labels) if kind_of(labels) else labels)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        raise ArgumentError(f"labels has shape {array.shape}; expected integers [batch, tokens].")
    return behind_start(spec, array, pad, np).astype(np.int64)


def behind_start(spec: ModelSpec, ids: Any, pad: int | None, xp: Any) -> Any:
    """As `shifted`, of ids [B, T] of the module `xp`."""
    fill = pad if pad is not None else 0
    ids = xp.where(ids == NO_LABEL, fill, ids)
    if spec.start is None:
        last = (ids != fill).sum(1) - 1
        first = ids[np.arange(len(ids)), last]
    else:
        first = np.full(len(ids), spec.start, ids.dtype)
    return xp.concatenate((first[:, None], ids[:, :-1]), 1)


def last_places(marked: Any) -> Any:
    """The last place that is marked in each row of bool [B, T]: int [B]."""
    return (marked * np.arange(1, marked.shape[1] + 1)).argmax(1)


def make_frames(spec: ModelSpec, features: Any, first: Any) -> Prompts:
    """As `make_source`, of spectrograms: rows are float32 [frames, mel]."""
    given = first if features is None else features
    frames = check_features(spec, features, first)
    kind = kind_of(given) or "list"
    like = given if kind == "torch" else None
    return Prompts(tuple(frames), np.empty((len(frames), 0), np.int64), kind, like)


def make_sounds(spec: ModelSpec, features: Any, first: Any, mask: Any) -> Prompts:
    """As `make_source`, of sounds of any length: rows are float32 [S, W], padding too."""
    given = first if features is None else features
    tokens, _ = check_sounds(spec, features, first, mask)
    kind = kind_of(given) or "list"
    like = given if kind == "torch" else None
    return Prompts(tuple(tokens), np.empty((len(tokens), 0), np.int64), kind, like)


def make_images(spec: ModelSpec, pixels: Any, first: Any, mask: Any) -> Prompts:
    """As `make_source`, of images: rows are float32 [patches, pixels], learned tokens' too."""
    assert spec.encoder is not None
    own = {"input_ids": first, "pixel_values": pixels, "attention_mask": mask}
    images = make_image_inputs(spec.encoder, own, **_ALONE)
    given = first if pixels is None else pixels
    kind = kind_of(given) or "list"
    like = given if kind == "torch" else None
    assert images.embeds is not None
    rows = tuple(images.embeds)
    return Prompts(rows, np.empty((len(rows), 0), np.int64), kind, like)


def make_source(spec: ModelSpec, ids: Any, mask: Any, pad: int | None) -> Prompts:
    """The encoder's tokens for each sequence, without padding, which the mask alone tells.

    As in HF, without a mask every token counts, but for the id that the encoder hides. Raises
    ArgumentError as `make_prompts`, and LengthError for more tokens than it has positions.
    """
    assert spec.encoder is not None
    hides = spec.encoder.hides
    if ids is None:
        raise ArgumentError("input_ids is missing; generate needs what the encoder reads.")
    if kind_of(ids) not in (None, "list") and mask is None:
        mask = check_ids(ids, "input_ids", spec.encoder.vocab) != (-1 if hides is None else hides)
    source = make_prompts(ids, mask, spec.encoder.vocab, 0 if pad is None else pad, ())
    most = spec.encoder.learned_positions
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
    pad = spec.encoder.uncounted
    if pad is None or mask is None or kind_of(ids) is None:
        return False
    tokens = [check_ids(row, "input_ids", spec.encoder.vocab)[0] for row in ids]
    shown = [np.asarray(to_numpy(row)).reshape(-1) != 0 for row in mask]
    return any(
        ((~seen & (row != pad)).cumsum() * seen).any()
        for row, seen in zip(tokens, shown, strict=True)
    )


def make_decoder_prompts(
    spec: ModelSpec, source: Prompts, ids: Any, mask: Any, start: Any, pad: int | None
) -> Prompts:
    """The decoder's first tokens for each sequence of `source`: `ids`, else the id `start`.

    As in HF, `start` is put before ids of which none begins with it, but for Whisper's. The result
    goes back to where `source` is from.
    """
    count = len(source.rows)
    first = _starts(spec, start, count)
    if ids is None:
        ids = first[:, None]
        if ids.min() < 0:
            raise ArgumentError(
                "Neither the model's generation_config nor its config names a "
                "decoder_start_token_id. Pass decoder_input_ids or decoder_start_token_id."
            )
    if kind_of(ids) not in (None, "list") and mask is None:  # a start often is the pad id
        mask = np.ones(check_ids(ids, NAMES[0], spec.vocab).shape, bool)
    prompts = make_prompts(ids, mask, spec.vocab, pad, (), name=NAMES[0])
    if len(prompts.rows) != count:
        raise ArgumentError(
            f"decoder_input_ids has {len(prompts.rows)} rows and input_ids {count}; they are pairs."
        )
    begins = np.array([row[0] for row in prompts.rows])
    if first.min() >= 0 and (begins != first).all() and not (spec.encoder and spec.encoder.mel):
        rows = tuple(
            np.append(f, r).astype(np.int32) for f, r in zip(first, prompts.rows, strict=True)
        )
        widened = np.full((count, prompts.block.shape[1] + 1), 0 if pad is None else pad, np.int64)
        for i, row in enumerate(rows):
            widened[i, widened.shape[1] - len(row) :] = row
        prompts = replace(prompts, rows=rows, block=widened)
    return replace(prompts, kind=source.kind, like=source.like)


def _starts(spec: ModelSpec, start: Any, count: int) -> np.ndarray:
    """The id that each of `count` sequences begins with, -1 where none is named."""
    if start is None:
        return np.full(count, -1 if spec.start is None else spec.start)
    array = np.asarray(to_numpy(start) if kind_of(start) else start)
    fits = array.dtype.kind in "iu" and array.shape in ((), (count,))
    if not fits or (array < 0).any() or (array >= spec.vocab).any():
        raise ArgumentError(
            f"decoder_start_token_id={shown(start)}; expected an id of the vocabulary (0 to "
            f"{spec.vocab - 1}), or one for each of {count} sequences."
        )
    return np.broadcast_to(array, (count,))
