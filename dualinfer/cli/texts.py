"""The commands that make text: dualinfer generate | chat."""

import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import backends, embedded
from ..api import init_inference
from ..backends.base import NO_KERNELS
from ..checkpoint.described.tokenizer import load_tokenizer, tokenizer_folder
from ..checkpoint.hub import Found, find_model
from ..checkpoint.sources import is_checkpoint, near_path
from ..engine.chat import encode_chat
from ..engine.tokenizing import encode
from ..errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DualinferError,
    LengthError,
    UnsupportedError,
    shortened,
)
from ..opening import unserved
from ..system.command_options import with_options
from ..system.terminal import say, without_controls
from .options import BackendOption, Choice, TextOptions, factors_of
from .parity import first_difference
from .quick_start import OWN_PROCESS, start_sooner
from .remote import Server
from .wording import print_error

NEW_TOKENS = 64
_ANSWER = 1024
_UNSET = TextOptions()
_HELP = """\
/help           this list
/system TEXT    begin anew with this system prompt; without TEXT, show it
/reset          begin anew
/retry          take the last answer back and answer once more
/exit           end; Ctrl-D does the same. Ctrl-C stops an answer."""


@with_options
def generate(
    ctx: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            show_default=False,
            help="A checkpoint's folder or a model of the hub (owner/name), the embedded model if "
            "left out; and the text to continue, - to read it from standard input.",
        ),
    ],
    backend: Annotated[
        Choice | None,
        typer.Option(
            metavar="torch|jax|both",
            show_default=False,
            help="What runs the model; both: one after the other; unset: what is installed, "
            "torch first.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="The prompt is a question: apply the chat template, show the answer."
        ),
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT", help=f"Unset: {NEW_TOKENS}, less where the model ends before."
        ),
    ] = None,
    options: TextOptions = _UNSET,
) -> None:
    """Continue a prompt.

    The text is shown as it comes; it is greedy, or sampled if an option asks for it.
    """
    if len(arguments) > 2:
        raise typer.BadParameter(
            f"{len(arguments)} arguments given. Did you mean to quote the prompt?"
        )
    if len(arguments) == 1 and is_checkpoint(arguments[0]):
        raise typer.BadParameter(f"{arguments[0]} is a model, and the prompt is missing.")
    drawn = options.samples and options.seed is None
    options = replace(options, seed=secrets.randbits(32)) if drawn else options
    names = backends.BACKENDS if backend == "both" else (backend or backends.default_backend(),)
    for name in names:
        backends.check_backend(name)
    if len(arguments) == 1:
        found = find_model(embedded.path(), adapters=factors_of(options.adapter))
    else:
        quoted = f'`dualinfer generate "{" ".join(arguments)}"`'
        loose = not re.search(r"\s", arguments[1]) and arguments[1] != "-"
        hint = f"Did you mean to quote the prompt? {quoted}" if loose else ""
        found = find_asked(arguments[0], options.revision, options.adapter, hint)
    folder = found.folder
    if ctx.obj == OWN_PROCESS:
        start_sooner(folder)
    if len(names) > 1:
        check_both_run(folder)
    prompt = _read(arguments[-1])
    tokenizer = load_tokenizer(tokenizer_folder(*found))
    messages = [{"role": "user", "content": prompt}] if chat else None
    template = options.template_options
    if template and not chat:
        raise typer.BadParameter("--chat-template is for chats: pass --chat as well.")
    ids = encode_chat(tokenizer, messages, template) if messages else encode(tokenizer, prompt)
    texts: list[list[str]] = []
    for name in names:
        if len(names) > 1:
            Console().rule(f"[bold]{name}")
        with _engine(found, name, tokenizer, options) as engine:
            most = _most_tokens(engine)
            room = max(1, min(NEW_TOKENS, most - len(ids))) if most else NEW_TOKENS
            length = room if max_new_tokens is None else max_new_tokens
            kwargs = {"do_sample": False, **_arguments(engine, options), "max_new_tokens": length}
            if messages:
                pieces = engine.stream_chat(messages, template_options=template, **kwargs)
            else:
                pieces = engine.stream_text(prompt, **kwargs)
            is_continued = not (chat or getattr(engine.config, "is_encoder_decoder", False))
            texts.append(_show(engine, pieces, length, prompt if is_continued else ""))
    if drawn:
        say(f"To get this again: --seed {options.seed}")
    if len(texts) > 1:
        at = first_difference(*texts)
        same = "The texts agree." if at is None else f"The texts differ from new token {at + 1} on."
        say(same)


