"""The commands about many devices: dualinfer plan | launch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.text import Text

from ..arrays import numpy_dtype
from ..backends import check_backend, describe_split
from ..backends.streaming import Streaming
from ..checkpoint.described.auto_class import class_named
from ..checkpoint.described.hf_config import read_config, read_other_config, read_written
from ..checkpoint.foreign.fitting import fit, wanted_by_table
from ..checkpoint.gguf.model import is_gguf
from ..checkpoint.hub import find_checkpoint
from ..checkpoint.sources import open_checkpoint
from ..checkpoint.views.quantized import open_as_held
from ..config import (
    InferenceConfig,
    MoEConfig,
    TensorParallelConfig,
    make_config,
    serving_dtype,
)
from ..errors import (
    ArgumentError,
    CheckpointNotFoundError,
    ConfigError,
    ModelError,
    UnservedError,
    printable,
)
from ..model.families import check_model_type, describe_model
from ..model.load_plan import TableSource, TensorSource, make_load_plan
from ..model.weights import WeightTable
from ..parallel.experts import parts_of_experts
from ..parallel.launching import check_places, run_processes
from ..quantization import read_quantization
from ..quantization.recipe import make_recipe
from ..system.command_options import (
    KvCacheOption,
    OversubscribeOption,
    QuantOption,
    ResidentOption,
    StateOption,
    with_options,
)
from ..system.tables import Table
from ..system.terminal import print_folded
from .options import One, RevisionOption
from .plan_table import DevicePart, PlanTable, make_plan_table
from .quick_start import OWN_PROCESS, start_sooner

_MOST_DEVICES = 1024  # of a plan; each is counted through
_FEW_DEVICES = 4  # of which each is shown in a shape
_LONGEST = 600  # letters of an error of transformers'
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class HeldOptions:
    """The options of what weights and caches are held in."""

    quant: QuantOption = None
    kv_cache_dtype: KvCacheOption = None
    state_dtype: StateOption = None


@dataclass(frozen=True, kw_only=True)
class StreamingOptions:
    """The options of layers that stay on the host."""

    resident_layers: ResidentOption = None
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            min=0,
            help="Free memory of each device: as many layers stay there as fit, the others are "
            "streamed from the host.",
        ),
    ] = None
    host_rate: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            min=1e-3,
            help="From host to device, for the time that streaming takes; `dualinfer bench decode "
            "--resident-layers` measures it. Unset: 25 and 50, about what PCIe 4 and 5 reach.",
        ),
    ] = None

    @property
    def streams(self) -> bool:
        """True if some layers are on the host; ArgumentError for a rate without any."""
        found = self.resident_layers is not None or self.device_memory is not None
        if self.host_rate is not None and not found:
            raise ArgumentError(
                "--host-rate is about layers that are streamed. Pass --resident-layers or "
                "--device-memory, too."
            )
        return found

    @property
    def free(self) -> int | None:
        """Free bytes of a device; None where nobody says."""
        return None if self.device_memory is None else int(self.device_memory * 2**30)


@with_options
def plan(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a config.json, or a model of the hub; weights are needed of "
            "quantized ones alone.",
        ),
    ],
    *,
    tp: Annotated[
        int,
        typer.Option(
            metavar="COUNT", min=1, max=_MOST_DEVICES, help="Devices that share the model."
        ),
    ] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32, float16 or bfloat16; unset or auto: what a GPU takes, the checkpoint's "
            "own, or float16 for float32.",
        ),
    ] = None,
    backend: Annotated[
        One,
        typer.Option(metavar="torch|jax", help="torch splits unevenly, jax pads with zeros."),
    ] = "torch",
    tp_grain_size: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="Widths of MLP and vocabulary shards are multiples of it, but for a rest.",
        ),
    ] = TensorParallelConfig().tp_grain_size,
    ep: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="Parts in which the devices share out a mixture's experts; it divides --tp. 1: "
            "each device has a share of the width of every expert.",
        ),
    ] = MoEConfig().ep_size,
    held: HeldOptions,
    streaming: StreamingOptions,
    revision: RevisionOption = None,
) -> None:
    """Show what each device would hold of a model.

    It says, too, what the devices send each other for a token.
    """
    folder = find_checkpoint(model, revision, weights=False)
    if ctx.obj == OWN_PROCESS:
        start_sooner(folder)  # so that neither framework is imported
    written = read_written(folder)
    parallel = {"tp_size": tp, "tp_grain_size": tp_grain_size}
    fields = {"dtype": dtype, "backend": backend, "tensor_parallel": parallel, **vars(held)}
    streams = streaming.streams
    fields["moe"] = {"ep_size": ep}
    fields |= {"keep_module_on_host": streams, "resident_layers": streaming.resident_layers}
    settings = make_config(fields, {}).with_int8_as_quant()
    name, why = _dtype(settings.dtype, written)
    try:
        plan, notes = plan_folder(folder, written, settings, name, streaming.free)
    except CheckpointNotFoundError as error:
        raise _needs_weights(error, model, revision) from error
    except UnservedError as error:
        asked = settings.quant
        if asked is not None:
            raise ConfigError(
                f"quant={asked.scheme!r}: a plan of module mode counts plain weights "
                f"alone, and the model runs in it. Leave quant unset. {error}"
            ) from error
        for kept in ("kv_cache_dtype", "state_dtype"):
            if (value := getattr(settings, kept)) is not None:
                raise ConfigError(
                    f"{kept}={value!r}: in module mode, in which the model runs, the cache is the "
                    f"module's own. Leave it unset. {error}"
                ) from error
        if streams:
            raise ConfigError(
                "layers are streamed in fused mode alone, and the model runs in module mode. Leave "
                f"--resident-layers and --device-memory out. {error}"
            ) from error
        if ep > 1:
            raise ConfigError(
                f"moe.ep_size={ep}: experts are shared out in fused mode alone, and the model runs "
                f"in module mode. Leave it unset. {error}"
            ) from error
        _plan_module(folder, written, (tp, tp_grain_size, name, why), backend, error)
        return
    console = Console()
    title = f"{plan.architecture} in {name} on {_many(tp)}, {backend}"
    console.print(_weights_table(plan, title))
    for line in _legend([row.shapes for row in plan.rows]):
        print_folded(console, line)
    console.print(_devices_table(plan.devices))
    if plan.is_quantized:
        for kind, size in plan.weights.items():
            print_folded(console, f"weights, {kind}: {size}")
    more = _active(plan), _collectives(plan), _streamed(plan.streaming, streaming.host_rate)
    for line in (*_held(plan.devices, plan.whole), *chain(*more)):
        print_folded(console, line)
    for note in (*why, *notes, *plan.notes):
        print_folded(console, f"note: {note}")


def plan_folder(
    folder: Path,
    written: Mapping[str, Any],
    settings: InferenceConfig,
    dtype: str,
    free: int | None = None,
) -> tuple[PlanTable, tuple[str, ...]]:
    """The plan of a folder whose config.json holds `written`, in `dtype`, and notes for people.

    `free` are the bytes that a device has, for what is streamed.

    UnservedError where fused mode does not run the model.
    """
    stored_as, recipe = read_quantization(written), make_recipe(settings.quant)
    check_model_type(written.get("model_type"))
    config = read_config(folder)
    _, table = describe_model(config.to_dict(), config.architectures)
    rows, notes = table.rows, ()
    if (
        stored_as is not None or recipe is not None or is_gguf(folder)
    ):  # which rows have which scheme tensors say
        source = _open(folder, table, written, may_lack=stored_as is None)
        notes = source.notes
        source, table, more = open_as_held(source, table, written, recipe)
        notes += more
        rows = tuple(row for row, _ in make_load_plan(table, source).rows)
    tp, on_jax = settings.tensor_parallel, settings.backend == "jax"
    how = table, tp.tp_size, dtype, tp.tp_grain_size, on_jax, rows
    parts = parts_of_experts(settings.moe, table.spec, tp.tp_size)
    return make_plan_table(*how, settings, free, parts), notes


def _needs_weights(
    error: CheckpointNotFoundError, model: str, revision: str | None
) -> CheckpointNotFoundError:
    """An error that a plan needs the weights of a quantized model, and how to get them."""
    way = "Copy them into that folder"
    if not os.path.exists(os.path.expanduser(model)):
        of = f" --revision {revision}" if revision else ""
        way = f"Fetch them with `hf download {model}{of}`"
    return CheckpointNotFoundError(
        f"{model} is quantized, so that a plan needs its weights, which say how each of them "
        f"is stored, and not config.json alone. {error} {way}, and plan again."
    )


def _many(tp: int) -> str:
    return f"{tp} devices" if tp > 1 else "one device"


def _open(
    folder: Path, table: WeightTable, written: Mapping[str, Any], may_lack: bool
) -> TensorSource:
    """The folder's tensors; where it holds none and may lack them, those that its config promises.

    The scales that are made of weights have the dtype in which these are stored.
    """
    try:
        return fit(open_checkpoint(folder), wanted_by_table(table, written))
    except CheckpointNotFoundError:
        if not may_lack:
            raise
        return TableSource(table, str(_stored_dtype(written) or "float32"), str(folder))


def _stored_dtype(written: Mapping[str, Any]) -> Any:
    return written.get("dtype") or written.get("torch_dtype")


def _dtype(given: str | None, written: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The dtype to count in, and a note on it where nobody asked: it is then that on a GPU."""
    if given is not None:
        return given, []
    own = _stored_dtype(written)
    name, why = serving_dtype(str(own or "float32"), "float16")
    if own is None:
        why = "config.json names no dtype"
    return name, [f"counted in {name}, as a GPU takes it ({why}); `--dtype NAME` asks for another"]


