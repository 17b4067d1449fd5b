"""The matrix that codes and scales mean, in NumPy: the reference of both backends' arithmetic."""

from dataclasses import replace

import ml_dtypes
import numpy as np

from ..arrays import numpy_dtype
from .scheme import BlockScheme, QuantizedMatrix


def spread(
    scheme: BlockScheme, blocks: np.ndarray, shape: tuple[int, int], group: np.ndarray | None = None
) -> np.ndarray:
    """Spread the values of blocks, in float32, over each element of a matrix of `shape`."""
    rows, columns = scheme.rows or shape[0], scheme.columns or shape[1]
    wide = blocks.astype(np.float32)
    if rows > 1:
        wide = wide.repeat(rows, 0)[: shape[0]]
    return wide[:, group] if group is not None else wide.repeat(columns, 1)[:, : shape[1]]


def dequantize(matrix: QuantizedMatrix) -> np.ndarray:
    """The matrix [out, in] in float32."""
    scheme, shape = matrix.scheme, matrix.shape
    group, zero, outer = matrix.group(), matrix.zero(), matrix.outer()
    values = scheme.code.decode(matrix.codes(slice(0, shape[0]), slice(0, shape[1])))
    if zero is not None:
        values = values - spread(scheme, zero, shape, group)
    values = values * spread(scheme, matrix.scale(), shape, group)
    return values if outer is None else values * outer[:, None]


def span(scheme: BlockScheme) -> float:
    """The largest size of what a scale is multiplied with."""
    own = scheme.code
    return own.high - own.low if scheme.zeros else max(-own.low, own.high)


def bound(dtype: str) -> float:
    """The least positive number that is rounded to infinity in a dtype, by NumPy's name."""
    info = ml_dtypes.finfo(numpy_dtype(dtype))
    if info.bits == 64:
        return float("inf")
    return float(info.max) + 2.0 ** (info.maxexp - info.nmant - 2)


_AT_ONCE = 1 << 22  # elements that are decoded at a time


def overflows(matrix: QuantizedMatrix, most: float) -> bool:
    """True if an element has at least the size `most` once it is decoded, in float32; or is NaN."""
    scheme, (n, k) = matrix.scheme, matrix.shape
    group, zero, outer, scale = matrix.group(), matrix.zero(), matrix.outer(), matrix.scale()
    rows = scheme.rows or n
    few = max(1, _AT_ONCE // max(1, k))
    for start in range(0, n, few):
        part = slice(start, min(start + few, n))
        blocks = np.arange(part.start, part.stop) // rows
        count, by_row = part.stop - part.start, replace(scheme, rows=1)
        values = scheme.code.decode(matrix.codes(part, slice(0, k)))
        with np.errstate(over="ignore", invalid="ignore"):
            if zero is not None:
                values = values - spread(by_row, zero[blocks], (count, k), group)
            values = values * spread(by_row, scale[blocks], (count, k), group)
            if outer is not None:
                values = values * outer[part, None]
            if not (np.abs(values) < most).all():
                return True
    return False
