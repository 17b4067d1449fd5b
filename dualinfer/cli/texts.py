"""The commands that make text: dualinfer generate | chat."""

import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import backends, embedded
from ..api import init_inference
from ..backends.base import NO_KERNELS
from ..checkpoint.hub import find_checkpoint
from ..checkpoint.tokenizer import load_tokenizer
from ..engine.text import encode, encode_chat
from ..errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    DualinferError,
    LengthError,
    printable,
)
from ..system.terminal import print_folded
from .options import (
    BackendOption,
    Choice,
    DtypeOption,
    KernelsOption,
    PenaltyOption,
    RevisionOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from .parity import first_difference
from .quick_start import OWN_PROCESS, start_sooner

NEW_TOKENS = 64
_ANSWER = 1024
_HELP = """\
/help           this list
/system TEXT    begin anew with this system prompt; without TEXT, show it
/reset          begin anew
/retry          take the last answer back and answer once more
/exit           end; Ctrl-D does the same. Ctrl-C stops an answer."""


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
            help="What runs the model; both: one after the other; unset: what is installed.",
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
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    repetition_penalty: PenaltyOption = None,
    stop: StopOption = None,
    dtype: DtypeOption = None,
    kernels: KernelsOption = None,
    revision: RevisionOption = None,
) -> None:
    """Continue a prompt.

    The text is shown as it comes; it is greedy, or sampled if an option asks for it.
    """
    if len(arguments) > 2:
        raise typer.BadParameter(
            f"{len(arguments)} arguments given. Did you mean to quote the prompt?"
        )
    if len(arguments) == 1 and (Path(arguments[0]) / "config.json").is_file():
        raise typer.BadParameter(f"{arguments[0]} is a model's folder, and the prompt is missing.")
    drawn = seed is None and any(value is not None for value in (temperature, top_k, top_p))
    seed = secrets.randbits(32) if drawn else seed
    options = _sampling(temperature, top_k, top_p, seed, repetition_penalty, stop)
    options.setdefault("do_sample", False)
    names = backends.BACKENDS if backend == "both" else (backend or backends.default_backend(),)
    for name in names:
        backends.check_backend(name)
    folder = _find(arguments, revision)
    prompt = _read(arguments[-1])
    if ctx.obj == OWN_PROCESS:
        start_sooner(folder)
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": prompt}] if chat else None
    ids = encode_chat(tokenizer, messages) if messages else encode(tokenizer, prompt)
    texts: list[list[str]] = []
    for name in names:
        if len(names) > 1:
            Console().rule(f"[bold]{name}")
        with init_inference(
            folder, backend=name, dtype=dtype, replace_with_kernel_inject=kernels
        ) as engine:
            _prepare(engine, tokenizer, kernels)
            options |= _length(engine, ids, max_new_tokens, NEW_TOKENS)
            kwargs = _for_mode(engine, options)
            stream = engine.stream_chat if messages else engine.stream_text
            pieces = stream(messages or prompt, **kwargs)  # pyright: ignore[reportArgumentType]
            shown = "" if chat else prompt
            texts.append(_show(engine, pieces, options["max_new_tokens"], shown))
    if drawn:
        _say(f"To get this again: --seed {seed}")
    if len(texts) > 1:
        at = first_difference(*texts)
        same = "The texts agree." if at is None else f"The texts differ from new token {at + 1} on."
        _say(same)


def chat(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder or a model of the hub.")
    ],
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system prompt: how it is to answer.")
    ] = None,
    backend: BackendOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help=f"Of an answer; unset: {_ANSWER}, or what fits."),
    ] = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    repetition_penalty: PenaltyOption = None,
    stop: StopOption = None,
    dtype: DtypeOption = None,
    kernels: KernelsOption = None,
    revision: RevisionOption = None,
) -> None:
    """Talk with a model that has a chat template.

    In a pipe, each line is a message. Without a sampling option it samples as the model's own
    generation config says.
    """
    name = backend or backends.default_backend()
    backends.check_backend(name)
    folder = find_checkpoint(model, revision)
    if ctx.obj == OWN_PROCESS:
        start_sooner(folder)
    tokenizer = load_tokenizer(folder)
    encode_chat(tokenizer, [*_opening(system), {"role": "user", "content": "Hello"}])
    options = _sampling(temperature, top_k, top_p, seed, repetition_penalty, stop)
    with init_inference(
        folder, backend=name, dtype=dtype, replace_with_kernel_inject=kernels
    ) as engine:
        _prepare(engine, tokenizer, kernels)
        _Talk(engine, system, max_new_tokens, options).run()


