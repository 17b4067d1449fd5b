"""Tasks of the bench are run, or computed; their figures are shown and written."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ArgumentError
from ..system.terminal import print_folded
from .asked import Estimated
from .estimate import compiled, compiled_table, estimate
from .estimate import make_table as estimates
from .remote_server import Remote
from .runs import Row, document, run_tasks, write_json
from .tables import failure_lines, label, limit_lines, make_table, side_by_side, write_plot
from .task import Task


def bench_or_estimate(kind: str, tasks: list[Task], asked: Estimated) -> None:
    """Measure, or with --estimate compute, once for each row whatever runs it."""
    if not asked.estimate or asked.device is None:
        bench(kind, tasks, asked.json, asked.plot)
        return
    _check_files(asked.json, None)
    own = list(dict.fromkeys(replace(task, system="", resident=None) for task in tasks))
    rows = [estimate(task, asked.device) for task in own]

    def keep() -> None:
        if asked.json is not None:
            write_json(asked.json, document(f"{kind}, estimated", rows, sys.argv))

    keep()
    # Whose kernels run it changes nothing that is computed.
    shown = {replace(task, by=None): row for task, row in zip(own, rows, strict=True)}
    Console().print(estimates(list(shown.values())))
    if not asked.compiles:
        return
    for task, row in zip(own, rows, strict=True):
        if task.tp == 1:
            row["compiled"] = compiled(task, asked.device)
            keep()
    if (table := compiled_table(rows)) is not None:
        Console().print(table)


def _check_files(json: Path | None, plot: Path | None) -> None:
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ArgumentError(f"{path}: the folder does not exist. Make it first.")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib. Install `dualinfer[bench]`, or leave it out.")


def bench(
    kind: str, tasks: list[Task] | list[Remote], json: Path | None, plot: Path | None
) -> None:
    """Measure, show, and write; exit code 1 if a row failed."""
    _check_files(json, plot)
    progress = Console(stderr=True, soft_wrap=True)
    kept: list[Row] = []

    def keep(row: Row) -> None:
        kept.append(row)
        if json is not None:
            write_json(json, document(kind, kept, sys.argv))
        progress.print(_line(row), highlight=False)

    own = [task for task in tasks if isinstance(task, Task)]
    for task in tasks:
        if isinstance(task, Remote):
            keep(task.row())
    run_tasks(own, keep)
    rows = side_by_side(kept)
    console = Console()
    if any("op" in row or row["kind"] != "ops" for row in rows):  # else nothing was measured
        console.print(make_table(kind, rows, console.width))
    for line in limit_lines(rows):
        print_folded(console, line, style="dim")
    if any(row.get("device_kind") == "cpu" and "of_limit" in row for row in rows):
        console.print("[dim]Figures from a CPU are no benchmark.[/]", highlight=False)
    if plot is not None:
        write_plot(kind, rows, plot)
    for line in failure_lines(rows):
        print_folded(console, line, style="red")
    if any("error" in row or row.get("failed") for row in rows):
        raise typer.Exit(1)


def _line(row: dict[str, Any]) -> str:
    """One row as it comes: for those who wait, and the error of one that failed."""
    what = row.get("op") or row["model"] or ("all ops" if row["kind"] == "ops" else "")
    if row["kind"] == "ops":
        what += f" {row['description']} by {row['by']}" if "by" in row else ""
    elif row["kind"] == "serve":
        what += f" {row.get('what', '')}"
    else:
        what += f" batch {row['batch']} x {row['tokens']}"
    start = f"{escape(label(row))}: {escape(what.strip())}"
    if "error" in row:
        return f"[red]{start} failed:[/] {escape(row['error'])}"
    if "skipped" in row:
        return f"[dim]{start}: skipped: {escape(row['skipped'])}[/]"
    if row["kind"] == "serve":
        rate = f"{row['output_throughput']:,.0f} tokens/s"
        failed = f", {row['failed']} of {row['failed'] + row['completed']} failed"
        return f"[dim]{start}: {rate}{failed if row['failed'] else ''}[/]"
    return f"[dim]{start}: {row['of_limit']:.1%} of the limit[/]"
