"""JAX's ops by Triton's kernels: interpreted in few programs, or described as a GPU gets them."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("triton")

from dualinfer.backends.jax import sampler  # noqa: E402
from dualinfer.backends.jax.ops.kernels import KernelOps  # noqa: E402
from dualinfer.backends.jax.ops.split import SplitKernelOps  # noqa: E402
from dualinfer.kernels.triton.linear import MOST_VECTORS, VectorConfig  # noqa: E402
from dualinfer.kernels.xla import handler  # noqa: E402
from dualinfer.kernels.xla.grouping import grouped  # noqa: E402


def gpu(capability: str = "9.0", **fields: Any) -> Any:
    """What ops ask of a GPU."""
    facts = {"platform": "gpu", "compute_capability": capability, "device_kind": "NVIDIA H100"}
    return SimpleNamespace(**facts | fields)


class _FewPrograms:
    """Configurations for the interpreter, which takes milliseconds for each program."""

    def find(self, key: Any) -> Any:
        is_vector = key[0] == "linear" and key[1] <= MOST_VECTORS
        return VectorConfig(32, 4) if is_vector else None


def interpreted_ops(split: Any = None, exchange: Any = None) -> KernelOps:
    """Ops on a device with few processors, so that sums are split over few programs."""
    device: Any = SimpleNamespace(platform="cpu", core_count=2)
    ops = KernelOps(device, split)
    if exchange is not None:
        ops = SplitKernelOps(device, split, exchange)
    ops.configurations = _FewPrograms()
    return ops


def watch_logits(patch: pytest.MonkeyPatch, note: Callable[[Any, Any], None]) -> None:
    """Have `note` get the positions [N] and logits by which steps made from now on choose."""
    sample, advance = sampler.sample, KernelOps.advance

    def sampled(logits: Any, state: Any, position: Any, *how: Any) -> Any:
        jax.debug.callback(note, position, logits)
        return sample(logits, state, position, *how)

    def advanced(ops: Any, logits: Any, state: Any, *how: Any) -> Any:
        jax.debug.callback(note, state.length + 1, logits)
        return advance(ops, logits, state, *how)

    patch.setattr(sampler, "sample", sampled)
    patch.setattr(KernelOps, "advance", advanced)


class Call(NamedTuple):
    """A custom call of a lowered step: its kernels, and how many arrays it changes in place."""

    kernels: list[str]
    changed: int


def calls_for_cuda(
    function: Callable[..., Any], args: Any, patch: pytest.MonkeyPatch
) -> tuple[list[Call], str]:
    """The calls of `function`, lowered for CUDA as an engine does it, and its StableHLO.

    No kernel is compiled: see test_xla_ahead.py.
    """
    programs: list[list[str]] = []

    def program(launches: Any, capability: int) -> int:
        programs.append([x.kernel.fn.__name__.strip("_") for x in launches])
        return len(programs)

    with patch.context() as patched:
        patched.setattr(handler, "program", program)
        traced = jax.jit(grouped(function)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = []
    for line in text.splitlines():
        if f"@{handler.TARGET}" in line:  # JAX lowers equations that are alike once
            number = re.search(r"program = (\d+)", line)
            assert number is not None
            kernels = programs[int(number[1]) - 1]
            calls.append(Call(kernels, line.count("output_operand_alias<")))
    return calls, text
