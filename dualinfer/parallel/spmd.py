"""The one wrapper around an engine's calls: threads take turns, and processes call alike."""

import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from ..errors import ClosedError, UnsupportedError
from .agreement import Peers, Work, share_inputs

_PATIENCE, _LOOK = 0.005, 0.0001  # seconds for one who comes to have the turn, and between looks


class Call(Work):
    """The turn of an engine's call `name`, whose arguments all processes prepare until they `meet`.

    `inputs` are the arguments by name: see `share_inputs`. Unless it `waits` it has no turn, which
    is for one process whose device does nothing in it. It is a class and no generator, since it is
    on the way of every forward pass.
    """

    def __init__(
        self,
        turns: "Turns",
        name: str,
        inputs: Mapping[str, Any],
        is_input: Callable[[Any], bool],
        device: Callable[[], Any],
        waits: bool = True,
    ) -> None:
        super().__init__(turns.peers, f"The arguments of {name}")
        self._turns, self._how = turns, (name, inputs, is_input, device)
        self._waits = waits
        self.inputs: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Wait for the turn, then for the inputs."""
        if not self._waits:
            self._turns.check()
            self.inputs = share_inputs(self._peers, *self._how)
            return self
        self._turns.come()
        try:
            self.inputs = share_inputs(self._peers, *self._how)
        except BaseException:
            self._turns.__exit__()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Meet the others if that is to be done yet, and give the turn to the next."""
        try:
            super().__exit__(kind, error, trace)
        finally:
            if self._waits:
                self._turns.__exit__()


class Turns:
    """The lock by which the calls of several threads, and of several processes, take turns.

    It is reentrant: a collected stream may end within any step. Unless `may_fork`, only threads of
    the process that made it may take it.
    """

    def __init__(self, peers: Peers, may_fork: bool) -> None:
        self.peers = peers
        self._lock = threading.RLock()
        self._coming: set[object] = set()  # a mark of each who waits to begin something
        self._process = None if may_fork else os.getpid()
        self._thread = 0  # that drives what is open, where several processes share the model

    @property
    def is_foreign(self) -> bool:
        """True in a forked process, which must leave the engine alone."""
        return self._process not in (None, os.getpid())

    @property
    def is_shared(self) -> bool:
        """True if several processes share the model."""
        return self.peers.size > 1

    def check(self) -> None:
        """Raise ClosedError where it is foreign: what runs the model did not come along."""
        if self.is_foreign:
            raise ClosedError(
                f"This engine belongs to process {self._process}, from which this one, "
                f"{os.getpid()}, was forked; what runs the model did not come along, and a call "
                "would hang or fail. Start the process by 'spawn' or 'forkserver' "
                "(multiprocessing.get_context) and make an engine there."
            )

    def __enter__(self) -> None:
        """Wait for the turn."""
        self.check()
        was_ours = self._is_ours()
        try:
            self._lock.acquire()
        except BaseException:
            self._give_back(was_ours)
            raise

    def come(self) -> None:
        """Wait for the turn to begin something: those who `give_way` leave it to him."""
        mark = object()
        self._coming.add(mark)
        was_ours = self._is_ours()
        try:
            self.__enter__()
            self._coming.discard(mark)
        except BaseException:
            self._coming.discard(mark)
            self._give_back(was_ours)
            raise

    def _is_ours(self) -> bool:
        return self._lock._is_owned()  # pyright: ignore  # as threading.Condition asks

    def _give_back(self, was_ours: bool) -> None:
        """Give the turn to the next if an interrupt came when it had just become ours."""
        if not was_ours and self._is_ours():
            self._lock.release()

    @contextmanager
    def coming(self) -> Generator[None, None, None]:
        """The turn of one who comes."""
        self.come()
        try:
            yield
        finally:
            self.__exit__()

    def give_way(self) -> None:
        """Let those have the turn first who wait for it to begin something, as long as they get it.

        The lock itself has no order: who asks again for the turn that he has just left gets it.
        Who comes later waits for the next time.
        """
        coming, since = self._coming.copy(), time.monotonic()
        while coming and time.monotonic() - since < _PATIENCE:
            time.sleep(_LOOK)
            left = coming & self._coming
            if len(left) < len(coming):
                coming, since = left, time.monotonic()

    def take(self) -> bool:
        """Take the turn if no other thread has it."""
        self.check()
        return self._lock.acquire(blocking=False)

    def __exit__(self, *exc: object) -> None:
        """Give it to the next."""
        self._lock.release()

    def together(self, what: str) -> Work:
        """See `Peers.together`."""
        return self.peers.together(what)

    def begin(self, begun: Any, opened: Collection[int]) -> None:
        """Let a generation begin that is the same in all processes, and so are those `opened`."""
        self.go_on(opened)
        with self.together("What is begun and what is open") as work:
            work.meet(lambda: (begun, sorted(opened)))
        self._thread = threading.get_ident()

    def go_on(self, opened: Collection[int]) -> None:
        """Raise where another thread drives what is open, and other processes could not follow."""
        if self.is_shared and opened and self._thread != threading.get_ident():
            raise UnsupportedError(
                "Several processes share this model, and another thread has a generation open: "
                "how threads take turns differs from process to process. Finish or close it "
                "first, or run both from one thread."
            )

    def streamer(self, streamer: Any) -> Any:
        """The caller's streamer, or where several processes share the model a `LateStreamer`."""
        return LateStreamer(streamer) if self.is_shared and streamer is not None else streamer


class LateStreamer:
    """A streamer that fails at its end: the other processes go on, and so must this one."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._error: Exception | None = None

    def put(self, value: Any) -> None:
        """Hand on a value, unless one before it has failed."""
        if self._error is None:
            try:
                self._streamer.put(value)
            except Exception as error:
                self._error = error

    def end(self) -> None:
        """Raise what has failed, else end the streamer."""
        if self._error is not None:
            raise self._error
        self._streamer.end()
