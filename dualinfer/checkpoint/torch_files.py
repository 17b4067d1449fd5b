"""Files that torch.save wrote, read by parts: torch itself reads only what describes the tensors.

A zip archive holds a pickle, which torch reads with `weights_only=True`, and the elements of each
storage as a record of its own. Those are read here as they lie in the file, once each record is
known to be stored as it is and to be as long as the pickle says.
"""

import io
import os
import struct
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import to_numpy
from ..errors import BackendNotAvailableError, CheckpointError, shortened, shown
from .files import Entry, StoredFile

_WRAPPERS = ("module", "model", "state_dict")
_DESCRIBING = ("data.pkl", "version", "byteorder", "constants.pkl")
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # its mark, and the lengths of a name and of what follows
_ENCRYPTED = 0x1


class TorchFile(StoredFile):
    """A zip archive of torch.save that holds a state dict, perhaps below "module" or the like."""

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            self._records = self._find_records()
            state, keys = self._describe()
        except CheckpointError:
            raise
        except Exception as error:  # zipfile and torch raise many kinds
            raise no_state_dict(path, self.size, error) from error
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

    def _describe(self) -> tuple[Any, dict[int, str]]:
        """What the pickle holds, tensors on the meta device, and the record of each storage's mark.

        torch reads a copy of the archive in which the records of elements are empty. It marks each
        storage with the place of its record there.
        """
        import torch

        order = self._bytes_of("byteorder").decode() if "byteorder" in self._records else "little"
        if order != sys.byteorder:
            raise CheckpointError(
                f"{self.path} was written on a {order}-endian machine, and this one is "
                f"{sys.byteorder}-endian. Convert the checkpoint to safetensors there."
            )
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
        return torch.load(copy, map_location="meta", weights_only=True, mmap=False), marks

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


class OldTorchFile(StoredFile):
    """A file of torch before 1.6, which torch reads whole."""

    def __init__(self, path: Path):
        super().__init__(path)
        import torch

        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
        except Exception as error:  # torch raises many kinds for a damaged or unsafe file
            raise no_state_dict(path, self.size, error) from error
        self._tensors = find_tensors(path, state)
        for name, tensor in self._tensors.items():
            check_plain(path, name, tensor)
            if tensor.is_meta:
                raise _no_values(path, name)
            check_held(path, name, tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._entries[name] = Entry(dtype, tuple(tensor.shape), 0, tensor.stride())

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """As of every file, from what is in memory."""
        part = to_numpy(self._tensors[name].detach()[index or ...])
        if out is None:
            return part.copy()
        out[...] = part
        return out


def open_torch_file(path: Path) -> StoredFile:
    """A file of torch.save, of a state dict or of a dict that holds one by a known name."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise BackendNotAvailableError(
            f"{path} holds .bin weights, which only torch can read, and torch is not installed. "
            "Install `dualinfer[torch]`, or convert the checkpoint to safetensors."
        ) from error
    is_archive = os.path.isfile(path) and zipfile.is_zipfile(path)
    return TorchFile(path) if is_archive else OldTorchFile(path)


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


def find_tensors(path: Path, state: Any) -> dict[str, Any]:
    """The tensors by name of what a file holds."""
    import torch

    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, expected a dict of tensors.")
    wrapped = [key for key in _WRAPPERS if isinstance(state.get(key), dict)]
    if len(wrapped) > 1:
        raise CheckpointError(
            f"{path} holds {' and '.join(wrapped)}, each a dict; which one is the model's "
            "weights? Save that one alone."
        )
    inner = state[wrapped[0]] if wrapped else state
    tensors = {name: t for name, t in inner.items() if isinstance(t, torch.Tensor)}
    if not tensors:
        names = [key if isinstance(key, str) else f"a {type(key).__name__}" for key in inner]
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
    return tensors


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
