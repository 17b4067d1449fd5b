"""A running server of OpenAI's API, as `dualinfer chat --url` talks with it."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ..errors import ArgumentError, DualinferError, LengthError, printable, shortened

_PATIENCE = 600.0  # seconds between two pieces; a model may read a long prompt
_MOST = 2**20  # bytes of an answer that is no stream, and of one event


class ServerError(DualinferError, OSError):
    """A server cannot be reached, or answers what no server of this API does."""


class Server:
    """The server at a URL, with or without /v1 behind it, and one of its models."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good or parts.query or parts.username:
            raise ArgumentError(f"--url {url}: expected an address such as http://127.0.0.1:8000.")
        self._parts, self._key = parts, key
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.model = self._first_model() if model is None else model

    def __repr__(self) -> str:
        """Name the model and its address."""
        return f"Server({self.model} at {self.url})"

    def _first_model(self) -> str:
        with self._sent("GET", "/models") as response:
            body = _json(response.read(_MOST))
        models = body.get("data")
        name = models[0].get("id") if isinstance(models, list) and models else None
        if not isinstance(name, str):
            raise ServerError(
                f"{self.url} names no model. Name one: dualinfer chat MODEL --url ..."
            )
        return name

    def stream_chat(self, messages: Sequence[Mapping[str, str]], **fields: Any) -> Iterator[str]:
        """The answer as it comes; thoughts that come beside it stand in `<think>`."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **fields}
        thinks = False
        with self._sent("POST", "/chat/completions", body) as response:
            for event in _events(response):
                if isinstance(event.get("error"), dict):
                    raise _refused(event["error"])
                choices = event.get("choices") or [{}]
                delta = choices[0].get("delta") or {}
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                text = delta.get("content") or ""
                if thought and not thinks:
                    thought, thinks = f"<think>\n{thought}", True
                if text and thinks:
                    text, thinks = f"\n</think>\n\n{text}", False
                if thought or text:
                    yield f"{thought}{text}"

    @contextmanager
    def _sent(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a request; an error where it is none."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_PATIENCE)
        headers = {"Content-Type": "application/json"}
        headers |= {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                found = _json(response.read(_MOST)).get("error")
                if isinstance(found, dict):
                    raise _refused(found)
                raise ServerError(f"{self.url}{path} answers with status {response.status}.")
            yield response
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if isinstance(error, DualinferError):
                raise
            why = "it does not answer" if isinstance(error, socket.timeout) else str(error)
            raise ServerError(
                f"{self.url} cannot be talked with: {why or type(error).__name__}. Does the server "
                "run there? `dualinfer serve MODEL` starts one."
            ) from error
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream of events."""
    while line := response.readline(_MOST):
        name, _, value = line.strip().partition(b":")
        if name != b"data":
            continue
        if value.strip() == b"[DONE]":
            return
        yield _json(value)
    raise ServerError("The server ended the stream before the answer had ended.")


def _json(data: bytes) -> dict[str, Any]:
    try:
        made = json.loads(data)
    except (ValueError, RecursionError):
        made = None
    if not isinstance(made, dict):
        raise ServerError("The server answers what is no JSON object. Is it one of OpenAI's API?")
    return made


def _refused(error: Mapping[str, Any]) -> DualinferError:
    said = printable(shortened(error.get("message") or "The server refuses the request.", 500))
    if error.get("code") == "context_length_exceeded":
        return LengthError(f"{said} To go on, begin anew (/reset), or send a shorter message.")
    return ArgumentError(said)
