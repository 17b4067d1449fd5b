"""The number of sequences that a runner has room for."""

from collections.abc import Callable

import numpy as np

from ..backends.base import GRAIN, Pool, Runner
from ..errors import OutOfMemoryError, UnsupportedError

MOST_SLOTS = 256  # above it a step is bound by arithmetic, and more gain nothing
MOST_TOKENS = 8192  # of a slot, where nobody says how many
# A cache that grows is copied, by powers of two: old and new take one and a half of the new.
_SHARE = 0.6
_SHARE_OF_POOL = 0.85  # passes and programs take the rest
_ON_HOST = 1 << 30  # bytes of a pool in the host's memory, which others use too
_SPARE = 8  # slots that serve for each spare one
_MANY = 2048  # tokens, of which those of a block are a share
_COLUMNS = 512  # bytes of a slot: its other columns of the state, and the tokens of a call's steps


def make_room(runner: Runner, pool: Pool | None) -> tuple[int, Callable[[int, int], bool]]:
    """The most slots, and whether so many sequences of so many tokens have room.

    That of a `pool` is there. A cache that grows as it is needed is as large as the most that it
    has held.
    """
    if pool is not None:
        return pool.slots, lambda slots, tokens: True
    free = runner.free_bytes()
    most = None if free is None else int(_SHARE * free)
    held = [0, 0]

    def fits(slots: int, tokens: int) -> bool:
        room = max(slots, held[0]), max(tokens, held[1])
        if most is not None and runner.cache_bytes_for(*room) > most:
            return False
        held[:] = room
        return True

    return MOST_SLOTS, fits


def pool_for(
    runner: Runner,
    slots: int | None,
    tokens: int,
    shares: bool,
    free: int | None,
    cache_tokens: int | None = None,
) -> Pool:
    """The pool of slots of so many tokens; `slots` unset: as many as have room in `free` bytes.

    A grammar finds its place in the state. Some of those that have room are spare if what prompts
    have in common is to be kept. With `cache_tokens` all slots share blocks of so many tokens; then
    those that are spare take next to nothing.
    """
    shares = shares and runner.spec.keeps_beginnings
    if cache_tokens is not None:
        blocks = -(-cache_tokens // GRAIN)
        slots = slots or min(MOST_SLOTS, blocks)
        return Pool(slots, tokens, hides=True, spare=slots if shares else 0, blocks=blocks)
    if slots is not None:
        # A state serves one length alone: that where prompts part, and that of a whole prompt.
        least = 1 if runner.spec.keeps_places else 2
        spare = max(least, -(-slots // _SPARE)) if shares else 0
        return Pool(slots, tokens, hides=True, spare=spare)
    each = MOST_SLOTS * (_SPARE + 1) // _SPARE if shares else MOST_SLOTS
    if free is not None:
        each = max(1, min(each, int(free // _slot_bytes(runner, tokens))))
    spare = each // (_SPARE + 1) if shares else 0
    return Pool(each - spare, tokens, hides=True, spare=spare)


def free_for_pool(runner: Runner, share: float | None = None) -> int | None:
    """Bytes that a pool may take where nobody says how large it is; None if unknown.

    That is a `share` of what is free, unset: the usual one, and of the host's memory no more than
    leaves room for others.
    """
    free = runner.free_bytes()
    if free is None:
        return None
    if share is not None:
        return int(share * free)
    free = int(_SHARE_OF_POOL * free)
    return min(free, _ON_HOST) if is_on_host(runner) else free


def block_bytes(runner: Runner) -> int:
    """Bytes of a block of GRAIN cached tokens in all layers."""
    return -(-runner.cache_bytes_for(1, _MANY) * GRAIN // _MANY)


def fitting_tokens(
    runner: Runner,
    slots: int,
    tokens: int,
    shares: bool,
    free: int | None,
    block: int,
    least: int,
) -> int:
    """Cached tokens that have room in `free` bytes, in blocks of so many bytes: whole ones.

    No more than slots of so many tokens can come to need; some more are kept of prompts, if it
    `shares`. The slots' state, the table of their blocks and the block that nobody reads are in
    these bytes, too. UnsupportedError where it is not known how much is free, OutOfMemoryError
    where it has no room for `least` cached tokens.
    """
    if free is None:
        raise UnsupportedError(
            "cache_tokens='auto' takes what is free, and this device does not say how much that "
            "is. Pass a number of tokens."
        )
    most = (slots + (-(-slots // _SPARE) if shares else 0)) * -(-tokens // GRAIN)
    rows = slots * (2 if shares else 1)  # of the table, which each layer has while it is made
    table = rows * -(-tokens // GRAIN) * np.dtype(np.int32).itemsize
    beside = slots * _state_bytes(runner) + table * len(runner.spec.caches) + block
    fits = (free - beside) // block
    if fits * GRAIN < least:
        needed = beside + -(-least // GRAIN) * block
        raise OutOfMemoryError(
            f"A cache of {least} tokens for {slots} sequences has no room: with their state it "
            f"needs {needed:,} bytes, {block:,} of them for each {GRAIN} tokens and {beside:,} "
            f"whatever its size, and {max(free, 0):,} may be taken. Free memory of the device, ask "
            "for fewer slots or tokens, or set a larger memory_fraction."
        )
    return min(most, fits) * GRAIN


def is_on_host(runner: Runner) -> bool:
    """True if it computes in the host's memory."""
    return "cpu" in str(runner.device).lower()


def _slot_bytes(runner: Runner, tokens: int) -> float:
    """Bytes of a slot, whose cache is no power of two; and those of its state."""
    many = 1 << (tokens - 1).bit_length()
    states, whole = (runner.cache_bytes_for(1, n) for n in (1, many))
    return max(states, whole * tokens / many) + _state_bytes(runner)


def _state_bytes(runner: Runner) -> int:
    """Bytes of a slot's state: whether it has seen each id of the vocabulary, and hides it."""
    return 2 * runner.spec.vocab + _COLUMNS
