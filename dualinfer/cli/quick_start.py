"""Steps that let the command's own process start sooner, and that a library must not take.

With torch installed, transformers imports it with its config classes, and half of torch's compiler
behind it; and it reads the source of every model for the names in it. That is seconds, of which
fused mode uses nothing.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..checkpoint.described.hf_config import read_written
from ..checkpoint.described.tokenizer import is_plain
from ..errors import DualinferError
from ..model.families import knows_family
from ..opening import unserved

OWN_PROCESS = "own process"  # the context's object where nothing but the command runs


def start_sooner(folder: Path) -> None:
    """Let transformers do without torch, if it is not imported yet and fused mode runs `folder`.

    Where the tokenizer is of a class of no model's, it does without most models' names, too.
    """
    if "transformers" in sys.modules:
        return
    try:
        if not knows_family(read_written(folder)):
            return
    except DualinferError:  # told where the model is opened
        return
    with _replaced("torch", None):  # as Python spells "absent"
        if is_plain(folder):
            _read_few_models()
        import transformers
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()  # which remembers its answer
    # Its own would read the source of all models, a second time.
    models = _package("transformers.models", Path(next(iter(transformers.__path__))) / "models")
    sys.modules.setdefault(models.__name__, models)
    if unserved(folder) is not None:  # a field keeps it out, and transformers' model needs torch
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
            del sys.modules[name]


def _read_few_models() -> None:
    """Import transformers so that it reads the names in models/auto alone."""
    spec = find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    package: Any = _package("transformers", Path(spec.submodule_search_locations[0]))
    package.__version__ = version("transformers")  # which its parts ask for
    with _replaced("transformers", package):
        tools: Any = importlib.import_module("transformers.utils.import_utils")
    names_in = tools.define_import_structure
    tools.define_import_structure = lambda path, prefix: names_in(path / "auto", f"{prefix}.auto")
    try:
        importlib.import_module("transformers")
    finally:
        tools.define_import_structure = names_in


def _package(name: str, folder: Path) -> ModuleType:
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    return package


@contextmanager
def _replaced(name: str, module: Any) -> Iterator[None]:
    """Within it an import of `name` finds `module`."""
    there = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if there is not None:
            sys.modules[name] = there
