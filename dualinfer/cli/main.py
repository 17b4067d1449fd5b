"""The command line: generate, chat, serve, batch, demo, parity, check, bench, plan and others."""

import errno
import importlib.metadata
import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text
from typer.core import TyperGroup

from .. import backends, embedded
from ..api import init_inference
from ..bench.cli import app as bench
from ..checkpoint.described.tokenizer import has_tokenizer, load_tokenizer, tokenizer_folder
from ..engine.fused import FusedEngine
from ..engine.text_stream import Detokenizer
from ..engine.tokenizing import encode
from ..errors import BackendNotAvailableError, DualinferError
from ..system.command_options import QuantOption
from ..system.noise import leave_out_noise
from ..system.tables import Table
from ..system.terminal import Command, print_folded, without_controls
from .batch import batch
from .check import check
from .devices import launch, plan
from .embed import embed
from .environment import describe_backend, describe_system
from .options import AdapterOption, RevisionOption
from .parity import Parity, compare, first_difference
from .quantize import quantize
from .quick_start import OWN_PROCESS, start_sooner
from .serve import serve
from .texts import NEW_TOKENS, chat, check_both_run, find_asked, generate
from .wording import print_error

_PROMPT = 'def copy_file(source, target):\n    """'


_EXTRA = {"allow_extra_args": True}  # which the command itself answers


_UNWRITABLE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO  # what a full disk says


class _Commands(TyperGroup):
    """Our own errors are one message on stderr and exit code 1; others are bugs and shown."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DualinferError as error:
            print_error(error, self.get_command(ctx, ctx.invoked_subcommand or "") or self)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command(cls=Command)(generate)
app.command(cls=Command, context_settings=_EXTRA)(chat)
app.command(cls=Command)(serve)
app.command(cls=Command)(batch)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dualinfer {importlib.metadata.version('dualinfer')}")
        raise typer.Exit


@app.callback()
def _start(
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    """Run a Hugging Face model on PyTorch or on JAX."""
    leave_out_noise()


@dataclass
class _Run:
    """The demo's run on one backend."""

    engine: FusedEngine
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    speed: float = 0.0


@app.command(cls=Command, context_settings=_EXTRA)
def demo(
    ctx: typer.Context,
    prompt: Annotated[
        str,
        typer.Option(
            metavar="TEXT", show_default=False, help="The text to continue; unset: a function."
        ),
    ] = _PROMPT,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="Tokens to add.")
    ] = NEW_TOKENS,
) -> None:
    """Continue a prompt on both backends, and say whether they agree."""
    _refuse_text(ctx, "dualinfer demo")
    _check_both("The demo")
    console = Console()
    folder = embedded.path()
    if ctx.obj == OWN_PROCESS:
        start_sooner(folder)
    tokenizer = load_tokenizer(folder)
    ids = _row(encode(tokenizer, prompt))
    with _engines(folder, "float32") as engines:
        runs = {name: _Run(engine) for name, engine in engines.items()}
        with Live(console=console, auto_refresh=False, transient=True) as live:
            for run in runs.values():  # a warm-up at the same time
                stream = run.engine.stream(ids, max_new_tokens=max_new_tokens, do_sample=False)
                for piece in _pieces(tokenizer, ids, _kept(stream, run.tokens)):
                    run.text += piece
                    if console.is_terminal:
                        live.update(_side_by_side(console, prompt, runs), refresh=True)
        console.print(_side_by_side(console, prompt, runs))
        for run in runs.values():
            run.speed = _tokens_per_second(run.engine, ids, max_new_tokens)
        torch, jax = runs["torch"], runs["jax"]
        whole = [*ids[0].tolist(), *torch.tokens]
        parity = compare(jax.engine, torch.engine, _row(whole))
        device = torch.engine.report().device_name
        jax_device = jax.engine.report().device_name
    equal, verdict = _verdict(torch.tokens, jax.tokens, parity)
    speeds = ", ".join(f"{name} {run.speed:,.0f}" for name, run in runs.items())
    console.print(
        f"[bold {'green' if equal else 'red'}]{verdict}[/]; logits differ by "
        f"{_share(parity)} relative RMS; tokens per second: {speeds}.",
        highlight=False,
    )
    where = f"float32, one sequence, after a warm-up, on {device} (torch) and {jax_device} (jax)."
    if "cpu" in device.lower():
        where += " Figures from a CPU are no benchmark."
    print_folded(console, where, style="dim")
    if not equal:
        raise typer.Exit(1)


