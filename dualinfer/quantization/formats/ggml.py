"""The types of tensors in GGUF files, which are llama.cpp's: floats, and rows of blocks.

A block of Q8_0 or Q4_0 is a float16 scale and 32 codes, and stays so on a device. Other blocks have
a scheme of their own, and are made floats when they are read, by the package `gguf`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedError
from ..scheme import BlockScheme
from .stored import StoredMatrix

_GROUP, _SCALE = 32, 2  # codes and bytes of a scale in a block of Q8_0 or Q4_0
_AT_ONCE = 1 << 22  # bytes of blocks whose scales are picked out at a time


@dataclass(frozen=True)
class GgmlType:
    """A type: `nbytes` hold `elements` next to each other in a row.

    `dtype` is NumPy's name of the values that are read, `scheme` what the blocks are canonically.
    """

    name: str
    elements: int
    nbytes: int
    dtype: str = "float32"
    scheme: BlockScheme | None = None

    @property
    def is_plain(self) -> bool:
        """True for floats that lie there as they are."""
        return self.elements == 1


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2, "float16"),
    2: GgmlType("Q4_0", 32, 18, scheme=BlockScheme("int4", 1, _GROUP, "float16")),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34, scheme=BlockScheme("int8", 1, _GROUP, "float16")),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2, "bfloat16"),
}
_OTHERS = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


def find_type(number: int, file: object, tensor: str) -> GgmlType:
    """The type of that number; UnsupportedError names one that is not read."""
    found = TYPES.get(number)
    if found is None:
        name = _OTHERS.get(number, f"type {number}")
        raise UnsupportedError(
            f"{file}: {tensor} is {name}, which is not read here; these are: "
            f"{', '.join(own.name for own in TYPES.values())}. Take the model's file in one of "
            "them (Q4_K_M, Q8_0), or make one of the file in 16 bits by llama.cpp's "
            "llama-quantize."
        )
    return found


def values(kind: GgmlType, raw: np.ndarray) -> np.ndarray:
    """Blocks [..., blocks, bytes] as what they mean, float32 [..., elements], as `gguf` does."""
    if kind.scheme is not None:
        scale = _scales(raw).astype(np.float32)[..., None]
        found = _codes(kind, raw).astype(np.float32) * scale
        return found.reshape(*raw.shape[:-2], -1)
    flat = raw.reshape(*raw.shape[:-2], -1)
    with np.errstate(all="ignore"):  # what is no number is told where it is loaded
        return _dequantizer()(flat, kind.name)


@cache
def _dequantizer() -> Callable[[np.ndarray, str], np.ndarray]:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise CheckpointError(
            "A GGUF file with other types than F32, F16, BF16, Q8_0 and Q4_0 is read by the "
            "package gguf, which is not installed here. Run `pip install 'dualinfer[gguf]'`."
        ) from error
    return lambda raw, name: quants.dequantize(raw, GGMLQuantizationType[name])


def check_reader(kind: GgmlType) -> None:
    """Raise CheckpointError where the package that makes floats of a type is missing."""
    if not kind.is_plain and kind.scheme is None:
        _dequantizer()


def _scales(raw: np.ndarray) -> np.ndarray:
    """The float16 scales [..., blocks]."""
    return np.ascontiguousarray(raw[..., :_SCALE]).view(np.float16)[..., 0]


def _codes(kind: GgmlType, raw: np.ndarray) -> np.ndarray:
    """The codes int8 [..., blocks, 32]; of four bits the low halves of all bytes come first."""
    held = raw[..., _SCALE:]
    if kind.name == "Q8_0":
        return held.view(np.int8)
    return (np.concatenate([held & 15, held >> 4], axis=-1) - np.uint8(8)).view(np.int8)


class BlockMatrix(StoredMatrix):
    """A matrix [out, in] of Q8_0 or Q4_0.

    `read(rows, blocks)` gives the bytes of a part, [rows, blocks of the row, bytes of a block].
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        kind: GgmlType,
        read: Callable[[slice, slice], Any],
        description: str,
    ):
        assert kind.scheme is not None
        self.scheme, self.shape, self.stored = kind.scheme, shape, (name,)
        self._kind, self._read, self._description = kind, read, description

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        start, stop, _ = columns.indices(self.shape[1])
        first = start // _GROUP
        raw = self._read(rows, slice(first, -(-stop // _GROUP)))
        codes = _codes(self._kind, raw).reshape(len(raw), -1)
        return np.ascontiguousarray(codes[:, start - first * _GROUP : stop - first * _GROUP])

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        return self.take_blocks("scale", slice(None), slice(None))

    def take_blocks(self, what: str, rows: slice, blocks: slice) -> np.ndarray:
        """See TakesBlocks."""
        n, k = self.shape
        start, stop, _ = rows.indices(n)
        left, right, _ = blocks.indices(k // _GROUP)
        found = np.empty((stop - start, right - left), np.float16)
        few = max(1, _AT_ONCE // max(1, (right - left) * self._kind.nbytes))
        for i in range(start, stop, few):
            part = slice(i, min(i + few, stop))
            found[i - start : part.stop - start] = _scales(self._read(part, slice(left, right)))
        if not np.isfinite(found).all():
            raise CheckpointError(
                f"{self._description}: {self.stored[0]} has a scale that is no number. Fetch or "
                "convert it again."
            )
        return found
