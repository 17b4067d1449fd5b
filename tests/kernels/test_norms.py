"""rms_norm and layer_norm."""

import numpy as np
import pytest

from . import oracles
from .cases import assert_close, normal

SHAPES = [(1, 1), (3, 63), (2, 5, 1000), (2, 7, 6, 80)]


def gain(dtype: np.dtype, width: int) -> np.ndarray:
    return (1 + normal(9, width, dtype=dtype, scale=0.2).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_is_the_reference(maths, dtype, shape):
    x, weight = normal(1, *shape, dtype=dtype), gain(dtype, shape[-1])
    expected = oracles.rms_norm(x, weight, 1e-6)
    assert_close(maths.rms_norm(x, weight, 1e-6), expected, dtype, length=shape[-1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_with_a_unit_offset_is_the_reference(maths, dtype, shape):
    """1 + weight is not rounded to the dtype: in bfloat16 that would lose small weights."""
    x, weight = normal(1, *shape, dtype=dtype), normal(9, shape[-1], dtype=dtype, scale=0.01)
    expected = oracles.rms_norm(x, weight, 1e-6, True)
    assert_close(maths.rms_norm(x, weight, 1e-6, True), expected, dtype, length=shape[-1])


def test_a_share_of_an_axis_is_normed_by_the_mean_of_all(maths, dtype):
    x, weight = normal(1, 3, 80, dtype=dtype), gain(dtype, 80)
    whole = oracles.rms_norm(x, weight, 1e-6)
    squares = (x.astype(np.float32) ** 2).mean(-1)
    found = maths.rms_norm(x[:, :32], weight[:32], 1e-6, False, squares)
    assert_close(found, whole[:, :32], dtype, length=80)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_is_the_reference(maths, dtype, shape):
    x, weight = normal(2, *shape, dtype=dtype), gain(dtype, shape[-1])
    bias = normal(3, shape[-1], dtype=dtype)
    expected = oracles.layer_norm(x, weight, bias, 1e-5)
    assert_close(maths.layer_norm(x, weight, bias, 1e-5), expected, dtype, length=shape[-1])


def test_layer_norm_with_a_unit_offset_or_without_a_bias_is_the_reference(maths, dtype):
    x, weight = normal(2, 3, 63, dtype=dtype), normal(9, 63, dtype=dtype, scale=0.01)
    bias, own = normal(3, 63, dtype=dtype), normal(8, 3, 63, dtype=dtype)
    expected = oracles.layer_norm(x, weight, bias, 1e-5, True)
    assert_close(maths.layer_norm(x, weight, bias, 1e-5, True), expected, dtype, length=63)
    expected = oracles.layer_norm(x, own, None, 1e-5)  # a weight for each head
    assert_close(maths.layer_norm(x, own, None, 1e-5), expected, dtype, length=63)


# 3000 ** 2 is beyond float16; at 0.001 the eps decides; at 0 only the eps is left.
@pytest.mark.parametrize("scale", [3000.0, 1e-3, 0.0])
def test_norms_hold_at_any_scale(maths, dtype, scale):
    x = normal(4, 3, 63, dtype=dtype, scale=scale)
    weight, bias = gain(dtype, 63), normal(5, 63, dtype=dtype)
    expected = oracles.rms_norm(x, weight, 1e-5)
    assert_close(maths.rms_norm(x, weight, 1e-5), expected, dtype, length=63)
    expected = oracles.layer_norm(x, weight, bias, 1e-5)
    assert_close(maths.layer_norm(x, weight, bias, 1e-5), expected, dtype, length=63)


def test_layer_norm_survives_a_large_mean(maths, dtype):
    """E[x^2] - E[x]^2 would lose three digits here."""
    x = (300 + normal(6, 5, 1000, dtype=dtype, scale=8.0).astype(np.float32)).astype(dtype)
    weight, bias = gain(dtype, 1000), np.zeros(1000, dtype)
    expected = oracles.layer_norm(x, weight, bias, 1e-5)
    assert_close(maths.layer_norm(x, weight, bias, 1e-5), expected, dtype, length=1000)