def _plan_module(
    folder: Path,
    written: Mapping[str, Any],
    how: tuple[int, int, str, list[str]],
    backend: str,
    error: ModelError,
) -> None:
    """Print what module mode makes of a model that fused mode does not serve."""
    name = class_named(written)
    if backend != "torch" or name is None:
        raise ModelError(
            f"{error} The plan shows fused mode here; with backend='torch', and architectures in "
            "config.json, it shows what module mode makes of the layers."
        ) from error
    check_backend("torch")
    tp, grain, dtype, why = how
    try:
        split = describe_split(name, read_other_config(folder), tp, grain)
    except Exception as reason:  # transformers' classes raise many kinds
        if str(reason) == str(error):
            raise error from reason
        raise ModelError(
            f"{error} Module mode does not know it either: {str(reason)[:_LONGEST]}"
        ) from reason
    size = numpy_dtype(dtype).itemsize
    console = Console()
    title = f"{name} in {dtype} on {_many(tp)} in module mode, torch"
    console.print(_literal(title), style="bold")
    for line in split.lines:
        times, each = (f"{line.layers} x ", " each") if line.layers > 1 else ("", "")
        print_folded(console, f"{times}{line.path}, {_bytes(line.elements * size)}{each}")
        on_each = f", on each {_on_each(line.shapes)}" if tp > 1 else ""
        becomes = f" becomes {line.becomes}" if tp > 1 else ""
        print_folded(console, f"    {line.kind}{becomes}: {_shape(line.whole)}{on_each}")
        if line.reason and tp > 1:
            print_folded(console, f"    {line.reason}")
    parts = [DevicePart(elements * size, None, ()) for elements in split.by_rank]
    for line in _legend([line.shapes for line in split.lines]):
        print_folded(console, line)
    console.print(_devices_table(parts))
    own = "devices hold norms, too, which are counted; the cache is the module's own, and is not"
    notes = [*why, *split.notes, own]
    if tp > 1:
        notes.append(
            "a split is tried out when the engine is made, which may leave more whole; "
            "engine.report() says what it came to"
        )
    for line in _held(parts, split.whole * size):
        print_folded(console, line)
    for note in (*notes, error):
        print_folded(console, f"note: {note}")


