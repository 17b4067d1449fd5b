"""activation and gated_activation."""

import numpy as np
import pytest

from dualinfer.model.spec import Activation

from . import oracles
from .cases import assert_close, normal

KINDS = Activation.__args__


def grid(dtype: np.dtype) -> np.ndarray:
    """Every magnitude down to 2**-10, both signs, zeros, and the ends of float16."""
    sizes = np.concatenate([2.0 ** np.linspace(-10, 6, 497), [0.0, 60000.0, 1000.0]])
    return np.concatenate([sizes, -sizes])[None].astype(dtype)


def measured(kind, dtype):
    """Values, what becomes of them, and what an error of each is relative to."""
    x = grid(dtype)
    if kind == "relu2":  # a square, which float16 must hold, and as a normal number
        x = x[np.abs(x.astype(np.float32)) < 200]
        expected = oracles.activation(x, kind)
        return x, expected, np.maximum(expected, 1e-4)
    expected = oracles.activation(x, kind)
    # Near zero each one is proportional to x; far out it is nearly x, 0 or 1.
    return x, expected, np.minimum(np.abs(x.astype(np.float32)), 1 + np.abs(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_the_reference(maths, dtype, kind):
    x, expected, scale = measured(kind, dtype)
    assert_close(maths.activation(x, kind), expected, dtype, scale=scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 7, 126)], ids=str)
def test_gated_activation_multiplies_the_gate_with_up(maths, dtype, kind, shape):
    x = normal(1, *shape, dtype=dtype, scale=2.0)
    expected = oracles.gated_activation(x, kind)
    assert_close(maths.gated_activation(x, kind), expected, dtype, roundings=3)


def xielu_case(dtype: np.dtype) -> tuple[list[np.ndarray], np.ndarray]:
    """Values and the activation's numbers, and what becomes of them; float16 must hold squares."""
    x = grid(dtype)
    x = x[np.abs(x.astype(np.float32)) < 200]
    numbers = [np.array([0.7]), np.array([-1.3]), np.array(0.5), np.array(-1e-6)]
    given = [x, *(number.astype(dtype) for number in numbers)]
    return given, oracles.xielu(*given)


def test_xielu_is_the_reference(maths, dtype):
    given, expected = xielu_case(dtype)
    # Both branches begin as half of x.
    scale = np.maximum(np.abs(expected), np.abs(given[0].astype(np.float32))).clip(1e-3)
    assert_close(maths.xielu(*given), expected, dtype, scale=scale)
