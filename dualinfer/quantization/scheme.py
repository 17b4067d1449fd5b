"""What a scheme is: the tensors that stand in a weight's place, and the matrix that they mean."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np


class Stored(NamedTuple):
    """One tensor that a checkpoint holds in a weight's place.

    `part` is the field of `Weight` that it becomes: data, scale or zero. `axes` are in the order of
    the file, and names of the weight's own; `dtypes` are NumPy's names of those that it may have.
    """

    part: str
    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]


class Scheme(Protocol):
    """One way to hold a matrix in fewer bits: frozen data, equal where all of its numbers are.

    Parts have axes of their own, so that each is cut, joined and stacked by those that it has: a
    scale for each row is cut with the rows, and copied where the columns are cut. All of zero bits
    in `data` and `scale` means zeros, with which a device's share may be padded.
    """

    @property
    def name(self) -> str:
        """What people read, and the key of its arithmetic in a backend's table."""
        ...

    def stored(self, name: str, axes: tuple[str, ...]) -> tuple[Stored, ...]:
        """What a checkpoint holds in the place of HF's weight `name`; its data first.

        `axes` are the weight's, outputs before inputs, whatever HF's own layout is.
        """
        ...

    def shape(self, data: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the matrix whose `data` has this shape."""
        ...

    def dequantize(self, data: np.ndarray, scale: Any, zero: Any) -> np.ndarray:
        """The matrix in float32: what the scheme means, of a weight's arrays or None."""
        ...


# The scheme of HF's weight of a name; None where it is stored as it is.
Choose = Callable[[str], Scheme | None]


Codes = Literal["int4", "uint4", "int8", "uint8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "table"]
ScaleDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu"]


@dataclass(frozen=True)
class Activation:
    """How the input of a product is quantized: to `codes`, symmetrically but for `zeros`.

    `dynamic` scales come from the input, one for `block` columns of a token (0: for all of them);
    others are the checkpoint's, one for the whole input. With `outer` a block's scale is rounded
    to float8_e4m3fn beside the checkpoint's own factor of the whole input (NVFP4).
    """

    codes: Codes
    dynamic: bool = True
    block: int = 0
    zeros: bool = False
    outer: bool = False


@dataclass(frozen=True)
class BlockScheme:
    """Codes of a matrix [out N, in K] with a scale for each block of `rows` x `columns`.

    0 rows or columns are all of them. An element is (code - zero) * scale, times `outer`'s factor
    of its row. With `groups` (act-order) column k has scale number group[k] of as many, wherever it
    lies. `table` are the values of the codes where `codes` is "table".
    """

    codes: Codes
    rows: int = 1
    columns: int = 0
    scale_dtype: ScaleDtype = "float32"
    zeros: bool = False
    outer: bool = False
    groups: int = 0
    table: tuple[float, ...] = ()
    activation: Activation | None = None


class QuantizedMatrix(Protocol):
    """One matrix [out N, in K] as a checkpoint or a quantizer gives it, in canonical parts.

    Nothing is read before it is asked for. `stored` are the names of the tensors that it takes.
    """

    scheme: BlockScheme
    shape: tuple[int, int]
    stored: tuple[str, ...]

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """Codes [n, k] of a part, one byte each: int8 of signed ones, else uint8."""
        ...

    def scale(self) -> np.ndarray:
        """[blocks of rows, blocks of columns], in the scheme's dtype."""
        ...

    def zero(self) -> np.ndarray | None:
        """Codes that mean zero, as `scale`; None where that is code 0."""
        ...

    def group(self) -> np.ndarray | None:
        """Of act-order: the column of `scale` that each column of the matrix has, int32 [K]."""
        ...

    def outer(self) -> np.ndarray | None:
        """A second factor of each row, float32 [N]."""
        ...

    def input_scale(self) -> np.ndarray | None:
        """The scale of the product's input where that is the checkpoint's, float32 ()."""
        ...
