"""Codes of four bits, two to a byte, in the order in which kernels of both toolchains read them.

Within 32 columns, as four little-endian words of 32 bits, nibble j of word c is column 4 j + c.
"""

from collections.abc import Callable
from typing import Any

from .scheme import BlockScheme

_COLUMNS = 32  # that are packed together, into 16 bytes


def packed_width(columns: int) -> int:
    """Bytes that hold a row of as many codes."""
    return -(-columns // _COLUMNS) * _COLUMNS // 2


def pack(codes: Any) -> Any:
    """Codes 0 to 15, uint8 [..., columns], as bytes; of NumPy, torch or JAX.

    The columns are a multiple of 32: `packed_width` bytes, doubled.
    """
    *lead, columns = codes.shape
    parts = codes.reshape(*lead, columns // _COLUMNS, 4, 2, 4)
    pairs = parts[..., 0, :] | (parts[..., 1, :] << 4)
    return pairs.swapaxes(-1, -2).reshape(*lead, columns // 2)


def unpack(packed: Any, stack: Callable[[list[Any], int], Any]) -> Any:
    """The codes, uint8 [..., columns rounded up to 32]; `stack` is the backend's."""
    *lead, width = packed.shape
    pairs = packed.reshape(*lead, 2 * width // _COLUMNS, 4, 4).swapaxes(-1, -2)
    return stack([pairs & 15, pairs >> 4], -2).reshape(*lead, 2 * width)


def hold(
    scheme: BlockScheme | None,
    parts: dict[str, Any],
    pad: Callable[[Any, tuple[int, ...]], Any],
) -> dict[str, Any]:
    """A weight's arrays, cut, joined and padded, as a device holds them.

    Codes of 4 bits are packed, signed ones as code + 8. `pad` adds zeros up to a shape.
    """
    if scheme is None or scheme.bits == 8:
        return parts
    flip = 8 if scheme.codes == "int4" else 0
    held = dict(parts)
    if "zero" in parts:
        held["zero"] = parts["zero"] ^ flip
    if "data" in parts:
        *lead, columns = parts["data"].shape
        held["data"] = pack(pad(parts["data"], (*lead, 2 * packed_width(columns))) ^ flip)
    return held
