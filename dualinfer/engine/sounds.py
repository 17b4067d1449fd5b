"""What encoders of sounds of any length read: of each token all frames that convolutions see."""

from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import kind_of
from ..errors import ArgumentError, LengthError, a_type
from ..model.spec import ModelSpec, Sounds
from .checks import check_mask, read_array


def check_sounds(
    spec: ModelSpec, features: Any, first: Any, mask: Any
) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens float32 [B, S, W] of HF's frames [B, F, bins], and which are real, bool [B, S].

    The latter is None where all are. HF's first argument may be the frames too, and `mask` [B, F]
    tells how many of a row are no padding, which lies behind them. What a token reads of padding
    HF's reads as well. Raises ArgumentError for what does not fit, and LengthError for more tokens
    than the encoder has positions.
    """
    assert spec.encoder is not None and spec.encoder.sounds is not None
    sounds = spec.encoder.sounds
    if features is not None and first is not None:
        raise ArgumentError(
            f"input_ids: the encoder of {spec.architecture} reads input_features alone; the "
            "decoder's ids are decoder_input_ids."
        )
    features = first if features is None else features
    expected = f"[batch, frames, {sounds.bins}]"
    if features is None or kind_of(features) is None:
        what = "missing" if features is None else a_type(features)
        raise ArgumentError(
            f"input_features is {what}; expected an array {expected}, as HF's processor gives it."
        )
    array = read_array(features, "input_features", "rows differ in length; pad them.")
    array = array[None] if array.ndim == 2 else array
    fits = array.ndim == 3 and array.shape[2] == sounds.bins and array.size
    if not fits or (array.dtype != ml_dtypes.bfloat16 and array.dtype.kind != "f"):
        raise ArgumentError(
            f"input_features has shape {array.shape} and dtype {array.dtype}; expected floats "
            f"{expected}."
        )
    tokens = _cut(sounds, array.astype(np.float32))
    most = spec.encoder.learned_positions
    if tokens.shape[1] > most:
        raise LengthError(
            f"input_features has {array.shape[1]} frames, which make {tokens.shape[1]} tokens, but "
            f"the encoder has {most} positions. Shorten it."
        )
    shape = tokens.shape[0], tokens.shape[1]
    return tokens, None if mask is None else visible_of_frames(sounds, mask, shape)


def visible_of_frames(sounds: Sounds, mask: Any, shape: tuple[int, int]) -> np.ndarray | None:
    """Which tokens [B, S] are real, bool of `shape`, by the mask of frames [B, F]; None for all."""
    array = read_array(mask, "attention_mask", "rows differ in length; pad them.")
    frames = array.shape[1] if array.ndim == 2 else 0
    if sounds.tokens(frames) != shape[1]:
        raise ArgumentError(
            f"attention_mask has shape {array.shape}; expected that of the frames [batch, frames], "
            f"which make {shape[1]} tokens."
        )
    visible = check_mask(mask, (shape[0], frames))
    if visible is None or visible.all():
        return None
    counts = sounds.tokens(visible.sum(1))
    if not counts.all():
        raise ArgumentError(f"attention_mask hides every token of row {int(np.argmin(counts))}.")
    return np.arange(shape[1]) < counts[:, None]


def _cut(sounds: Sounds, frames: np.ndarray) -> np.ndarray:
    """Tokens [B, S, W] of frames [B, F, bins], see `Sounds`."""
    near, far = sounds.taps
    count = frames.shape[1]
    between = 2 * np.arange(sounds.tokens(count))[:, None] - far // 2 + np.arange(far)
    at = 2 * between[..., None] - near // 2 + np.arange(near)
    there = (at >= 0) & (at < count)
    cut = frames[:, at.clip(0, count - 1)] * there[..., None]
    cut = cut.swapaxes(-1, -2).reshape(*cut.shape[:3], -1)
    real = (between >= 0) & (between < sounds.halved(count))
    marks = np.broadcast_to(real[None, ..., None], (*cut.shape[:3], 1))
    cut = np.concatenate((cut, marks), -1, dtype=np.float32)
    return cut.reshape(*cut.shape[:2], sounds.width)
