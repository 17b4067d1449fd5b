"""Starts the process of an engine, watches it, and starts another one where it dies or hangs."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from ...errors import ClosedError, DualinferError, StepError
from ...parallel.frames import Message, Unpacker, packed
from ...parallel.launching import guarded
from ..health import BEAT
from ..http.engines import About, State
from .client import RemoteEngine
from .host import error_of

_log = logging.getLogger("dualinfer.serve")
_TICK = 0.25  # seconds between two looks at the engine
_OVER = 1.5  # times the patience after which one that gives no sign of life is ended
_STARTING = 120.0  # seconds of silence of one that starts, which may hold Python's lock
# Of one that starts again and never serves: seconds, and times of what the first one needed.
_AGAIN_MOST, _AGAIN_TIMES = 600.0, 5.0
# An engine that dies so soon, and so often in a row, is given up; so often more for each request
# that was found to kill it, of so many.
_SOON, _MOST_SOON, _MOST_BLAMED = 60.0, 3, 2
_PAUSES = 0.0, 1.0, 2.0  # seconds before it is started again
_GRACE, _REAP = 5.0, 10.0  # seconds for its end, and for that of one that was killed
_LAST = 2.0  # seconds until the end of one that has left the socket can be seen
_TRIES, _AGAIN = 30, 2.0  # where there are no descriptors for one, and seconds between
_BUFFER = 2**22
# Glibc gives each thread memory of its own, and the one that takes steps leaves holes in its part,
# which grow for hours. One thread computes at a time.
_MEMORY = {"MALLOC_ARENA_MAX": "1"}


class _Link(asyncio.Protocol):
    """The front's end of the socket."""

    def __init__(self) -> None:
        self._unpacker = Unpacker()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.take: Any = self.messages.put_nowait
        self.is_lost = False
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        try:
            for message in self._unpacker.feed(data):
                self.take(message)
        except Exception:
            _log.exception("The engine said what is no message.")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.is_lost = True

    def write(self, frame: bytes) -> None:
        """Send a frame; nothing once the engine is gone."""
        if not self.is_lost:
            self._transport.write(frame)

    def close(self) -> None:
        """Leave the engine, which then ends."""
        self._transport.abort()
        self.is_lost = True


