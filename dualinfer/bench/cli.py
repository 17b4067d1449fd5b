"""`dualinfer bench decode | prefill | forward | embed | serve | ops`."""

import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from .. import backends
from ..config import make_config
from ..config.dtypes import dtype_name
from ..errors import ArgumentError, BackendNotAvailableError, DualinferError
from ..parallel.launching import check_places
from ..system.command_options import (
    KvCacheOption,
    OversubscribeOption,
    QuantOption,
    ResidentOption,
    with_options,
)
from ..system.terminal import Command, print_folded
from .client import run_all
from .estimate import SHEETS, check_compiler, check_device, compiled, compiled_table, estimate
from .estimate import make_table as estimates
from .load import Load
from .measure import Task
from .runs import Row, document, run_tasks, write_json
from .serving import SLOS, figures
from .shapes import EMBEDDED, SHAPES, check_model
from .systems import PEERS, SERVING_PEERS, side_of
from .tables import failure_lines, label, limit_lines, make_table, side_by_side, write_plot

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure speed as a fraction of what the device can do.",
)

_FIGURES_OF_MODELS = ("decode", "prefill", "forward", "embed", "serve")

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
    list[str] | None,
    typer.Option(
        metavar="triton|pallas|xla",
        help="Whose kernels run it on JAX; several times for rows beside each other. "
        "Unset: the engine's own choice.",
    ),
]
NoKernelsOption = Annotated[
    bool, typer.Option("--no-kernels", help="Plain operations, on both backends.")
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
class _Chosen:
    """The models and systems that are measured, and where the figures go."""

    shape: ShapeOption = None
    backend: BackendOption = "torch"
    dtype: DtypeOption = None
    peer: PeerOption = None
    quant: QuantOption = None
    kernels: KernelsOption = None
    no_kernels: NoKernelsOption = False
    json: JsonOption = None
    plot: PlotOption = None


@dataclass(frozen=True, kw_only=True)
class _Measured(_Chosen):
    """Options that name the model that is measured, and how it is held."""

    batch: BatchOption = None
    prompt: PromptOption = None
    tp: TpOption = None
    oversubscribe: OversubscribeOption = False
    ep: EpOption = None


@dataclass(frozen=True, kw_only=True)
class _Estimated(_Measured):
    """Options by which nothing is measured."""

    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"With --estimate, a device by its data sheet: {', '.join(SHEETS)}.",
        ),
    ] = None
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Measure nothing: bytes and FLOPs against the data sheet of --device, computed.",
        ),
    ] = False
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="With --estimate, what the program compiled for one chip says of itself, too. "
            "Needs libtpu, and minutes for large models.",
        ),
    ] = False


@app.command(cls=Command)
@with_options(_Estimated)
def decode(
    model: ModelArgument = None,
    new_tokens: Annotated[
        int, typer.Option(metavar="COUNT", min=2, help="Tokens to generate.")
    ] = 128,
    repeats: RepeatsOption = 5,
    resident_layers: ResidentOption = None,
    kv_cache_dtype: KvCacheOption = None,
    *,
    asked: _Estimated,
) -> None:
    """Time of each new token, as a fraction of the read bandwidth.

    Where layers are streamed, of the rate from host to device, if that takes longer.
    """
    asked = _checked(asked)
    tasks = _tasks("decode", model, EMBEDDED, 128, new_tokens, repeats, asked)
    kept_in = make_config({"kv_cache_dtype": kv_cache_dtype}, {}).kv_cache_dtype
    own = [
        replace(task, resident=resident_layers, kv_cache=kept_in)
        if task.system in backends.BACKENDS
        else task
        for task in tasks
    ]
    _bench_or_estimate("decode", own, asked)


@app.command(cls=Command)
@with_options(_Estimated)
def prefill(model: ModelArgument = None, repeats: RepeatsOption = 5, *, asked: _Estimated) -> None:
    """Time to the first token, as a fraction of the matrix units' rate."""
    asked = _checked(asked)
    tasks = _tasks("prefill", model, EMBEDDED, 512, 1, repeats, asked)
    _bench_or_estimate("prefill", tasks, asked)


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


