"""A window's tokens cut where its timestamps say, and segments joined to a transcript.

Meaning: HF's `_retrieve_segment` and `_pad_to_max_length` (models/whisper/generation_whisper.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .settings import Settings

STRIDE = 2  # frames of a position, and of a timestamp


@dataclass
class Segment:
    """A piece of a transcript: seconds, its tokens, and their places in `result`'s sequence.

    `result` is what its window gave, and `offset` where that begins, in seconds. A prompt that
    stands in front of the first segment has none.
    """

    tokens: np.ndarray
    start: float = 0.0
    end: float = 0.0
    places: tuple[int, int] = (0, 0)
    result: Any = None
    offset: float = 0.0


def cut(
    settings: Settings, tokens: np.ndarray, frames: int, offset: float, width: int, result: Any
) -> tuple[list[Segment], int]:
    """The segments of a window's `tokens`, and how many frames of its `frames` they end.

    `offset` are the seconds at which the window begins, `width` the tokens in front of these in the
    sequence of `result`.
    """
    begin, precision = settings.first_stamp, settings.time_precision
    is_stamp = tokens >= begin
    alone = is_stamp[-2:].tolist() == [False, True]  # no speech follows
    ends = [i + 1 for i in range(len(tokens) - 1) if is_stamp[i] and is_stamp[i + 1]]
    if not ends:
        at = _positions(settings, frames)
        if is_stamp.any() and tokens[is_stamp][-1] != begin:
            at = int(tokens[is_stamp][-1]) - begin
        places = width, width + len(tokens)
        return [Segment(tokens, offset, offset + at * precision, places, result, offset)], frames
    if alone:
        ends.append(len(tokens))
    else:
        ends[-1] += 1  # with the second of the last two, which tells that more follows
    found, first = [], 0
    for last in ends:
        part = tokens[first:last]
        closing = -1 if last != ends[-1] or alone else -2
        start, end = (offset + (int(part[i]) - begin) * precision for i in (0, closing))
        places = width + first, width + last
        found.append(Segment(part, start, end, places, result, offset))
        first = last
    return found, frames if alone else (int(tokens[first - 2]) - begin) * STRIDE


def _positions(settings: Settings, frames: int) -> int:
    """Timestamps in so many frames, in the float32 in which torch computes them for HF."""
    seconds = np.float32(frames) * np.float32(settings.time_precision_features)
    return int(seconds / np.float32(settings.time_precision))


def joined(segments: Sequence[Segment], settings: Settings, for_prompt: bool = False) -> np.ndarray:
    """The tokens of all segments; `for_prompt` without the second of two closing timestamps."""
    parts = [
        s.tokens[:-1]
        if for_prompt and len(s.tokens) > 2 and s.tokens[-2] >= settings.first_stamp
        else s.tokens
        for s in segments
    ]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def padded(rows: Sequence[np.ndarray], fill: Any, dtype: Any, left: bool = False) -> np.ndarray:
    """Rows of different lengths as one array, filled up with `fill`, or with one for each row."""
    width = max(map(len, rows), default=0)
    fills = fill if isinstance(fill, list) else [fill] * len(rows)
    result = np.empty((len(rows), width), dtype)
    for row, own, value in zip(result, rows, fills, strict=True):
        row[:] = value
        row[width - len(own) if left else 0 : width if left else len(own)] = own
    return result
