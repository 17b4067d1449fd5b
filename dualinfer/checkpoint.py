"""Sources of named tensors: a HF folder (safetensors or .bin) or a live module."""

import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .checkpoint_files import TensorFile, check_inside, read_json
from .errors import BackendNotAvailableError, CheckpointError, CheckpointNotFoundError
from .sharded_checkpoint import INDEX, ShardedSource
from .weights import TensorSource

_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_WRAPPERS = ("module", "model", "state_dict")


class SafetensorsSource:
    """Tensors of one or several safetensors files; a read copies what is asked for, and no more."""

    def __init__(self, folder: Path, files: Iterable[str], description: str = ""):
        self.description = description or str(folder)
        self._files: dict[str, TensorFile] = {}
        for file in map(TensorFile, [folder / name for name in files]):
            self._files |= dict.fromkeys(file.names(), file)

    def names(self) -> Iterable[str]:
        """Names as stored."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the file's header."""
        return self._files[name].shape(name)

    def dtype(self, name: str) -> str:
        """NumPy's name of the stored dtype; safetensors' own where NumPy has none."""
        return self._files[name].dtype(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor, or the part of it at `index`, as a NumPy array; bfloat16 by ml_dtypes."""
        return self._files[name].read(name, index)


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

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor itself, or a view of the part at `index`, detached from autograd."""
        tensor = self._tensors[name].detach()
        return tensor if index is None or _takes_all(index, tensor.shape) else tensor[index]


def _takes_all(index: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    return all(part.indices(size) == (0, size, 1) for part, size in zip(index, shape, strict=True))


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

    A folder that `save_mp_checkpoint_path` wrote is one as well. `.bin` files need torch and are
    read with `weights_only=True`.
    """
    if (folder / INDEX).is_file():
        return ShardedSource(folder)
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


def _indexed_files(folder: Path, name: str) -> list[str]:
    """The files that an index names."""
    index = folder / name
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    return [check_inside(index, file) for file in sorted(set(weight_map.values()), key=str)]


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
