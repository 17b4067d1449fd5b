"""Products with the model's matrices, and what they carry."""

from typing import Any

from .contract import Array, Epilogue
from .maths import Maths


def added(m: Maths, y: Array, dtype: Any, epilogue: Epilogue) -> Array:
    """A product with what stands behind a sum over devices: a bias and a residual."""
    if epilogue.bias is not None:
        y = y + m.cast(epilogue.bias, y.dtype)
    y = m.cast(y, dtype)
    return y if epilogue.residual is None else epilogue.residual + y