class _Talk:
    """One conversation on the terminal, or over the lines of a pipe."""

    def __init__(
        self, engine: Any, system: str | None, new_tokens: int | None, options: Mapping[str, Any]
    ) -> None:
        self._engine, self._new_tokens, self._options = engine, new_tokens, options
        self._messages = _opening(system)
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Until the input ends or /exit; DualinferError ends it where nobody could answer it."""
        if self._is_terminal:
            _say(f"{_described(self._engine)}. /help shows what else there is.")
        for line in self._lines():
            if line in ("/exit", "/quit"):
                return
            try:
                if line.startswith("/"):
                    self._obey(line)
                elif line:
                    self._messages.append({"role": "user", "content": line})
                    self._answer()
            except DualinferError as error:
                if not self._is_terminal:
                    raise
                _say(f"error: {error}")

    def _lines(self) -> Iterator[str]:
        if not self._is_terminal:
            yield from (line.strip() for line in sys.stdin)
            return
        import readline  # noqa: F401 (edits the line and remembers those before)

        while True:
            try:
                yield input("> ").strip()
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:
                _say("\nCtrl-D or /exit ends.")

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        opening = [message for message in self._messages[:1] if message["role"] == "system"]
        if command == "/reset":
            self._messages = opening
        elif command == "/system" and rest.strip():
            self._messages = _opening(rest.strip())
        elif command == "/system":
            _say(opening[0]["content"] if opening else "There is no system prompt.")
        elif command == "/retry" and self._messages[-1:] != opening[-1:]:
            if self._messages[-1]["role"] == "assistant":
                self._messages.pop()
            self._answer()
        elif command == "/retry":
            _say("There is no answer yet.")
        else:
            _say(_HELP if command == "/help" else f"There is no {command}.\n{_HELP}")

    def _answer(self) -> None:
        """Answer the last message, which is taken back where that cannot be done."""
        answer: list[str] = []
        try:
            ids = encode_chat(self._engine.tokenizer, self._messages)
            length = _length(self._engine, ids, self._new_tokens, _ANSWER)
            kwargs = _for_mode(self._engine, {**self._options, **length})
            pieces = self._engine.stream_chat(self._messages, **kwargs)
            _show(self._engine, pieces, kwargs["max_new_tokens"], "", answer)
        except KeyboardInterrupt:
            typer.echo(" [stopped]")
        except DualinferError as error:
            self._messages.pop()
            if isinstance(error, LengthError):
                raise type(error)(f"{error} Or begin anew with /reset.") from error
            raise
        self._messages.append({"role": "assistant", "content": "".join(answer)})


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _find(arguments: list[str], revision: str | None) -> Path:
    """The folder of the model that was named, or the embedded one's."""
    if len(arguments) == 1:
        return embedded.path()
    try:
        return find_checkpoint(arguments[0], revision)
    except CheckpointError as error:
        if isinstance(error, CheckpointNotFoundError) and "/" not in arguments[0]:
            quoted = f'`dualinfer generate "{" ".join(arguments)}"`'
            raise CheckpointNotFoundError(
                f"{error} Did you mean to quote the prompt? {quoted}"
            ) from error
        raise


def _read(prompt: str) -> str:
    """The prompt; for - standard input, without the newline that ends its last line."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"Standard input is no text: {error}.") from error


def _sampling(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    repetition_penalty: float | None,
    stop: list[str] | None,
) -> dict[str, Any]:
    """What the options ask of generate; those that shape sampling ask for it."""
    shapes = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options: dict[str, Any] = {n: v for n, v in shapes.items() if v is not None}
    if options:
        options["do_sample"] = True
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    if stop:
        options["stop_strings"] = stop
    return options


def _length(engine: Any, ids: list[int], asked: int | None, default: int) -> dict[str, int]:
    if asked is not None:
        return {"max_new_tokens": asked}
    most = engine.report().max_tokens
    return {"max_new_tokens": max(1, min(default, most - len(ids))) if most else default}


def _for_mode(engine: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the engine takes them: a module's own generate draws from torch's state."""
    kwargs = dict(options)
    if engine.report().mode == "module" and kwargs.get("seed") is not None:
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
                typer.echo(prompt, nl=False)  # not before: compiling may have something to say
            times.append(time.perf_counter())
            said.append(piece)
            typer.echo(_shown(piece), nl=False)
            sys.stdout.flush()
    typer.echo()
    count = min(len(times), most)  # the end of a broken character is a piece of its own
    seconds = times[-1] - times[0] if times else 0.0
    rate = f", {(count - 1) / seconds:,.0f} tokens/s" if count > 1 and seconds > 0 else ""
    _say(f"{count} new tokens{rate}: {_described(engine)}")
    return said


def _shown(piece: str) -> str:
    """A model's text for a terminal, with what would control that written out."""
    if not sys.stdout.isatty():
        return piece
    return "\t".join(printable(part) for part in piece.split("\t"))


def _described(engine: Any) -> str:
    return repr(engine).partition("(")[2].removesuffix(")")


def _prepare(engine: Any, tokenizer: Any, kernels: bool | None) -> None:
    """Give the engine its tokenizer, and say where kernels that were asked for do not run."""
    engine.tokenizer = tokenizer
    notes = engine.report().notes if kernels else ()
    for note in notes:
        if note.startswith(NO_KERNELS):
            _say(f"--kernels: {note}")


def _say(text: str) -> None:
    """A line for the reader, beside the text."""
    print_folded(Console(stderr=True), text, style="dim")
