"""The process of an engine, which `dualinfer serve` starts: `python -m ... DESCRIPTOR`."""

import socket
import sys
from pathlib import Path

from ..serving.remote.host import Host, shown_of


def run() -> None:
    """Open the model that the front describes, and serve it until the front leaves."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a child of this process must not keep it open
    host = Host(connection)
    opens = host.received()
    try:
        from ..system.noise import leave_out_noise
        from .quick_start import start_sooner
        from .serve import writes
        from .texts import opened_at

        folder, adapters = Path(opens["folder"]), opens["adapters"]
        leave_out_noise()
        start_sooner(folder)
        with opened_at(folder, adapters, opens["backend"], **opens["how"]) as engine:
            does_write = writes(engine, *opens["room"])
            host.run(engine, shown_of(engine.report(), does_write))
    except BaseException as error:
        host.fail(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run()
