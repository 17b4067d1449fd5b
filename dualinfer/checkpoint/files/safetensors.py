"""Files of a checkpoint's folder: JSON objects, and safetensors, read by parts and written whole.

No file is mapped to memory: one that is cut short meanwhile is an error here, where it would end
the process, and what was read stays as it is, whatever becomes of the file.
"""

import json
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...arrays import numpy_dtype
from ...errors import CheckpointError, CheckpointNotFoundError, shortened

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
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
READ = {*_STORED, "complex128"}
_BLOCK = 4 << 20  # bytes read at a time
_FORMAT = {"format": "pt"}  # transformers asks for it
_LONGEST_HEADER = 100_000_000  # as in safetensors
_LONGEST_NAME = 1000  # letters of a tensor's, which patterns are tried on
_MOST_AXES = 64  # as in NumPy and torch
_DEEPEST = 100  # lists and objects in one another
_LFS = b"version https://git-lfs.github.com/spec/"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; CheckpointError says which file is not one."""
    value = _read_value(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    return value


def read_list(path: Path) -> list[Any]:
    """A JSON file that holds a list; CheckpointError says which file is not one."""
    value = _read_value(path)
    if not isinstance(value, list):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected a list.")
    return value


def _as_float(value: dict[str, Any]) -> Any:
    """The float that transformers writes as {"__float__": "Infinity"}; else `value` itself."""
    name = value.get("__float__")
    known = len(value) == 1 and name in ("Infinity", "-Infinity", "NaN")
    return float(str(name)) if known else value


def _read_value(path: Path) -> Any:
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path} does not exist.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    check_no_pointer(path, text)
    try:
        value = json.loads(text.decode(), object_hook=_as_float)
        _check_depth(value)
    except RecursionError as error:
        raise CheckpointError(
            f"{path} holds lists or objects in one another, more than {_DEEPEST} deep, as no "
            "checkpoint does. Fetch it again."
        ) from error
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    return value


def _check_depth(value: Any) -> None:
    """Raise RecursionError for what code that follows its parts could not walk through."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_DEEPEST):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
        if not level:
            return
    raise RecursionError


def check_no_pointer(path: Path, start: bytes) -> None:
    """Raise CheckpointError if a file that starts so is what Git keeps in place of a large one."""
    if start.startswith(_LFS):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, and the file itself was not fetched. Run `git lfs pull` "
            "in its folder, or fetch the model with huggingface_hub.snapshot_download()."
        )


def is_path(text: str) -> bool:
    """True for what the system takes as a path: without NUL, and of letters that it can write."""
    try:
        return bool(text.isascii() or os.fsencode(text)) and "\0" not in text
    except UnicodeError:
        return False


def check_inside(index: Path, file: Any) -> str:
    """`file`, as an index names it, if it lies in the checkpoint's own folder.

    The check is on the written path: HF's cache links its files to another folder, which is fine.
    """
    if not isinstance(file, str) or not file or not is_path(file):
        raise CheckpointError(
            f"{index} has {shortened(repr(file))} where it should name a file. Fetch it again."
        )
    if "\\" in file or ":" in file or file.startswith("/") or ".." in file.split("/"):
        raise CheckpointError(
            f"{index} names the file {shortened(repr(file))}, which is outside the checkpoint's "
            "folder."
        )
    return file


