"""`dualinfer serve`: a model behind OpenAI's HTTP routes."""

import asyncio
import ipaddress
import json
import logging
import os
import re
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import backends
from ..checkpoint.described.tokenizer import load_tokenizer, tokenizer_folder
from ..engine.fused import FusedEngine
from ..engine.pausing import SWAP_GIB
from ..engine.reserve import AUTO, check_fraction
from ..errors import ArgumentError, DistributedError, DualinferError, UnsupportedError
from ..serving.http.calls import MARKS
from ..serving.http.needed import check_needed
from ..serving.remote.host import shown_of
from ..system.command_options import OversubscribeOption, with_options
from ..system.terminal import say
from .options import BackendOption, MaxTokensOption, ModelArgument, ModelOptions
from .quick_start import OWN_PROCESS, start_sooner
from .shared_engine import opened
from .texts import find_asked
from .wording import print_error

_KEY = "DUALINFER_API_KEY"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[^/\s?#@]+")
_BACKLOG = 2048  # connections that wait to be taken


class ListenError(DualinferError, OSError):
    """The address cannot be listened on."""


@dataclass(frozen=True, kw_only=True)
class AddressOptions:
    """The options of where a server listens, and to whom."""

    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 for all networks.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(metavar="NUMBER", min=0, max=65535, help="0: one that is free.")
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar=_KEY,
            help="What clients must send; unset: nothing.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="What clients call the model; unset: its id, or its folder's name."
        ),
    ] = None
    grace: Annotated[
        int,
        typer.Option(
            metavar="SECONDS", min=0, help="How long open requests may go on after SIGTERM."
        ),
    ] = 30


@dataclass(frozen=True, kw_only=True)
class RoomOptions:
    """The options of how many sequences a server has room for, as `reserve` takes them."""

    max_sequences: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", min=1, help="Sequences at a time; unset: what has room, at most 256."
        ),
    ] = None
    max_tokens: MaxTokensOption = None
    cache_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|auto",
            help="Tokens of the cache for all sequences together, which take them as they grow; "
            "auto: as many as have room; unset: auto on a GPU without --max-sequences, and "
            "else each has room for --max-tokens.",
        ),
    ] = None
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="The share of the device's free memory that the cache takes where neither "
            "--max-sequences nor a number of --cache-tokens says its size; unset: 0.85, and in the "
            "host's memory at most 1 GiB.",
        ),
    ] = None
    prefix_cache: Annotated[
        bool,
        typer.Option(help="Read what prompts have in common once."),
    ] = True
    swap_space: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            min=0,
            help="Host memory for what sequences had cached that gave their slots to urgent ones; "
            "0: they are read again.",
        ),
    ] = SWAP_GIB

    def asked(self) -> dict[str, Any]:
        """The arguments of `reserve`; typer.BadParameter for what does not go together."""
        cached, share = _tokens_of(self.cache_tokens), self.memory_fraction
        try:
            check_fraction(share, self.max_sequences, cached, _said)
        except ArgumentError as error:
            raise typer.BadParameter(str(error)) from error
        how = {"slots": self.max_sequences, "tokens": self.max_tokens, "cache_tokens": cached}
        how |= {"memory_fraction": share, "prefix_cache": self.prefix_cache}
        return how | {"swap_space": self.swap_space}


def _said(name: str, value: Any = None) -> str:
    """An argument of `reserve` as an option."""
    option = f"--{'max-sequences' if name == 'slots' else name.replace('_', '-')}"
    return option if value is None else f"{option} {value}"


