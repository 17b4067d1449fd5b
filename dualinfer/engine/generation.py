"""The sequences of one call of generate: driven by its own thread, or by the driver's."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from typing import Any

import numpy as np

from ..backends.base import Request
from ..errors import ClosedError
from .driver import Channel, Driver, Job
from .loop import Loop
from .stops import StopStrings


class Generation:
    """The sequences of one call, step by step. Close it, or exhaust it, to free its slots.

    `leave` is called once it is closed, or has not begun.
    """

    def __init__(
        self,
        loop: Loop,
        requests: Sequence[Request],
        chunk: int,
        stop: StopStrings | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop, self._chunk = loop, chunk
        with ExitStack() as ends:
            ends.callback(leave)
            self._watches = [stop.watch(r.tokens.tolist()) for r in requests] if stop else []
            self._lives = loop.start(requests)
            self._ends = ends.pop_all()

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
        with self._ends, suppress(ClosedError):  # in a forked process, which has nothing to free
            self._loop.leave(self._lives)


class Awaited:
    """The sequences of one call beside those of others: the driver's thread takes their steps.

    As `Generation`, but the steps come when all of them are done. Threads that each took steps for
    all would pass the turn from one to the next, and let each other in one by one.
    """

    def __init__(
        self, driver: Driver, requests: Sequence[Request], stop: StopStrings | None = None
    ) -> None:
        self._driver, self._ended = driver, threading.Event()
        jobs = [Job.of(request, stop=stop) for request in requests]
        for job in jobs:
            job.channel = _Whole(self._ended)
        self._jobs = jobs
        driver.submit(jobs)

    def __iter__(self) -> Generator[list[int | None], None, None]:
        """For every step, each sequence's new token; None once it has ended."""
        try:
            channels = [job.channel for job in self._jobs]
            while not all(x.has_ended for x in channels) and not any(x.error for x in channels):
                self._ended.wait()
                self._ended.clear()
            for failed in (x.error for x in channels if x.error is not None):
                raise failed
            for tokens in zip_longest(*(x.items for x in channels)):
                yield list(tokens)
        finally:
            self.close()

    @property
    def told(self) -> list[list[np.ndarray]]:
        """Arrays of `sampling.tell` for each sequence's tokens, in order; none where none tells."""
        return [job.channel.told for job in self._jobs]

    def close(self) -> None:
        """End what is unfinished, and wait until its slots are free."""
        left = [job for job in self._jobs if not job.channel.has_ended]
        for job in left:
            self._driver.cancel(job)
        while not self._driver.is_here and any(not job.channel.has_ended for job in left):
            self._ended.wait()
            self._ended.clear()


class _Whole(Channel):
    """A channel whose reader waits for the end of some of them, and for no token before."""

    def __init__(self, ended: threading.Event) -> None:
        super().__init__()
        self._event = ended

    def waiting(self) -> tuple[Callable[[list[Any]], None], Any] | None:
        """See `Channel.waiting`."""
        return (_set, self._event) if self.has_ended else None


def _set(events: Sequence[threading.Event]) -> None:
    for event in events:
        event.set()
