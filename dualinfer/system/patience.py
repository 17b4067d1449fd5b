"""A line on the terminal for what takes longer than anyone expects; nothing in pipes.

DUALINFER_PROGRESS=1 asks for it in a pipe as well, and 0 for silence everywhere.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 2.0  # seconds before anything is said
_SWITCH = "DUALINFER_PROGRESS"
_under_way: list[str] = []


@contextmanager
def told_if_slow(what: str, patience: float = _PATIENCE) -> Iterator[None]:
    """Say `what` is under way, and for how long, if what runs within takes longer than `patience`.

    On a terminal the line stands behind what is written there, and goes when the work is done.
    """
    with noted(what), _telling(what, patience):
        yield


@contextmanager
def noted(what: str) -> Iterator[None]:
    """Let `under_way` tell that this is at work, of what may take long."""
    _under_way.append(what)
    try:
        yield
    finally:
        _under_way.remove(what)


def under_way() -> str | None:
    """The work of this process, of all that `noted` stands around; None for nothing."""
    now = _under_way[-1:]
    return now[0] if now else None


@contextmanager
def _telling(what: str, patience: float) -> Iterator[None]:
    asked = os.environ.get(_SWITCH, "")
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if asked == "0" or not (is_terminal or asked):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, patience, done, is_terminal), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(what: str, patience: float, done: threading.Event, is_terminal: bool) -> None:
    start = time.perf_counter()
    if done.wait(patience):
        return
    if not is_terminal:
        print(f"dualinfer: {what} ...", file=sys.stderr, flush=True)
        return
    sys.stderr.write("\x1b7")  # remembers where the cursor is
    while True:
        sys.stderr.write(f"\x1b8\x1b[K[{what}: {time.perf_counter() - start:.0f} s]")
        sys.stderr.flush()
        if done.wait(1.0):
            break
    sys.stderr.write("\x1b8\x1b[K")
    sys.stderr.flush()
