"""That implementations, reference and comparison belong together."""

import importlib
import inspect

import numpy as np
import pytest

from dualinfer.kernels import reference
from dualinfer.ops import exact

from .cases import DTYPES, assert_close, normal, unit
from .implementations import MATRIX_OPS, OPS, op_of


def backend_module(name: str, file: str):
    pytest.importorskip(name)
    return importlib.import_module(f"dualinfer.backends.{name}.{file}")


def test_both_backends_name_the_same_ops():
    served = [backend_module(name, "ops.plain").IMPLEMENTATIONS for name in ("torch", "jax")]
    assert set(served[0]) == set(served[1])
    for table in served:
        assert all(isinstance(text, str) and text for text in table.values())


@pytest.mark.parametrize("name", [*sum(OPS.values(), ()), *MATRIX_OPS, "decode_attention"])
def test_ops_have_the_arguments_of_the_reference(name):
    expected = inspect.signature(getattr(reference, name)).parameters
    found = inspect.signature(op_of(name, exact.MATHS)).parameters
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_samplers_have_the_arguments_of_the_reference(name):
    expected = [*inspect.signature(reference.sample).parameters]
    found = inspect.signature(backend_module(name, "sampler").sample).parameters
    assert [*found][: len(expected)] == expected


def test_reference_imports_only_numpy_its_dtypes_and_the_standard_library():
    lines = inspect.getsource(reference).splitlines()
    imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
    known = ["import math", "from typing import Any", "import ml_dtypes", "import numpy as np"]
    assert imports == known  # ml_dtypes are NumPy's own dtypes of 8 bits


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
