"""Memory that an engine reserves for many sequences at once."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ..backends.base import GRAIN, Pool, Runner
from ..backends.blocks import lying
from ..errors import ArgumentError, UnsupportedError, shown
from ..model.spec import ModelSpec
from ..serving.room import (
    MOST_SLOTS,
    MOST_TOKENS,
    block_bytes,
    fitting_tokens,
    free_for_pool,
    is_on_host,
    make_room,
    pool_for,
)
from .base import InferenceEngine
from .driver import Driver
from .loop import Loop
from .pausing import SWAP_GIB

AUTO = "auto"


class Reserved(NamedTuple):
    """Reserved room: `slots` sequences of `tokens` tokens each, new ones included.

    What sequences leave is kept in `spare` slots more, for prompts that begin alike. Where all
    share one cache it has `cache_tokens` for them together, else 0.
    """

    slots: int
    tokens: int
    spare: int
    cache_tokens: int = 0


class PrefixCounts(NamedTuple):
    """Tokens of prompts so far, and those of them that were there and were not read again."""

    asked: int
    found: int


class RoomCalls(InferenceEngine):
    """Calls of a fused engine that reserve room for many requests."""

    _loop: Loop
    _driver: Driver | None = None
    _opened: tuple[Pool, bool, bool, int] | None = None  # what the loop's pool was opened with

    @property
    def _longest(self) -> int:
        """Most prompt plus new tokens of a call, whatever is reserved."""
        raise NotImplementedError

    def reserve(
        self,
        slots: int | None = None,
        tokens: int | None = None,
        *,
        cache_tokens: int | Literal["auto"] | None = None,
        memory_fraction: float | None = None,
        prefix_cache: bool = True,
        swap_space: float = SWAP_GIB,
        prepare: bool | None = None,
    ) -> Reserved:
        """Reserve memory for `slots` sequences of `tokens` tokens each, prompt and new ones.

        A cache then neither grows nor is copied, and few programs serve all sizes: `prepare` makes
        them now (unset: on a GPU). Unset, `tokens` are the model's most, at most 8,192, and `slots`
        as many as have room, at most 256. Calls wait where all slots are taken; one that is longer
        than `tokens`, or of more sequences than `slots`, raises LengthError. With `prefix_cache` a
        prompt is not read where another one began as it does: what sequences leave is kept in
        spare slots, one for eight of the others; of recurrences it is what their states have read,
        where prompts part and at the last whole 64 tokens of each.
        Answers are as without it, to rounding. A sequence that gives its slot to one of high
        priority goes on later: what it had cached waits in `swap_space` GiB of the host's memory,
        or is read again where that is full, or 0. It replaces what was reserved before, which is
        reserved again, empty, where it fails.
        With `cache_tokens` the cache has so many tokens for all sequences together, which take them
        64 at a time as they grow: `slots` may then be many more than would fit if each had all of
        its `tokens`. Prompts that begin alike share them. Where no more are free, what was kept of
        prompts goes, and then the sequence that came last waits as one does that gives way to high
        priority. For models whose layers all keep keys and values, or a latent vector, of every
        token; those that see a window keep its last ones alone, beside these, or in their place
        where all do: room for the 4,096 tokens of a prompt's largest pass, and for a window of each
        spare slot, is then beside `cache_tokens`. "auto" is as many as have room, and what it is on
        a GPU, where neither it nor `slots` is given, for such models. What `slots`
        or `cache_tokens` take so is a `memory_fraction` of the memory that is free on the device,
        above 0 and at most 1; unset it is 0.85, and in the host's memory at most 1 GiB.
        ArgumentError where it sizes nothing: with `slots` alone, or a number of `cache_tokens`.
        UnsupportedError while a generation is under way, OutOfMemoryError where there is no room.
        Every process that shares the model must call it.
        """
        counts = ("slots", slots), ("tokens", tokens), ("cache_tokens", cache_tokens)
        for name, value in counts:
            is_auto = name == "cache_tokens" and value == AUTO
            if value is not None and not is_auto and (type(value) is not int or value < 1):
                auto = ", 'auto'" if name == "cache_tokens" else ""
                raise ArgumentError(
                    f"reserve({name}={shown(value)}): expected 1 or more{auto}, or None."
                )
        for name, value in (("prefix_cache", prefix_cache), ("prepare", prepare)):
            if type(value) is not bool and (name, value) != ("prepare", None):
                raise ArgumentError(f"reserve({name}={shown(value)}): expected True or False.")
        check_fraction(memory_fraction, slots, cache_tokens, _said)
        if type(swap_space) not in (int, float) or not 0 <= swap_space < math.inf:
            raise ArgumentError(
                f"reserve(swap_space={shown(swap_space)}): expected GiB, 0 or more."
            )
        runner, most = self.runner, self._longest
        if not runner.spec.can_generate:
            raise UnsupportedError(
                f"reserve() is for models that generate, and {runner.spec.architecture} does not."
            )
        if tokens is not None and tokens > most:
            raise ArgumentError(
                f"reserve(tokens={tokens}): the engine takes at most {most} tokens a sequence "
                "(max_out_tokens, or the model's positions)."
            )
        longest = tokens or min(most, MOST_TOKENS)
        if cache_tokens is None and slots is None and _shares(runner):
            cache_tokens = AUTO
        if cache_tokens is not None:
            _check_has_blocks(runner.spec, cache_tokens)
            if isinstance(cache_tokens, int):
                longest = _check_blocks(runner.spec, tokens, longest, cache_tokens)
        with self._turns:
            before = self._loop.pool and self._opened
            self._loop.open(None)  # its memory is free for the new one
            try:
                asked = slots or MOST_SLOTS, max(longest - 1, 1), prefix_cache, None
                most = pool_for(runner, *asked, cache_tokens=GRAIN)
                block = block_bytes(runner, most) if cache_tokens == AUTO else []
                sizes = {"free": free_for_pool(runner, memory_fraction), "block": block}
                said = self._turns.peers.tell("Reserving room", **sizes)
                free = None if None in said["free"] else min(said["free"])
                if cache_tokens == AUTO:
                    each = [max(sizes) for sizes in zip(*said["block"], strict=True)]
                    least = max((tokens or 1) - 1, 1)
                    cache_tokens = fitting_tokens(runner, most, free, each, least)
                    longest = _check_blocks(runner.spec, tokens, longest, cache_tokens)
                each = max(longest - 1, 1)  # the last is not fed back
                pool = pool_for(runner, slots, each, prefix_cache, free, cache_tokens)
                pool = replace(pool, saved=swap_space > 0 and runner.spec.keeps_beginnings)
                prepares = not is_on_host(runner) if prepare is None else prepare
                opened = pool, prepares, prefix_cache, int(swap_space * 2**30)
                self._loop.open(*opened)
                self._opened = opened
            except BaseException:
                if before is not None:
                    self._loop.open(*before)
                raise
            finally:
                self._told_driver()
        return Reserved(pool.slots, pool.tokens + 1, pool.spare, pool.blocks * GRAIN)

    def unreserve(self) -> None:
        """Give back what was reserved: the cache grows as it is needed.

        UnsupportedError while a generation is under way.
        """
        _ = self.runner
        with self._turns:
            self._loop.open(None)
            self._told_driver()

    def prefix_counts(self) -> PrefixCounts:
        """Count how much of the prompts was found since room was reserved; zeros without room."""
        sharing = self._loop.sharing
        return PrefixCounts(0, 0) if sharing is None else PrefixCounts(*sharing.counts)

    @property
    def _pool(self) -> Pool | None:
        return self._loop.pool

    def _told_driver(self) -> None:
        if self._driver is not None:
            room = make_room(self._runner, self._pool)
            self._driver.set_room(*room, pauses=self._pool is not None)

    def _reserved_note(self) -> tuple[str, ...]:
        """A note on the reserved room, for people."""
        if (pool := self._pool) is None:
            return ()
        kept = f", and {pool.spare} to keep what prompts begin with" if pool.spare else ""
        if pool.blocks:
            kept = f", which share a cache of {pool.blocks * GRAIN:,} tokens"
            if (lies := lying(pool, self.runner.spec)).near:
                kept += f"; layers that see {lies.window:,} have room for {lies.near * GRAIN:,}"
        return (f"room is reserved for {pool.slots} sequences of {pool.tokens + 1:,} tokens{kept}",)


def _shares(runner: Runner) -> bool:
    """True if sequences share one cache where nobody says anything else."""
    knows = runner.spec.keeps_places and runner.free_bytes() is not None
    return knows and not is_on_host(runner)


def check_fraction(
    share: Any, slots: int | None, cache_tokens: int | str | None, said: Callable[..., str]
) -> None:
    """Raise ArgumentError for a `memory_fraction` of `reserve` that is none, or sizes nothing.

    `said` shows an argument of `reserve` with its value, or alone.
    """
    if share is None:
        return
    given = said("memory_fraction", share)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ArgumentError(f"{given}: expected a share of what is free, above 0 and at most 1.")
    if cache_tokens != AUTO and (slots or cache_tokens):
        by = said("cache_tokens", cache_tokens) if cache_tokens else said("slots", slots)
        raise ArgumentError(
            f"{given} is the share of memory that is taken where nothing else says how much, and "
            f"{by} does. Leave {said('memory_fraction')} unset, or pass "
            f"{said('cache_tokens', AUTO)}, or neither {said('slots')} nor {said('cache_tokens')}."
        )


def _said(name: str, value: Any = None) -> str:
    """An argument of `reserve` as Python has it."""
    return name if value is None else f"{name}={shown(value)}"


def _check_has_blocks(spec: ModelSpec, cache_tokens: int | str) -> None:
    """Raise UnsupportedError where sequences cannot share a cache."""
    if not spec.keeps_places:
        raise UnsupportedError(
            f"reserve(cache_tokens={shown(cache_tokens)}): sequences share a cache where what it "
            "has of a token stands alone, and is read again as it was. Layers of "
            f"{spec.architecture} keep states, read an encoder, or turn by the sequence's length. "
            "Leave it unset."
        )


def _check_blocks(spec: ModelSpec, tokens: int | None, longest: int, cache_tokens: int) -> int:
    """The most tokens of a sequence that has room in a cache of others, `tokens` if they are given.

    ArgumentError where it has none. Its last token is not cached, blocks are whole, and layers may
    forget what lies behind a window.
    """
    blocks = -(-cache_tokens // GRAIN)
    asked = tokens or longest
    most = lying(Pool(1, max(asked - 1, 1), blocks=blocks), spec).most(max(asked - 1, 1))
    if tokens is None:
        return longest if most <= blocks else min(longest, cache_tokens)
    if most > blocks:
        raise ArgumentError(
            f"reserve(cache_tokens={cache_tokens}): one sequence of {tokens} tokens must have room "
            f"in it, which caches {min(tokens - 1, most * GRAIN)} of them at a time, and there "
            f"would be {blocks * GRAIN}. Reserve more, or fewer tokens a sequence."
        )
    return tokens
