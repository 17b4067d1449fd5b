"""Injection policies: what DeepSpeed takes to split layers, checked against the module."""

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import ConfigError


def check_policy(module: torch.nn.Module, policy: Mapping[Any, Any]) -> list[str]:
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
    notes = ["injection_policy: with one device nothing is split"]
    if absent:
        notes.append(f"injection_policy: the model has no {', '.join(absent)}")
    return notes


def _policy_names(layer: type, outputs: Any) -> list[str]:
    names = [outputs] if isinstance(outputs, str) else outputs
    if isinstance(names, type) or not isinstance(names, list | tuple):
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
    return list(names)