@dataclass(frozen=True, kw_only=True)
class _Asked(_Chosen):
    """Options of the load on a server, and of how its answers are judged."""

    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another system beside it: hf, HF's continuous batching."
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw how the times are spread (.png).")
    ] = None
    requests: Annotated[int, typer.Option(metavar="COUNT", min=1, help="Requests of each row.")] = (
        1000
    )
    rate: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER",
            help="Requests a second, as a Poisson process; several times for several rows. Unset: "
            "all are there from the start.",
        ),
    ] = None
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="Requests under way at a time; several times for several rows. Unset: any number.",
        ),
    ] = None
    lengths: Annotated[
        Literal["random", "chat"],
        typer.Option(
            metavar="random|chat", help="Of prompts and answers: those named below, or as chats'."
        ),
    ] = "random"
    input_len: Annotated[
        int | None, typer.Option(metavar="COUNT", min=1, help="Tokens of a prompt. [1024]")
    ] = None
    output_len: Annotated[
        int | None, typer.Option(metavar="COUNT", min=1, help="Tokens of an answer. [128]")
    ] = None
    range_ratio: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0, max=1, help="By how much each may differ from these."),
    ] = 0.0
    prefix_len: Annotated[
        int,
        typer.Option(metavar="COUNT", min=0, help="Tokens before a prompt that others have, too."),
    ] = 0
    prefixes: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="How many such beginnings there are.")
    ] = 1
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", min=0, help="Of lengths, ids and times.")
    ] = 0
    warm_ups: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            min=0,
            help="Requests before those that are measured. [as many as may be under way, at most "
            "256; of a --url 1]",
        ),
    ] = None
    within: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Give up requests of a row that have not ended by then. Unset: none.",
        ),
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help=f"Count requests within so many milliseconds of {', '.join(SLOS)}; several times "
            "for all of several.",
        ),
    ] = None


@app.command(cls=Command)
@with_options(_Asked)
def serve(
    model: ModelArgument = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="Measure a server of OpenAI's API in place of one made here; MODEL is its name "
            "there. Several times for several.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="DUALINFER_API_KEY", help="What the server wants."),
    ] = None,
    vocab: Annotated[
        int,
        typer.Option(metavar="COUNT", min=1, help="Prompts have ids below it, of a --url."),
    ] = 1000,
    http: Annotated[
        bool,
        typer.Option("--http/--no-http", help="By our server, or by generate_async without one."),
    ] = True,
    bare: Annotated[
        bool,
        typer.Option("--bare/--no-bare", help="Measure the same steps by generate alone, too."),
    ] = True,
    kv_cache_dtype: KvCacheOption = None,
    *,
    asked: _Asked,
) -> None:
    """Latency and throughput of many requests, beside the steps alone.

    Of dualinfer's own server with random weights, of a checkpoint, of HF's continuous batching
    (--peer hf), or of any server of OpenAI's API (--url). Figures are those of vLLM's benchmark.
    """
    goals = _goals(asked.goodput or [])
    every = Load(
        asked.requests,
        chat=asked.lengths == "chat",
        input_len=asked.input_len,
        output_len=asked.output_len,
        range_ratio=asked.range_ratio,
        prefix_len=asked.prefix_len,
        prefixes=asked.prefixes,
        seed=asked.seed,
        within=asked.within,
    )
    loads = [
        replace(every, rate=rate, concurrency=concurrency)
        for rate in dict.fromkeys(asked.rate or [None])
        for concurrency in dict.fromkeys(asked.concurrency or [None])
    ]
    for load in loads:
        if load.rate is not None and not load.rate > 0:
            raise ArgumentError(f"--rate {load.rate:g}; expected a number above 0.")
        if load.chat and (load.input_len or load.output_len or load.range_ratio):
            raise ArgumentError(
                "--lengths chat has lengths of its own. Leave --input-len, --output-len and "
                "--range-ratio out."
            )
        if load.within is not None and not load.within > 0:
            raise ArgumentError(f"--within {load.within:g}; expected seconds above 0.")
    if url:
        tasks = [
            _Remote(one, model, api_key, vocab, load, _warm_ups(asked, load, 1), goals)
            for one in url
            for load in loads
        ]
        _bench("serve", tasks, asked.json, asked.plot)
        return
    chosen = _Measured(**{field.name: getattr(asked, field.name) for field in fields(_Chosen)})
    kept_in = make_config({"kv_cache_dtype": kv_cache_dtype}, {}).kv_cache_dtype
    own_tasks = [
        replace(
            task,
            kv_cache=kept_in if own else None,
            serve={
                "load": load.to_dict(),
                "goals": goals,
                "over_http": http and own,
                "warm_ups": _warm_ups(asked, load, _MOST_WARM_UPS),
                "is_bare": bare and own,
            },
        )
        for task in _tasks("serve", model, EMBEDDED, 0, 0, 1, chosen, SERVING_PEERS)
        for load in loads
        for own in [task.system in backends.BACKENDS]
    ]
    _bench("serve", own_tasks, asked.json, asked.plot)


