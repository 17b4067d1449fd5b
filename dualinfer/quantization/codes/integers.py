"""Integers of 4 and 8 bits."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .code import Code


@dataclass(frozen=True, kw_only=True)
class Integers(Code):
    """Codes that are their values."""

    @property
    def is_searched(self) -> bool:
        """True of those of few bits."""
        return self.bits < 8

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """See `Code`."""
        return codes.astype(np.float32)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """See `Code`."""
        values = values.clip(self.low, self.high)
        return np.rint(values, out=values).astype(self.dtype)

    def values(self, m: Any, held: Any, zeros: bool) -> Any:
        """See `Code`."""
        return m.wide(held) - self.raised if self.raised and not zeros else m.wide(held)

    def nearest(self, m: Any, a: Any) -> Any:
        """See `Code`."""
        return m.round(a)


INT4 = Integers(name="int4", bits=4, low=-8, high=7, signed=True, raised=8)
UINT4 = Integers(name="uint4", bits=4, low=0, high=15, has_zero=False)
INT8 = Integers(name="int8", bits=8, low=-128, high=127, signed=True)
UINT8 = Integers(name="uint8", bits=8, low=0, high=255, has_zero=False)
