"""Options that several commands share."""

from typing import Annotated, Literal

import typer

One = Literal["torch", "jax"]
Choice = Literal["torch", "jax", "both"]

BackendOption = Annotated[
    One | None,
    typer.Option(
        metavar="torch|jax",
        show_default=False,
        help="What runs the model; unset: what is installed.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="float32, float16 or bfloat16; unset or auto: the checkpoint's own, but float16 for "
        "float32 on a GPU, and float32 on a CPU.",
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="A branch, a tag or a commit of the hub's model; unset: main."
    ),
]
KernelsOption = Annotated[
    bool | None,
    typer.Option(
        "--kernels/--no-kernels",
        show_default=False,
        help="Fused kernels, which need a GPU, or plain operations; unset: kernels where they run.",
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", help="Sample; below 1 it prefers likely tokens more."),
]
TopKOption = Annotated[
    int | None,
    typer.Option(metavar="COUNT", help="Sample among this many best tokens; unset: 50, as in HF."),
]
TopPOption = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", help="Sample among the best tokens of this total probability."),
]
SeedOption = Annotated[
    int | None,
    typer.Option(metavar="NUMBER", help="Sample from this seed: the same text every time."),
]
PenaltyOption = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", help="Above 1, it avoids tokens that are there already."),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End after this text; may be given several times."),
]
