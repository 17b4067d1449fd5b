"""The recipes of docs/cookbook.md, which tests run."""

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[1] / "docs" / "cookbook.md").read_text()
# Language, file name or nothing, and text of each block of a recipe.
RECIPES: dict[str, list[tuple[str, str, str]]] = {
    name: re.findall(r'^```(\w*)(?: title="(\S+)")?\n(.*?)^```', text, re.M | re.S)
    for name, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", _PAGE, re.M | re.S)
}
