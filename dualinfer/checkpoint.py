"""Sources of named tensors: a HF folder (safetensors or .bin) or a live module."""

import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import BackendNotAvailableError, CheckpointError, CheckpointNotFoundError
from .weights import TensorSource

_SAFETENSORS_DTYPES = {
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
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_WRAPPERS = ("module", "model", "state_dict")


class SafetensorsSource:
    """Tensors of one or several safetensors files, memory-mapped; a read copies one tensor."""

    def __init__(self, folder: Path, files: Iterable[str], description: str = ""):
        from safetensors import SafetensorError, safe_open

        self.description = description or str(folder)
        self._handles: dict[str, Any] = {}
        for file in files:
            path = folder / file
            if not path.is_file():
                raise CheckpointNotFoundError(
                    f"{path} is named by the checkpoint, but is not there."
                )
            try:
                handle = safe_open(path, framework="np")
                for name in handle.keys():  # noqa: SIM118 (it has no __iter__)
                    self._handles[name] = handle
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: "
                    f"{error}. Was the download or copy cut short?"
                ) from error

    def names(self) -> Iterable[str]:
        """Names as stored."""
        return self._handles.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the file's header."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """NumPy's name of the stored dtype; safetensors' own where NumPy has none (fp8)."""
        stored = str(self._handles[name].get_slice(name).get_dtype())
        return _SAFETENSORS_DTYPES.get(stored, stored)

    def read(self, name: str) -> Any:
        """The tensor as a NumPy array, bfloat16 through ml_dtypes."""
        return self._handles[name].get_tensor(name)


class TorchSource:
    """Torch tensors by name: a live module's state, or `.bin` files. Read without a copy."""

    def __init__(self, tensors: Mapping[str, Any], description: str):
        self._tensors = tensors
        self.description = description

    def names(self) -> Iterable[str]:
        """Names as stored."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        """NumPy's name of the tensor's dtype."""
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def read(self, name: str) -> Any:
        """The tensor itself, detached from autograd."""
        return self._tensors[name].detach()


def open_module(module: Any) -> TorchSource:
    """The parameters and persistent buffers of a live torch module, shared and never changed.

    Raises CheckpointError for a module on the meta device, which holds no values.
    """
    tensors = module.state_dict()
    empty = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty:
        raise CheckpointError(
            f"The {type(module).__name__} lies on the meta device and holds no values "
            f"({empty[0]} and {len(empty) - 1} more). Load its weights first, or pass the "
            "checkpoint's folder as the model."
        )
    return TorchSource(tensors, f"the live {type(module).__name__}")


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


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The checkpoint's folder; it must exist and hold config.json."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.is_file() else "does not exist"
        raise CheckpointNotFoundError(
            f"{str(path)!r} {kind}; expected the folder of a HF checkpoint. dualinfer downloads "
            "nothing: fetch a model first, for instance with huggingface_hub.snapshot_download()."
        )
    if not (folder / "config.json").is_file():
        raise CheckpointNotFoundError(f"{folder} holds no config.json, so it is no HF checkpoint.")
    return folder


def open_checkpoint(folder: Path) -> TensorSource:
    """The weights of a HF folder: safetensors first, then `.bin`, single file or with an index.

    `.bin` files need torch and are read with `weights_only=True`.
    """
    if (folder / "model.safetensors.index.json").is_file():
        return SafetensorsSource(folder, _indexed_files(folder, "model.safetensors.index.json"))
    if (folder / "model.safetensors").is_file():
        return SafetensorsSource(folder, ["model.safetensors"])
    if (folder / "pytorch_model.bin.index.json").is_file():
        return _open_bin(folder, _indexed_files(folder, "pytorch_model.bin.index.json"))
    if (folder / "pytorch_model.bin").is_file():
        return _open_bin(folder, ["pytorch_model.bin"])
    raise CheckpointNotFoundError(
        f"{folder} holds none of model.safetensors, model.safetensors.index.json, "
        "pytorch_model.bin and pytorch_model.bin.index.json."
    )


def open_weights(path: str | os.PathLike[str]) -> TensorSource:
    """The weights of a HF folder, or of one state-dict file: .safetensors, or torch's.

    A torch file may hold its state dict under "module", "model" or "state_dict". It needs torch and
    is read with `weights_only=True`.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        return open_checkpoint(file)
    if not file.exists():
        raise CheckpointNotFoundError(
            f"checkpoint={str(path)!r} does not exist; expected the folder of a HF checkpoint or a "
            "state-dict file."
        )
    if file.suffix == ".safetensors":
        return SafetensorsSource(file.parent, [file.name], str(file))
    if file.suffix in _TORCH_SUFFIXES:
        return _open_bin(file.parent, [file.name], str(file))
    raise CheckpointError(
        f"checkpoint={str(path)!r} is no checkpoint by its name; expected a folder, .safetensors, "
        f"{', '.join(_TORCH_SUFFIXES)}."
    )


def _indexed_files(folder: Path, index: str) -> list[str]:
    """The files that an index names; each must lie in the checkpoint's own folder.

    The check is on the written path: HF's cache links its files to another folder, which is fine.
    """
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / index} has no weight_map.")
    files = sorted(set(weight_map.values()), key=str)
    for file in files:
        path = PurePosixPath(file) if isinstance(file, str) and "\\" not in file else None
        if path is None or path.is_absolute() or ".." in path.parts or ":" in file:
            raise CheckpointError(
                f"{folder / index} names the file {file!r}, which is outside the checkpoint's "
                "folder."
            )
    return files


def _open_bin(folder: Path, files: Iterable[str], description: str = "") -> TorchSource:
    try:
        import torch
    except ImportError as error:
        raise BackendNotAvailableError(
            f"{folder} holds .bin weights, which only torch can read, and torch is not installed. "
            "Install `dualinfer[torch]`, or convert the checkpoint to safetensors."
        ) from error
    tensors: dict[str, Any] = {}
    for file in files:
        path = folder / file
        if not path.is_file():
            raise CheckpointNotFoundError(f"{path} is named by the checkpoint, but is not there.")
        try:
            mapped = zipfile.is_zipfile(path)  # files of torch < 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # torch raises many kinds for a damaged or unsafe file
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) is no state dict that torch reads with "
                "weights_only=True: it is damaged, or holds other objects than tensors, such as a "
                f"whole pickled module. Save module.state_dict() instead. ({type(error).__name__})"
            ) from error
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{path} holds a {type(state).__name__}, expected a dict of tensors."
            )
        wrapped = [key for key in _WRAPPERS if isinstance(state.get(key), dict)]
        if len(wrapped) > 1:
            raise CheckpointError(
                f"{path} holds {' and '.join(wrapped)}, each a dict; which one is the model's "
                "weights? Save that one alone."
            )
        inner = state[wrapped[0]] if wrapped else state
        found = {name: t for name, t in inner.items() if isinstance(t, torch.Tensor)}
        if not found:
            held = ", ".join(map(str, list(inner)[:8])) or "nothing"
            raise CheckpointError(
                f"{path} holds no tensors by name, but {held}. Save the state dict itself."
            )
        tensors |= found
    return TorchSource(tensors, description or str(folder))
