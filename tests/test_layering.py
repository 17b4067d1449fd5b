"""The import rules of docs/architecture.md, read from the syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "dualinfer"
FILES = sorted(ROOT.rglob("*.py"))
LONGEST_FILE = 400

FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "triton", "transformers"}
NEUTRAL = FRAMEWORKS | {"tokenizers", "huggingface_hub"}
TORCH_SIDE = {"torch", "triton"}
JAX_SIDE = {"jax", "jaxlib", "flax"}

# Lower rooms first. Each module, or every module below a package (`x.*`), and which modules of
# dualinfer it may import; a module may always import from its own package's folder where the row
# says `x.*`. Whoever adds a line here adds a dependency to the house.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "spec": set(),
    "outputs": set(),
    "progress": set(),
    "report": set(),
    "memory": set(),
    "private_folder": set(),
    "launching": {"errors"},
    "embedded": set(),
    "bench.case": set(),  # what a backend says of its ops
    "kernels.*": {"kernels.*"},
    "profiling": {"errors"},
    "arrays": {"errors"},
    "config.*": {"config.*", "errors"},
    "options": {"errors"},
    "weights": {"arrays", "errors", "spec"},
    "checkpoint_files": {"arrays", "errors"},
    "sharded_checkpoint": {"arrays", "checkpoint_files", "errors", "sharding", "weights"},
    "torch_files": {"arrays", "checkpoint_files", "errors"},
    "checkpoint": {
        *("checkpoint_files", "errors", "sharded_checkpoint", "torch_files", "weights"),
    },
    "hf_config": {"checkpoint_files", "errors", "families.*", "options"},
    "hf_module": {"errors"},
    "live": set(),
    "origin": {"agreement", "backends.base", "errors", "live", "spec", "weights"},
    "loading": {"arrays", "errors", "progress", "sharded_checkpoint", "sharding", "weights"},
    "saving": {
        *("agreement", "arrays", "checkpoint_files", "config.*", "errors", "sharded_checkpoint"),
        *("new_folder", "sharding", "spec", "tokenizer_files", "weights"),
    },
    "new_folder": set(),
    "tokenizer_files": {"errors"},
    "plan_table": {"arrays", "backends.base", "sharding", "spec", "weights"},
    "families.*": {"errors", "families.*", "spec", "weights"},
    "agreement": {"arrays", "errors"},
    "sharding": {"errors", "spec", "weights"},
    "backends.base": {
        "agreement",
        "errors",
        "profiling",
        "spec",
        "weights",
    },  # the neutral contract
    "backends.contract": {"backends.base", "spec", "weights"},  # of the ops
    "decoder.*": {"backends.contract", "decoder.*", "spec", "weights"},
    "backends": {"agreement", "backends.base", "config.*", "errors", "spec", "weights"},
    "inputs": {"arrays", "backends.base", "errors", "spec"},
    "generation": {"agreement", "backends.base", "errors", "profiling", "spec"},
    "backends.torch.*": {
        *("arrays", "config.*", "errors", "memory", "profiling", "progress", "spec"),
        *("backends.base", "backends.contract", "backends.torch.*", "bench.case", "decoder.*"),
        "kernels.triton.*",
        *("agreement", "loading", "private_folder", "sharding", "weights"),
    },
    "backends.jax.*": {
        *("arrays", "config.*", "errors", "memory", "profiling", "progress", "spec"),
        *("backends.base", "backends.contract", "backends.jax.*", "bench.case", "decoder.*"),
        *("kernels.pallas.*", "outputs"),
        *("agreement", "loading", "private_folder", "sharding", "weights"),
    },
    "engine": {"backends.base", "config.*", "errors", "profiling", "report"},
    "fused": {
        *("agreement", "arrays", "backends.base", "engine", "errors", "generation", "inputs"),
        *("options", "origin", "outputs", "report"),
    },
    "modules": {
        *("agreement", "arrays", "backends.base", "engine", "errors", "options", "report"),
    },
    "limits": {"config.*", "errors"},
    "api": {
        *("agreement", "backends", "checkpoint", "config.*", "engine", "errors", "families.*"),
        *("fused", "hf_config", "hf_module", "limits", "live", "modules", "origin", "saving"),
        *("spec", "weights"),
    },
    "parity": {"arrays", "engine", "errors"},
    "text": {"checkpoint", "errors"},
    "environment": {"backends", "errors"},
    "bench.*": {
        *("api", "arrays", "backends", "bench.*", "config.*", "embedded", "errors", "families.*"),
        *("spec", "weights"),
    },
    "devices_cli": {
        *("backends", "checkpoint", "checkpoint_files", "config.*", "errors", "families.*"),
        *("hf_config", "launching", "plan_table"),
    },
    "cli": {
        *("api", "backends", "bench.cli", "devices_cli", "embedded", "environment", "errors"),
        "fused",
        *("parity", "text"),
    },
    "__main__": {"cli"},
    "": {"api", "config.*", "embedded", "engine", "errors", "report"},
}

# Frameworks that a module must not import: while it is being imported, and anywhere in it.
FORBIDDEN: dict[str, tuple[set[str], set[str]]] = {
    "backends.torch.*": (JAX_SIDE, JAX_SIDE),
    "backends.jax.*": (TORCH_SIDE, TORCH_SIDE),
    "kernels.triton.*": ({"torch"} | JAX_SIDE, JAX_SIDE),  # so that JAX can launch them one day
    "kernels.pallas.*": (TORCH_SIDE, TORCH_SIDE),
    "kernels.*": (NEUTRAL, TORCH_SIDE | JAX_SIDE),  # the NumPy reference
    "*": (NEUTRAL, set()),
}


@dataclass(frozen=True)
class Import:
    """One imported module, and whether importing the file imports it."""

    module: str
    line: int
    at_module_level: bool


def module_name(path: Path) -> str:
    """`backends.torch.ops` for a file; the package's own `__init__` has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def imports(path: Path, source: str | None = None) -> Iterator[Import]:
    """What a file imports; names of dualinfer's own modules begin with `dualinfer.`."""
    source = path.read_text(encoding="utf-8") if source is None else source
    package = path.relative_to(ROOT).parent.parts

    def visit(node: ast.AST, at_module_level: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_module_level)
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = ["dualinfer", *package[: len(package) - node.level + 1], *base]
            for alias in node.names:
                name = ".".join([*base, alias.name])
                is_module = base[0] == "dualinfer" and name.removeprefix("dualinfer.") in MODULES
                yield Import(name if is_module else ".".join(base), node.lineno, at_module_level)
        elif isinstance(node, ast.Call) and _is_import_module(node):
            assert isinstance(node.args[0], ast.Constant)
            yield Import(str(node.args[0].value), node.lineno, at_module_level)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_module_level and not inside)

    return visit(ast.parse(source), True)


