"""What a scheme is: the tensors that stand in a weight's place, and the matrix that they mean."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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
