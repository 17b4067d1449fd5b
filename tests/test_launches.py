"""The cost of one token to the host, by family: none may take more than the table says.

That is how many launches torch makes, how many equations the step has on JAX, and how many
executables a request needs there: by plain ops and by kernels, which are counted and not run. It is
of one row and a tiny model; of an encoder, a pass is counted in the place of a step.
`TRITON_INTERPRET=1 python -m tests.test_launches` prints the table anew, with CUDA_VISIBLE_DEVICES
empty: what a change adds is paid for each token.
"""

from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

import dualinfer
from dualinfer.backends import jax as jax_backend
from dualinfer.backends import torch as torch_backend
from dualinfer.backends.base import Request
from dualinfer.backends.jax.ops.kernels import KernelOps as JaxKernelOps
from dualinfer.backends.torch.ops.kernels import KernelOps as TorchKernelOps
from dualinfer.kernels.triton.launch import INTERPRETED

from . import encoders, mixtures, test_recurrent, test_relatives
from .kernels.jax_ops import gpu
from .models import make_model
from .record import equations, inner, torch_launches, watch_steps
from .test_kernel_ops import CASES, ENCODER, MIXTURES, VOCAB


class Step(NamedTuple):
    """By plain ops: launches of torch's ops, and equations of JAX's step.

    By kernels on torch: launches of them, and of torch's ops `beside`. By kernels on JAX: launches
    of them in all modes of sampling, the calls of XLA that hold these, and equations besides. Then
    the executables that JAX compiles for a first request.
    """

    torch: int
    jax: int
    kernels: int
    beside: int
    jax_kernels: int
    jax_calls: int
    jax_beside: int
    executables: int


# Of these versions: another may make more of an op.
TABLE: dict[str, Step] = {}
VERSIONS = {"torch": "2.13.0", "jax": "0.10.2"}
FEW = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
OPTIONS = {"dtype": "fp32", "kernel_inject": True}
IDS = np.arange(3, 8, dtype=np.int32)


def tiny(name: str) -> Any:
    """A tiny HF model of one of the tests' tables."""
    if name in CASES:
        return make_model(name, vocab_size=VOCAB, **CASES[name])
    if name in mixtures.CASES:
        return mixtures.make(name, vocab_size=VOCAB, **MIXTURES.get(name, FEW))
    if name == "bert":
        return make_model(name, vocab_size=VOCAB, **ENCODER)
    for module in (test_recurrent, test_relatives, encoders):
        if name in module.CASES:
            return module.make(name)
    raise KeyError(name)


def pass_of(engine: Any) -> Iterator[None]:
    """One request: up to its last step before the first yield, which is that step or pass."""
    runner = engine.runner
    if runner.spec.causal:
        runner.prefill([Request(IDS, 8)], [0])
        runner.decode(1).fetch()
        yield
        runner.decode(1)
    else:
        engine(IDS[None])
        yield
        engine(IDS[None])


def torch_step(model: Any) -> int:
    """Launches of torch's ops in one step."""
    with dualinfer.init_inference(model, backend="torch", **OPTIONS) as engine:
        steps = pass_of(engine)
        next(steps)
        with torch_launches() as counted:
            next(steps, None)
    return sum(counted()["launches"].values())


def torch_by_kernels(model: Any, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Launches of kernels, and of torch's ops, in one step."""
    launched: Counter[str] = Counter()

    def run(self: Any, *args: Any, **options: Any) -> None:
        launched[self.__name__] += 1

    with patch.context() as patched:
        patched.setattr(InterpretedFunction, "run", run)
        patched.setattr(
            torch_backend, "_make_ops", lambda config, spec, device, _: TorchKernelOps(device)
        )
        with dualinfer.init_inference(model, backend="torch", **OPTIONS) as engine:
            steps = pass_of(engine)
            next(steps)
            launched.clear()
            with torch_launches() as counted:
                next(steps, None)
    return launched.total(), sum(counted()["launches"].values())


def jax_steps(model: Any, patch: pytest.MonkeyPatch, kernels: bool) -> dict[str, Any]:
    """The jaxpr of each executable of a request, by what it does; none is compiled."""
    traced: dict[str, Any] = {}

    def note(key: Any, jaxpr: Any) -> None:
        traced[str(key[0] if isinstance(key, tuple) else key)] = jaxpr

    with patch.context() as patched:
        watch_steps(note, True, patched.setattr)
        if kernels:
            patched.setattr(jax_backend, "_make_ops", lambda *_: JaxKernelOps(gpu(core_count=132)))
        with dualinfer.init_inference(model, backend="jax", **OPTIONS) as engine:
            for _ in pass_of(engine):
                pass
    return traced


def launches(jaxpr: Any) -> int:
    """Launches of kernels within."""
    found = 0
    for equation in jaxpr.eqns:
        found += len(equation.params["launches"]) if "launches" in equation.params else 0
        found += sum(map(launches, inner(equation.params.values())))
    return found


def measured(name: str, patch: pytest.MonkeyPatch) -> Step:
    """The row of a family."""
    model = tiny(name)
    plain, fast = (jax_steps(model, patch, kernels) for kernels in (False, True))
    step = "decode" if "decode" in plain else next(iter(plain))
    counts = equations(fast[step])
    calls = counts.pop("triton_launches")
    return Step(
        torch_step(model),
        equations(plain[step]).total(),
        *torch_by_kernels(model, patch),
        launches(fast[step]),
        calls,
        counts.total(),
        len(plain),
    )


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU torch would capture graphs")
@pytest.mark.parametrize("name", TABLE)
def test_a_step_takes_no_more_than_the_table_says(name, monkeypatch):
    for package, known in VERSIONS.items():
        if not version(package).startswith(known):
            pytest.skip(f"the table is of {package} {known}")
    found = measured(name, monkeypatch)
    assert all(n <= most for n, most in zip(found, TABLE[name], strict=True)), found


if __name__ == "__main__":
    for family in TABLE:
        print(f"    {family!r}: Step{tuple(measured(family, pytest.MonkeyPatch()))},")
