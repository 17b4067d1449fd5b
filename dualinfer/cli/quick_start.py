"""What the command's own process does to start sooner, and a library must not do.

With torch installed, transformers imports it with its config classes, and half of torch's compiler
behind it: seconds, of which fused mode uses nothing.
"""

import sys
from pathlib import Path
from types import ModuleType

from ..api import unserved
from ..checkpoint.files import read_json
from ..errors import CheckpointError
from ..model.families import knows_family

OWN_PROCESS = "own process"  # the context's object where nothing but the command runs


def start_sooner(folder: Path) -> None:
    """Let transformers do without torch, if it is not imported yet and fused mode runs `folder`."""
    if "transformers" in sys.modules:
        return
    try:
        if not knows_family(read_json(folder / "config.json")):
            return
    except CheckpointError:
        return
    there = sys.modules.get("torch")
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] (as Python spells "absent")
    try:
        import transformers
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()  # which remembers its answer
    finally:
        del sys.modules["torch"]
        if there is not None:
            sys.modules["torch"] = there
    # Its own would read the source of all models, a second time.
    models = ModuleType("transformers.models")
    models.__path__ = [str(Path(next(iter(transformers.__path__))) / "models")]
    sys.modules.setdefault(models.__name__, models)
    if unserved(folder) is not None:  # a field keeps it out, and transformers' model needs torch
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
            del sys.modules[name]
