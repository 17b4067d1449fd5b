"""One bench command: its tasks go to a process for each framework, rows are kept as they come."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .measure import Task
from .systems import SIDES, side_of
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
        waiting = deque(
            sorted(
                (task for task in tasks if side_of(task.system) == side),
                key=lambda task: (names.index(task.model), SIDES[side].index(task.system)),
            )
        )
        while waiting:
            for row in _run_process(waiting):
                rows.append(row)
                on_row(row)
    return rows


def _run_process(waiting: deque[Task]) -> Iterator[Row]:
    """Rows of one process; takes from `waiting` what it has done, at least one task."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=worker_environment(),
    )
    assert process.stdin is not None and process.stdout is not None
    done = 0
    ended = False
    try:
        with suppress(BrokenPipeError), process.stdin as pipe:  # it may have died at once
            json.dump({"tasks": [task.to_dict() for task in waiting]}, pipe)
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
    """Environment of a process that measures: finds this dualinfer; JAX takes memory as needed."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    return os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def document(kind: str, rows: Sequence[Row], command: Sequence[str]) -> dict[str, Any]:
    """What `--json` writes: everything about the run, and its rows."""
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
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
