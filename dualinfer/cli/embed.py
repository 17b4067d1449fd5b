"""`dualinfer embed`: the vectors of texts."""

import json as json_format
import sys
from typing import Annotated

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console

from .. import backends
from ..api import init_inference
from ..errors import ArgumentError, shown
from ..system.tables import Table
from ..system.terminal import without_controls
from .options import BackendOption, RevisionOption
from .texts import find_asked

_SHOWN = 4  # numbers of a vector


def embed(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A checkpoint's folder or a model of the hub (owner/name)."
        ),
    ],
    texts: Annotated[
        list[str],
        typer.Argument(metavar="TEXT...", help="The texts; - for one of each input line."),
    ],
    backend: BackendOption = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="cls, mean, max, ...; unset: the model's own, else mean."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Length 1; unset: as the model says."),
    ] = None,
    truncate_dim: Annotated[
        int | None,
        typer.Option(metavar="N", help="Keep the first N numbers; unset: as the model says."),
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's prompt before each text.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A prompt of your own before each text.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="fp32, fp16, bf16, or auto: the checkpoint's.")
    ] = "auto",
    json: Annotated[
        bool, typer.Option("--json", help="Print the vectors whole, a JSON list a text.")
    ] = False,
    revision: RevisionOption = None,
) -> None:
    """Show the vector of each text, and the cosines between texts."""
    if texts == ["-"]:
        texts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
        if not texts:
            raise ArgumentError("Standard input holds no text. Write one a line.")
    name = backend or backends.default_backend()
    backends.check_backend(name)
    found = find_asked(model, revision, None, f"`dualinfer embed MODEL {shown(texts[0])}`")
    with init_inference(found.folder, backend=name, dtype=dtype) as engine:
        vectors = engine.embed(
            texts,
            pooling=pooling,
            normalize=normalize,
            truncate_dim=truncate_dim,
            prompt=prompt,
            prompt_name=prompt_name,
        )
    if json:
        for vector in vectors:
            print(json_format.dumps([float(f"{x:.9g}") for x in vector]))
        return
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit.T
    console = Console()
    few = len(texts) <= _SHOWN
    title = f"{len(texts)} x {vectors.shape[1]} numbers"
    head = [f"cosine to {i + 1}" for i in range(len(texts))] if few else []
    table = Table("", "text", "vector", "length", *head, title=title, box=SIMPLE, pad_edge=False)
    for i, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        start = ", ".join(f"{x:.4f}" for x in vector[:_SHOWN])
        words = without_controls(text if len(text) <= 40 else f"{text[:39]}…")
        numbers = [f"{x:.4f}" for x in cosines[i]] if few else []
        table.add_row(str(i + 1), words, f"{start}, …", f"{np.linalg.norm(vector):.4f}", *numbers)
    console.print(table)
