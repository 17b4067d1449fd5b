"""Options that several commands share: the fields of a dataclass, added to a command's own."""

import inspect
from collections.abc import Callable
from dataclasses import fields
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


def with_options(kind: Any) -> Callable[[_Function], _Function]:
    """A decorator of commands whose last parameter is a `kind`: an option for each of its fields.

    `kind` is a dataclass whose fields are annotated as typer's parameters are.
    """
    shared = fields(kind)

    def decorate(command: _Function) -> _Function:
        *own, (name, _) = inspect.signature(command).parameters.items()

        def run(**values: Any) -> None:
            options = kind(**{field.name: values.pop(field.name) for field in shared})
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

    return decorate
