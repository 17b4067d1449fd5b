"""Writes the tables of families in docs/models.md and README.md from the registry.

`python docs/families.py` writes them anew: a row for each file of dualinfer/model/families. What a
row of models.md says in its last cell stays; a new file's begins with its docstring.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dualinfer.model.families import served_modules, served_types

ROOT = Path(__file__).parents[1]
_BEGIN, _END = "<!-- by docs/families.py -->\n", "<!-- to here -->\n"
_HEAD = "| family | HF classes | notes |\n|---|---|---|\n"
_MOST = 6  # names of classes of one kind that are written out


def pages() -> dict[Path, str]:
    """What the two pages should hold."""
    models, readme = ROOT / "docs" / "models.md", ROOT / "README.md"
    text = models.read_text("utf-8")
    before, rest = text.split(_BEGIN)
    table, after = rest.split(_END)
    told = {line.split(" | ")[0]: line for line in table.splitlines()[2:]}
    notes = {
        name: line.split(" | ", 2)[2].removesuffix(" |")
        for cell, line in told.items()
        for name in cell.removeprefix("| ").split(", ")
    }
    rows = "".join(_row(module, notes) for module in served_modules())
    counted = re.sub(
        r"\b\d+ families", f"{len(served_types())} families", readme.read_text("utf-8")
    )
    return {models: f"{before}{_BEGIN}{_HEAD}{rows}{_END}{after}", readme: counted}


def _row(module: ModuleType, notes: dict[str, str]) -> str:
    types: Sequence[str] = list(module.CLASSES)
    first = (module.__doc__ or "").split(". ")[0].split(".\n")[0]
    note = next((notes[name] for name in types if name in notes), " ".join(first.split()))
    return f"| {', '.join(types)} | {_classes(module.CLASSES.values())} | {note} |\n"


def _classes(groups: Sequence[Sequence[str]]) -> str:
    """`A*`, `B*`: `ForCausalLM`, `Model`: classes by what their names begin and end with."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for names in groups:
        prefix = os.path.commonprefix(list(names))
        begin = prefix.removesuffix("For") if len(names) > 1 else ""
        if not all(name[len(begin) :][:1].isupper() for name in names):  # within a word
            begin = re.sub(r"[A-Z][a-z0-9]*$", "", begin)
        ends = tuple(name.removeprefix(begin) for name in names)
        kinds.setdefault(ends, []).append(begin)
    parts = []
    for ends, begins in kinds.items():
        if len(begins) == 1:
            parts.append(", ".join(f"`{begins[0]}{end}`" for end in ends))
        elif len(begins) > _MOST:
            parts.append(", ".join(f"`*{end}`" for end in ends))
        else:
            names = ", ".join(f"`{begin}*`" for begin in dict.fromkeys(begins))
            parts.append(f"{names}: {', '.join(f'`{end}`' for end in ends)}")
    return "; ".join(parts)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
