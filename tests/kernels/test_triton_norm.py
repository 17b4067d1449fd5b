"""Triton's rms_norm and layer_norm."""

import numpy as np
import pytest

from .cases import DTYPES, assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict, strided
from .test_norms import SHAPES, gain

from dualinfer.kernels.triton.norm import layer_norm, rms_norm  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]


def added(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 63), (40, 16), (2, 16384)], ids=str)
def test_norms_are_the_reference(dtype, shape):
    width = shape[-1]
    x, weight, bias = (
        normal(1, *shape, dtype=dtype),
        gain(dtype, width),
        normal(2, width, dtype=dtype),
    )
    x_, weight_, bias_ = put(x), put(weight), put(bias)
    if not x.size:
        assert rms_norm(x_, weight_, 1e-6).shape == shape
        return
    for found, expected in (
        (rms_norm(x_, weight_, 1e-6), meaning.rms_norm(x, weight, 1e-6)),
        (layer_norm(x_, weight_, bias_, 1e-5), meaning.layer_norm(x, weight, bias, 1e-5)),
        (layer_norm(x_, weight_, None, 1e-5), meaning.layer_norm(x, weight, 0 * bias, 1e-5)),
    ):
        assert_close(get(found), expected, dtype, length=width)


def test_layer_norm_adds_a_unit_offset_in_float32(dtype):
    x, weight = normal(1, 3, 63, dtype=dtype), normal(2, 63, dtype=dtype, scale=0.01)
    expected = meaning.layer_norm(x, weight, None, 1e-6, unit_offset=True)
    found = layer_norm(put(x), put(weight), None, 1e-6, unit_offset=True)
    assert_close(get(found), expected, dtype, length=63)


def test_unit_offset_is_added_in_float32(dtype):
    x, weight = normal(1, 3, 1000, dtype=dtype), normal(2, 1000, dtype=dtype, scale=0.01)
    expected = meaning.rms_norm(x, weight, 1e-6, unit_offset=True)
    found = rms_norm(put(x), put(weight), 1e-6, unit_offset=True)
    assert_close(get(found), expected, dtype, length=1000)


@pytest.mark.parametrize("shape", [(1, 63), (2, 5, 1000), (9, 80)], ids=str)
def test_residual_is_added_and_rounded_first(dtype, shape):
    x, residual = normal(1, *shape, dtype=dtype), normal(2, *shape, dtype=dtype, scale=30.0)
    weight, bias = gain(dtype, shape[-1]), normal(3, shape[-1], dtype=dtype)
    total = added(x, residual)
    expected = meaning.rms_norm(total, weight, 1e-6)
    found = rms_norm(put(x), put(weight), 1e-6, residual=put(residual))
    assert_close(get(found), expected, dtype, length=shape[-1])
    expected = meaning.layer_norm(total, weight, bias, 1e-6)
    found = layer_norm(strided(x), put(weight), put(bias), 1e-6, residual=put(residual))
    assert_close(get(found), expected, dtype, length=shape[-1])


@pytest.mark.parametrize("shape", [(1, 63), (2, 5, 1000)], ids=str)
def test_residual_is_added_to_what_was_normed_and_rounded(dtype, shape):
    x, residual = normal(1, *shape, dtype=dtype), normal(2, *shape, dtype=dtype, scale=30.0)
    weight, bias = put(gain(dtype, shape[-1])), put(normal(3, shape[-1], dtype=dtype))
    alone = layer_norm(put(x), weight, bias, 1e-6)
    found = layer_norm(put(x), weight, bias, 1e-6, residual=strided(residual), after=True)
    np.testing.assert_array_equal(get(found), get(put(residual) + alone))
    alone = rms_norm(put(x), weight, 1e-6, unit_offset=True)
    found = rms_norm(strided(x), weight, 1e-6, unit_offset=True, residual=put(residual), after=True)
    np.testing.assert_array_equal(get(found), get(put(residual) + alone))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_rounding_takes_from_the_sum_is_not_normed(dtype):
    """Beside 4096 a quarter is lost in 16 bits: the row is constant, and its norm is the bias."""
    x = np.full((3, 256), 4096.0).astype(dtype)
    residual = np.where(np.arange(256) % 2, 0.25, -0.25).astype(dtype) * np.ones_like(x)
    weight, bias = gain(dtype, 256), normal(7, 256, dtype=dtype)
    found = layer_norm(put(x), put(weight), put(bias), 1e-6, residual=put(residual))
    np.testing.assert_array_equal(get(found), np.broadcast_to(bias, x.shape))


@pytest.mark.parametrize("shape", [(7, 63), (3, 2, 64), (2, 3, 2, 30)], ids=str)
def test_strided_rows_and_contiguous_rows_agree(dtype, shape):
    x, residual = normal(1, *shape, dtype=dtype), normal(2, *shape, dtype=dtype)
    weight = put(gain(dtype, shape[-1]))
    expected = rms_norm(put(x), weight, 1e-6, residual=put(residual))
    for first, second in ((strided(x), strided(residual)), (put(x), strided(residual))):
        found = rms_norm(first, weight, 1e-6, residual=second)
        np.testing.assert_array_equal(get(found), get(expected))
    turned = rms_norm(put(x).transpose(0, -2), weight, 1e-6)
    np.testing.assert_array_equal(
        get(turned), get(rms_norm(put(x.swapaxes(0, -2).copy()), weight, 1e-6))
    )


@pytest.mark.parametrize("scale", [3000.0, 1e-3, 0.0])
def test_norms_hold_at_any_scale(dtype, scale):
    x = normal(4, 3, 63, dtype=dtype, scale=scale)
    weight, bias = gain(dtype, 63), normal(5, 63, dtype=dtype)
    expected = meaning.rms_norm(x, weight, 1e-5)
    assert_close(get(rms_norm(put(x), put(weight), 1e-5)), expected, dtype, length=63)
    expected = meaning.layer_norm(x, weight, bias, 1e-5)
    assert_close(get(layer_norm(put(x), put(weight), put(bias), 1e-5)), expected, dtype, length=63)


def test_layer_norm_survives_a_large_mean(dtype):
    x = (300 + normal(6, 5, 1000, dtype=dtype, scale=8.0).astype(np.float32)).astype(dtype)
    weight, bias = gain(dtype, 1000), np.zeros(1000, dtype)
    expected = meaning.layer_norm(x, weight, bias, 1e-5)
    found = get(layer_norm(put(x), put(weight), put(bias), 1e-5))
    assert_close(found, expected, dtype, length=1000)


def test_what_cannot_be_run_is_refused():
    x, weight = put(np.zeros((4, 6), np.float32)), put(np.ones(6, np.float32))
    with pytest.raises(ValueError, match=r"weight has shape \(5,\); \(6,\) is expected"):
        rms_norm(x, weight[:5], 1e-6)
    with pytest.raises(ValueError, match="residual is"):
        layer_norm(x, weight, weight, 1e-6, residual=x.half())
    with pytest.raises(ValueError, match="at most 16384"):
        rms_norm(x[:1, :1].expand(1, 20000).clone(), weight, 1e-6)
    with pytest.raises(ValueError, match="Pass contiguous"):
        rms_norm(x.new_zeros(4, 4, 4, 4, 6)[::2, ::2, ::2, ::2], weight, 1e-6)
