"""Options that several commands share."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import typer

One = Literal["torch", "jax"]
Choice = Literal["torch", "jax", "both"]

RevisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="A branch, a tag or a commit of the hub's model; unset: main."
    ),
]


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a command makes text; None leaves it to the model and the device."""

    temperature: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Sample; below 1 it prefers likely tokens more."),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT", help="Sample among this many best tokens; unset: 50, as in HF."
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", help="Sample among the best tokens of this total probability."
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Sample from this seed: the same text every time."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Above 1, it avoids tokens that are there already."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End after this text; may be given several times."),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32, float16 or bfloat16; unset or auto: the checkpoint's own, but float16 "
            "for float32 on a GPU, and float32 on a CPU.",
        ),
    ] = None
    kernels: Annotated[
        bool | None,
        typer.Option(
            "--kernels/--no-kernels",
            show_default=False,
            help="Fused kernels, which need a GPU, or plain operations; unset: kernels where they "
            "run.",
        ),
    ] = None
    revision: RevisionOption = None

    @property
    def samples(self) -> bool:
        """True if an option shapes sampling, and so asks for it."""
        shapes = (self.temperature, self.top_k, self.top_p, self.seed)
        return any(value is not None for value in shapes)

    def arguments(self) -> dict[str, Any]:
        """What the options ask of generate."""
        names = ("temperature", "top_k", "top_p", "seed", "repetition_penalty")
        asked = {name: getattr(self, name) for name in names} | {"stop_strings": self.stop or None}
        if self.samples:
            asked["do_sample"] = True
        return {name: value for name, value in asked.items() if value is not None}


def with_text_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose last parameter is a TextOptions, with an option for each of its fields."""
    *own, (name, _) = inspect.signature(command).parameters.items()
    shared = fields(TextOptions)

    def run(**values: Any) -> None:
        options = TextOptions(**{field.name: values.pop(field.name) for field in shared})
        command(**values, **{name: options})

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=keyword) for _, parameter in own]
    parameters += [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
        for field in shared
    ]
    shown: Any = run
    shown.__name__, shown.__doc__ = command.__name__, command.__doc__
    shown.__signature__ = inspect.Signature(parameters)  # typer reads both
    shown.__annotations__ = {p.name: p.annotation for p in parameters}
    return shown
