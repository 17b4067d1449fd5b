"""Inputs of encoders of sounds of any length: for each token all frames that convolutions see."""

from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import kind_of
from ..errors import ArgumentError, LengthError, a_type
from ..model.spec import ModelSpec, Sounds
from .checks import check_mask, read_array


def check_sounds(
    spec: ModelSpec, given: Any, first: Any, mask: Any
) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens float32 [B, S, W] of HF's frames [B, F, bins], or samples [B, F], and their mask.

    That is bool [B, S], None where all are real. HF's first argument may be the sounds too; `mask`
    [B, F] tells how many of a row are no padding, which lies behind them. What a token reads of
    padding HF's reads as well. Raises ArgumentError for what does not fit, and LengthError for more
    tokens than the encoder has positions.
    """
    assert spec.encoder is not None and spec.encoder.sounds is not None
    sounds = spec.encoder.sounds
    name, bins = sounds.name, sounds.frame_width
    if given is not None and first is not None:
        raise ArgumentError(
            f"input_ids: the encoder of {spec.architecture} reads {name} alone; the decoder's ids "
            "are decoder_input_ids."
        )
    given = first if given is None else given
    expected = f"[batch, frames, {bins}]" if bins else "[batch, samples]"
    if given is None or kind_of(given) is None:
        what = "missing" if given is None else a_type(given)
        raise ArgumentError(
            f"{name} is {what}; expected an array {expected}, as HF's processor gives it."
        )
    array = read_array(given, name, "rows differ in length; pad them.")
    array = array[None] if array.ndim == 1 + (bins > 0) else array
    fits = array.ndim == 2 + (bins > 0) and array.shape[2:] == (bins,) * (bins > 0) and array.size
    if not fits or (array.dtype != ml_dtypes.bfloat16 and array.dtype.kind != "f"):
        raise ArgumentError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; expected floats {expected}."
        )
    count = count_tokens(spec, array.shape)
    shown = None if mask is None else visible_of_frames(sounds, mask, (len(array), count))
    return as_tokens(sounds, array.astype(np.float32), count, shown, np), shown


def count_tokens(spec: ModelSpec, shape: tuple[int, ...]) -> int:
    """Tokens of sounds of a `shape` [B, F, ...].

    Raises ArgumentError for none, and LengthError for more than the encoder has positions.
    """
    assert spec.encoder is not None and spec.encoder.sounds is not None
    name, count = spec.encoder.sounds.name, spec.encoder.sounds.tokens(shape[1])
    if not count:
        raise ArgumentError(
            f"{name} has shape {shape}, too short for a token of {spec.architecture}."
        )
    most = spec.encoder.positions.rows
    if most and count > most:
        raise LengthError(
            f"{name} has {shape[1]} frames, which make {count} tokens, but the encoder has "
            f"{most} positions. Shorten it."
        )
    return count


def as_tokens(sounds: Sounds, array: Any, count: int, visible: Any, xp: Any) -> Any:
    """Sounds float32 [B, F, ...] of the module `xp` as tokens [B, count, W], see `spec.Sounds`.

    bool `visible` [B, count] are those that layers see, None for all.
    """
    cut = sounds.cut(array, count, xp)
    marks = xp.ones((len(array), count, 1), np.float32)
    if visible is not None:
        marks = visible[..., None].astype(np.float32)
    return xp.concatenate((cut.reshape(*cut.shape[:2], -1), marks), -1)


def visible_of_frames(sounds: Sounds, mask: Any, shape: tuple[int, int]) -> np.ndarray | None:
    """The real tokens [B, S], bool of `shape`, by the mask of frames [B, F]; None for all."""
    array = read_array(mask, "attention_mask", "rows differ in length; pad them.")
    frames = array.shape[1] if array.ndim == 2 else 0
    if sounds.tokens(frames) != shape[1]:
        raise ArgumentError(
            f"attention_mask has shape {array.shape}; expected that of {sounds.name} [batch, "
            f"length], which makes {shape[1]} tokens."
        )
    known = check_mask(mask, (shape[0], frames))
    if known is None or known.all():
        return None
    visible = sounds.visible(known)
    if not visible[:, 0].all() or (visible[:, 1:] > visible[:, :-1]).any():
        row = int(np.argmax(~visible[:, 0] | (visible[:, 1:] > visible[:, :-1]).any(1)))
        raise ArgumentError(
            f"attention_mask hides tokens of row {row} before others, or all of them; expected "
            "padding behind a sound alone."
        )
    return None if visible.all() else visible
