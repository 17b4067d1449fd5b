"""One bench command: its tasks go to a process for each framework, rows are kept as they come."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from ..config.dtypes import dtype_name
from ..parallel.launching import guarded
from .random_weights import checkpoint
from .shapes import open_model
from .systems import SIDES, side_of
from .task import Task
from .worker import MARK

_PACKAGES = ("dualinfer", "torch", "triton", "jax", "jaxlib", "flax", "transformers", "keras-hub")
_SCHEMA = 1

Row = dict[str, Any]


def run_tasks(tasks: Sequence[Task], on_row: Callable[[Row], None]) -> list[Row]:
    """The rows of all tasks, in the order measured; `on_row` gets each at once.

    Each framework has processes of its own, one after another, so that neither holds memory of the
    card while the other is measured. A process that dies costs the row that it was at.
    """
    rows = []
    for side in SIDES:
        # A stable sort by model: its systems follow one another, in the order given.
        names = list(dict.fromkeys(task.model for task in tasks))
        sorted_tasks = sorted(
            (task for task in tasks if side_of(task.system) == side),
            key=lambda task: (
                task.tp,
                task.ep,
                names.index(task.model),
                SIDES[side].index(task.system),
            ),
        )
        for _, group in groupby(sorted_tasks, _process_key):
            waiting = deque(group)
            while waiting:
                for row in _run_process(waiting):
                    rows.append(row)
                    on_row(row)
    return rows


def _process_key(task: Task) -> tuple[Any, ...]:
    """The key of tasks for one process: several of torch's share one model's weights on disk."""
    if task.tp == 1 or side_of(task.system) != "torch":
        return (1,)
    held = task.quant, task.resident, task.kv_cache, task.states
    return task.tp, task.ep, task.model, task.dtype, *held


def _run_process(waiting: deque[Task]) -> Iterator[Row]:
    """Rows of one process, or of one job of several that share a model on torch.

    Takes from `waiting` what it has done, at least one task.
    """
    task = waiting[0]
    command, folders = [sys.executable], {}
    with ExitStack() as stack:
        if task.tp > 1 and side_of(task.system) == "torch":
            command += ["-m", "dualinfer.parallel.launching", str(task.tp)]
            if task.quant is None:  # else each process makes its own codes
                model = open_model(task.model)
                dtype = dtype_name(task.dtype or model.dtype or "float32")
                folders[task.model] = str(stack.enter_context(checkpoint(model, dtype)))
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            stack.callback(Path(file.name).unlink)
            json.dump({"tasks": [t.to_dict() for t in waiting], "folders": folders}, file)
        yield from _rows_of([*command, "-m", f"{__package__}.worker", file.name], waiting)


def _rows_of(command: Sequence[str], waiting: deque[Task]) -> Iterator[Row]:
    """The rows that the command says; see `_run_process`."""
    with guarded() as marks:
        yield from _rows_of_process(command, waiting, worker_environment() | marks)


def _rows_of_process(
    command: Sequence[str], waiting: deque[Task], environment: Mapping[str, str]
) -> Iterator[Row]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    done = 0
    ended = False
    try:
        for line in process.stdout:
            if not line.startswith(MARK):
                print(line, end="", file=sys.stderr)
                continue
            message = json.loads(line.removeprefix(MARK))
            if "done" in message:
                done = message["done"]
                ended = message["ended"]
            else:
                yield message
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        process.stdout.close()
    if not ended:
        text = f"The process that measured it ended early, with code {process.returncode}."
        yield waiting[done].to_dict() | {"error": text}
        done += 1
    for _ in range(done):
        waiting.popleft()


def worker_environment() -> dict[str, str]:
    """Environment of a process that measures: finds this dualinfer; JAX takes memory as needed.

    And nearly all of it, where the caller's environment does not say otherwise.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    room = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}
    own = {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return room | os.environ | own


def document(kind: str, rows: Sequence[Row], command: Sequence[str]) -> dict[str, Any]:
    """The document that `--json` writes: everything about the run, and its rows."""
    return {
        "schema": _SCHEMA,
        "kind": kind,
        "command": list(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
        "devices": sorted({row["device"] for row in rows if "device" in row}),
        "rows": list(rows),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at once, so that a run cut short leaves a whole one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
