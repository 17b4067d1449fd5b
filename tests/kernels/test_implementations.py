"""That implementations, oracles and comparison belong together."""

import ast
import importlib
import inspect

import numpy as np
import pytest

from dualinfer.ops import sampling

from . import oracles
from .cases import DTYPES, assert_close, normal, unit


def backend_module(name: str, file: str):
    pytest.importorskip(name)
    return importlib.import_module(f"dualinfer.backends.{name}.{file}")


def test_both_backends_name_the_same_ops():
    served = [backend_module(name, "ops.plain").IMPLEMENTATIONS for name in ("torch", "jax")]
    assert set(served[0]) == set(served[1])
    for table in served:
        assert all(isinstance(text, str) and text for text in table.values())


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_samplers_have_the_arguments_of_their_meaning(name):
    expected = [*inspect.signature(sampling.sample).parameters][1:-2]
    found = inspect.signature(backend_module(name, "sampler").sample).parameters
    assert [*found][: len(expected)] == expected


def test_oracles_know_nothing_of_ours():
    """A mistake that were in both would not be seen."""
    tree = ast.walk(ast.parse(inspect.getsource(oracles)))
    imports = {n.module for n in tree if isinstance(n, ast.ImportFrom)}
    assert not [name for name in imports if name is None or name.startswith("dualinfer")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comparison_accepts_rounding_and_nothing_worse(dtype):
    exact = np.random.default_rng(1).standard_normal((63, 80)).astype(np.float32)
    rounded = exact.astype(dtype)
    assert_close(rounded, exact, dtype)
    worse = (exact * (1 + 12 * unit(dtype))).astype(dtype)
    one_off, one_nan = rounded.copy(), rounded.copy()
    one_off[31, 7] += np.array(40 * unit(dtype) * 5, dtype)
    one_nan[31, 7] = np.nan
    for wrong in (worse, one_off, one_nan, rounded[:62], rounded.astype(np.float64)):
        with pytest.raises(AssertionError):
            assert_close(wrong, exact, dtype)


def test_comparison_prints_both_errors():
    dtype = np.dtype(np.float32)
    with pytest.raises(AssertionError, match=r"relative RMS .* max error"):
        assert_close(normal(1, 63, dtype=dtype), normal(2, 63, dtype=dtype), dtype)
