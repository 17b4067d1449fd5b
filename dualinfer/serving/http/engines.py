"""The engine as the routes see it, in this process; `serving.remote` has the other one."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...engine.requests import TokenLogprobs
from ...engine.scoring import prompt_told
from ...engine.text import endings
from ...errors import DualinferError
from ...system.patience import noted, under_way
from ..health import Pulse
from ..room import is_on_host


class About(NamedTuple):
    """A model as the routes know it.

    The size of its vocabulary, the most tokens of a sequence, 0 where nothing bounds them, and the
    ids that end a text by its generation config.
    """

    vocab: int
    max_tokens: int
    ends: list[int]


class State(NamedTuple):
    """The state of an engine: sequences with a slot, those that wait, and the number of slots.

    `asked` and `found` count tokens of prompts, and those that were not read again. `trouble` is
    why it does not serve; None where it does. `preemptions` counts how often sequences gave their
    slots to urgent ones, or blocks of the cache to others. `cache` is the share of its blocks that
    sequences have; None where each slot has a place of its own.
    """

    live: int
    waiting: int
    slots: int
    asked: int = 0
    found: int = 0
    trouble: str | None = None
    preemptions: int = 0
    cache: float | None = None


class Handle(Protocol):
    """One sequence under way, as `generate_async` gives it."""

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the prompt."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: "stop", "length" or "cancelled"."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read again; known once the first token has come."""
        ...

    async def accepted(self) -> None:
        """Wait until the engine has taken it; raises where it is refused."""
        ...

    async def arrived(self) -> list[int]:
        """All tokens that have come since, at least one; none at the end."""
        ...

    def logprobs_of(self, index: int) -> TokenLogprobs:
        """The log-probabilities of a new token that has come, by its place."""
        ...

    def cancel(self) -> None:
        """End it within a step."""
        ...


class ServedEngine(Protocol):
    """Answers what the routes ask, wherever it runs."""

    @property
    def about(self) -> About:
        """The facts of its model."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or a processor."""
        ...

    def start(self, ids: list[int], arguments: Mapping[str, Any], count: int) -> list[Handle]:
        """Queue `count` sequences that continue a prompt, each a return index of one seed.

        `arguments` are those of `generate_async` as JSON has them. Called from any thread.
        """
        ...

    async def prompt_logprobs(self, ids: list[int], likely: int) -> list[TokenLogprobs | None]:
        """As `engine.prompt_logprobs`; it ends between two pieces where nobody waits any more."""
        ...

    async def embed(self, texts: Sequence[str | list[int]], size: int | None) -> np.ndarray:
        """Vectors float32 [N, size] of a few texts, or their ids; None is the model's own size."""
        ...

    def state(self) -> State:
        """The engine's state now."""
        ...


class LocalEngine:
    """A fused engine of this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        config = getattr(engine, "generation_config", None)
        vocab, most = engine.runner.spec.vocab, engine.report().max_tokens
        self.about = About(vocab, most, endings(config))
        self._on_host = is_on_host(engine.runner)

    @property
    def tokenizer(self) -> Any:
        """See `ServedEngine`."""
        return self._engine.tokenizer

    def start(self, ids: list[int], arguments: Mapping[str, Any], count: int) -> list[Handle]:
        """See `ServedEngine`; greedy sequences are the same, each by itself."""
        make = self._engine.generate_async
        if count == 1 or not arguments["do_sample"]:
            return [make(ids, **arguments) for _ in range(count)]
        return make(ids, **arguments, num_return_sequences=count)

    async def prompt_logprobs(self, ids: list[int], likely: int) -> list[TokenLogprobs | None]:
        """See `ServedEngine`."""
        rows, pieces = [], self._engine.prompt_told_pieces(ids)
        while (piece := await asyncio.to_thread(self._whole, next, pieces, None)) is not None:
            rows.append(piece)
        return prompt_told(rows, likely)

    async def embed(self, texts: Sequence[str | list[int]], size: int | None) -> np.ndarray:
        """See `ServedEngine`."""
        embed = self._engine.embed
        return await asyncio.to_thread(self._whole, embed, list(texts), truncate_dim=size)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The engine's turn, for a pass over whole texts, which holds up steps.

        Behind an error that is none of dualinfer's it asks whether the device computes at all.
        """
        try:
            with self._engine.turns, noted("whole texts are read"):
                yield
        except DualinferError:
            raise
        except Exception:
            self._engine.look()
            raise

    def _whole(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The result of a function that makes such a pass."""
        with self.whole():
            return function(*arguments, **named)

    def pulse(self) -> Pulse:
        """Its work of this moment, and how long it has been silent."""
        now = self._engine.traffic()
        return Pulse(now.silent, under_way(), now.reading, self._on_host, now.lost)

    def state(self) -> State:
        """See `ServedEngine`."""
        now, counts = self._engine.traffic(), self._engine.prefix_counts()
        trouble = self.pulse().trouble
        found = counts.asked, counts.found, trouble, now.preemptions, now.cache
        return State(now.live, now.waiting, now.slots, *found)