_MOST_WARM_UPS = 256


def _warm_ups(asked: _Asked, load: Load, most: int) -> int:
    if asked.warm_ups is not None:
        return asked.warm_ups
    return min(most, load.concurrency or most, load.requests)


def _goals(given: list[str]) -> dict[str, float]:
    """The goals that --goodput names, in milliseconds."""
    goals = {}
    for one in given:
        name, _, value = one.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = 0.0
        if name not in SLOS or not goals[name] > 0:
            raise ArgumentError(
                f"--goodput {one}; expected one of {', '.join(SLOS)} and milliseconds, as ttft:200."
            )
    return goals


@dataclass(frozen=True)
class _Remote:
    """A row of a server that is not ours."""

    url: str
    model: str | None
    key: str | None
    vocab: int
    load: Load
    warm_ups: int
    goals: dict[str, float]

    def row(self) -> Row:
        """The figures, or why there are none."""
        load = self.load.filled()
        about = {"kind": "serve", "system": "url", "url": self.url, "model": self.model or ""}
        about |= {"dtype": None, "kernels": True, "load": load.to_dict(), "what": load.describe()}
        loads = [*([load.warm_up(self.warm_ups)] if self.warm_ups else []), load]
        first = min(16, self.vocab // 2)  # special ids are the first ones, mostly
        try:
            request = {"url": self.url, "model": self.model, "key": self.key, "first": first}
            request |= {"vocab": self.vocab, "loads": [one.to_dict() for one in loads]}
            return about | figures(asyncio.run(run_all(request))[-1], self.goals)
        except (DualinferError, OSError) as error:
            return about | {"error": str(error)}


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
    known_peers: Sequence[str] = PEERS,
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
        if peer not in known_peers:
            raise ArgumentError(f"--peer {peer} is not known. Peers: {', '.join(known_peers)}.")
        side = side_of(peer)
        try:
            backends.check_backend(side)
        except BackendNotAvailableError as error:
            raise BackendNotAvailableError(f"--peer {peer} runs beside {side}. {error}") from error
    systems: list[str] = list(dict.fromkeys([*_chosen(asked.backend), *peers]))
    dtype = _dtype(asked.dtype)
    run = new_tokens, repeats, not asked.no_kernels
    by = _kernels(asked, systems)
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
        Task(
            *(kind, system, model, dtype, batch, prompt, *run, tp, quant if own else None),
            ep=ep,
            by=name,
        )
        for model, system, (tp, ep), batch, prompt in product(
            dict.fromkeys(models),
            systems,
            [(tp, ep) for tp, ep in product(degrees, parts) if tp % ep == 0],
            dict.fromkeys(asked.batch or [1]),
            dict.fromkeys(asked.prompt or [tokens]),
        )
        for own in [system in backends.BACKENDS]
        if tp == 1 or own
        for name in (by if system == "jax" else [None])
    ]


def _kernels(asked: _Chosen, systems: Sequence[str]) -> list[str] | list[None]:
    """Whose kernels run what JAX runs, in a row each; None for the engine's own choice."""
    if not asked.kernels:
        return [None]
    given = " ".join(f"--kernels {name}" for name in asked.kernels)
    for name in asked.kernels:
        make_config({"kernels": name}, {})  # which checks it
    if "jax" not in systems:
        raise ArgumentError(f"{given} is of JAX. Add --backend jax, or leave it out.")
    if asked.no_kernels:
        raise ArgumentError(f"{given} and --no-kernels say two things. Leave out one of them.")
    return list(dict.fromkeys(asked.kernels))


def _check_files(json: Path | None, plot: Path | None) -> None:
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ArgumentError(f"{path}: the folder does not exist. Make it first.")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib. Install `dualinfer[bench]`, or leave it out.")


