"""The requests of a serving benchmark: their lengths, their ids and when they come."""

import zlib
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError

INPUT, OUTPUT = 1024, 128  # tokens, where nobody says how many
# The lengths of chats: of each part its share, the median, and the deviation of the logarithm.
# They have the means of ShareGPT's chats as vLLM filters them, 227 tokens read and 188 written.
_CHAT_INPUT = (0.66, 40, 1.0), (0.34, 480, 0.85)
_CHAT_OUTPUT = (0.3, 16, 0.8), (0.7, 201, 0.7)
_CHAT_BOUNDS = 4, 1024


class Ask(NamedTuple):
    """One request: ids, how many tokens are to be made, and seconds from the start till it comes.

    It has come from the start where `at` is 0.
    """

    ids: list[int]
    new_tokens: int
    at: float


@dataclass(frozen=True)
class Load:
    """The requests that are sent to a server.

    `rate` requests a second come as a Poisson process, None all at once; at most `concurrency` of
    them are under way at a time, None any number. Prompts begin with one of `prefixes` beginnings
    of `prefix_len` tokens; what follows has `input_len` tokens, and `output_len` are made, each at
    random by up to `range_ratio` of it more or less. With `chat` these two come from a mixture of
    lognormal distributions. A `seed` makes one row of requests, with ids that no other load has, so
    that none of another's prompts is in a cache. What has not ended `within` so many seconds is
    given up; None: nothing.
    """

    requests: int
    rate: float | None = None
    concurrency: int | None = None
    chat: bool = False
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 0
    prefixes: int = 1
    seed: int = 0
    within: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)

    def filled(self, most: int | None = None) -> "Load":
        """The load with lengths for those that nobody gave.

        Of a model that takes at most so many tokens they are smaller.
        """
        if self.chat:
            return self
        room = max(8, (most or 2**31) - self.prefix_len)
        own = self.input_len or min(INPUT, room // 2)
        new = self.output_len or min(OUTPUT, room // 8)
        return replace(self, input_len=own, output_len=new)

    def warm_up(self, requests: int) -> "Load":
        """So many requests with other ids, all at once, of which none is given up."""
        return replace(self, requests=requests, rate=None, seed=self.seed + 1, within=None)

    def describe(self) -> str:
        """The requests in a few words."""
        if self.chat:
            what = "chats"
        else:
            what = f"{self.input_len}/{self.output_len}"
            what += f" ± {self.range_ratio:.0%}" if self.range_ratio else ""
        if self.prefix_len:
            what += f", {self.prefixes} x {self.prefix_len} shared"
        return f"{what}, {self.arrival()}"

    def arrival(self) -> str:
        """The way requests come, in a few words."""
        at_once = f"{self.concurrency} at a time" if self.concurrency else ""
        if self.rate is None:
            return at_once or "all at once"
        return ", ".join(filter(None, [f"{self.rate:g} a second", at_once]))

    def asks(self, vocab: int, most: int | None = None, first: int = 0) -> list[Ask]:
        """The requests, by ids from `first` up to `vocab`.

        ArgumentError where one is longer than the `most` tokens that the model takes.
        """
        random = np.random.default_rng(self.seed)
        read, made = self._lengths(random)
        if self.chat and most:  # as vLLM leaves out chats that are too long
            made = np.minimum(made, max(1, most // 2))
            read = np.clip(read, 1, most - self.prefix_len - made)
        longest = int((read + made).max()) + self.prefix_len
        if read.min() < 1 or (most and longest > most):
            raise ArgumentError(
                f"A request has up to {longest:,} tokens, prompt and answer, and the model takes "
                f"{most:,}. Pass a smaller --input-len, --output-len or --prefix-len."
            )
        ids = np.random.default_rng([self.seed, zlib.crc32(repr(self).encode())])
        begun = [ids.integers(first, vocab, self.prefix_len) for _ in range(self.prefixes)]
        gaps = random.exponential(1 / self.rate, self.requests) if self.rate else None
        times = np.zeros(self.requests) if gaps is None else np.cumsum(gaps)
        chosen = random.integers(0, self.prefixes, self.requests)
        return [
            Ask([*begun[k].tolist(), *ids.integers(first, vocab, n).tolist()], int(new), at)
            for k, n, new, at in zip(chosen, read, made, times.tolist(), strict=True)
        ]

    def _lengths(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        if self.chat:
            return _drawn(random, _CHAT_INPUT, self.requests), _drawn(
                random, _CHAT_OUTPUT, self.requests
            )
        assert self.input_len is not None and self.output_len is not None
        spread = 1 - self.range_ratio, 1 + self.range_ratio
        both = [
            random.integers(
                max(1, round(n * spread[0])), round(n * spread[1]), self.requests, endpoint=True
            )
            for n in (self.input_len, self.output_len)
        ]
        return both[0], both[1]


def _drawn(
    random: np.random.Generator, parts: tuple[tuple[float, int, float], ...], count: int
) -> np.ndarray:
    """So many lengths of a mixture of lognormal distributions."""
    shares, medians, deviations = (np.array(x) for x in zip(*parts, strict=True))
    which = random.choice(len(parts), count, p=shares)
    drawn = random.lognormal(np.log(medians[which]), deviations[which])
    return np.clip(np.rint(drawn), *_CHAT_BOUNDS).astype(int)
