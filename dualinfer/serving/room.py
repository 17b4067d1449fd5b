"""The number of sequences that a runner has room for."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..backends.base import GRAIN, Pool, Runner
from ..backends.blocks import lying
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
    held = [0, 0]

    def fits(slots: int, tokens: int) -> bool:
        room, free = (max(slots, held[0]), max(tokens, held[1])), runner.free_bytes()
        if free is not None:  # the cache as it is goes where it grows
            most = int(_SHARE * (free + runner.cache_bytes))
            if runner.cache_bytes_for(*room) > most:
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
        pool = Pool(slots, tokens, hides=True, spare=slots if shares else 0, blocks=blocks)
        if not lying(pool, runner.spec).near:
            return pool
        # The last tokens of a sequence are shared as a state is, at one length, and take room.
        return replace(pool, spare=max(2, -(-slots // _SPARE)) if shares else 0)
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


def block_bytes(runner: Runner, pool: Pool) -> list[int]:
    """Bytes of a block of GRAIN cached tokens: in all layers, and in those that forget.

    Of a pool of blocks; the first is without what the second has.
    """
    forgets = lying(pool, runner.spec).forgets
    every = -(-runner.cache_bytes_for(1, _MANY) * GRAIN // _MANY)
    near = runner.block_bytes(forgets) if forgets else 0
    return [every - near, near]


def fitting_tokens(
    runner: Runner,
    pool: Pool,
    free: int | None,
    sizes: Sequence[int],
    least: int,
) -> int:
    """Cached tokens that have room in `free` bytes, in blocks of so many bytes: whole ones.

    No more than the slots of `pool` can come to need; some more are kept of prompts, where it has
    spare ones. The slots' state, the tables of their blocks and the blocks that nobody reads are in
    these bytes, too; `sizes` as `block_bytes` gives them. UnsupportedError where it is not known
    how much is free, OutOfMemoryError where it has no room for `least` cached tokens.
    """
    if free is None:
        raise UnsupportedError(
            "cache_tokens='auto' takes what is free, and this device does not say how much that "
            "is. Pass a number of tokens."
        )
    spec, slots = runner.spec, pool.slots
    lies = lying(pool, spec)
    each, needed = lies.most(pool.tokens), lies.most(least)
    kept = 0 if lies.all_forget or not pool.spare else -(-slots // _SPARE)
    rows = slots + pool.spare  # of the table, which each layer has while it is made
    table = rows * -(-pool.tokens // GRAIN) * np.dtype(np.int32).itemsize
    state = slots * _state_bytes(runner) + table * len(spec.caches)

    def bytes_of(blocks: int) -> int:
        near = lying(replace(pool, blocks=blocks), spec).near
        return state + sizes[0] * (blocks + 1) + sizes[1] * (near + 1)

    if bytes_of(needed) > free:
        raise OutOfMemoryError(
            f"A cache of {least} tokens for {slots} sequences has no room: with their state it "
            f"needs {bytes_of(needed):,} bytes, {sum(sizes):,} of them for each {GRAIN} tokens and "
            f"{bytes_of(needed) - needed * sum(sizes):,} whatever its size, and {max(free, 0):,} "
            "may be taken. Free memory of the device, ask for fewer slots or tokens, or set a "
            "larger memory_fraction."
        )
    most = range(needed, (slots + kept) * each + 1)
    return most[bisect_right(most, free, key=bytes_of) - 1] * GRAIN


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
