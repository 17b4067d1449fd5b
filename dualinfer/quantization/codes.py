"""The meaning of codes and scales, in NumPy: the reference of both backends' arithmetic."""

from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np

from ..arrays import numpy_dtype
from .scheme import BlockScheme, QuantizedMatrix

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_SIZES, *(-size for size in _SIZES))  # the values of fp4's codes
FLOAT8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
_FLOATS = {**FLOAT8, "fp4_e2m1": ml_dtypes.float4_e2m1fn}
# The least and the most value of codes that are numbers themselves.
RANGES = {
    **{"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127), "uint8": (0, 255)},
    **{"fp8_e4m3": (-448, 448), "fp8_e5m2": (-57344, 57344), "fp4_e2m1": (-6, 6)},
}


def code_dtype(scheme: BlockScheme) -> np.dtype:
    """NumPy's dtype of codes, one byte each: int8 of signed ones, else uint8."""
    return np.dtype(np.int8 if scheme.codes in ("int4", "int8") else np.uint8)


def decode(codes: np.ndarray, scheme: BlockScheme) -> np.ndarray:
    """float32 values of codes, one byte each, before zero points and scales."""
    if scheme.codes in FLOAT8:
        return codes.view(FLOAT8[scheme.codes]).astype(np.float32)
    if scheme.codes in ("fp4_e2m1", "table"):
        return np.array(scheme.table or E2M1, np.float32)[codes]
    return codes.astype(np.float32)


def encode(values: np.ndarray, scheme: BlockScheme) -> np.ndarray:
    """The codes nearest to float32 values, one byte each, ties to even; beyond the range its end.

    Of codes that are a table's, the first of two that are equally near.
    """
    if scheme.codes == "table":
        table = np.array(scheme.table, np.float32)
        order = np.argsort(table, kind="stable")
        places = np.searchsorted((table[order][1:] + table[order][:-1]) / 2, values)
        return order[places].astype(np.uint8)
    if scheme.codes in _FLOATS:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        # Its upper half, made odd where something is cut off, rounds as the whole does.
        half = ((bits & 0xFFFF) + np.uint32(0xFFFF) | bits) >> 16
        return np.take(_nearest(scheme.codes), half.astype(np.uint16))
    low, high = RANGES[scheme.codes]
    values = values.clip(low, high)
    return np.rint(values, out=values).astype(code_dtype(scheme))


@cache
def _nearest(codes: str) -> np.ndarray:
    """The codes nearest to float32 by their upper 16 bits."""
    low, high = RANGES[codes]
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).clip(low, high)
    with np.errstate(invalid="ignore"):
        return values.astype(_FLOATS[codes]).view(np.uint8)


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
    values = decode(matrix.codes(slice(0, shape[0]), slice(0, shape[1])), scheme)
    if zero is not None:
        values = values - spread(scheme, zero, shape, group)
    values = values * spread(scheme, matrix.scale(), shape, group)
    return values if outer is None else values * outer[:, None]


def span(scheme: BlockScheme) -> float:
    """The largest size of what a scale is multiplied with."""
    if scheme.codes == "table":
        return max(map(abs, scheme.table))
    low, high = RANGES[scheme.codes]
    return high - low if scheme.zeros else max(-low, high)


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
        values = decode(matrix.codes(part, slice(0, k)), scheme)
        with np.errstate(over="ignore", invalid="ignore"):
            if zero is not None:
                values = values - spread(by_row, zero[blocks], (count, k), group)
            values = values * spread(by_row, scale[blocks], (count, k), group)
            if outer is not None:
                values = values * outer[part, None]
            if not (np.abs(values) < most).all():
                return True
    return False
