"""Describe a scheme: the codes and scales that stand in a weight's place, and what they mean."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from .codes import Code, code_of

ScaleDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu"]


@dataclass(frozen=True)
class Activation:
    """The quantization of a product's input: to `codes`, symmetrically but for `zeros`.

    `dynamic` scales come from the input, one for `block` columns of a token (0: for all of them);
    others are the checkpoint's, one for the whole input. With `outer` a block's scale is rounded
    to float8_e4m3fn beside the checkpoint's own factor of the whole input (NVFP4). With `powers` it
    is a power of two (MXFP4, MXFP8). An `inverse` scale is 127 over the largest value, at least
    1e-5, by which the input is multiplied, in float32 (`wide`) or rounded to its dtype (BitNet).
    """

    codes: str
    dynamic: bool = True
    block: int = 0
    zeros: bool = False
    outer: bool = False
    powers: bool = False
    inverse: Literal["wide", "rounded"] | None = None

    @property
    def name(self) -> str:
        """The name that people read."""
        kind = code_of(self.codes).label or self.codes
        how = "by the checkpoint's scale" if not self.dynamic else "for each token"
        if self.dynamic and self.block:
            how = f"in groups of {self.block}"
        elif self.inverse:
            how = "for each token, as BitNet's"
        return f"{kind} inputs {how}"


@dataclass(frozen=True)
class BlockScheme:
    """Codes of a matrix [out N, in K] with a scale for each block of `rows` x `columns`.

    `codes` names a row of `codes.CODES`, or is "table", whose values are those of `table`. 0 rows
    or columns are all of them. An element is (code - zero) * scale, times `outer`'s factor of its
    row. With `groups` (act-order) column k has scale number group[k] of as many, wherever it lies.
    """

    codes: str
    rows: int = 1
    columns: int = 0
    scale_dtype: ScaleDtype = "float32"
    zeros: bool = False
    outer: bool = False
    groups: int = 0
    table: tuple[float, ...] = ()
    activation: Activation | None = None

    def __post_init__(self) -> None:
        """Zeros of 8 bits are held without a sign, as codes beside them are."""
        assert not (self.zeros and self.code.stored == "int8")

    @property
    def code(self) -> Code:
        """The code itself: its bits, its range, its packing and its meaning."""
        return code_of(self.codes, self.table)

    @property
    def zero_code(self) -> bool:
        """True if a code of zero bits is zero by itself, whatever its scale is.

        int4 is read as two's complement and held as code + 8.
        """
        return not self.zeros and self.code.has_zero

    @property
    def name(self) -> str:
        """The name that people read."""
        parts = [self.code.label or self.codes]
        if self.groups:
            parts.append(f"{self.groups} groups by activation order")
        elif self.rows == 1:
            parts.append(f"groups of {self.columns}" if self.columns else "rows")
        elif self.rows or self.columns:
            sides = [str(n or "all") for n in (self.rows, self.columns)]
            parts.append(f"blocks of {' x '.join(sides)}")
        else:
            parts.append("one scale")
        if self.zeros:
            parts.append("zero points")
        if self.outer:
            parts.append("a second scale")
        if self.activation is not None:
            parts.append(self.activation.name)
        return ", ".join(parts)


def padding(
    scheme: BlockScheme | None, part: str, pad: Callable[[Any, tuple[int, ...], int], Any]
) -> Callable[[Any, tuple[int, ...]], Any]:
    """Adds to a part of a weight, as it is held, codes of zero or else zeros, up to a shape.

    The shape counts elements. `pad` adds a value up to the shape of an array. A column of padding
    has a group of its own, by activation order, where a code of zero bits needs a scale of zero.
    """
    fill = scheme.code.raised if scheme is not None and part in ("data", "zero") else 0
    if scheme is not None and part == "group" and not scheme.zero_code:
        fill = scheme.groups

    def padded(block: Any, shape: tuple[int, ...]) -> Any:
        if scheme is None or part != "data":
            return pad(block, shape, fill)
        packing = scheme.code.packing
        return pad(block, (*shape[:-1], packing.width(shape[-1])), packing.padding(fill))

    return padded


class Blocks(NamedTuple):
    """The form of a matrix on a device: what a scale serves, and the columns of a device's share.

    0 rows or columns are all of them.
    """

    rows: int = 0
    columns: int = 0
    width: int = 0


class QuantizedMatrix(Protocol):
    """One matrix [out N, in K] as a checkpoint or a quantizer gives it, in canonical parts.

    Nothing is read before it is asked for. `stored` are the names of the tensors that it takes.
    `inputs_first`: the codes are stored [in K, out N], so that few columns are read in less time
    than few rows.
    """

    inputs_first: bool
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


@runtime_checkable
class TakesBlocks(Protocol):
    """A matrix that gives some of its scales or zeros in less time than all of them."""

    def take_blocks(self, what: str, rows: slice, blocks: slice) -> np.ndarray:
        """The "scale" or "zero" of rows, and of blocks of their columns by number."""
        ...


# By HF's name of a weight: what a checkpoint holds in its place; None where it is stored as it is.
Matrices = Callable[[str], QuantizedMatrix | None]
