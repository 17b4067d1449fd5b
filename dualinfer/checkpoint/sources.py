"""Sources of named tensors: a HF folder (safetensors or .bin), a GGUF file or a live module."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, CheckpointNotFoundError, counted, listing, reads, shortened
from ..model.load_plan import TensorSource
from ..model.peft_modules import adapters_in_use, plain_tensors
from ..quantization.formats import gptq
from .files.pieces import INDEX, ShardedSource
from .files.safetensors import StoredFile, TensorFile, check_inside, read_json
from .files.torch_files import open_torch_file
from .foreign.deepspeed import open_dict, open_folder, open_json
from .foreign.meta_llama import is_meta_folder
from .gguf.model import SUFFIX, find_gguf, is_gguf
from .gguf.tensors import GgufSource

TORCH_SUFFIXES = (".bin", ".pt", ".pth")
ADAPTER = "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."  # of peft's names
# Of several, transformers takes the first (modeling_utils._get_resolved_checkpoint_files).
FORMS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_PART = re.compile(r"-\d+-of-\d+\.\w+$")


def forms_of(names: Iterable[str]) -> list[str]:
    """The files of a folder's `names` that are its weights, or indices of them, in HF's order.

    Where there are none of HF's names it is the only file of AutoGPTQ's or AutoAWQ's, which they
    named by its bits and groups.
    """
    held = set(names)
    forms = [form for form in FORMS if form in held]
    if forms or held.isdisjoint(gptq.FILES):
        return forms
    others = [name for name in held if name.endswith(".safetensors") and "/" not in name]
    return others if len(others) == 1 and not _PART.search(others[0]) else []


def _forms_in(folder: Path) -> list[str]:
    """`forms_of` the files of a folder."""
    return forms_of(name for name in os.listdir(folder) if os.path.isfile(folder / name))


class FilesSource:
    """Tensors of one or several files; a read copies what is asked for, and no more.

    `index` says, by name, in which of `files` a tensor lies, if an index does. Raises
    CheckpointError for a name that two files hold, or that is not where the index says.
    """

    def __init__(
        self,
        files: Mapping[str, StoredFile],
        description: str,
        index: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ):
        self.description, self.notes = description, tuple(notes)
        self.metadata = {k: v for file in files.values() for k, v in file.metadata.items()}
        self._files: dict[str, StoredFile] = {}
        twice = []
        for file in files.values():
            for name in file.names():
                if name in self._files:
                    twice.append(f"{name} ({self._files[name].path.name}, {file.path.name})")
                self._files[name] = file
        index = index or {}
        astray = [n for n, file in index.items() if self._files.get(n) is not files[file]]
        problems = {"tensors held by two files": twice}
        problems["tensors that are not in the file that the index names"] = [
            f"{name} ({shortened(index[name])})" for name in astray
        ]
        faults = [f"{what} {counted(n)}" for what, n in problems.items() if n]
        if faults:
            raise CheckpointError(
                f"The files of {description} contradict each other: {'; '.join(faults)}. Were they "
                "copied from two checkpoints? Fetch or save them again."
            )

    def names(self) -> Iterable[str]:
        """Names as stored."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as the file says."""
        return self._files[name].shape(name)

    def dtype(self, name: str) -> str:
        """NumPy's name of the stored dtype; the file's own where NumPy has none."""
        return self._files[name].dtype(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor, or the part of it at `index`, as a NumPy array; bfloat16 by ml_dtypes."""
        return self._files[name].read(name, index)


class TorchSource:
    """Torch tensors by name: a live module's state. Read without a copy."""

    notes: tuple[str, ...] = ()

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

    Those of peft's adapters are left out, and the others have the names that they have without.

    Raises CheckpointError for a module on the meta device, which holds no values.
    """
    adapted = bool(adapters_in_use(module))
    tensors = dict(plain_tensors(module)) if adapted else module.state_dict()
    empty = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty:
        raise CheckpointError(
            f"The {type(module).__name__} lies on the meta device and holds no values "
            f"({empty[0]} and {len(empty) - 1} more). Load its weights first, or pass the "
            "checkpoint's folder as the model."
        )
    return TorchSource(tensors, f"the live {type(module).__name__}")


def in_other_case(path: Path) -> Path | None:
    """A path that is there and differs from `path` in upper and lower case alone."""
    found = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:
        try:
            names = sorted(os.listdir(found))
        except OSError:
            return None
        alike = [name for name in names if name.casefold() == part.casefold()]
        if part not in names and part != ".." and not alike:
            return None
        found /= part if part in names or part == ".." else alike[0]
    return None if found == path else found


def near_path(path: Path) -> Path | None:
    """A path that is there by nearly that name: in other case, or a checkpoint's, misspelt."""
    if (alike := in_other_case(path)) is not None:
        return alike
    found = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:
        if part != ".." and not os.path.exists(found / part):
            try:
                names = sorted(os.listdir(found))
            except OSError:
                return None
            part = next(iter(difflib.get_close_matches(part, names, 1, 0.75)), None)
            if part is None:
                return None
        found /= part
    return found if found != path and is_checkpoint(found) else None


@reads()
def check_folder(path: str | os.PathLike[str]) -> Path:
    """The checkpoint's folder, which must hold config.json, or the GGUF file that is the model.

    That is the path itself, or the only one in a folder without other weights.
    """
    folder = Path(os.path.expanduser(path))
    if is_gguf(folder):
        return folder
    if not os.path.isdir(folder):
        near = near_path(folder)
        there = "" if near is None else f" ({str(near)!r} does)"
        kind = "is a file" if os.path.isfile(folder) else f"does not exist{there}"
        raise CheckpointNotFoundError(
            f"{shortened(repr(str(path)))} {kind}; expected the folder of a HF checkpoint, a "
            f"{SUFFIX} file, or a model of the hub such as 'Qwen/Qwen3-0.6B'."
        )
    described = os.path.isfile(folder / "config.json") or is_meta_folder(folder)
    if not (_forms_in(folder) or os.path.isfile(folder / INDEX)):
        with suppress(CheckpointNotFoundError) if described else nullcontext():
            packed = find_gguf(folder)
            if packed is not None:
                return packed
    if not described:
        if os.path.isfile(folder / ADAPTER):
            raise _adapter_error(folder)
        raise CheckpointNotFoundError(
            f"{folder} holds neither config.json nor a {SUFFIX} file, so it is no checkpoint."
        )
    return folder


def holds_weights(folder: Path) -> bool:
    """True for a folder that holds a model's weights, of whatever form; adapters are none."""
    if _forms_in(folder) or os.path.isfile(folder / INDEX):
        return True
    return any(is_gguf(folder / name) for name in os.listdir(folder))


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """True for the path of a folder with a config.json or Meta's files, or of a GGUF file."""
    is_described = os.path.isfile(os.path.join(path, "config.json"))
    return is_described or is_gguf(path) or is_meta_folder(Path(path))


@reads()
def open_checkpoint(folder: Path) -> TensorSource:
    """The weights of a GGUF file, or of a HF folder those that transformers takes of several.

    These are safetensors, then `.bin`, and of both a single file before an index. A folder that
    `save_mp_checkpoint_path` wrote is one as well, if it holds no other. Of `.bin` files nothing is
    run, and torch is not needed. An adapter beside them is not looked at.
    """
    if is_gguf(folder):
        return GgufSource(folder)
    if os.path.isfile(folder / ADAPTER) and not holds_weights(folder):
        raise _adapter_error(folder)
    forms = _forms_in(folder)
    if os.path.isfile(folder / INDEX):
        if forms:
            raise CheckpointError(
                f"{folder} holds two checkpoints, {INDEX} and {' and '.join(forms)}. Which one is "
                "the model? Move the other one elsewhere."
            )
        return ShardedSource(folder)
    if not forms:
        packed = find_gguf(folder)
        if packed is not None:
            return GgufSource(packed)
        written = open_folder(folder)
        if written is not None:
            return written
        raise _no_weights(folder)
    form, *others = forms
    notes = [f"{form} was read, as transformers does, not {', '.join(others)}"] if others else []
    if form not in FORMS:
        notes = [f"{form} was read, which has none of transformers' names and is the only one"]
    opener = TensorFile if "safetensors" in form else open_torch_file
    if not form.endswith(".json"):
        return FilesSource({form: opener(folder / form)}, str(folder), notes=notes)
    index = read_index(folder / form)
    files = {file: opener(folder / file) for file in sorted(set(index.values()))}
    return FilesSource(files, str(folder), index, notes)


@reads()
def open_weights(
    path: str | os.PathLike[str] | Mapping[str, Any], base_dir: str = ""
) -> TensorSource:
    """The weights of a HF folder, of a GGUF file, or of a state-dict file (.safetensors, torch's).

    DeepSpeed's checkpoint JSON, as a file or a dict, and the folders of its training serve as well,
    and Meta's; `fit` makes them, and names with a wrapper's prefix, those of a model. A torch file
    may hold its state dict under "module", "model" or "state_dict"; nothing in it is run.
    """
    if isinstance(path, Mapping):
        return open_dict(path, base_dir)
    file = Path(os.path.expanduser(path))
    if file.suffix == ".json" and os.path.isfile(file):
        return open_json(file, base_dir)
    if os.path.isdir(file) or is_gguf(file):
        return open_checkpoint(file)
    label = f"checkpoint={shortened(repr(str(path)))}"
    if not os.path.isfile(file):
        raise CheckpointNotFoundError(
            f"{label} does not exist; expected the folder of a HF checkpoint or a state-dict file."
        )
    if file.suffix == ".safetensors":
        opener = TensorFile
    elif file.suffix in TORCH_SUFFIXES:
        opener = open_torch_file
    else:
        raise CheckpointError(
            f"{label} is no checkpoint by its name; expected a folder, .safetensors, {SUFFIX}, "
            f"{', '.join(TORCH_SUFFIXES)}."
        )
    source = FilesSource({file.name: opener(file)}, str(file))
    names = list(source.names())
    if names and all(name.startswith(ADAPTER_PREFIX) for name in names):
        raise _adapter_error(file.parent)
    return source


def _adapter_error(folder: Path) -> CheckpointError:
    """The error of an adapter without its model, whose name it says if that is known."""
    try:
        config = read_json(folder / ADAPTER)
    except CheckpointError:
        config = {}
    kind, base = config.get("peft_type"), config.get("base_model_name_or_path")
    what = f"{shortened(kind)} adapter" if isinstance(kind, str) else "adapter"
    of = f" for {shortened(base)}" if isinstance(base, str) and base else ""
    return CheckpointError(
        f"{folder} holds no model, but an adapter of peft ({what}{of}). Pass the model, and "
        f"adapter={str(folder)!r}."
    )


def _no_weights(folder: Path) -> CheckpointNotFoundError:
    """The error of a folder without weights, which says what lies there in their place."""
    for form in FORMS:
        if os.path.lexists(folder / form):  # and is no file
            what = "no file"
            if os.path.islink(folder / form):
                what = f"a link to {os.readlink(folder / form)}, where no file is"
            return CheckpointNotFoundError(
                f"{folder / form} is {what}. Put the weights there, or fetch the model again."
            )
    kinds = (".safetensors", *TORCH_SUFFIXES)
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in kinds)
    held = f" It holds {listing(names)}: rename what is the model." if names else ""
    if names and all(_PART.search(name) for name in names):
        held = f" It holds {listing(names)}, parts whose index is missing: fetch that again."
    return CheckpointNotFoundError(f"{folder} holds none of {', '.join(FORMS)}.{held}")


@reads()
def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor that an index names."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map.")
    return {name: check_inside(path, file) for name, file in weight_map.items()}
