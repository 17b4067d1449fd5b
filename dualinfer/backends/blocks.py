"""A book of the blocks of a pool: whose each one is, and which are free. Pure.

Processes that make the same calls in the same order have the same book.
"""

from collections.abc import Mapping

import numpy as np

from ..errors import OutOfMemoryError, StepError
from .base import GRAIN


class Blocks:
    """The `count` blocks of GRAIN tokens that the slots of a pool share, and the slots' `table`.

    `serving` slots have sequences; the `spare` ones behind them only hold on to what others have
    made. A block may be of several slots, and then nobody writes to it. A place of the table that
    has no block names one more, number `count`: steps write there what no sequence reads.
    """

    def __init__(self, count: int, serving: int, spare: int, tokens: int) -> None:
        self.count, self._serving = count, serving
        shape = serving + spare, self.of(tokens)
        self.table = np.full(shape, count, np.int32)
        self.is_changed = True  # since the device was shown it
        self._held = [0] * shape[0]  # blocks of each slot
        self._free = list(range(count))[::-1]  # the last one is next
        self._users = np.zeros(count, np.int32)
        self._keepers = np.zeros(count, np.int32)  # spare ones among the users

    @staticmethod
    def of(tokens: int) -> int:
        """The number of blocks of so many tokens."""
        return -(-tokens // GRAIN)

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

    def alone(self, slot: int) -> int:
        """The number of blocks that would be free if a slot gave up its own."""
        return int((self._users[self._row(slot)] == 1).sum())

    def more(self, wanted: Mapping[int, int]) -> int:
        """The number of blocks that slots lack to have room for so many tokens each."""
        return sum(max(0, self.of(tokens) - self._held[slot]) for slot, tokens in wanted.items())

    def cover(self, wanted: Mapping[int, int]) -> None:
        """Give slots the blocks that they lack to have room for so many tokens each.

        OutOfMemoryError where too few are free, and then nobody gets one.
        """
        if (more := self.more(wanted)) > self.free:
            raise OutOfMemoryError(
                f"{more} more blocks of {GRAIN} cached tokens are needed, and {self.free} of "
                f"{self.count} are free. Release other sequences first, or open a pool of more."
            )
        for slot, tokens in wanted.items():
            while self._held[slot] < self.of(tokens):
                self._put(slot, self._free.pop())

    def share(self, source: int, target: int, tokens: int) -> None:
        """Let a slot have the blocks of another one's first `tokens`, whole ones, and no others.

        StepError where the other has fewer.
        """
        blocks = self._row(source)[: tokens // GRAIN].tolist()
        if tokens % GRAIN or len(blocks) < tokens // GRAIN:
            raise StepError(
                f"{tokens} tokens of slot {source} were to be shared, and it has {len(blocks)} "
                f"whole blocks of {GRAIN}."
            )
        if source == target:
            return
        self.drop(target)
        for block in blocks:
            self._put(target, block)

    def drop(self, slot: int) -> None:
        """Take all blocks from a slot; those that nobody else has are free."""
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
