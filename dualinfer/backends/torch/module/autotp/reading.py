"""True if a layer's weight is read past its forward, told from the source of a module's methods."""

import ast
import textwrap
from typing import Any

from torch import nn

from .changes import method_sources

_HARMLESS = {"dtype", "device", "shape", "ndim", "size", "requires_grad"}
_CONTENTS = {"parameters", "named_parameters", "state_dict", "get_parameter", "_parameters"}
_PARTS = {"children", "named_children", "modules", "named_modules", "get_submodule", "_modules"}
_LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential


class Readings:
    """The uses that methods of a module's parts make of its layers, but for calling them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = {name for part in module.modules() for name in part._modules}
        self._paths: dict[int, list[str]] = {}  # of a part that stands in several places, each
        for path, part in module.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(part), []).append(path)
        self._used: set[str] = set()
        self._is_known = not any("forward" in vars(part) for part in module.modules())
        for kind in {type(part) for part in module.modules()}:
            if kind.__module__.startswith("torch.nn.modules"):
                continue
            # HF's modules pass themselves to its attention functions, which read no weights.
            passes = kind.__module__.startswith("transformers.models.")
            try:
                for source in method_sources(kind):
                    self._look(ast.parse(textwrap.dedent(source)), passes)
            except (OSError, TypeError, SyntaxError):
                self._is_known = False

    def may_read(self, path: str) -> bool:
        """True if the weight of the layer at `path` is read elsewhere, or that is not known."""
        if not self._is_known:
            return True
        part = self._module.get_submodule(path)
        return any(self._is_used(path) for path in self._paths.get(id(part), [path]))

    def _is_used(self, path: str) -> bool:
        scope, _, name = path.rpartition(".")
        while scope and isinstance(self._module.get_submodule(scope), _LISTS):
            if name in self._used:
                return True
            scope, _, name = scope.rpartition(".")
        return name in self._used

    def _look(self, tree: ast.AST, passes: bool) -> None:
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        own = _first_argument(tree)
        for node in ast.walk(tree):
            parent = parents.get(node)
            if isinstance(node, ast.Name) and node.id in own:
                if isinstance(parent, ast.Call) and node in parent.args and not passes:
                    self._is_known &= _called(parent) in {"super", "isinstance", "type", "hasattr"}
            elif isinstance(node, ast.Call) and _called(node) in ("getattr", "vars"):
                self._is_known &= _is_plain_getattr(node)
            elif isinstance(node, ast.Attribute):
                self._look_at(node, parents, own)

    def _look_at(self, node: ast.Attribute, parents: dict[ast.AST, ast.AST], own: set[str]) -> None:
        """Note how an attribute is used."""
        parent = parents.get(node)
        if node.attr == "weight":
            if isinstance(parent, ast.Attribute) and parent.attr in _HARMLESS:
                return
            owner = node.value
            while isinstance(owner, ast.Subscript):
                owner = owner.value
            is_own = isinstance(owner, ast.Name) and owner.id in own
            self._is_known &= is_own or isinstance(owner, ast.Attribute)
        elif node.attr in _CONTENTS | _PARTS:
            self._is_known &= node.attr == "parameters" and _asks_kind(node, parents)
        elif node.attr in self._names and isinstance(node.ctx, ast.Load):
            outer: Any = parent
            inner: ast.AST = node
            while isinstance(outer, ast.Subscript) and outer.value is inner:
                inner, outer = outer, parents.get(outer)
            if isinstance(outer, ast.Call) and outer.func is inner:
                return
            if isinstance(outer, ast.Attribute):
                following = parents.get(outer)
                asked = following.attr if isinstance(following, ast.Attribute) else ""
                if outer.attr == "weight" and asked in _HARMLESS:
                    return
                if outer.attr != "weight" and outer.attr not in {"values", "items"}:
                    return
            if not _are_called(inner, outer, parents):
                self._used.add(node.attr)


def _first_argument(tree: Any) -> set[str]:
    """The name that a method has for its module."""
    names = set()
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.args.args:
            kinds = [kind.id for kind in function.decorator_list if isinstance(kind, ast.Name)]
            if "staticmethod" not in kinds:
                names.add(function.args.args[0].arg)
    return names


def _are_called(layers: Any, loop: Any, parents: dict[ast.AST, ast.AST]) -> bool:
    """True for layers that a loop goes through to call them, or their parts, only."""
    target = getattr(loop, "target", None)
    if isinstance(loop, ast.Call) and _called(loop) == "enumerate":
        loop = parents.get(loop)
        target = getattr(loop, "target", None)
        target = target.elts[1] if isinstance(target, ast.Tuple) else None
    if not isinstance(loop, ast.For) or layers is loop.target or not isinstance(target, ast.Name):
        return False
    for node, parent in parents.items():
        if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load):
            is_called = isinstance(parent, ast.Call) and parent.func is node
            if not is_called and not isinstance(parent, ast.Attribute):
                return False
    return True


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _is_plain_getattr(call: ast.Call) -> bool:
    """True for getattr(x, "name") of another name than a weight's."""
    name = call.args[1] if len(call.args) > 1 else None
    return isinstance(name, ast.Constant) and name.value not in {"weight", *_CONTENTS, *_PARTS}


def _asks_kind(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """True for next(x.parameters()).dtype and such."""
    call = parents.get(node)
    outer = parents.get(call) if call is not None else None
    asked = parents.get(outer) if outer is not None else None
    is_next = isinstance(outer, ast.Call) and _called(outer) == "next"
    return is_next and isinstance(asked, ast.Attribute) and asked.attr in _HARMLESS
