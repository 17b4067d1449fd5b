"""Files that torch.save wrote, read by parts and without torch.

A zip archive holds a pickle, which describes the tensors, and the elements of each storage as a
record of its own; before torch 1.6 they lie one after another behind the pickle. The pickle is read
as inert values, since nothing that a file names may run, and the elements as they lie in the file,
once each record is known to be stored as it is and to be as long as the pickle says.
"""

import os
import struct
import sys
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...arrays import numpy_dtype
from ...errors import CheckpointError, a_type, blamed_on, shortened, shown
from .inert import Global, Inert, Pickle, StoredTensor, put, read_pickle
from .safetensors import READ, Entry, StoredFile

_WRAPPERS = ("module", "model", "state_dict")
# Its mark, flags, method, sizes as stored and as read, lengths of a name and of what follows.
_LOCAL_HEADER = struct.Struct("<4s2xHH8xLLHH")
_ENCRYPTED, _BEHIND, _UTF8 = 0x1, 0x8, 0x800  # flags: of sizes that lie behind a record
_WIDE = 0xFFFFFFFF  # as a size: it stands elsewhere, in 64 bits
_OLD_PICKLES, _MOST_PICKLED = 4, 64 << 20  # magic, version, system and state; bytes of them
_OLD_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.serialization
_DEEPEST, _LETTERS = 8, 16  # dicts in one another, as in Megatron; letters of names for a byte
_WAY = "Save module.state_dict() instead, or fetch the file again."


class TorchFile(StoredFile):
    """A file of torch.save that holds a state dict, perhaps below "module" or the like.

    `facts` are numbers and texts that the file says beside its state dict, by name, and `pairs` the
    names under which it has lists with a tensor, as DeepSpeed saves int8 weights with their scales.
    An empty state dict is an error unless it `may_be_empty`.
    """

    def __init__(self, path: Path, may_be_empty: bool = False):
        super().__init__(path)
        try:
            is_archive = zipfile.is_zipfile(path)
            found, records = self._read_archive() if is_archive else self._read_old()
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # zipfile raises many kinds
            raise CheckpointError(
                f"{path} ({self.size} bytes) is no file of torch.save's, or is damaged: "
                f"{shortened(error) or type(error).__name__}. {_WAY}"
            ) from error
        with blamed_on(path):
            self.facts, self.pairs = _facts_of(found.value), _pairs_of(found.value)
            if may_be_empty and found.value == {}:
                return
            for name, tensor in _find_tensors(path, found).items():
                self._entries[name] = _place(path, name, tensor, records.get(tensor.storage.key))
            self._check_names()

    def _read_archive(self) -> tuple[Pickle, dict[str, tuple[int, int]]]:
        """The value of an archive's pickle, and where the elements of each storage lie."""
        records = self._find_records()
        if "data.pkl" not in records:
            raise ValueError("it holds no data.pkl")
        self._check_order(records)
        data = {key.partition("/")[2]: at for key, at in records.items() if key[:5] == "data/"}
        return read_pickle(self.bytes_at(*records["data.pkl"])), data

    def _find_records(self) -> dict[str, tuple[int, int]]:
        """The start and length of each record, without the archive's name before its own."""
        records: dict[str, tuple[int, int]] = {}
        with os.fdopen(os.dup(self._fd), "rb") as file, zipfile.ZipFile(file) as archive:
            end = archive.start_dir
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        for info, following in zip(infos, [*infos[1:], None], strict=True):
            stop = end if following is None else following.header_offset
            start, size = self._find_record(info, stop), info.file_size
            name = info.filename.partition("/")[2]
            if name in records:
                raise CheckpointError(f"{self.path} holds {shortened(name)} twice. Fetch it again.")
            if not info.is_dir():
                records[name] = start, size
        return records

    def _find_record(self, info: zipfile.ZipInfo, stop: int) -> int:
        """The offset of the bytes of a record, which end at `stop`.

        Its own header says of them what the archive's end does.
        """
        at, size = info.header_offset, info.file_size
        header = self.bytes_at(at, _LOCAL_HEADER.size)
        mark, flags, method, held, read, name_length, more = _LOCAL_HEADER.unpack(header)
        name = self.bytes_at(at + _LOCAL_HEADER.size, name_length)
        start = at + _LOCAL_HEADER.size + name_length + more
        is_own = name.decode("utf-8" if flags & _UTF8 else "cp437") == info.orig_filename
        sizes = {size, held, read} - {_WIDE, *((0,) if flags & _BEHIND else ())}
        is_stored = mark == b"PK\3\4" and method == info.compress_type == zipfile.ZIP_STORED
        is_stored = is_stored and not (flags | info.flag_bits) & _ENCRYPTED
        if not (is_stored and is_own and sizes <= {size} and info.compress_size == size):
            raise CheckpointError(
                f"{self.path}: {shortened(info.filename)} is compressed or damaged, as torch "
                "writes none: was the file zipped anew? Load it with torch.load(path, mmap=False, "
                "weights_only=True) and torch.save it again."
            )
        left = stop - start - size  # of sizes behind it, of 32 or 64 bits
        is_whole = left == 0
        if flags & _BEHIND:
            is_whole = left in (16, 24) and self.bytes_at(start + size, 4) == b"PK\7\x08"
        if not is_whole:
            raise CheckpointError(
                f"{self.path}: {shortened(info.filename)} and what follows it lie over one another "
                "or apart, as torch writes none. The file is damaged; fetch it again."
            )
        return start

    def _check_order(self, records: Mapping[str, tuple[int, int]]) -> None:
        """Raise CheckpointError for elements in the byte order of another machine."""
        order = "little"
        if "byteorder" in records:
            order = shortened(self.bytes_at(*records["byteorder"]).decode("ascii", "replace"), 20)
        if order != sys.byteorder:
            raise CheckpointError(
                f"{self.path} was written on a {order}-endian machine, and this one is "
                f"{sys.byteorder}-endian. Convert the checkpoint to safetensors there."
            )

    def _read_old(self) -> tuple[Pickle, dict[str, tuple[int, int]]]:
        """As of an archive, of a file of torch before 1.6.

        It holds pickles of a magic number, a version, the machine, the state and the keys of its
        storages, and then these, each behind the number of its elements.
        """
        start, data, found = 0, self.bytes_at(0, min(self.size, _MOST_PICKLED)), []
        for _ in range(_OLD_PICKLES):
            found.append(read_pickle(data[start:]))
            start += found[-1].size
        magic, _, system, inert = found
        if magic.value != _OLD_MAGIC:
            raise ValueError("it does not begin as one of torch's")
        if isinstance(system.value, dict) and not system.value.get("little_endian", True):
            raise CheckpointError(
                f"{self.path} was written on a big-endian machine. Convert it there."
            )
        keys = read_pickle(self.bytes_at(start, min(self.size - start, _MOST_PICKLED)))
        start += keys.size
        places: dict[str, tuple[int, int]] = {}
        for key in keys.value if isinstance(keys.value, list) else ():
            storage = inert.storages.get(key) if isinstance(key, str) else None
            if storage is None or key in places or storage.kind not in _STORAGES:
                raise ValueError("it lists storages that it does not have, or twice")
            if start + 8 <= self.size:
                held = int.from_bytes(self.bytes_at(start, 8), sys.byteorder)
                if held != storage.length:
                    raise ValueError("a storage is of another length than its tensors say")
            size = storage.length * numpy_dtype(_STORAGES[storage.kind]).itemsize
            places[key] = start + 8, size
            start += 8 + size
            if start > self.size:
                raise CheckpointError(
                    f"{self.path} ends before its tensors do: it was cut short. Fetch it again."
                )
        return inert, places


