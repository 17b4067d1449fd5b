"""Scores of texts: log-probabilities of continuations, exact, many at a time."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from ..arrays import from_numpy
from ..backends.base import GRAIN, TOP, Request
from ..errors import (
    ArgumentError,
    LengthError,
    OutOfMemoryError,
    UnsupportedError,
    a_type,
    shown,
)
from .base import InferenceEngine
from .loop import Loop
from .meeting import Ask
from .requests import TokenLogprobs, told_of
from .tokenizing import ids_of, tokenizer_of

_SCORED = 512  # places of a prompt whose logits are held at a time
_TOKENS = 16384  # of a pass
_LOGITS = 2**28  # numbers of a pass in float32, and half of one in 16 bits
_PROMPTS = 64  # whose caches are held at a time
_WORTH = 256  # tokens that a pass more must save: it reads all weights again


class Score(NamedTuple):
    """The probability of a continuation after its prompt.

    `logprob` is the sum of those of its `ids`, which are in `logprobs`. It is greedy where no other
    token is likelier than it at any place.
    """

    logprob: float
    is_greedy: bool
    ids: list[int]
    logprobs: list[float]


def prompt_told(pieces: Iterable[np.ndarray], likely: int) -> list[TokenLogprobs | None]:
    """Log-probabilities of a prompt's tokens, None of the first; `likely` ones of each place."""
    return [None, *(told_of(row, likely) for piece in pieces for row in piece)]


class _Pair(NamedTuple):
    """The ids of a prompt and of its continuation."""

    first: list[int]
    then: list[int]

    @property
    def read(self) -> tuple[int, ...]:
        """The ids that a pass reads: the last one is only scored."""
        return (*self.first, *self.then[:-1])


class _Shared(NamedTuple):
    """A prompt of several continuations: by what of each is read, the pairs that read it."""

    first: tuple[int, ...]
    rests: list[tuple[tuple[int, ...], list[int]]]


