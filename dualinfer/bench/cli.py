"""`dualinfer bench decode | prefill | forward | embed | ops`."""

import importlib.util
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from .. import backends
from ..config import make_config
from ..config.dtypes import dtype_name
from ..errors import ArgumentError, BackendNotAvailableError
from ..parallel.launching import check_places
from ..system.command_options import (
    KvCacheOption,
    OversubscribeOption,
    QuantOption,
    ResidentOption,
    with_options,
)
from ..system.terminal import Command, print_folded
from .measure import Task
from .runs import Row, document, run_tasks, write_json
from .shapes import EMBEDDED, SHAPES, check_model
from .systems import PEERS, side_of
from .tables import label, limit_lines, make_table, side_by_side, write_plot

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure speed as a fraction of what the device can do.",
)

_FIGURES_OF_MODELS = ("decode", "prefill", "forward", "embed")

_TEXTS = 1024  # of `embed`, where nobody says how many
Choice = Literal["torch", "jax", "both"]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        show_default=False,
        help="A checkpoint's folder or a model of the hub (owner/name).",
    ),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        show_default=False,
        metavar="NAME",
        help=f"Random weights of this shape; several times for several. {', '.join(SHAPES)}, "
        f"each also as NAME:LAYERS, or {EMBEDDED}, the model shipped with the package.",
    ),
]
BackendOption = Annotated[
    Choice, typer.Option(metavar="torch|jax|both", help="What runs dualinfer; both: one by one.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="bf16, fp16 or fp32; unset: the shape's own, float32 on a CPU."
    ),
]
BatchOption = Annotated[
    list[int] | None,
    typer.Option(metavar="COUNT", min=1, help="Sequences; several times for several rows. [1]"),
]
PromptOption = Annotated[
    list[int] | None,
    typer.Option(metavar="COUNT", min=1, help="Tokens a sequence; several times for several rows."),
]
RepeatsOption = Annotated[int, typer.Option(metavar="COUNT", min=1, help="Runs after the warm-up.")]
PeerOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help=f"Another system beside it: {', '.join(PEERS)}. Several times for several.",
    ),
]
KernelsOption = Annotated[
    bool,
    typer.Option(
        "--kernels/--no-kernels", help="Fused kernels, which need a GPU, or plain operations."
    ),
]
TpOption = Annotated[
    list[int] | None,
    typer.Option(
        metavar="COUNT",
        min=1,
        help="Devices that share the model; several times for several rows. [1]",
    ),
]
EpOption = Annotated[
    list[int] | None,
    typer.Option(
        metavar="COUNT",
        min=1,
        help="Parts in which the devices share out a mixture's experts, where it divides --tp; "
        "several times for several rows. [1]",
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write all figures to this file, row by row."),
]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the fractions of the limit (.png).")
]


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What is measured of a model, and where the figures go."""

    shape: ShapeOption = None
    backend: BackendOption = "torch"
    dtype: DtypeOption = None
    batch: BatchOption = None
    prompt: PromptOption = None
    peer: PeerOption = None
    quant: QuantOption = None
    kernels: KernelsOption = True
    tp: TpOption = None
    oversubscribe: OversubscribeOption = False
    ep: EpOption = None
    json: JsonOption = None
    plot: PlotOption = None


@app.command(cls=Command)
@with_options(_Measured)
def decode(
    model: ModelArgument = None,
    new_tokens: Annotated[
        int, typer.Option(metavar="COUNT", min=2, help="Tokens to generate.")
    ] = 128,
    repeats: RepeatsOption = 5,
    resident_layers: ResidentOption = None,
    kv_cache_dtype: KvCacheOption = None,
    *,
    asked: _Measured,
) -> None:
    """Time of each new token, as a fraction of the read bandwidth.

    Where layers are streamed, of the rate from host to device, if that takes longer.
    """
    tasks = _tasks("decode", model, EMBEDDED, 128, new_tokens, repeats, asked)
    kept_in = make_config({"kv_cache_dtype": kv_cache_dtype}, {}).kv_cache_dtype
    own = [
        replace(task, resident=resident_layers, kv_cache=kept_in)
        if task.system in backends.BACKENDS
        else task
        for task in tasks
    ]
    _bench("decode", own, asked.json, asked.plot)


@app.command(cls=Command)
@with_options(_Measured)
def prefill(model: ModelArgument = None, repeats: RepeatsOption = 5, *, asked: _Measured) -> None:
    """Time to the first token, as a fraction of the matrix units' rate."""
    tasks = _tasks("prefill", model, EMBEDDED, 512, 1, repeats, asked)
    _bench("prefill", tasks, asked.json, asked.plot)


@app.command(cls=Command)
@with_options(_Measured)
def forward(model: ModelArgument = None, repeats: RepeatsOption = 50, *, asked: _Measured) -> None:
    """One pass over whole sequences.

    It is replayed from a CUDA graph where there is a GPU.
    """
    tasks = _tasks("forward", model, "bert-large", 128, 0, repeats, asked)
    _bench("forward", tasks, asked.json, asked.plot)


