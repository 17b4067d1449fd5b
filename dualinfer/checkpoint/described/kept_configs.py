"""Keep transformers' reading of a config on disk, for processes that have not imported it.

transformers imports torch where that is installed, and both take seconds: most of the start of an
engine on JAX. To know a model takes its fields alone, which are kept by what was written and by
transformers' version; HF's object is made where a caller asks for it.
"""

import ast
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...model.kept_config import KeptConfig
from ...system.private_folder import cache_folder, check_owner, make_private

_FORMAT = 1  # of what is kept: another number wherever `make` gives other fields
_MOST_BYTES = 1 << 20  # of a file; configs take some thousands


_imported: list[bool] = []  # one, where transformers was first imported by `keep`


def keep(kind: str, written: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """`make()`, a HF config of `kind` made of `written` and nothing else, or its kept fields.

    Those serve only where transformers has not been imported: what a process has registered with
    it or changed in it goes before. Nor is anything kept where it was there before this was called.
    """
    is_there = "transformers" in sys.modules
    if is_there and not _imported:
        return make()
    path = _path(kind, written)
    fields = None if path is None or is_there else _read(path)
    if fields is not None:
        return KeptConfig(fields, make)
    _imported.append(True)
    config = make()
    if path is not None:
        _write(path, config.to_dict())
    return config


def _path(kind: str, written: Mapping[str, Any]) -> Path | None:
    """The file of a config; None where it cannot be told apart from another one."""
    try:
        theirs = version("transformers")
        if "dev" in theirs:  # one name for many contents
            return None
        text = json.dumps([_FORMAT, kind, theirs, written], sort_keys=True, allow_nan=False)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return cache_folder().resolve() / "configs" / f"{name}.txt"
    except (PackageNotFoundError, OSError, RuntimeError, TypeError, ValueError):
        return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        make_private(path.parent)
        check_owner(path.stat(), str(path))
        fields = ast.literal_eval(path.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return fields if isinstance(fields, dict) else None


def _write(path: Path, fields: dict[str, Any]) -> None:
    """Keep them if Python's literals say them as they are; to keep nothing is no fault."""
    try:
        text = repr(fields)  # JSON has no ints as keys, of which HF's labels are
        if len(text) > _MOST_BYTES or not _equal(ast.literal_eval(text), fields):
            return
        make_private(path.parent)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".new", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except (OSError, RuntimeError, ValueError, SyntaxError, MemoryError):
        return


def _equal(read: Any, given: Any) -> bool:
    """True if both are the same, and of the same types: 1 is neither 1.0 nor True."""
    if type(read) is not type(given):
        return False
    if isinstance(read, dict):
        return read.keys() == given.keys() and all(_equal(read[n], given[n]) for n in read)
    if isinstance(read, list | tuple):
        return len(read) == len(given) and all(map(_equal, read, given))
    return bool(read == given)
