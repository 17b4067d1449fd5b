"""The slots of a runner: whose they are, who waits for some, and how they are freed."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager

from ..backends.base import Pool, Request, Runner
from ..errors import ClosedError, LengthError, OutOfMemoryError, UnsupportedError
from ..parallel.spmd import Turns
from .reading import keep, kind
from .sequence import Live
from .sharing import Sharing
from .waiting import Queue, Ticket

BESIDE = 8  # steps of others between two looks for slots
_PAUSE = 0.001  # seconds between looks for slots of sequences whose tokens other threads choose
_log = logging.getLogger(__name__)


class NoSlotError(OutOfMemoryError):
    """Others have the slots that a call needs, which does not wait for them."""


class Slots:
    """Slots by number, with the sequence that each has under way.

    They are changed by who has the turn alone. A `loop` drives sequences on where slots are waited
    for, and forgets what steps are under way where none is left.
    """

    def __init__(self, runner: Runner, turns: Turns):
        self._runner = runner
        self._turns = turns
        self._live: dict[int, Live] = {}
        self._left: deque[Live] = deque()  # of `leave`, whose slots are to be freed
        self.pool: Pool | None = None
        self.sharing: Sharing | None = None  # of prompts, where the pool's model can
        self.queue = Queue()  # of those who wait for slots
        self.driver: int | None = None  # the thread whose jobs a scheduler lets in
        self._is_busy = False  # with what slots hold

    @property
    def is_under_way(self) -> bool:
        """True while a sequence has a slot, or waits for one."""
        return bool(self.queue) or any(not x.ended for x in list(self._live.values()))

    @property
    def chooses_here(self) -> bool:
        """True if this thread holds sequences whose tokens it chooses: nobody else drives them."""
        me, left = threading.get_ident(), set(map(id, list(self._left)))
        lives = [x for x in list(self._live.values()) if not x.ended and id(x) not in left]
        return any(x.chosen and x.owner == me for x in lives)

    def turn(self, steps: int, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Drive sequences on by some steps; False once it `is_done`."""
        raise NotImplementedError

    def emptied(self) -> None:
        """Take note that no sequence is under way."""

    def tokens_beside(self, ours: Collection[int]) -> list[int]:
        """Tokens that each sequence may come to hold, but for `ours`: the ids of their Lives.

        Also of those that wait in a call for their slots, and came before what the driver has.
        """
        if self._left:
            self._free_left()
        wanted = self.queue.wanted_before_driver()
        others = [x.request.cache_tokens for x in list(self._live.values()) if id(x) not in ours]
        return others + [0] * wanted

    def check(self, requests: Sequence[Request]) -> None:
        """Raise LengthError for what a pool has no room for."""
        longest = max((r.cache_tokens for r in requests), default=0)
        if self.pool is not None and longest > self.pool.tokens:
            raise LengthError(
                f"A prompt with its new tokens, {longest + 1} in all, is longer than the "
                f"{self.pool.tokens + 1} that there is room for in a slot. Ask for fewer new "
                "tokens, pass a shorter prompt, or reserve more tokens a slot."
            )

    @contextmanager
    def _with_slots(
        self, own: Sequence[Ticket], waits: bool = True
    ) -> Generator[list[Ticket], None, None]:
        """The turn, once these calls have slots; until then sequences under way are driven on.

        It gives the calls to begin together: these, and those of other threads that wait and come
        next; none where another thread has begun what is here. One call alone may wait: calls get
        slots in the order in which they came. LengthError where a pool has not so many, or none so
        long, or where none of them will ever be free, and NoSlotError where there are none now and
        it does not wait.
        """
        requests, ticket = [r for call in own for r in call.requests], own[0]
        self.check(requests)  # none of these would ever have room
        count = len(requests)
        if waits:
            self.queue.append(ticket)
        comes = True
        try:
            while True:
                with self._turns.coming() if comes else self._turns:
                    if ticket.lives is not None:
                        yield []
                        return
                    has_room = self._has_slots(count) and self._has_blocks(requests, ticket.chosen)
                    if has_room and (not waits or self._is_next(ticket)):
                        is_first = waits and self.queue.take(ticket)
                        yield [*own, *(self._mates(ticket) if is_first else [])]
                        return
                if not waits:
                    raise NoSlotError(f"There are no {count} free slots with room.")
                if not self.make_way() and ticket.lives is None:
                    raise LengthError(
                        f"A call of {count} sequences waits for slots that this thread holds "
                        "itself: all are of calls whose tokens it chooses one by one. Finish or "
                        "close these first."
                    )
                comes = False
        except BaseException:
            self.queue.take(ticket)  # from here on nobody begins it
            for call in own:  # as after an interrupt
                self.leave(call.lives or [])
            raise
        finally:
            self.queue.take(ticket)

    def _mates(self, ticket: Ticket) -> list[Ticket]:
        """Calls that wait, and whose prompts can be read in the pass of one that begins.

        They have slots beside it, and with a pool no other call has waited longer. Prompts that are
        read later, see `Loop.start`, meet there.
        """
        pool = self.pool
        in_blocks = pool is not None and bool(pool.blocks)
        reads_later = not ticket.chosen and (self.sharing is not None or in_blocks)
        if self._turns.is_shared or reads_later:
            return []
        mates, requests, kept = [], [*ticket.requests], 0
        for other in list(self.queue):
            more = [*requests, *other.requests]
            if other.is_driver:
                kept += other.count
            elif _go_together(ticket, other) and self._have_room(more, ticket.chosen, kept):
                mates.append(other)
                requests = more
            elif pool is not None:
                break
        return mates

    def _have_room(self, requests: Sequence[Request], chosen: bool, kept: int) -> bool:
        """True if requests have room now, and so many slots are left."""
        try:
            return self._has_slots(len(requests) + kept) and self._has_blocks(requests, chosen)
        except LengthError:
            return False

    def _is_next(self, ticket: Ticket) -> bool:
        """True unless another call has waited longer, or the driver needs the slot.

        A thread that others may wait for passes them: it holds sequences whose tokens it chooses,
        or its jobs were let in.
        """
        pool = self.pool
        if pool is None or threading.get_ident() == self.driver or self.chooses_here:
            return True
        return self.queue.lets(ticket, pool.slots - len(self._live))

    def _has_slots(self, count: int) -> bool:
        """True if so many are free; those of sequences that have ended are."""
        pool = self.pool
        if pool is None:
            return True
        self._finish_left()
        if count > pool.slots:
            raise LengthError(
                f"A call of {count} sequences has no room in the {pool.slots} slots that were "
                "reserved. Pass fewer at a time, or reserve more."
            )
        if count > pool.slots - len(self._live):
            self.finish([live for live in self._live.values() if live.ended])
        return count <= pool.slots - len(self._live)

    def _has_blocks(self, requests: Sequence[Request], chosen: bool) -> bool:
        """True if requests may have slots of a pool whose memory all of them share."""
        raise NotImplementedError

    def fits(self, requests: Sequence[Request]) -> bool:
        """True if requests of one call can have their slots together, once nobody has any."""
        return self.pool is None or len(requests) <= self.pool.slots

    def make_way(self) -> bool:
        """Drive sequences on, so that some end; those whose tokens others choose are waited for.

        Those that have ended, and are not read to their end, leave their slots. False where this
        thread holds all of them, and chooses their tokens.
        """
        with self._turns:
            self._finish_left()
            if ended := [live for live in self._live.values() if live.ended]:
                self.finish(ended)
                return True
        lives = [x for x in list(self._live.values()) if not x.ended]
        if any(not live.chosen for live in lives):
            try:
                self.turn(BESIDE)
            except (ClosedError, UnsupportedError):
                raise
            except Exception as error:  # it has ended those whom the step served, who are told
                _log.info("A step failed, which a call waited for: %r", error)
        elif not lives or any(live.owner != threading.get_ident() for live in lives):
            time.sleep(_PAUSE)
        else:
            return False
        return True

    def finish(self, lives: Sequence[Live], keeps: bool = True) -> None:
        """Free the slots of these sequences, ended or not; it `keeps` beginnings of prompts."""
        with self._turns:
            here = [live for live in lives if self._live.get(live.slot) is live]
            slots = [live.slot for live in here]
            for live in lives:
                live.ended = True
            if keeps:
                with self._undisturbed():
                    keep(here, self.sharing)
            for slot in slots:
                del self._live[slot]
            if slots:
                self._runner.release(slots)
            if not self._live:
                self.emptied()

    def leave(self, lives: Sequence[Live]) -> None:
        """Free the slots of sequences that nobody reads, at once or by who has the turn.

        A stream may be collected on any thread, and be it one that the turn's holder waits for.
        """
        self._left.extend(lives)
        self._free_left()

    def _free_left(self) -> None:
        """Free slots that were left, unless another thread, or a caller of this one, is at work."""
        if self._turns.take():
            try:
                if not self._is_busy:
                    self._finish_left()
            finally:
                self._turns.__exit__()

    @contextmanager
    def _undisturbed(self) -> Generator[None, None, None]:
        """Around work on what slots hold: a stream that is collected within it ends behind it."""
        was, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = was

    def _forget(self) -> None:
        """Forget what slots hold: where a step has failed, JAX has lost it."""
        if self.sharing is not None:
            self.sharing.forget()

    def _finish_left(self) -> None:
        lives = []
        while self._left:
            lives.append(self._left.popleft())
        if lives:
            self.finish(lives)


def _go_together(one: Ticket, other: Ticket) -> bool:
    """True if the prompts of two calls may be read in one pass."""
    kinds = [set(map(kind, call.requests)) for call in (one, other)]
    return one.chosen == other.chosen and kinds[0] == kinds[1] and not (one.alone or other.alone)
