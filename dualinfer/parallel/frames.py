"""Messages between processes: JSON and plain arrays, by length, and never a pickle.

A frame is two lengths, uint32 in the order of networks: of what follows both, and of its JSON, an
object. Behind that stand the bytes of the arrays that its `arrays` name, with dtype and shape.
"""

import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import StepError, UnsupportedError

Message = dict[str, Any]

_HEAD = struct.Struct("!II")
_MOST = 2**31
_DTYPES = "<i4", "<f4", "<i8", "<u4", "|b1"


def packed(message: Message, **arrays: np.ndarray) -> bytes:
    """A frame of a message; arrays stand in it by their names, as int32 or float32 if need be.

    UnsupportedError for more than the other end would take.
    """
    about, parts = {}, []
    for name, array in arrays.items():
        kind = array.dtype.newbyteorder("<").str
        if kind not in _DTYPES:
            kind = "<f4" if array.dtype.kind == "f" else "<i4"
        about[name] = kind, array.shape
        parts.append(np.ascontiguousarray(array, kind).tobytes())
    text = json.dumps({**message, "arrays": about} if about else message).encode()
    size = _HEAD.size - 4 + len(text) + sum(map(len, parts))
    if size > _MOST:
        raise UnsupportedError(
            f"{size / 2**30:.1f} GiB cannot be sent to another process at once, which takes "
            f"{_MOST / 2**30:.0f} GiB. Pass fewer inputs in a call, or shorter ones."
        )
    return b"".join([_HEAD.pack(size, len(text)), text, *parts])


class Unpacker:
    """Reads messages from bytes in whatever pieces they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole with these bytes, their arrays among their fields.

        StepError for what is none.
        """
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            size, length = _HEAD.unpack_from(self._buffer, at)
            if size > _MOST or length + 4 > size:
                raise StepError("A message between processes has no such length.")
            if len(self._buffer) - at < 4 + size:
                break
            whole = bytes(self._buffer[at + _HEAD.size : at + 4 + size])
            at += 4 + size
            try:
                message = _read(whole[:length], whole[length:])
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise StepError(
                    f"A message between processes cannot be read: {error!r}."
                ) from error
            yield message
        del self._buffer[:at]


def _read(text: bytes, rest: bytes) -> Message:
    message = json.loads(text)
    at = 0
    for name, (kind, shape) in message.pop("arrays", {}).items():
        if kind not in _DTYPES:
            raise StepError(f"A message between processes holds an array of {kind!r}.")
        count = math.prod(shape)
        message[name] = np.frombuffer(rest, kind, count, at).reshape(shape)
        at += np.dtype(kind).itemsize * count
    return message
