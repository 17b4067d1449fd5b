"""The neutral generation loop: prefill, decode in chunks, hand out; stop strings; streaming."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import (
    GRAIN,
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
from ..errors import (
    ClosedError,
    LengthError,
    OutOfMemoryError,
    StepError,
    UnsupportedError,
)
from ..parallel.spmd import Turns
from .pausing import Paused, Pauses
from .sequence import Live
from .sharing import Sharing, sharing_of
from .text_stream import Detokenizer, TextStream
from .waiting import Queue, Ticket

PIECE = 2048  # tokens that are read at a time where others wait; an H100 takes 50 ms for 8B
_BESIDE = 8  # steps of others between two pieces
_PAUSE = 0.001  # seconds between looks for slots of sequences whose tokens other threads choose


class StopStrings:
    """Tells for each sequence whether its newest token completes a stop string.

    As in HF, the string may begin in the prompt, and must end within the newest token. Special
    tokens count as text, and nothing is cleaned up.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any):
        self._strings = strings
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, eager=True)

    def watch(self, prompt: Sequence[int]) -> "StopWatch":
        """A watch over the sequence that continues `prompt`."""
        return StopWatch(self._strings, self._detokenizer.stream(prompt))


class StopWatch:
    """One sequence's text, as much of it as a stop string may begin in."""

    def __init__(self, strings: Sequence[str], stream: TextStream):
        self._strings, self._stream, self._text = strings, stream, stream.before
        self._longest = max(map(len, strings))

    def is_completed(self, token: int) -> bool:
        """True if a stop string ends within `token`, the next one of the sequence."""
        old = len(self._text)
        self._text += self._stream.push(token)
        found = any(self._text.find(s, max(0, old - len(s) + 1)) >= 0 for s in self._strings)
        self._text = self._text[-self._longest :]
        return found


_log = logging.getLogger(__name__)
_Chunk: TypeAlias = tuple[PendingTokens, dict[int, Live]]  # tokens, and whose the columns are


