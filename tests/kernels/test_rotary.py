"""rotary."""

import numpy as np
import pytest

from . import oracles
from .cases import assert_close, normal


def angles(positions: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [B, T, D/2], of positions [B, T] at rope_theta 10000."""
    frequencies = 10000.0 ** (-np.arange(0, dim, 2) / dim)
    turns = positions[..., None] * frequencies
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 1, 2), (63, 5, 80), (7, 6, 64), (1000, 3, 6)], ids=str
)
def test_rotary_is_the_reference(maths, dtype, tokens, heads, dim):
    x = normal(1, 2, tokens, heads, dim, dtype=dtype)
    start = np.array([[0], [100_000]])  # left-padded rows have positions of their own
    cos, sin = angles(start + np.arange(tokens), dim)
    assert_close(maths.rotary(x, cos, sin), oracles.rotary(x, cos, sin), dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "turning"), [(80, 80), (80, 20), (84, 2), (28, 10)])
def test_rotary_of_a_part_of_each_head_is_the_reference(maths, dtype, dim, turning, interleaved):
    x = normal(1, 2, 63, 5, dim, dtype=dtype)
    cos, sin = angles(np.arange(63) + np.array([[0], [1000]]), turning)
    expected = oracles.rotary(x, cos, sin, interleaved)
    actual = maths.rotary(x, cos, sin, interleaved)
    assert_close(actual, expected, dtype)
    np.testing.assert_array_equal(actual[..., turning:], x[..., turning:])


def test_rotary_at_position_zero_changes_nothing(maths, dtype):
    x = normal(2, 1, 1, 5, 80, dtype=dtype)
    cos, sin = angles(np.zeros((1, 1)), 80)
    np.testing.assert_array_equal(maths.rotary(x, cos, sin), x)


def test_rotary_applies_the_scaling_in_cos_and_sin(maths, dtype):
    """Yarn multiplies cos and sin, so that the length of a head changes."""
    x = normal(3, 1, 63, 5, 80, dtype=dtype)
    cos, sin = (1.25 * part for part in angles(np.arange(63)[None], 80))
    assert_close(maths.rotary(x, cos, sin), oracles.rotary(x, cos, sin), dtype)
