"""Injection policies: DeepSpeed's way to say which linear layers' outputs are summed over ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .....errors import ConfigError
from .changes import Unit, is_linear
from .units import unit_of


def check_policy(module: torch.nn.Module, policy: Mapping[Any, Any], size: int) -> list[str]:
    """Notes on an injection policy; ConfigError for one that says nothing about this module."""
    if not policy:
        return []
    names = [f".{name}" for name, _ in module.named_modules() if name]
    classes = {type(part) for part in module.modules()}
    absent = []
    for layer, outputs in policy.items():
        if not (isinstance(layer, type) and issubclass(layer, torch.nn.Module)):
            raise ConfigError(
                f"injection_policy: the key {layer!r} is no class of layers; expected a subclass "
                "of torch.nn.Module, such as the model's decoder layer."
            )
        if not any(issubclass(c, layer) for c in classes):
            absent.append(layer.__name__)
        for name in _policy_names(layer, outputs):
            if not any(own.endswith(name) for own in names):
                raise ConfigError(
                    f"injection_policy: no module of the {type(module).__name__} has a name that "
                    f"ends with {name!r} (given for {layer.__name__}). It has, for instance, "
                    f"{', '.join(n[1:] for n in names[-3:])}."
                )
    if len(absent) == len(policy):
        raise ConfigError(
            f"injection_policy: the {type(module).__name__} has no layer of class "
            f"{', '.join(absent)}."
        )
    notes = [] if size > 1 else ["injection_policy: with one device nothing is split"]
    if absent:
        notes.append(f"injection_policy: the model has no {', '.join(absent)}")
    return notes


def _policy_names(layer: type, outputs: Any) -> list[str]:
    names = [outputs] if isinstance(outputs, str) else outputs
    if isinstance(names, type) or not isinstance(names, list | tuple | set | frozenset):
        raise ConfigError(
            f"injection_policy: the value for {layer.__name__} is {outputs!r}. DeepSpeed's policy "
            "classes replace layers by its own kernels, which dualinfer does not have; expected "
            "the names of the linear layers whose outputs are summed, a str or a tuple of them."
        )
    odd = [name for name in names if not isinstance(name, str) or not name.strip(".")]
    if odd or not names:
        raise ConfigError(
            f"injection_policy: {outputs!r} for {layer.__name__}; expected names of linear layers, "
            "a str or a tuple of them."
        )
    return list(names) if isinstance(names, list | tuple) else sorted(names)


def policy_units(
    module: nn.Module, policy: Mapping[Any, Any], units: Sequence[Unit], size: int, grain: int
) -> list[Unit]:
    """The units that end with the linear layers named in a policy: those found, or made for it.

    Raises ConfigError for a name that is no linear layer of its class, or whose unit is not
    understood.
    """
    vouched: list[Unit] = []
    for layer, outputs in policy.items():
        for name in _policy_names(layer, outputs):
            for path, row in _rows(module, layer, name):
                unit = next((u for u in units if row in u.layers), None)
                if unit is None or unit.problem or unit.layers[-1] != row:
                    taken = {p for u in (*units, *vouched) if not u.problem for p in u.layers}
                    unit = unit_of(module, path, row, taken, size, grain)
                if unit.problem:
                    raise ConfigError(
                        f"injection_policy: {row}, named for {layer.__name__}, cannot be split: "
                        f"{unit.problem}. Leave it out of the policy."
                    )
                if not any(unit is own for own in vouched):
                    vouched.append(unit)
    return vouched


def _rows(module: nn.Module, layer: type, name: str) -> Iterator[tuple[str, str]]:
    """Paths of the layers of a class, and of the linear layers in each that `name` means."""
    layers = [(path, part) for path, part in module.named_modules() if isinstance(part, layer)]
    rows = [
        (path, f"{path}.{own}" if path else own)
        for path, part in layers
        for own, child in part.named_modules()
        if f".{own}".endswith(f".{name.strip('.')}") and is_linear(child)
    ]
    if layers and not rows:
        raise ConfigError(
            f"injection_policy: {layer.__name__} has no linear layer whose name ends with "
            f"{name!r}. Name the layers whose outputs are summed, as they are called in it."
        )
    yield from rows