def _place(path: Path, name: str, tensor: StoredTensor, record: tuple[int, int] | None) -> Entry:
    """Find a tensor's elements; CheckpointError if the storage's `record` does not hold them.

    `record` is where that begins and how many bytes it has.
    """
    storage, offset, shape, strides, own = tensor
    kind = _STORAGES.get(storage.kind)
    if kind is None or record is None:
        raise CheckpointError(
            f"{path}: {name} lies in a {shortened(storage.kind)} without a record, as no plain "
            "tensor does. Save the model again, as safetensors."
        )
    start, size = record
    nbytes = storage.length * numpy_dtype(kind).itemsize
    if nbytes != size:
        raise CheckpointError(
            f"{path}: {name} lies in data/{shortened(storage.key)} of {size:,} bytes, expected "
            f"{nbytes:,}. The file is damaged; fetch it again."
        )
    dtype = own or kind
    if dtype not in READ:  # which an error says where it is asked for
        return Entry(dtype, shape, start, strides)
    itemsize = numpy_dtype(dtype).itemsize
    held, count = size // itemsize, prod(shape)
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if count and max(count, offset + reach + 1) > held:
        raise CheckpointError(
            f"{path}: {name} {shape} has {count:,} elements, and {held:,} are stored: it was "
            "expanded. Save a copy of it, tensor.contiguous()."
        )
    return Entry(dtype, shape, start + offset * itemsize, strides)


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
# What torch._utils makes that is no plain tensor.
_ODD = {
    "_rebuild_sparse_tensor": "is a sparse tensor",
    "_rebuild_nested_tensor": "is a nested tensor",
    "_rebuild_qtensor": "is a quantized tensor",
    "_rebuild_tensor_v2": "is a lazily conjugated or negated tensor",
    "_rebuild_tensor_v3": "is a lazily conjugated or negated tensor",
    "_rebuild_meta_tensor_no_storage": "was saved on the meta device and has no values",
}


def open_torch_file(path: Path, may_be_empty: bool = False) -> StoredFile:
    """A file of torch.save, of a state dict or of a dict that holds one by a known name.

    A state dict without tensors is an error unless it `may_be_empty`.
    """
    return TorchFile(path, may_be_empty)


