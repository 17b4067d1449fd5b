"""The process of an engine, which `dualinfer serve` starts: `python -m ... DESCRIPTOR`."""

import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..serving.remote.host import Host, shown_of


def _opened(opens: dict[str, Any]) -> AbstractContextManager[Any]:
    """The engine of a folder, which is closed at the end."""
    from .quick_start import start_sooner
    from .texts import opened_at

    folder = Path(opens["folder"])
    start_sooner(folder)
    return opened_at(folder, opens["adapters"], opens["backend"], **opens["how"])


def run(opened: Callable[[dict[str, Any]], AbstractContextManager[Any]] = _opened) -> None:
    """Open the model that the front describes, and serve it until the front leaves."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a child of this process must not keep it open
    host = Host(connection)
    opens = host.received()
    try:
        from ..system.noise import leave_out_noise
        from .serve import writes

        leave_out_noise()
        with opened(opens) as engine:
            does_write = writes(engine, *opens["room"])
            host.run(engine, shown_of(engine.report(), does_write))
    except BaseException as error:
        host.fail(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run()
