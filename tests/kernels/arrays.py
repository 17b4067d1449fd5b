"""Arrays for Pallas' kernels, which a CPU interprets; and whether a kernel lowers for a GPU."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers share the card
jax = pytest.importorskip("jax")

from dualinfer.arrays import to_numpy  # noqa: E402

INTERPRETED = jax.default_backend() == "cpu"
_DEPRECATED = "The Pallas Triton backend is deprecated"  # from JAX 0.11 on, at each lowering


def put(array: np.ndarray) -> Any:
    """A JAX array of the same dtype."""
    return jax.numpy.asarray(array)


def get(array: Any) -> np.ndarray:
    """A NumPy array of the same dtype."""
    return to_numpy(array)


def struct(*shape: int, dtype: Any) -> Any:
    """What `check_lowers` takes for an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def check_lowers(function: Callable[..., Any], *args: Any) -> str:
    """StableHLO of `function` for CUDA, which needs no GPU; an error where a kernel cannot lower.

    `args` are ShapeDtypeStructs, or trees of them. The kernels themselves lie inside as bytes.
    """
    with warnings.catch_warnings(), _gpu():
        warnings.filterwarnings("ignore", _DEPRECATED, DeprecationWarning)
        traced = jax.jit(function).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def inlined(text: str) -> str:
    """StableHLO with the body of each function in the place of its calls: what will run."""
    parts = re.split(r"^  func\.func (?:public|private) @([^\s(]+)", text, flags=re.M)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))

    def lines(name: str) -> Iterator[str]:
        for line in bodies[name].splitlines():
            called = re.search(r"\bcall @([^\s(]+)\(", line)
            if called and called[1] in bodies:
                yield from lines(called[1])
            else:
                yield line

    return "\n".join(lines("main"))


def _gpu() -> contextlib.AbstractContextManager[Any]:
    """What tells JAX 0.11 which GPU is meant; 0.10 takes one of compute capability 9.0 for it."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
