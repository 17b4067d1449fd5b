"""Files of a checkpoint's folder: JSON objects, and safetensors, read by parts and written whole.

safetensors' own reader checks the files here, and the bytes come through a memory map: it copies
each part twice, at a quarter of the rate, and no other thread runs meanwhile.
"""

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from .arrays import numpy_dtype
from .errors import CheckpointError, CheckpointNotFoundError

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "C64": "complex64",
    "BOOL": "bool",
}
_STORED = {name: stored for stored, name in _DTYPES.items()}
_BLOCK = 4 << 20  # bytes copied before their pages are given back
_FORMAT = {"format": "pt"}  # transformers asks for it


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; CheckpointError says which file is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path} does not exist.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    return value


def check_inside(index: Path, file: Any) -> str:
    """`file`, as an index names it, if it lies in the checkpoint's own folder.

    The check is on the written path: HF's cache links its files to another folder, which is fine.
    """
    path = PurePosixPath(file) if isinstance(file, str) and "\\" not in file else None
    if path is None or path.is_absolute() or ".." in path.parts or ":" in file:
        raise CheckpointError(
            f"{index} names the file {file!r}, which is outside the checkpoint's folder."
        )
    return file


class _Entry(NamedTuple):
    """One tensor of a file; `start` in bytes from the file's own."""

    stored: str
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """One safetensors file, memory-mapped. A read copies a part and keeps none of the file's pages.

    Several threads may read at once: copying does not hold the GIL.
    """

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        if not path.is_file():
            raise CheckpointNotFoundError(f"{path} is named by the checkpoint, but is not there.")
        try:
            with safe_open(path, framework="np"):
                pass  # it checks the header, and that the tensors fill the file
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: "
                f"{error}. Was the download or copy cut short?"
            ) from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._entries = {
            name: _Entry(said["dtype"], tuple(said["shape"]), 8 + length + said["data_offsets"][0])
            for name, said in header.items()
            if name != "__metadata__"
        }

    def names(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype; safetensors' own where NumPy and ml_dtypes have none."""
        stored = self._entries[name].stored
        return _DTYPES.get(stored, stored)

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """The tensor, or the part at `index`, a slice of steps of 1 for each axis.

        It is written to `out` where that is given, of the part's shape and dtype.
        """
        entry = self._entries[name]
        if entry.stored not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name} is {entry.stored}, which is not read here.")
        dtype = numpy_dtype(_DTYPES[entry.stored])
        word = np.dtype(f"u{dtype.itemsize}")  # NumPy copies its own dtypes without the GIL
        size = prod(entry.shape) * dtype.itemsize
        stored = self._bytes[entry.start : entry.start + size].view(word).reshape(entry.shape)
        part = stored[(*(index or ()), ...)]
        if out is None:
            out = np.empty(part.shape, dtype)
        assert (out.shape, out.dtype) == (part.shape, dtype)
        if part.size:
            self._copy(part, out.view(word))
        return out

    def _copy(self, part: np.ndarray, out: np.ndarray) -> None:
        """Copy in blocks of rows, and give the pages of each back to the system."""
        if not part.ndim:
            out[...] = part
            return
        rows = max(1, _BLOCK // part.strides[0])
        for first in range(0, len(part), rows):
            block = part[first : first + rows]
            reach = sum((n - 1) * s for n, s in zip(block.shape, block.strides, strict=True))
            start = (
                block.__array_interface__["data"][0] - self._bytes.__array_interface__["data"][0]
            )
            whole = block.flags.c_contiguous
            pages = start - start % mmap.PAGESIZE
            length = start + reach + block.itemsize - pages
            if whole:  # where columns are left out, their pages may be as well
                self._map.madvise(mmap.MADV_WILLNEED, pages, length)
            out[first : first + rows] = block
            self._map.madvise(mmap.MADV_DONTNEED, pages, length)


def write_tensors(
    path: Path, dtype: str, shapes: Mapping[str, Sequence[int]], arrays: Iterable[np.ndarray]
) -> None:
    """Write a new safetensors file whose tensors, in order, are `arrays`, each asked for in turn.

    All are of `dtype` and of their `shapes`. The bytes are on the disk when this returns; an
    OSError leaves a part of the file.
    """
    header: dict[str, Any] = {"__metadata__": _FORMAT}
    at, kind = 0, numpy_dtype(dtype)
    for name, shape in shapes.items():
        end = at + prod(shape) * kind.itemsize
        header[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape, array in zip(shapes.values(), arrays, strict=True):
            assert (array.shape, array.dtype) == (tuple(shape), kind)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