@app.command(cls=Command, context_settings=_EXTRA)
def parity(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help="A checkpoint's folder or a model of the hub; unset: the embedded model.",
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            show_default=False,
            help="The text to run both over; unset: a function.",
        ),
    ] = _PROMPT,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="float32, float16, bfloat16, or auto: what generate takes by default.",
        ),
    ] = "float32",
    quant: QuantOption = None,
    adapter: AdapterOption = None,
    revision: RevisionOption = None,
) -> None:
    """Compare both backends layer by layer over one prompt."""
    _refuse_text(ctx, f"dualinfer parity {model}")
    _check_both("parity")
    hint = f"A prompt is given by --prompt: `dualinfer parity --prompt {shlex.quote(model or '')}`"
    found = find_asked(str(embedded.path()) if model is None else model, revision, adapter, hint)
    folder, speaking = found.folder, tokenizer_folder(*found)
    console = Console()
    if ctx.obj == OWN_PROCESS:
        start_sooner(folder)
    check_both_run(folder)
    if not has_tokenizer(speaking):
        ids = _row(range(1, 17))
        console.print("[dim]The folder holds no tokenizer: token ids 1 to 16 instead.[/]")
    else:
        ids = _row(encode(load_tokenizer(speaking), prompt))
    with _engines(folder, dtype, quant, found.adapters) as engines:
        result = compare(engines["jax"], engines["torch"], ids)
        computed = engines["torch"].inference_config.dtype
        asked = engines["torch"].inference_config.quant
    held = f", quantized to {asked.scheme}" if asked is not None else ""
    title = Text(f"jax against torch, {computed}{held}")
    table = Table("", "max error", "relative RMS", title=title, box=SIMPLE, pad_edge=False)
    for row in (*result.layers, *([result.logits] if result.logits else [])):
        table.add_row(row.name, f"{row.max_error:.2e}", f"{row.relative_rms:.2e}")
    console.print(table)
    if result.logits:
        agreeing = result.positions - result.ties - result.differing
        console.print(
            f"Best token equal at {agreeing} of {result.positions} positions, {result.ties} ties.",
            highlight=False,
        )
    if not result.equal:
        console.print(f"[red]Apart by more than rounding ({result.rounding:.0e}).[/]")
        raise typer.Exit(1)


app.command(cls=Command)(embed)
app.command(cls=Command)(check)
app.add_typer(bench, name="bench")
app.command(cls=Command)(plan)
app.command(cls=Command)(quantize)
app.command(cls=Command, context_settings={"allow_interspersed_args": False})(launch)


@app.command()
def env() -> None:
    """Show versions, devices, and what of it is usable."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    rows = [*describe_system()]
    for name in backends.BACKENDS:
        rows += describe_backend(name)
    for key, value in rows:
        table.add_row(f"[bold]{escape(key)}[/]", escape(value))
    Console().print(table, highlight=False)


def main() -> None:
    """The `dualinfer` command."""
    if sys.stdout is None:  # the caller has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.showwarning = _show_warning
    try:
        app(obj=OWN_PROCESS)
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        with suppress(OSError):
            sys.stdout.close()  # or Python would try again at its end
        why = f"error: the output cannot be written: {error.strerror}."
        print_folded(Console(stderr=True), why, head="bold red")
        sys.exit(1)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning for people: whose line of code it came from says nothing to them."""
    print_folded(Console(stderr=True), f"warning: {message}", head="bold yellow")


def _check_both(what: str) -> None:
    for name in backends.BACKENDS:
        try:
            backends.check_backend(name)
        except BackendNotAvailableError as error:
            raise BackendNotAvailableError(f"{what} compares both backends. {error}") from error


def _refuse_text(ctx: typer.Context, command: str) -> None:
    """A usage error for arguments that were meant as the prompt."""
    if ctx.args:
        text = shlex.quote(" ".join(ctx.args))
        raise typer.BadParameter(f"A prompt is given by --prompt: {command} --prompt {text}")


def _row(ids: Any) -> Any:
    import numpy as np

    return np.array([list(ids)], np.int64)


@contextmanager
def _engines(
    folder: Path,
    dtype: str,
    quant: Any = None,
    adapters: Mapping[str, float] | None = None,
) -> Iterator[dict[str, FusedEngine]]:
    """One engine a backend, closed at the end."""
    engines: dict[str, FusedEngine] = {}
    try:
        for name in backends.BACKENDS:
            engine = init_inference(
                folder, backend=name, dtype=dtype, quant=quant, adapter=adapters
            )
            assert isinstance(engine, FusedEngine)
            engines[name] = engine
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def _pieces(tokenizer: Any, ids: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Text of the new tokens, in whole characters; closes `tokens`."""
    text = Detokenizer(tokenizer).stream(ids[0].tolist())
    with closing(tokens):  # type: ignore[type-var]
        for token in tokens:
            yield text.push(token)
    yield text.finish()


def _kept(tokens: Iterator[int], seen: list[int]) -> Iterator[int]:
    for token in tokens:
        seen.append(int(token))
        yield token


def _side_by_side(console: Console, prompt: str, runs: dict[str, _Run]) -> Table:
    table = Table(*runs)
    for column in table.columns:
        column.width = max(20, (console.width - 7) // 2)  # 7: borders and the blanks inside
    table.add_row(
        *(
            Text(without_controls(prompt), style="bold", overflow="fold").append(
                without_controls(run.text), style="not bold"
            )
            for run in runs.values()
        )
    )
    return table


def _tokens_per_second(engine: FusedEngine, ids: Any, new_tokens: int) -> float:
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    engine.generate(ids, **options)
    start = time.perf_counter()
    result = engine.generate(ids, **options)
    return (result.shape[1] - ids.shape[1]) / (time.perf_counter() - start)


def _verdict(one: list[int], other: list[int], parity: Parity) -> tuple[bool, str]:
    """True if the texts are equal, ties aside, in words."""
    at = first_difference(one, other)
    if at is None:
        return parity.equal, f"All {len(one)} new tokens are equal"
    if parity.equal:
        return True, f"{at} new tokens are equal, then two candidates are closer than rounding"
    return False, f"The tokens differ from new token {at + 1} on"


def _share(parity: Parity) -> str:
    assert parity.logits is not None
    return f"{parity.logits.relative_rms:.1e}"
