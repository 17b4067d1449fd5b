"""Quantizing: from the rows of a matrix to codes and scales, the same for both backends.

Scales are those of the largest value in a block (compressed-tensors' min-max), but for codes of
integers of 4 bits: there a search takes the scale of least squared error, never above min-max's.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..arrays import numpy_dtype, to_numpy
from ..errors import CheckpointError
from .codes import RANGES, decode, dequantize, encode
from .scheme import BlockScheme

# By the short names; scales have the dtype of the weights, but for those of nvfp4.
SCHEMES = {
    "int8": BlockScheme("int8"),
    "int4": BlockScheme("int4", columns=64),
    "fp8": BlockScheme("fp8_e4m3"),
    "nvfp4": BlockScheme("fp4_e2m1", columns=16, scale_dtype="float8_e4m3fn", outer=True),
}
_AT_ONCE = 1 << 17  # elements whose scales are searched, which stay in caches
_THREADS = min(16, os.cpu_count() or 1)
_SHRUNK = (15 / 14, 0.93, 0.86, 0.79)  # of min-max's scale, tried beside it
_REFINED = 1  # times that the best scale for given codes is tried
_LARGEST = 448.0 * 6.0  # of fp4 codes by scales in float8_e4m3fn


class Quantized(NamedTuple):
    """Canonical parts of rows [n, K]: codes [n, K], and scales and zeros [n, blocks of columns]."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None


def outer_factor(most: float) -> np.float32:
    """The second factor of an nvfp4 matrix whose largest size is `most`."""
    with np.errstate(divide="ignore", over="ignore"):
        whole = np.float32(_LARGEST) / np.float32(max(most, np.finfo(np.float32).tiny))
    return np.float32(1) / (whole if np.isfinite(whole) else np.float32(1))


