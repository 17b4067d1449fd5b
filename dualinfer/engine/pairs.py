"""The inputs of an encoder-decoder: pairs of what its encoder reads and its decoder begins with."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import kind_of, to_numpy
from ..backends.base import NO_LABEL, ForwardInputs, Tokens
from ..errors import ArgumentError, shown
from ..model.spec import ModelSpec
from .checks import check_ids
from .inputs import Text, Wanted, make_forward_inputs, text_alone
from .prompts import Prompts, make_prompts
from .source import HEARD, NAMES, source_reader


def refuse_names(spec: ModelSpec, given: Mapping[str, Any]) -> None:
    """Raise ArgumentError where a model is given what only one with an encoder, or ears, reads."""
    asked = [name for name in NAMES if given.get(name) is not None]
    if asked and not spec.crosses and asked[0] in HEARD:
        raise ArgumentError(f"{asked[0]}: {spec.architecture} reads input_ids{text_alone(spec)}")
    if asked and not spec.crosses:
        raise ArgumentError(
            f"{asked[0]}: {spec.architecture} has no encoder, so that input_ids are all it reads. "
            "Leave it out."
        )
    for name in HEARD:
        if given.get(name) is None or not spec.crosses or spec.encoder is None:
            continue
        own = spec.encoder.sounds.name if spec.encoder.sounds else name
        if own != name:
            raise ArgumentError(
                f"{name}: the encoder of {spec.architecture} reads {own}. Pass these."
            )
        if not spec.encoder.hears:
            own, what = ("pixel_values", "images") if spec.sees else ("input_ids", "ids")
            raise ArgumentError(
                f"{name}: the encoder of {spec.architecture} reads {what}. Pass {own}."
            )


def make_pair_inputs(
    spec: ModelSpec,
    given: Mapping[str, Any],
    wanted: Wanted,
    *,
    pad: int | None,
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
    source = source_reader(spec, given).whole(spec, given)
    if source.token_types is not None and source.token_types.any():
        raise ArgumentError(
            f"token_type_ids: the encoder of {spec.architecture} reads those of type 0 alone here. "
            "Leave them out."
        )
    if source.mask is not None and not source.mask.any(1).all():
        raise ArgumentError(
            f"attention_mask hides every token of row {int(np.argmin(source.mask.any(1)))}."
        )
    ids, labels = given["decoder_input_ids"], wanted.labels
    if ids is None:
        to_shift = labels if spec.has_logits and "labels" in spec.shifted else None
        if to_shift is None and "source" in spec.shifted:
            to_shift = source.ids
        if to_shift is None:
            way = ", or labels, of which they are made" if "labels" in spec.shifted else ""
            raise ArgumentError(
                f"decoder_input_ids is missing: pass the ids that the decoder reads{way}."
            )
        ids = shifted(spec, to_shift, pad)
    text = Text(ids, given["decoder_attention_mask"])
    how: dict[str, Any] = {"may_pack": False, "name": "decoder_input_ids"}
    inputs = make_forward_inputs(spec, text, wanted, **how)
    tokens = inputs.tokens._replace(source=source._replace(token_types=None))
    if tokens.shape[0] != source.shape[0]:
        raise ArgumentError(
            f"decoder_input_ids has {tokens.shape[0]} rows and input_ids {source.shape[0]}; they "
            "are pairs."
        )
    if spec.head is not None and spec.head.pooling == "eos":
        tokens = tokens._replace(weights=_at_last_eos(spec, source, tokens.shape[1]))
    return replace(inputs, tokens=tokens)


def _at_last_eos(spec: ModelSpec, source: Tokens, tokens: int) -> np.ndarray:
    """float32 [B, tokens]: 1 where the encoder reads its last id of an end."""
    assert spec.head is not None
    if source.ids is None:
        raise ArgumentError(
            f"{spec.architecture} scores the place of the last id {spec.end_id} (eos_token_id) "
            "in input_ids, and none were given. Pass input_ids."
        )
    ends = source.ids == spec.end_id
    counts = ends.sum(1)
    if not counts[0] or (counts != counts[0]).any():
        raise ArgumentError(
            f"{spec.architecture} scores the place of the last id {spec.end_id} (eos_token_id), "
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
    if first.min() >= 0 and (begins != first).all() and not spec.transcribes:
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
