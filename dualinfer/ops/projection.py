"""Products with the model's matrices, and what they carry."""

from typing import Any

from .contract import Array, Neighbours
from .maths import Maths


def added(m: Maths, y: Array, dtype: Any, by: Neighbours) -> Array:
    """A product with what stands behind a sum over devices: a bias and a residual."""
    if by.bias is not None:
        y = y + m.cast(by.bias, y.dtype)
    y = m.cast(y, dtype)
    return y if by.residual is None else by.residual + y
