"""convolution, trigrams and weave: what neighbours of a token, and two streams of it, give."""

import numpy as np
import pytest

from . import oracles
from .cases import assert_close, normal

SEGMENTS = np.repeat([[0, 1, 2, 3]], [1, 9, 2, 5], axis=1).repeat(2, 0)


@pytest.mark.parametrize(
    ("taps", "stride", "packed"), [(1, 1, False), (3, 2, False), (5, 1, False), (5, 1, True)]
)
def test_convolution_is_the_reference(maths, dtype, taps, stride, packed):
    x, bias = normal(1, 2, 17, 6, dtype=dtype), normal(3, 7, dtype=dtype)
    kernel = normal(2, 7, 6, taps, dtype=dtype)
    how = (kernel, bias, stride, SEGMENTS if packed else None)
    expected = oracles.convolution(x, *how)
    assert_close(maths.convolution(x, *how), expected, dtype, length=6 * taps)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["alone", "packed"])
def test_trigrams_are_the_reference(maths, dtype, segments):
    x = normal(1, 2, 17, 5, dtype=dtype)
    found = maths.trigrams(x, segments)
    np.testing.assert_array_equal(found, oracles.trigrams(x, segments))


@pytest.mark.parametrize(("heads", "widths"), [(1, (6, 2)), (5, (8, 3))])
def test_two_projections_are_one_head_by_head(maths, dtype, heads, widths):
    first, second = (normal(i, 2, 3, 3 * heads * n, dtype=dtype) for i, n in enumerate(widths))
    found = maths.weave(heads, first, second)
    assert_close(found, oracles.weave(heads, first, second), dtype)
    values = found[..., -heads * sum(widths) :]
    for part, whole in zip(maths.unweave(heads, values, widths[1]), (first, second), strict=True):
        np.testing.assert_array_equal(part, whole[..., -part.shape[-1] :])
