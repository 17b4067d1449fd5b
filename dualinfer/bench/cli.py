"""`dualinfer bench decode | prefill | forward | embed | serve | ops`."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from .. import backends
from ..config import make_config
from ..errors import ArgumentError
from ..system.command_options import (
    KvCacheOption,
    QuantOption,
    ResidentOption,
    StateOption,
    with_options,
)
from ..system.terminal import Command
from .asked import (
    BackendOption,
    DtypeOption,
    Estimated,
    JsonOption,
    Measured,
    ModelArgument,
    PlotOption,
    RepeatsOption,
    checked,
    chosen_backends,
    dtype_of,
    make_tasks,
)
from .running import bench, bench_or_estimate
from .serve_command import serve
from .shapes import EMBEDDED
from .task import Task

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure speed as a fraction of what the device can do.",
)

_FIGURES_OF_MODELS = ("decode", "prefill", "forward", "embed", "serve")

_TEXTS = 1024  # of `embed`, where nobody says how many


@app.command(cls=Command)
@with_options
def decode(
    model: ModelArgument = None,
    new_tokens: Annotated[
        int, typer.Option(metavar="COUNT", min=2, help="Tokens to generate.")
    ] = 128,
    repeats: RepeatsOption = 5,
    resident_layers: ResidentOption = None,
    kv_cache_dtype: KvCacheOption = None,
    state_dtype: StateOption = None,
    *,
    asked: Estimated,
) -> None:
    """Time of each new token, as a fraction of the read bandwidth.

    Where layers are streamed, of the rate from host to device, if that takes longer.
    """
    asked = checked(asked)
    tasks = make_tasks("decode", model, EMBEDDED, 128, new_tokens, repeats, asked)
    kept = make_config({"kv_cache_dtype": kv_cache_dtype, "state_dtype": state_dtype}, {})
    how: Any = {"kv_cache": kept.kv_cache_dtype, "states": kept.state_dtype}
    own = [
        replace(task, resident=resident_layers, **how) if task.system in backends.BACKENDS else task
        for task in tasks
    ]
    bench_or_estimate("decode", own, asked)


@app.command(cls=Command)
@with_options
def prefill(model: ModelArgument = None, repeats: RepeatsOption = 5, *, asked: Estimated) -> None:
    """Time to the first token, as a fraction of the matrix units' rate."""
    asked = checked(asked)
    tasks = make_tasks("prefill", model, EMBEDDED, 512, 1, repeats, asked)
    bench_or_estimate("prefill", tasks, asked)


@app.command(cls=Command)
@with_options
def forward(model: ModelArgument = None, repeats: RepeatsOption = 50, *, asked: Measured) -> None:
    """One pass over whole sequences.

    It is replayed from a CUDA graph where there is a GPU.
    """
    tasks = make_tasks("forward", model, "bert-large", 128, 0, repeats, asked)
    bench("forward", tasks, asked.json, asked.plot)


@app.command(cls=Command)
@with_options
def embed(model: ModelArgument = None, repeats: RepeatsOption = 10, *, asked: Measured) -> None:
    """Vectors of many texts, as a fraction of the limit.

    They are --batch texts of up to --prompt tokens each, most of them short. dualinfer packs them
    into rows; peers pad them in batches of 32, by their lengths. Padding counts nowhere.
    """
    asked = replace(asked, batch=asked.batch or [_TEXTS])
    tasks = make_tasks("embed", model, "bert-base", 512, 0, repeats, asked)
    bench("embed", tasks, asked.json, asked.plot)


app.command(cls=Command)(serve)


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
    about = only or "", dtype_of(dtype), 0, 0, 0, 0, True
    tasks = [Task("ops", name, *about, quant=quant) for name in chosen_backends(backend)]
    bench("ops", tasks, json, plot)
