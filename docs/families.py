"""Writes what pages say of families from the registry: docs/models.md, docs/classes.md, README.md.

`python docs/families.py` writes them anew. docs/models.md has a row for each file of
dualinfer/model/families, whose last cell stays as it is; a new file's begins with its docstring.
"""

import re
from pathlib import Path
from types import ModuleType

from dualinfer.model.families import served_modules, served_types

ROOT = Path(__file__).parents[1]
_BEGIN, _END = "<!-- by docs/families.py -->\n", "<!-- to here -->\n"
_CLASSES = """# Classes: which of Hugging Face's are served

By `model_type`, as a checkpoint's config.json has it. [models.md](models.md) says what else to
know of each.

| model_type | classes in fused mode |
|---|---|
"""


def pages() -> dict[Path, str]:
    """What the three pages should hold."""
    models, readme = ROOT / "docs" / "models.md", ROOT / "README.md"
    text = models.read_text("utf-8")
    before, rest = text.split(_BEGIN)
    table, after = rest.split(_END)
    notes = {
        name: line.split(" | ", 1)[1].removesuffix(" |")
        for line in table.splitlines()[2:]
        for name in line.split(" | ")[0].removeprefix("| ").split(", ")
    }
    rows = "".join(_row(module, notes) for module in served_modules())
    head = "| model types | notes |\n|---|---|\n"
    counted = re.sub(
        r"\b\d+ families", f"{len(served_types())} families", readme.read_text("utf-8")
    )
    classes = {name: own for module in served_modules() for name, own in module.CLASSES.items()}
    listed = "".join(
        f"| {name} | {', '.join(f'`{own}`' for own in classes[name])} |\n"
        for name in sorted(classes)
    )
    return {
        models: f"{before}{_BEGIN}{head}{rows}{_END}{after}",
        ROOT / "docs" / "classes.md": _CLASSES + listed,
        readme: counted,
    }


def _row(module: ModuleType, notes: dict[str, str]) -> str:
    types = list(module.CLASSES)
    first = (module.__doc__ or "").split(". ")[0].split(".\n")[0]
    note = next((notes[name] for name in types if name in notes), " ".join(first.split()))
    return f"| {', '.join(types)} | {note} |\n"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
