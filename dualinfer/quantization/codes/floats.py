"""Floats of 4 and 8 bits, which hardware and ml_dtypes know."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from .code import Code

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES_E2M1 = (*_SIZES, *(-size for size in _SIZES))  # of the codes in their order


@dataclass(frozen=True, kw_only=True)
class Floats8(Code):
    """Bytes that are floats, of which `kind` is the dtype's name in ml_dtypes and both backends."""

    kind: str

    @property
    def float_dtype(self) -> np.dtype:
        """NumPy's dtype that the bytes have."""
        return np.dtype(getattr(ml_dtypes, self.kind))

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """See `Code`."""
        return codes.view(self.float_dtype).astype(np.float32)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """See `Code`."""
        return _nearest(values, self.kind, self.low, self.high)

    def values(self, m: Any, held: Any, zeros: bool) -> Any:
        """See `Code`."""
        return m.float8(held, self.kind)

    def nearest(self, m: Any, a: Any) -> Any:
        """See `Code`."""
        return m.nearest_e4m3(a) if self.kind == "float8_e4m3fn" else m.round(a)


@dataclass(frozen=True, kw_only=True)
class Floats4(Code):
    """e2m1: a sign, two bits of an exponent and one of a fraction."""

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """See `Code`."""
        return np.array(VALUES_E2M1, np.float32)[codes]

    def encode(self, values: np.ndarray) -> np.ndarray:
        """See `Code`."""
        return _nearest(values, "float4_e2m1fn", self.low, self.high)

    def values(self, m: Any, held: Any, zeros: bool) -> Any:
        """See `Code`."""
        return m.table(VALUES_E2M1, held)

    def nearest(self, m: Any, a: Any) -> Any:
        """See `Code`."""
        size = abs(a)
        halves, wholes, twos = m.round(2 * a) / 2, m.round(a), 2 * m.round(a / 2)
        return m.where(size < 2, halves, m.where(size < 4, wholes, twos))


def _nearest(values: np.ndarray, kind: str, low: float, high: float) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Its upper half, made odd where something is cut off, rounds as the whole does.
    half = ((bits & 0xFFFF) + np.uint32(0xFFFF) | bits) >> 16
    return np.take(_by_half(kind, low, high), half.astype(np.uint16))


@cache
def _by_half(kind: str, low: float, high: float) -> np.ndarray:
    """The codes nearest to float32 by their upper 16 bits."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).clip(low, high)
    with np.errstate(invalid="ignore"):
        return values.astype(getattr(ml_dtypes, kind)).view(np.uint8)


E4M3 = Floats8(
    name="fp8_e4m3",
    label="fp8",
    kind="float8_e4m3fn",
    bits=8,
    low=-448,
    high=448,
    is_float=True,
    power=256.0,
)
E5M2 = Floats8(
    name="fp8_e5m2",
    label="fp8 (e5m2)",
    kind="float8_e5m2",
    bits=8,
    low=-57344,
    high=57344,
    is_float=True,
    power=32768.0,
)
E2M1 = Floats4(name="fp4_e2m1", label="fp4", bits=4, low=-6, high=6, is_float=True, power=4.0)