@app.command(cls=Command)
@with_options(_Measured)
def embed(model: ModelArgument = None, repeats: RepeatsOption = 10, *, asked: _Measured) -> None:
    """Vectors of many texts, as a fraction of the limit.

    They are --batch texts of up to --prompt tokens each, most of them short. dualinfer packs them
    into rows; peers pad them in batches of 32, by their lengths. Padding counts nowhere.
    """
    asked = replace(asked, batch=asked.batch or [_TEXTS])
    tasks = _tasks("embed", model, "bert-base", 512, 0, repeats, asked)
    _bench("embed", tasks, asked.json, asked.plot)


@app.command(cls=Command)
def ops(
    only: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", show_default=False, help="Ops whose name holds this; unset: all."
        ),
    ] = None,
    backend: BackendOption = "torch",
    dtype: DtypeOption = None,
    quant: QuantOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Single ops beside other implementations, on a GPU.

    Their inputs are such that no cache holds them. With --quant, products with quantized weights,
    beside those of plain ones.
    """
    if only in _FIGURES_OF_MODELS:
        raise ArgumentError(f"{only} is no op. A whole model: `dualinfer bench {only}`.")
    make_config({"quant": quant}, {})  # which checks it
    about = only or "", _dtype(dtype), 0, 0, 0, 0, True
    tasks = [Task("ops", name, *about, quant=quant) for name in _chosen(backend)]
    _bench("ops", tasks, json, plot)


def _chosen(backend: str) -> tuple[str, ...]:
    names = backends.BACKENDS if backend == "both" else (backend,)
    for name in names:
        backends.check_backend(name)
    return names


def _dtype(given: str | None) -> str | None:
    try:
        return None if given is None else dtype_name(given)
    except ValueError as error:
        raise ArgumentError(f"--dtype {given}: {error}.") from error


def _tasks(
    kind: str,
    name: str | None,
    default: str,
    tokens: int,
    new_tokens: int,
    repeats: int,
    asked: _Measured,
) -> list[Task]:
    """Every combination of model, system, devices, batch and prompt.

    Peers have one device, and weights as they are.
    """
    quant = asked.quant
    make_config({"quant": quant}, {})  # which checks it
    models = [*([name] if name else []), *(asked.shape or [])] or [default]
    for model in models:
        check_model(model)
    peers = asked.peer or []
    for peer in peers:
        if peer not in PEERS:
            raise ArgumentError(f"--peer {peer} is not known. Peers: {', '.join(PEERS)}.")
        side = side_of(peer)
        try:
            backends.check_backend(side)
        except BackendNotAvailableError as error:
            raise BackendNotAvailableError(f"--peer {peer} runs beside {side}. {error}") from error
    systems: list[str] = list(dict.fromkeys([*_chosen(asked.backend), *peers]))
    dtype = _dtype(asked.dtype)
    run = new_tokens, repeats, asked.kernels
    degrees, parts = dict.fromkeys(asked.tp or [1]), dict.fromkeys(asked.ep or [1])
    if max(degrees) > 1 and "torch" in systems:  # which has a process for each device
        check_places(max(degrees), asked.oversubscribe)
    for ep in parts:
        if all(tp % ep for tp in degrees):
            raise ArgumentError(
                f"--ep {ep} divides none of the numbers of devices: {', '.join(map(str, degrees))}."
                " Pass --tp with a multiple of it."
            )
    return [
        Task(kind, system, model, dtype, batch, prompt, *run, tp, quant if own else None, ep=ep)
        for model, system, (tp, ep), batch, prompt in product(
            dict.fromkeys(models),
            systems,
            [(tp, ep) for tp, ep in product(degrees, parts) if tp % ep == 0],
            dict.fromkeys(asked.batch or [1]),
            dict.fromkeys(asked.prompt or [tokens]),
        )
        for own in [system in backends.BACKENDS]
        if tp == 1 or own
    ]


def _bench(kind: str, tasks: list[Task], json: Path | None, plot: Path | None) -> None:
    """Measure, show, and write; exit code 1 if a row failed."""
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ArgumentError(f"{path}: the folder does not exist. Make it first.")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib. Install `dualinfer[bench]`, or leave it out.")
    progress = Console(stderr=True, soft_wrap=True)
    kept: list[Row] = []

    def keep(row: Row) -> None:
        kept.append(row)
        if json is not None:
            write_json(json, document(kind, kept, sys.argv))
        progress.print(_line(row), highlight=False)

    rows = side_by_side(run_tasks(tasks, keep))
    console = Console()
    if any("op" in row or row["kind"] != "ops" for row in rows):  # else nothing was measured
        console.print(make_table(kind, rows, console.width))
    for line in limit_lines(rows):
        print_folded(console, line, style="dim")
    if any(row.get("device_kind") == "cpu" and "of_limit" in row for row in rows):
        console.print("[dim]Figures from a CPU are no benchmark.[/]", highlight=False)
    if plot is not None:
        write_plot(kind, rows, plot)
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _line(row: dict[str, Any]) -> str:
    """One row as it comes: for those who wait, and the error of one that failed."""
    what = row.get("op") or row["model"] or "all ops"
    if row["kind"] == "ops":
        what += f" {row['description']} by {row['by']}" if "by" in row else ""
    else:
        what += f" batch {row['batch']} x {row['tokens']}"
    start = f"{escape(label(row))}: {escape(what)}"
    if "error" in row:
        return f"[red]{start} failed:[/] {escape(row['error'])}"
    if "skipped" in row:
        return f"[dim]{start}: skipped: {escape(row['skipped'])}[/]"
    return f"[dim]{start}: {row['of_limit']:.1%} of the limit[/]"
