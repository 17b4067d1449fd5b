"""A book of the prompts that a pool's slots hold, and of where a new one begins: pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..backends.base import GRAIN


class Prefixes:
    """The ids whose keys and values each slot holds, of `slots` that serve and `spare` behind them.

    Ids are int32 [T]. What a sequence leaves is kept in a spare slot, the least recently used one
    where none is free. `asked` and `found` count the tokens of prompts, and those of them that
    were there.
    """

    def __init__(self, slots: int, spare: int) -> None:
        self._spare = range(slots, slots + spare)
        self._held: dict[int, np.ndarray] = {}  # the least recently used is first
        self._by_chain: dict[int, dict[int, None]] = {}  # slots by all that they begin with
        self.asked = self.found = 0

    def longest(self, ids: np.ndarray) -> tuple[int, int]:
        """A slot that holds the most of a prompt's beginning, and how many tokens: 0 for none.

        Whole grains, and not all of the prompt: its last token is always read.
        """
        best = -1
        for key in chain(ids[:-1]):
            if (slots := self._by_chain.get(key)) is None:
                break
            best = next(iter(slots))
        return best, shared_by(self._held[best], ids) if best >= 0 else 0

    def use(self, slot: int, count: int, asked: int) -> None:
        """Note that `count` tokens of a slot serve a prompt of `asked` ones."""
        self.asked += asked
        self.found += count
        if count:
            self._held[slot] = self._held.pop(slot)

    def fill(self, slot: int, ids: np.ndarray) -> None:
        """Note that a slot holds these ids, and nothing else."""
        self.drop(slot)
        if len(ids) >= GRAIN:
            self._held[slot] = ids
            for key in chain(ids):
                self._by_chain.setdefault(key, {})[slot] = None

    def keep(self, ids: np.ndarray) -> int | None:
        """The spare slot that is to hold the ids of a sequence that ends; None if that is no use.

        One that holds a beginning of them is replaced.
        """
        if len(ids) < GRAIN or not self._spare:
            return None
        best = -1
        for key in chain(ids):
            slots = [s for s in self._by_chain.get(key, ()) if s in self._spare]
            if not slots:
                break
            best = slots[0]
        if best >= 0:
            held = self._held[best]
            both = min(len(held), len(ids))
            if (held[:both] == ids[:both]).all():
                self._held[best] = self._held.pop(best)
                if both == len(ids):
                    return None
                self.fill(best, ids)
                return best
        free = [s for s in self._spare if s not in self._held]
        slot = free[0] if free else next(s for s in self._held if s in self._spare)
        self.fill(slot, ids)
        return slot

    def kept(self) -> list[int]:
        """The spare slots that hold something, the least recently used one first."""
        return [slot for slot in self._held if slot in self._spare]

    def drop(self, slot: int) -> None:
        """Note that a slot holds nothing."""
        if (held := self._held.pop(slot, None)) is not None:
            for key in chain(held):
                slots = self._by_chain[key]
                slots.pop(slot, None)
                if not slots:
                    del self._by_chain[key]

    def clear(self) -> None:
        """Note that no slot holds anything."""
        self._held.clear()
        self._by_chain.clear()


class Snapshots:
    """The states of recurrences that `spare` slots behind `slots` others hold, and of which ids.

    A state serves a prompt only if all that it has read is the prompt's beginning. Ids are int32
    [T], whole grains. The least recently used one goes first. `asked` and `found` as `Prefixes`.
    """

    def __init__(self, slots: int, spare: int) -> None:
        self._spare = range(slots, slots + spare)
        self._held: dict[int, np.ndarray] = {}  # the least recently used is first
        self._by_chain: dict[int, int] = {}  # slots by the key of all that they have read
        self._beginnings: Counter[int] = Counter()  # how many begin so
        self.asked = self.found = 0

    def longest(self, ids: np.ndarray) -> tuple[int, int]:
        """The slot that has read the most of a prompt's beginning, and how many tokens: 0: none.

        Not all of the prompt: its last token is always read.
        """
        slots = [slot for key in chain(ids[:-1]) if (slot := self._by_chain.get(key)) is not None]
        for slot in reversed(slots):
            held = self._held[slot]
            if (held == ids[: len(held)]).all():
                return slot, len(held)
        return -1, 0

    def use(self, slot: int, count: int, asked: int) -> None:
        """See `Prefixes.use`."""
        self.asked += asked
        self.found += count
        if count:
            self._held[slot] = self._held.pop(slot)

    def beginning_with(self, key: int) -> int:
        """The number of held states whose ids have a beginning with this key of `chain`."""
        return self._beginnings[key]

    def keep(self, ids: np.ndarray) -> int | None:
        """The slot that is to hold the state behind these ids; None if it is held."""
        keys = [*chain(ids)]
        if (slot := self._by_chain.get(keys[-1])) is not None:
            self._held[slot] = self._held.pop(slot)
            return None
        free = [s for s in self._spare if s not in self._held]
        slot = free[0] if free else next(iter(self._held))
        self.drop(slot)
        self._held[slot] = ids
        self._by_chain[keys[-1]] = slot
        self._beginnings.update(keys)
        return slot

    def kept(self) -> list[int]:
        """The spare slots that hold something, the least recently used one first."""
        return [slot for slot in self._held if slot in self._spare]

    def drop(self, slot: int) -> None:
        """Note that a slot holds nothing."""
        if (held := self._held.pop(slot, None)) is not None:
            keys = [*chain(held)]
            del self._by_chain[keys[-1]]
            self._beginnings -= Counter(keys)

    def clear(self) -> None:
        """Note that no slot holds anything."""
        self._held.clear()
        self._by_chain.clear()
        self._beginnings.clear()


def cuts(keys: Sequence[int], known: Mapping[int, int]) -> list[int]:
    """Tokens of a prompt behind which a state is worth keeping: where others part, and its end.

    `keys` is its chain, and `known` how many others begin with each key.
    """
    counts = [known.get(key, 0) for key in keys] + [0]
    return [
        (i + 1) * GRAIN
        for i, (here, then) in enumerate(pairwise(counts))
        if then < here or i == len(keys) - 1
    ]


def shared_by(held: np.ndarray, ids: np.ndarray) -> int:
    """The length of a prompt's beginning that is held: whole grains, and not all of the prompt."""
    most = min(len(held), len(ids) - 1)
    same = held[:most] == ids[:most]
    return int(most if same.all() else same.argmin()) // GRAIN * GRAIN


def waits(ids: np.ndarray, count: int, reading: Iterable[np.ndarray]) -> bool:
    """True if a prompt that is being read will give more of this one than the `count` there is."""
    first = ids[: GRAIN + 1]
    if len(first) <= GRAIN:
        return False
    same = (other for other in reading if shared_by(other[:GRAIN], first))
    return any(shared_by(other, ids) > count for other in same)


def chain(ids: np.ndarray) -> Iterator[int]:
    """A key of each whole grain and all that lies before it."""
    key, ids = 0, ids.astype(np.int32, copy=False)
    for start in range(0, len(ids) - GRAIN + 1, GRAIN):
        key = hash((key, ids[start : start + GRAIN].tobytes()))
        yield key
