"""Books of the blocks of a pool: whose each one is, and which are free. Pure.

Processes that make the same calls in the same order have the same books. Layers that see all tokens
of a sequence have one table, and those that see a window of it have another: there a slot has the
blocks of its last tokens alone, and those behind its window serve others. What slots come to need
of these has an end, and there is as much, so that nobody waits for it, if no pass of drafts has
more than AHEAD tokens of a slot.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError, OutOfMemoryError, StepError
from ..model.spec import ModelSpec
from .base import GRAIN, MAX_STEPS, Pool

PANEL = 4096  # tokens of the largest pass that reads pieces into a pool
AHEAD = 2 * MAX_STEPS  # tokens that a slot may have behind what it has taken


class Lying(NamedTuple):
    """How a pool's blocks lie: `near` ones for the last tokens of slots, 0 where no layer forgets.

    These are in the caches numbered `forgets`, whose queries see `window` tokens at most. `rest`
    blocks are what a slot has of them between passes, at most. Where no layer sees all tokens, a
    sequence is counted by these, and never needs more.
    """

    near: int = 0
    window: int = 0
    forgets: tuple[int, ...] = ()
    rest: int = 0
    all_forget: bool = False

    def most(self, tokens: int) -> int:
        """The number of counted blocks that a sequence of so many cached tokens comes to need."""
        own = -(-tokens // GRAIN)
        return min(own, self.rest) if self.all_forget else own


def lying(pool: Pool, spec: ModelSpec) -> Lying:
    """How the blocks of a pool lie for a model.

    Layers forget where that leaves less than the pool's tokens, and prompts are read in pieces.
    """
    if not pool.blocks:
        return Lying()
    is_latent = any(a.latent is not None for a in spec.attentions)  # which reads by rows
    sights = spec.sights if spec.reads_pieces and not is_latent else ()
    found = {
        number: seen
        for number, seen in enumerate(sights)
        if seen is not None and rest_of(seen) * GRAIN < pool.tokens
    }
    made = Lying()
    if found:
        window = max(found.values())
        rest, kept = rest_of(window), -kept_from(0, window)  # the latter of whole grains
        beside = pool.spare * kept + PANEL // GRAIN
        all_forget = len(found) == len(sights)
        # A near block of a slot was made with a far one, which it has for as long.
        near = min(pool.blocks, pool.slots * rest + beside)
        near = pool.blocks + beside if all_forget else near
        near = min(near, (pool.slots + pool.spare) * -(-pool.tokens // GRAIN))
        made = Lying(near, window, tuple(found), rest, all_forget)
    return made


def checked(pool: Pool | None, spec: ModelSpec) -> Lying:
    """As `lying`; ArgumentError where one sequence has no room in the pool's blocks."""
    if pool is None:
        return Lying()
    made = lying(pool, spec)
    if pool.blocks and pool.blocks < made.most(pool.tokens):
        raise ArgumentError(
            f"Pool(blocks={pool.blocks}): {pool.tokens} tokens of one sequence take more."
        )
    return made


def seen_from(tokens: int, window: int) -> int:
    """The place of the first block that the query behind so many tokens sees; below 0 for all."""
    return (tokens + 1 - window) // GRAIN


def kept_from(tokens: int, window: int) -> int:
    """The place of the first block that a slot of so many tokens has yet; below 0 for all.

    The query behind the last whole grain of them sees it, as whole grains are saved and shared.
    """
    return seen_from(tokens - (GRAIN - 1), window)


