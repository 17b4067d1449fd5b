"""The files of one GGUF model, read and checked against one another."""

import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError, CheckpointNotFoundError, listing, shown
from ...quantization.formats.ggml import GgmlType
from .file import GgufFile, Strings

SUFFIX = ".gguf"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_LONGEST_VECTOR = 1 << 12


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """True for a file that is GGUF by its name."""
    return str(path).lower().endswith(SUFFIX) and os.path.isfile(path)


def find_gguf(folder: Path) -> Path | None:
    """The one GGUF model in a folder, by its first file.

    None where there is none; CheckpointNotFoundError where it is not clear which one.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if is_gguf(folder / name))
    except OSError:
        return None
    models = {split[1] if (split := _SPLIT.match(name)) else name: name for name in names[::-1]}
    if len(models) > 1:
        raise CheckpointNotFoundError(
            f"{folder} holds {len(models)} GGUF models: {listing(sorted(models.values()))}. Pass "
            "the path of one of them."
        )
    return next((folder / name for name in models.values()), None)


def _files_of(path: Path) -> list[Path]:
    """All files of a model, of which `path` is one."""
    split = _SPLIT.match(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    names = [f"{split[1]}-{i:05}-of-{split[3]}{path.suffix}" for i in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing or not count:
        raise CheckpointNotFoundError(
            f"{path} is one of {count} files of a model, and {listing(missing)} lie not beside it. "
            "Fetch all of them into one folder."
        )
    return [path.parent / name for name in names]


class GgufModel:
    """The files of one model, their headers read and checked against one another."""

    def __init__(self, path: Path):
        self.path = path
        self.files = [GgufFile(file) for file in _files_of(path)]
        self.fields = self.files[0].fields
        self.place: dict[str, GgufFile] = {}
        for file in self.files:
            twice = self.place.keys() & file.types.keys()
            if twice:
                raise CheckpointError(
                    f"{path}: {listing(sorted(twice))} lie in two of its files. Fetch them again."
                )
            self.place.update(dict.fromkeys(file.types, file))
        held = self.fields.get("split.count", 1), self.fields.get("split.tensors.count")
        held = tuple(n if isinstance(n, int | None) else shown(n) for n in held)
        if held[0] not in (0, len(self.files)) or held[1] not in (None, len(self.place)):
            raise CheckpointError(
                f"{path}: the model is one of {held[0]} files and {held[1]} tensors, and "
                f"{len(self.files)} files with {len(self.place)} tensors are here. Fetch all of "
                "them into one folder, under their own names."
            )
        named = self.fields.get("general.architecture")
        self.architecture = named if isinstance(named, str) else None

    def holds(self, name: str) -> bool:
        """True if there is a tensor of that name."""
        return name in self.place

    def rows(self, name: str) -> int:
        """The length of a tensor's first axis."""
        if name not in self.place:
            raise CheckpointError(f"{self.path} holds no {name}. Fetch or convert it again.")
        return self.place[name].shape(name)[0]

    def vector(self, name: str) -> np.ndarray:
        """A small tensor of floats."""
        file = self.place[name]
        if not file.types[name].is_plain or len(file.shape(name)) != 1:
            raise CheckpointError(f"{self.path}: {name} is no vector of floats. Convert it again.")
        if file.shape(name)[0] > _LONGEST_VECTOR:
            raise CheckpointError(f"{self.path}: {name} is longer than a head. Convert it again.")
        return file.read(name).astype(np.float32)

    def counts(self) -> Counter[GgmlType]:
        """The number of elements of each type."""
        counts: Counter[GgmlType] = Counter()
        for name, file in self.place.items():
            counts[file.types[name]] += math.prod(file.shape(name))
        return counts

    def token_id(self, name: str) -> Any:
        """The tokenizer's id of that name, None where it is absent."""
        return self.value(f"tokenizer.ggml.{name}_token_id")

    def value(self, name: str) -> Any:
        """A field's one value, None where it is absent."""
        value = self.fields.get(name)
        if isinstance(value, np.ndarray | Strings):
            raise CheckpointError(
                f"{self.path} has a list as {name}, expected one value. Convert it again."
            )
        return value

    def tokens(self) -> list[str]:
        """The tokenizer's vocabulary, empty where there is none."""
        name, file = "tokenizer.ggml.tokens", self.files[0]
        return file.strings(name) if isinstance(file.fields.get(name), Strings) else []

    def tokenizer(self) -> dict[str, Any]:
        """The fields of the tokenizer, without `tokenizer.`, arrays as lists."""
        file = self.files[0]
        found = {}
        for name, value in file.fields.items():
            if name.startswith("tokenizer."):
                whole = file.strings(name) if isinstance(value, Strings) else value
                found[name.partition(".")[2]] = (
                    whole.tolist() if isinstance(whole, np.ndarray) else whole
                )
        return found
