"""Files that torch.save wrote, read by parts: torch itself reads only what describes the tensors.

A zip archive holds a pickle, which torch reads with `weights_only=True`, and the elements of each
storage as a record of its own. Those are read here as they lie in the file, once each record is
known to be stored as it is and to be as long as the pickle says. Where the pickle holds other
objects beside the tensors, as DeepSpeed's and Megatron's do, torch refuses it, and it is read as
inert values: nothing of it runs in any case.
"""

import io
import os
import struct
import sys
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import numpy_dtype, to_numpy
from ..errors import BackendNotAvailableError, CheckpointError, a_type, listing, shortened, shown
from .files import Entry, StoredFile
from .inert import Inert, Pickle, StoredTensor, put, read_pickle

_WRAPPERS = ("module", "model", "state_dict")
_DESCRIBING = ("data.pkl", "version", "byteorder", "constants.pkl")
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # its mark, and the lengths of a name and of what follows
_ENCRYPTED = 0x1
_OLD_PICKLES, _MOST_PICKLED = 4, 64 << 20  # magic, version, system and state; bytes of them
_OLD_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.serialization
_DEEPEST, _MOST_NAMES = 8, 1_000_000  # of dicts in a state dict, as Megatron nests them


class TorchFile(StoredFile):
    """A zip archive of torch.save that holds a state dict, perhaps below "module" or the like.

    `facts` are numbers and texts that the file says beside its state dict, by name, and `pairs` the
    names under which it has lists with a tensor, as DeepSpeed saves int8 weights with their scales.
    An empty state dict is an error unless it `may_be_empty`.
    """

    def __init__(self, path: Path, may_be_empty: bool = False):
        super().__init__(path)
        try:
            self._records = self._find_records()
            self._check_order()
            inert = read_pickle(self._bytes_of("data.pkl"))
            found = self._describe(inert)
        except CheckpointError:
            raise
        except Exception as error:  # zipfile and torch raise many kinds
            raise no_state_dict(path, self.size, error) from error
        self.facts, self.pairs = facts_of(inert.value), pairs_of(inert.value)
        if may_be_empty and inert.value == {}:
            return
        if found is None:
            records = {key: self._records.get(f"data/{key}") for key in inert.storages}
            for name, own in find_tensors(path, inert.value, StoredTensor).items():
                self._entries[name] = _place_stored(path, name, own, records)
            return
        state, keys = found
        for name, tensor in find_tensors(path, state).items():
            self._entries[name] = self._place(name, tensor, keys)

    def _find_records(self) -> dict[str, tuple[int, int]]:
        """Where each record starts and how long it is, without the archive's name before it."""
        records: dict[str, tuple[int, int]] = {}
        with os.fdopen(os.dup(self._fd), "rb") as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.is_dir():
                    continue
                name = info.filename.partition("/")[2]
                mark, *lengths = _LOCAL_HEADER.unpack(
                    self.bytes_at(info.header_offset, _LOCAL_HEADER.size)
                )
                start = info.header_offset + _LOCAL_HEADER.size + sum(lengths)
                stored = info.compress_type == zipfile.ZIP_STORED and mark == b"PK\3\4"
                if not stored or info.flag_bits & _ENCRYPTED or info.file_size > self.size - start:
                    raise CheckpointError(
                        f"{self.path}: {shortened(info.filename)} is compressed or damaged, as "
                        "torch writes none: was the file zipped anew? Load it with "
                        "torch.load(path, mmap=False, weights_only=True) and torch.save it again."
                    )
                if name in records:
                    raise CheckpointError(
                        f"{self.path} holds {shortened(name)} twice. Fetch it again."
                    )
                records[name] = start, info.file_size
        return records

    def _check_order(self) -> None:
        """Raise CheckpointError for elements in the byte order of another machine."""
        order = self._bytes_of("byteorder").decode() if "byteorder" in self._records else "little"
        if order != sys.byteorder:
            raise CheckpointError(
                f"{self.path} was written on a {order}-endian machine, and this one is "
                f"{sys.byteorder}-endian. Convert the checkpoint to safetensors there."
            )

    def _describe(self, inert: Pickle) -> tuple[Any, dict[int, str]] | None:
        """What the pickle holds, tensors on the meta device, and the record of each storage's mark.

        torch reads a copy of the archive in which the records of elements are empty. It marks each
        storage with the place of its record there. None where torch does not read it, or must
        not, and the state dict lies in it by a known name: other objects may be beside it.
        """
        import torch

        is_wrapped = isinstance(inert.value, dict) and bool(_wrappers(inert.value))
        copy, marks = io.BytesIO(), {}
        with zipfile.ZipFile(copy, "w") as archive:
            for name in self._records:
                if name in _DESCRIBING:
                    archive.writestr(f"archive/{name}", self._bytes_of(name))
                elif name.startswith("data/"):
                    archive.writestr(f"archive/{name}", b"")
                    info = archive.infolist()[-1]
                    marks[copy.tell()] = name
                    assert info.file_size == 0  # so that the record is where its header ends
        copy.seek(0)
        try:
            if inert.is_risky:
                raise ValueError("it would fill the memory or the stack")
            return torch.load(copy, map_location="meta", weights_only=True, mmap=False), marks
        except Exception:
            if is_wrapped:
                return None
            raise

    def _bytes_of(self, record: str) -> bytes:
        return self.bytes_at(*self._records[record])

    def _place(self, name: str, tensor: Any, keys: Mapping[int, str]) -> Entry:
        """Where a tensor's elements lie; CheckpointError if its record does not hold them."""
        check_plain(self.path, name, tensor)
        storage = tensor.untyped_storage()
        record = keys.get(getattr(storage, "_checkpoint_offset", -1))
        if record is None:
            raise _no_values(self.path, name)
        start, size = self._records[record]
        if storage.nbytes() != size:
            raise CheckpointError(
                f"{self.path}: {name} lies in {record} of {size:,} bytes, expected "
                f"{storage.nbytes():,}. The file is damaged; fetch it again."
            )
        check_held(self.path, name, tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        start += tensor.storage_offset() * tensor.itemsize
        return Entry(dtype, tuple(tensor.shape), start, tensor.stride())


def _place_stored(
    path: Path, name: str, tensor: StoredTensor, records: Mapping[str, tuple[int, int] | None]
) -> Entry:
    """Where a tensor's elements lie that torch did not make; `records` are places of storages.

    Raises CheckpointError if its record does not hold them.
    """
    storage, offset, shape, strides = tensor
    dtype, record = _STORAGES.get(storage.kind), records.get(storage.key)
    if dtype is None or record is None:
        raise CheckpointError(
            f"{path}: {name} lies in a {shortened(storage.kind)} without a record, as no plain "
            "tensor does. Save the model again, as safetensors."
        )
    itemsize = numpy_dtype(dtype).itemsize
    start, size = record
    if storage.length * itemsize != size:
        raise CheckpointError(
            f"{path}: {name} lies in data/{shortened(storage.key)} of {size:,} bytes, expected "
            f"{storage.length * itemsize:,}. The file is damaged; fetch it again."
        )
    count, reach = prod(shape), sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if count and max(count, offset + reach + 1) > storage.length:
        raise CheckpointError(
            f"{path}: {name} {shape} has {count:,} elements, and {storage.length:,} are stored: it "
            "was expanded. Save a copy of it, tensor.contiguous()."
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
}


class OldTorchFile(StoredFile):
    """A file of torch before 1.6, which torch reads whole, unless other objects lie beside tensors.

    Then it is read by parts, as a TorchFile is; `facts` and `pairs` are as there.
    """

    def __init__(self, path: Path, may_be_empty: bool = False):
        super().__init__(path)
        import torch

        self._tensors: dict[str, Any] | None = None
        try:
            system, inert, end = self._read_pickles()
        except ValueError as error:
            raise no_state_dict(path, self.size, error) from error
        self.facts, self.pairs = facts_of(inert.value), pairs_of(inert.value)
        try:
            if inert.is_risky:
                raise ValueError("it would fill the memory or the stack")
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
        except Exception as error:  # torch raises many kinds for a damaged or unsafe file
            if not (isinstance(inert.value, dict) and _wrappers(inert.value)):
                raise no_state_dict(path, self.size, error) from error
            records = self._find_storages(system, inert, end)
            for name, own in find_tensors(path, inert.value, StoredTensor).items():
                self._entries[name] = _place_stored(path, name, own, records)
            return
        is_empty = may_be_empty and state == {}
        self._tensors = {} if is_empty else find_tensors(path, state)
        for name, tensor in self._tensors.items():
            check_plain(path, name, tensor)
            if tensor.is_meta:
                raise _no_values(path, name)
            check_held(path, name, tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._entries[name] = Entry(dtype, tuple(tensor.shape), 0, tensor.stride())

    def _read_pickles(self) -> tuple[Any, Pickle, int]:
        """What the file says of the machine that wrote it, its state, and where that ends.

        Raises ValueError for what is damaged, or more than the file can hold.
        """
        start, data, found = 0, self.bytes_at(0, min(self.size, _MOST_PICKLED)), []
        for _ in range(_OLD_PICKLES):
            found.append(read_pickle(data[start:]))
            start += found[-1].size
        held = sum(s.length for s in found[-1].storages.values())
        if found[0].value != _OLD_MAGIC or held > self.size:  # a byte each at least
            raise ValueError("it is no file of torch's, or was cut")
        return found[2].value, found[-1], start

    def _find_storages(
        self, system: Any, inert: Pickle, start: int
    ) -> dict[str, tuple[int, int] | None]:
        """Where the elements of each storage lie: one after another, behind a list of their keys.

        Before each is the number of its elements.
        """
        order = (
            "little" if isinstance(system, dict) and system.get("little_endian", True) else "big"
        )
        if order != sys.byteorder:
            raise CheckpointError(f"{self.path} was written on a {order}-endian machine.")
        places: dict[str, tuple[int, int] | None] = {}
        try:
            keys = read_pickle(self.bytes_at(start, min(self.size - start, _MOST_PICKLED)))
            start += keys.size
            for key in keys.value:
                storage = inert.storages[key]
                if key in places or storage.kind not in _STORAGES:
                    raise ValueError("a storage is held twice, or of no known kind")
                if int.from_bytes(self.bytes_at(start, 8), order) != storage.length:
                    raise ValueError("a storage is of another length than its tensors say")
                size = storage.length * numpy_dtype(_STORAGES[storage.kind]).itemsize
                places[key] = start + 8, size
                start += 8 + size
        except (ValueError, KeyError, TypeError) as error:
            raise no_state_dict(self.path, self.size, error) from error
        if start > self.size:
            raise CheckpointError(
                f"{self.path} ends before its tensors do: it was cut short. Fetch it again."
            )
        return places

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """As of every file, from what is in memory."""
        if self._tensors is None:
            return super().read(name, index, out)
        part = to_numpy(self._tensors[name].detach()[index or ...])
        if out is None:
            return part.copy()
        out[...] = part
        return out


def open_torch_file(path: Path, may_be_empty: bool = False) -> StoredFile:
    """A file of torch.save, of a state dict or of a dict that holds one by a known name.

    A state dict without tensors is an error unless it `may_be_empty`.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise BackendNotAvailableError(
            f"{path} holds .bin weights, which only torch can read, and torch is not installed. "
            "Install `dualinfer[torch]`, or convert the checkpoint to safetensors."
        ) from error
    is_archive = os.path.isfile(path) and zipfile.is_zipfile(path)
    return (TorchFile if is_archive else OldTorchFile)(path, may_be_empty)


def no_state_dict(path: Path, size: int, error: Exception) -> CheckpointError:
    """The error of a file that torch does not read."""
    return CheckpointError(
        f"{path} ({size} bytes) is no state dict that torch reads with weights_only=True: it is "
        "damaged, or holds other objects than tensors, such as a whole pickled module. Save "
        f"module.state_dict() instead. ({type(error).__name__})"
    )


def _no_values(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {name} was saved on the meta device and has no values, or is no plain tensor, as "
        "torchao's are not. Save the model again once its weights are loaded, as safetensors."
    )


def find_tensors(path: Path, state: Any, kind: type | None = None) -> dict[str, Any]:
    """The tensors by name of what a file holds, objects of `kind`; unset: torch's.

    Where dicts lie in one another, as in Megatron, names are joined by dots.
    """
    if kind is None:
        import torch

        kind = torch.Tensor
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds {a_type(state)}, expected a dict of tensors.")
    wrapped = _wrappers(state)
    if len(wrapped) > 1:
        raise CheckpointError(
            f"{path} holds {' and '.join(wrapped)}, each a dict; which one is the model's "
            "weights? Save that one alone."
        )
    inner = state[wrapped[0]] if wrapped else state
    tensors = {name: t for name, t in inner.items() if isinstance(t, kind)}
    if not tensors and wrapped:
        tensors = _flat(path, inner, kind)
    if not tensors:
        names = [key if isinstance(key, str) else a_type(key) for key in inner]
        held = ", ".join(map(shown, names[:8])) or "nothing"
        raise CheckpointError(
            f"{path} holds no tensors by name, but {held}. Save the state dict itself."
        )
    unnamed = [name for name in tensors if not isinstance(name, str)]
    if unnamed:
        kinds = " and ".join(sorted({type(name).__name__ for name in unnamed}))
        raise CheckpointError(
            f"{path} holds {len(unnamed)} tensors under keys of type {kinds}, expected names. Save "
            "module.state_dict()."
        )
    odd = [n for n, value in inner.items() if isinstance(value, Inert) and _is_tensor(value)]
    if odd:
        raise _no_values(path, listing(list(map(str, odd))))
    return tensors


def _wrappers(state: Mapping[Any, Any]) -> list[str]:
    return [key for key in _WRAPPERS if isinstance(state.get(key), dict)]


def _is_tensor(value: Inert) -> bool:
    """True if an object that was not made would have been some kind of tensor."""
    return value.kind.startswith(("torch._utils._rebuild", "torch._tensor.", "torchao."))


def _flat(path: Path, state: Mapping[Any, Any], kind: type) -> dict[str, Any]:
    """The tensors in dicts that lie in one another; a dict that is in two places counts twice."""
    tensors: dict[str, Any] = {}
    level, count = [("", state)], 0
    for _ in range(_DEEPEST):
        inner = []
        for prefix, values in level:
            count += len(values)
            if count > _MOST_NAMES:
                raise CheckpointError(
                    f"{path} holds more than {_MOST_NAMES:,} names, as no checkpoint does."
                )
            for name, value in values.items():
                if not isinstance(name, str):
                    continue
                full = f"{prefix}{name}"
                if isinstance(value, kind):
                    try:
                        put(tensors, full, value)
                    except ValueError as error:
                        raise CheckpointError(f"{path} cannot be read: {error}.") from error
                elif isinstance(value, dict):
                    inner.append((f"{full}.", value))
        level = inner
    return tensors


def facts_of(state: Any) -> dict[str, int | float | str]:
    """The numbers and texts that a file has beside its state dict."""
    if not isinstance(state, dict) or not _wrappers(state):
        return {}
    return {
        k: v for k, v in state.items() if isinstance(k, str) and isinstance(v, int | float | str)
    }


def pairs_of(state: Any) -> tuple[str, ...]:
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


def check_plain(path: Path, name: str, tensor: Any) -> None:
    """Raise CheckpointError unless a tensor is its elements, one after another, and no more."""
    import torch

    kind = str(tensor.layout).removeprefix("torch.")
    if tensor.layout == torch.strided and not tensor.is_nested:
        if not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()):
            return
        kind = "quantized" if tensor.is_quantized else "lazily conjugated or negated"
    raise CheckpointError(
        f"{path}: {name} is a {kind} tensor, which is not read here. Save it as a dense one, such "
        "as tensor.to_dense()."
    )


def check_held(path: Path, name: str, tensor: Any) -> None:
    """Raise CheckpointError if a tensor is larger than what is stored of it."""
    held = tensor.untyped_storage().nbytes() // tensor.itemsize
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and max(tensor.numel(), tensor.storage_offset() + reach + 1) > held:
        raise CheckpointError(
            f"{path}: {name} {tuple(tensor.shape)} has {tensor.numel():,} elements, and {held:,} "
            "are stored: it was expanded. Save a copy of it, tensor.contiguous()."
        )
