"""Options that several commands share, alone or as the fields of a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer

QuantOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="int8, int4, fp8, nvfp4 or mxfp4: quantize the weights while they are loaded; "
        "int8_w8a8 or fp8_w8a8: inputs, too; unset: as the checkpoint has them.",
    ),
]

KvCacheOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="fp8_e4m3 (fp8) or int8: keep keys and values in codes of 8 bits; unset: in the "
        "model's dtype.",
    ),
]

StateOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="bfloat16: keep the states of recurrences in 16 bits; unset: float32.",
    ),
]

ResidentOption = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        min=0,
        help="Layers that stay on the device; the others are streamed from the host's memory. "
        "Unset: all stay.",
    ),
]

OversubscribeOption = Annotated[
    bool,
    typer.Option(
        "--oversubscribe", help="On a CPU, start more processes than there are cores for them."
    ),
]

_Function = Callable[..., None]


def with_options(command: _Function) -> _Function:
    """A decorator of commands: a parameter that is a dataclass has an option for each field.

    Its fields are annotated as typer's parameters are, and stand in its place.
    """
    own = inspect.signature(command).parameters
    groups: dict[str, Any] = {
        name: p.annotation for name, p in own.items() if is_dataclass(p.annotation)
    }

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=keyword))
            continue
        parameters += [
            inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
            for field in fields(groups[name])
        ]
    shown: Any = run
    shown.__name__, shown.__doc__ = command.__name__, command.__doc__
    shown.__signature__ = inspect.Signature(parameters)  # typer reads both
    shown.__annotations__ = {p.name: p.annotation for p in parameters}
    return shown
