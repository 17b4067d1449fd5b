"""The options of the bench's commands, and the tasks that they make."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer

from .. import backends
from ..config import make_config
from ..config.dtypes import dtype_name
from ..errors import ArgumentError, BackendNotAvailableError
from ..parallel.launching import check_places
from ..system.command_options import (
    OversubscribeOption,
    QuantOption,
)
from .estimate import SHEETS, check_compiler, check_device
from .shapes import EMBEDDED, SHAPES, check_model
from .systems import PEERS, side_of
from .task import Task

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
class Chosen:
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
class Measured(Chosen):
    """Options that name the model that is measured, and how it is held."""

    batch: BatchOption = None
    prompt: PromptOption = None
    tp: TpOption = None
    oversubscribe: OversubscribeOption = False
    ep: EpOption = None


@dataclass(frozen=True, kw_only=True)
class Estimated(Measured):
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


def chosen_backends(backend: str) -> tuple[str, ...]:
    """The backends that --backend names, which are there."""
    names = backends.BACKENDS if backend == "both" else (backend,)
    for name in names:
        backends.check_backend(name)
    return names


def dtype_of(given: str | None) -> str | None:
    """The dtype's name that --dtype gives, None where it is unset. Raises ArgumentError."""
    try:
        return None if given is None else dtype_name(given)
    except ValueError as error:
        raise ArgumentError(f"--dtype {given}: {error}.") from error


def make_tasks(
    kind: str,
    name: str | None,
    default: str,
    tokens: int,
    new_tokens: int,
    repeats: int,
    asked: Measured,
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
    systems: list[str] = list(dict.fromkeys([*chosen_backends(asked.backend), *peers]))
    dtype = dtype_of(asked.dtype)
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


def _kernels(asked: Chosen, systems: Sequence[str]) -> list[str] | list[None]:
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


def checked(asked: Estimated) -> Estimated:
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
