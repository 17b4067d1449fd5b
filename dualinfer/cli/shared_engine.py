"""Engines of the server that several processes share: this one leads, the others follow it."""

import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..api import init_inference
from ..engine.fused import FusedEngine
from ..parallel.launching import check_places, others_of, pass_over
from .quick_start import start_sooner

_PART = 2**16  # bytes


@contextmanager
def opened(
    opens: dict[str, Any], tell_lost: Callable[[str], None] = lambda why: None
) -> Iterator[Any]:
    """The engine that `opens` describes, which is closed at the end.

    On torch each device of one that devices share has a process of its own: those of the others
    are started here and follow this one. Where one of them ends, `tell_lost` is called, in a
    thread, with the reason.
    """
    count = opens["how"].get("tensor_parallel", {}).get("tp_size", 1)
    if count == 1 or opens["backend"] != "torch":
        with _opened(opens) as engine:
            yield engine
        return
    command = ["-m", __name__]
    places = count, opens.get("oversubscribe", False)
    if count > (os.cpu_count() or 1):  # for fewer the check imports torch while they do
        check_places(*places)
    with others_of(command, count, opens, tell_lost) as over:
        check_places(*places)
        with _opened(opens) as engine:
            try:
                if isinstance(engine, FusedEngine):  # others are not served, and who asked is told
                    engine.lead(tell_lost)
                yield engine
            finally:
                over.set()


@contextmanager
def _opened(opens: dict[str, Any]) -> Iterator[Any]:
    """One process's engine; it loads its tokenizer when a grammar asks for it."""
    given = {"backend": opens["backend"], "adapter": opens["adapters"], **opens["how"]}
    with init_inference(Path(opens["folder"]), **given) as engine:
        yield engine


def _line() -> bytes:
    """The line at standard input, behind which nothing comes.

    Python's own buffer is left out: its exit fails while another thread waits within that.
    """
    found = b""
    while not found.endswith(b"\n") and (part := os.read(0, _PART)):
        found += part
    return found


def _end_with_leader() -> None:
    """End this process with the one that has started it, whatever it is at."""
    while os.read(0, _PART):
        pass
    os._exit(0)


def run() -> None:
    """Follow the process at whose pipe this one is."""
    from ..system.noise import leave_out_noise

    pass_over("SIGINT", "SIGTERM", "SIGHUP")  # the leader lets open requests end
    importlib.import_module("torch")  # as the leader does at this time
    if not (line := _line()).endswith(b"\n"):
        return  # it has failed
    opens = json.loads(line)
    threading.Thread(target=_end_with_leader, daemon=True).start()
    os.environ.update(opens["variables"])
    start_sooner(Path(opens["folder"]))
    leave_out_noise()
    with _opened(opens) as engine:
        if isinstance(engine, FusedEngine):
            engine.follow()
        else:
            threading.Event().wait()


if __name__ == "__main__":
    run()
