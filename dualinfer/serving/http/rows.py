"""Answers to rows of OpenAI's batches: each is a request to the server's routes, without HTTP."""

import asyncio
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import ArgumentError, a_type, shown
from .needed import check_needed

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
WINDOW = 512  # rows under way at a time; twice as many as there are slots
_PAUSE = 0.1  # seconds before a row is tried again for which there was no place

Row = dict[str, Any]


class RowError(Exception):
    """A row that is no request: a code for programs, and what is wrong with it.

    One that has no id may be told by the number of its `line`.
    """

    def __init__(self, code: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.code, self.line = code, line


def answer_rows(
    engine: Any, rows: Iterable[Any], name: str | None = None, window: int = WINDOW
) -> Iterator[Row]:
    """The results of rows as they come, in any order, as OpenAI's batches write them.

    A row is a dict with `custom_id`, `method`, `url` and `body`, or an exception in the place of
    one. Each gives one result: a `response` with its status and body, or an `error`. At most
    `window` are taken from `rows` before their results are. `name` is what bodies call the model;
    None: whatever they say.
    """
    check_needed("Batches need")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise ArgumentError(f"rows is {a_type(rows)}; expected an iterable of dicts.")
    if not hasattr(engine, "generate_async"):
        raise ArgumentError(
            "This model runs in module mode, by transformers' own code, which makes one call at a "
            "time. Only models of fused mode answer batches."
        )
    return _Rows(engine, name, window).answers(iter(rows))


class _Rows:
    """An event loop of its own, which runs while somebody waits for a result."""

    def __init__(self, engine: Any, name: str | None, window: int) -> None:
        from .app import Server
        from .engines import LocalEngine

        self._is_strict = name is not None
        self._name = name or "model"
        self._app: Any = Server(LocalEngine(engine), self._name).app()
        self._window = window

    def answers(self, rows: Iterator[Any]) -> Iterator[Row]:
        """The results of all rows."""
        # A thread, since the caller's may have a loop that runs, as notebooks do.
        loop, pending = asyncio.new_event_loop(), set[asyncio.Task[Row]]()
        seen: set[str] = set()
        with ThreadPoolExecutor(1, "dualinfer-batch") as thread:
            try:
                is_over = False
                while pending or not is_over:
                    while len(pending) < self._window and not is_over:
                        try:
                            row = next(rows)
                        except StopIteration:
                            is_over = True
                            break
                        pending.add(loop.create_task(self._answer(row, seen)))
                    if pending:
                        waiting = asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                        done, pending = thread.submit(loop.run_until_complete, waiting).result()
                        for task in done:
                            yield task.result()
            finally:
                for task in pending:
                    task.cancel()
                ended = asyncio.gather(*pending, return_exceptions=True) if pending else None
                if ended is not None:
                    thread.submit(loop.run_until_complete, ended).result()
                thread.submit(loop.run_until_complete, loop.shutdown_default_executor()).result()
                loop.close()

    async def _answer(self, row: Any, seen: set[str]) -> Row:
        result: Row = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": None}
        result |= {"response": None, "error": None}
        try:
            if isinstance(row, Exception):
                raise row
            name, url, body = request_of(row)
            result["custom_id"] = name
            if name in seen:
                raise RowError("duplicate_custom_id", f"There was a row {shown(name)} before.")
            seen.add(name)
            if body.get("stream"):
                raise RowError("invalid_request", "stream is not for batches. Leave it out.")
            if not self._is_strict:
                body = {**body, "model": self._name}
            status, said = await self._call(url, json.dumps(body).encode())
        except RowError as error:
            if result["custom_id"] is None:
                result["custom_id"] = _id_of(row)
            result["error"] = {"code": error.code, "message": str(error)}
            if error.line is not None:
                result["line"] = error.line
            return result
        except Exception as error:  # the row's, and no other's
            message = f"{type(error).__name__}: {error}"
            result["error"] = {"code": "invalid_request", "message": message}
            return result
        request = f"req_{secrets.token_hex(12)}"
        result["response"] = {"status_code": status, "request_id": request, "body": said}
        return result

    async def _call(self, url: str, body: bytes) -> tuple[int, Any]:
        """Status and body of a request to the application."""
        while True:
            status, said = await _through(self._app, url, body)
            if status != 429:
                return status, json.loads(said)
            await asyncio.sleep(_PAUSE)


def request_of(row: Any) -> tuple[str, str, dict[str, Any]]:
    """The id, the route and the body of a row; RowError where it is no request."""
    if not isinstance(row, Mapping):
        raise RowError("invalid_row", f"A row is {a_type(row)}; expected an object.")
    if not (isinstance(row.get("custom_id"), str) and row["custom_id"]):
        raise RowError("missing_custom_id", "custom_id is missing, empty or no text.")
    if unknown := [key for key in row if key not in ("custom_id", "method", "url", "body")]:
        raise RowError("unknown_field", f"A row has no field {shown(unknown[0])}.")
    if row.get("method") != "POST":
        raise RowError("invalid_method", f"method is {shown(row.get('method'))}; expected 'POST'.")
    if row.get("url") not in URLS:
        raise RowError(
            "invalid_url", f"url is {shown(row.get('url'))}; expected one of {', '.join(URLS)}."
        )
    if not isinstance(row.get("body"), dict):
        raise RowError("invalid_body", f"body is {a_type(row.get('body'))}; expected an object.")
    return row["custom_id"], row["url"], row["body"]


def _id_of(row: Any) -> str | None:
    """The id of a row that is no request, where it has one."""
    found = row.get("custom_id") if isinstance(row, Mapping) else None
    return found if isinstance(found, str) and found else None


async def _through(app: Any, url: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of an ASGI application for one POST whose client waits for ever."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"batch"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    is_read, status, parts = False, 0, bytearray()

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await asyncio.get_running_loop().create_future()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        parts.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, bytes(parts)
