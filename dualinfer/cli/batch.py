"""`dualinfer batch`: a file of requests, answered into a file of results."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engine.fused import FusedEngine
from ..errors import ArgumentError
from ..serving.http.batch import Progress, run_file
from ..serving.http.rows import answer_rows
from ..system.command_options import with_options
from ..system.terminal import say
from .options import BackendOption, MaxTokensOption, ModelArgument, ModelOptions
from .serve import name_of
from .texts import opened

_EVERY = 10.0  # seconds between lines where stderr is no terminal


@with_options
def batch(
    model: ModelArgument,
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format.")
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.jsonl", help="Results; rows that it holds are not asked again."
        ),
    ],
    backend: BackendOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="What rows call the model; unset: its id, or its folder's name."
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(metavar="I/N", help="Every N-th row from the I-th on, I from 0: one job's."),
    ] = "0/1",
    max_tokens: MaxTokensOption = None,
    *,
    options: ModelOptions,
) -> None:
    """Answer a file of requests to chats, completions and embeddings.

    A job that was stopped, however, goes on where it was with the same command. A bad row is a
    result with an error.
    """
    if not source.is_file():
        raise ArgumentError(f"{source} is no file.")
    if not target.absolute().parent.is_dir():
        raise ArgumentError(f"{target}: the folder does not exist. Make it first.")
    part = _shard(shard)
    asked = options.revision, options.adapter
    with opened(model, backend, *asked, **options.config) as engine:
        answer = partial(answer_rows, engine, name=name or name_of(model))
        if isinstance(engine, FusedEngine) and engine.can_generate():
            engine.reserve(tokens=max_tokens)
        with _Teller() as teller:
            progress = run_file(answer, source, target, part, teller.tell)
    say(f"{target}: {progress.describe()}")


def _shard(given: str) -> tuple[int, int]:
    index, _, count = given.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ArgumentError(f"--shard {given}; expected I/N with I from 0 to N - 1, as 3/16.")
    return int(index), int(count)


class _Teller:
    """Shows progress: on a terminal in place, elsewhere a line at times."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._told = time.monotonic()

    def __enter__(self) -> "_Teller":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status:
            self._status.stop()

    def tell(self, progress: Progress) -> None:
        """Show it where it is time."""
        now = time.monotonic()
        if now - self._told < (0.2 if self._status else _EVERY):
            return
        self._told = now
        if self._status:
            self._status.update(progress.describe())
        else:
            say(progress.describe())