def _find_tensors(path: Path, found: Pickle) -> dict[str, StoredTensor]:
    """The tensors by name of what a file holds.

    Where dicts lie in one another, as in Megatron, names are joined by dots.
    """
    state = found.value
    if not isinstance(state, dict):
        held = a_type(state)
        if isinstance(state, Inert):
            held = f"what {state.kind} makes, as of a whole pickled module"
        raise CheckpointError(f"{path} holds {held}; expected a dict of tensors. {_WAY}")
    wrapped = _wrappers(state)
    if len(wrapped) > 1:
        raise CheckpointError(
            f"{path} holds {' and '.join(wrapped)}, each a dict; which one is the model's "
            "weights? Save that one alone."
        )
    inner = state[wrapped[0]] if wrapped else state
    _check_values(path, inner, is_wrapped=bool(wrapped))
    tensors = {name: t for name, t in inner.items() if isinstance(t, StoredTensor)}
    if not tensors and wrapped:
        tensors = _flat(path, inner, _LETTERS * found.size)
    if not tensors:
        names = [_named(key) for key in inner]
        held = ", ".join(map(shown, names[:8])) or "nothing"
        raise CheckpointError(
            f"{path} holds no tensors by name, but {held}. Save the state dict itself."
        )
    unnamed = [name for name in tensors if not isinstance(name, str)]
    if unnamed:
        kinds = " and ".join(sorted({_named(name).split()[-1] for name in unnamed}))
        raise CheckpointError(
            f"{path} holds {len(unnamed)} tensors under keys of type {kinds}, expected names. Save "
            "module.state_dict()."
        )
    return tensors


def _named(key: Any) -> str:
    """A key for a message."""
    if isinstance(key, str):
        return key
    return "an object" if isinstance(key, Inert) else a_type(key)


def _check_values(path: Path, state: Mapping[Any, Any], is_wrapped: bool) -> None:
    """Raise CheckpointError for tensors that are more than their elements, one after another.

    Other objects are an error too, unless the state dict `is_wrapped`: beside it lie a training's.
    """
    for name, value in state.items():
        if not isinstance(value, Inert | Global) or getattr(value, "module", "") == "torch":
            continue  # which dtypes are of
        kind = value.kind if isinstance(value, Inert) else value.path
        odd = _ODD.get(kind.removeprefix("torch._utils."))
        if odd is not None:
            raise CheckpointError(
                f"{path}: {shortened(name)} {odd}. Save the model again once its weights are dense "
                "and loaded, as safetensors."
            )
        if kind.startswith(("torch._utils.", "torch._tensor.", "torchao.")):
            raise CheckpointError(
                f"{path}: {shortened(name)} is no plain tensor, as torchao's are not. Save the "
                "model again, as safetensors."
            )
        if not is_wrapped:
            raise CheckpointError(
                f"{path} holds {shortened(kind)} beside tensors ({shown(name)}), and nothing that "
                f"a file names is imported or called here. {_WAY}"
            )


def _wrappers(state: Mapping[Any, Any]) -> list[str]:
    return [key for key in _WRAPPERS if isinstance(state.get(key), dict)]


def _flat(path: Path, state: Mapping[Any, Any], most: int) -> dict[str, StoredTensor]:
    """The tensors in dicts that lie in one another, whose names have at most so many letters.

    A dict that is in two places counts twice.
    """
    tensors: dict[str, StoredTensor] = {}
    level, count = [("", state)], 0
    for _ in range(_DEEPEST):
        inner = []
        for prefix, values in level:
            for name, value in values.items():
                if not isinstance(name, str):
                    continue
                full = f"{prefix}{name}"
                count += len(full)
                if count > most:
                    raise CheckpointError(
                        f"{path} holds dicts that lie in one another again and again, as in no "
                        "checkpoint. Fetch it again."
                    )
                if isinstance(value, StoredTensor):
                    try:
                        put(tensors, full, value)
                    except ValueError as error:
                        raise CheckpointError(f"{path} cannot be read: {error}.") from error
                elif isinstance(value, dict):
                    inner.append((f"{full}.", value))
        level = inner
    return tensors


def _facts_of(state: Any) -> dict[str, int | float | str]:
    """The numbers and texts that a file has beside its state dict."""
    if not isinstance(state, dict) or not _wrappers(state):
        return {}
    return {
        k: v for k, v in state.items() if isinstance(k, str) and isinstance(v, int | float | str)
    }


def _pairs_of(state: Any) -> tuple[str, ...]:
    """The names of lists of tensors in a state dict."""
    if not isinstance(state, dict):
        return ()
    inner = next((state[key] for key in _wrappers(state)), state)
    return tuple(
        str(name)
        for name, value in inner.items()
        if isinstance(value, list | tuple)
        and any(isinstance(own, StoredTensor) for own in value[:2])
        and type(value) is not StoredTensor
    )