@cache
def rest_of(window: int) -> int:
    """The most blocks that a slot has of its last tokens, with AHEAD more, between passes."""
    return max(-(-(at + AHEAD) // GRAIN) - kept_from(at, window) for at in range(GRAIN))


def books_of(pool: Pool, spec: ModelSpec) -> "Blocks | None":
    """New books of the pool's blocks; None where it does not count in them."""
    if not pool.blocks:
        return None
    lies = lying(pool, spec)
    near = None
    if lies.near:
        near = NearBlocks(lies.near, pool.slots + pool.spare, pool.tokens, lies.window)
    most = lies.rest if lies.all_forget else 0
    return Blocks(pool.blocks, pool.slots, pool.spare, pool.tokens, near, most)


class Blocks:
    """The `count` blocks of GRAIN tokens that the slots of a pool share, and the slots' `table`.

    `serving` slots have sequences; the `spare` ones behind them only hold on to what others have
    made. A block may be of several slots, and then nobody writes to it. A place of the table that
    has no block names one more, number `count`: steps write there what no sequence reads.
    `near` are those of layers that forget. Where all layers do, this book only counts: a slot has
    at most `most` blocks, each for itself, and what is spare has none.
    """

    def __init__(
        self,
        count: int,
        serving: int,
        spare: int,
        tokens: int,
        near: "NearBlocks | None" = None,
        most: int = 0,
    ) -> None:
        self.count, self._serving, self.near, self.counts_alone = count, serving, near, most > 0
        self._most = most or count
        shape = serving + spare, -(-tokens // GRAIN)
        self.table = np.full(shape, count, np.int32)
        self.is_changed = True  # since the device was shown it
        self._held = [0] * shape[0]  # blocks of each slot
        self._free = list(range(count))[::-1]  # the last one is next
        self._users = np.zeros(count, np.int32)
        self._keepers = np.zeros(count, np.int32)  # spare ones among the users

    def of(self, tokens: int) -> int:
        """The number of blocks of so many tokens."""
        return min(-(-tokens // GRAIN), self._most) if self.counts_alone else -(-tokens // GRAIN)

    @property
    def free(self) -> int:
        """The number of blocks that nobody has."""
        return len(self._free)

    @property
    def kept(self) -> int:
        """The number of blocks that spare slots alone have, which may give them up."""
        return int(((self._users > 0) & (self._users == self._keepers)).sum())

    @property
    def usage(self) -> float:
        """The share of blocks that sequences have."""
        return 1 - (self.free + self.kept) / self.count

    def held(self, slot: int) -> int:
        """The number of blocks that a slot has."""
        return self._held[slot]

    def served(self, slot: int, tokens: int) -> int:
        """The number of blocks of a slot's first `tokens` that a serving slot has."""
        row = self._row(slot)[: tokens // GRAIN]
        return int((self._users[row] > self._keepers[row]).sum())

    def shared(self, slot: int, other: int) -> int:
        """The number of blocks with which both of two slots begin."""
        rows = self._row(slot), self._row(other)
        both = min(map(len, rows))
        differ = np.flatnonzero(rows[0][:both] != rows[1][:both])
        return int(differ[0]) if len(differ) else both

    def alone(self, slot: int) -> int:
        """The number of blocks that would be free if a slot gave up its own."""
        return int((self._users[self._row(slot)] == 1).sum())

    def more(self, wanted: Mapping[int, int]) -> int:
        """The number of blocks that slots lack to have room for so many tokens each."""
        return sum(max(0, self.of(tokens) - self._held[slot]) for slot, tokens in wanted.items())

    def cover(
        self, wanted: Mapping[int, int], near: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        """Give slots the blocks that they lack to have room for so many tokens each.

        Those of layers that forget with them, if asked: see `NearBlocks.cover`. OutOfMemoryError
        where too few are free, and then nobody gets one.
        """
        self._check(self.more(wanted), self.free)
        if near is not None and self.near is not None:
            self.near.cover(near)
        for slot, tokens in wanted.items():
            while self._held[slot] < self.of(tokens):
                self._put(slot, self._free.pop())

    def _check(self, more: int, free: int) -> None:
        """Raise OutOfMemoryError where more blocks are needed than are free."""
        if more > free:
            raise OutOfMemoryError(
                f"{more} more blocks of {GRAIN} cached tokens are needed, and {free} of "
                f"{self.count} are free. Release other sequences first, or open a pool of more."
            )

    def share(self, source: int, target: int, tokens: int) -> None:
        """Let a slot have the blocks of another one's first `tokens`, whole ones, and no others.

        StepError where the other has fewer, OutOfMemoryError where each counts its own, and too few
        are free. Nothing changes then.
        """
        blocks = self._row(source)[: tokens // GRAIN].tolist()
        counts = self.counts_alone and target < self._serving and source != target
        if counts:
            self._check(self.of(tokens), self.free + self._held[target])
        elif not self.counts_alone and (tokens % GRAIN or len(blocks) < tokens // GRAIN):
            raise StepError(
                f"{tokens} tokens of slot {source} were to be shared, and it has {len(blocks)} "
                f"whole blocks of {GRAIN}."
            )
        if self.near is not None:
            self.near.share(source, target, tokens)
        if counts:
            self._drop(target)
            self.cover({target: tokens})
        elif not self.counts_alone and source != target:
            self._drop(target)
            for block in blocks:
                self._put(target, block)

    def drop(self, slot: int) -> None:
        """Take all blocks from a slot; those that nobody else has are free."""
        self._drop(slot)
        if self.near is not None:
            self.near.drop(slot)

    def _drop(self, slot: int) -> None:
        row = self._row(slot)
        self._users[row] -= 1
        if slot >= self._serving:
            self._keepers[row] -= 1
        self._free += [block for block in row[::-1].tolist() if not self._users[block]]
        self.is_changed = self.is_changed or len(row) > 0
        row[:] = self.count
        self._held[slot] = 0

    def _row(self, slot: int) -> np.ndarray:
        return self.table[slot, : self._held[slot]]

    def _put(self, slot: int, block: int) -> None:
        """Add a block to those of a slot."""
        self.table[slot, self._held[slot]] = block
        self._held[slot] += 1
        self._users[block] += 1
        if slot >= self._serving:
            self._keepers[block] += 1
        self.is_changed = True


class NearBlocks:
    """The `count` blocks of GRAIN tokens of layers whose queries see `window` tokens at most.

    Each of `slots` has those of its last tokens, by a `table` as that of `Blocks`; a place of what
    is behind them is -1, where nothing is read or written.
    """

    def __init__(self, count: int, slots: int, tokens: int, window: int) -> None:
        self.count, self._window = count, window
        self.table = np.full((slots, -(-tokens // GRAIN)), count, np.int32)
        self.is_changed = True  # since the device was shown it
        self._held = [(0, 0)] * slots  # the first place with a block, and the one behind the last
        self._free = list(range(count))[::-1]  # the last one is next
        self._users = np.zeros(count, np.int32)

    @property
    def free(self) -> int:
        """The number of blocks that nobody has."""
        return len(self._free)

    def held(self, slot: int) -> tuple[int, int]:
        """The places of a slot's row that have blocks: the first one, and the one behind them."""
        return self._held[slot]

    def first(self, tokens: int) -> int:
        """See `kept_from`."""
        return max(0, kept_from(tokens, self._window))

    def cover(self, wanted: Mapping[int, tuple[int, int]]) -> None:
        """Give slots room for a pass, and take what neither it nor a later one sees or writes.

        `wanted` has the token of each slot where the pass begins, and the one where it ends.
        OutOfMemoryError where too few are free, and then nothing changes: many slots with many
        drafts each.
        """
        after = {slot: self._places_of(slot, *ends) for slot, ends in wanted.items()}
        more = sum(len(range(end, stop)) for _, end, stop in after.values())
        if more > self.free and more > (free := self._free_after(after)):
            raise OutOfMemoryError(
                f"{more} more blocks of {GRAIN} cached tokens are needed by layers that see "
                f"{self._window} tokens, and {free} of {self.count} are free. Pass fewer "
                "sequences at a time, or ask for fewer drafts."
            )
        for slot, (first, _, stop) in after.items():
            if first < self._held[slot][0]:
                self.drop(slot)
            self._forget(slot, first, stop)
        for slot, (first, end, stop) in after.items():
            self._put(slot, first, ((at, self._free.pop()) for at in range(end, stop)))

    def _places_of(self, slot: int, start: int, stop: int) -> tuple[int, int, int]:
        """The places of a slot's row that have blocks in a pass: first, end of its own, and end.

        It keeps none where the pass begins before them: what it is to see is read again.
        """
        first, end = self._held[slot]
        if start // GRAIN < first:
            first = end = 0
        first, stop = max(first, self.first(start)), min(-(-stop // GRAIN), self.table.shape[1])
        return first, max(first, min(end, stop)), stop

    def _free_after(self, after: Mapping[int, tuple[int, int, int]]) -> int:
        """The number of blocks that are free once slots have what they keep in a pass alone."""
        left = self._users.copy()
        for slot, (first, end, _) in after.items():
            given = [at for at in range(*self._held[slot]) if not first <= at < end]
            left[self.table[slot, given]] -= 1
        return int((left == 0).sum())

    def share(self, source: int, target: int, tokens: int) -> None:
        """Let a slot have what another one has of its last of `tokens`, whole grains.

        StepError where the other has them no more.
        """
        (first, end), stop = self._held[source], tokens // GRAIN
        if tokens % GRAIN or first > max(0, seen_from(tokens, self._window)) or end < stop:
            raise StepError(
                f"{tokens} tokens of slot {source} were to be shared, and where layers see "
                f"{self._window} it has blocks of {first * GRAIN} to {end * GRAIN}."
            )
        if source == target:
            return
        first = max(first, self.first(tokens))
        blocks = self.table[source, first:stop].tolist()
        self.drop(target)
        self._behind(target, first)
        self._put(target, first, enumerate(blocks, first))

    def drop(self, slot: int) -> None:
        """Take all blocks from a slot; those that nobody else has are free."""
        first, end = self._held[slot]
        self._give_back(self.table[slot, first:end].tolist())
        self.is_changed = self.is_changed or end > 0
        self.table[slot] = self.count
        self._held[slot] = 0, 0

    def _forget(self, slot: int, before: int, behind: int) -> None:
        """Take the blocks of a slot that lie before a place of its row, or from another one on."""
        first, end = self._held[slot]
        if first <= behind < end:
            self._give_back(self.table[slot, behind:end].tolist())
            self.table[slot, behind:end] = self.count
            self._held[slot], self.is_changed = (first, behind), True
            end = behind
        if before > first:
            self._give_back(self.table[slot, first : min(before, end)].tolist())
            self._behind(slot, before)

    def _behind(self, slot: int, first: int) -> None:
        """Note that a slot has nothing before a place of its row."""
        self.table[slot, :first] = -1
        self._held[slot] = first, max(first, self._held[slot][1])
        self.is_changed = True

    def _give_back(self, blocks: list[int]) -> None:
        self._users[blocks] -= 1
        self._free += [block for block in reversed(blocks) if not self._users[block]]

    def _put(self, slot: int, first: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Add blocks to those of a slot, each at its place of the row."""
        for at, block in pairs:
            self.table[slot, at] = block
            self._users[block] += 1
            self._held[slot] = first, at + 1
            self.is_changed = True
