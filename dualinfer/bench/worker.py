"""A process that measures one framework's rows: tasks come as a JSON file, rows go to stdout.

Where several processes share a model, each does all of it, and the first one speaks. It ends early
where the device no longer answers, which a failed kernel can cause; whoever started it goes on with
a new one.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from .. import backends
from ..config.dtypes import dtype_name
from ..errors import DualinferError, OutOfMemoryError
from ..system.memory import host_free_bytes
from .counts import Counts, describe_held
from .limits import Device, open_device
from .measure import measure
from .ops import find_cases, measure_op
from .random_weights import plan_weights
from .shapes import Model, open_model
from .systems import opened, side_of
from .task import Task

Row = dict[str, Any]

MARK = "BENCH "  # begins a line of ours; others are a library's chatter


def main() -> None:
    """Measure what the file named by the first argument asks for."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tasks = [Task(**fields) for fields in request["tasks"]]
    side = side_of(tasks[0].system)
    if side == "torch" and tasks[0].tp > 1:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = open_device(side)
    for task_index, row in run(tasks, device, request["folders"]):
        if row is not None:
            _say(row)
            continue
        # Planned ends tell which task is next; a process that dies tells by saying nothing.
        alive = _answers(device)
        _say({"done": task_index + 1, "ended": not alive or task_index + 1 == len(tasks)})
        if not alive:
            os._exit(1)  # a dead device can make an orderly end hang


def run(
    tasks: Sequence[Task], device: Device, folders: Mapping[str, str] | None = None
) -> Iterator[tuple[int, Row | None]]:
    """Rows with their task's index, in order, and None after a task's last one.

    `folders` hold the weights of models that have none of their own, by their names.

    A task that fails gives a row with `error`. Tasks that follow one another with the same model
    and system share a loaded one.
    """
    same = (
        "kind",
        "model",
        "system",
        "dtype",
        "kernels",
        "tp",
        "quant",
        "resident",
        "kv_cache",
        "states",
        "ep",
        "by",
    )
    loaded = attrgetter(*same)
    for _, grouped in groupby(enumerate(tasks), lambda pair: loaded(pair[1])):
        group = list(grouped)
        if group[0][1].kind == "ops":
            for index, task in group:
                for row in _measure_ops(task, device):
                    yield index, row
                yield index, None
            continue
        for index, row in _measure_group(group, device, folders or {}):
            yield index, row
            yield index, None


def _measure_group(
    group: list[tuple[int, Task]], device: Device, folders: Mapping[str, str]
) -> Iterator[tuple[int, Row]]:
    waiting, about = dict(group), {}
    error = ""
    try:
        task = group[0][1]
        model = open_model(task.model)
        if task.model in folders:
            model = replace(model, folder=Path(folders[task.model]))
        dtype = _resolved_dtype(task, model, device)
        plan = plan_weights(model, dtype, task.quant)
        about = describe_held(plan, dtype)
        if about["scheme"] and task.system not in backends.BACKENDS:  # which may unpack it
            about |= {"scheme": f"as {task.system} holds it", "group": None, "head": None}
            about["weights"] = {}
        counts = Counts.of(plan, dtype, task.kept)
        _check_room(model, dtype, counts.held_bytes, device)
        limits = device.limits(dtype)  # before anything is loaded
        if task.resident is not None:
            device.host_rate()  # likewise
        with opened(task, model, dtype) as system:
            device.settle()
            for index, task in group:
                try:
                    row = measure(task, model, counts, system, device, limits)
                except Exception as failure:
                    row = {"error": _text(failure)}
                del waiting[index]
                yield index, _row(task, dtype, device, about | row)
        device.settle()
    except Exception as failure:
        error = _text(failure)
    for index, task in waiting.items():
        yield index, _row(task, task.dtype, device, about | {"error": error})


def _check_room(model: Model, dtype: str, needed: int, device: Device) -> None:
    """Raise OutOfMemoryError before weights are made that the host cannot hold."""
    free = host_free_bytes()
    if device.kind != "cpu" or free is None:
        return
    if needed > free:
        raise OutOfMemoryError(
            f"The weights of {model.name} take {needed / 2**30:,.1f} GiB in {dtype}, and "
            f"{free / 2**30:,.1f} GiB of this machine's memory are free. It is a shape for a GPU: "
            "take a smaller one, fewer layers (NAME:LAYERS), or a smaller --dtype."
        )


def _measure_ops(task: Task, device: Device) -> Iterator[Row]:
    try:
        dtype = task.dtype or backends.default_dtype(device.backend)
        cases = find_cases(device.backend, dtype, task.model or None, task.quant)
        device.limits(dtype)
    except Exception as failure:
        yield _row(task, task.dtype, device, {"error": _text(failure)})
        return
    for case in cases:
        try:
            row = measure_op(case, device, dtype)
            device.settle()
        except Exception as failure:
            row = {"op": case.name, "description": case.description, "error": _text(failure)}
        yield _row(task, dtype, device, row)
        if "error" in row and not _answers(device):
            rest = {"error": "The device no longer answers; the ops after it were not measured."}
            yield _row(task, dtype, device, rest)
            return


def _resolved_dtype(task: Task, model: Model, device: Device) -> str:
    """The dtype asked for; else float32 on a CPU, and the shape's own or the default on a GPU."""
    if task.dtype:
        return task.dtype
    default = backends.default_dtype(device.backend)
    return default if device.kind == "cpu" else dtype_name(model.dtype or default)


def _row(task: Task, dtype: str | None, device: Device, figures: Row) -> Row:
    row = task.to_dict() | {"dtype": dtype, "device": device.name, "device_kind": device.kind}
    if dtype and "error" not in figures:
        limits = device.limits(dtype)
        row |= {"read_bandwidth": limits.read_bandwidth, "matrix_rate": limits.matrix_rate}
    return row | figures


def _text(failure: Exception) -> str:
    """Our own errors are a message; others are bugs, or a peer's, and come with where they rose."""
    if isinstance(failure, DualinferError):
        return str(failure)
    return "".join(traceback.format_exception(failure, limit=-8)).strip()


def _answers(device: Device) -> bool:
    try:
        device.settle()
    except Exception:
        return False
    return True


def _say(message: dict[str, Any]) -> None:
    if os.environ.get("RANK", "0") != "0":
        if message.get("error"):
            print(f"rank {os.environ['RANK']}: {message['error']}", file=sys.stderr, flush=True)
        return
    print(MARK + json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