def _first(piece: Piece, most: int) -> Piece:
    """The first tokens of a piece, about `most`."""
    grains = max(most // GRAIN, 1) * GRAIN
    return replace(piece, stop=min(piece.stop, piece.start + grains))


class Loop:
    """The slots of one runner. Several generations may be open at once, each with its own slots.

    They may belong to several threads, as with HF's TextIteratorStreamer; one at a time plans and
    enqueues, and all may wait for the device.
    Where several processes share the model, each must begin the same generations in the same
    order, and those that are open at once belong to one thread: how threads take turns differs
    from process to process.
    """

    def __init__(self, runner: Runner, profiler: Profiler, turns: Turns):
        self._runner = runner
        self._profiler = profiler
        self._turns = turns
        self._closed: Exception | None = None
        self._live: dict[int, Live] = {}
        self._chunks: deque[_Chunk] = deque()
        self._left: deque[Live] = deque()  # of `leave`, whose slots are to be freed
        self.longest = MAX_STEPS  # steps of a chunk: fewer where somebody may come or leave
        self.pool: Pool | None = None
        self.sharing: Sharing | None = None  # of prompts, where the pool's model can
        self.queue = Queue()  # of those who wait for slots
        self._pauses = Pauses(runner, 0)
        self.driver: int | None = None  # the thread whose jobs a scheduler lets in
        self._is_busy = False  # with what slots hold

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

    def start(
        self,
        requests: Sequence[Request],
        waits: bool = True,
        saved: Sequence[Saved | None] = (),
    ) -> list[Live]:
        """Sequences for `requests`, in the lowest free slots, with their first token under way.

        One that does not wait for slots raises OutOfMemoryError where there are too few. `saved` is
        what those that were paused had cached.
        """
        with self._with_slots(len(requests), waits):
            if self.sharing is not None:
                lives, _ = self._open(requests, self._plan, chosen=False, saved=saved)
                if all(x.unread is not None for x in list(self._live.values()) if not x.ended):
                    try:
                        self._read_on()  # others have a step between two pieces: see `turn`
                    except BaseException:  # an interrupt, before the caller has them
                        self.finish(lives)
                        raise
                return lives

            def read(lives: list[Live], parts: list[Request]) -> None:
                for live, part in zip(lives, parts, strict=True):
                    live.unread = Piece.whole(self._pauses.restore(live, part), live.slot)
                pieces = [live.unread for live in lives if live.unread is not None]
                running = any(not live.ended for live in list(self._live.values()))
                if running and self._runner.spec.reads_pieces:  # some of each: all have room
                    pieces = [_first(piece, PIECE // len(pieces)) for piece in pieces]
                self._read(lives, pieces)

            return self._open(requests, read, chosen=False, saved=saved)[0]

    def start_scores(self, requests: Sequence[Request]) -> tuple[list[Live], Any]:
        """Sequences whose tokens the caller chooses, and the logits [B, V] of the first ones."""
        with self._with_slots(len(requests)):

            def read(lives: list[Live], parts: list[Request]) -> Any:
                slots = [live.slot for live in lives]
                if self.sharing is not None:
                    parts = list(map(self.sharing.begun, slots, parts))
                    for live, part in zip(lives, parts, strict=True):
                        live.kept = part.kept
                return self._profiler.run(self._runner.prefill_scores, parts, slots)

            lives, scores = self._open(requests, read, chosen=True)
            for live in lives:
                live.queued = live.request.max_new_tokens  # none that the device would choose
            return lives, scores

    @contextmanager
    def _with_slots(self, count: int, waits: bool = True) -> Generator[None, None, None]:
        """The turn, once `count` slots are free; until then sequences under way are driven on.

        Calls get them in the order in which they came. LengthError where a pool has not so many, or
        where none of them will ever be free.
        """
        ticket = Ticket(count)
        if waits:
            self.queue.append(ticket)
        try:
            while True:
                with self._turns:
                    if self._has_slots(count) and (not waits or self._is_next(ticket)):
                        if waits:
                            self.queue.remove(ticket)
                        yield
                        return
                if not waits:
                    raise OutOfMemoryError(f"There are not {count} free slots.")
                self._make_way(count)
        finally:
            if ticket in self.queue:
                self.queue.remove(ticket)

    def _is_next(self, ticket: Ticket) -> bool:
        """True unless another call has waited longer, or the driver needs the slot.

        A thread that others may wait for passes them: it holds sequences whose tokens it chooses,
        or its jobs were let in.
        """
        me, pool = threading.get_ident(), self.pool
        lives = [x for x in list(self._live.values()) if not x.ended]
        if pool is None or me == self.driver or any(x.chosen and x.owner == me for x in lives):
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

    def _make_way(self, count: int) -> None:
        """Drive sequences on, so that some end; those whose tokens others choose are waited for."""
        lives = [x for x in list(self._live.values()) if not x.ended]
        if any(not live.chosen for live in lives):
            try:
                self.turn(_BESIDE)
            except (ClosedError, UnsupportedError):
                raise
            except Exception as error:  # it has ended those whom the step served, who are told
                _log.info("A step failed, which a call waited for: %r", error)
        elif not lives or any(live.owner != threading.get_ident() for live in lives):
            time.sleep(_PAUSE)
        else:
            raise LengthError(
                f"A call of {count} sequences waits for slots that this thread holds itself: all "
                "are of calls whose tokens it chooses one by one. Finish or close these first."
            )

    def _plan(self, lives: Sequence[Live], parts: Sequence[Request]) -> None:
        """Let prompts wait for `_read_on`."""
        for live, part in zip(lives, parts, strict=True):
            live.unread = Piece.whole(part, live.slot)

    def _keep(self, lives: Sequence[Live]) -> None:
        """Keep what sequences that end have cached, where a prompt may begin so."""
        for live in lives if self.sharing is not None else ():
            assert self.sharing is not None
            if live.chosen or live.error is not None:
                self.sharing.drop(live.slot)
            else:
                piece, new = live.unread, live.tokens
                request, new = (live.request, new) if piece is None else (piece.request, [])
                self.sharing.keep(live.slot, request, None if piece is None else piece.start, new)

    def scores(self, lives: Sequence[Live], tokens: Sequence[int]) -> Any:
        """The logits [B, V] after the `tokens` chosen for `lives` of `start_scores`."""
        return self._step_of(lives, self._runner.decode_scores, tokens)

    def scores_of(self, lives: Sequence[Live], tokens: np.ndarray) -> Any:
        """The logits [B, K, V] after each of tokens [B, K], of which none is taken yet."""
        return self._step_of(lives, self._runner.decode_several, tokens)

    def keep(self, lives: Sequence[Live], tokens: np.ndarray) -> None:
        """Take tokens [B, K], the first ones of the last `scores_of`."""
        self._step_of(lives, self._runner.keep, tokens)

    def _step_of(self, lives: Sequence[Live], run: Callable[..., Any], tokens: Any) -> Any:
        with self._turns:
            self._finish_left()
            for live in lives:
                if live.error is not None:
                    raise live.error
            self._turns.go_on(self._live)
            slots = [live.slot for live in lives]
            try:
                return self._profiler.run(run, slots, tokens)
            except BaseException as error:
                self.lose(StepError(f"A step failed, and with it its sequences: {error!r}."))
                raise

    def _open(
        self,
        requests: Sequence[Request],
        read: Callable[[list[Live], list[Request]], Any],
        chosen: bool,
        saved: Sequence[Saved | None] = (),
    ) -> tuple[list[Live], Any]:
        """Sequences in the lowest free slots, and what `read` gives for them."""
        if self._closed is not None:
            raise self._closed
        self._finish_left()
        pauses = [self._pause_of(request, chosen) for request in requests]
        slots = [s for s in range(len(requests) + len(self._live)) if s not in self._live]
        self.check(requests)
        self._turns.begin(requests, self._live)
        lives = [
            Live(r, slot, p, chosen=chosen)
            for r, slot, p in zip(requests, slots, pauses, strict=False)
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
                result = read(lives, [live.part() for live in lives])
        except BaseException:
            self._forget()
            self._runner.release(slots)
            raise
        self._live.update(zip(slots, lives, strict=True))
        return lives, result

    def _read(self, lives: Sequence[Live], pieces: Sequence[Piece]) -> None:
        """Read pieces of lives' prompts; the first tokens of those that end are a chunk."""
        pending = self._profiler.run(self._runner.extend, pieces)
        ended = []
        for live, piece in zip(lives, pieces, strict=False):
            rest = Piece.whole(piece.request, live.slot)
            live.unread = None if piece.ends else replace(rest, start=piece.stop)
            if self.sharing is not None:
                self.sharing.read(piece)
            if piece.ends:
                ended.append(live)
        if ended:
            self._chunks.append((pending, dict(enumerate(ended))))

    def _read_on(self) -> None:
        """Read on in prompts of which there is more, PIECE tokens where others wait.

        Prompts that share what is read of them may be cut short, and take several passes of it.
        Where it fails, those whose prompts were read end, and others go on.
        """
        left = PIECE
        while left > 0 and (read := self._read_some(left)):
            left = left - read if self.sharing is not None else 0

    def _read_some(self, left: int) -> int:
        """Read on by one pass, of `left` tokens where others wait; how many were read."""
        served: list[Live] = []
        pieces: list[Piece] = []
        try:
            with self._undisturbed():
                if pieces := self._next_pieces(served, left):
                    self._read(served, pieces)
        except BaseException as error:
            reason = StepError(f"Reading a prompt failed, and with it its sequence: {error!r}.")
            reason.__cause__ = error
            for live in served:
                live.error = reason
            self._forget()
            self.finish(served)
            if not isinstance(error, Exception):  # an interrupt is the caller's
                raise
            return 0
        return sum(piece.stop - piece.start for piece in pieces)

    def _next_pieces(self, served: list[Live], left: int) -> list[Piece]:
        """The pieces to read next, `left` tokens of them where others wait.

        Whose they are is added to `served`. The prompt that came first is first; ids and embeddings
        go apart. One waits where another that is read now begins as it does.
        """
        lives = [x for x in list(self._live.values()) if not x.ended]
        unread = [(x, x.unread) for x in lives if x.unread is not None]
        waiting, sharing = len(unread) < len(lives), self.sharing
        pieces: list[Piece] = []
        if sharing is not None:
            sharing.meet([piece.request for _, piece in unread])
        for live, piece in unread:
            if left <= 0:
                break
            if sharing is not None and sharing.waits(piece, pieces):
                continue
            if (piece.request.embeds is None) != (unread[0][1].request.embeds is None):
                continue
            served.append(live)
            if sharing is not None and piece.is_first:
                request = self._pauses.restore(live, piece.request)
                piece = Piece.whole(sharing.begun(live.slot, request), live.slot)
                live.kept = piece.start
            if sharing is not None:
                piece = sharing.until(piece)
            pieces.append(_first(piece, left) if waiting else piece)
            left -= pieces[-1].stop - piece.start if waiting else 0
        return pieces

    def _pause_of(self, request: Request, chosen: bool) -> int:
        """New tokens after which a sequence begins anew, by other rotary angles; 0 for never.

        The pass over `original` tokens is the last one by the short angles, and gives one more.
        Raises UnsupportedError for what cannot begin anew: embeddings, and tokens `chosen` by the
        caller.
        """
        original, prompt = self._runner.spec.original, len(request.prompt)
        if original is None or prompt > original:
            return 0
        pause = original + 1 - prompt
        if pause >= request.max_new_tokens:
            return 0
        if request.embeds is not None or chosen:
            what = (
                "Prompts of inputs_embeds are"
                if request.embeds is not None
                else "Tokens chosen on the host (output_scores, output_logits, processors) are"
            )
            raise UnsupportedError(
                f"{what} not served past {original} tokens, prompt included: there this model "
                "turns to other rotary angles, and reads a sequence again from its ids. Ask for at "
                f"most {pause} new tokens, or generate from ids alone without these options."
            )
        return pause

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
        with self._turns:
            self._finish_left()
            if is_done():
                return False
            self._turns.go_on(self._live)
            chunk = self._oldest(min(steps, self.longest))
        if chunk is not None:
            self._hand_out(chunk)
        return True

    def _oldest(self, steps: int) -> _Chunk | None:
        """The oldest chunk, after enqueueing the next one behind it; None of a piece alone.

        At most one is beyond the one about to be fetched.
        While passes are timed nothing is enqueued ahead: it may turn out that none is needed. Nor
        is it while a grammar has to see a token before it says which ones may be the next.
        Where prompts are read in pieces, a piece goes behind each chunk of others.
        """
        waits = self._profiler.enabled or bool(self._constrained())
        if len(self._chunks) <= 1 and not (waits and self._chunks):
            reading = any(x.unread is not None for x in list(self._live.values()))
            self._enqueue(min(steps, _BESIDE) if reading else steps)
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
                reason = f"A step failed, and with it the sequences it served: {error!r}."
                self.lose(StepError(reason))
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
            self.lose(StepError(f"A step failed, and with it the sequences it served: {error!r}."))
            raise
        self._chunks.append((pending, dict(enumerate(lives))))

    def _constrained(self) -> list[Live]:
        """The sequences whose next token must follow a grammar."""
        lives = list(self._live.values())
        return [x for x in lives if x.progress is not None and not x.ended and x.unread is None]

    def _allow(self) -> bool:
        """Tell the runner which tokens may be next where a grammar says so; False without one."""
        lives = self._constrained()
        rows = [(x.slot, words) for x in lives if (words := x.allowed()) is not None]
        if rows:
            self._runner.allow([slot for slot, _ in rows], np.stack([words for _, words in rows]))
        return bool(lives)

    def _enqueue(self, steps: int) -> None:
        """Ask for the next chunk."""
        one = self._allow() or self._profiler.enabled
        reading = {x.slot for x in list(self._live.values()) if x.unread is not None}
        unfinished = [x for x in list(self._live.values()) if not x.ended and x.slot not in reading]
        ahead = max((x.request.max_new_tokens - x.queued for x in unfinished), default=0)
        if ahead <= 0:
            return
        steps = 1 if one else min(steps, ahead, MAX_STEPS)
        columns = {slot: live for slot, live in dict(self._live).items() if slot not in reading}
        try:
            pending = self._profiler.run(self._runner.decode, steps)
        except BaseException as error:  # some of the steps may have run, and their tokens are gone
            self.lose(StepError(f"A step failed, and with it the sequences it served: {error!r}."))
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
                saved = self._pauses.save(live)
            paused = Paused(tuple(live.tokens), live.told[: len(live.tokens)], saved)
            self.finish([live])
            return paused

    def lose(self, error: Exception) -> None:
        """End every sequence; whoever waits for more of its tokens gets `error`."""
        with self._turns:
            lives = list(self._live.values())
            for live in lives:
                live.error = None if live.ended else error
            self.finish(lives, keeps=False)
            self._forget()

    def close(self, error: Exception) -> None:
        """End every sequence, and refuse new ones, with `error`."""
        with self._turns:
            self._closed = error
            self.lose(error)

    def finish(self, lives: Sequence[Live], keeps: bool = True) -> None:
        """Free the slots of these sequences, ended or not; it `keeps` beginnings of prompts."""
        with self._turns:
            here = [live for live in lives if self._live.get(live.slot) is live]
            slots = [live.slot for live in here]
            for live in lives:
                live.ended = True
            if keeps:
                with self._undisturbed():
                    self._keep(here)
            for slot in slots:
                del self._live[slot]
            if slots:
                self._runner.release(slots)
            if not self._live:
                self._chunks.clear()

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


class Generation:
    """The sequences of one call, step by step. Close it, or exhaust it, to free its slots."""

    def __init__(
        self, loop: Loop, requests: Sequence[Request], chunk: int, stop: StopStrings | None = None
    ):
        self._loop = loop
        self._chunk = chunk
        self._watches = [stop.watch(r.tokens.tolist()) for r in requests] if stop else []
        self._lives = loop.start(requests)

    def __iter__(self) -> Generator[list[int | None], None, None]:
        """For every step, each sequence's new token; None once it has ended."""
        step = 0
        try:
            while True:
                self._loop.fill(self._lives, step + 1, self._chunk)
                for live in self._lives:
                    if live.error and len(live.tokens) <= step:
                        raise live.error
                tokens = [x.tokens[step] if len(x.tokens) > step else None for x in self._lives]
                if all(token is None for token in tokens):
                    return
                step += 1
                self._stop_at(step)
                yield tokens
        finally:
            self.close()

    @property
    def told(self) -> list[list[np.ndarray]]:
        """Arrays of `sampling.tell` for each sequence's tokens, in order; none where none tells."""
        return [live.told[: len(live.tokens)] for live in self._lives]

    def _stop_at(self, count: int) -> None:
        """End the sequences of which a stop string ends within token number `count`.

        Here and not where tokens are booked: that may happen on behalf of another call, which a
        tokenizer's error does not concern.
        """
        for live, watch in zip(self._lives, self._watches, strict=False):
            if len(live.tokens) < count or not watch.is_completed(live.tokens[count - 1]):
                continue
            if live.may_stop_at(count - 1):
                self._loop.finish([live])
                del live.tokens[count:]

    def close(self) -> None:
        """End what is unfinished and free the slots."""
        with suppress(ClosedError):  # in a forked process, which has nothing to free
            self._loop.leave(self._lives)
