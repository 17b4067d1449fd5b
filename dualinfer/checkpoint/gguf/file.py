"""One GGUF file, llama.cpp's format: its fields, and tensors that are read by parts.

Each count, length and place is checked against the file before anything is made of it, and no part
of a header outlives its use.
"""

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import CheckpointError, DualinferError, UnsupportedError, shortened, shown
from ...quantization.formats.ggml import GgmlType, find_type
from ..files.safetensors import Entry, StoredFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LONGEST_HEADER = 100_000_000  # as of safetensors
_MOST = 1 << 16  # fields, and tensors
_MOST_AXES, _MOST_ELEMENTS = 4, 1 << 48
_LONGEST_NAME = 1 << 16
_AT_ONCE = 1 << 20  # bytes of a header
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    **{0: "u1", 1: "i1", _BOOL: "u1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4"},
    **{10: "u8", 11: "i8", 12: "f8"},
}


class Strings(NamedTuple):
    """An array of strings, by its place in a file; most are never read."""

    start: int
    size: int


Field = Any  # int, float, bool, str, Strings, or an array of numbers


class GgufFile(StoredFile):
    """A file of version 2 or 3, whose tensors have the axes of HF's, outputs before inputs.

    Blocks are read as bytes: their last axes are the blocks of a row and the bytes of a block.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self.fields: dict[str, Field] = {}
        self.types: dict[str, GgmlType] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        try:
            self._read_header()
        except (DualinferError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path} ({self.size} bytes) is not a whole GGUF file: {shortened(error)}. Was the "
                "download or copy cut short?"
            ) from error
        self._check_names()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in elements."""
        return self._shapes[name]

    def strings(self, name: str) -> list[str]:
        """The field of that name, an array of strings."""
        place = self.fields[name]
        try:
            header = _Header(self, place.start)
            return [header.string() for _ in range(place.size)]
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path}: {name} holds what is no text.") from error

    def _read_header(self) -> None:
        header = _Header(self)
        if self.size < 4 or header.take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = header.number("u4")
        if version not in _VERSIONS:
            is_big = version & 0xFFFF == 0
            raise UnsupportedError(
                f"{self.path} is a GGUF file "
                + ("of a big-endian machine" if is_big else f"of version {version}")
                + ", which is not read here. Convert the model again by a present llama.cpp."
            )
        tensors, fields = header.number("u8"), header.number("u8")
        if max(tensors, fields) > _MOST:
            raise ValueError(f"it would hold {tensors:,} tensors and {fields:,} fields")
        for _ in range(fields):
            name = header.string(_LONGEST_NAME)
            if name in self.fields:
                raise ValueError(f"it names {shown(name)} twice")
            self.fields[name] = header.field(header.number("u4"))
        infos = [header.tensor() for _ in range(tensors)]
        step = self.fields.get("general.alignment", 32)
        if type(step) is not int or not 0 < step <= _MOST or step % 8:
            raise ValueError(f"its alignment is {shown(step)}")
        data = -(-header.at // step) * step
        end = data
        for name, shape, number, start in sorted(infos, key=lambda info: info[3]):
            if name in self.types:
                raise ValueError(f"it holds {shown(name)} twice")
            kind = find_type(number, self.path, name)
            if shape[-1] % kind.elements:
                raise ValueError(f"{name} has rows of {shape[-1]} elements in {kind.name}")
            nbytes = prod(shape) // kind.elements * kind.nbytes
            if data + start != end:  # as llama.cpp has it: each one is padded, and no more
                raise ValueError(
                    f"{name} begins at byte {data + start:,}, and what lies before it ends at "
                    f"byte {end:,}, or is of another type"
                )
            stop = end + nbytes
            if stop > self.size:
                raise ValueError(f"{name} ends at byte {stop:,}")
            end = data + -(-(stop - data) // step) * step
            held, dtype = shape, kind.dtype
            if not kind.is_plain:
                held, dtype = (*shape[:-1], shape[-1] // kind.elements, kind.nbytes), "uint8"
            strides = tuple(prod(held[i + 1 :]) for i in range(len(held)))
            self._entries[name] = Entry(dtype, held, data + start, strides)
            self.types[name], self._shapes[name] = kind, shape
        if self.size > max(end, header.at):
            raise ValueError(f"its tensors end at byte {end:,}, or the last is of another type")


class _Header:
    """The bytes of a file from `at` on, read in turn; ValueError where they go on too long."""

    def __init__(self, file: GgufFile, at: int = 0):
        self._file, self.at = file, at
        self._first, self._held = at, b""
        self._end = min(file.size, _LONGEST_HEADER)

    def take(self, count: int) -> bytes:
        """The next bytes."""
        start = self._step(count) - self._first
        if start < 0 or start + count > len(self._held):
            self._first, start = self.at - count, 0
            size = min(max(count, _AT_ONCE), self._end - self._first)
            self._held = self._file.bytes_at(self._first, size)
        return self._held[start : start + count]

    def _step(self, count: int) -> int:
        """Go on by so many bytes; where they begin."""
        if count > self._end - self.at:
            raise ValueError(f"its header goes on after byte {self._end:,}")
        self.at += count
        return self.at - count

    def number(self, code: str) -> Any:
        """The next number, of NumPy's code."""
        return np.frombuffer(self.take(int(code[1])), f"<{code}")[0].item()

    def string(self, most: int = _LONGEST_HEADER) -> str:
        """The next string, of at most so many bytes."""
        return self.take(self._length(most)).decode()

    def _length(self, most: int = _LONGEST_HEADER) -> int:
        count = int.from_bytes(self.take(8), "little")
        if count > most:
            raise ValueError(f"a text in its header would be of {count:,} bytes")
        return count

    def field(self, kind: int) -> Field:
        """The next value of a type by its number."""
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            value = self.number(_NUMBERS[kind])
            return bool(value) if kind == _BOOL else value
        if kind != _ARRAY:
            raise ValueError(f"a field is of type {kind}")
        inner, count = self.number("u4"), self.number("u8")
        if inner in _NUMBERS:
            code = _NUMBERS[inner]
            array = np.frombuffer(self.take(count * int(code[1])), f"<{code}")
            return array.astype(bool) if inner == _BOOL else array
        if inner != _STRING:
            raise ValueError(f"a field is an array of type {inner}")
        if 8 * count > self._end - self.at:
            raise ValueError(f"a field would be an array of {count:,} texts")
        place = Strings(self.at, count)
        for _ in range(count):
            self._step(self._length())
        return place

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """The next tensor: name, shape, type by its number, and place after the header."""
        name, axes = self.string(_LONGEST_NAME), self.number("u4")
        if not 0 < axes <= _MOST_AXES:
            raise ValueError(f"{shown(name)} has {axes} axes")
        shape = tuple(self.number("u8") for _ in range(axes))[::-1]
        if not 0 < prod(shape) <= _MOST_ELEMENTS:
            raise ValueError(f"{shown(name)} has the shape {shape}")
        return name, shape, self.number("u4"), self.number("u8")
