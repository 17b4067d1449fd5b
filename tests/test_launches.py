"""What one step of decode launches, by family: none may take more than the table says.

Of one row and a tiny model. `python -m tests.test_launches` prints the table anew: what a change
adds to it is paid for each token.
"""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest

import dualinfer
from dualinfer.backends.base import Request

from .mixtures import make as make_mixture
from .models import make_model
from .record import equations, torch_launches
from .test_kernel_ops import CASES, MIXTURES, VOCAB
from .test_recurrent import CASES as RECURRENT
from .test_recurrent import make as make_recurrent


class Step(NamedTuple):
    """Launches of torch's own ops and equations of JAX's step, by plain ops; then by kernels.

    Of kernels on torch the kernels, and torch's own ops beside them; on JAX, as lowered for CUDA,
    the kernels and the calls that they lie in.
    """

    torch: int
    jax: int
    kernels: tuple[int, int] | None = None
    xla: tuple[int, int] | None = None


TABLE: dict[str, Step] = {}
KNOWN = (version("torch").split("+")[0], version("jax") if find_spec("jax") else "")


def tiny(name: str) -> Any:
    """A tiny HF model of one of the tables."""
    if name in RECURRENT:
        return make_recurrent(name)
    fields = (CASES | MIXTURES)[name]
    return (make_mixture if name in MIXTURES else make_model)(name, vocab_size=VOCAB, **fields)


def engine_of(name: str, backend: str, ops: Any = None) -> Any:
    """An engine by plain ops, or by `ops`."""
    from importlib import import_module

    options: dict[str, Any] = {"dtype": "fp32", "replace_with_kernel_inject": True}
    module = import_module(f"dualinfer.backends.{backend}")
    with pytest.MonkeyPatch.context() as patch:
        if ops is not None:
            patch.setattr(module, "_make_ops", ops)
        return dualinfer.init_inference(tiny(name), backend=backend, **options)


def torch_step(engine: Any) -> int:
    """Launches of torch's ops in one step of decode."""
    runner = engine.runner
    runner.prefill([Request(np.arange(3, 8, dtype=np.int32), 8)], [0])
    runner.decode(1).fetch()
    with torch_launches() as counted:
        runner.decode(1)
    return sum(counted()["launches"].values())


def torch_by_kernels(name: str) -> tuple[int, int]:
    """Triton's kernels of one step, and torch's own ops beside them."""
    from triton.runtime import interpreter

    from dualinfer.backends.torch.ops.kernels import KernelOps

    launched: list[Any] = []
    run = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn)
        mode = sys.modules["torch"].utils._python_dispatch._disable_current_modes
        with mode():  # what the interpreter itself does
            return run(self, *args, **kwargs)

    engine = engine_of(name, "torch", lambda config, spec, device, _: KernelOps(device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", noted)
        runner = engine.runner
        runner.prefill([Request(np.arange(3, 8, dtype=np.int32), 8)], [0])
        runner.decode(1).fetch()
        launched.clear()
        with torch_launches() as counted:
            runner.decode(1)
    return len(launched), sum(counted()["launches"].values())


def jax_job(engine: Any) -> tuple[Any, Any]:
    """The step of decode as it is compiled, and what it takes."""
    import jax

    from dualinfer.backends.jax import ahead

    for job in ahead.jobs(engine.runner, ahead.Wanted((1,), (5,), 4), 4):
        key: Any = job.key
        if key[0] == "decode":
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.args)
            return job.function, shapes
    raise AssertionError("no step of decode")


def jax_step(engine: Any) -> int:
    """Equations of the step of decode."""
    import jax

    function, shapes = jax_job(engine)
    return equations(jax.jit(function).trace(*shapes).jaxpr.jaxpr).total()


def jax_by_kernels(name: str) -> tuple[int, int]:
    """Triton's kernels of a step as lowered for CUDA, and the calls that they lie in."""
    from dualinfer.backends.jax.ops.kernels import KernelOps

    from .kernels.jax_ops import calls_for_cuda, gpu

    engine = engine_of(name, "jax", lambda *args: KernelOps(gpu(core_count=132)))
    with pytest.MonkeyPatch.context() as patch:
        calls, _ = calls_for_cuda(*jax_job(engine), patch)
    loops = len(KernelOps.modes)  # one for each mode of sampling
    return sum(len(call.kernels) for call in calls) // loops, len(calls) // loops


def measured(name: str) -> Step:
    """The row of a family."""
    plain = torch_step(engine_of(name, "torch")), jax_step(engine_of(name, "jax"))
    if name in RECURRENT:
        return Step(*plain)
    return Step(*plain, torch_by_kernels(name), jax_by_kernels(name))


if __name__ == "__main__":
    for family in (*CASES, *MIXTURES, "lfm2 with biases", "mamba2"):
        print(f"    {family!r}: {measured(family)},")