class _Life:
    """One process with an engine, from its start to its end."""

    def __init__(self, process: "subprocess.Popen[bytes]", link: _Link) -> None:
        self.process, self.link = process, link
        self.told: DualinferError | None = None  # why it could not start, or go on
        self.hung: str | None = None

    @classmethod
    async def begin(cls, command: Sequence[str], env: Mapping[str, str], opens: Message) -> "_Life":
        """Start one, and tell it what to open."""
        ours, theirs = socket.socketpair()
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            with theirs:
                # In a session of its own: a terminal's Ctrl-C reaches the front alone, which then
                # lets open requests end.
                process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env={**_MEMORY, **os.environ, **env},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(_Link, sock=ours)
        except BaseException:
            ours.close()
            raise
        link.write(packed({"do": "open", **opens}))
        return cls(process, link)

    @property
    def has_ended(self) -> bool:
        """True once it is gone, or cannot be heard any more."""
        return self.link.is_lost or self.process.poll() is not None

    async def end(self, grace: float = 0.0) -> None:
        """End it, and all that it has started, by force where it does not by itself."""
        self.link.close()
        deadline = time.monotonic() + grace
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _REAP
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    @property
    def fate(self) -> str:
        """The way the process ended, in words."""
        if self.hung is not None:
            return f"hung ({self.hung})"
        if self.told is not None:
            return f"failed: {str(self.told).rstrip('.')}"
        code = self.process.poll()
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class Keeper:
    """Keeps one engine running for a front.

    `command` starts a process that serves, by `host.Host`, what `opens` describes. `engine` is what
    the routes see.
    """

    def __init__(self, command: Sequence[str], opens: Mapping[str, Any], tokenizer: Any) -> None:
        self._command, self._opens = command, dict(opens)
        self._env: dict[str, str] = {}
        self._life: _Life | None = None
        self._took: float | None = None  # seconds until the first engine served
        self._fruitless = 0  # engines in a row that died soon and brought nothing
        self.engine = RemoteEngine(tokenizer)
        self.shown: Message = {}
        self.failed: asyncio.Future[DualinferError] = asyncio.get_running_loop().create_future()

    @property
    def process_id(self) -> int | None:
        """The process of the engine that there is."""
        return None if self._life is None else self._life.process.pid

    async def _begun(self, tries: int) -> _Life:
        """A process for an engine; where this machine has none to give it is asked again."""
        while True:
            tries -= 1
            try:
                return await _Life.begin(self._command, self._env, self._opens)
            except OSError as error:
                problem = (
                    f"No process can be started for the engine: {error}. Raise the limit of open "
                    "files (ulimit -n) or of processes, or free memory."
                )
                if tries <= 0:
                    raise StepError(problem) from error
            self.engine.down = problem
            _log.warning("%s It is tried again.", problem)
            await asyncio.sleep(_AGAIN)

    async def _start(self, tries: int = 1) -> _Life:
        """An engine that serves; the error why there is none."""
        self._life = None
        self._life = life = await self._begun(tries)
        begun = time.monotonic()
        message = await self._ready(life)
        if message is None:
            await life.end(0.0 if life.hung else _LAST)
            raise StepError(f"The engine {life.fate}.")
        if message["is"] == "failed":
            life.told = error_of(message["error"])
            raise life.told
        self._took = self._took or time.monotonic() - begun
        about, self.shown = About(**message["about"]), message["shown"]

        def take(message: Message) -> None:
            if message["is"] == "failed":  # its last word
                life.told = error_of(message["error"])
            else:
                self.engine.received(message)

        life.link.take = take
        self.engine.attach(life.link.write, about, State(**message["state"]))
        while not life.link.messages.empty():
            take(life.link.messages.get_nowait())
        return life

    async def _ready(self, life: _Life) -> Message | None:
        """The message that an engine serves, or that it failed; None where it ends or hangs."""
        unheard, begun = 0.0, time.monotonic()
        most = None if self._took is None else max(_AGAIN_MOST, _AGAIN_TIMES * self._took)
        while True:
            if most is not None and time.monotonic() - begun > most:
                life.hung = f"it has not served after {most:.0f} s"
                return None
            try:
                message = await asyncio.wait_for(life.link.messages.get(), _TICK)
            except TimeoutError:
                unheard += _TICK
                if life.has_ended and life.link.messages.empty():
                    return None
                if unheard > _STARTING:
                    life.hung = f"it has said nothing for {unheard:.0f} s"
                    return None
                continue
            unheard = 0.0
            if message["is"] != "beat":
                return message
            doing = message["doing"]
            self.engine.down = f"The engine starts{': ' + doing if doing else ''}."

    async def _watch(self, life: _Life) -> None:
        """Return once an engine has died, or hangs."""
        engine, last = self.engine, time.monotonic()
        while not life.has_ended:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            # Where this process itself did not run, the engine's signs of life wait to be read.
            engine.unheard += min(now - last, 2 * _TICK)
            last = now
            silent = engine.pulse.silent
            if engine.unheard > _OVER * BEAT or silent > engine.pulse.limit:
                life.hung = (engine.trouble or "it is silent").rstrip(".")
                return

    async def _keep(self, life: _Life) -> None:
        """Watch an engine, and each one that takes its place."""
        while True:
            began, progress = time.monotonic(), self.engine.progress
            await self._watch(life)
            self.engine.detach("The engine died, and is started again.")
            await life.end(0.0 if life.hung else _LAST)
            soon = time.monotonic() - began < _SOON and self.engine.progress == progress
            self._fruitless = self._fruitless + 1 if soon else 0
            what = life.fate
            while True:
                if self._fruitless >= _MOST_SOON * (1 + min(self.engine.in_vain, _MOST_BLAMED)):
                    raise StepError(
                        f"The engine died {self._fruitless} times in a row without an answer "
                        f"between; the last time it {what}. The server ends."
                    )
                self.engine.down = f"The engine {what}. It is started again."
                waits = self.engine.state().waiting
                _log.warning("%s Sequences that wait: %d.", self.engine.down, waits)
                await asyncio.sleep(_PAUSES[min(self._fruitless, len(_PAUSES) - 1)])
                begun = time.monotonic()
                try:
                    life = await self._start(_TRIES)
                except DualinferError as error:
                    self._fruitless += 1
                    what = f"could not be started: {error}"
                    if self._life is not None:
                        await self._life.end()
                        what = self._life.fate
                else:
                    break
            _log.warning("The engine serves again after %.1f s.", time.monotonic() - begun)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RemoteEngine]:
        """The engine, once it serves; within it another one takes its place where it dies.

        Raises why the first one could not start. `failed` is done where no other is tried.
        """
        with guarded() as self._env:
            task: asyncio.Task[None] | None = None
            try:
                life = await self._start()
                task = asyncio.ensure_future(self._keep(life))
                task.add_done_callback(self._note)
                yield self.engine
            finally:
                if task is not None:
                    task.cancel()
                    await asyncio.wait({task})
                self.engine.close()
                if self._life is not None:
                    await self._life.end(_GRACE)

    def _note(self, task: "asyncio.Task[None]") -> None:
        """End everything where nothing is kept any more."""
        if task.cancelled():
            return
        error = task.exception()
        if not isinstance(error, DualinferError):
            _log.error("The engine is watched no more.", exc_info=error)
            error = StepError(f"The engine is watched no more: {error!r}.")
        self.engine.close(ClosedError(str(error)))
        if not self.failed.done():
            self.failed.set_result(error)


def python(module: str) -> list[str]:
    """The command that runs a module in a process like this one."""
    return [sys.executable, "-m", module]
