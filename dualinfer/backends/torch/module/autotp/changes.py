"""The parts of a plan of tensor parallelism: changes of layers, and units of changes."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..mixtures import mixture_layers
from .layers import is_conv1d
from .layouts import Heads, Runs

Numbers = tuple[Mapping[str, int], ...]


@dataclass(frozen=True)
class Change:
    """The change of one module or parameter.

    `becomes` is column, row, gathered (linear layers), vocab (an embedding), table (an embedding
    with a column a head), by head (a parameter), heads (norms, one a head), experts, mixture (of
    modules, some of which a rank has), partial (a row whose sum the mixture makes), or numbers:
    `numbers` by rank that the module's forward reads. `by_rank` are the parts of the axis that is
    split, `heads` each rank's own: of an output projection, and of a module that takes biases.
    """

    path: str
    becomes: str
    by_rank: tuple[Runs, ...]
    unit: str
    reason: str
    numbers: Numbers = ()
    config_numbers: Numbers = ()
    heads: tuple[Heads, ...] = ()

    @property
    def owner(self) -> str:
        """The path of the module that is changed or replaced."""
        return self.path.rpartition(".")[0] if self.becomes == "by head" else self.path


@dataclass
class Unit:
    """Changes that are made together or not at all; `problem` says why they are not known.

    `source` says who tells its layers: names, plan (transformers' own) or policy. `guess` says what
    of them must be seen to be right; if it is not, `others` may be.
    """

    path: str
    kind: str
    layers: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    problem: str = ""
    guess: str = ""
    others: list[Change] = field(default_factory=list)
    source: str = "names"


@dataclass(frozen=True)
class SurgeryPlan:
    """The split of a module over `size` ranks; `kept` are layers that are not split, and why."""

    size: int
    changes: tuple[Change, ...]
    kept: Mapping[str, str]


class NotUnderstoodError(Exception):
    """Why a unit is not understood; raised and caught while units are looked for."""


def is_altered(module: nn.Module) -> bool:
    """True for a module with forward hooks, or a forward that was set on it."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def altered_inside(root: nn.Module, unit: Unit) -> str:
    """Why a unit's parts may not see a rank's columns: hooks or forwards set on them; else "".

    Hooks on the block as a whole see all of what goes in and comes out.
    """
    layers = [path.split(".") for path in unit.layers or [unit.path]]
    shared = 0
    while len({tuple(path[: shared + 1]) for path in layers}) == 1 and shared < len(layers[0]):
        shared += 1
    scope = layers[0][:shared] if unit.layers[1:] else unit.path.split(".")
    for depth in range(1, len(scope) + 1):
        path = ".".join(scope[:depth])
        if path and "forward" in vars(root.get_submodule(path)):
            return f"{path} has a forward of its own"
    block = ".".join(scope)
    apart: list[str] = []  # other parts of the block with weights
    for name, part in root.get_submodule(block).named_modules():
        path = join_path(block, name)
        if not name or path.startswith(tuple(apart)):
            continue
        inside = any(f"{layer}.".startswith(f"{path}.") for layer in unit.layers)
        if unit.layers and not inside and any(p.ndim > 1 for p in part.parameters()):
            apart.append(f"{path}.")
        elif is_altered(part):
            return f"{path} inside it has hooks or a forward of its own"
    return ""


_OPAQUE = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer | nn.MultiheadAttention


def opaque_parts(module: nn.Module) -> dict[str, str]:
    """Prefixes of paths in layers that read their parts' weights, torch's and routers, and why."""
    found = {
        f"{path}." if path else "": f"{type(part).__name__} reads its weight in fused operations"
        for path, part in module.named_modules()
        if isinstance(part, _OPAQUE)
    }
    for path, _ in mixture_layers(module):
        found[join_path(path, "gate.")] = "a router, which all ranks have"
    return found


def is_linear(module: nn.Module) -> bool:
    """True for linear layers whose forward is that of nn.Linear."""
    kind = type(module)
    is_falcon = f"{kind.__module__}.{kind.__name__}".endswith("modeling_falcon.FalconLinear")
    if kind.forward is not nn.Linear.forward and not is_falcon and not is_conv1d(module):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.is_floating_point() and not is_altered(module)


def sizes(linear: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    shape = tuple(linear.weight.shape)
    return shape if is_conv1d(linear) else (shape[1], shape[0])


def join_path(path: str, name: str) -> str:
    """The path of a part of a module; `path` "" is the outermost."""
    return ".".join(part for part in (path, name) if part)


# Words of the names of methods that no forward pass runs.
_NOT_FORWARD = re.compile(
    r"(^|_)(init\w*|reset|tie|resize|load|save|optim\w*|params|pretrained|trained)(_|$)|embeddings$"
)
# Modules of code that runs layers only by calling them: torch's, and what all HF models share.
_CALLS_ONLY = re.compile(r"torch\.nn\.|transformers\.(?!models\.)")


def method_sources(kind: type) -> Iterator[str]:
    """The source of each method that a forward pass may run; OSError where there is none."""
    for cls in kind.__mro__:
        if cls is object or _CALLS_ONLY.match(cls.__module__):
            continue
        for name, value in vars(cls).items():
            if isinstance(value, property):
                value = value.fget
            value = getattr(value, "__func__", getattr(value, "func", value))  # cached_property's
            function = inspect.unwrap(value) if callable(value) else value
            if inspect.isfunction(function) and not _NOT_FORWARD.search(name):
                yield inspect.getsource(function)


# The owner of a weight that is read, "" where it has no name; `_OF_MANY` are ways to read any.
_OF_WEIGHT = re.compile(r"(\w*)(?:\[[^\]]*\])*\.weight\b(?!\.(?:dtype|device|shape|ndim|size)\b)")
_OF_MANY = re.compile(
    r"getattr\((?!\s*[\w.]+,\s*[\"'](?!weight|_)\w)|vars\(|__dict__|state_dict"
    r"|\b(?:_parameters|_modules)\b|\b(?:named_)?(?:parameters|modules|children)\("
)
_OF_KIND = re.compile(r"next\(self\.parameters\(\)\)\.(dtype|device)\b")


def read_layers(module: nn.Module) -> set[str] | None:
    """Names of the layers whose weights the module's methods may read past their forward.

    By the words of their source, for what could not be tried out: layers are only called there, or
    taken from. None where that does not tell.
    """
    owners = [(part, part._modules) for part in module.modules()]
    names = {name for _, own in owners for name in own if not name.isdigit()}
    lists = {n for _, own in owners for n, child in own.items() if isinstance(child, nn.ModuleList)}
    used = re.compile(rf"\.({'|'.join(names - lists) or '(?!)'})\b(?!\s*[(.\[=])")
    found: set[str] = set()
    if any("forward" in vars(part) for part in module.modules()):
        return None
    for kind in {type(part) for part in module.modules()}:
        try:
            text = "\n".join(method_sources(kind))
        except OSError:
            return None
        read = {*_OF_WEIGHT.findall(text)} - {"self"}
        if _OF_MANY.search(_OF_KIND.sub("", text)) or not read <= names:
            return None
        found |= read | {*used.findall(text)}
    read = {id(child) for _, own in owners for name, child in own.items() if name in found}
    return {name for _, own in owners for name, child in own.items() if id(child) in read}
