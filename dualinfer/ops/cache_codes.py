"""Turn keys and values into codes of 8 bits and back: those of a head share one scale."""

from typing import Any

from .maths import Maths

LARGEST = {"fp8_e4m3": 448.0, "int8": 127.0}  # the value of a head's largest element
LEAST = 2.0**-100  # a head whose scale would be below is zero, whatever a device does near 0


def encode(m: Maths, x: Any, codes: str) -> tuple[Any, Any]:
    """Codes [..., D] of heads x [..., D], and their scales float32 [...].

    A head's largest magnitude has the largest code. Divisions are those of float32, codes the
    nearest, ties to even.
    """
    largest = LARGEST[codes]
    wide = m.rounded(m.wide(x), x.dtype)
    scale = m.quotient(m.most(abs(wide)), largest)
    scale = m.where(scale < LEAST, 0.0, scale)
    a = m.clip(m.quotient(wide, m.where(scale == 0, 1.0, scale)), -largest, largest)
    return m.as_codes(a, codes), scale[..., 0]


def values(m: Maths, data: Any, scale: Any) -> Any:
    """float32 [..., D] that codes [..., D] mean by scales float32 [...]."""
    is_float = str(data.dtype).endswith("uint8")
    wide = m.float8(data, "float8_e4m3fn") if is_float else m.wide(data)
    return wide * scale[..., None]


def kept(m: Maths, x: Any, codes: str) -> Any:
    """float32 heads [..., D] as codes keep x [..., D]."""
    return values(m, *encode(m, x, codes))
