"""The thread that drives sequences of many callers: of `generate_async`, and of calls at once."""

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..backends.base import MAX_STEPS, Request
from ..errors import (
    ClosedError,
    DeadlineError,
    DistributedError,
    DualinferError,
    OutOfMemoryError,
    StepError,
    UnsupportedError,
    copied,
)
from ..parallel.spmd import Turns
from ..serving.scheduler import Entry, Scheduler, steps_for
from .loop import Loop
from .meeting import Ask
from .pausing import Paused
from .reading import kind
from .sequence import Live
from .slots import NoSlotError
from .stepwise import Stepwise
from .stops import StopStrings, StopWatch

_PAUSE = 0.005  # seconds between looks for room that cannot be made here
_LINGER = 1.0  # seconds that the thread waits for more before it ends
_MOST_FAILURES = 8  # turns in a row that failed, without a token between
_SOME = 0.2  # the share of a new time in the time that a step is taken to need


class Channel:
    """The tokens of one sequence on their way from the driver's thread to an event loop.

    `reason` says how it ended: by its EOS or a stop string ("stop"), its length, or as "cancelled".
    """

    def __init__(self) -> None:
        self.items: deque[int] = deque()
        self.told: list[np.ndarray] = []  # what `sampling.tell` says of each token
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.count = 0  # of the tokens that have come
        self.began: float | None = None  # when it got its slot
        self._waiter: tuple[_Loop, asyncio.Future[None]] | None = None

    @property
    def has_ended(self) -> bool:
        """True if no token comes any more."""
        return self.reason is not None or self.error is not None

    def begins(self, job: "Job") -> None:
        """Be told of the job whose tokens come here, before any does."""

    async def wait(self) -> None:
        """Wait until there is a token, or an end."""
        while not self.items and not self.has_ended:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiter = _Loop(loop), future
            if self.items or self.has_ended:  # came between
                self._waiter = None
                return
            try:
                await future
            finally:
                self._waiter = None

    def waiting(self) -> tuple[Callable[[list[Any]], None], Any] | None:
        """The function to call at the end of a turn, and its argument; None if nobody waits.

        It is called once for all channels that name it.
        """
        return self._waiter


