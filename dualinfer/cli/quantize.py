"""dualinfer quantize: a checkpoint in fewer bits, written beside the one that it is made of."""

from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.text import Text

from ..api import quantize_checkpoint
from ..checkpoint.hub import find_model
from ..checkpoint.writing.saving import Written, check_saving
from ..quantization.quantize import SCHEMES
from ..system.tables import Table
from ..system.terminal import print_folded
from .options import AdapterOption, RevisionOption, factors_of

_GB = 1e9


def quantize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A checkpoint's folder or a hub id (owner/name)."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A folder, new or empty.")],
    scheme: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="int8, int4, fp8, nvfp4, mxfp4, int8_w8a8 or fp8_w8a8.",
            show_default=True,
        ),
    ] = "int4",
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="int8, int4: how many weights of a row share a scale; unset: 64 of int4, a row "
            "of int8.",
        ),
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="int8, int4: with zero points.")
    ] = False,
    max_shard_size: Annotated[
        float | None, typer.Option(metavar="GB", min=0.001, help="Size of a file, at most.")
    ] = None,
    adapter: AdapterOption = None,
    revision: RevisionOption = None,
) -> None:
    """Write a checkpoint in fewer bits.

    transformers and dualinfer load it. The head becomes int8, embeddings and norms stay as they
    are.
    """
    quant: Any = scheme.lower()
    if quant not in SCHEMES:
        raise typer.BadParameter(f"--scheme {scheme}: expected one of {', '.join(SCHEMES)}.")
    if group_size is not None or asymmetric:
        if quant not in ("int8", "int4"):
            raise typer.BadParameter(
                f"--group-size and --asymmetric go with int8 and int4: {scheme}"
            )
        quant = {
            "weight": {
                "num_bits": int(quant[3:]),
                "q_type": "asymmetric" if asymmetric else "symmetric",
                "group_size": group_size or SCHEMES[quant].columns or None,
            }
        }
    check_saving(out, None, "OUT")  # before a model is fetched
    folder, adapters = find_model(model, revision, factors_of(adapter))
    kinds: dict[str, list[float]] = {}

    def seen(written: Written) -> None:
        if written.matrix is None:
            return
        kind = written.name.removesuffix(".weight").rpartition(".")[2]
        row = kinds.setdefault(f"{kind}: {written.matrix.scheme.name}", [0.0] * 5)
        made: Any = written.matrix
        elements = written.shape[0] * written.shape[1]
        for i, value in enumerate((1, elements, written.nbytes, *made.error())):
            row[i] += value

    size = round(max_shard_size * _GB) if max_shard_size else None
    every = quantize_checkpoint(folder, out, quant, size, seen, adapters)
    table = Table(title=Text(f"{model} in {scheme}"), box=SIMPLE, pad_edge=False)
    for name in ("weights", "count", "bits each", "error"):
        table.add_column(name, justify="left" if name == "weights" else "right")
    for kind, (count, elements, size_in_bytes, error, whole) in kinds.items():
        relative = (error / whole) ** 0.5 if whole else 0.0
        bits = f"{8 * size_in_bytes / elements:.2f}"
        table.add_row(kind, f"{count:,.0f}", bits, f"{100 * relative:.2f} %")
    console = Console()
    console.print(table)
    total = sum(written.nbytes for written in every)
    stored: list[Any] = [w if w.matrix is None else w.matrix for w in every]
    before = sum(own.nbytes for own in stored)
    print_folded(
        console,
        f"{total / 1e6:,.1f} MB in {out}, of {before / 1e6:,.1f} MB. The error is the RMS of what "
        f"is lost, relative to the weights' own. `dualinfer chat {out}` runs it.",
    )
