"""A server on a thread of this process, for a client that measures or tests it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from .app import Server

BACKLOG = 2048  # connections that wait to be taken


@contextmanager
def served(server: Server, grace: int | None = None, **how: Any) -> Iterator[str]:
    """The URL of a server on a free port of this machine, which drains at the end.

    `how` goes to uvicorn.
    """
    runs = uvicorn.Server(server.config(grace, backlog=BACKLOG, **how))
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        thread = threading.Thread(target=runs.run, args=([listener],), name="dualinfer-server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.is_draining = runs.should_exit = True
            thread.join()