@dataclass(frozen=True)
class _Loop:
    """Wakes those who wait in an event loop, by one call."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, futures: list["asyncio.Future[None]"]) -> None:
        with suppress(RuntimeError):  # it was closed; who waited is gone
            self.loop.call_soon_threadsafe(_set, futures)


@dataclass(eq=False, kw_only=True)
class Job(Entry):
    """An entry with its request, what ends it, and where its tokens go.

    With `begin` the host chooses its tokens, step by step.
    """

    request: Request
    begin: Callable[[], Stepwise] | None = None
    stop: StopStrings | None = None
    channel: Channel = field(default_factory=Channel)
    live: Live | None = None
    begun: Stepwise | None = None
    steps: "Generator[list[int | None], None, None] | None" = None
    watch: StopWatch | None = None
    given: int = 0
    left: Paused | None = None
    found: int | None = None

    @classmethod
    def of(cls, request: Request, **fields: Any) -> "Job":
        """The job of a request."""
        how = {"tokens": request.cache_tokens, "prompt": len(request.prompt)}
        reads = request.embeds is None and request.source is None and fields.get("begin") is None
        return cls(request=request, may_pause=reads, **how, **fields)

    @property
    def kept(self) -> int:
        """Tokens of the prompt that were not read again."""
        if self.found is not None:
            return self.found
        return sum(live.kept for live in self.lives)

    @property
    def lives(self) -> list[Live]:
        """Its sequences that hold slots of the loop."""
        begun = self.begun.lives if self.begun is not None else []
        return [*begun, *([] if self.live is None else [self.live])]

    def resume(self, done: Sequence[int]) -> None:
        """Go on behind new tokens that are done, before it is submitted.

        UnsupportedError where the host chooses tokens, of whose state nothing is known.
        """
        if self.begin is not None and done:
            raise UnsupportedError(
                "A request cannot go on behind tokens of another engine whose tokens the host "
                "chooses, as no_repeat_ngram_size and others ask for. Send it again."
            )
        self.request = replace(self.request, done=tuple(done))
        self.given, self.prompt = len(done), self.prompt + len(done)

    def pause(self, left: Paused) -> None:
        """Wait without a slot, to go on later."""
        if self.given:
            self.found = self.kept
        self.request = replace(self.request, done=left.done)
        self.prompt = len(self.request.prompt) + len(left.done)
        self.live, self.left = None, left

    def go_on(self, live: Live) -> None:
        """Have a slot, once more if it was paused."""
        self.live = live
        if self.left is not None:
            live.told[: len(self.left.told)] = self.left.told
            self.left = None


class Driver:
    """Runs jobs in the slots of a loop, on a thread that lives while there are any.

    `check` raises where the model may not run. The thread ends with `stop`, and with the program.
    """

    def __init__(
        self, loop: Loop, turns: Turns, scheduler: Scheduler, check: Callable[[], None]
    ) -> None:
        self._loop, self._turns, self._scheduler, self._check = loop, turns, scheduler, check
        self._process = os.getpid()
        self._inbox: deque[Job] = deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped: Exception | None = None
        scheduler.has_room = self._has_room
        self._jobs: list[Job] = []  # that have slots
        self._left: deque[Job] = deque()  # to be cancelled
        self._seconds: float | None = None  # of a step
        self._woken: dict[Callable[[list[Any]], None], list[Any]] = {}
        self.heartbeat = time.monotonic()  # when the thread last came round
        self.reading = 0  # tokens of prompts without a new token yet
        self.preemptions = 0  # slots taken from sequences for urgent ones
        self.lost: str | None = None  # why the device computes no more
        self.is_looking = False  # whether it does, behind a turn that failed
        self._failed: BaseException | None = None  # of this turn
        self._failures = 0  # turns in a row that failed

    @property
    def is_foreign(self) -> bool:
        """True in a forked process, into which the thread did not come along."""
        return self._process != os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the driver's own thread."""
        return self._thread is threading.current_thread()

    @property
    def live(self) -> int:
        """Sequences that have a slot."""
        return self._scheduler.live

    @property
    def waiting(self) -> int:
        """Sequences that wait for one."""
        return self._scheduler.waiting + len(self._inbox)

    @property
    def slots(self) -> int:
        """The most sequences that get a slot."""
        return self._scheduler.slots

    @property
    def yields(self) -> int:
        """Times that a sequence gave its slot, or its blocks of cache, to others."""
        return self.preemptions + self._loop.yields

    def set_room(self, slots: int, fits: Callable[[int, int], bool], pauses: bool) -> None:
        """From the next turn on there is this room; nothing is under way.

        If it `pauses`, slots are room, and an urgent sequence is given that of another.
        """
        own = self._scheduler
        own.slots, own.fits, own.pauses = slots, fits, pauses

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue new jobs; ClosedError after `stop`, and in a forked process."""
        self._turns.check()
        with self._condition:
            if self._stopped is not None:
                raise copied(self._stopped)
            self._inbox.extend(jobs)
            if self._thread is None:
                self.heartbeat = time.monotonic()
                self._thread = threading.Thread(
                    target=self._run, name="dualinfer-driver", daemon=True
                )
                self._thread.start()
                _drivers.add(self)
            self._condition.notify()

    def cancel(self, job: Job) -> None:
        """End a job with the next turn; from any thread."""
        self._left.append(job)

    def stop(self, error: Exception) -> None:
        """End every job with `error`, and the thread; no job is taken any more."""
        with self._condition:
            self._stopped = self._stopped or error
            thread = self._thread
            self._condition.notify()
        if thread is not None and not self.is_here:
            thread.join()

    def _run(self) -> None:
        """Take turns until there is nothing to do."""
        self._loop.driver = threading.get_ident()
        while True:
            with self._condition:
                if self._stopped is None and not self.is_busy:
                    self._condition.wait(_LINGER)
                if self._stopped is not None or not self.is_busy:
                    self._thread = self._loop.driver = None
                    if self._stopped is None:
                        return
                    break
            self.heartbeat = time.monotonic()
            try:
                self._turn()
            except BaseException as error:
                self._fail_all(error)
            if not self.is_busy:
                self.reading = 0
            self._look()
            self._wake()
        self._fail_all(self._stopped)
        self._wake()

    def _look(self) -> None:
        """Behind a turn that failed: see whether the device still computes, and turns bring some.

        After an error of CUDA's that stays, no call of the process succeeds any more.
        """
        failed, self._failed = self._failed, None
        if failed is None:
            return
        self._failures += 1
        self.is_looking = True  # a device that hangs hangs here
        self.lost = self._loop.trouble()
        self.is_looking = False
        if self.lost is None and self._failures >= _MOST_FAILURES:
            self.lost = f"{self._failures} turns in a row have failed, the last one: {failed!r}."

    @property
    def is_busy(self) -> bool:
        """True while there are jobs."""
        return bool(self._inbox or self._scheduler.live or self._scheduler.waiting)

    def _turn(self) -> None:
        """Let in and out who comes and leaves, take a step or a few, and hand out its tokens."""
        while self._inbox:
            self._scheduler.submit(self._inbox.popleft())
        while self._left:
            self._scheduler.cancel(self._left.popleft())
        ours = {id(live) for job in self._jobs for live in job.lives}
        others = self._loop.tokens_beside(ours)
        if self._loop.pool is None and not self._jobs:  # room grows: the first one runs, or fails
            others = []
        turn: Any = self._scheduler.turn(time.monotonic(), others)
        for job in turn.cancelled:
            self._finish(job, reason="cancelled")
        for job in turn.expired:
            at = "before it had a slot" if job.channel.began is None else "while it was under way"
            error = DeadlineError(
                f"The deadline of a request passed {at}, after {job.given} new tokens. Give it "
                "more time, or ask for fewer tokens."
            )
            self._finish(job, error=error)
        for job in turn.paused:
            self._pause(job)
        self._check_model()
        self.reading = sum(
            job.prompt
            for job in [*self._jobs, *turn.admitted]
            if job.given == len(job.request.done)  # no token of its own yet
        )
        self._begin(turn.admitted, len(others))
        has_begun = any(job.state == "live" for job in turn.admitted)
        self._loop.queue.claim(self._scheduler.waiting > 0, anew=has_begun)
        if not self._jobs:
            self._loop.longest = MAX_STEPS
            # For others, who may have stopped reading.
            if self._scheduler.waiting and not self._loop.make_way():
                time.sleep(_PAUSE)
            return
        self._loop.longest = steps = steps_for(self._seconds)
        self._step(steps)
        self._step_chosen()
        for job in list(self._jobs):
            self._guarded(self._choose if job.begin is not None else self._hand_out, job)
        if not self._jobs:
            self._loop.longest = MAX_STEPS

    def _has_room(self, new: Sequence[Job], leaving: Sequence[Job]) -> bool:
        """See `Scheduler`: where slots share the blocks of a cache, prompts may wait for some."""
        lives = [job.live for job in leaving if job.live is not None]
        asked = [(_as_read(job), job.begin is not None) for job in new]
        return self._loop.has_blocks_for(asked, lives)

    def _pause(self, job: Job) -> None:
        """Take the slot of a job, which waits and goes on as if nothing had been."""
        assert job.live is not None
        try:
            left = self._loop.suspend(job.live)
        except BaseException as error:
            self._finish(job, error=error)
            return
        if left is None:  # it has ended meanwhile
            self._guarded(self._hand_out, job)
            return
        self.preemptions += 1
        self._jobs.remove(job)
        job.pause(left)

    def _check_model(self) -> None:
        try:
            self._check()
        except BaseException as error:
            self._fail_all(error)

    def _begin(self, jobs: Sequence[Job], others: int) -> None:
        """Give jobs their slots. Where several fail together, each is tried alone."""
        jobs = [job for job in jobs if job.state == "live"]
        groups: dict[Any, list[Job]] = {}
        for job in jobs:
            key = job.begin is not None, kind(job.request)
            groups.setdefault(key, []).append(job)
        without_room = {id(job) for group in groups.values() for job in self._start(group, others)}
        if without_room:  # they wait in their old order
            self._scheduler.put_back([job for job in jobs if id(job) in without_room])

    def _start(self, group: list[Job], others: int) -> list[Job]:
        """Start jobs together; those for which there is no room while others are under way.

        They wait for no slot that another thread has taken meanwhile: all others would wait, too.
        """
        now = time.monotonic()
        try:
            if group[0].begin is not None:
                self._start_chosen(group)
            else:
                saved = [None if job.left is None else job.left.saved for job in group]
                lives = self._loop.start([job.request for job in group], False, saved)
                for job, live in zip(group, lives, strict=True):
                    job.go_on(live)
                    live.urgent = job.urgent
                    if job.stop is not None and job.watch is None:
                        self._guarded(self._watch, job)
        except NoSlotError:
            return group
        except OutOfMemoryError as error:
            if not (self._jobs or others):
                return self._start_each(group, others, error)
            self._scheduler.hold(len(self._jobs) + others)
            return group
        except BaseException as error:
            return self._start_each(group, others, error)
        for job in group:
            if job.state == "live":
                job.channel.began = job.channel.began or now
                self._jobs.append(job)
        return []

    def _start_chosen(self, group: Sequence[Job]) -> None:
        """Start jobs whose tokens the host chooses, by one pass over their prompts."""
        begun = [job.begin() for job in group if job.begin is not None]
        starts = self._loop.start_each([own.requests for own in begun])
        for job, own, start in zip(group, begun, starts, strict=True):
            own.begin(*start)
            job.begun, job.steps = own, iter(own)

    def _start_each(self, group: list[Job], others: int, error: BaseException) -> list[Job]:
        if len(group) == 1:
            self._finish(group[0], error=error)
            return []
        return [left for job in group for left in self._start([job], others)]

    def _watch(self, job: Job) -> None:
        assert job.stop is not None
        job.watch = job.stop.watch(job.request.tokens.tolist())
        for token in job.request.done:
            job.watch.is_completed(token)

    def _step(self, steps: int) -> None:
        """A chunk of steps; where it fails, sequences that it did not serve go on."""
        if all(job.begin is not None for job in self._jobs):
            return
        begun = time.monotonic()
        try:
            self._loop.turn(steps)
        except BaseException as error:
            served = [job for job in self._jobs if job.begin is None]
            for job in served:
                assert job.live is not None
                if not job.live.ended:  # the loop does not know
                    self._finish(job, error=copied(error))
            return
        seconds = (time.monotonic() - begun) / steps
        known = self._seconds
        self._seconds = seconds if known is None else known + _SOME * (seconds - known)

    def _step_chosen(self) -> None:
        """One step for all jobs whose tokens the host chooses, and one pass for drafts of theirs.

        Where it fails, each of them makes its own, and learns what has become of its sequences.
        """
        asks: list[Ask] = []
        for job in self._jobs:
            begun = job.begun
            if begun is None or any(x.error for x in begun.lives):
                continue
            if (ask := begun.asks) is not None:
                asks.append(ask)
        if len(asks) > 1:
            with suppress(BaseException):
                self._loop.bring(asks)

    def _guarded(self, function: Callable[[Job], None], job: Job) -> None:
        """Call it for a job, which ends alone where that fails."""
        try:
            function(job)
        except BaseException as error:
            self._finish(job, error=error)

    def _hand_out(self, job: Job) -> None:
        """Give on the tokens that have come, and the end."""
        live, most = job.live, job.request.max_new_tokens
        assert live is not None
        ended = live.ended  # before its tokens are looked at, which another thread books
        for token in live.tokens[job.given :]:
            self._give(job, token, live.told)
            is_stop = job.watch is not None and job.watch.is_completed(token)
            if is_stop and live.may_stop_at(job.given - 1):
                self._finish(job, reason="stop")
                return
        if live.error is not None:
            self._finish(job, error=live.error)
        elif ended:
            is_whole = live.is_whole or job.given < most
            self._finish(job, reason="stop" if is_whole else "length")

    def _choose(self, job: Job) -> None:
        """The next token of a job whose tokens the host chooses, and what drafts had right."""
        assert job.steps is not None and job.begun is not None
        while job.state == "live":
            token = next(job.steps, [None])[0]
            if token is not None:
                self._give(job, token, job.begun.told[0])
            is_long = job.given >= job.request.max_new_tokens
            if token is None or token in job.request.eos_ids or is_long:
                self._finish(job, reason="length" if token is not None and is_long else "stop")
            if not job.begun.is_ahead:
                return

    def _give(self, job: Job, token: int, told: Sequence[np.ndarray]) -> None:
        if job.request.tells:
            job.channel.told.append(told[job.given])
        self._failures, self.lost = 0, None
        job.given += 1
        job.channel.count = job.given
        job.channel.items.append(token)
        self._note(job)

    def _finish(
        self, job: Job, reason: str | None = None, error: BaseException | None = None
    ) -> None:
        """Free what a job holds, and tell it that it has ended."""
        with suppress(BaseException):  # a loop that failed has freed it
            if job.live is not None:
                self._loop.leave([job.live])
            if job.steps is not None:
                job.steps.close()
        if isinstance(error, StepError | DistributedError) or _is_of_device(error):
            self._failed = error
        job.left = None  # what it had saved, which its caller's handle would keep
        if job.live is not None:
            job.live.saved = None
        if job in self._jobs:
            self._jobs.remove(job)
        if job.state in ("live", "waiting"):  # paused, and not yet waiting for long
            self._scheduler.end(job)
        if error is not None and not isinstance(error, Exception):
            cause, error = error, StepError(f"A request was interrupted: {error!r}.")
            error.__cause__ = cause
        if not job.channel.has_ended:
            job.channel.error, job.channel.reason = error, None if error else reason
        self._note(job)

    def _fail_all(self, error: BaseException | None) -> None:
        """End every job, also those that wait, with an error."""
        waiting = [*self._inbox]
        self._inbox.clear()
        dropped: Iterable[Any] = self._scheduler.drop()
        for job in [*dropped, *waiting]:
            self._finish(job, error=None if error is None else copied(error))
        self._jobs.clear()
        self._loop.queue.claim(False)
        self._loop.longest = MAX_STEPS

    def _note(self, job: Job) -> None:
        """Wake who waits for a job at the end of the turn."""
        if (waiter := job.channel.waiting()) is not None:
            waiters = self._woken.setdefault(waiter[0], [])
            if waiter[1] not in waiters[-1:]:
                waiters.append(waiter[1])

    def _wake(self) -> None:
        """Wake those who were noted, by one call for each event loop."""
        woken, self._woken = self._woken, {}
        for deliver, waiters in woken.items():
            deliver(waiters)


def _as_read(job: Job) -> Request:
    """The request of a job as it is read: its new tokens so far are of the prompt."""
    request, done = job.request, job.request.done
    if not done:
        return request
    tokens = np.append(request.tokens, np.array(done, request.tokens.dtype))
    return replace(request, tokens=tokens, max_new_tokens=request.max_new_tokens - len(done))


def _set(futures: Sequence["asyncio.Future[None]"]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _is_of_device(error: BaseException | None) -> bool:
    """True for an error that may be the device's: frameworks raise RuntimeError for these."""
    return isinstance(error, RuntimeError) and not isinstance(error, DualinferError)


_drivers: "weakref.WeakSet[Driver]" = weakref.WeakSet()


def _end() -> None:
    """End all threads before the interpreter takes away what they run on."""
    for driver in list(_drivers):
        driver.stop(ClosedError("The program ends."))


atexit.register(_end)