@with_options
def chat(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A checkpoint's folder, a GGUF file or a model of the hub; with --url what the "
            "server calls it, its first one if left out.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Talk with a server that runs there, of OpenAI's API."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="DUALINFER_API_KEY", help="The key of that server."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system prompt: how it is to answer.")
    ] = None,
    backend: BackendOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help=f"Of an answer; unset: {_ANSWER}, or half of the room."),
    ] = None,
    options: TextOptions = _UNSET,
) -> None:
    """Talk with a model that has a chat template.

    In a pipe, each line is a message, and exit code 1 says that one was refused. Without a
    sampling option it samples as the model's own generation config says.
    """
    if ctx.args:
        way = f"echo {shlex.quote(' '.join(ctx.args))} | dualinfer chat {model}"
        raise typer.BadParameter(f"Messages are typed, or come from standard input: {way}")
    if url is not None:
        for option, value in {**options.of_models(), "--backend": backend}.items():
            if value is not None:
                raise typer.BadParameter(f"{option} is about a model here; with --url it has none.")
        server = Server(url, model, api_key)
        if not _FarTalk(server, system, max_new_tokens, options, ctx.command).run():
            raise typer.Exit(1)
        return
    if model is None:
        raise typer.BadParameter("Name a MODEL, or a running server by --url.")
    name = backend or backends.default_backend()
    backends.check_backend(name)
    found = find_model(model, options.revision, factors_of(options.adapter))
    if ctx.obj == OWN_PROCESS:
        start_sooner(found.folder)
    tokenizer = load_tokenizer(tokenizer_folder(*found))
    hello = {"role": "user", "content": "Hello"}
    encode_chat(tokenizer, [*_opening(system), hello], options.template_options)
    with _engine(found, name, tokenizer, options) as engine:
        if not _Talk(engine, system, max_new_tokens, options, ctx.command).run():
            raise typer.Exit(1)


