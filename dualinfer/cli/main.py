"""The command line: dualinfer generate | demo | parity | bench | plan | launch | env."""

import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from .. import backends, embedded
from ..api import init_inference
from ..bench.cli import app as bench
from ..checkpoint.hub import find_checkpoint
from ..engine.fused import FusedEngine
from ..engine.module import ModuleEngine
from ..errors import (
    ArgumentError,
    BackendNotAvailableError,
    DualinferError,
    UnsupportedError,
    printable,
)
from .devices import RevisionOption, launch, plan
from .environment import describe_backend, describe_system
from .parity import Parity, compare, first_difference
from .tokenizer import TextStream, has_tokenizer, load_tokenizer

Choice = Literal["torch", "jax", "both"]

_PROMPT = 'def copy_file(source, target):\n    """'
_NEW_TOKENS = 64


class _Commands(TyperGroup):
    """Our own errors are one message on stderr and exit code 1; others are bugs and shown."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DualinferError as error:
            text = Text.assemble(("error:", "bold red"), f" {printable(str(error))}")
            Console(stderr=True, soft_wrap=True).print(text)
            raise typer.Exit(1) from error


class _Generate(TyperCommand):
    """A command whose usage line shows that the first of two arguments may be left out."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the command's name."""
        return ["[OPTIONS]", "[MODEL]", "PROMPT"]


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(bench, name="bench")
app.command()(plan)
app.command(context_settings={"allow_interspersed_args": False})(launch)

DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="float32, float16 or bfloat16; unset: the checkpoint's own, float32 on a CPU."
    ),
]


@app.callback()
def _start() -> None:
    """Run a Hugging Face model on PyTorch or on JAX."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"


@app.command(cls=_Generate)
def generate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            show_default=False,
            help="A checkpoint's folder or a model of the hub (owner/name), the embedded model if "
            "left out, and the text to continue.",
        ),
    ],
    backend: Annotated[
        Choice | None,
        typer.Option(
            show_default=False,
            help="What runs the model; both: one by one; unset: what is installed, torch first.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Unset: {_NEW_TOKENS}, less where the model ends before.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sample; below 1 the likely tokens gain.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample among the k best tokens; unset: 50, as in HF.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the best tokens of this total probability.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Sample from this seed: the same text every time.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, tokens that are there already lose.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End after this string; may be given several times.")
    ] = None,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
) -> None:
    """Continue a prompt, shown as it comes: greedy, or sampled if an option asks for it."""
    if len(arguments) > 2:
        raise typer.BadParameter(f"{len(arguments)} arguments given. Put the prompt in quotes.")
    if len(arguments) == 1 and (Path(arguments[0]) / "config.json").is_file():
        raise typer.BadParameter(f"{arguments[0]} is a model's folder, and the prompt is missing.")
    model = arguments[0] if len(arguments) == 2 else embedded.path()
    prompt = arguments[-1]
    options: dict[str, Any] = {"do_sample": False}
    drawn = False
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if seed is not None or any(value is not None for value in sampling.values()):
        options = {"do_sample": True, **{k: v for k, v in sampling.items() if v is not None}}
        drawn = seed is None
        seed = secrets.randbits(32) if drawn else seed
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    if stop:
        options["stop_strings"] = stop
    for name in _chosen(backend):
        backends.check_backend(name)
    folder = find_checkpoint(model, revision)
    tokenizer = load_tokenizer(folder)
    ids = _encode(tokenizer, prompt)
    for name in _chosen(backend):
        if backend == "both":
            Console().rule(f"[bold]{name}")
        with init_inference(folder, backend=name, dtype=dtype) as engine:
            tokens = _stream(engine, ids, max_new_tokens, seed, tokenizer, options)
            typer.echo(prompt, nl=False)
            for piece in _pieces(tokenizer, ids, tokens):
                typer.echo(piece, nl=False)
                sys.stdout.flush()
        typer.echo()
    if drawn:
        Console(stderr=True).print(f"[dim]To get this again: --seed {seed}[/]", highlight=False)


@dataclass
class _Run:
    """What the demo knows of one backend."""

    engine: FusedEngine
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    speed: float = 0.0


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Option(show_default=False, help="The text to continue; unset: a function.")
    ] = _PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = _NEW_TOKENS,
) -> None:
    """Continue one prompt on both backends, side by side, and say whether they agree."""
    _check_both("The demo")
    console = Console()
    folder = embedded.path()
    tokenizer = load_tokenizer(folder)
    ids = _encode(tokenizer, prompt)
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
        soft_wrap=True,
    )
    console.print(
        f"[dim]float32, one sequence, after a warm-up, on {device} (torch) and {jax_device} (jax)."
        + (" Figures from a CPU are no benchmark." if "cpu" in device.lower() else "")
        + "[/]",
        highlight=False,
        soft_wrap=True,
    )
    if not equal:
        raise typer.Exit(1)


@app.command()
def parity(
    model: Annotated[
        str | None,
        typer.Argument(show_default=False, help="A checkpoint's folder or a model of the hub."),
    ] = None,
    prompt: Annotated[
        str, typer.Option(show_default=False, help="The text to run both over.")
    ] = _PROMPT,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    revision: RevisionOption = None,
) -> None:
    """Compare both backends layer by layer over one prompt."""
    _check_both("parity")
    folder = find_checkpoint(model or embedded.path(), revision)
    console = Console()
    if not has_tokenizer(folder):
        ids = _row(range(1, 17))
        console.print("[dim]The folder holds no tokenizer: token ids 1 to 16 instead.[/]")
    else:
        ids = _encode(load_tokenizer(folder), prompt)
    with _engines(folder, dtype) as engines:
        result = compare(engines["jax"], engines["torch"], ids)
    table = Table("", "max error", "relative RMS", title=Text(f"jax against torch, {dtype}"))
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


@app.command()
def env() -> None:
    """Show versions, devices, and which backends and kernels are usable."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [*describe_system()]
    for name in backends.BACKENDS:
        rows += describe_backend(name)
    for key, value in rows:
        table.add_row(f"[bold]{escape(key)}[/]", escape(value))
    Console().print(table, highlight=False, soft_wrap=True)


