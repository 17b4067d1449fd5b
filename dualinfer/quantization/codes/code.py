"""Describe a code: its bits, its range, how rows of it are packed, and what its codes mean."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..packing import BYTES, NIBBLES, Packing


@dataclass(frozen=True, kw_only=True)
class Code(ABC):
    """One kind of codes.

    `low` and `high` are the least and the most value before zero points and scales. A code on its
    own is a byte, int8 if the code is `signed`, else uint8. A device holds it `raised` by so much,
    as its zero points. `has_zero`: a code of zero bits is zero, whatever its scale is. Kernels know
    a code by its name, and plain ops compute with those that they do not know.
    """

    name: str
    label: str = ""  # for people, where the name says too little
    bits: int
    low: float
    high: float
    signed: bool = False
    raised: int = 0
    has_zero: bool = True
    is_float: bool = False
    power: float = 1.0  # the largest power of two that is a value, for scales that are powers

    @property
    def packing(self) -> Packing:
        """The way in which rows of codes lie on a device."""
        return BYTES if self.bits == 8 else NIBBLES

    @property
    def dtype(self) -> np.dtype:
        """NumPy's dtype of a code on its own."""
        return np.dtype(np.int8 if self.signed else np.uint8)

    @property
    def stored(self) -> str:
        """NumPy's name of the dtype in which a device holds codes: packed ones are bytes."""
        return self.dtype.name if self.bits == 8 else "uint8"

    @property
    def is_searched(self) -> bool:
        """True if scales are searched when a matrix is quantized: there are few codes to a row."""
        return False

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """NumPy's codes [n, columns], a byte each, as a device holds them."""
        return codes if self.packing is BYTES else self.packing.pack(codes, self.raised)

    def unpack(self, held: np.ndarray) -> np.ndarray:
        """The codes, a byte each, of rows that `pack` packed, and of the padding behind them."""
        if self.packing is BYTES:
            return held
        return (self.packing.unpack(held, np.stack) - np.uint8(self.raised)).view(self.dtype)

    @abstractmethod
    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float32 values of codes, a byte each, before zero points and scales."""

    @abstractmethod
    def encode(self, values: np.ndarray) -> np.ndarray:
        """The codes nearest to float32 values, a byte each, ties to even; beyond `high` its end."""

    @abstractmethod
    def values(self, m: Any, held: Any, zeros: bool) -> Any:
        """float32 values of an array of unpacked codes, as a device holds them, over `Maths` m.

        With `zeros` they stay raised, as the zero points beside them are.
        """

    @abstractmethod
    def nearest(self, m: Any, a: Any) -> Any:
        """The values nearest to an array between `low` and `high`, ties to even, over `Maths` m."""
