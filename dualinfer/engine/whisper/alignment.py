"""When each token was spoken, by the attention of some heads to the sound.

Meaning: HF's `_extract_token_timestamps` (models/whisper/generation_whisper.py), after OpenAI's
whisper/timing.py.
"""

import numpy as np

_BOTH, _TOKEN, _PLACE = range(3)  # along what a path goes on


def token_times(
    weights: np.ndarray, frames: int | None, in_front: int, precision: float, width: int
) -> np.ndarray:
    """Seconds float32 of `in_front` tokens, of T more, and of one behind them.

    `weights` [T, A, S] are how A heads attend to the places of a sound after each of the T. Two
    `frames` of the sound make a place; None counts all of S. The tokens in front have 0, and the
    last one the time of the one before it, since nothing was read after it. Weights are smoothed
    over `width` places.
    """
    count = len(weights)
    times = np.zeros(in_front + count + 1, np.float32)
    if frames is not None:
        weights = weights[..., : max(frames, 0) // 2]
    if not count or not weights.shape[-1]:
        return times
    with np.errstate(invalid="ignore", divide="ignore"):  # of a single token, as in HF
        normed = (weights - weights.mean(0)) / weights.std(0)
    smooth = [_medians(normed[:, i], width) for i in range(normed.shape[1])]
    matrix = np.mean(np.stack(smooth), axis=0, dtype=np.float32)
    tokens, places = _path(-np.asarray(matrix, np.float64))
    first = np.diff(tokens, prepend=tokens[0] - 1) > 0
    times[in_front:-1] = places[first] * precision
    times[-1] = times[-2]
    return times


def _medians(x: np.ndarray, width: int) -> np.ndarray:
    """Medians [T, S] of `width` places around each, mirrored at the ends."""
    beside = width // 2
    if x.shape[-1] <= beside:
        return x
    around = np.pad(x, ((0, 0), (beside, beside)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(around, width, axis=-1)
    return np.partition(windows, beside, axis=-1)[..., beside]


def _path(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest way through a matrix [T, S] by steps forward: rows and columns it passes.

    Costs are float32, as in HF; each diagonal is computed at once.
    """
    rows, columns = matrix.shape
    cost = np.full((rows + 1, columns + 1), np.inf, np.float32)
    trace = np.full((rows + 1, columns + 1), -1, np.int8)
    cost[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, token, place = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        by_both, by_token = (both < token) & (both < place), (token < both) & (token < place)
        step = np.where(by_both, _BOTH, np.where(by_token, _TOKEN, _PLACE))
        least = np.where(by_both, both, np.where(by_token, token, place))
        cost[i, j], trace[i, j] = matrix[i - 1, j - 1] + least, step
    trace[0, :], trace[:, 0] = _PLACE, _TOKEN
    i, j, passed = rows, columns, []
    while i > 0 or j > 0:
        passed.append((i - 1, j - 1))
        step = trace[i, j]
        i, j = i - (step != _PLACE), j - (step != _TOKEN)
    found = np.array(passed[::-1])
    return found[:, 0], found[:, 1]
