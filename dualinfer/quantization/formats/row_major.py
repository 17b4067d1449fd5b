"""Matrices whose codes lie row after row, in bytes, halves of bytes, or words of 32 bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ...arrays import numpy_dtype
from ..scheme import BlockScheme
from .stored import ALL, FLOATS, Checkpoint, StoredMatrix, blocks

E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"
POWERS = (E8M0, "uint8")  # dtypes of scales that are powers of two: their exponents
FP8 = {E4M3: "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


@dataclass(frozen=True)
class Factor:
    """A stored number of the whole matrix or of its input; `inverse` if what counts is 1 / it."""

    name: str
    inverse: bool = False


class Codes(NamedTuple):
    """The tensor of codes of `bits` each, packed if those are 4, the first in the lowest bits.

    Those that are `raised` are stored higher than they are by so much.
    """

    name: str
    bits: int = 8
    raised: int = 0


class Scales(NamedTuple):
    """The tensor of scales, of one of these `dtypes`, and the numbers beside it.

    `outer` is one of the whole matrix, and `of_input` that of its input.
    """

    name: str
    dtypes: Sequence[str] = FLOATS
    outer: Factor | None = None
    of_input: Factor | None = None


class RowMajor(StoredMatrix):
    """Codes [out, in] with a scale for each block.

    `place` is the matrix's own number where the tensors hold several. Scales have one axis for
    blocks of rows and one for blocks of columns; a file may lack that of columns where all of a row
    have one scale.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shape: tuple[int, int],
        scheme: BlockScheme,
        codes: Codes,
        scales: Scales,
        *,
        place: int | None = None,
        unused: Sequence[str] = (),
    ):
        n, k = shape
        scale = scales.name
        rows = 0 if scheme.rows >= n else scheme.rows
        columns = 0 if scheme.columns >= k else scheme.columns
        self._from, self._data, self._scale, self._place = checkpoint, codes.name, scale, place
        self._bits, self._raised = codes.bits, codes.raised
        self._outer, self._input = scales.outer, scales.of_input
        self.shape = shape
        factors = [f for f in (scales.outer, scales.of_input) if f is not None]
        self.stored = (codes.name, scale, *(f.name for f in factors), *unused)
        found = checkpoint.check(scale, scales.dtypes)[0 if place is None else 1 :]
        self._blocks = (blocks(n, rows), scheme.groups or blocks(k, columns))
        if not lies_as(found, self._blocks):
            raise checkpoint.error(
                f"{scale} has the shape {found} for {n} x {k} codes, expected {self._blocks}."
            )
        for factor in factors:
            size = checkpoint.check(factor.name, FLOATS)
            if any(s != 1 for s in size):
                raise checkpoint.error(f"{factor.name} has the shape {size}, expected one number.")
        dtype = checkpoint.source.dtype(scale)
        self.scheme = replace(
            scheme,
            rows=rows,
            columns=columns,
            scale_dtype=E8M0 if dtype == "uint8" else dtype,  # type: ignore[arg-type]
        )

    def _read(self, name: str, *index: slice) -> np.ndarray:
        """A part of what the tensor holds of this matrix."""
        if self._place is None:
            return self._from.read(name, *index)
        rest = (ALL,) * (len(self._from.source.shape(name)) - 1 - len(index))
        own = slice(self._place, self._place + 1)
        return self._from.read(name, own, *index, *rest)[0]

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        bits = self._bits
        start, stop, _ = columns.indices(self.shape[1])
        held = 8 * numpy_dtype(self._from.source.dtype(self._data)).itemsize // bits
        if len(self._from.source.shape(self._data)) > 3:  # with an axis of blocks
            held *= self._from.source.shape(self._data)[-1]
        first = start // held
        items = self._read(self._data, rows, slice(first, blocks(stop, held)))
        octets = np.ascontiguousarray(items.reshape(len(items), -1)).view(np.uint8)
        if bits == 4:
            codes = np.empty((*octets.shape, 2), np.uint8)
            codes[..., 0], codes[..., 1] = octets & 15, octets >> 4
            octets = codes.reshape(len(octets), 2 * octets.shape[1])
        taken = octets[:, start - first * held : stop - first * held]
        codes = taken - np.uint8(self._raised % 256)
        return codes.view(self.scheme.code.dtype)

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        values = self._read(self._scale)
        if values.dtype == np.uint8:
            values = values.view(ml_dtypes.float8_e8m0fnu)
        return self._from.finite(self._scale, values).reshape(self._blocks)

    def _number(self, factor: Factor) -> np.float32:
        value = np.float32(self._from.scale(factor.name, FLOATS).reshape(-1)[0])
        if not value > 0:
            raise self._from.error(f"{factor.name} is {value}, expected a positive number.")
        return np.float32(1) / value if factor.inverse else value

    def outer(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        if self._outer is None:
            return None
        return np.full(self.shape[0], self._number(self._outer), np.float32)

    def input_scale(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return None if self._input is None else np.asarray(self._number(self._input))


def lies_as(found: Sequence[int], blocks: tuple[int, int]) -> bool:
    """True if an array of that shape has an element for each of the blocks [rows, columns].

    ModelOpt's have an axis of one element behind each.
    """
    forms: list[tuple[int, ...]] = [blocks, (blocks[0], 1, blocks[1], 1)]
    if blocks[1] == 1:
        forms += [blocks[:1]]
    if blocks == (1, 1):
        forms += [()]
    return tuple(found) in forms


def matrix_shape(checkpoint: Checkpoint, name: str, dtypes: Sequence[str]) -> tuple[int, int]:
    """The shape of a tensor that must be there, of one of `dtypes`, and be a matrix."""
    shape = checkpoint.check(name, dtypes)
    if len(shape) != 2 or 0 in shape:
        raise checkpoint.error(f"{name} has the shape {shape}, expected a matrix.")
    return shape[0], shape[1]
