"""Codes of four bits, two to a byte, in the order in which kernels of both toolchains read them.

Within 32 columns, as four little-endian words of 32 bits, nibble j of word c is column 4 j + c.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .scheme import BlockScheme

_COLUMNS = 32  # that are packed together, into 16 bytes


def packed_width(columns: int) -> int:
    """Bytes that hold a row of as many codes."""
    return -(-columns // _COLUMNS) * _COLUMNS // 2


def held_width(scheme: BlockScheme, columns: int) -> int:
    """Bytes of a row of as many codes, as a device holds them."""
    return columns if scheme.bits == 8 else packed_width(columns)


def pack(codes: np.ndarray, scheme: BlockScheme) -> np.ndarray:
    """NumPy's codes [n, columns] as a device holds them: those of 4 bits packed.

    Behind them come codes of zero, up to a multiple of 32.
    """
    if scheme.bits == 8:
        return codes
    count, columns = codes.shape
    wide = np.full((count, 2 * packed_width(columns)), raised(scheme), np.uint8)
    np.add(codes.view(np.uint8), np.uint8(raised(scheme)), out=wide[:, :columns])
    words = wide.view(np.uint32).reshape(-1, 4, 2)
    pairs = (words[..., 0] | (words[..., 1] << 4)).view(np.uint8).reshape(-1, 4, 4)
    packed = np.empty_like(pairs)
    for i in range(4):
        for j in range(4):  # each a long row, along which NumPy is fast
            packed[:, i, j] = pairs[:, j, i]
    return packed.reshape(count, packed_width(columns))


def unpack(packed: Any, stack: Callable[[list[Any], int], Any]) -> Any:
    """The codes, uint8 [..., columns rounded up to 32]; `stack` is the backend's."""
    *lead, width = packed.shape
    pairs = packed.reshape(*lead, 2 * width // _COLUMNS, 4, 4).swapaxes(-1, -2)
    return stack([pairs & 15, pairs >> 4], -2).reshape(*lead, 2 * width)


def raised(scheme: BlockScheme) -> int:
    """By how much held codes and zeros are higher than they are: signed ones of 4 bits by 8."""
    return 8 if scheme.codes == "int4" else 0


def padding(
    scheme: BlockScheme | None, part: str, pad: Callable[[Any, tuple[int, ...], int], Any]
) -> Callable[[Any, tuple[int, ...]], Any]:
    """Adds to a part of a weight, as it is held, codes of zero or else zeros, up to a shape.

    The shape counts elements. `pad` adds a value up to the shape of an array. A column of padding
    has a group of its own, by activation order, where a code of zero bits needs a scale of zero.
    """
    raise_by = raised(scheme) if scheme is not None and part in ("data", "zero") else 0
    if scheme is not None and part == "group" and not scheme.zero_code:
        raise_by = scheme.groups

    def padded(block: Any, shape: tuple[int, ...]) -> Any:
        if scheme is None or part != "data" or scheme.bits == 8:
            return pad(block, shape, raise_by)
        return pad(block, (*shape[:-1], packed_width(shape[-1])), raise_by * 0x11)

    return padded
