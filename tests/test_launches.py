"""What one step of decode launches, by family: none may take more than the table says.

Of one row and a tiny model. `python -m tests.test_launches` prints the table anew: what a change
adds to it is paid for each token.
"""

from importlib.metadata import version
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
    """Launches of torch's own ops, and equations of JAX's step, by plain ops."""

    torch: int
    jax: int


# Of these versions: another may make more of an op.
TABLE = {
    "llama-gqa": Step(78, 923),
    "gemma2": Step(177, 1105),
    "gpt_oss": Step(249, 1468),
    "mamba2": Step(206, 1259),
}
VERSIONS = {"torch": "2.13.0", "jax": "0.10.2"}


def tiny(name: str) -> Any:
    """A tiny HF model of one of the tables."""
    if name in RECURRENT:
        return make_recurrent(name)
    fields = (CASES | MIXTURES)[name]
    return (make_mixture if name in MIXTURES else make_model)(name, vocab_size=VOCAB, **fields)


def engine_of(name: str, backend: str) -> Any:
    """An engine by plain ops."""
    return dualinfer.init_inference(tiny(name), backend=backend, dtype="fp32", kernel_inject=True)


def torch_step(engine: Any) -> int:
    """Launches of torch's ops in one step of decode."""
    runner = engine.runner
    runner.prefill([Request(np.arange(3, 8, dtype=np.int32), 8)], [0])
    runner.decode(1).fetch()
    with torch_launches() as counted:
        runner.decode(1)
    return sum(counted()["launches"].values())


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


def measured(name: str) -> Step:
    """The row of a family."""
    return Step(torch_step(engine_of(name, "torch")), jax_step(engine_of(name, "jax")))


@pytest.mark.parametrize("name", TABLE)
def test_a_step_launches_no_more_than_the_table_says(name):
    for package, known in VERSIONS.items():
        if not version(package).startswith(known):
            pytest.skip(f"the table is of {package} {known}")
    found = measured(name)
    assert all(n <= most for n, most in zip(found, TABLE[name], strict=True)), found


if __name__ == "__main__":
    for family in TABLE:
        print(f"    {family!r}: {measured(family)},")