@with_options
def serve(
    ctx: typer.Context,
    model: ModelArgument,
    *,
    backend: BackendOption = None,
    address: AddressOptions,
    room: RoomOptions,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"How it writes calls of tools: {', '.join(MARKS)} or none (hermes is Qwen's, "
            "too); unset: as its chat template does.",
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
    one_process: Annotated[
        bool,
        typer.Option(
            "--one-process",
            help="Run the model in this process, for debuggers: where it dies, so does the server.",
        ),
    ] = False,
    tp: Annotated[
        int,
        typer.Option(metavar="COUNT", min=1, help="Devices that share the model."),
    ] = 1,
    oversubscribe: OversubscribeOption = False,
    options: ModelOptions,
) -> None:
    """Serve a model to clients of OpenAI's API, many at once.

    Chats, completions, embeddings and metrics, on this machine unless --host says otherwise.
    SIGTERM lets open requests end.
    """
    check_needed("`dualinfer serve` needs", more=("llguidance",))
    # typer takes a variable that is empty for none.
    if not (os.environ.get(_KEY, "-") if address.api_key is None else address.api_key).strip():
        raise typer.BadParameter(f"--api-key, or {_KEY}, is empty.")
    for option, value, known in (
        ("--tool-call-parser", tool_call_parser, (*MARKS, "none")),
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
    how = options.config
    which = backend or backends.default_backend()
    backends.check_backend(which)
    if tp > 1:
        how["tensor_parallel"] = {"tp_size": tp}
    reserved = room.asked()
    routes: dict[str, Any] = {
        "api_key": address.api_key,
        "tool_call_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser,
        "origins": allow_origin or [],
    }
    with _listening(address.host, address.port) as listener:
        front = _Front(address.name or name_of(model), listener, address.grace, routes, tp)
        found = find_asked(model, options.revision, options.adapter, "")
        opens = {"folder": str(found.folder), "adapters": found.adapters, "backend": which}
        opens |= {"how": how, "oversubscribe": oversubscribe, "room": reserved}

        def load() -> Any:
            return load_tokenizer(tokenizer_folder(*found))

        if one_process:
            serves = threading.Event()

            def tell_lost(why: str) -> None:  # once it serves, /health tells it
                if not serves.is_set():
                    print_error(DistributedError(why), ctx.command)
                    os._exit(1)  # the model's opening may wait for the lost one, for minutes

            tokenizer = load()  # before a large model is loaded in vain
            with opened(opens, tell_lost) as engine:
                engine.tokenizer = tokenizer
                does_write = writes(engine, reserved)
                serves.set()
                front.run_beside(engine, shown_of(engine.report(), does_write))
            return

        def load_sooner() -> Any:
            if ctx.obj == OWN_PROCESS:
                start_sooner(found.folder)
            return load()

        front.run_before(opens, load_sooner)


def writes(engine: Any, room: Mapping[str, Any]) -> bool:
    """Reserve room, and run two steps, so that what must be compiled is before the first client.

    `room` are the arguments of `reserve`.

    False for a model that writes no texts: it embeds, or sees, or hears. UnsupportedError for one
    that cannot be served.
    """
    if not isinstance(engine, FusedEngine):
        raise UnsupportedError(
            "This model runs in module mode, by transformers' own code, which makes one call "
            "at a time. Only models of fused mode are served."
        )
    if not engine.can_generate():
        return False
    engine.reserve(**room)
    try:
        engine.generate([[0]], max_new_tokens=2, do_sample=False)
    except (UnsupportedError, ArgumentError):
        engine.unreserve()
        return False
    return True


def _tokens_of(text: str | None) -> int | Literal["auto"] | None:
    """The number of tokens that --cache-tokens says; "auto" stays."""
    if text is None:
        return None
    if text == AUTO:
        return "auto"
    if not (text.isdecimal() and int(text)):
        raise typer.BadParameter(f"--cache-tokens {text}; expected a number from 1, or auto.")
    return int(text)


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


class _Front:
    """The routes at an address, before an engine that is in this process or in another."""

    def __init__(
        self, name: str, listener: socket.socket, grace: int, routes: dict[str, Any], devices: int
    ) -> None:
        self._name, self._listener, self._grace, self._routes = name, listener, grace, routes
        self._devices = devices

    def run_beside(self, engine: Any, shown: dict[str, Any]) -> None:
        """Serve an engine of this process until SIGTERM or Ctrl-C."""
        from ..serving.http.engines import LocalEngine

        self._run(lambda: self._serve(LocalEngine(engine), shown))

    def run_before(self, opens: dict[str, Any], load: Callable[[], Any]) -> None:
        """The same, of an engine that another process opens, and that is started where it dies.

        Its tokenizer is loaded while that starts, and ends the start where it cannot be read.
        """
        from ..serving.remote.keeper import Keeper, python

        async def run() -> None:
            keeper = Keeper(python("dualinfer.cli.engine_process"), opens, None)
            loading = asyncio.create_task(asyncio.to_thread(load))
            with _ended_by(loading):
                async with keeper.running() as engine:
                    engine.tokenizer = await loading
                    await self._serve(engine, keeper.shown, keeper.failed)
            if keeper.failed.done():
                raise keeper.failed.result()

        self._run(run)

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        import uvicorn

        # With uvloop where that is installed, as uvicorn has it.
        factory = uvicorn.Config(app="").get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(work())

    async def _serve(
        self, engine: Any, shown: dict[str, Any], failed: "asyncio.Future[Any] | None" = None
    ) -> None:
        """Serve until a signal, or until the engine has `failed`; then open requests end first."""
        import uvicorn

        from ..serving.http.app import Server

        server = Server(engine, self._name, **self._routes)

        class Draining(uvicorn.Server):
            def handle_exit(self, sig: int, frame: Any) -> None:  # it raises the signal no more
                server.is_draining = True
                self.force_exit = self.should_exit and sig == signal.SIGINT
                self.should_exit = True

        logging.getLogger("dualinfer.serve").addHandler(logging.StreamHandler())
        runs = Draining(server.config(self._grace, backlog=_BACKLOG))
        if failed is not None:
            failed.add_done_callback(lambda _: setattr(runs, "should_exit", True))
        self._listener.listen(_BACKLOG)
        self._show(engine.tokenizer if shown["writes"] else None, shown)
        await runs.serve(sockets=[self._listener])

    def _show(self, tokenizer: Any, shown: dict[str, Any]) -> None:
        """Say what runs, what memory it has, and how to call it."""
        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        kind, field, value = "completions", "prompt", "Hello"
        if not shown["writes"]:
            kind, field = "embeddings", "input"
        elif getattr(tokenizer, "chat_template", None):
            kind, field = "chat/completions", "messages"
            value = [{"role": "user", "content": "Hello"}]
        body = json.dumps({"model": self._name, field: value})
        has_key = self._routes["api_key"] is not None
        key = " -H 'Authorization: Bearer KEY'" if has_key else ""
        what = "{architecture}, {dtype}, {backend} on {device_name}".format(**shown)
        say(f"{self._name}: {what}{f', {self._devices} devices' if self._devices > 1 else ''}")
        own = "rank 0: " if self._devices > 1 and shown["backend"] == "torch" else ""
        say(f"{own}weights {shown['parameter_bytes'] / 2**20:,.0f} MiB; {_room(shown)}")
        head = " -H 'Content-Type: application/json'" + key
        typer.echo(f"listening on {url}; the base URL of OpenAI clients is {url}/v1", err=True)
        typer.echo(f"  curl {url}/v1/{kind}{head} -d {shlex.quote(body)}", err=True)
        if not has_key and not ipaddress.ip_address(host).is_loopback:
            say(f"Anybody who reaches this address can use it: pass --api-key, or set {_KEY}.")


@contextmanager
def _ended_by(loading: "asyncio.Task[Any]") -> Iterator[None]:
    """Cancel what this task does within as soon as `loading` fails, and raise its error."""
    here = asyncio.current_task()
    assert here is not None

    def told(_: Any) -> None:
        if not loading.cancelled() and loading.exception() is not None:
            here.cancel()

    loading.add_done_callback(told)
    try:
        yield
    except asyncio.CancelledError:
        if loading.done() and not loading.cancelled() and (error := loading.exception()):
            here.uncancel()
            raise error from None
        raise
    finally:
        loading.remove_done_callback(told)


def _room(shown: dict[str, Any]) -> str:
    """A phrase on the size of the cache."""
    reserved = [note for note in shown["notes"] if note.startswith("room is reserved")]
    return "; ".join([f"cache {shown['cache_bytes'] / 2**20:,.0f} MiB", *reserved])
