"""The processes that compile kernels for this one, whose program is `compiling`."""

import atexit
import os
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from .compiling import DONE, FAILED

MOST = 12
_ANSWERS = (DONE, FAILED)
_PATIENCE = 300  # milliseconds after which it is looked whether this process ends
_FEW = 3  # kernels that are wanted at a time from which on a process is worth its start
_PACKAGE = Path(__file__).resolve().parents[2]
_TRITON = str(Path(triton.__file__).resolve().parents[1])
# The caller's modules, from where the caller has them. Of this package the kernels alone: what else
# it imports takes longer than what Triton does.
_PROGRAM = f"""
import sys
sys.path[:] = sys.argv[1:]
package = type(sys)({_PACKAGE.name!r})
package.__path__ = [{str(_PACKAGE)!r}]
sys.modules[package.__name__] = package
from {_PACKAGE.name}.kernels.triton.compiling import serve
serve()
"""


def cores() -> int:
    """Processors that this process may use, of which those that were launched with it have some."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, count // max(1, int(launched))) if launched.isdecimal() else count


def is_ending() -> bool:
    """True once Python waits for threads to end, so that nothing more is to be compiled."""
    return not threading.main_thread().is_alive()


class Workers:
    """Up to `most` threads for what is submitted, in order; a thread ends when nothing is left.

    `concurrent.futures` would run all that is left when Python ends, before `is_ending` is true.
    """

    def __init__(self, most: int) -> None:
        self._most, self._running = most, 0
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Its result, which comes; RuntimeError where no thread can be had for it."""
        coming: Future[Any] = Future()
        task = coming, function
        with self._lock:
            self._tasks.append(task)
            is_more = self._running < self._most
            self._running += is_more
        if is_more:
            try:
                threading.Thread(target=self._work, name="dualinfer-triton").start()
            except RuntimeError:
                with self._lock:
                    self._running -= 1
                    if self._running or task not in self._tasks:
                        return coming
                    self._tasks.remove(task)
                raise
        return coming

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running -= 1
                    return
                coming, function = self._tasks.popleft()
            try:
                coming.set_result(function())
            except BaseException as error:
                coming.set_exception(error)


class Compilers:
    """Up to `most` processes, each of which compiles one kernel at a time into Triton's cache.

    They are started where several kernels are wanted at a time, or by `start`, and end when this
    process does or when nothing is asked of them. Whatever fails here leaves a kernel to the
    caller, who then compiles it as if there were no processes.
    """

    def __init__(self, most: int) -> None:
        self.most, self._asked = most, 0
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._usable = "python" in Path(sys.executable or "").name and not hasattr(sys, "frozen")
        atexit.register(self.close)

    def __len__(self) -> int:
        """Processes that run."""
        return sum(process.poll() is None for process in self._all)

    @property
    def usable(self) -> bool:
        """True unless nothing comes of them here: with one processor, or without Triton's cache."""
        is_kept = not knobs.compilation.always_compile
        return self._usable and self.most > 0 and is_kept and self._owner == os.getpid()

    def start(self) -> None:
        """Start all of them, ahead of many kernels: until it has imported Triton one takes 1 s."""
        with self._lock:
            while self.usable and len(self) < self.most:
                self._start()

    def compile(self, line: bytes, least: int = _FEW) -> bool:
        """Have a process compile the task of a `line`; False where the caller has to.

        It waits until Triton's cache has the code. A process is started for it where `least` are
        asked for at a time.
        """
        with self._lock:
            self._asked += 1
        try:
            while True:
                with self._lock:
                    process = self._take(least)
                if process is None:
                    return False
                with suppress(Idle):
                    return self._answered(process, line)
        finally:
            with self._lock:
                self._asked -= 1

    def give_up(self) -> None:
        """Use no process from now on, as what they do is of no use here."""
        self._usable = False
        self.close()

    def close(self) -> None:
        """End them; what they have under way is left."""
        if self._owner != os.getpid():
            return
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()

    def _take(self, least: int) -> "subprocess.Popen[bytes] | None":
        """One that has nothing to do; None where none has and none is started."""
        if not self.usable:
            return None
        self._all = [process for process in self._all if process.poll() is None]
        self._idle = [process for process in self._idle if process.poll() is None]
        if not self._idle and len(self._all) < self.most and self._asked >= least:
            self._start()
        return self._idle.pop() if self._idle else None

    def _start(self) -> None:
        command = [sys.executable, "-c", _PROGRAM, *_folders()]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        process = None
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)
            threading.Thread(target=process.wait, name="dualinfer-reaping", daemon=True).start()
        except (OSError, RuntimeError, ValueError):  # no more processes, or threads, may be had
            self._usable = False
            if process is not None:
                process.kill()
                process.wait()
            return
        self._all.append(process)
        self._idle.append(process)

    def _answered(self, process: "subprocess.Popen[bytes]", line: bytes) -> bool:
        assert process.stdin is not None
        answer = b""
        with suppress(OSError):
            process.stdin.write(line)
            process.stdin.flush()
            answer = _answer(process)
        if not answer:
            if process.wait() == 0:
                raise Idle
            self._usable = False  # it has died, which another one might do as well
            return False
        with self._lock:
            self._idle.append(process)
        return answer.endswith(DONE)


class Idle(Exception):
    """A process has ended as nothing was asked of it, just before this was."""


def _answer(process: "subprocess.Popen[bytes]") -> bytes:
    """What it says up to its answer; nothing where it ends before, or is ended as this one ends.

    What modules print as they are imported comes before an answer.
    """
    assert process.stdout is not None
    said, pipe = b"", process.stdout.fileno()
    polled = select.poll()
    polled.register(pipe, select.POLLIN)
    while not said.endswith(_ANSWERS):
        if polled.poll(_PATIENCE):
            if not (part := os.read(pipe, 1 << 16)):
                return b""
            said += part
        elif is_ending():  # it may have been stopped, and Python waits for who waits for it
            process.kill()
    return said


def _folders() -> list[str]:
    """Where a process finds modules: not where this one happens to be, as '' would have it."""
    folders = [folder for folder in map(str, sys.path) if os.path.isabs(folder)]
    return [*folders, *({_TRITON} - {*folders})]
