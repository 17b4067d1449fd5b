"""The neutral generation loop: prefill, decode in chunks, hand out."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ..backends.base import (
    MAX_STEPS,
    NO_TOKEN,
    PendingTokens,
    Piece,
    Pool,
    Request,
    Runner,
    Saved,
)
from ..backends.profiling import Profiler
from ..errors import StepError, UnsupportedError, copied
from ..parallel.spmd import Turns
from . import reading
from .blocks import BlockSlots
from .meeting import Ask, Meeting
from .pausing import Paused, Pauses, pause_of
from .sequence import Live
from .sharing import sharing_of
from .waiting import Ticket

_BETWEEN_PIECES = 2  # steps of others: slots are idle while their prompts wait
_Thing = TypeVar("_Thing")
_Chunk: TypeAlias = tuple[PendingTokens, dict[int, Live]]  # tokens, and whose the columns are


class Loop(BlockSlots):
    """The steps of one runner. Several generations may be open at once, each with its own slots.

    They may belong to several threads, as with HF's TextIteratorStreamer; one at a time plans and
    enqueues, and all may wait for the device.
    Where several processes share the model, each must begin the same generations in the same
    order, and those that are open at once belong to one thread: how threads take turns differs
    from process to process.
    """

    def __init__(self, runner: Runner, profiler: Profiler, turns: Turns):
        super().__init__(runner, turns)
        self._profiler = profiler
        self._closed: Exception | None = None
        self._chunks: deque[_Chunk] = deque()
        self.longest = MAX_STEPS  # steps of a chunk: fewer where somebody may come or leave
        self._pauses = Pauses(runner, 0)
        self._meeting = Meeting(self._take_asked)

    def open(
        self, pool: Pool | None, prepare: bool = False, shares: bool = False, swap: int = 0
    ) -> None:
        """Reserve a pool's room, or none; see `Runner.open`.

        Prompts that begin alike then share what is read of them, if it `shares` and the model can.
        What paused sequences have cached may take `swap` bytes of the host's memory.
        UnsupportedError while a sequence is under way.
        """
        with self._turns:
            self._finish_left()
            self.finish([live for live in self._live.values() if live.ended])
            if self._live:
                raise UnsupportedError(
                    "Room was to be reserved, or given back, while a generation is under way. "
                    "Finish its stream, or call close() on it, first."
                )
            self.pool = self.sharing = None
            self._runner.open(pool, prepare)
            self.pool = pool
            self._pauses.forget()
            self._pauses = Pauses(self._runner, 0 if pool is None else swap)
            if pool is not None and shares:
                self.sharing = sharing_of(self._runner, pool)

    def run_by(self, runner: Runner) -> None:
        """Give the steps to a runner that holds the same pool, while nothing is under way."""
        self._runner = runner
        self._pauses.run_by(runner)
        if self.sharing is not None:
            self.sharing.run_by(runner)

    def start(
        self,
        requests: Sequence[Request],
        waits: bool = True,
        saved: Sequence[Saved | None] = (),
    ) -> list[Live]:
        """Sequences for `requests`, in the lowest free slots, with their first token under way.

        One that does not wait for slots raises NoSlotError where there are too few. `saved` is
        what those that were paused had cached.
        """
        call = Ticket(requests)
        with self._with_slots([call], waits) as calls:
            if calls and (self.sharing is not None or self.blocks is not None):
                self._open(calls, reading.plan, saved)
                if all(x.unread is not None for x in list(self._live.values()) if not x.ended):
                    self._read_on()  # others have a step between two pieces: see `turn`
            elif calls:
                self._open_together(calls, self._read_first, saved)
        assert call.lives is not None
        return call.lives

    def _read_first(self, lives: list[Live], parts: list[Request], _: Any) -> None:
        """Read the prompts of sequences that begin, or some of each beside others."""
        running = any(not live.ended for live in list(self._live.values()))
        runner, pauses = self._runner, self._pauses
        self._read(lives, reading.plan_whole(runner, pauses, lives, parts, running))

    def start_scores(
        self, requests: Sequence[Request], waits: bool = True
    ) -> tuple[list[Live], Any]:
        """Sequences whose tokens the caller chooses, and the logits [B, V] of the first ones.

        As `start` they wait for slots, or raise NoSlotError. Their prompts are read in one pass
        with those of other threads that wait as well.
        """
        call = Ticket(requests, chosen=True)
        self._start_scores([call], waits)
        assert call.lives is not None
        return call.lives, call.logits

    def start_each(self, requests: Sequence[Sequence[Request]]) -> list[tuple[list[Live], Any]]:
        """See `start_scores`, of several calls of this thread, whose prompts are read together.

        They wait for no slots.
        """
        calls = [Ticket(own, chosen=True) for own in requests]
        self._start_scores(calls, waits=False)
        return [(call.lives or [], call.logits) for call in calls]

    def _start_scores(self, own: Sequence[Ticket], waits: bool) -> None:
        """Begin calls of this thread."""
        with self._with_slots(own, waits) as calls:
            if calls:
                self._open_together(calls, self._read_chosen)

    def _read_chosen(
        self, lives: list[Live], parts: list[Request], calls: Sequence[Ticket]
    ) -> None:
        """Read the prompts of calls whose tokens the callers choose."""
        slots = [live.slot for live in lives]
        if self.sharing is not None:
            parts = list(map(self.sharing.begun, slots, parts))
            for live, part in zip(lives, parts, strict=True):
                live.kept = part.kept
        if self.blocks is not None:
            rooms = zip(slots, (part.cache_tokens for part in parts), strict=True)
            self.give_up(self.blocks.more(dict(rooms)))
        counts = [call.count for call in calls]
        found = self._profiler.run(
            self._runner.prefill_scores, _cut(parts, counts), _cut(slots, counts)
        )
        for call, logits in zip(calls, found, strict=True):
            call.logits = logits
        for live in lives:
            live.queued = live.request.max_new_tokens  # none that the device would choose

    def scores(self, ask: Ask) -> Any:
        """The logits that are asked for, of sequences of `start_scores`.

        The step is that of others as well, who ask for theirs at about the same time.
        """
        while ask.logits is None:
            _raise_lost(ask.lives)
            self.bring([ask])
        return ask.logits

    def bring(self, asks: Sequence[Ask]) -> None:
        """Take a step for all `asks` and those of other threads; their logits say if it did.

        The thread of the driver, for whom others wait, waits for nobody.
        """
        self._turns.check()
        if self._turns.is_shared:  # where nobody may come meanwhile
            self._take_asked(asks)
            return
        if self._meeting.is_foreign:
            self._meeting = Meeting(self._take_asked)
        self._meeting.bring(asks, waits=threading.get_ident() != self.driver)

    def _take_asked(self, asks: Sequence[Ask]) -> None:
        """Take a step for those whose sequences go on."""
        self._turns.give_way()
        with self._turns:
            self._finish_left()
            asks = [ask for ask in asks if not any(live.error for live in ask.lives)]
            if right := [ask for ask in asks if ask.right is not None]:
                self._step_for(right, self._runner.keep, [ask.right for ask in right])
                for ask in right:
                    ask.right = None
            if steps := [ask for ask in asks if not ask.drafts]:
                tokens = [ask.tokens[:, 0].tolist() for ask in steps]
                self._give(steps, self._step_for(steps, self._runner.decode_scores, tokens))
            if ahead := [ask for ask in asks if ask.drafts]:
                tokens = [ask.tokens for ask in ahead]
                self._give(ahead, self._step_for(ahead, self._runner.decode_several, tokens))

    def _step_for(self, asks: Sequence[Ask], run: Callable[..., Any], tokens: Any) -> Any:
        return self._step_with(run, [[live.slot for live in ask.lives] for ask in asks], tokens)

    @staticmethod
    def _give(asks: Sequence[Ask], found: Sequence[Any]) -> None:
        for ask, logits in zip(asks, found, strict=True):
            ask.logits = logits

    def leave(self, lives: Sequence[Live]) -> None:
        """See `Slots`."""
        super().leave(lives)
        self._meeting.look()

    def _step_with(self, run: Callable[..., Any], slots: Any, tokens: Any) -> Any:
        """The result of a step of sequences whose tokens are chosen here."""
        self._turns.go_on(self._live)
        try:
            return self._profiler.run(run, slots, tokens)
        except BaseException as error:
            self.lose(_failed("A step failed, and with it its sequences", error))
            raise

    def _open_together(
        self,
        calls: Sequence[Ticket],
        read: Callable[[list[Live], list[Request], Sequence[Ticket]], None],
        saved: Sequence[Saved | None] = (),
    ) -> None:
        """Begin calls by one pass. Where that fails, only those of this thread begin.

        The others then do it by themselves, each alone.
        """
        own = [call for call in calls if call.owner == threading.get_ident()]
        mates, fails = calls[len(own) :], False
        try:
            self._open(calls, read, saved)
        except Exception:
            if not mates:
                raise
            fails = True
        if fails:
            for call in calls:
                call.alone = True
            self._open(own, read, saved)
            return
        for call in mates:
            if not self.queue.take(call):  # its thread was interrupted, and is gone
                self.leave(call.lives or [])

    def _open(
        self,
        calls: Sequence[Ticket],
        read: Callable[[list[Live], list[Request], Sequence[Ticket]], None],
        saved: Sequence[Saved | None] = (),
    ) -> None:
        """Give calls sequences in the lowest free slots, of which it reads what is to be read."""
        if self._closed is not None:
            raise copied(self._closed)
        self._finish_left()
        requests, chosen = [r for call in calls for r in call.requests], calls[0].chosen
        owners = [call.owner for call in calls for _ in call.requests]
        pauses = [pause_of(self._runner.spec, request, chosen) for request in requests]
        slots = [s for s in range(len(requests) + len(self._live)) if s not in self._live]
        self.check(requests)
        self._turns.begin(requests, self._live)
        lives = [
            Live(r, slot, p, chosen=chosen, owner=owner)
            for r, slot, p, owner in zip(requests, slots, pauses, owners, strict=False)
        ]
        for live, own in zip_longest(lives, saved[: len(lives)]):
            live.saved = own
            if live.request.done:
                live.resume()
            elif live.request.first is not None:
                live.tokens, live.queued = [live.request.first], 2
        slots = slots[: len(lives)]
        try:
            with self._undisturbed():
                read(lives, [live.part() for live in lives], calls)
        except BaseException:
            self._forget()
            self._runner.release(slots)
            raise
        self._live.update(zip(slots, lives, strict=True))
        for call, own in zip(calls, _cut(lives, [call.count for call in calls]), strict=True):
            call.lives = own

    def _read(self, lives: Sequence[Live], pieces: Sequence[Piece]) -> None:
        """Read pieces of lives' prompts; the first tokens of those that end are a chunk."""
        pending = self._profiler.run(self._runner.extend, pieces)
        ended = reading.booked(lives, pieces, self.sharing)
        if ended:
            self._chunks.append((pending, dict(enumerate(ended))))

    def _read_on(self) -> None:
        """Read on in prompts of which there is more, `reading.PIECE` tokens where others wait.

        Prompts that share what is read of them may be cut short, and take several passes of it.
        Where it fails, those whose prompts were read end, and others go on.
        """
        left = reading.PIECE
        while left > 0 and (read := self._read_some(left)):
            left = left - read if self.sharing is not None else 0

    def _read_some(self, left: int) -> int:
        """Read on by one pass, of `left` tokens where others wait; how many were read."""
        served: list[Live] = []
        pieces: list[Piece] = []
        try:
            with self._undisturbed():
                pieces = self._next_pieces(served, left)
                if not pieces and self._make_room_to_read():
                    pieces = self._next_pieces(served, left)
                if pieces:
                    self._read(served, pieces)
        except BaseException as error:
            reason = _failed("Reading a prompt failed, and with it its sequence", error)
            for live in served:
                live.error = copied(reason)
            self._forget()
            self.finish(served)
            if not isinstance(error, Exception):  # an interrupt is the caller's
                raise
            return 0
        return sum(piece.stop - piece.start for piece in pieces)

    def _next_pieces(self, served: list[Live], left: int) -> list[Piece]:
        what = self._by_rank(), self.sharing, self._pauses
        return reading.next_pieces(*what, served, left, self._claims())

    def trouble(self) -> str | None:
        """Why the device computes no more; None where it does."""
        try:
            with self._turns:
                self._runner.probe()
        except Exception as error:
            return f"The device computes no more: {error!r}."
        return None

    def check_idle(self) -> None:
        """Raise UnsupportedError while a sequence is under way, whose cache is of these weights."""
        with self._turns:
            self._finish_left()
            if self._live:
                raise UnsupportedError(
                    "A generation is under way, and what it has cached was computed with the "
                    "weights as they are. Finish its stream, or call close() on it, before "
                    "engine.refresh()."
                )
            self._forget()
            self._pauses.forget()

    def fill(self, lives: Sequence[Live], count: int, steps: int) -> None:
        """Wait until each of `lives` has `count` tokens or has ended, by chunks of `steps`."""

        def is_filled() -> bool:
            return all(live.ended or len(live.tokens) >= count for live in lives)

        while self.turn(steps, is_filled):
            pass

    def turn(self, steps: int, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Enqueue a chunk of `steps` and hand out the oldest one; False once it `is_done`.

        Others have the turn while this waits for the device: calls begin, and streams go on.
        """
        self._turns.give_way()
        with self._turns:
            self._finish_left()
            if is_done():
                return False
            self._turns.go_on(self._live)
            chunk = self._oldest(min(steps, self.longest))
        if chunk is not None:
            self._hand_out(chunk)
        return True

    def hand_out_next(self) -> bool:
        """See `BlockSlots`."""
        if not self._chunks:
            return False
        self._hand_out(self._chunks[0])
        return True

    def emptied(self) -> None:
        """See `Slots`."""
        self._chunks.clear()

    def _oldest(self, steps: int) -> _Chunk | None:
        """The oldest chunk, after enqueueing the next one behind it; None of a piece alone.

        At most one is beyond the one about to be fetched.
        While passes are timed nothing is enqueued ahead: it may turn out that none is needed. Nor
        is it while a grammar has to see a token before it says which ones may be the next.
        Where prompts are read in pieces, a piece goes behind each chunk of others.
        """
        waits = self._profiler.enabled or bool(self._constrained())
        if len(self._chunks) <= 1 and not (waits and self._chunks):
            is_reading = any(x.unread is not None for x in list(self._live.values()))
            self._enqueue(min(steps, _BETWEEN_PIECES) if is_reading else steps)
            self._read_on()
        return self._chunks[0] if self._chunks else None

    def _hand_out(self, chunk: _Chunk) -> None:
        """Wait for a chunk, which stays if the wait is interrupted, and hand out its tokens.

        Another thread that has waited as well may have done so by then.
        """
        pending, columns = chunk
        try:
            tokens, told = pending.fetch(), pending.told()
        except Exception as error:
            with self._turns:
                if not self._chunks or self._chunks[0] is not chunk:
                    return
                self.lose(_failed("A step failed, and with it the sequences it served", error))
            raise
        with self._turns:
            if not self._chunks or self._chunks[0] is not chunk:
                return
            self._chunks.popleft()
            for step, row in enumerate(tokens):
                for column, live in columns.items():
                    if not live.ended and row[column] != NO_TOKEN:
                        known = None if told is None else told[step, column]
                        live.take(int(row[column]), known)
            self._begin_anew([x for x in columns.values() if x.pauses and not x.ended])

    def _begin_anew(self, lives: Sequence[Live]) -> None:
        """Fill the slots of sequences that have paused with all of their tokens."""
        lives = [x for x in lives if x.progress is None or x.allowed() is not None]
        if not lives:
            return
        slots = [live.slot for live in lives]
        for live in lives:
            live.pauses, live.pause = False, 0
            live.queued = len(live.tokens) + 1
        parts = [live.part() for live in lives]
        try:
            self._runner.release(slots)
            pending = self._profiler.run(self._runner.prefill, parts, slots)
        except BaseException as error:
            self.lose(_failed("A step failed, and with it the sequences it served", error))
            raise
        self._chunks.append((pending, dict(enumerate(lives))))

    def _constrained(self) -> list[Live]:
        """The sequences whose next token must follow a grammar."""
        lives = list(self._live.values())
        return [x for x in lives if x.progress is not None and not x.ended and x.unread is None]

    def _allow(self) -> None:
        """Tell the runner which tokens may be next where a grammar says so."""
        lives = self._constrained()
        rows = [(x.slot, words) for x in lives if (words := x.allowed()) is not None]
        if rows:
            self._runner.allow([slot for slot, _ in rows], np.stack([words for _, words in rows]))

    def _enqueue(self, steps: int) -> None:
        """Ask for the next chunk."""
        one = bool(self._constrained()) or self._profiler.enabled
        steps = self._make_room(1 if one else min(steps, MAX_STEPS))
        self._allow()
        unread = {x.slot for x in list(self._live.values()) if x.unread is not None}
        unfinished = [x for x in list(self._live.values()) if not x.ended and x.slot not in unread]
        ahead = max((x.request.max_new_tokens - x.queued for x in unfinished), default=0)
        if ahead <= 0:
            return
        steps = min(steps, ahead)
        columns = {slot: live for slot, live in dict(self._live).items() if slot not in unread}
        try:
            pending = self._profiler.run(self._runner.decode, steps)
        except BaseException as error:  # some of the steps may have run, and their tokens are gone
            self.lose(_failed("A step failed, and with it the sequences it served", error))
            raise
        for live in columns.values():
            live.queued += steps
        self._chunks.append((pending, columns))

    def suspend(self, live: Live) -> Paused | None:
        """Free the slot of a sequence that is to go on later; None where it has ended.

        All tokens that were asked for have come then.
        """
        with self._turns:  # or others would ask for more of its tokens meanwhile
            while not live.ended and any(live in columns.values() for _, columns in self._chunks):
                self._hand_out(self._chunks[0])
            if live.ended:
                return None
            with self._undisturbed():
                saved = live.saved or self._save(live)
            paused = Paused(tuple(live.tokens), live.told[: len(live.tokens)], saved)
            self.finish([live])
            return paused

    def lose(self, error: Exception) -> None:
        """End every sequence; whoever waits for more of its tokens gets `error`."""
        with self._turns:
            lives = list(self._live.values())
            for live in lives:
                live.error = None if live.ended else copied(error)
            self.finish(lives, keeps=False)
            self._forget()

    def close(self, error: Exception) -> None:
        """End every sequence, and refuse new ones, with `error`."""
        with self._turns:
            self._closed = error
            self.lose(error)


def _failed(what: str, error: BaseException) -> StepError:
    """The error of sequences that a failed step was for, of which `error` is the cause."""
    reason = StepError(f"{what}: {error!r}.")
    reason.__cause__ = error
    return reason


def _raise_lost(lives: Sequence[Live]) -> None:
    """Raise why tokens of one of these will never come, if so."""
    for live in lives:
        if live.error is not None:
            raise live.error


def _cut(things: Sequence[_Thing], counts: Sequence[int]) -> list[list[_Thing]]:
    """A list in parts of so many."""
    left = iter(things)
    return [list(islice(left, count)) for count in counts]
