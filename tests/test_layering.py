"""The import rules of docs/architecture.md, read from the syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "dualinfer"
FILES = sorted(ROOT.rglob("*.py"))

# The house from its ground floor up: a folder may import from itself and from the folders that its
# row names, which all stand above it in this table. `errors` and `arrays` are open to every one.
FLOORS: dict[str, str] = {
    "errors": "",
    "arrays": "",
    "symptoms": "",
    "embedded": "",
    "system": "",
    "kernels": "",
    "config": "",
    "quantization": "system",
    "model": "quantization",
    "parallel": "model config",
    "ops": "kernels.triton quantization model parallel",
    "decoder": "model ops",
    "blocks": "kernels.triton model parallel ops decoder",
    "model.families": "quantization model blocks",
    "checkpoint": "system config quantization model model.families parallel",
    "backends": "kernels.triton config quantization model parallel ops",
    "backends.torch": "system kernels.triton config quantization model "
    "parallel checkpoint ops backends decoder",
    "backends.jax": "system kernels.triton kernels.xla kernels.pallas config quantization model "
    "parallel checkpoint ops backends decoder",
    "serving": "backends",
    "engine": "config model parallel backends serving",
    "serving.http": "system engine serving",
    "serving.remote": "system parallel serving serving.http engine",
    "engines": "engine backends.torch backends.jax",
    "opening": "config quantization model model.families checkpoint backends",
    "api": "config quantization model model.families parallel checkpoint backends engine "
    "engines serving.http opening",
    "evaluation": "engine",
    "ray_data": "system engine serving.http api",
    "": "config embedded engine engines api",
    "bench": "embedded system config quantization model blocks model.families parallel checkpoint "
    "ops backends serving.http opening api",
    "bench.torch": "kernels.triton model ops backends backends.torch bench",
    "bench.jax": "kernels.triton kernels.xla model parallel ops backends backends.jax bench",
    "cli": "embedded system config quantization model model.families parallel checkpoint ops "
    "backends serving.http serving.remote engine opening api bench",
    "__main__": "cli",
}
OPEN_TO_ALL = {"errors", "arrays"}

FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "triton", "transformers"}
NEUTRAL = FRAMEWORKS | {"tokenizers", "huggingface_hub"}
TORCH_SIDE = {"torch", "triton"}
JAX_SIDE = {"jax", "jaxlib", "flax"}

# Frameworks that a folder must not import: while it is being imported, and anywhere in it.
FORBIDDEN: dict[str, tuple[set[str], set[str]]] = {
    "backends.torch": (JAX_SIDE, JAX_SIDE),
    "backends.jax": (TORCH_SIDE, TORCH_SIDE),
    "bench.torch": (JAX_SIDE, JAX_SIDE),
    "bench.jax": (TORCH_SIDE, TORCH_SIDE),
    "kernels.triton": ({"torch"} | JAX_SIDE, JAX_SIDE),  # so that JAX can launch them
    "kernels.xla": (TORCH_SIDE | {"flax"}, {"triton", "flax"}),  # torch: to interpret
    "kernels.pallas": (TORCH_SIDE | {"flax"}, TORCH_SIDE | {"flax"}),
    "kernels": (NEUTRAL, TORCH_SIDE | JAX_SIDE),
    "ops": (NEUTRAL, FRAMEWORKS),
    "decoder": (NEUTRAL, FRAMEWORKS),
    "blocks": (NEUTRAL, FRAMEWORKS),
    "": (NEUTRAL, set()),
}


@dataclass(frozen=True)
class Import:
    """One imported module, and whether importing the file imports it."""

    module: str
    line: int
    at_module_level: bool


def module_name(path: Path) -> str:
    """`backends.torch.cache` for a file; the package's own `__init__` has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax, read once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module, path: Path) -> Iterator[Import]:
    """What a file imports; names of dualinfer's own modules begin with `dualinfer.`."""
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
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_module_level and not inside)

    return visit(tree, True)


def _is_import_module(node: ast.Call) -> bool:
    """A literal importlib.import_module("torch"); computed names are for backends/__init__."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant)


def is_within(module: str, folder: str) -> bool:
    """True if `module` is `folder` or lies in it; "" holds what lies in no other row's folder."""
    return module == folder or module.startswith(f"{folder}.")


def folder_of(module: str, table: dict) -> str:
    """The narrowest folder of a table that a module lies in."""
    found = [folder for folder in table if folder and is_within(module, folder)]
    return max(found, key=len) if found else ""


def test_folders_import_only_what_their_rows_allow():
    wrong = []
    for path in FILES:
        module = module_name(path)
        folder = folder_of(module, FLOORS)
        assert folder or not module, f"dualinfer.{module} lies in no folder of the table."
        allowed = {folder, *OPEN_TO_ALL, *FLOORS[folder].split()}
        for found in imports(tree_of(path), path):
            head, _, inner = found.module.partition(".")
            target = folder_of(inner, FLOORS)
            may = target in allowed or any("." in a and is_within(inner, a) for a in allowed)
            if head == "dualinfer" and not may:
                wrong.append(f"{path}:{found.line} imports dualinfer.{inner}")
    assert not wrong


