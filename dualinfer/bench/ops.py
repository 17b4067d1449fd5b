"""Single ops: the cases of a backend's ops, and the rows made of them."""

import importlib
from typing import Any

from .. import backends
from ..errors import ArgumentError
from .case import OpCase
from .limits import Device


def find_cases(
    backend: str, dtype: str, only: str | None, quant: str | None = None
) -> list[OpCase]:
    """The backend's cases in `dtype`; those whose name holds `only`, where it is given.

    With `quant`, as the config has it, products with quantized weights.
    """
    backends.check_backend(backend)
    module = importlib.import_module(f"{__package__}.{backend}.ops")
    cases: list[OpCase] = list(module.bench_cases(dtype, quant))
    matches = [case for case in cases if only is None or only in case.name]
    if not matches:
        names = ", ".join(dict.fromkeys(case.name for case in cases)) or "none"
        raise ArgumentError(f"bench ops: no op's name holds {only!r}. Ops: {names}.")
    return matches


def measure_op(case: OpCase, device: Device, dtype: str) -> dict[str, Any]:
    """The time of one case, what it moves and computes a second, and the fraction of the limit.

    Of a case that cannot run here, only why.
    """
    about = {
        "op": case.name,
        "description": case.description,
        "by": case.reference or "dualinfer",
    }
    if case.obstacle:
        return about | {"skipped": case.obstacle}
    limits = device.limits(dtype)
    seconds = device.op_seconds(case.prepare, case.bytes)
    least = max(case.bytes / limits.read_bandwidth, case.flops / limits.matrix_rate)
    return about | {
        "us": seconds * 1e6,
        "gb_per_s": case.bytes / seconds / 1e9,
        "tflops": case.flops / seconds / 1e12,
        "limit_us": least * 1e6,
        "of_limit": least / seconds,
    }