def _checked(asked: _Estimated) -> _Estimated:
    """The options, with --estimate those of the backend that has the device."""
    check_device(asked.device, asked.estimate)
    if asked.compiles and not asked.estimate:
        raise ArgumentError("--compile is of what is estimated. Add --estimate, or leave it out.")
    if not asked.estimate:
        return asked
    if (asked.kernels or asked.no_kernels) and not asked.compiles:
        raise ArgumentError(
            "--kernels and --no-kernels change nothing that --estimate computes. Leave them out, "
            "or add --compile, which compiles by them."
        )
    if "triton" in (asked.kernels or []):
        raise ArgumentError("--kernels triton is of GPUs. Pass pallas or xla with --estimate.")
    if asked.compiles:
        check_compiler()
    if asked.plot is not None or asked.peer:
        raise ArgumentError("--plot and --peer are of what is measured. Leave out --estimate.")
    return replace(asked, backend="jax")


def _bench_or_estimate(kind: str, tasks: list[Task], asked: _Estimated) -> None:
    """Measure, or with --estimate compute, once for each row whatever runs it."""
    if not asked.estimate or asked.device is None:
        _bench(kind, tasks, asked.json, asked.plot)
        return
    _check_files(asked.json, None)
    own = list(dict.fromkeys(replace(task, system="", resident=None) for task in tasks))
    rows = [estimate(task, asked.device) for task in own]

    def keep() -> None:
        if asked.json is not None:
            write_json(asked.json, document(f"{kind}, estimated", rows, sys.argv))

    keep()
    # Whose kernels run it changes nothing that is computed.
    shown = {replace(task, by=None): row for task, row in zip(own, rows, strict=True)}
    Console().print(estimates(list(shown.values())))
    if not asked.compiles:
        return
    for task, row in zip(own, rows, strict=True):
        if task.tp == 1:
            row["compiled"] = compiled(task, asked.device)
            keep()
    if (table := compiled_table(rows)) is not None:
        Console().print(table)


def _bench(
    kind: str, tasks: list[Task] | list[_Remote], json: Path | None, plot: Path | None
) -> None:
    """Measure, show, and write; exit code 1 if a row failed."""
    _check_files(json, plot)
    progress = Console(stderr=True, soft_wrap=True)
    kept: list[Row] = []

    def keep(row: Row) -> None:
        kept.append(row)
        if json is not None:
            write_json(json, document(kind, kept, sys.argv))
        progress.print(_line(row), highlight=False)

    own = [task for task in tasks if isinstance(task, Task)]
    for task in tasks:
        if isinstance(task, _Remote):
            keep(task.row())
    run_tasks(own, keep)
    rows = side_by_side(kept)
    console = Console()
    if any("op" in row or row["kind"] != "ops" for row in rows):  # else nothing was measured
        console.print(make_table(kind, rows, console.width))
    for line in limit_lines(rows):
        print_folded(console, line, style="dim")
    if any(row.get("device_kind") == "cpu" and "of_limit" in row for row in rows):
        console.print("[dim]Figures from a CPU are no benchmark.[/]", highlight=False)
    if plot is not None:
        write_plot(kind, rows, plot)
    for line in failure_lines(rows):
        print_folded(console, line, style="red")
    if any("error" in row or row.get("failed") for row in rows):
        raise typer.Exit(1)


def _line(row: dict[str, Any]) -> str:
    """One row as it comes: for those who wait, and the error of one that failed."""
    what = row.get("op") or row["model"] or ("all ops" if row["kind"] == "ops" else "")
    if row["kind"] == "ops":
        what += f" {row['description']} by {row['by']}" if "by" in row else ""
    elif row["kind"] == "serve":
        what += f" {row.get('what', '')}"
    else:
        what += f" batch {row['batch']} x {row['tokens']}"
    start = f"{escape(label(row))}: {escape(what.strip())}"
    if "error" in row:
        return f"[red]{start} failed:[/] {escape(row['error'])}"
    if "skipped" in row:
        return f"[dim]{start}: skipped: {escape(row['skipped'])}[/]"
    if row["kind"] == "serve":
        rate = f"{row['output_throughput']:,.0f} tokens/s"
        failed = f", {row['failed']} of {row['failed'] + row['completed']} failed"
        return f"[dim]{start}: {rate}{failed if row['failed'] else ''}[/]"
    return f"[dim]{start}: {row['of_limit']:.1%} of the limit[/]"
