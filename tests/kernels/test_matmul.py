"""matmul and embed."""

import numpy as np
import pytest

from . import oracles
from .cases import assert_close, normal


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("lead", "inner", "outer"),
    [((1,), 1, 1), ((1,), 1000, 63), ((63,), 63, 1000), ((2, 5), 80, 1)],
    ids=str,
)
def test_matmul_is_the_reference_product(maths, dtype, lead, inner, outer, bias):
    x = normal(1, *lead, inner, dtype=dtype)
    weight = normal(2, outer, inner, dtype=dtype, scale=inner**-0.5)
    b = normal(3, outer, dtype=dtype) if bias else None
    expected = oracles.matmul(x, weight, b)
    assert_close(maths.matmul(x, weight, b), expected, dtype, length=inner, roundings=1 + bias)


def test_matmul_sums_in_float32(maths, dtype):
    """In bfloat16 a sum of ones stops at 256, in float16 at 2048."""
    x, weight = np.ones((2, 5000), dtype), np.ones((3, 5000), dtype)
    assert_close(maths.matmul(x, weight), np.full((2, 3), 5000.0, np.float32), dtype)


@pytest.mark.parametrize("shape", [(1,), (2, 63)], ids=str)
def test_embed_takes_rows_exactly(maths, dtype, shape):
    table = normal(4, 1000, 80, dtype=dtype)
    ids = np.random.default_rng(5).integers(0, 1000, shape).astype(np.int32)
    ids.flat[0], ids.flat[-1] = 0, 999
    rows = maths.embed(ids, table)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows.astype(np.float32), table[ids].astype(np.float32))


def test_jax_rounds_a_product_once_its_bias_is_added():
    """257 is no bfloat16, and 258 is."""
    put = pytest.importorskip("jax").numpy.ones
    from dualinfer.backends.jax.ops.plain import PlainOps
    from dualinfer.backends.jax.params import Weight

    x, weight, bias = (put(shape, "bfloat16") for shape in ((1, 257), (2, 257), 2))
    weight = Weight(weight, axes=())
    ops = PlainOps()
    y = ops.matmul(x, weight, bias)
    assert y.dtype == "bfloat16" and y.astype("float32").tolist() == [[258, 258]]
    part = ops.partial_product(x, weight)  # nor is a part rounded before the sum over devices
    assert part.dtype == "float32" and part.tolist() == [[257, 257]]
