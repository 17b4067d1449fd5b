"""A client of OpenAI's completions for measuring: many streams at once at little cost.

As a program it runs the loads that a JSON file names, in a process of its own, so that it takes no
time of the server's.
"""

import asyncio
import json
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import ArgumentError, DualinferError
from .drive import Clock, Record, Run, drive
from .load import Ask, Load

_PATIENCE = 600.0  # seconds without a byte
_BODY = 200  # characters of an error's body


class AnswerError(DualinferError):
    """The server's answer is not what was asked for."""


class Client:
    """Completions of one server, over connections that are kept open."""

    def __init__(
        self,
        url: str,
        model: str | None,
        key: str | None = None,
        extra: dict[str, Any] | None = None,
        patience: float = _PATIENCE,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError(f"{url!r} is no address of a server. Pass http://HOST:PORT.")
        is_safe = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if is_safe else 80)
        self._tls = ssl.create_default_context() if is_safe else None
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        netloc = parts.netloc.rpartition("@")[2]
        self._head = f"Host: {netloc}\r\nAccept: */*\r\nUser-Agent: dualinfer-bench\r\n"
        if key:
            self._head += f"Authorization: Bearer {key}\r\n"
        self.model, self._extra, self._patience = model, extra or {}, patience
        self._idle: list[_Connection] = []

    async def run(self, load: Load, asks: list[Ask]) -> Run:
        """Send a load."""
        try:
            return await drive(load, asks, self.send)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections that nothing uses."""
        while self._idle:
            self._idle.pop().close()

    async def find_model(self) -> str:
        """The name of the first model that the server lists."""
        body = bytearray()
        await self._request("GET", "/models", b"", lambda data, _: body.extend(data), Clock())
        try:
            return json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise AnswerError("/v1/models lists no model. Pass its name.") from error

    async def send(self, ask: Ask, record: Record, clock: Clock) -> None:
        """One completion; its record gets the time of each event that has a choice.

        Ids are the prompt, so that its length is exact, and EOS is passed over.
        """
        body = {
            "model": self.model,
            "prompt": ask.ids,
            "max_tokens": ask.new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        events = _Events(record)
        await self._request("POST", "/completions", json.dumps(body).encode(), events.feed, clock)
        if not record.stamps:
            raise AnswerError("The stream ended without a token.")
        if not events.is_done:
            raise AnswerError("The stream ended early: without [DONE].")
        if events.usage is None:
            raise AnswerError("The stream has no usage, so that its tokens cannot be counted.")
        record.output = int(events.usage.get("completion_tokens") or 0)
        record.input = int(events.usage.get("prompt_tokens") or record.input)

    async def _request(
        self, method: str, route: str, body: bytes, feed: "_Feed", clock: Clock
    ) -> None:
        head = f"{method} {self._path}{route} HTTP/1.1\r\n{self._head}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        message = f"{head}\r\n".encode("latin-1") + body
        while True:
            connection, is_new = await self._connect()
            try:
                async with asyncio.timeout(self._patience) as limit:
                    await connection.exchange(message, feed, clock, limit, self._patience)
            except TimeoutError as error:
                raise AnswerError(f"Nothing came for {self._patience:g} s.") from error
            except ConnectionError:
                if is_new or connection.has_answered:
                    raise
                continue  # the server had closed it before the request came
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    async def _connect(self) -> "tuple[_Connection, bool]":
        while self._idle:
            if not (connection := self._idle.pop()).is_closed:
                return connection, False
        loop = asyncio.get_running_loop()
        made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return made[1], True


_Feed = Callable[[bytes, float], None]


class _Events:
    """The events of a stream, read as they come."""

    def __init__(self, record: Record) -> None:
        self._record, self._rest = record, b""
        self.usage: dict[str, Any] | None = None
        self.is_done = False

    def feed(self, data: bytes, now: float) -> None:
        """Read what came at a time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                self.is_done = True
                continue
            event = json.loads(text)
            if event.get("error"):
                raise AnswerError(f"The stream failed: {json.dumps(event['error'])[:_BODY]}")
            if event.get("usage"):
                self.usage = event["usage"]
            if event.get("choices"):
                self._record.stamps.append(now)


