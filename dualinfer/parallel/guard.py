"""The process that ends a job's processes where their launcher is killed; run by its path.

It waits at its standard input, which the launcher holds open, for a byte that says that all have
ended. Where the launcher ends without, whatever ended it, each process whose environment has the
job's mark is told to end, and killed a moment later: the ranks, and all that they have started.
"""

import os
import signal
import sys
import time
from contextlib import suppress

VARIABLE = "DUALINFER_JOBS"  # marks of the jobs that a process is of, which its children inherit
_GRACE = 2.0  # seconds for what a process does when it is told to end
_PATIENCE = 30.0  # seconds after which one that cannot be killed is left
_PAUSE, _TWICE = 0.1, 2  # a process that is just being started has no mark yet


def find_processes(mark: str) -> list[int]:
    """The processes of this user whose environment, as they began, has the mark."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with suppress(OSError):  # ended meanwhile, or another user's
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            key = f"{VARIABLE}=".encode()
            marks = [own.removeprefix(key) for own in variables if own.startswith(key)]
            if any(mark.encode() in own.split(b":") for own in marks):
                found.append(int(name))
    return found


def end_processes(mark: str) -> None:
    """End all of them, and what they start meanwhile."""
    start = time.monotonic()
    told, empty = set[int](), 0
    while time.monotonic() - start < _PATIENCE and empty < _TWICE:
        left = find_processes(mark)
        empty = 0 if left else empty + 1
        is_late = time.monotonic() - start > _GRACE
        for process in left:
            with suppress(OSError):
                if is_late:
                    os.kill(process, signal.SIGKILL)
                elif process not in told:
                    os.kill(process, signal.SIGTERM)
        told.update(left)
        time.sleep(_PAUSE)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.buffer.read():
        end_processes(sys.argv[1])
