"""Steps that several threads ask for at about the same time, and one of them takes for all."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .sequence import Live

# Seconds between two who come, for which who leads waits: not less than Python's own between two
# threads that compute.
_LEAST, _MOST = 0.005, 0.05
_ALONE = 8  # steps for which nobody waits for those that were waited for in vain


@dataclass(eq=False)
class Ask:
    """The wish of a call for the logits [B, V] after the newest `tokens` [B, 1] of its `lives`.

    Or of `drafts` for those [B, K, V] after each of tokens [B, K], of which none is taken. Before
    that it takes those that are `right` [B, R], the first ones of the drafts before. The logits
    stay None where the step that was to give them failed.
    """

    lives: Sequence[Live]
    tokens: np.ndarray
    drafts: bool = False
    right: np.ndarray | None = None
    logits: Any = None


class _Party:
    """A thread that waits, and its asks; `called` is set once they are served or it is to lead."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.asks, self.thread = asks, threading.get_ident()
        self.called = threading.Event()
        self.is_over = False

    @property
    def lives(self) -> list[Live]:
        return [live for ask in self.asks for live in ask.lives]


class Meeting:
    """Brings threads together that ask for a step: `take` takes one for all that they ask for.

    Who comes while nobody leads does it. It waits for those that were there the last time, as long
    as one comes after the other; who comes during the step waits for the next one. Threads that
    took their steps each alone would take as many as they are, of which each costs as much.
    """

    def __init__(self, take: Callable[[Sequence[Ask]], None]) -> None:
        self._take = take
        self._process = os.getpid()
        self._news = threading.Condition()  # reentrant: a stream may be collected within
        self._here: list[_Party] = []  # who waits for a step that has not begun
        self._leader: _Party | None = None
        self._last: dict[Live, int] = {}  # whom the last step served, and the threads that asked
        self._late: dict[Live, int] = {}  # who was waited for in vain, and until which step
        self._steps = 0
        self._begun = 0.0  # when it began
        self._seconds = _LEAST  # until the first of those came again, within limits

    @property
    def is_foreign(self) -> bool:
        """True in a forked process, into which who leads may not have come along."""
        return self._process != os.getpid()

    def bring(self, asks: Sequence[Ask], waits: bool) -> None:
        """Ask, and wait for the step, which this thread may take: then it raises what that raises.

        It `waits` for others before, or takes the step for those who are there.
        """
        party = _Party(asks)
        try:
            with self._news:
                self._here.append(party)
                if self._leader is None:
                    self._leader = party
                self._news.notify()
            if self._leader is not party:
                party.called.wait()
            if not party.is_over:
                self._lead(waits)
        finally:
            self._leave(party)

    def look(self) -> None:
        """Let who leads look again for whom it waits: some have ended."""
        with self._news:
            self._news.notify()

    def _lead(self, waits: bool) -> None:
        parties: list[_Party] = []
        try:
            with self._news:
                if waits:
                    self._wait()
                parties, self._here = self._here, []
            self._last = {live: party.thread for party in parties for live in party.lives}
            self._steps, self._begun = self._steps + 1, time.monotonic()
            self._take([ask for party in parties for ask in party.asks])
        finally:
            for party in parties:
                party.is_over = True
                party.called.set()

    def _wait(self) -> None:
        """Wait for those who are coming; who does not come is not waited for the next time."""
        if any(live in self._last for party in self._here for live in party.lives):
            self._seconds = min(max(time.monotonic() - self._begun, _LEAST), _MOST)
        count, until = 0, 0.0
        while coming := self._coming():
            now = time.monotonic()
            if len(self._here) != count:
                count, until = len(self._here), now + self._seconds
            if now >= until:
                late = {x: n for x, n in self._late.items() if n > self._steps and not x.ended}
                self._late = late | dict.fromkeys(coming, self._steps + _ALONE)
                return
            self._news.wait(until - now)

    def _coming(self) -> set[Live]:
        """The sequences of the last step that may yet ask: their threads do not wait here."""
        here = {party.thread for party in self._here}
        last = [x for x, thread in self._last.items() if thread not in here and not x.ended]
        return {x for x in last if self._late.get(x, 0) <= self._steps}

    def _leave(self, party: _Party) -> None:
        """Let another one lead after this one."""
        with self._news:
            if party in self._here:
                self._here.remove(party)
            if self._leader is party:
                self._leader = self._here[0] if self._here else None
                if self._leader is not None:
                    self._leader.called.set()