def quantize(rows: np.ndarray, scheme: BlockScheme, outer: np.float32 | None = None) -> Quantized:
    """The canonical parts of float32 rows [n, K] by a scheme with a scale for each row or group.

    `outer` is the matrix' second factor, of a scheme that has one.
    """
    assert scheme.rows == 1 and not scheme.groups and (outer is not None) == scheme.outer
    assert scheme.scale_dtype != "float8_e8m0fnu"  # whose scales are found in another way
    few = max(1, _AT_ONCE // max(1, rows.shape[1]))
    blocks = [rows[i : i + few] for i in range(0, len(rows), few)]
    with ThreadPoolExecutor(_THREADS) as pool:  # NumPy leaves Python's lock
        return _joined([*pool.map(lambda block: _quantize(block, scheme, outer), blocks)])


def _joined(parts: list[Quantized]) -> Quantized:
    zeros = [part.zero for part in parts if part.zero is not None]
    return Quantized(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(zeros) if zeros else None,
    )


def _quantize(rows: np.ndarray, scheme: BlockScheme, outer: np.float32 | None) -> Quantized:
    count, width = rows.shape
    columns = scheme.columns or width
    groups = -(-width // columns)
    missing = groups * columns - width
    wide = np.pad(rows, ((0, 0), (0, missing))) if missing else rows
    x = wide.reshape(count, groups, columns)
    low, high = RANGES[scheme.codes]
    dtype = numpy_dtype(scheme.scale_dtype)
    least, most = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)

    def held(scale: np.ndarray) -> np.ndarray:
        """Scales as they are held, in float32; a small number in the place of zero."""
        rounded = scale.clip(0, 448) if dtype.itemsize == 1 else scale
        rounded = rounded.astype(dtype).astype(np.float32)
        return np.where(rounded == 0, _epsilon(dtype), rounded)

    def parts(scale: np.ndarray, shrunk: float = 1.0) -> tuple[np.ndarray, np.ndarray | None]:
        """Codes by given scales, and zeros, where `shrunk` is how much the range shrank."""
        by = scale[..., None] if outer is None else (scale * outer)[..., None]
        if not scheme.zeros:
            return encode(x / by, scheme), None
        zero = np.rint(low - shrunk * least / scale).clip(low, high)
        return encode(x / by + zero[..., None], scheme), zero.astype(np.float32)

    if scheme.zeros:
        scale = held((most - least) / (high - low))
    else:
        size = np.maximum(most, -least) / np.float32((high - low) / 2)
        scale = held(size if outer is None else size / outer)
    codes, zero = parts(scale)
    if scheme.codes in ("int4", "uint4"):
        codes, scale, zero = _searched(x, scheme, scale, held, parts)
    return Quantized(
        codes.reshape(count, -1)[:, :width],
        scale.astype(dtype),
        None if zero is None else zero.astype(codes.dtype),
    )


def _searched(x: np.ndarray, scheme: BlockScheme, start: np.ndarray, held: Any, parts: Any) -> Any:
    """Codes, scales and zeros of the least squared error among those tried, min-max's first."""

    def values(codes: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
        plain = decode(codes, scheme)
        return plain if zero is None else plain - zero[..., None]

    def error(scale: np.ndarray, plain: np.ndarray) -> np.ndarray:
        left = x - plain * scale[..., None]
        return np.einsum("ngc,ngc->ng", left, left)

    codes, zero = parts(start)
    scale, best = start, error(start, values(codes, zero))

    def keep(tried: np.ndarray, its: np.ndarray, its_zero: np.ndarray | None) -> None:
        nonlocal codes, scale, zero, best
        its_error = error(tried, values(its, its_zero))
        better = its_error < best
        codes = np.where(better[..., None], its, codes)
        scale, best = np.where(better, tried, scale), np.where(better, its_error, best)
        if zero is not None and its_zero is not None:
            zero = np.where(better, its_zero, zero)

    for factor in _SHRUNK:
        if not scheme.zeros or factor < 1:
            tried = held(factor * start)
            keep(tried, *parts(tried, factor))
    for _ in range(_REFINED):
        plain = values(codes, zero)
        squares = np.einsum("ngc,ngc->ng", plain, plain)
        fitted = np.einsum("ngc,ngc->ng", x, plain) / np.where(squares == 0, 1, squares)
        tried = held(np.where(fitted > 0, fitted, scale))
        if zero is None:
            keep(tried, *parts(tried))
        else:
            keep(tried, encode(x / tried[..., None] + zero[..., None], scheme), zero)
    return codes, scale, zero


def _epsilon(dtype: np.dtype) -> np.float32:
    """What stands for a scale of zero, as in compressed-tensors: the dtype's epsilon."""
    return np.float32(ml_dtypes.finfo(dtype).eps)


class Recent:
    """What was quantized last, of a few matrices: readers ask for several at a time."""

    def __init__(self, most: int = 6) -> None:
        self._most, self._lock = most, threading.Lock()
        self._made: dict[Any, Any] = {}  # the last one is last

    def get(self, matrix: Any) -> Any:
        """What was put for a matrix, or None."""
        with self._lock:
            made = self._made.pop(matrix, None)
            if made is not None:
                self._made[matrix] = made
            return made

    def put(self, matrix: Any, made: Any) -> None:
        """Hold it; the one unused for longest goes."""
        with self._lock:
            self._made[matrix] = made
            while len(self._made) > self._most:
                del self._made[next(iter(self._made))]


_READ = 1 << 24  # elements that are read at a time


class Quantizing:
    """A QuantizedMatrix of a plain tensor of a TensorSource, quantized when it is asked for.

    The matrix is the tensor, or its transpose where the tensor is [in, out] (`transposed`). Scales
    have the tensor's dtype, unless they are of 8 bits. Codes and scales come from one pass, over as
    many rows at a time as `_READ` elements hold, and stay in `recent` until others are asked for.
    """

    def __init__(
        self,
        source: Any,
        name: str,
        scheme: BlockScheme,
        transposed: bool = False,
        recent: Recent | None = None,
    ) -> None:
        self._source, self._name, self._transposed = source, name, transposed
        stored, own = tuple(source.shape(name)), source.dtype(name)
        self.shape = (stored[1], stored[0]) if transposed else (stored[0], stored[1])
        if not scheme.scale_dtype.startswith("float8"):
            kinds = {"bfloat16": "bfloat16", "float16": "float16"}
            scheme = replace(scheme, scale_dtype=kinds.get(own, "float32"))  # type: ignore[arg-type]
        self.scheme, self.stored = scheme, (name,)
        self._recent = recent or Recent(1)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix as it is stored."""
        return self.shape[0] * self.shape[1] * numpy_dtype(self._source.dtype(self._name)).itemsize

    def error(self) -> tuple[float, float]:
        """The sums of squares of what quantizing takes away, and of the matrix itself."""
        values, few = dequantize(self), max(1, _READ // max(1, self.shape[1]))
        sums = [0.0, 0.0]
        for i in range(0, self.shape[0], few):
            rows = self._read(i, i + few).astype(np.float64)
            sums[0] += float(((values[i : i + few] - rows) ** 2).sum())
            sums[1] += float((rows**2).sum())
        return sums[0], sums[1]

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        return self._whole()[0].codes[rows, columns]

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        return self._whole()[0].scale

    def zero(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return self._whole()[0].zero if self.scheme.zeros else None

    def group(self) -> None:
        """None: columns stay where they are."""

    def outer(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        if not self.scheme.outer:
            return None
        return np.full(self.shape[0], self._whole()[1], np.float32)

    def input_scale(self) -> None:
        """None: inputs have no scale of their own here."""

    def _whole(self) -> tuple[Quantized, np.float32 | None]:
        with self._lock:
            made = self._recent.get(self)
            if made is None:
                made = self._make()
                self._recent.put(self, made)
        return made

    def _make(self) -> tuple[Quantized, np.float32 | None]:
        rows, width = self.shape
        few = max(1, _READ // max(1, width))
        starts = range(0, rows, few)
        outer = None
        if self.scheme.outer:
            most = max(
                (float(abs(self._read(i, i + few)).max(initial=0)) for i in starts), default=0
            )
            outer = outer_factor(most)
        parts = [quantize(self._read(i, i + few), self.scheme, outer) for i in starts]
        return _joined(parts), outer

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Rows of the matrix in float32. Raises CheckpointError where one is no finite number."""
        rows, everything = slice(start, min(stop, self.shape[0])), slice(0, self.shape[1])
        index = (everything, rows) if self._transposed else (rows, everything)
        array = to_numpy(self._source.read(self._name, index)).astype(np.float32)
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"{self._name} of {self._source.description} has values that are no finite numbers "
                "(infinite or NaN), which no scale can hold. Mend the checkpoint, or load it "
                "without `quant`."
            )
        return np.ascontiguousarray(array.T) if self._transposed else array
