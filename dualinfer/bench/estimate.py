"""Estimates of a step by a device's data sheet: bytes and FLOPs, computed and not measured.

By libtpu the compiled program says beside them what it holds and what XLA counts of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.table import Table

from ..errors import ArgumentError
from .counts import Counts
from .random_weights import plan_weights
from .shapes import open_model
from .task import Task

_DTYPE = "bfloat16"  # whose rate the sheets have


@dataclass(frozen=True)
class Sheet:
    """A chip by its data sheet: bytes of memory, bytes and FLOPs in bfloat16 a second."""

    memory: float
    bandwidth: float
    matrix_rate: float


# https://cloud.google.com/tpu/docs/v5e, v5p and v6e, a chip each.
SHEETS = {
    "tpu-v5e": Sheet(16e9, 819e9, 197e12),
    "tpu-v5p": Sheet(95e9, 2765e9, 459e12),
    "tpu-v6e": Sheet(32e9, 1640e9, 918e12),
}


def check_device(device: str | None, estimate: bool) -> None:
    """Raise ArgumentError unless a device of `SHEETS` is named where an estimate is asked for."""
    known = ", ".join(SHEETS)
    if device is not None and not estimate:
        raise ArgumentError(
            f"--device {device}: bench measures the device of this machine. Leave it out, or add "
            "--estimate, which computes by the data sheet."
        )
    if estimate and device not in SHEETS:
        what = "--estimate needs --device" if device is None else f"--device {device} is not known"
        raise ArgumentError(f"{what}. Data sheets: {known}.")


def estimate(task: Task, device: str) -> dict[str, Any]:
    """The bytes and FLOPs of a step of decode, or a prefill, and its least time by `device`.

    `task.tp` chips share both evenly; sums over them count nothing. `compiled` is None, for
    `compiled` to fill.
    """
    if task.dtype not in (None, _DTYPE):
        raise ArgumentError(
            f"--estimate is in {_DTYPE}, whose rate the sheets have. Leave out --dtype."
        )
    sheet, model = SHEETS[device], open_model(task.model)
    plan = plan_weights(model, _DTYPE, task.quant)
    counts = Counts.of(plan, _DTYPE, task.kept)
    if counts.once is not None:
        raise ArgumentError(f"--estimate counts decoders, and {task.model} has an encoder.")
    batch, tokens = task.batch, task.tokens
    if task.kind == "decode":
        weights, kv = (
            counts.read_bytes(batch),
            counts.kv_bytes(_DTYPE, batch, tokens, task.new_tokens),
        )
        at = tokens + task.new_tokens // 2  # of the token in the middle
        flops = counts.flops(batch, at + 1, 1) - counts.flops(batch, at, 0)
        made = batch
    else:
        weights, kv = counts.read_bytes(batch * tokens), 0.0
        flops, made = counts.flops(batch, tokens, 1), batch * tokens
    reading = (weights + kv) / (sheet.bandwidth * task.tp) * 1e3
    computing = flops / (sheet.matrix_rate * task.tp) * 1e3
    least = max(reading, computing)
    return {
        **{"kind": task.kind, "model": task.model, "device": device, "computed": True},
        **{"batch": batch, "tokens": tokens, "new_tokens": task.new_tokens, "tp": task.tp},
        **{"dtype": _DTYPE, "quant": task.quant, "held_bytes": counts.held_bytes},
        **{"fits": counts.held_bytes <= sheet.memory * task.tp},
        **{"weight_bytes": weights, "kv_bytes": kv, "flops": flops},
        **{"read_ms": reading, "compute_ms": computing, "limit_ms": least},
        "tokens_per_s": made * 1e3 / least,
        "compiled": None,
    }


def check_compiler() -> None:
    """Raise ArgumentError unless JAX and libtpu are here to compile by."""
    if find_spec("jax") is None:
        raise ArgumentError("--compile needs JAX. Install `dualinfer[jax]`, or leave it out.")
    if _tpu().library() is None:
        raise ArgumentError(
            "--compile needs libtpu, the compiler of TPUs, and finds none. Install libtpu, set "
            "TPU_LIBRARY_PATH to its file, or leave it out."
        )


def compiled(task: Task, device: str) -> dict[str, Any]:
    """The facts of the program of one chip as `jax.tpu.compiled` gives them, or its error.

    It runs by plain XLA if `task` says so, and by Pallas' kernels else.
    """
    model = open_model(task.model)
    plan = plan_weights(model, _DTYPE, task.quant)
    chip = device.removeprefix("tpu-")
    return _tpu().compiled(task, model.describe()[0], plan, _DTYPE, chip)


def _tpu() -> Any:
    return import_module(f"{__package__}.jax.tpu")


def make_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people; every figure is computed."""
    table = Table(title="computed from the data sheet, not measured")
    names = ("model", "chips", "batch x tokens", "read GB", "GFLOP", "read ms", "compute ms")
    for name in (*names, "tokens/s at most", "weights fit"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"] + (f" {row['quant']}" if row["quant"] else ""),
            f"{row['tp']} {row['device']}",
            f"{row['batch']} x {row['tokens']}",
            f"{(row['weight_bytes'] + row['kv_bytes']) / 1e9:.3g}",
            f"{row['flops'] / 1e9:.3g}",
            f"{row['read_ms']:.3g}",
            f"{row['compute_ms']:.3g}",
            f"{row['tokens_per_s']:,.0f}",
            "yes" if row["fits"] else "no",
        )
    return table


def compiled_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """The table of what compiled programs say of themselves; None where nothing was compiled."""
    rows = [row for row in rows if row["compiled"] is not None]
    if not rows:
        return None
    table = Table(title="by the compiled program of one chip, not measured")
    names = ("model", "batch x tokens", "arguments GB", "beside them MB", "kernels")
    for name in (*names, "moves MB", "GFLOP", "XLA's cycles"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        own = row["compiled"]
        figures = ["", own.get("error", ""), "", "", "", ""]
        if "error" not in own:
            figures = [
                f"{own['argument_bytes'] / 1e9:.3g}",
                f"{own['temp_bytes'] / 1e6:.3g}",
                f"{own['kernels']:,}",
                f"{own['accessed_bytes'] / 1e6:.3g}",
                f"{own['flops'] / 1e9:.3g}",
                f"{own['cycles']:,}",
            ]
        name = row["model"] + (f" {row['quant']}" if row["quant"] else "")
        table.add_row(f"{name} {own['by']}", f"{row['batch']} x {row['tokens']}", *figures)
    return table