class Entry(NamedTuple):
    """One tensor of a file: NumPy's name of its dtype, and where it lies.

    `start` in bytes from the file's own; `strides` in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


class StoredFile:
    """A file of tensors, open for reading. Several threads may read at once, without the GIL.

    A file that is not as long as it was, or that others wrote to since it was opened, raises
    CheckpointError: what was read of it would be neither the old weights nor the new ones.
    """

    def __init__(self, path: Path):
        self.path = path
        self._entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}  # what the header says beside the tensors
        if not os.path.isfile(path):
            raise CheckpointNotFoundError(
                f"{shortened(path)} is named by the checkpoint, but is not there."
            )
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        weakref.finalize(self, os.close, self._fd)
        self.size, self._written = self._state()
        check_no_pointer(path, self.bytes_at(0, min(self.size, len(_LFS))))

    def _check_names(self) -> None:
        """Raise CheckpointError for a tensor's name that is longer than any is."""
        name = max(self._entries, key=len, default="")
        if len(name) > _LONGEST_NAME:
            raise CheckpointError(
                f"{self.path} has a tensor whose name is of {len(name):,} letters: "
                f"{shortened(name)}. At most {_LONGEST_NAME:,} are read. Save it by another name."
            )

    def _state(self) -> tuple[int, int]:
        """The file's size and when it was written last."""
        now = os.fstat(self._fd)
        return now.st_size, now.st_mtime_ns

    def names(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype; the file's own where NumPy and ml_dtypes have none."""
        return self._entries[name].dtype

    def bytes_at(self, start: int, count: int) -> bytes:
        """So many bytes of the file; CheckpointError if it has not as many."""
        buffer = np.empty(count, np.uint8)
        self._read_bytes(start, buffer)
        return buffer.tobytes()

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
        if entry.dtype not in READ:
            raise CheckpointError(f"{self.path}: {name} is {entry.dtype}, which is not read here.")
        dtype = numpy_dtype(entry.dtype)
        slices = index or (slice(None),) * len(entry.shape)
        bounds = [part.indices(n)[:2] for part, n in zip(slices, entry.shape, strict=True)]
        shape = tuple(max(0, stop - first) for first, stop in bounds)
        if out is None:
            out = np.empty(shape, dtype)
        assert (out.shape, out.dtype) == (shape, dtype)
        if out.size:
            offset = sum(first * s for (first, _), s in zip(bounds, entry.strides, strict=True))
            self._read_array(entry.start + offset * dtype.itemsize, entry.strides, out)
            if self._state() != (self.size, self._written):
                raise self._changed()
        return out

    def _changed(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} was changed or cut short while it was read. Load it again when nothing "
            "writes to it."
        )

    def _read_array(self, start: int, strides: Sequence[int], out: np.ndarray) -> None:
        """Fill `out` with what lies `strides` elements apart, axes of one element left out."""
        word = out.dtype if out.dtype.isbuiltin == 1 else np.dtype(f"u{out.dtype.itemsize}")
        steps = [s * word.itemsize for s, n in zip(strides, out.shape, strict=True) if n > 1]
        order = sorted(range(len(steps)), key=lambda axis: -steps[axis])
        # NumPy copies its own dtypes without the GIL.
        self._fill(start, [steps[i] for i in order], out.view(word).squeeze().transpose(order))

    def _fill(self, start: int, steps: Sequence[int], out: np.ndarray) -> None:
        """Fill `out` with what lies `steps` bytes apart, the largest first."""
        packed = tuple(steps) == _packed(out.shape, out.itemsize)
        if packed and out.flags.c_contiguous:
            self._read_bytes(start, out.reshape(-1).view(np.uint8))
            return
        inner = _reach(out.shape[1:], steps[1:]) + out.itemsize
        if inner > _BLOCK:
            for i in range(len(out)):
                self._fill(start + i * steps[0], steps[1:], out[i])
            return
        rows = min(len(out), 1 + (_BLOCK - inner) // max(1, steps[0]))
        block = np.empty((rows - 1) * steps[0] + inner, np.uint8)
        for first in range(0, len(out), rows):
            part = out[first : first + rows]
            span = block[: (len(part) - 1) * steps[0] + inner]
            self._read_bytes(start + first * steps[0], span)
            part[...] = np.ndarray(part.shape, part.dtype, span.data, 0, tuple(steps))

    def _read_bytes(self, start: int, out: np.ndarray) -> None:
        """Fill `out`, bytes in a row, from `start` on; the next block is asked for meanwhile."""
        view, stop = out.data, start + len(out)
        while start < stop:
            count = min(_BLOCK, stop - start)
            self._advise(start, min(2 * _BLOCK, stop - start))
            try:
                nbytes = os.preadv(self._fd, [view[:count]], start)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error
            if not nbytes:
                raise self._changed()
            view, start = view[nbytes:], start + nbytes

    def _advise(self, start: int, count: int) -> None:
        if count > _BLOCK // 8 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, start, count, os.POSIX_FADV_WILLNEED)


def _packed(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next along each axis, where nothing lies between."""
    return tuple(prod(shape[i + 1 :]) * itemsize for i in range(len(shape)))


def _reach(shape: Sequence[int], steps: Sequence[int]) -> int:
    """Bytes from the first element to the start of the last one."""
    return sum((n - 1) * step for n, step in zip(shape, steps, strict=True))


class TensorFile(StoredFile):
    """One safetensors file, checked: each tensor is of its size, and together they are the file."""

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            self._entries = self._read_header()
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path} ({self.size} bytes) is not a whole safetensors file: "
                f"{shortened(error) or 'its header is nested'}. Was the download or copy cut short?"
            ) from error
        self._check_names()

    def _read_header(self) -> dict[str, Entry]:
        if self.size < 8:
            raise ValueError("it has no header")
        length = int.from_bytes(self.bytes_at(0, 8), "little")
        if length > min(_LONGEST_HEADER, self.size - 8):
            raise ValueError(f"its header would be of {length:,} bytes")
        header = json.loads(self.bytes_at(8, length).decode(), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        metadata = header.pop("__metadata__", None) or {}
        self.metadata = {k: v for k, v in metadata.items() if isinstance(v, str)}
        spans, entries = [], {}
        for name, fields in header.items():
            shape, (start, stop) = tuple(fields["shape"]), fields["data_offsets"]
            stored = fields["dtype"]
            if len(shape) > _MOST_AXES:
                raise ValueError(f"{shortened(name)} has {len(shape):,} axes")
            if any(type(n) is not int or not 0 <= n < 2**63 for n in (*shape, start, stop)):
                raise ValueError(f"{name} has a shape or place that is no number")
            dtype = _DTYPES.get(stored, str(stored))
            if dtype in READ and stop - start != prod(shape) * numpy_dtype(dtype).itemsize:
                raise ValueError(f"{name}, {stored} {shape}, lies in {stop - start} bytes")
            spans.append((start, stop))
            entries[name] = Entry(dtype, shape, 8 + length + start, _packed(shape, 1))
        end = 0
        for start, stop in sorted(spans):
            if start != end or stop < start:
                raise ValueError(f"a tensor begins at byte {start}, expected {end}")
            end = stop
        if 8 + length + end != self.size:
            raise ValueError(f"its tensors end at byte {8 + length + end}")
        return entries


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object that says nothing twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("its header names something twice")
    return fields


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    arrays: Iterable[np.ndarray],
    metadata: Mapping[str, str] | None = None,
    *,
    to_disk: bool = True,
) -> None:
    """Write a new safetensors file whose tensors, in order, are `arrays`, each asked for in turn.

    `tensors` are the dtype, by NumPy's name, and the shape of each; the header holds `metadata`
    beside them. With `to_disk` the bytes are on the disk when this returns, not in the system's
    memory only. An OSError leaves a part of the file.
    """
    header: dict[str, Any] = {"__metadata__": {**(metadata or {}), **_FORMAT}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + prod(shape) * numpy_dtype(dtype).itemsize
        header[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (dtype, shape), array in zip(tensors.values(), arrays, strict=True):
            assert (array.shape, array.dtype) == (tuple(shape), numpy_dtype(dtype))
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        if to_disk:
            os.fsync(file.fileno())
