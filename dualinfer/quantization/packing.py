"""The order of codes on a device: a byte each, or two of four bits to a byte.

Nibbles lie in the order in which kernels of both toolchains read them: within 32 columns, as four
little-endian words of 32 bits, nibble j of word c is column 4 j + c.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

COLUMNS = 32  # whose codes lie together: a part of a row may begin at a multiple of it


class Packing(Protocol):
    """A way in which rows of codes lie. 32 columns are whole bytes; rows end with such."""

    def width(self, columns: int) -> int:
        """Bytes that hold a row of as many codes."""
        ...

    def pack(self, codes: np.ndarray, raised: int) -> np.ndarray:
        """NumPy's codes [n, columns], each `raised` by so much, as a device holds them.

        Behind them come codes of zero, up to a multiple of 32.
        """
        ...

    def unpack(self, packed: Any, stack: Callable[[list[Any], int], Any]) -> Any:
        """The codes, uint8 [..., columns rounded up to 32]; `stack` is the backend's."""
        ...

    def padding(self, raised: int) -> int:
        """The byte of which columns of zero consist."""
        ...


class _Bytes:
    """A code to a byte: rows lie as they are."""

    def width(self, columns: int) -> int:
        return columns

    def pack(self, codes: np.ndarray, raised: int) -> np.ndarray:
        return codes

    def unpack(self, packed: Any, stack: Callable[[list[Any], int], Any]) -> Any:
        return packed

    def padding(self, raised: int) -> int:
        return raised


class _Nibbles:
    """Two codes of four bits to a byte."""

    def width(self, columns: int) -> int:
        return -(-columns // COLUMNS) * COLUMNS // 2

    def pack(self, codes: np.ndarray, raised: int) -> np.ndarray:
        count, columns = codes.shape
        wide = np.full((count, 2 * self.width(columns)), raised, np.uint8)
        np.add(codes.view(np.uint8), np.uint8(raised), out=wide[:, :columns])
        words = wide.view(np.uint32).reshape(-1, 4, 2)
        pairs = (words[..., 0] | (words[..., 1] << 4)).view(np.uint8).reshape(-1, 4, 4)
        packed = np.empty_like(pairs)
        for i in range(4):
            for j in range(4):  # each a long row, along which NumPy is fast
                packed[:, i, j] = pairs[:, j, i]
        return packed.reshape(count, self.width(columns))

    def unpack(self, packed: Any, stack: Callable[[list[Any], int], Any]) -> Any:
        *lead, width = packed.shape
        pairs = packed.reshape(*lead, 2 * width // COLUMNS, 4, 4).swapaxes(-1, -2)
        return stack([pairs & 15, pairs >> 4], -2).reshape(*lead, 2 * width)

    def padding(self, raised: int) -> int:
        return raised * 0x11


BYTES: Packing = _Bytes()
NIBBLES: Packing = _Nibbles()