def _is_import_module(node: ast.Call) -> bool:
    """A literal importlib.import_module("torch"); computed names are for backends/__init__."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant)


def matches(module: str, pattern: str) -> bool:
    """`x.*` is x and everything below it; `*` is everything."""
    if pattern == "*":
        return True
    if pattern.endswith(".*"):
        return module == pattern[:-2] or module.startswith(pattern[:-1])
    return module == pattern


def row_of(module: str, table: dict) -> object:
    """The table's most specific row for a module."""
    rows = [pattern for pattern in table if matches(module, pattern)]
    assert rows, f"dualinfer.{module} is in no row of the table; say what it may import."
    return table[max(rows, key=len)]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_module_imports_only_what_its_row_allows(path: Path):
    allowed = row_of(module_name(path), MAY_IMPORT)
    for found in imports(path):
        head, _, inner = found.module.partition(".")
        if head == "dualinfer":
            assert any(matches(inner, pattern) for pattern in allowed), (
                f"{path}:{found.line} imports dualinfer.{inner}"
            )


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_module_imports_no_foreign_framework(path: Path):
    at_module_level, anywhere = row_of(module_name(path), FORBIDDEN)
    for found in imports(path):
        forbidden = anywhere | (at_module_level if found.at_module_level else set())
        assert found.module.split(".")[0] not in forbidden, (
            f"{path}:{found.line} imports {found.module}"
        )


def test_tables_name_only_modules_that_exist():
    planned = {"kernels.triton.*", "kernels.pallas.*"}
    rows = {*MAY_IMPORT, *FORBIDDEN, *(p for row in MAY_IMPORT.values() for p in row)} - planned
    stale = [p for p in rows if not any(matches(module, p) for module in MODULES)]
    assert not stale


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_file_is_one_room(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


def test_imports_finds_relative_absolute_and_nested_ones():
    file = ROOT / "backends" / "torch" / "example.py"
    source = (
        "import jax.numpy as jnp\n"
        "from ... import arrays\n"
        "from ..base import Runner\n"
        "from . import ops\n"
        "from dualinfer.spec import Norm\n"
        "def f():\n"
        "    import flax\n"
        "if True:\n"
        "    import triton\n"
    )
    found = [(i.module, i.at_module_level) for i in imports(file, source)]
    assert found == [
        ("jax.numpy", True),
        ("dualinfer.arrays", True),
        ("dualinfer.backends.base", True),
        ("dualinfer.backends.torch.ops", True),
        ("dualinfer.spec", True),
        ("flax", False),
        ("triton", True),
    ]
