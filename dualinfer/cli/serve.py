"""`dualinfer serve`: a model behind OpenAI's HTTP routes."""

import ipaddress
import json
import logging
import os
import re
import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.fused import FusedEngine
from ..errors import ArgumentError, DualinferError, UnsupportedError
from ..serving.http.needed import check_needed
from ..system.command_options import KvCacheOption, QuantOption
from ..system.terminal import say
from .options import (
    AdapterOption,
    BackendOption,
    DtypeOption,
    KernelsOption,
    MaxTokensOption,
    ModelArgument,
    RevisionOption,
)
from .texts import opened

_KEY = "DUALINFER_API_KEY"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[^/\s?#@]+")
_BACKLOG = 2048  # connections that wait to be taken


class ListenError(DualinferError, OSError):
    """The address cannot be listened on."""


def serve(
    model: ModelArgument,
    backend: BackendOption = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 for all networks.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="NUMBER", min=0, max=65535, help="0: one that is free.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar=_KEY,
            help="What clients must send; unset: nothing.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What clients call the model; unset: its id, or its folder's name."
        ),
    ] = None,
    grace: Annotated[
        int,
        typer.Option(
            metavar="SECONDS", min=0, help="How long open requests may go on after SIGTERM."
        ),
    ] = 30,
    max_sequences: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", min=1, help="Sequences at a time; unset: what has room, at most 256."
        ),
    ] = None,
    max_tokens: MaxTokensOption = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(help="Read what prompts have in common once."),
    ] = True,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How it writes calls of tools: hermes (Qwen's, too), llama3, mistral or none; "
            "unset: as its chat template does.",
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How it marks its thoughts: think, by <think>, or none; unset: as its chat "
            "template does.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A web page that may call the server, as https://a.b; again for more.",
        ),
    ] = None,
    dtype: DtypeOption = None,
    quant: QuantOption = None,
    adapter: AdapterOption = None,
    kv_cache_dtype: KvCacheOption = None,
    kernels: KernelsOption = None,
    revision: RevisionOption = None,
) -> None:
    """Serve a model to clients of OpenAI's API, many at once.

    Chats, completions, embeddings and metrics, on this machine unless --host says otherwise.
    SIGTERM lets open requests end.
    """
    check_needed("`dualinfer serve` needs", more=("llguidance",))
    # typer takes a variable that is empty for none.
    if not (os.environ.get(_KEY, "-") if api_key is None else api_key).strip():
        raise typer.BadParameter(f"--api-key, or {_KEY}, is empty.")
    for option, value, known in (
        ("--tool-call-parser", tool_call_parser, ("hermes", "llama3", "mistral", "none")),
        ("--reasoning-parser", reasoning_parser, ("think", "none")),
    ):
        if value is not None and value not in known:
            raise typer.BadParameter(f"{option} {value}; expected one of {', '.join(known)}.")
    for origin in allow_origin or []:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"--allow-origin {origin}; expected a scheme and a host, as http://localhost:3000, "
                "without a path, or * for any page."
            )
    how: dict[str, Any] = {"dtype": dtype, "quant": quant, "kv_cache_dtype": kv_cache_dtype}
    with (
        _listening(host, port) as listener,
        opened(
            model, backend, revision, adapter, replace_with_kernel_inject=kernels, **how
        ) as engine,
    ):
        if not isinstance(engine, FusedEngine):
            raise UnsupportedError(
                "This model runs in module mode, by transformers' own code, which makes one call "
                "at a time. Only models of fused mode are served."
            )
        called = name or name_of(model)
        writes = _writes(engine, max_sequences, max_tokens, prefix_cache)
        listener.listen(_BACKLOG)  # who calls from here on waits a moment
        _show(engine, called, writes, listener.getsockname(), api_key is not None)
        how: dict[str, Any] = {
            "api_key": api_key,
            "tool_call_parser": tool_call_parser,
            "reasoning_parser": reasoning_parser,
            "origins": allow_origin or [],
        }
        _run(engine, called, listener, grace, how)


def _writes(engine: FusedEngine, slots: int | None, tokens: int | None, shares: bool) -> bool:
    """Reserve room, and run two steps, so that what must be compiled is before the first client.

    False for a model that writes no texts: it embeds, or sees, or hears.
    """
    if not engine.can_generate():
        return False
    engine.reserve(slots, tokens, prefix_cache=shares)
    try:
        engine.generate([[0]], max_new_tokens=2, do_sample=False)
    except (UnsupportedError, ArgumentError):
        engine.unreserve()
        return False
    return True


def name_of(model: str) -> str:
    """A hub id as it is; of a path its last part."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at the address, taken before a large model is loaded in vain."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with listener:
            listener.bind(address)
            yield listener
    except (socket.gaierror, PermissionError, OSError) as error:
        if isinstance(error, DualinferError):
            raise
        raise ListenError(
            f"{host}:{port} cannot be listened on: {error.strerror}. Pass another --host or --port."
        ) from error


def _show(engine: Any, name: str, writes: bool, address: Any, has_key: bool) -> None:
    """Say what runs, what memory it has, and how to call it."""
    report, (host, port) = engine.report(), address[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    kind, field, value = "completions", "prompt", "Hello"
    if not writes:
        kind, field = "embeddings", "input"
    elif getattr(engine.tokenizer, "chat_template", None):
        kind, field = "chat/completions", "messages"
        value = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": name, field: value})
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    say(f"{name}: {report.architecture}, {report.dtype}, {report.backend} on {report.device_name}")
    say(f"weights {report.parameter_bytes / 2**20:,.0f} MiB; {_room(engine, report)}")
    head = " -H 'Content-Type: application/json'" + key
    typer.echo(f"listening on {url}; the base URL of OpenAI clients is {url}/v1", err=True)
    typer.echo(f"  curl {url}/v1/{kind}{head} -d {shlex.quote(body)}", err=True)
    if not has_key and not ipaddress.ip_address(host).is_loopback:
        say(f"Anybody who reaches this address can use it: pass --api-key, or set {_KEY}.")


def _room(engine: Any, report: Any) -> str:
    """How much of a cache there is."""
    reserved = [note for note in report.notes if note.startswith("room is reserved")]
    return "; ".join([f"cache {report.cache_bytes / 2**20:,.0f} MiB", *reserved])


def _run(engine: Any, name: str, listener: socket.socket, grace: int, how: dict[str, Any]) -> None:
    """Serve until SIGTERM or Ctrl-C; then open requests end first."""
    import uvicorn

    from ..serving.http.app import Server
    from ..serving.http.engines import LocalEngine

    server = Server(LocalEngine(engine), name, **how)

    class Draining(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            server.is_draining = True
            super().handle_exit(sig, frame)

    logging.getLogger("dualinfer.serve").addHandler(logging.StreamHandler())
    config = server.config(grace, backlog=_BACKLOG)
    # uvicorn raises the signal once more when it is done: the engine is to be closed then.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with suppress(KeyboardInterrupt):
            Draining(config).run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