class _Connection(asyncio.Protocol):
    """One connection of HTTP/1.1: one answer at a time, given on as its bytes come."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: Any = None
        self._future: asyncio.Future[None] | None = None
        self.is_closed = self.has_answered = self.is_reusable = False

    async def exchange(
        self, message: bytes, feed: _Feed, clock: Clock, limit: asyncio.Timeout, patience: float
    ) -> None:
        """Send a request and read its answer; raise where that fails."""
        loop = asyncio.get_running_loop()
        self._loop, self._limit, self._patience = loop, limit, patience
        self._feed, self._clock = feed, clock
        self._status, self._left, self._is_chunked = 0, 0, False
        self._to_end, self._keeps, self._error = False, True, bytearray()
        self.has_answered = self.is_reusable = False
        self._future = future = loop.create_future()
        if self.is_closed:
            raise ConnectionResetError("The server has closed the connection.")
        self._transport.write(message)
        await future
        if self._status != 200:
            said = self._error.decode(errors="replace").strip()
            raise AnswerError(f"Status {self._status}: {said[:_BODY]}")

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._future is None or self._future.done():
            self.is_closed = True  # bytes that nobody asked for
            return
        now = self._clock()
        self._limit.reschedule(self._loop.time() + self._patience)
        self._buffer += data
        self.has_answered = True
        try:
            if self._status == 0 and not self._read_head():
                return
            if self._read_body(now):
                self.is_reusable = self._keeps and not self._buffer
                self._future.set_result(None)
        except Exception as error:
            self._future.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_closed, self.is_reusable = True, False
        if self._future is None or self._future.done():
            return
        if self._status and self._to_end:
            self._future.set_result(None)
        else:
            error = ConnectionResetError("The connection ended before the answer did.")
            self._future.set_exception(error)

    def _read_head(self) -> bool:
        """Read status and headers; False where they have not all come."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self._status = int(first.split(" ", 2)[1])
        if self._status == 100:
            self._status = 0
            return self._read_head()
        fields = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        self._is_chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        length = fields.get("content-length")
        self._to_end = not self._is_chunked and length is None
        self._left = -1 if self._is_chunked else int(length or 0)
        self._keeps = fields.get("connection", "").lower() != "close" and not self._to_end
        return True

    def _read_body(self, now: float) -> bool:
        """Give on the bytes of the body that have come; True at its end."""
        if not self._is_chunked:
            data = bytes(self._buffer if self._to_end else self._buffer[: self._left])
            del self._buffer[: len(data)]
            self._left -= len(data)
            self._give(data, now)
            return not self._to_end and self._left == 0
        while True:
            if self._left < 0:  # the size of a chunk is next
                end = self._buffer.find(b"\r\n")
                if end < 0:
                    return False
                self._left = int(self._buffer[:end].split(b";")[0], 16)
                del self._buffer[: end + 2]
                self._is_last = self._left == 0
            if len(self._buffer) < self._left + 2:
                return False
            self._give(bytes(self._buffer[: self._left]), now)
            del self._buffer[: self._left + 2]
            self._left = -1
            if self._is_last:
                return True

    def _give(self, data: bytes, now: float) -> None:
        if self._status != 200:
            self._error += data[: max(0, 4 * _BODY - len(self._error))]
        elif data:
            self._feed(data, now)


async def run_all(request: dict[str, Any]) -> list[Run]:
    """The runs of the loads that a request names, one after another."""
    client = Client(request["url"], request["model"], request.get("key"), request.get("extra"))
    if client.model is None:
        client.model = await client.find_model()
    runs = []
    for fields in request["loads"]:
        load = Load(**fields)
        asks = load.asks(request["vocab"], request.get("most"), request.get("first", 0))
        runs.append(await client.run(load, asks))
    return runs


def main() -> None:
    """Run what the file named by the first argument asks for; the runs go to stdout as JSON."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    json.dump([run.to_dict() for run in asyncio.run(run_all(request))], sys.stdout)


if __name__ == "__main__":
    main()