def _weights_table(found: PlanTable, title: str) -> Table:
    """A row for each weight, what it is split by on a line of its own where that is long."""
    table = Table(title=_literal(title), box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("weight", no_wrap=True)
    for name in ("whole", "on each device"):
        table.add_column(name)
    table.add_column("split by", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for row in found.rows:
        split = row.split or ("" if len(row.shapes) == 1 else "replicated")
        times = f"{row.count} x " if row.count > 1 else ""
        size = times + _bytes(row.size // row.count)
        table.add_row(
            *map(_literal, (row.name, _shape(row.shape), _on_each(row.shapes), split, size))
        )
    return table


def _devices_table(parts: Sequence[DevicePart]) -> Table:
    """A line for each run of devices that hold as much."""
    names = [own.name.replace(" ", "\n") for own in parts[0].shares]
    column = [] if parts[0].cache is None else ["cache\nper token"]
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("device", "weights", *column, *names):
        table.add_column(name)
    first = 0
    for part, run in groupby(parts):
        last = first + len(list(run)) - 1
        numbers = str(first) if first == last else f"{first}-{last}"
        per_token = [] if part.cache is None else [_bytes(part.cache)]
        table.add_row(numbers, _bytes(part.weights), *per_token, *_shares(part))
        first = last + 1
    return table


def _held(parts: Sequence[DevicePart], whole: int) -> list[str]:
    """A line on what all devices hold together, where they are several, and why that is more."""
    if len(parts) == 1:
        return []
    held = sum(part.weights for part in parts)
    more = ", the rest being what several hold, and padding" if held > whole else ""
    return [f"all devices together: {_bytes(held)}, of a model of {_bytes(whole)}{more}"]


def _active(found: PlanTable) -> list[str]:
    """A line on what a step reads of a mixture, whose experts are chosen as if by lot."""
    if not found.active:
        return []
    one, *more = found.active
    several = ", ".join(f"{_bytes(found.active[n])} for {n}" for n in more)
    return [
        f"active: a step reads {_bytes(found.active[one])} of {_bytes(found.whole)} for one token, "
        f"and is expected to read {several} tokens that choose experts as if by lot"
    ]


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


def _streamed(devices: Sequence[Streaming], rate: float | None) -> list[str]:
    """Lines on the streamed bytes and their time at a rate in GB/s; of the device with most."""
    if not devices:
        return []
    most = max(devices, key=lambda one: one.streamed)
    each = "on each device " if len(devices) > 1 else ""
    lines = [f"{each}{most.describe()}"]
    if most.streamed:
        rates = [rate] if rate else [25.0, 50.0]
        times = " or ".join(f"{most.streamed / r / 1e6:,.1f} ms at {r:g} GB/s" for r in rates)
        lines.append(
            f"per token: {_bytes(most.streamed)} from host to device, at least {times}; a batch of "
            "any size shares them"
        )
    return lines


_Shapes = tuple[tuple[int, ...], ...]


def _on_each(shapes: _Shapes) -> str:
    """The shape on a device; along an axis of several extents, each device's."""
    return f"[{', '.join(map(_by_device, zip(*shapes, strict=True)))}]"


def _by_device(extents: tuple[int, ...]) -> str:
    if len(set(extents)) == 1:
        return str(extents[0])
    if len(extents) <= _FEW_DEVICES:
        return " | ".join(map(str, extents))
    return " | ".join(f"{count}x{extent}" for extent, count in _runs(extents))


def _runs(extents: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each extent with how many devices in a row have it."""
    return [(extent, len(list(run))) for extent, run in groupby(extents)]


def _legend(rows: Sequence[_Shapes]) -> list[str]:
    """A line that explains `_on_each`, where devices differ."""
    for shapes in rows:
        for extents in zip(*shapes, strict=True):
            if len(set(extents)) > 1:
                meaning = f"{extents[0]} on device 0, {extents[1]} on device 1 and so on"
                if len(extents) > _FEW_DEVICES:
                    (first, many), (then, more), *_ = _runs(extents)
                    meaning = f"{first} on the first {many}, {then} on {more} more and so on"
                return [f"{_by_device(extents)} in a shape: {meaning} along that axis"]
    return []


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _literal(text: str) -> Text:
    """Text that rich shows as it is."""
    return Text(printable(text))


def _bytes(count: int) -> str:
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.{1 if unit else 0}f} {_UNITS[unit]}"


def launch(
    tp: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="Processes to start, one for each device.")
    ],
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", help="The Python script that each of them runs."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGUMENT]...", help="What the script gets, options too."),
    ] = None,
    oversubscribe: OversubscribeOption = False,
) -> None:
    """Run a script in processes on this machine that share a model.

    They talk over the loopback alone. Where one fails the others are stopped, and all of them end
    with this command, however it ends.
    """
    check_backend("torch")
    if not script.is_file():
        raise ConfigError(f"{str(script)!r} is no file. Pass the Python script to run.")
    check_places(tp, oversubscribe)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // tp)))
    raise typer.Exit(run_processes([str(script), *(arguments or [])], tp))
