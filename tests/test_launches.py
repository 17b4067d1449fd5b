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

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

import dualinfer
from dualinfer.backends import jax as jax_backend
from dualinfer.backends import torch as torch_backend
from dualinfer.backends.base import Request
from dualinfer.backends.jax.ops.kernels import KernelOps as JaxKernelOps
from dualinfer.backends.torch.ops.kernels import KernelOps as TorchKernelOps
from dualinfer.kernels.triton.launch import INTERPRETED

from .cases import make_model, mixtures
from .kernels.jax_ops import gpu
from .models import slow_but
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
TABLE = {
    "llama-gqa": Step(80, 932, 8, 4, 22, 2, 34, 2),
    "gpt2": Step(48, 933, 8, 4, 22, 2, 34, 2),
    "gemma2": Step(181, 1124, 17, 8, 40, 4, 42, 2),
    "gpt_oss": Step(253, 1487, 15, 4, 36, 2, 36, 2),
    "qwen3_moe": Step(234, 1428, 15, 4, 36, 2, 36, 2),
    "mamba2": Step(206, 1266, 19, 4, 44, 2, 32, 2),
    "bert": Step(20, 121, 7, 4, 7, 6, 17, 1),
}
MORE = {  # with ops of their own
    "bloom": Step(54, 954, 9, 4, 24, 2, 34, 2),  # slopes
    "apertus": Step(172, 1148, 15, 4, 32, 6, 172, 2),  # its activation
    "deepseek_v3": Step(233, 1329, 24, 4, 54, 2, 36, 2),  # latent attention
    "doge": Step(182, 1204, 19, 52, 44, 20, 270, 2),  # biased keys
    "diffllama": Step(166, 1130, 13, 46, 32, 10, 196, 2),  # heads in pairs
    "jetmoe": Step(220, 1456, 17, 28, 40, 18, 154, 2),  # chosen pairs of projections
    "gemma3n": Step(624, 1992, 81, 156, 168, 66, 648, 2),  # streams
    "lfm2 with biases": Step(191, 1154, 23, 4, 52, 2, 34, 2),  # convolutions
    "falcon_h1": Step(406, 1764, 35, 37, 76, 36, 132, 2),  # attention beside a recurrence
    "t5": Step(129, 1103, 19, 5, 44, 4, 38, 2),  # attention across
    "deberta-3": Step(64, 319, 10, 50, 10, 9, 197, 1),  # disentangled attention
    "convbert": Step(71, 528, 9, 58, 9, 9, 354, 1),  # spans
    "mobilebert": Step(86, 279, 9, 76, 3, 3, 190, 1),  # norms without sums
}
VERSIONS = {"torch": "2.13.0", "jax": "0.10.2"}
FEW = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
OPTIONS = {"dtype": "fp32", "kernel_inject": True}
IDS = np.arange(3, 8, dtype=np.int32)


def tiny(name: str) -> Any:
    """A tiny HF model of one of the tests' tables."""
    if name in CASES:
        return make_model(name, vocab_size=VOCAB, **CASES[name])
    if name in mixtures.CASES:
        return make_model(name, vocab_size=VOCAB, **MIXTURES.get(name, FEW))
    return make_model(name, **({"vocab_size": VOCAB, **ENCODER} if name == "bert" else {}))


def passes(engine: Any, steps: int) -> Iterator[None]:
    """A request, with a yield before its last `steps` in a row, or an encoder's second pass."""
    runner = engine.runner
    if runner.spec.causal:
        source = None if runner.spec.encoder is None else IDS
        runner.prefill([Request(IDS, 8, source=source)], [0])
        runner.decode(steps).fetch()
        yield
        runner.decode(steps)
    else:
        engine(IDS[None])
        yield
        engine(IDS[None])


def torch_step(model: Any) -> int:
    """Launches of torch's ops in one step."""
    with dualinfer.init_inference(model, backend="torch", **OPTIONS) as engine:
        run = passes(engine, 1)
        next(run)
        with torch_launches() as counted:
            next(run, None)
    return sum(counted()["launches"].values())


def torch_by_kernels(model: Any, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Launches of kernels, and of torch's ops, in one step; what kernels would give is 0."""
    launched: Counter[str] = Counter()
    make = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        with _disable_current_modes():  # it launches nothing
            return make(self, *args, **options).zero_()

    def count(self: Any, *args: Any, **options: Any) -> None:
        launched[self.__name__] += 1

    with patch.context() as patched:
        patched.setattr(InterpretedFunction, "run", count)
        patched.setattr(torch.Tensor, "new_empty", new_empty)
        patched.setattr(
            torch_backend, "_make_ops", lambda config, spec, device, _: TorchKernelOps(device)
        )
        with dualinfer.init_inference(model, backend="torch", **OPTIONS) as engine:
            run = passes(engine, 1)
            next(run)
            launched.clear()
            with torch_launches() as counted:
                next(run, None)
    return launched.total(), sum(counted()["launches"].values())


def jax_steps(model: Any, patch: pytest.MonkeyPatch, kernels: bool) -> list[Any]:
    """The jaxpr of each executable of a request, in their order; none is compiled."""
    traced: list[Any] = []

    def note(key: Any, jaxpr: Any) -> None:
        traced.append(jaxpr)

    with patch.context() as patched:
        watch_steps(note, True, patched.setattr)
        if kernels:
            patched.setattr(jax_backend, "_make_ops", lambda *_: JaxKernelOps(gpu(core_count=132)))
        with dualinfer.init_inference(model, backend="jax", **OPTIONS) as engine:
            for _ in passes(engine, 2):  # one alone is a stream's, another executable
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
    counts = equations(fast[-1])
    calls = counts.pop("triton_launches")
    return Step(
        torch_step(model),
        equations(plain[-1]).total(),
        *torch_by_kernels(model, patch),
        launches(fast[-1]),
        calls,
        counts.total(),
        len(plain),
    )


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU torch would capture graphs")
@pytest.mark.parametrize("name", slow_but(TABLE, TABLE | MORE))
def test_a_step_takes_no_more_than_the_table_says(name, monkeypatch):
    for package, known in VERSIONS.items():
        if not version(package).startswith(known):
            pytest.skip(f"the table is of {package} {known}")
    found = measured(name, monkeypatch)
    assert all(n <= most for n, most in zip(found, (TABLE | MORE)[name], strict=True)), found


if __name__ == "__main__":
    for family in TABLE | MORE:
        print(f"    {family!r}: Step{tuple(measured(family, pytest.MonkeyPatch()))},")
