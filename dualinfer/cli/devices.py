"""The commands about many devices: dualinfer plan | launch."""

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.text import Text

from ..backends import check_backend, describe_split
from ..checkpoint.files import read_json
from ..checkpoint.hf_config import read_config, read_other_config
from ..checkpoint.hub import find_checkpoint
from ..config import make_config
from ..errors import ConfigError, ModelError, printable
from ..model.families import check_model_type, describe_model
from ..parallel.launching import run_processes
from ..quantization import read_quantization
from ..system.tables import Table
from .options import RevisionOption
from .plan_table import DevicePart, PlanRow, PlanTable, make_plan_table
from .quick_start import OWN_PROCESS, start_sooner

_MOST_DEVICES = 1024  # of a plan; each is counted through
_LONGEST = 600  # letters of an error of transformers'
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plan(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A folder with a config.json, or a model of the hub; no weights needed.",
        ),
    ],
    tp: Annotated[
        int,
        typer.Option(
            metavar="COUNT", min=1, max=_MOST_DEVICES, help="Devices that share the model."
        ),
    ],
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; unset: the checkpoint's own.")
    ] = None,
    backend: Annotated[
        Literal["torch", "jax"], typer.Option(help="torch splits unevenly, jax pads with zeros.")
    ] = "torch",
    revision: RevisionOption = None,
) -> None:
    """Show which device would hold what of a model, and what they say to each other."""
    folder = find_checkpoint(model, revision, weights=False)
    if ctx.obj == OWN_PROCESS:
        start_sooner(folder)  # so that neither framework is imported
    written = read_json(folder / "config.json")
    try:
        read_quantization(written)
        check_model_type(written.get("model_type"))
        config = read_config(folder)
        _, table = describe_model(config.to_dict(), config.architectures)
    except ModelError as error:
        _plan_module(folder, written, tp, backend, error)
        return
    own = written.get("dtype") or written.get("torch_dtype") or "float16"
    name = make_config({"dtype": dtype or own}, {}).dtype
    assert name is not None
    plan = make_plan_table(table, tp, name, equal=backend == "jax")
    console = Console()
    many = f"{tp} devices" if tp > 1 else "one device"
    title = f"{plan.architecture} in {name} on {many}, {backend}"
    console.print(_weights_table(plan, title))
    console.print(_devices_table(plan))
    for line in (*_held(plan), *_collectives(plan), *(f"note: {note}" for note in plan.notes)):
        _print_plain(console, line)


def _plan_module(
    folder: Path, written: Mapping[str, Any], tp: int, backend: str, error: ModelError
) -> None:
    """What module mode makes of a model that fused mode does not serve."""
    names = written.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if backend != "torch" or not isinstance(name, str):
        raise ModelError(
            f"{error} The plan shows fused mode here; with backend='torch', and architectures in "
            "config.json, it shows what module mode makes of the layers."
        ) from error
    check_backend("torch")
    try:
        lines = describe_split(name, read_other_config(folder), tp)
    except Exception as reason:  # transformers' classes raise many kinds
        if str(reason) == str(error):
            raise error from reason
        raise ModelError(
            f"{error} Module mode does not know it either: {str(reason)[:_LONGEST]}"
        ) from reason
    console = Console()
    console.print(_literal(f"{name} on {tp} devices in module mode, torch"), style="bold")
    for line in lines:
        shapes = " ".join(dict.fromkeys(map(_shape, line.shapes)))
        times = f"{line.layers} x " if line.layers > 1 else ""
        _print_plain(console, f"{times}{line.path}")
        what = f"{line.kind} becomes {line.becomes}: {_shape(line.whole)}, on each {shapes}"
        _print_plain(console, f"    {what}")
        if line.reason:
            _print_plain(console, f"    {line.reason}")
    _print_plain(console, f"note: {error}")
    _print_plain(
        console,
        "note: a split is tried out when the engine is made, which may leave more whole; "
        "engine.report() says what it came to",
    )


def _weights_table(found: PlanTable, title: str) -> Table:
    """A row for each weight, what it is split by on a line of its own where that is long."""
    table = Table(title=_literal(title), box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("weight", no_wrap=True)
    for name in ("whole", "on each device", "split by"):
        table.add_column(name)
    table.add_column("bytes", justify="right", no_wrap=True)
    for row in found.rows:
        split = row.split or ("" if len(row.shapes) == 1 else "replicated")
        times = f"{row.count} x " if row.count > 1 else ""
        size = times + _bytes(row.size // row.count)
        table.add_row(*map(_literal, (row.name, _shape(row.shape), _on_each(row), split, size)))
    return table


def _devices_table(found: PlanTable) -> Table:
    """A line for each run of devices that hold as much."""
    names = [own.name.replace(" ", "\n") for own in found.devices[0].shares]
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("device", "weights", "cache\nper token", *names):
        table.add_column(name)
    first = 0
    for part, run in groupby(found.devices):
        last = first + len(list(run)) - 1
        numbers = str(first) if first == last else f"{first}-{last}"
        table.add_row(numbers, _bytes(part.weights), _bytes(part.cache), *_shares(part))
        first = last + 1
    return table


def _held(found: PlanTable) -> list[str]:
    """What all devices hold together, where they are several, and why that is more."""
    if len(found.devices) == 1:
        return []
    held = sum(part.weights for part in found.devices)
    more = ", the rest being what several hold, and padding" if held > found.whole else ""
    return [f"all devices together: {_bytes(held)}, of a model of {_bytes(found.whole)}{more}"]


def _shares(part: DevicePart) -> list[str]:
    return [
        f"{own.real:,}" if own.real == own.extent else f"{own.real:,} of {own.extent:,}"
        for own in part.shares
    ]


def _collectives(found: PlanTable) -> list[str]:
    if not found.sums:
        return []
    gather = " and one gather of the logits" if found.gathers else ""
    return [f"per token: {found.sums} sums of {_bytes(found.sum_size)} over the devices{gather}"]


def _on_each(row: PlanRow) -> str:
    """The shape on a device; along an axis of several extents, each device's."""
    parts = []
    for extents in zip(*row.shapes, strict=True):
        alike = len(set(extents)) == 1
        parts.append(str(extents[0]) if alike else " | ".join(map(str, extents)))
    return f"[{', '.join(parts)}]"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _literal(text: str) -> Text:
    """Text that rich shows as it is."""
    return Text(printable(text))


def _print_plain(console: Console, line: str) -> None:
    """Print a line in which nothing is markup, as long as it is."""
    console.print(_literal(line), highlight=False, soft_wrap=True)


def _bytes(count: int) -> str:
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.{1 if unit else 0}f} {_UNITS[unit]}"


def launch(
    tp: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="Processes to start, one for each device.")
    ],
    script: Annotated[Path, typer.Argument(help="The Python script that each of them runs.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script gets, options too.")
    ] = None,
) -> None:
    """Run a script in processes on this machine that share a model.

    They talk over the loopback alone. Where one fails the others are stopped.
    """
    check_backend("torch")
    if not script.is_file():
        raise ConfigError(f"{str(script)!r} is no file. Pass the Python script to run.")
    _check_devices(tp)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // tp)))
    raise typer.Exit(run_processes([str(script), *(arguments or [])], tp))


def _check_devices(count: int) -> None:
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there and count > there:
        raise ConfigError(
            f"--tp {count}, but this machine has {there} GPU{'s' if there > 1 else ''}, and each "
            f"process needs one of its own. Use --tp {there}, or set CUDA_VISIBLE_DEVICES= to run "
            "on the CPU."
        )
