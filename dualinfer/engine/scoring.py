"""Scores of texts: log-probabilities of continuations, exact, many at a time."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import from_numpy
from ..backends.base import TOP
from ..errors import ArgumentError, LengthError, UnsupportedError, a_type, shown
from .base import InferenceEngine
from .requests import TokenLogprobs, told_of
from .tokenizing import ids_of, tokenizer_of

_SCORED = 512  # places of a prompt whose logits are held at a time
_TOKENS = 16384  # of a pass
_LOGITS = 2**28  # numbers of a pass


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


class ScoringCalls(InferenceEngine):
    """Calls of a causal model that tell how likely tokens are."""

    _spec: Any

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
        Prompts that several continuations of one token share are read once. LengthError where a
        pair is longer than the model takes.
        """
        self._check_scored("score()")
        if isinstance(prompts, str) or isinstance(continuations, str):
            raise ArgumentError("score() takes a list of prompts and a list of continuations.")
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
        if not (isinstance(logprobs, int) and 0 <= logprobs <= TOP):
            raise ArgumentError(f"logprobs={shown(logprobs)}; expected an int of at most {TOP}.")
        told = prompt_told(self.prompt_told_pieces(input_ids), logprobs)
        return told[: len(input_ids)]

    def prompt_told_pieces(self, input_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """The `sampling.tell` arrays of a prompt's tokens but the first, some hundred at a time.

        Arrays float32 [places, 1 + 2 K]; each is a pass over the whole prompt.
        """
        ids = [int(x) for x in input_ids]
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
        """The scores of pairs; rows of the same ids are read once."""
        of_row: dict[tuple[int, ...], list[int]] = {}
        for i, pair in enumerate(pairs):
            of_row.setdefault(pair.read, []).append(i)
        found: dict[int, Score] = {}
        for batch in _batches(of_row, pairs, self._spec.vocab):
            places = [(row, i) for row, read in enumerate(batch) for i in of_row[read]]
            told = self._told(batch, [(row, pairs[i]) for row, i in places])
            for (_, i), own in zip(places, told, strict=True):
                is_greedy = bool(np.all(own[:, 0] >= own[:, 1]))
                logs = own[:, 0].astype(np.float64).tolist()
                found[i] = Score(float(sum(logs)), is_greedy, list(pairs[i].then), logs)
        return [found[i] for i in range(len(pairs))]

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
        index = np.stack([np.concatenate(part) for part in (rows, columns, tokens)])
        told = []
        most = max(1, _LOGITS // self._spec.vocab)
        for first in range(0, index.shape[1], most):
            part = index[:, first : first + most]
            count = part.shape[1]
            part = np.pad(part, ((0, 0), (0, min(_power(count), most) - count)), mode="edge")
            told.append(self.runner.tell(logits[part[0], part[1]], part[2])[:count])
        return np.split(np.concatenate(told), np.cumsum(lengths)[:-1])


def _batches(
    of_row: dict[tuple[int, ...], list[int]], pairs: Sequence[_Pair], vocab: int
) -> Iterator[list[tuple[int, ...]]]:
    """Rows of like lengths that a pass has room for, the longest first."""
    begins = {read: min(len(pairs[i].first) - 1 for i in own) for read, own in of_row.items()}
    batch: list[tuple[int, ...]] = []
    longest = begin = 0
    for read in sorted(of_row, key=len, reverse=True):
        if batch:
            count, kept = len(batch) + 1, longest - min(begin, begins[read])
            if count * longest > _TOKENS or count * kept * vocab > _LOGITS:
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
