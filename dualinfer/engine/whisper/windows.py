"""The way through sounds, window by window: what is read again, passed over, and where to go on.

Meaning: HF's `generate` and `generate_with_fallback` (models/whisper/generation_whisper.py), but
that in a batch each row's fate is its own where HF mixes up rows once one is read again.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...errors import ArgumentError, LengthError, StepError
from ..options import count_of
from .segments import STRIDE, Segment, cut, joined, padded
from .settings import Settings

_SURE = 0.5  # of temperatures: those below it leave a text that the next window may follow


class Read(NamedTuple):
    """Results of a pass over windows: `ids` int64 [B, T], with what stands in front of the new.

    `scores` and `logits` have an array [B, V] for each new token, where they were asked for, and
    `log_probs` float32 [T, B] tell how likely each new token was; None where they are not kept.
    """

    ids: np.ndarray
    scores: tuple[Any, ...] | None = None
    logits: tuple[Any, ...] | None = None
    log_probs: np.ndarray | None = None


class Result(NamedTuple):
    """One row of a `Read`, and seconds float32 [T] of its tokens, if they were asked for."""

    read: Read
    row: int
    times: np.ndarray | None = None


class Begin(NamedTuple):
    """The beginning of the decoder: ids int64 [B, T], and which of them are real, None for all."""

    ids: np.ndarray
    mask: np.ndarray | None = None

    def of(self, rows: Sequence[int]) -> "Begin":
        """Some of the rows."""
        return Begin(self.ids[rows], None if self.mask is None else self.mask[rows])

    def tokens(self, row: int) -> np.ndarray:
        """The real ids of a row."""
        return self.ids[row] if self.mask is None else self.ids[row][self.mask[row]]


class Reader(Protocol):
    """A model that reads windows of sounds; `rows` are numbers of sounds."""

    def generate(
        self, windows: Any, begin: Begin, new: int, temperature: float, seeds: Sequence[int]
    ) -> Read:
        """The text of each window, at most `new` tokens; drawn at a `temperature` above 0."""
        ...

    def scores(self, windows: Any, prompts: Sequence[np.ndarray], new: int) -> np.ndarray:
        """The logits float32 [B, V] after each prompt, with room for `new` tokens behind it.

        So much takes the text that is to follow, for which the same memory serves.
        """
        ...

    def times(
        self, windows: Any, begin: Begin, ids: np.ndarray, frames: Sequence[int | None]
    ) -> list[np.ndarray]:
        """Seconds of each token of `ids` [B, T], which begin with `begin`, see `token_times`."""
        ...


@dataclass
class Sounds:
    """Sounds to transcribe: spectrograms float32 [B, frames, mel], or what an encoder gave.

    `states` [B, S, E] are in the place of spectrograms. `ends` [B] are the frames that count, and
    `heard` those by which tokens are found in the sound, None where no mask tells. `size` is that
    of a window.
    """

    frames: np.ndarray | None
    states: np.ndarray | None
    ends: np.ndarray
    heard: np.ndarray | None
    size: int

    def times(self, count: int) -> "Sounds":
        """Each sound so many times."""
        if count == 1:
            return self
        parts = (self.frames, self.states, self.heard)
        frames, states, heard = (None if x is None else np.repeat(x, count, 0) for x in parts)
        return Sounds(frames, states, np.repeat(self.ends, count), heard, self.size)

    def window(self, rows: Sequence[int], seek: np.ndarray) -> np.ndarray:
        """The windows of some sounds from the frames `seek` on [B, size, mel], filled up with 0.

        Of states they are the whole.
        """
        if self.frames is None:
            assert self.states is not None
            return self.states[rows]
        found = np.zeros((len(rows), self.size, self.frames.shape[2]), np.float32)
        for own, row in zip(found, rows, strict=True):
            last = min(self.ends[row], seek[row] + self.size)
            part = self.frames[row, seek[row] : last]
            own[: len(part)] = part
        return found


@dataclass
class Transcript:
    """The segments of each sound so far, and what its last window gave."""

    segments: list[list[Segment]]
    last: list[Result] = field(default_factory=list)


@dataclass
class Windows:
    """One call's way through its sounds.

    `begins` int64 [B, T] is how the decoder begins for each; `given` are decoder_input_ids of the
    caller's for the first window. Of lengths `most_new` is the caller's, else `most` is counted
    with what stands in front, and grows with each window, as in HF. `limit` bounds both where the
    caller did not ask, and `positions` are the decoder's. `fill` and `ends` are ids.
    """

    settings: Settings
    reader: Reader
    sounds: Sounds
    begins: np.ndarray
    given: Begin | None
    seeds: Sequence[int]
    per_sound: int  # sequences, of which those of one sound stand together
    most_new: int | None
    most: int
    limit: int | None
    positions: int
    previous: int | None  # the id in front of a text before
    fill: int
    ends: tuple[int, ...]

    def run(self) -> Transcript:
        """Go through all windows."""
        settings, sounds = self.settings, self.sounds
        done, seek, round_ = self._started(), np.zeros(len(self.begins), np.int64), 0
        while (seek < sounds.ends).any():
            if settings.monitor is not None:
                settings.monitor(np.stack((seek, sounds.ends), 1))
            rows = [i for i in range(len(seek)) if seek[i] < sounds.ends[i]]
            begin = self._begin(rows, done.segments)
            done.last, skipped = self._read(rows, seek, begin, round_)
            for i, (row, result) in enumerate(zip(rows, done.last, strict=True)):
                count = int(min(sounds.ends[row] - seek[row], sounds.size))
                if skipped[i]:
                    seek[row] += count
                    continue
                tokens = self._text(result, begin.ids.shape[1])
                offset = float(seek[row]) * settings.time_precision / STRIDE
                how = count, offset, begin.ids.shape[1]
                segments, moved = cut(settings, self._without_end(tokens), *how, result)
                if not moved and not settings.unique:
                    raise StepError(
                        "A window ended where it began, at two timestamps of its first moment, and "
                        "would be read again without end. Pass return_timestamps=True, whose rules "
                        "keep the model from it."
                    )
                seek[row] += moved
                done.segments[row] += segments
            round_ += 1
            if settings.unique:
                break
        if settings.prompt is not None and settings.prompt_for == "first-segment":
            done.segments = [own[1:] for own in done.segments]
        return done

    def first(self) -> tuple[Any, Begin, int, float, list[int]]:
        """The first window of each sound, as `Reader.generate` takes it."""
        rows = list(range(len(self.begins)))
        begin = self._begin(rows, self._started().segments)
        windows = self.sounds.window(rows, np.zeros(len(rows), np.int64))
        temperature = self.settings.temperatures[0] or 0.0
        seeds = [self._seed(row, 0, 0) for row in rows]
        return windows, begin, self._most_new(begin), temperature, seeds

    def _started(self) -> Transcript:
        """A transcript before its first window."""
        settings, count = self.settings, len(self.begins)
        self._follows = [settings.conditions_at_first] * count
        own = settings.prompt
        if own is None or settings.prompt_for != "first-segment":
            return Transcript([[] for _ in range(count)])
        own = own[1:] if own[0] == settings.fields.get("prev_sot_token_id") else own
        return Transcript([[Segment(own)] for _ in range(count)])

    def _begin(self, rows: list[int], segments: list[list[Segment]]) -> Begin:
        """The beginning of the decoder for the next windows of these rows."""
        settings, first = self.settings, self.begins[rows]
        if self.given is not None:
            given, self.given = self.given, None
            return given
        if any(self._follows) and segments[0]:
            front = settings.prompt if settings.prompt_for == "all-segments" else None
            if front is None:
                front = np.array([] if self.previous is None else [self.previous], np.int64)
            most, before, longest = self.positions // 2 - 1, [], 0
            for row in rows:
                text = segments[row] if self._follows[row] else []
                before.append(np.append(front, joined(text, settings, for_prompt=True)[-most:]))
                longest = max(longest, len(before[-1]) if text else 0)
            # Where others follow nothing, what stands in front is no longer than that, as in HF.
            before = [own[len(own) - min(len(own), longest) :] for own in before]
            ids = padded(before, self.fill, np.int64, left=True)
            ids = np.concatenate((ids, first), 1)
            return Begin(ids, ids != self.fill)
        if settings.prompt is not None:
            return Begin(np.concatenate((np.tile(settings.prompt, (len(rows), 1)), first), 1))
        return Begin(first)

    def _most_new(self, begin: Begin) -> int:
        """New tokens of the next window at most."""
        width = begin.ids.shape[1]
        if width >= self.positions:
            raise LengthError(
                f"{count_of(width)} stand in front of a window's text, and the decoder has "
                f"{self.positions} positions. Shorten prompt_ids or decoder_input_ids."
            )
        if self.most_new is not None:
            return self.most_new
        in_front = min(self.positions // 2 - 1, width)
        self.most = min(self.most + in_front, self.positions)
        new = self.most - width
        if new < 1 and self.limit is None:
            raise ArgumentError(
                f"{count_of(width)} stand in front of a window's text, and max_length counts them, "
                "so that nothing could be generated. Raise max_length, or set max_new_tokens."
            )
        return new if self.limit is None else max(1, min(new, self.limit - width))

    def _read(
        self, rows: list[int], seek: np.ndarray, begin: Begin, round_: int
    ) -> tuple[list[Result], list[bool]]:
        """The last results of the windows of these rows, and which are passed over."""
        settings, windows = self.settings, self.sounds.window(rows, seek)
        new, width = self._most_new(begin), begin.ids.shape[1]
        silent = self._silence(windows, begin, new)
        results: list[Any] = [None] * len(rows)
        skipped = [False] * len(rows)
        at, drawn = list(range(len(rows))), 0
        for attempt, temperature in enumerate(settings.temperatures):
            draws = temperature is not None and temperature > 0
            seeds = [self._seed(rows[i], round_, drawn) for i in at]
            drawn += draws
            how = new, temperature if draws and temperature else 0.0
            read = self.reader.generate(windows[at], begin.of(at), *how, seeds)
            times: Sequence[Any] = [None] * len(at)
            if settings.token_timestamps:
                heard = [self._heard(rows[i], seek) for i in at]
                times = self.reader.times(windows[at], begin.of(at), read.ids, heard)
            again = []
            for row, i in enumerate(at):
                results[i] = Result(read, row, times[row])
                needs, skipped[i] = self._judged(results[i], width, temperature, silent[i])
                sure = temperature is None or temperature < _SURE
                self._follows[rows[i]] = settings.conditions and sure
                if needs:
                    again.append(i)
            at = again
            if not at or attempt == len(settings.temperatures) - 1:
                break
        return results, skipped

    def _heard(self, row: int, seek: np.ndarray) -> int | None:
        heard = self.sounds.heard
        return None if heard is None else int(heard[row] - seek[row])

    def _seed(self, row: int, round_: int, drawn: int) -> int:
        """The seed of a window's noise: the caller's own for the first that is drawn.

        Of further windows, attempts and sequences of a sound it is one made of them all.
        """
        where = (row % self.per_sound, round_, drawn)
        own = self.seeds[row // self.per_sound]
        if not any(where):
            return own
        return int(np.random.SeedSequence((own, *where)).generate_state(1, np.uint64)[0])

    def _silence(self, windows: Any, begin: Begin, new: int) -> Sequence[float]:
        """The probability that a window has no speech, by what follows its transcript's start."""
        if self.settings.no_speech is None:
            return [0.0] * len(windows)
        rest, prompts = self.begins.shape[1] - 1, []
        for i in range(len(windows)):
            tokens = begin.tokens(i)
            prompts.append(tokens[: max(1, len(tokens) - rest)])
        scores = self.reader.scores(windows, prompts, new)
        likely = np.exp(scores - scores.max(1, keepdims=True))
        assert self.settings.no_timestamps is not None
        return (likely[:, self.settings.no_timestamps - 1] / likely.sum(1)).tolist()

    def _text(self, result: Result, width: int) -> np.ndarray:
        """A row's new tokens without padding, and with its end, whose likelihood counts."""
        tokens = result.read.ids[result.row, width:]
        if tokens[-1] == self.fill:
            count = int((tokens == self.fill).sum()) - (self.fill in self.ends)
            tokens = tokens[: len(tokens) - count]
        return tokens

    def _without_end(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:-1] if len(tokens) and tokens[-1] in self.ends else tokens

    def _judged(
        self, result: Result, width: int, temperature: float | None, silent: float
    ) -> tuple[bool, bool]:
        """True if a window is to be read again, and whether it is passed over as silent."""
        settings, tokens = self.settings, self._text(result, width)
        needs = skips = False
        if settings.compression_ratio is not None:
            needs = compression_ratio(tokens, settings.vocab) > settings.compression_ratio
        if settings.log_prob is not None:
            assert result.read.log_probs is not None
            logs = result.read.log_probs[: len(tokens), result.row]
            likely = float(logs.sum(dtype=np.float32) / np.float32(len(tokens)))
            needs = needs or likely < settings.log_prob
            if settings.no_speech is not None:
                skips = likely < settings.log_prob and silent > settings.no_speech
        return needs and not skips, skips


def compression_ratio(tokens: np.ndarray, vocab: int) -> float:
    """Bytes of the ids over those that zlib makes of them: high where a text repeats itself."""
    size = int(math.log2(vocab) / 8) + 1
    plain = b"".join(token.to_bytes(size, "little") for token in tokens.tolist())
    return len(plain) / len(zlib.compress(plain))
