"""The host's book of a runner: which slots are live, how far their cache reaches, what they sample.

It is no part of the contract of `base`: a runner may do without it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..model.spec import ModelSpec
from .base import NO_TOKEN, Request

SMALLEST_CACHE = 64
RESERVED = 2048


def bucket(count: int, smallest: int = 1) -> int:
    """The next power of two, at least `smallest`: a padded size that few executables serve."""
    return max(smallest, 1 << (max(count, 1) - 1).bit_length())


def bucket_of_rows(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: for long rows, where a power of two adds many."""
    whole = bucket(count)
    return whole * 3 // 4 if whole > 2 and count <= whole * 3 // 4 else whole


class LiveSlots:
    """The host's book of a runner's live slots: what each serves, and how far its cache may reach.

    A cache is reserved for RESERVED tokens of a sequence at first, and grows as steps are asked
    for: a request for many new tokens may end early.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._reach: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of live slots."""
        return len(self._requests)

    @property
    def requests(self) -> list[Request]:
        """The requests being served."""
        return list(self._requests.values())

    @property
    def width(self) -> int:
        """Slots that a step over every live one covers: a bucket."""
        return bucket(max(self._requests) + 1)

    @property
    def reach(self) -> int:
        """Cached tokens of the longest sequence once the steps asked for have run, at most."""
        return max(self._reach.values())

    def reach_beside(self, slots: Sequence[int]) -> int:
        """`reach` where these slots alone have stepped.

        The step writes the newest token of every other sequence as well, in its next place, to no
        effect: that place must be there, or the write would fall on the one before.
        """
        others = [slot for slot in self._requests if slot not in slots]
        next_places = (min(self._reach[s] + 1, self._requests[s].cache_tokens) for s in others)
        return max(self.reach, *next_places, 0)

    @property
    def encoded(self) -> int:
        """The most places that one of them needs for what an encoder gives."""
        return max(request.encoded for request in self._requests.values())

    @property
    def weighs(self) -> bool:
        """True if one of them has a bias, or a penalty that counts."""
        return any(r.sampling.weighs for r in self._requests.values())

    @property
    def reserved(self) -> int:
        """Cached tokens to have room for when a sequence starts."""
        return max(
            max(self._reach[slot], min(request.cache_tokens, RESERVED))
            for slot, request in self._requests.items()
        )

    def may_outgrow(self, tokens: int) -> bool:
        """True if a sequence that is half way through `tokens` cached ones may go on beyond."""
        return any(
            2 * self._reach[slot] >= tokens < request.cache_tokens
            for slot, request in self._requests.items()
        )

    def add(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Book requests in slots."""
        self._requests.update(zip(slots, requests, strict=True))
        self._reach.update((s, len(r.prompt)) for s, r in zip(slots, requests, strict=True))

    def advance(self, steps: int, slots: Sequence[int] | None = None) -> None:
        """Book steps for these slots, or every one."""
        for slot in self._requests if slots is None else slots:
            request = self._requests[slot]
            self._reach[slot] = min(self._reach[slot] + steps, request.cache_tokens)

    def remove(self, slots: Sequence[int]) -> None:
        """Free slots; those that are free already stay so."""
        for slot in slots:
            self._requests.pop(slot, None)
            self._reach.pop(slot, None)


class WeightRows(NamedTuple):
    """What `sampling.weigh` takes, as few numbers: int32 ids [B, K] and float32 values [B, K].

    `new` int32 [B, T] are tokens that count, `costs` float32 [B, 2] as there.
    """

    ids: np.ndarray
    values: np.ndarray
    new: np.ndarray
    costs: np.ndarray


def encoded_bucket(spec: ModelSpec, tokens: int) -> int:
    """Places of a cross cache for encoders' outputs of so many `tokens`; 0 without an encoder.

    Spectrograms and images have one length.
    """
    if spec.encoder is None:
        return 0
    return spec.encoder.one_length or bucket(tokens, SMALLEST_CACHE)


def sampling_rows(requests: Sequence[Request], eos_width: int) -> dict[str, np.ndarray]:
    """The requests' sampling parameters as columns for device arrays.

    Keys are those of both backends' slot state; seeds split into 32-bit halves, int64 because
    torch has no arithmetic on uint32; `eos` [N, eos_width] is filled up with NO_TOKEN.
    """
    s = [r.sampling for r in requests]
    most = np.iinfo(np.int32).max
    eos = np.full((len(requests), eos_width), NO_TOKEN, np.int32)
    for i, r in enumerate(requests):
        eos[i, : len(r.eos_ids)] = r.eos_ids
    return {
        "noise": np.array([x.do_sample for x in s], bool),
        "temperature": np.maximum(
            np.array([x.temperature if x.do_sample else 1.0 for x in s], np.float32),
            np.finfo(np.float32).tiny,
        ),
        "top_k": np.array([min(x.top_k, most) if x.do_sample else 0 for x in s], np.int32),
        "top_p": np.array([x.top_p if x.do_sample else 1.0 for x in s], np.float32),
        "min_p": np.array([x.min_p if x.do_sample else 0.0 for x in s], np.float32),
        "penalty": np.array([x.repetition_penalty for x in s], np.float32),
        "seed_low": np.array([x.seed & 0xFFFFFFFF for x in s], np.int64),
        "seed_high": np.array([x.seed >> 32 & 0xFFFFFFFF for x in s], np.int64),
        "return_index": np.array([x.return_index for x in s], np.int64),
        "minimum": np.array([min(r.min_new_tokens, most) for r in requests], np.int32),
        "remaining": np.array([r.max_new_tokens for r in requests], np.int32),
        "eos": eos,
    }


def weight_rows(requests: Sequence[Request], new: np.ndarray | None = None) -> WeightRows:
    """What `sampling.weigh` takes of the requests, B rows; `new` [B, T] are their new tokens.

    Unset, these are the `generated` ones of their own tokens. Ids are filled up with NO_TOKEN.
    """
    biases = [r.sampling.bias for r in requests]
    width = bucket(max(map(len, biases)))
    ids = np.full((len(requests), width), NO_TOKEN, np.int32)
    values = np.zeros((len(requests), width), np.float32)
    for i, bias in enumerate(biases):
        for j, (token, value) in enumerate(bias):
            ids[i, j], values[i, j] = token, value
    if new is None:
        width = bucket(max(r.generated for r in requests))
        new = np.full((len(requests), width), NO_TOKEN, np.int32)
        for i, r in enumerate(requests):
            new[i, : r.generated] = r.tokens[len(r.tokens) - r.generated :]
    s = [r.sampling for r in requests]
    costs = np.array([(x.presence_penalty, x.frequency_penalty) for x in s], np.float32)
    return WeightRows(ids, values, new.astype(np.int32), costs)