def main() -> None:
    """The `dualinfer` command."""
    app()


def _chosen(backend: str | None) -> tuple[str, ...]:
    return backends.BACKENDS if backend == "both" else (backend or backends.default_backend(),)


def _check_both(what: str) -> None:
    for name in backends.BACKENDS:
        try:
            backends.check_backend(name)
        except BackendNotAvailableError as error:
            raise BackendNotAvailableError(f"{what} compares both backends. {error}") from error


def _row(ids: Any) -> Any:
    import numpy as np

    return np.array([list(ids)], np.int64)


def _encode(tokenizer: Any, prompt: str) -> Any:
    try:
        ids = tokenizer(prompt)["input_ids"]
    except Exception as error:  # tokenizers raises many kinds
        raise ArgumentError(
            f"The tokenizer does not take the prompt {prompt!r}: {error}"
        ) from error
    if not ids:
        raise ArgumentError("The prompt is empty; there is nothing to continue.")
    return _row(ids)


@contextmanager
def _engines(folder: Path, dtype: str) -> Iterator[dict[str, FusedEngine]]:
    """One engine a backend, closed at the end."""
    engines: dict[str, FusedEngine] = {}
    try:
        for name in backends.BACKENDS:
            engine = init_inference(folder, backend=name, dtype=dtype)
            if isinstance(engine, ModuleEngine):
                runs = str(engine)
                engine.close()
                raise UnsupportedError(f"{runs}: JAX does not run it, so nothing is compared.")
            engines[name] = engine
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def _stream(
    engine: FusedEngine | ModuleEngine,
    ids: Any,
    new_tokens: int | None,
    seed: int | None,
    tokenizer: Any,
    options: dict[str, Any],
) -> Iterator[int]:
    """The new tokens as they come; in module mode, whose generate is HF's own, all at the end."""
    if isinstance(engine, FusedEngine):
        if new_tokens is None:
            new_tokens = max(1, min(_NEW_TOKENS, engine.max_tokens - ids.shape[1]))
        return engine.stream(
            ids, max_new_tokens=new_tokens, seed=seed, tokenizer=tokenizer, **options
        )
    import torch

    if not engine.can_generate():
        raise UnsupportedError(f"{engine} does not generate.")
    if seed is not None:
        torch.manual_seed(seed)
    if "stop_strings" in options:
        options = {**options, "tokenizer": tokenizer}
    prompt = torch.from_numpy(ids).to(engine.device)
    made = engine.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=_NEW_TOKENS if new_tokens is None else new_tokens,
        **options,
    )
    answers_alone = getattr(engine.config, "is_encoder_decoder", False)
    tokens = made[0, 0 if answers_alone else ids.shape[1] :].tolist()
    return (token for token in tokens)


def _pieces(tokenizer: Any, ids: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Text of the new tokens, in whole characters; closes `tokens`."""
    text = TextStream(tokenizer, ids[0].tolist())
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
            Text(prompt, style="bold", overflow="fold").append(run.text, style="not bold")
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
    """Whether the texts are equal, ties aside, in words."""
    at = first_difference(one, other)
    if at is None:
        return parity.equal, f"All {len(one)} new tokens are equal"
    if parity.equal:
        return True, f"{at} new tokens are equal, then two candidates are closer than rounding"
    return False, f"The tokens differ from new token {at + 1} on"


def _share(parity: Parity) -> str:
    assert parity.logits is not None
    return f"{parity.logits.relative_rms:.1e}"