class ScoringCalls(InferenceEngine):
    """Calls of a causal model that tell how likely tokens are."""

    _spec: Any
    _loop: Loop

    def score(
        self, prompts: Sequence[Any], continuations: Sequence[Any], *, tokenizer: Any = None
    ) -> list[Score]:
        """A `Score` for each continuation of the prompt that stands beside it.

        Examples:
            >>> engine.score(["The sky is", "The sky is"], [" blue", " green"])

        Both are texts or lists of ids. Texts are split as lm-evaluation-harness does it: the ids of
        both together, behind those of the prompt alone; blanks at a prompt's end belong to the
        continuation. After an empty prompt the first token follows BOS, or EOS where there is none.
        Log-probabilities are of the whole vocabulary, in float32, by the model's own logits.
        A prompt of several continuations is read once, where that is worth a pass for each of them,
        slots are free and a cache changes no score. LengthError where a pair is longer than the
        model takes.
        """
        self._check_scored("score()")
        if any(isinstance(x, str) or not isinstance(x, Iterable) for x in (prompts, continuations)):
            raise ArgumentError("score() takes a list of prompts and a list of continuations.")
        prompts, continuations = list(prompts), list(continuations)
        if len(prompts) != len(continuations):
            raise ArgumentError(
                f"score() got {len(prompts)} prompts and {len(continuations)} continuations. Pass "
                "one prompt for each continuation."
            )
        given = self.tokenizer if tokenizer is None and _has_text(prompts) else tokenizer
        pairs = [
            self._encoded(given, prompt, continuation)
            for prompt, continuation in zip(prompts, continuations, strict=True)
        ]
        return self._scores(pairs)

    def prompt_logprobs(
        self, input_ids: Sequence[int], logprobs: int = 0
    ) -> list[TokenLogprobs | None]:
        """The log-probability of each token of a prompt behind those before it, None of the first.

        `input_ids` are ints [T]; with `logprobs` up to 20 the so many likeliest ids of each place
        are told, too. By the model's own logits, as a forward pass gives them.
        """
        if not (type(logprobs) is int and 0 <= logprobs <= TOP):
            raise ArgumentError(f"logprobs={shown(logprobs)}; expected an int of at most {TOP}.")
        told = prompt_told(self.prompt_told_pieces(input_ids), logprobs)
        return told[: len(input_ids)]

    def prompt_told_pieces(self, input_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """The `sampling.tell` arrays of a prompt's tokens but the first, some hundred at a time.

        Arrays float32 [places, 1 + 2 K]; each is a pass over the whole prompt.
        """
        ids = _ids(input_ids, "prompt")
        self._check_scored("prompt_logprobs()")
        return self._told_pieces(ids)

    def _told_pieces(self, ids: list[int]) -> Iterator[np.ndarray]:
        for first in range(0, len(ids) - 1, _SCORED):
            places = np.arange(first, min(first + _SCORED, len(ids) - 1))
            with self._turns:
                results = self.forward([ids], logits_to_keep=places)
                rows = self.runner.tell(results.logits[0], np.array(ids)[places + 1])
            yield rows

    def encode_pair(self, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a prompt and of its continuation, as `score` splits them."""
        return split_texts(self.tokenizer, prompt, continuation)

    def _check_scored(self, call: str) -> None:
        spec = self._spec
        if not spec.can_generate or spec.encoder is not None:
            raise UnsupportedError(
                f"{call} is for causal models that generate, and {spec.architecture} is none."
            )

    def _encoded(self, given: Any, prompt: Any, continuation: Any) -> _Pair:
        if isinstance(prompt, str) != isinstance(continuation, str):
            raise ArgumentError("A prompt and its continuation are both texts, or both ids.")
        if isinstance(prompt, str):
            first, then = split_texts(given, prompt, continuation)
        else:
            first, then = _ids(prompt, "prompt"), _ids(continuation, "continuation")
            if not first:
                raise ArgumentError("A prompt of ids is empty. Pass at least the id of BOS.")
        if not then:
            raise ArgumentError("A continuation is empty; there is nothing to score.")
        vocab, most = self._spec.vocab, self.max_tokens  # type: ignore[attr-defined]
        if (wrong := next((i for i in (*first, *then) if not 0 <= i < vocab), None)) is not None:
            raise ArgumentError(f"There is no token {wrong}; the vocabulary has {vocab:,}.")
        if len(first) + len(then) > most:
            raise LengthError(
                f"A prompt of {len(first):,} tokens and its continuation of {len(then):,} are "
                f"longer than the {most:,} that the model takes. Shorten the prompt."
            )
        return _Pair(first, then)

    def _scores(self, pairs: Sequence[_Pair]) -> list[Score]:
        """The scores of pairs; prompts that several share, and rows of the same ids, once."""
        told: dict[int, np.ndarray] = {}
        for batch in self._shared(pairs):
            told |= self._told_behind(batch, pairs)
        of_row: dict[tuple[int, ...], list[int]] = {}
        for i, pair in enumerate(pairs):
            if i not in told:
                of_row.setdefault(pair.read, []).append(i)
        numbers = _LOGITS if "float32" in str(self.runner.dtype) else 2 * _LOGITS
        for batch in _batches(of_row, pairs, numbers // self._spec.vocab, self.is_compiled):
            places = [(row, i) for row, read in enumerate(batch) for i in of_row[read]]
            rows = self._told(batch, [(row, pairs[i]) for row, i in places])
            told |= {i: own for (_, i), own in zip(places, rows, strict=True)}
        return [_score(pair, told[i]) for i, pair in enumerate(pairs)]

    def _shared(self, pairs: Sequence[_Pair]) -> Iterator[list[_Shared]]:
        """Prompts of several continuations that are worth reading once, some at a time.

        What a cache rounds would give other scores than whole rows, and streamed weights would come
        for each continuation.
        """
        config = self.inference_config
        rounds = config.kv_cache_dtype is not None or config.state_dtype is not None
        if not self.runner.verifies or rounds or config.streams:
            return
        pool, most = self._loop.pool, self.max_tokens  # type: ignore[attr-defined]
        prompts, room, ahead = _PROMPTS, _TOKENS, self._loop.most_ahead or most
        if pool is not None:  # others want slots, too
            prompts, most = min(prompts, max(1, pool.slots // 4)), min(most, pool.tokens)
            room = min(room, pool.blocks * GRAIN // 4 or room)
        if self.is_compiled:
            prompts = 1 << (prompts.bit_length() - 1)

        def has_room(first: int, then: int, count: int) -> bool:
            if then - 1 > ahead:
                return False
            if self.is_compiled:
                then, count = _power(then) + 1, _power(count)
            logits = count * then * self._spec.vocab
            return (
                first + then <= most
                and count <= prompts
                and count * (first + then + GRAIN) <= room
                and (count == 1 or logits <= _LOGITS)
            )

        batch: list[_Shared] = []
        longest = 0
        for own in sorted(_by_prompt(pairs), key=lambda own: len(own.first), reverse=True):
            then = max(len(rest) for rest, _ in own.rests) + 1
            if batch and not has_room(len(batch[0].first), max(longest, then), len(batch) + 1):
                if _is_worth(batch):
                    yield batch
                batch, longest = [], 0
            if has_room(len(own.first), then, 1):
                batch.append(own)
                longest = max(longest, then)
        if _is_worth(batch):
            yield batch

    def _told_behind(self, batch: list[_Shared], pairs: Sequence[_Pair]) -> dict[int, np.ndarray]:
        """What `tell` says of the tokens of each pair of these prompts, which are read once.

        Continuations are read as drafts, none of which is taken: the next one goes behind the
        prompt as well. One pass has one of each prompt, the longest ones first. Nothing is told
        where there are no free slots, or no room, which others may have.
        """
        self._check_model(alone=False)  # type: ignore[attr-defined]
        fill = _power if self.is_compiled else int  # a size is compiled once
        batch = [*batch, *(fill(len(batch)) - len(batch)) * [_Shared(batch[-1].first, [])]]
        longest = fill(max(len(rest) for own in batch for rest, _ in own.rests))
        requests = [Request(np.array(own.first, np.int32), longest + 1) for own in batch]
        try:
            lives, logits = self._loop.start_scores(requests, waits=False)
        except (LengthError, OutOfMemoryError):
            return {}
        told: dict[int, list[np.ndarray]] = {}
        try:
            starts = [(row, i) for row, own in enumerate(batch) for _, of in own.rests for i in of]
            rows = np.array([row for row, _ in starts])
            tokens = np.array([pairs[i].then[0] for _, i in starts])
            for (_, i), own in zip(starts, self._told_of(logits, (rows,), tokens), strict=True):
                told[i] = [own[None]]
            columns = [sorted(own.rests, key=lambda x: len(x[0]), reverse=True) for own in batch]
            for part in zip_longest(*columns, fillvalue=((), [])):
                width = max(len(rest) for rest, _ in part)
                if not width:
                    break
                ids = np.zeros((len(batch), fill(width)), np.int64)
                for row, (rest, _) in zip(ids, part, strict=True):
                    row[: len(rest)] = rest
                logits = self._loop.scores(Ask(lives, ids, drafts=True))
                places = [
                    (row, column, pairs[i].then[1 + column], i)
                    for row, (rest, of) in enumerate(part)
                    for i in of
                    for column in range(len(rest))
                ]
                at = [np.array([place[i] for place in places]) for i in range(2)]
                tokens = np.array([place[2] for place in places])
                for (*_, i), own in zip(places, self._told_of(logits, at, tokens), strict=True):
                    told[i].append(own[None])
        finally:
            self._loop.leave(lives)
        self._check_model(alone=True)  # type: ignore[attr-defined]
        return {i: np.concatenate(own) for i, own in told.items()}

    def _told_of(self, logits: Any, at: Sequence[np.ndarray], tokens: np.ndarray) -> np.ndarray:
        """What `tell` says of `tokens` [N], and of the likeliest one, by logits [..., V] `at` N.

        Some thousand of them at a time; few sizes, each of which JAX compiles.
        """
        most = max(1, _LOGITS // self._spec.vocab)
        told = []
        for first in range(0, len(tokens), most):
            part = [x[first : first + most] for x in (*at, tokens)]
            count = len(part[0])
            *index, ids = (
                np.pad(x, (0, min(_power(count), most) - count), mode="edge") for x in part
            )
            with self._turns:
                told.append(self.runner.tell(logits[tuple(index)], ids, 1)[:count])
        return np.concatenate(told)

    def _told(
        self, batch: Sequence[tuple[int, ...]], places: Sequence[tuple[int, _Pair]]
    ) -> list[np.ndarray]:
        """Of each pair, whose row is named, what `tell` says of its tokens."""
        longest = max(map(len, batch))
        ids = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, read in enumerate(batch):
            ids[row, : len(read)], mask[row, : len(read)] = read, 1
        begin = min(len(pair.first) - 1 for _, pair in places)
        kept = _power(longest - begin)  # few sizes, each of which JAX compiles
        begin = max(0, longest - kept)
        name = self.inference_config.backend  # type: ignore[attr-defined]
        arrays = [from_numpy(a, "torch" if name == "torch" else "jax") for a in (ids, mask)]
        logits = self.forward(*arrays, logits_to_keep=longest - begin).logits  # type: ignore[attr-defined]
        rows = [np.full(len(pair.then), row) for row, pair in places]
        columns = [np.arange(len(pair.then)) + len(pair.first) - 1 - begin for _, pair in places]
        tokens = [np.array(pair.then) for _, pair in places]
        lengths = [len(pair.then) for _, pair in places]
        at = np.concatenate(rows), np.concatenate(columns)
        told = self._told_of(logits, at, np.concatenate(tokens))
        return np.split(told, np.cumsum(lengths)[:-1])


def _score(pair: _Pair, told: np.ndarray) -> Score:
    """The score of a pair by what `tell` says of its tokens, float32 [tokens, 3]."""
    logs = told[:, 0].astype(np.float64).tolist()
    is_greedy = bool(np.all(told[:, 0] >= told[:, 1]))
    return Score(float(sum(logs)), is_greedy, list(pair.then), logs)


def _by_prompt(pairs: Sequence[_Pair]) -> list[_Shared]:
    """The prompts behind which several rows differ, each with these."""
    of_prompt: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for i, pair in enumerate(pairs):
        rests = of_prompt.setdefault(tuple(pair.first), {})
        rests.setdefault(tuple(pair.then[:-1]), []).append(i)
    return [_Shared(first, list(x.items())) for first, x in of_prompt.items() if len(x) > 1]


def _is_worth(batch: Sequence[_Shared]) -> bool:
    """True if reading prompts once saves more than the passes behind them cost."""
    if not batch:
        return False
    saved = sum(len(own.first) * (len(own.rests) - 1) for own in batch)
    return saved >= _WORTH * max(len(own.rests) for own in batch)


def _batches(
    of_row: dict[tuple[int, ...], list[int]], pairs: Sequence[_Pair], places: int, fills_up: bool
) -> Iterator[list[tuple[int, ...]]]:
    """Rows of like lengths that a pass has room for, the longest first; logits of `places`.

    There is room for as many as they are filled up to.
    """
    begins = {read: min(len(pairs[i].first) - 1 for i in own) for read, own in of_row.items()}
    batch: list[tuple[int, ...]] = []
    longest = begin = 0
    for read in sorted(of_row, key=len, reverse=True):
        if batch:
            count, kept = len(batch) + 1, longest - min(begin, begins[read])
            most = min(_TOKENS // longest, places // kept)
            if (_power(count) if fills_up else count) > most:
                yield batch
                batch = []
        if not batch:
            longest, begin = len(read), begins[read]
        batch.append(read)
        begin = min(begin, begins[read])
    if batch:
        yield batch


def split_texts(tokenizer: Any, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of what follows it, as lm-evaluation-harness splits them."""
    if not prompt:
        then = ids_of(tokenizer, continuation, bare=True)
        first = prefix_of(tokenizer)
        return ([first], then) if then[:1] != [first] else (then[:1], then[1:])
    bare = prompt.rstrip()
    if bare:
        prompt, continuation = bare, prompt[len(bare) :] + continuation
    first = ids_of(tokenizer, prompt)
    return first, ids_of(tokenizer, prompt + continuation)[len(first) :]


def prefix_of(tokenizer: Any) -> int:
    """The id that stands before an empty prompt's continuation: BOS, or EOS where there is none."""
    own = tokenizer_of(tokenizer)
    found = own.bos_token_id if own.bos_token_id is not None else own.eos_token_id
    if found is None:
        raise ArgumentError(
            "A prompt is empty, and the tokenizer has neither BOS nor EOS to stand for it. Pass a "
            "prompt."
        )
    return found


def _ids(value: Any, name: str) -> list[int]:
    found = np.asarray(value)
    if found.ndim != 1 or not (np.issubdtype(found.dtype, np.integer) or not found.size):
        raise ArgumentError(f"A {name} is {a_type(value)}; expected a text or a list of ids.")
    return found.astype(np.int64).tolist()


def _has_text(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str) for value in values)


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
