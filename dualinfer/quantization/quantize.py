"""Quantizing: from the rows of a matrix to codes and scales, the same for both backends.

Scales are those of the largest value in a block (compressed-tensors' min-max), but for codes of
integers of 4 bits: there a search takes the scale of least squared error, never above min-max's.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from ..arrays import numpy_dtype, to_numpy
from ..errors import CheckpointError
from .meaning import dequantize
from .scheme import Activation, BlockScheme

T = TypeVar("T")

# By the short names; scales have the dtype of the weights, but for those of 4-bit floats.
SCHEMES = {
    "int8": BlockScheme("int8"),
    "int4": BlockScheme("int4", columns=64),
    "fp8": BlockScheme("fp8_e4m3"),
    "int8_w8a8": BlockScheme("int8", activation=Activation("int8")),
    "fp8_w8a8": BlockScheme("fp8_e4m3", activation=Activation("fp8_e4m3")),
    "nvfp4": BlockScheme("fp4_e2m1", columns=16, scale_dtype="float8_e4m3fn", outer=True),
    "mxfp4": BlockScheme("fp4_e2m1", columns=32, scale_dtype="float8_e8m0fnu"),
}
_AT_ONCE = 1 << 18  # elements that are quantized at once, with what is tried: they stay in caches
_THREADS = min(16, os.cpu_count() or 1)
_SHRUNK = (15 / 14, 0.93, 0.86, 0.79)  # of min-max's scale, tried beside it
_REFINED = 1  # times that the best scale for given codes is tried
_SHORT = 16  # columns
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


def quantize(
    rows: np.ndarray,
    scheme: BlockScheme,
    outer: np.float32 | None = None,
    columns: slice = slice(None),
) -> Quantized:
    """The canonical parts of rows [n, K] of floats by a scheme with a scale for each row or group.

    `outer` is the matrix' second factor, of a scheme that has one. Scales of whole rows serve the
    `columns` of them that are quantized. Raises FloatingPointError where a value is no finite
    number.
    """
    assert scheme.rows == 1 and not scheme.groups and (outer is not None) == scheme.outer
    how = _Quantizer(scheme, outer)
    count, width = rows.shape
    size = scheme.columns or max(width, 1)
    groups = -(-width // size)
    start, stop, _ = columns.indices(width)
    assert not scheme.columns or (start, stop) == (0, width)
    codes = np.empty((count, stop - start), scheme.code.dtype)
    scale = np.empty((count, groups), how.dtype)
    zero = np.empty((count, groups), codes.dtype) if scheme.zeros else None
    few = max(1, min(count, _AT_ONCE // max(1, groups * size)))
    spaces = np.zeros((3, few, groups, size), np.float32)
    for i in range(0, count, few):
        part = slice(i, i + few)
        x, one, two = spaces[:, : len(rows[part])]
        x.reshape(len(x), -1)[:, :width] = rows[part]
        scale[part], its_zero = scales = how.scales(x, one, two)
        if not scheme.columns:
            x, one = x[..., start:stop], one[..., start:stop]
        values = how.divided(x, *scales, one).reshape(len(x), -1)[:, : stop - start]
        codes[part] = scheme.code.encode(values)
        if zero is not None:
            zero[part] = its_zero
    return Quantized(codes, scale, zero)


def largest_size(rows: np.ndarray) -> float:
    """The largest size of elements. Raises FloatingPointError where one is no finite number."""
    few = max(1, _AT_ONCE // max(1, rows.shape[1]))
    blocks = (rows[i : i + few].astype(np.float32) for i in range(0, len(rows), few))
    sizes = [np.abs(block, out=block).max(initial=0) for block in blocks]
    if not np.isfinite(sizes).all():
        raise FloatingPointError
    return float(max(sizes, default=0))


class _Quantizer:
    """The search for a scheme's scales, in float32 throughout."""

    def __init__(self, scheme: BlockScheme, outer: np.float32 | None) -> None:
        self.dtype = numpy_dtype(scheme.scale_dtype)
        self._scheme, self._outer = scheme, outer
        self._low, self._high = scheme.code.low, scheme.code.high
        self._epsilon = _epsilon(self.dtype)

    def scales(
        self, x: np.ndarray, one: np.ndarray, two: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Scales and zeros of x [n, groups, columns]; `one` and `two` are space of x's shape."""
        if self._scheme.zeros:
            most = np.maximum(_along(np.maximum, x), 0)
            least = np.minimum(_along(np.minimum, x), 0)
            size = (most - least) / (self._high - self._low)
        else:
            most = _along(np.maximum, np.abs(x, out=one))
            least, size = -most, most / np.float32((self._high - self._low) / 2)
        if not (np.isfinite(least).all() and np.isfinite(most).all()):
            raise FloatingPointError
        if self._scheme.scale_dtype == "float8_e8m0fnu":
            return _power_of_two(most, self._scheme.code.power), None
        scale = self._held(size if self._outer is None else size / self._outer)
        zero = self._zero(least, scale, 1.0)
        if self._scheme.code.is_searched:
            return self._searched(x, least, scale, zero, one, two)
        return scale, zero

    def _held(self, scale: np.ndarray) -> np.ndarray:
        """Scales as they are held, in float32; a small number in the place of zero."""
        rounded = scale.clip(0, 448) if self.dtype.itemsize == 1 else scale
        rounded = rounded.astype(self.dtype).astype(np.float32)
        return np.where(rounded == 0, self._epsilon, rounded)

    def _zero(self, least: np.ndarray, scale: np.ndarray, shrunk: float) -> np.ndarray | None:
        """Zeros, where `shrunk` is how much the range shrank."""
        if not self._scheme.zeros:
            return None
        return np.rint(self._low - shrunk * least / scale).clip(self._low, self._high)

    def divided(
        self, x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, out: np.ndarray
    ) -> np.ndarray:
        """The values to be rounded to codes."""
        by = scale if self._outer is None else scale * self._outer
        np.divide(x, by[..., None], out=out)
        return out if zero is None else np.add(out, zero[..., None], out=out)

    def _searched(
        self,
        x: np.ndarray,
        least: np.ndarray,
        start: np.ndarray,
        zero: np.ndarray | None,
        one: np.ndarray,
        two: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Scales and zeros of the least squared error among those tried, min-max's first.

        All operations are in place: what they need stays in a core's cache.
        """

        def plain(scale: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
            """Codes less zeros, in `one`."""
            codes = self.divided(x, scale, zero, one)
            np.rint(codes.clip(self._low, self._high, out=codes), out=codes)
            return codes if zero is None else np.subtract(codes, zero[..., None], out=codes)

        def error(scale: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
            left = np.multiply(plain(scale, zero), scale[..., None], out=two)
            np.subtract(x, left, out=left)
            return np.einsum("ngc,ngc->ng", left, left)

        scale, best = start, error(start, zero)

        def keep(tried: np.ndarray, its_zero: np.ndarray | None) -> None:
            nonlocal scale, zero, best
            its_error = error(tried, its_zero)
            better = its_error < best
            scale, best = np.where(better, tried, scale), np.where(better, its_error, best)
            if zero is not None and its_zero is not None:
                zero = np.where(better, its_zero, zero)

        for factor in _SHRUNK:
            if zero is None or factor < 1:
                tried = self._held(factor * start)
                keep(tried, self._zero(least, tried, factor))
        for _ in range(_REFINED):
            codes = plain(scale, zero)
            squares = np.einsum("ngc,ngc->ng", codes, codes)
            fitted = np.einsum("ngc,ngc->ng", x, codes) / np.where(squares == 0, 1, squares)
            keep(self._held(np.where(fitted > 0, fitted, scale)), zero)
        return scale, zero


def _power_of_two(most: np.ndarray, largest: float) -> np.ndarray:
    """The scale of codes whose largest value is `most`; `largest` is their largest power of two.

    It is float32, of fp4 from 2**-127 to 2**125. As compressed-tensors has it: what is largest
    becomes 3.5 to 7 scales of fp4, of which 6 can be said.
    """
    power = (most.view(np.uint32) + np.uint32(1 << 21)) & np.uint32(0x7F800000)
    return np.clip(power.view(np.float32), 2.0**-125, 2.0**127) / np.float32(largest)


def _along(fold: np.ufunc, x: np.ndarray) -> np.ndarray:
    """`fold` of x [n, groups, columns] along its columns."""
    if x.shape[-1] > _SHORT:
        return fold.reduce(x, -1)
    columns = iter(np.moveaxis(x, -1, 0))  # NumPy is slow along short rows
    made = next(columns).copy()
    for column in columns:
        fold(made, column, out=made)
    return made


def _epsilon(dtype: np.dtype) -> np.float32:
    """The value in place of a scale of zero, as in compressed-tensors: the dtype's epsilon."""
    return np.float32(ml_dtypes.finfo(dtype).eps)


class _Part(NamedTuple):
    """Rows and columns of a matrix, by their bounds."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    def holds(self, other: "_Part") -> bool:
        """True if all of the other part lies in this one."""
        pairs = zip(self, other, strict=True)
        return all((a <= c and d <= b) or c == d for (a, b), (c, d) in pairs)

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns[1] - self.columns[0]


class Recent:
    """The results quantized last, as readers ask for codes and scales one after another.

    One matrix at a time is quantized, by all threads. Its codes are as they will be held, those of
    4 bits packed. What is taken goes.
    """

    def __init__(self, most: int = 4) -> None:
        self.lock = threading.Lock()
        self._most = most  # of those that have their codes
        self._made: dict[tuple[Any, _Part], Quantized] = {}  # the last one is last

    def get(self, matrix: Any, part: _Part, what: str) -> tuple[_Part, Quantized] | None:
        """The result that holds a part of a matrix, with its codes, scales or zeros; or None."""
        for (own, larger), made in self._made.items():
            if own is matrix and larger.holds(part) and getattr(made, what) is not _TAKEN:
                self.put(matrix, larger, made)
                return larger, made
        return None

    def put(self, matrix: Any, part: _Part, made: Quantized) -> None:
        """Hold it; those unused for longest go."""
        self._made.pop((matrix, part), None)
        if any(array is not _TAKEN and array is not None for array in made):
            self._made[matrix, part] = made
        whole = [key for key, made in self._made.items() if made.codes is not _TAKEN]
        for key in (*whole[: -self._most], *list(self._made)[:-_SCALES]):
            self._made.pop(key, None)


_SCALES = 32  # matrices of which anything is held
_TAKEN = np.empty((0, 0), np.uint8)  # in the place of what was taken
_READ = 1 << 18  # elements that a thread reads at a time
_SLAB = 1 << 24  # and of a transposed tensor: a few rows take as long to read as many


class Quantizing:
    """A QuantizedMatrix of a plain tensor of a TensorSource, quantized when it is asked for.

    The matrix is the tensor, or its transpose where the tensor is [in, out] (`transposed`). Scales
    have the tensor's dtype, unless they are of 8 bits. Only the rows that are asked for are read
    and quantized, and of their columns the groups that have one of those asked for; where a row has
    one scale, all of it is read, and where there is a second factor, all rows are. Codes and scales
    come from one pass, in which each thread reads few rows at a time, and stay in `recent` until
    others are asked for.
    """

    inputs_first = False

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
        self._factor: np.float32 | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix as it is stored."""
        return self.shape[0] * self.shape[1] * numpy_dtype(self._source.dtype(self._name)).itemsize

    def error(self) -> tuple[float, float]:
        """The sums of squares of what quantizing takes away, and of the matrix itself."""
        values = dequantize(self)

        def sums(i: int, rows: np.ndarray) -> tuple[float, float]:
            whole = rows.astype(np.float64)
            lost = values[i : i + len(rows)] - whole
            return float((lost**2).sum()), float((whole**2).sum())

        lost, whole = zip(*self._spread(sums, (0, self.shape[0]), (0, self.shape[1])), strict=True)
        return sum(lost), sum(whole)

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        part = self._part(rows, columns)
        with self._recent.lock:
            ((first, _), (start, _)), made = self._made(part, "codes")
        held = made.codes[part.rows[0] - first : part.rows[1] - first]
        held = self.scheme.code.unpack(held)
        return held[:, part.columns[0] - start : part.columns[1] - start]

    def take(self, rows: slice, columns: slice) -> np.ndarray | None:
        """Codes of a part as they are held, which are then held here no longer.

        None where the part ends within a group.
        """
        part = self._part(rows, columns)
        if self._grown(part) != part:
            return None
        with self._recent.lock:
            own, made = self._made(part, "codes")
            if own != part:
                return None
            self._recent.put(self, part, made._replace(codes=_TAKEN))
        return made.codes

    def take_blocks(self, what: str, rows: slice, blocks: slice) -> np.ndarray:
        """Scales or zeros of rows, and of blocks of their columns by number.

        They are then held here no longer, if no others are.
        """
        return self._blocks(what, rows, blocks, take=True)

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        return self._blocks("scale", slice(None), slice(None))

    def zero(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return self._blocks("zero", slice(None), slice(None)) if self.scheme.zeros else None

    def group(self) -> None:
        """None: columns stay where they are."""

    def outer(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        if not self.scheme.outer:
            return None
        with self._recent.lock:
            return np.full(self.shape[0], self._outer(), np.float32)

    def input_scale(self) -> None:
        """None: inputs have no scale of their own here."""

    def _part(self, rows: slice, columns: slice) -> _Part:
        return _Part(rows.indices(self.shape[0])[:2], columns.indices(self.shape[1])[:2])

    def _grown(self, part: _Part) -> _Part:
        """The part up to where groups end: those of a search, and of no columns, are all."""
        (start, stop), size, width = part.columns, self.scheme.columns, self.shape[1]
        if size:
            start, stop = start // size * size, min(-(-stop // size) * size, width)
        elif self.scheme.code.bits < 8 or start == stop:
            start, stop = 0, width
        return part._replace(columns=(start, stop))

    def _blocks(self, what: str, rows: slice, blocks: slice, take: bool = False) -> np.ndarray:
        size = self.scheme.columns
        first, last, _ = blocks.indices(-(-self.shape[1] // size) if size else 1)
        part = self._part(rows, slice(first * size, last * size))
        with self._recent.lock:
            own, made = self._made(part, what)
            (top, _), (start, _) = own
            before, held = start // size if size else 0, getattr(made, what)
            at = slice(part.rows[0] - top, part.rows[1] - top), slice(first - before, last - before)
            if take and held[at].size == held.size:
                self._recent.put(self, own, made._replace(**{what: _TAKEN}))
        return held[at]

    def _made(self, part: _Part, what: str) -> tuple[_Part, Quantized]:
        """The result that holds a part, quantized; to be called with the lock held."""
        found = self._recent.get(self, part, what)
        if found is None:
            part = self._grown(part)
            found = part, self._make(part)
            self._recent.put(self, *found)
        return found

    def _make(self, part: _Part) -> Quantized:
        """Quantize a part that ends where groups do."""
        scheme, outer = self.scheme, self._outer() if self.scheme.outer else None
        (first, last), (start, stop) = part
        groups = -(-part.width // scheme.columns) if scheme.columns else 1
        code = scheme.code
        codes = np.empty((last - first, code.packing.width(part.width)), code.stored)
        scale = np.empty((last - first, groups), numpy_dtype(scheme.scale_dtype))
        zero = np.empty(scale.shape, code.dtype) if scheme.zeros else None
        whole = not scheme.columns  # rows have one scale each, which no part of them tells
        read, own = (0, self.shape[1]) if whole else (start, stop), slice(start, stop)

        def work(number: int, rows: np.ndarray) -> None:
            made = self._checked(quantize, rows, scheme, outer, own if whole else slice(None))
            at = slice(number - first, number - first + len(rows))
            codes[at] = code.pack(made.codes)
            scale[at] = made.scale
            if zero is not None:
                zero[at] = made.zero

        self._spread(work, part.rows, read)
        return Quantized(codes, scale, zero)

    def _outer(self) -> np.float32:
        """The second factor, of all of the matrix; to be called with the lock held."""
        if self._factor is None:

            def largest(_: int, rows: np.ndarray) -> float:
                return self._checked(largest_size, rows)

            every = self._spread(largest, (0, self.shape[0]), (0, self.shape[1]))
            self._factor = outer_factor(max(every, default=0.0))
        return self._factor

    def _spread(
        self, work: Callable[[int, np.ndarray], T], rows: tuple[int, int], columns: tuple[int, int]
    ) -> list[T]:
        """`work` of the number of a row, and of it and others as they are stored, in threads."""
        first, last = rows
        few = max(1, _READ // max(1, self.shape[1]))
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="dualinfer-quantize") as pool:
            if not self._transposed:

                def read(i: int) -> T:
                    return work(i, self._read(i, min(i + few, last), columns))

                return [*pool.map(read, range(first, last, few))]  # NumPy leaves Python's lock
            made: list[T] = []
            slab = max(few, _SLAB // max(1, self.shape[1]))
            for start in range(first, last, slab):
                held = self._read(start, min(start + slab, last), columns)
                parts = [(start + i, held[i : i + few]) for i in range(0, len(held), few)]
                made += pool.map(lambda part: work(*part), parts)
            return made

    def _read(self, start: int, stop: int, columns: tuple[int, int]) -> np.ndarray:
        """A part of the matrix, as it is stored."""
        rows, wide = slice(start, stop), slice(*columns)
        index = (wide, rows) if self._transposed else (rows, wide)
        array = to_numpy(self._source.read(self._name, index))
        return array.T if self._transposed else array

    def _checked(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of rows. Raises CheckpointError where a value is no finite number."""
        try:
            return function(*args)
        except FloatingPointError:
            raise CheckpointError(
                f"{self._name} of {self._source.description} has values that are no finite numbers "
                "(infinite or NaN), which no scale can hold. Mend the checkpoint, or load it "
                "without `quant`."
            ) from None
