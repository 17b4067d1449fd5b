"""The requests that an engine is sent after another has died, and who is to blame for it: pure.

Nobody knows which request an engine died of. After the first death all come back at once. Those
that were there at two deaths come back one by one, the ones with the most deaths first: nothing
else is sent before one has come past the place where the engine died. A death is then counted for
that one alone, and one that engines die of with nothing beside it is not tried again. Who kills at
no fixed place is watched for longer and longer.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

MOST_DEATHS = 3  # of a request; the last one with nothing beside it
_APART = 2  # deaths after which a request comes back apart
_PAST = 32  # new tokens that are past the place: more than an engine is ahead of what it has told
_LONGER = 4  # times that, for each death more


class Work(Protocol):
    """A sequence, or a call that gives one result."""

    @property
    def has_ended(self) -> bool:
        """True if nothing comes of it any more."""
        ...

    @property
    def size(self) -> int:
        """The new tokens that have come."""
        ...


class Party:
    """Holds what is sent together: the sequences of one prompt, or one call."""

    def __init__(self) -> None:
        self.works: list[Any] = []  # each a Work
        self.asked: Any = None  # by which it is known again
        self.deaths = 0
        self._sizes: list[int] | None = None  # when it was sent

    @property
    def is_sent(self) -> bool:
        """True if the engine that there is has it."""
        return self._sizes is not None

    @property
    def has_ended(self) -> bool:
        """True if nothing of it is left."""
        return all(work.has_ended for work in self.works)

    def send(self) -> None:
        """It goes to an engine."""
        self._sizes = [work.size for work in self.works]

    def take_back(self) -> None:
        """Its engine is gone."""
        self._sizes = None

    def _grown(self) -> list[float]:
        """New tokens of each work since it was sent; endlessly many of one that has ended."""
        sizes = zip(self.works, self._sizes or (), strict=False)
        return [math.inf if x.has_ended else x.size - size for x, size in sizes]

    @property
    def has_begun(self) -> bool:
        """True if an engine that it was sent has brought something of it."""
        return any(self._grown())

    @property
    def has_passed(self) -> bool:
        """True once it has come past the place where an engine died, or has ended."""
        past = _PAST * _LONGER ** max(0, self.deaths - _APART)
        return min(self._grown(), default=math.inf) >= past


class Line:
    """Holds what is not sent yet, in order, and who is watched."""

    def __init__(self) -> None:
        self._held: deque[Party] = deque()
        self._known: list[Party] = []  # that were under way when another engine began
        self._watched: Party | None = None

    @property
    def is_held(self) -> bool:
        """True if something waits for the one that is watched."""
        return bool(self._held)

    def put(self, party: Party) -> None:
        """One more, behind the others."""
        self._held.append(party)

    def begin(self, parties: Iterable[Party]) -> None:
        """There is another engine, which has none of these; they are in the order they came in."""
        self._known = [*parties]
        by_deaths = sorted(self._known, key=lambda x: -x.deaths if x.deaths >= _APART else 0)
        self._held, self._watched = deque(by_deaths), None

    def sent(self) -> Iterator[Party]:
        """Send the parties that may be sent now, and give each."""
        while self._held:
            if self._watched is not None and not self._watched.has_passed:
                return
            party = self._held.popleft()
            if party.has_ended:
                continue
            party.send()
            self._watched = party if party.deaths >= _APART else None
            yield party

    def blame(self, parties: Sequence[Party]) -> Party | None:
        """An engine has died that was at these; the one of them that is not to be tried again.

        The others have nothing to do with its deaths.
        """
        watched = self._watched
        if watched is not None and watched in parties and not watched.has_passed:
            watched.deaths += 1
        else:
            for party in parties:
                party.deaths += 1
        if len(parties) != 1 or parties[0].deaths < MOST_DEATHS:
            return None
        for party in self._known:
            if party is not parties[0]:
                party.deaths = 0
        return parties[0]
