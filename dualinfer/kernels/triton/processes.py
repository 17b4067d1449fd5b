"""The processes that compile kernels for this one, whose program is `compiling`."""

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from triton import knobs

from .compiling import DONE, FAILED

MOST = 12
_ANSWERS = (DONE, FAILED)
_FEW = 3  # kernels that are wanted at a time from which on a process is worth its start
_PACKAGE = Path(__file__).parents[2]
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
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Compilers:
    """Up to `most` processes, each of which compiles one kernel at a time into Triton's cache.

    They are started where several kernels are wanted at a time, or by `start`, and end when this
    process does or when nothing is asked of them. Whatever fails here leaves a kernel to the
    caller, who then compiles it as if there were no processes.
    """

    def __init__(self, most: int) -> None:
        self._most, self._asked = most, 0
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
        return self._usable and self._most > 0 and is_kept and self._owner == os.getpid()

    def start(self) -> None:
        """Start all of them, ahead of many kernels: until it has imported Triton one takes 1 s."""
        with self._lock:
            while self.usable and len(self) < self._most:
                self._start()

    def compile(self, line: bytes, least: int = _FEW) -> bool:
        """Have a process compile the task of a `line`; False where the caller has to.

        It waits until Triton's cache has the code. A process is started for it where `least` are
        asked for at a time.
        """
        with self._lock:
            self._asked += 1
            process = self._take(least)
        try:
            return process is not None and self._answered(process, line)
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
        if not self._idle and len(self._all) < self._most and self._asked >= least:
            self._start()
        return self._idle.pop() if self._idle else None

    def _start(self) -> None:
        command = [sys.executable, "-c", _PROGRAM, *map(str, sys.path)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)
        except OSError:  # the user can have no more processes
            self._usable = False
            return
        threading.Thread(target=process.wait, name="dualinfer-reaping", daemon=True).start()
        self._all.append(process)
        self._idle.append(process)

    def _answered(self, process: "subprocess.Popen[bytes]", line: bytes) -> bool:
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        with suppress(OSError):
            process.stdin.write(line)
            process.stdin.flush()
            # What modules of the caller print as they are imported comes before.
            answer = next((x for x in process.stdout if x.endswith(_ANSWERS)), b"")
        if not answer:  # it has died, which another one might do as well
            self._usable = False
            return False
        with self._lock:
            self._idle.append(process)
        return answer.endswith(DONE)
