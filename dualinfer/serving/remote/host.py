"""The engine's side: it serves one engine to the front that has started this process.

The front is at the other end of a socket that this process has inherited. Where it is gone, so is
this process at once.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

from ... import errors
from ...engine.asynchronous import Start
from ...engine.driver import Channel, Job
from ...errors import DualinferError, StepError
from ...parallel.frames import Message, Unpacker, packed
from ...system.patience import under_way
from ..http.engines import LocalEngine

_log = logging.getLogger("dualinfer.serve")
BEAT_EVERY = 0.5  # seconds between two signs of life
_READ = 2**18  # bytes
_BUFFER = 2**22  # bytes that the front may be behind
_THREADS, _GRAMMARS = 4, 2  # for what is no generation, and for grammars that are compiled


class Outlet(Channel):
    """The tokens of one sequence on their way to the front."""

    def __init__(self, host: "Host", number: int) -> None:
        super().__init__()
        self._host, self.number = host, number
        self.job: Job | None = None
        self.end: Callable[[], None] | None = None
        self.is_left = self.has_told = False

    def begins(self, job: Job) -> None:
        """See `Channel`."""
        self.job = job

    def waiting(self) -> tuple[Callable[[list[Any]], None], Any]:
        """See `Channel`: the front always waits."""
        return self._host.deliver, self


class Host:
    """Tells the front of one engine, and does what it asks for; made before there is an engine."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._connection, self._unpacker = connection, Unpacker()
        self._waiting: list[Message] = []
        self._sending = threading.Lock()
        self._engine: Any = None
        self._local: LocalEngine | None = None
        self._outlets: dict[int, Outlet] = {}
        self._calls: set[int] = set()  # that somebody waits for
        self._threads = ThreadPoolExecutor(_THREADS, "dualinfer-host")
        self._grammars = ThreadPoolExecutor(_GRAMMARS, "dualinfer-grammars")
        threading.Thread(target=self._beat, name="dualinfer-beat", daemon=True).start()

    def received(self) -> Message:
        """The next message of the front."""
        while not self._waiting:
            try:
                data = self._connection.recv(_READ)
            except OSError:
                data = b""
            if not data:
                os._exit(0)  # the front is gone: nobody waits for anything, be it a step that hangs
            self._waiting += self._unpacker.feed(data)
        return self._waiting.pop(0)

    def send(self, message: Message, **arrays: np.ndarray) -> None:
        """Send a message; from any thread."""
        frame = packed(message, **arrays)
        with self._sending:
            try:
                self._connection.sendall(frame)
            except OSError:
                os._exit(0)

    def fail(self, error: BaseException) -> None:
        """Say why there is no engine."""
        self.send({"is": "failed", "error": told_error(error)})

    def _beat(self) -> None:
        """Say at times that this process lives, and what it does."""
        while True:
            beat: Message = {"is": "beat", "doing": under_way()}
            if self._local is not None:
                beat |= {"state": self._local.state()._asdict()}
                beat |= {"pulse": self._local.pulse()._asdict()}
            self.send(beat)
            time.sleep(BEAT_EVERY)

    def run(self, engine: Any, shown: Message) -> None:
        """Serve an engine until the front leaves; `shown` is what people are told of it."""
        self._engine, self._local = engine, LocalEngine(engine)
        knows = {"about": self._local.about._asdict(), "state": self._local.state()._asdict()}
        self.send({"is": "ready", **knows, "shown": shown})
        does = {"start": self._start, "cancel": self._cancel, "leave": self._leave}
        does |= {"tell": self._tell, "embed": self._embed}
        while True:
            message = self.received()
            try:
                does[message["do"]](message)
            except Exception as error:  # which is that request's alone
                numbers = message.get("numbers") or [message["number"]]
                self._refuse(numbers, error)

    def _refuse(self, numbers: Sequence[int], error: BaseException) -> None:
        """Say why requests are not served."""
        for number in numbers:
            self._outlets.pop(number, None)
            self._calls.discard(number)
        self.send({"is": "refused", "numbers": [*numbers], "error": told_error(error)})

    # Sequences

    def _start(self, message: Message) -> None:
        outlets = [Outlet(self, number) for number in message["numbers"]]
        self._outlets |= {outlet.number: outlet for outlet in outlets}
        if "grammar" in message["arguments"]:  # compiling one may take a second
            self._grammars.submit(self._submit, message, outlets)
        else:
            self._submit(message, outlets)

    def _submit(self, message: Message, outlets: Sequence[Outlet]) -> None:
        numbers = [outlet.number for outlet in outlets]
        try:
            ends = np.cumsum(message["counts"])[:-1]
            done = [x.tolist() for x in np.split(message["done"], ends)]
            starts = [Start(*x) for x in zip(message["indices"], done, strict=True)]
            ids, arguments = message["ids"].tolist(), message["arguments"]
            if bias := arguments.get("logit_bias"):  # keys of JSON are texts
                keyed = {int(x): value for x, value in bias.items()}
                arguments = {**arguments, "logit_bias": keyed}
            made = self._engine.submit_sequences(ids, arguments, starts, outlets)
        except BaseException as error:
            self._refuse(numbers, error)
            return
        self.send({"is": "taken", "numbers": numbers})
        for outlet, end in zip(outlets, made, strict=True):
            outlet.end = end
            if outlet.is_left:
                end()

    def _cancel(self, message: Message) -> None:
        for number in message["numbers"]:
            if (outlet := self._outlets.get(number)) is not None:
                outlet.is_left = True
                if outlet.end is not None:
                    outlet.end()

    def deliver(self, outlets: list[Outlet]) -> None:
        """Send what a turn has brought, as one message; on the thread that took the turn.

        Where the device computes no more, this process ends instead: what is under way goes on with
        the one that takes its place.
        """
        now = self._engine.traffic()
        self._end_if(now.lost)
        sizes: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        told: list[np.ndarray] = []
        kept, ended = [], []
        for outlet in dict.fromkeys(outlets):
            count = len(outlet.items)
            if count:
                sizes.append((outlet.number, count, len(outlet.told)))
                tokens.extend(outlet.items)
                outlet.items.clear()
                told.extend(outlet.told)
                outlet.told.clear()
                if not outlet.has_told and outlet.job is not None:
                    outlet.has_told = True
                    kept.append([outlet.number, outlet.job.kept])
            if outlet.has_ended and self._outlets.pop(outlet.number, None) is not None:
                error = None if outlet.error is None else told_error(outlet.error)
                ended.append([outlet.number, outlet.reason, error])
        message: Message = {"is": "turn", "live": now.live}
        message |= {"kept": kept} if kept else {}
        message |= {"ended": ended} if ended else {}
        self.send(
            message,
            sizes=np.array(sizes, np.int32).reshape(-1, 3),
            tokens=np.array(tokens, np.int32),
            told=np.stack(told) if told else np.zeros((0, 0), np.float32),
        )

    def _end_if(self, lost: str | None) -> None:
        """End this process where the device is lost: another one takes its place."""
        if lost is not None:
            _log.error("%s This process ends.", lost)
            self.fail(StepError(lost))
            os._exit(1)

    # Other calls

    def _leave(self, message: Message) -> None:
        self._calls.discard(message["number"])

    def _tell(self, message: Message) -> None:
        def work() -> np.ndarray:
            assert self._local is not None
            rows, pieces = [], self._engine.prompt_told_pieces(message["ids"].tolist())
            while message["number"] in self._calls:
                with self._local.whole():
                    piece = next(pieces, None)
                if piece is None:
                    break
                rows.append(piece)
            return np.concatenate(rows) if rows else np.zeros((0, 1), np.float32)

        self._call(message["number"], work)

    def _embed(self, message: Message) -> None:
        texts, size = message["texts"], message["size"]

        def work() -> np.ndarray:
            assert self._local is not None
            with self._local.whole():
                return self._engine.embed(texts, truncate_dim=size)

        self._call(message["number"], work)

    def _call(self, number: int, work: Callable[[], np.ndarray]) -> None:
        """Send what `work` gives in a thread; only that it was left, if nobody waits by then."""
        self._calls.add(number)

        def run() -> None:
            if number not in self._calls:
                self.send({"is": "left", "number": number})
                return
            try:
                array = np.asarray(work(), np.float32)
            except BaseException as error:
                self._end_if(self._engine.traffic().lost)
                self._refuse([number], error)
            else:
                self.send({"is": "result", "number": number}, array=array)
                self._calls.discard(number)

        self._threads.submit(run)


def told_error(error: BaseException) -> Message:
    """An error as a message has it: the class, if it is dualinfer's, and what it says."""
    if isinstance(error, DualinferError):
        return {"kind": type(error).__name__, "says": str(error)}
    _log.error("The engine failed in what is no error of a request.", exc_info=error)
    return {"kind": None, "says": f"{type(error).__name__}: {error}"}


def error_of(told: Message) -> DualinferError:
    """The error that a message tells, as dualinfer's own."""
    kind = getattr(errors, told["kind"] or "", None)
    if not (isinstance(kind, type) and issubclass(kind, DualinferError)):
        kind = StepError
    return kind(told["says"])


def failure_of(told: Message) -> Exception:
    """The error that a message tells, as it was raised: a bug's is none of dualinfer's."""
    return RuntimeError(told["says"]) if told["kind"] is None else error_of(told)


def shown_of(report: Any, writes: bool) -> Message:
    """The facts that people are told of an engine: its report, and whether it writes texts."""
    names = "architecture", "dtype", "backend", "device_name", "parameter_bytes", "cache_bytes"
    whole = asdict(report)
    return {name: whole[name] for name in names} | {
        "notes": [*report.notes],
        "writes": writes,
    }
