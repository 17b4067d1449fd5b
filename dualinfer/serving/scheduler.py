"""The choice of sequences that are under way: pure, without a clock, a thread or a framework."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

State = Literal["new", "waiting", "live", "ended"]
PROMPTS = 8192  # tokens of prompts that are let in at a time, so that the first need not wait
PAUSES = 3  # of one entry, so that it ends however many urgent ones come
_PASSED = 32  # urgent entries that are let in before one that came earlier and is not
_CHUNK_SECONDS, _MOST_STEPS = 0.004, 8


@dataclass(eq=False)
class Entry:
    """One sequence that waits for a slot, has one, or has ended.

    `tokens` is how many its cache may come to hold, and `prompt` how many are read first. Past its
    `deadline`, of the clock that `turn` is given, it ends. One that `may_pause` gives its slot to
    an urgent one, and waits before all others of its kind; it was `paused` so often.
    """

    tokens: int
    prompt: int
    urgent: bool = False
    deadline: float | None = None
    state: State = "new"
    is_cancelled: bool = False
    may_pause: bool = False
    paused: int = 0


class Turn(NamedTuple):
    """The entries that get a slot now, and those that end: cancelled, or past their deadline.

    Those that are `paused` wait from now on.
    """

    admitted: list[Entry]
    cancelled: list[Entry]
    expired: list[Entry]
    paused: list[Entry]


class Scheduler:
    """The queue before a bounded number of slots.

    `fits(slots, tokens)` says whether there is room for so many sequences of so many tokens, and
    `has_room(entries, leaving)` whether these may begin beside those under way, of which some
    leave. Who comes first is let in first, urgent entries before others, but not for ever; what
    does not fit waits. Where nothing is under way the first one is let in whatever it needs, so
    that it runs or fails, and nobody waits behind it for ever. An entry that was let in holds its
    slot until `end`, or until an urgent one finds none, or no room: then the last one that came and
    may pause gives way, if the scheduler `pauses`.
    """

    def __init__(self, slots: int, fits: Callable[[int, int], bool], pauses: bool = False) -> None:
        self.slots, self.fits, self.pauses = slots, fits, pauses
        self.has_room: Callable[[Sequence[Any], Sequence[Any]], bool] = lambda new, leaving: True
        self._waiting: dict[bool, deque[Entry]] = {True: deque(), False: deque()}
        self._live: dict[Entry, None] = {}  # who came last is last
        self._passed = 0  # urgent ones that were let in while others waited
        self._full: int | None = None  # sequences beside which there was no room after all

    @property
    def live(self) -> int:
        """Entries that have a slot."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Entries that wait for one."""
        return sum(map(len, self._waiting.values()))

    def submit(self, entry: Entry) -> None:
        """Queue a new entry."""
        assert entry.state == "new"
        entry.state = "waiting"
        self._waiting[entry.urgent].append(entry)

    def cancel(self, entry: Entry) -> None:
        """Let an entry end with the next turn; one that has ended stays as it is."""
        entry.is_cancelled = True

    def turn(self, now: float, others: Sequence[int] = ()) -> Turn:
        """Choose what begins and ends now. `others` are the tokens of slots that are not ours."""
        ended = [x for x in self._live if x.is_cancelled or _is_over(x, now)]
        for urgent, queue in self._waiting.items():
            ended += [x for x in queue if x.is_cancelled or _is_over(x, now)]
            kept = [x for x in queue if not (x.is_cancelled or _is_over(x, now))]
            self._waiting[urgent] = deque(kept)
        for entry in ended:
            self._end(entry)
        cancelled = [x for x in ended if x.is_cancelled]
        expired = [x for x in ended if not x.is_cancelled]
        admitted, paused = self._admit([*others, *(x.tokens for x in self._live)])
        return Turn(admitted, cancelled, expired, paused)

    def _admit(self, held: list[int]) -> tuple[list[Entry], list[Entry]]:
        """Let in who fits beside sequences that hold so many tokens each; and who gives way."""
        if self._full is not None and len(held) < self._full:
            self._full = None
        admitted: list[Entry] = []
        paused: list[Entry] = []
        pausable = [x for x in self._live if self._may_pause(x)]
        reach, read = max(held, default=0), 0
        while (queue := self._next()) is not None:
            entry, count = queue[0], len(held) + len(admitted) - len(paused) + 1
            reach = max(reach, entry.tokens)
            if admitted and read + entry.prompt > PROMPTS:
                break
            entries, leaving = [*admitted, entry], list(paused)
            while entry.urgent and len(leaving) - len(paused) < len(pausable) and count > 1:
                if count <= self.slots and self.has_room(entries, leaving):
                    break
                leaving.append(pausable[len(paused) - len(leaving) - 1])
                count -= 1
            if count > 1 and (
                self._full is not None
                or count > self.slots
                or not self.fits(count, reach)
                or not self.has_room(entries, leaving)
            ):
                break
            del pausable[len(pausable) - len(leaving) + len(paused) :]
            paused = leaving
            queue.popleft()
            read += entry.prompt
            others_wait = bool(self._waiting[False])
            self._passed = self._passed + 1 if entry.urgent and others_wait else 0
            entry.state = "live"
            self._live[entry] = None
            admitted.append(entry)
        for entry in paused:  # the last one that came is the last one of them
            del self._live[entry]
            entry.state, entry.paused = "waiting", entry.paused + 1
            self._waiting[entry.urgent].appendleft(entry)
        return admitted, paused

    def _may_pause(self, entry: Entry) -> bool:
        return self.pauses and not entry.urgent and entry.may_pause and entry.paused < PAUSES

    def _next(self) -> deque[Entry] | None:
        """The queue whose first entry is next."""
        urgent, others = self._waiting[True], self._waiting[False]
        if urgent and not (others and self._passed >= _PASSED):
            return urgent
        return others or None

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Let entries of the last turn wait again: there was no room beside those under way.

        Nobody is let in before one of these has ended.
        """
        for entry in reversed(entries):
            assert entry.state == "live"
            entry.state = "waiting"
            del self._live[entry]
            self._waiting[entry.urgent].appendleft(entry)

    def hold(self, count: int) -> None:
        """Let nobody in while `count` sequences are under way."""
        self._full = count

    def end(self, entry: Entry) -> None:
        """Free the slot of an entry that has ended or failed, or its place if it was paused."""
        assert entry.state in ("live", "waiting")
        if entry.state == "waiting":
            self._waiting[entry.urgent].remove(entry)
        self._end(entry)

    def _end(self, entry: Entry) -> None:
        self._live.pop(entry, None)
        entry.state = "ended"

    def drop(self) -> list[Entry]:
        """End every entry; those that had not ended before."""
        entries = [*self._live, *self._waiting[True], *self._waiting[False]]
        for queue in self._waiting.values():
            queue.clear()
        for entry in entries:
            self._end(entry)
        return entries


def _is_over(entry: Entry, now: float) -> bool:
    return entry.deadline is not None and now >= entry.deadline


def steps_for(seconds: float | None) -> int:
    """Steps to ask for at a time, where one takes so long; who comes or leaves waits for them."""
    if not seconds:
        return 1
    return max(1, min(_MOST_STEPS, int(_CHUNK_SECONDS / seconds)))