class _Talk:
    """One conversation on the terminal, or over the lines of a pipe."""

    def __init__(
        self,
        engine: Any,
        system: str | None,
        new_tokens: int | None,
        options: TextOptions,
        command: Any,
    ) -> None:
        self._engine, self._new_tokens, self._options = engine, new_tokens, options
        self._command = command
        self._messages = _opening(system)
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> bool:
        """Until the input ends or /exit; False if a message in a pipe was refused."""
        answered = True
        if self._is_terminal:
            say(f"{_described(self._engine)}. /help shows what else there is.")
        for line in self._lines():
            if line in ("/exit", "/quit"):
                break
            try:
                if line.startswith("/"):
                    self._obey(line)
                elif line:
                    self._messages.append({"role": "user", "content": line})
                    self._answer()
            except DualinferError as error:
                print_error(error, self._command)
                answered = self._is_terminal
        return answered

    def _lines(self) -> Iterator[str]:
        if not self._is_terminal:
            try:
                yield from (line.strip() for line in sys.stdin)
            except UnicodeDecodeError as error:
                raise _no_text(error) from error
            return
        import readline  # noqa: F401 (edits the line and remembers those before)

        while True:
            try:
                yield input("> ").strip()
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:
                say("\nCtrl-D or /exit ends.")

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        opening = self._system()
        if command == "/reset":
            self._messages = opening
        elif command == "/system" and rest.strip():
            self._messages = _opening(rest.strip())
        elif command == "/system":
            say(opening[0]["content"] if opening else "There is no system prompt.")
        elif command == "/retry" and self._messages[-1:] != opening[-1:]:
            if self._messages[-1]["role"] == "assistant":
                self._messages.pop()
            self._answer()
        elif command == "/retry":
            say("There is no answer yet.")
        else:
            say(_HELP if command == "/help" else f"There is no {command}.\n{_HELP}")

    def _answer(self) -> None:
        """Answer the last message, which is taken back where that cannot be done."""
        answer: list[str] = []
        try:
            pieces, length = self._pieces()
            _show(self._engine, pieces, length, "", answer)
        except KeyboardInterrupt:
            typer.echo(" [stopped]")
        except DualinferError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": "".join(answer)})

    def _pieces(self) -> tuple[Iterator[str], int]:
        """The answer to the last message as it comes, and how long it may be."""
        length = self._length()
        kwargs = {**_arguments(self._engine, self._options), "max_new_tokens": length}
        template = self._options.template_options
        talk = self._engine.stream_chat
        return talk(self._messages, template_options=template, **kwargs), length

    def _length(self) -> int:
        """The number of tokens that the answer may have; LengthError where it has no room."""
        most, asked = _most_tokens(self._engine), self._new_tokens
        if not most:
            return _ANSWER if asked is None else asked
        prompt, opening = self._count(self._messages), self._system()
        left = most - prompt
        if left >= (asked or 1):
            return min(_ANSWER, (left + 1) // 2) if asked is None else asked
        alone = self._count([*opening, self._messages[-1]])
        if left > 0:
            what = f"No room for an answer of {asked} tokens (--max-new-tokens): with this message"
            what += f" the conversation has {prompt}, and {left} are left of the model's {most}"
            ways = ["ask for fewer", *(["begin anew (/reset)"] if alone < prompt else [])]
        elif alone < most:
            what = f"The conversation is too long: with this message it has {prompt} tokens, and"
            what += f" the model takes {most}, the answer included"
            ways = ["begin anew (/reset)", "ask for shorter answers (--max-new-tokens)"]
        else:
            what = f"This message is too long: with what the template adds it has {alone} tokens,"
            what += f" and the model takes {most}, the answer included"
            ways = ["send a shorter one"]
        ways += ["take a shorter system prompt (--system)"] if opening else []
        raise LengthError(f"{what}. To go on, {' or '.join(ways)}.")

    def _count(self, messages: list[dict[str, str]]) -> int:
        template = self._options.template_options
        return len(encode_chat(self._engine.tokenizer, messages, template))

    def _system(self) -> list[dict[str, str]]:
        return [message for message in self._messages[:1] if message["role"] == "system"]


class _FarTalk(_Talk):
    """A conversation with a model of a server."""

    def _pieces(self) -> tuple[Iterator[str], int]:
        """See `_Talk`."""
        fields = self._options.arguments()
        fields.pop("do_sample", None)
        if stops := fields.pop("stop_strings", None):
            fields["stop"] = stops
        if self._new_tokens is not None:
            fields["max_tokens"] = self._new_tokens
        return self._engine.stream_chat(self._messages, **fields), sys.maxsize


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def find_asked(name: str, revision: str | None, adapters: Sequence[str] | None, hint: str) -> Found:
    """Find the model; the error gives a hint where there is none and the name may be a text."""
    try:
        return find_model(name, revision, factors_of(adapters))
    except CheckpointNotFoundError as error:
        about = str(error).startswith(f"{shortened(repr(name))} ")  # and not an adapter
        if not hint or not about or revision is not None or _may_be_model(name):
            raise
        raise CheckpointNotFoundError(f"{error} {hint}") from error


@contextmanager
def opened(
    model: str, backend: str | None, revision: str | None, adapter: Any, **how: Any
) -> Iterator[Any]:
    """An engine of what a command names, with its tokenizer; `how` are fields of the config."""
    folder, adapters = find_asked(model, revision, adapter, "")
    which = backend or backends.default_backend()
    backends.check_backend(which)
    tokenizer = load_tokenizer(tokenizer_folder(folder, adapters))
    with init_inference(folder, backend=which, adapter=adapters, **how) as engine:
        engine.tokenizer = tokenizer
        yield engine


def _may_be_model(name: str) -> bool:
    """True for a name that is more likely a path or a hub id than words of a text."""
    if " " in name:
        return False
    is_path = "/" in name or name.startswith((".", "~")) or bool(Path(name).suffix)
    return is_path or os.path.exists(name) or near_path(Path(name)) is not None


def check_both_run(folder: Path) -> None:
    """Raise UnsupportedError for a model that JAX does not run, before anything is loaded."""
    unknown = unserved(folder)
    if unknown is not None:
        raise UnsupportedError(
            f"{unknown} JAX does not run it, so that there is nothing to compare. With torch alone "
            f"transformers' own model runs: `dualinfer generate {folder} PROMPT --backend torch`"
        )


def _read(prompt: str) -> str:
    """The prompt; for - standard input, without the newline that ends its last line."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise _no_text(error) from error


def _no_text(error: UnicodeDecodeError) -> ArgumentError:
    return ArgumentError(f"Standard input is no text: {error}.")


def _most_tokens(engine: Any) -> int:
    """Tokens of a prompt and its answer together; 0 where nothing tells."""
    if most := engine.report().max_tokens:
        return most
    of_its_own = getattr(engine.config, "is_encoder_decoder", False)  # the prompt counts apart
    return 0 if of_its_own else getattr(engine.config, "max_position_embeddings", None) or 0


@contextmanager
def _engine(found: Found, backend: str, tokenizer: Any, options: TextOptions) -> Iterator[Any]:
    """The engine, closed at the end; it is said where kernels that were asked for do not run."""
    words: Any = {"quant": options.quant, "kv_cache_dtype": options.kv_cache_dtype}  # any str
    words["state_dtype"] = options.state_dtype
    with init_inference(
        found.folder,
        backend=backend,
        adapter=found.adapters,
        dtype=options.dtype,
        replace_with_kernel_inject=options.kernels,
        **words,
    ) as engine:
        engine.tokenizer = tokenizer
        for note in engine.report().notes if options.kernels else ():
            if note.startswith(NO_KERNELS):
                say(f"--kernels: {note}")
        yield engine


def _arguments(engine: Any, options: TextOptions) -> dict[str, Any]:
    """The options as the engine takes them: a module's own generate draws from torch's state."""
    kwargs = options.arguments()
    if engine.report().mode == "module" and "seed" in kwargs:
        import torch

        torch.manual_seed(kwargs.pop("seed"))
    return kwargs


def _show(
    engine: Any, pieces: Iterator[str], most: int, prompt: str, said: list[str] | None = None
) -> list[str]:
    """Write the pieces as they come, behind the prompt, and say how fast; `said` gets them too."""
    said = [] if said is None else said
    times: list[float] = []
    with closing(pieces):  # pyright: ignore[reportArgumentType]
        for piece in pieces:
            if not times:
                typer.echo(
                    without_controls(prompt), nl=False
                )  # not before: compiling may have something to say
            times.append(time.perf_counter())
            said.append(piece)
            typer.echo(without_controls(piece), nl=False)
            sys.stdout.flush()
    typer.echo()
    count = min(len(times), most)  # the end of a broken character is a piece of its own
    seconds = times[-1] - times[0] if times else 0.0
    rate = f", {(count - 1) / seconds:,.0f} tokens/s" if count > 1 and seconds > 0 else ""
    say(f"{count} new token{'' if count == 1 else 's'}{rate}: {_described(engine)}")
    return said


def _described(engine: Any) -> str:
    return repr(engine).partition("(")[2].removesuffix(")")
