"""Lines from the process that leads to each of those that follow it: frames over private sockets.

A line has no name once it stands: nobody but its two ends can write to it.
"""

import logging
import os
import shutil
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from ..errors import DistributedError, StepError, UnsupportedError
from .agreement import Peers
from .frames import Message, Unpacker, packed

_log = logging.getLogger(__name__)
_READ = 2**18  # bytes
_PATIENCE = 60.0  # seconds for another process to come to the socket, once it has said that it will
_LONGEST = 90  # letters of a socket's path
_HOST = Path("/proc/sys/kernel/random/boot_id")


class Line:
    """One end of a line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._connection, self._unpacker = connection, Unpacker()
        self._waiting: deque[Message] = deque()
        self._sending = threading.Lock()

    def send(self, message: Message, **arrays: np.ndarray) -> None:
        """Send a message, from any thread; DistributedError where the other end is gone."""
        self.send_frame(packed(message, **arrays))

    def send_frame(self, frame: bytes) -> None:
        """See `send`; of a message that is packed."""
        with self._sending:
            try:
                self._connection.sendall(frame)
            except OSError as error:
                raise DistributedError(f"Another process of the model is gone: {error}.") from error

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None once the other end is gone, or after so many seconds.

        What is no message is the end of the line.
        """
        while not self._waiting:
            try:
                self._connection.settimeout(seconds)
                data = self._connection.recv(_READ)
            except OSError:
                data = b""
            if not data:
                return None
            try:
                self._waiting += self._unpacker.feed(data)
            except StepError:
                _log.exception("Another process of the model said what is no message.")
                self.close()
        return self._waiting.popleft()

    def listen(self, take: Callable[[Message], None], gone: Callable[[], None]) -> None:
        """Give each message that comes to `take`, and then call `gone`, in a thread.

        So it does where `take` fails.
        """

        def run() -> None:
            try:
                while (message := self.receive()) is not None:
                    take(message)
            except Exception:
                _log.exception("A message of another process of the model could not be taken.")
            finally:
                gone()

        threading.Thread(target=run, name="dualinfer-line", daemon=True).start()

    def close(self) -> None:
        """End it, at the other end as well."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def open_lines(peers: Peers) -> list[Line]:
    """Rank 0's lines to the others, in the order of ranks; of another one its line to rank 0.

    All of them must call it. UnsupportedError where they are not of one host.
    """
    with ExitStack() as stack:
        listener, path = None, ""
        with peers.together("Who leads and who follows") as work:
            if peers.rank == 0:
                listener, path = _listener(stack, peers.size)
            said = work.meet(path=path, host=_host())
        if len(set(said["host"])) > 1:
            raise UnsupportedError(
                "The processes that share this model are of several hosts, and one leads others "
                "of its own host alone. Use generate() in all of them, or a model for each host."
            )
        with peers.together("Lines between the processes"):
            try:
                if listener is not None:
                    return _taken(listener, peers.size)
                return [_joined(said["path"][0], peers.rank)]
            except OSError as error:
                raise DistributedError(
                    f"No line could be opened between the processes: {error}."
                ) from error


def _listener(stack: ExitStack, count: int) -> tuple[socket.socket, str]:
    """A socket in a folder that no other user may enter, and its path; both go with the stack."""
    folder = tempfile.mkdtemp(prefix="dualinfer-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    if len(folder) > _LONGEST:
        folder = tempfile.mkdtemp(prefix="dualinfer-", dir="/tmp")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, "line")
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(count)
    listener.settimeout(_PATIENCE)
    return listener, path


def _taken(listener: socket.socket, count: int) -> list[Line]:
    lines: dict[int, Line] = {}
    while len(lines) < count - 1:
        connection, _ = listener.accept()
        connection.settimeout(_PATIENCE)
        lines[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = Line(connection)
    return [lines[rank] for rank in range(1, count)]


def _joined(path: str, rank: int) -> Line:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_PATIENCE)
    connection.connect(path)
    connection.sendall(rank.to_bytes(4, "little"))
    return Line(connection)


def _host() -> str:
    """The same text in all processes of a host, and another one elsewhere."""
    with suppress(OSError):
        return _HOST.read_text().strip()
    return socket.gethostname()