def test_modules_import_no_foreign_framework():
    wrong = []
    for path in FILES:
        at_module_level, anywhere = FORBIDDEN[folder_of(module_name(path), FORBIDDEN)]
        for found in imports(tree_of(path), path):
            forbidden = anywhere | (at_module_level if found.at_module_level else set())
            if found.module.split(".")[0] in forbidden:
                wrong.append(f"{path}:{found.line} imports {found.module}")
    assert not wrong


# The rooms of `checkpoint` in the same way.
ROOMS: dict[str, str] = {
    "files": "",
    "reader": "files",
    "gguf": "files",
    "foreign": "files",
    "sources": "files gguf foreign",
    "views": "files sources",
    "described": "files gguf foreign sources",
    "hub": "files sources views described",
    "writing": "files views described",
}


def test_rooms_of_checkpoints_import_only_what_their_rows_allow():
    rooms, wrong = list(ROOMS), []
    for room, allowed in ROOMS.items():
        assert all(rooms.index(other) < rooms.index(room) for other in allowed.split())
    for path in (ROOT / "checkpoint").rglob("*.py"):
        room = module_name(path).split(".")[1:2]
        for found in imports(tree_of(path), path):
            package, _, inner = found.module.removeprefix("dualinfer.").partition(".")
            other = inner.partition(".")[0]
            if package == "checkpoint" and other not in {*room, *ROOMS[room[0]].split()}:
                wrong.append(f"{path}:{found.line} imports {found.module}")
    assert not wrong


def test_arrows_point_down():
    order = list(FLOORS)
    for folder, allowed in FLOORS.items():
        for below in allowed.split():
            assert order.index(folder_of(below, FLOORS)) < order.index(folder), (folder, below)


def test_tables_name_only_folders_that_exist():
    rows = {*FLOORS, *FORBIDDEN, *(below for row in FLOORS.values() for below in row.split())}
    assert not [row for row in rows if not any(is_within(module, row) for module in MODULES)]


def test_imports_finds_relative_absolute_and_nested_ones():
    file = ROOT / "backends" / "torch" / "example.py"
    source = (
        "import jax.numpy as jnp\n"
        "from ... import arrays\n"
        "from ..base import Runner\n"
        "from . import cache\n"
        "from dualinfer.model.spec import Norm\n"
        "def f():\n"
        "    import flax\n"
        "if True:\n"
        "    import triton\n"
    )
    found = [(i.module, i.at_module_level) for i in imports(ast.parse(source), file)]
    assert found == [
        ("jax.numpy", True),
        ("dualinfer.arrays", True),
        ("dualinfer.backends.base", True),
        ("dualinfer.backends.torch.cache", True),
        ("dualinfer.model.spec", True),
        ("flax", False),
        ("triton", True),
    ]


# Who may read what a Weight holds: its ops, and what loads it.
READS_WEIGHTS = (
    *("backends.torch.ops", "backends.jax.ops", "ops", "backends.kernels"),
    *("backends.served", "model.weights"),
)
# Attributes of that name of other things.
OTHER_DATA = {
    "backends.jax.exchange": "a shard of a jax.Array",
    "kernels.xla.handler": "an address that XLA hands over",
    "backends.jax.streaming": "a shard of a jax.Array",
    "backends.torch.adapter": "a torch Parameter",
    "backends.torch.streaming": "an address of a NumPy array",
    "checkpoint.files.safetensors": "a NumPy array's memory",
    "kernels.pallas.experts": "the codes of a Codes",
    "kernels.pallas.product": "the codes of a Codes",
    "kernels.pallas.ring": "the codes of a Codes",
    "kernels.pallas.tiles": "the codes of a Codes",
    "kernels.triton.experts": "the codes of a Packed",
    "kernels.triton.mixture": "the codes of a Packed",
    "kernels.triton.quantized": "the codes of a Packed",
    "kernels.triton.eight_bit": "the codes of a Packed, and of an input",
}


def test_only_ops_and_loading_read_what_a_weight_holds():
    """Everyone else asks a Weight for its shape and dtype, or hands its parts on by their names."""
    readers = {
        module_name(path)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr == "data"
    }
    weights = {m for m in readers if any(is_within(m, folder) for folder in READS_WEIGHTS)}
    assert readers - weights == set(OTHER_DATA)
    assert any(is_within(m, "backends.torch.ops") for m in weights)


def test_kernels_that_let_the_next_one_start_wait_themselves():
    """Else those behind them could read what the kernel in front of them still writes."""
    found = 0
    for path in (ROOT / "kernels" / "triton").glob("*.py"):
        for kernel in tree_of(path).body:
            if not isinstance(kernel, ast.FunctionDef) or kernel.name == "let_next_start":
                continue
            nodes = [node for node in ast.walk(kernel) if isinstance(node, ast.Call | ast.Return)]
            nodes.sort(key=lambda node: node.lineno)
            names = [ast.unparse(node).partition("(")[0] for node in nodes]
            if "let_next_start" in names:
                found += 1
                assert "wait_for_inputs" in names, f"{path.name}: {kernel.name}"
                before = names[: names.index("wait_for_inputs")]
                assert not any(name.startswith("return") for name in before), kernel.name
    assert found > 40
