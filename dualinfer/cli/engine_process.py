"""The process of an engine, which `dualinfer serve` starts: `python -m ... DESCRIPTOR`."""

import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import StepError
from ..parallel.launching import pass_over
from ..serving.remote.host import Host, shown_of

TellLost = Callable[[str], None]


def _opened(opens: dict[str, Any], tell_lost: TellLost) -> AbstractContextManager[Any]:
    """The engine of a folder, which is closed at the end."""
    from .quick_start import start_sooner

    start_sooner(Path(opens["folder"]))

    from .shared_engine import opened

    return opened(opens, tell_lost)


def run(
    opened: Callable[[dict[str, Any], TellLost], AbstractContextManager[Any]] = _opened,
) -> None:
    """Open the model that the front describes, and serve it until the front leaves."""
    pass_over("SIGTERM", "SIGHUP")  # it ends with the front, which lets open requests end
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a child of this process must not keep it open
    host = Host(connection)
    opens = host.received()

    def tell_lost(why: str) -> None:  # another engine goes on with what is under way
        host.fail(StepError(why))
        os._exit(1)

    try:
        from ..system.noise import leave_out_noise
        from .serve import writes

        leave_out_noise()
        with opened(opens, tell_lost) as engine:
            does_write = writes(engine, opens["room"])
            host.run(engine, shown_of(engine.report(), does_write))
    except BaseException as error:
        host.fail(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run()
