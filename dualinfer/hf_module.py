"""What a live HF module is: its classes, and whether its parts are what its config makes."""

import copy
from typing import Any

from .errors import ModelError


def class_names(model: Any) -> list[str]:
    """Names of the module's classes from transformers, the most derived first.

    Raises ModelError for a class whose forward is not HF's, since ours would differ from it.
    """
    classes = type(model).__mro__
    for i, cls in enumerate(classes):
        if cls.__module__.startswith("transformers."):
            return [c.__name__ for c in classes[i:]]
        if "forward" in vars(cls):
            raise ModelError(
                f"{cls.__name__} has a forward of its own, which fused mode would not run. Pass "
                "the HF module itself."
            )
    raise ModelError(f"{type(model).__name__} is no HF model.")


def check_parts(module: Any, other_way: str) -> None:
    """Raise ModelError where a part of a HF module is not what its config makes."""
    for name, part in module.named_modules():
        what = f"{name} of this" if name else "This"
        if "forward" in vars(part) and not hasattr(part, "_hf_hook"):  # accelerate's own is fine
            raise ModelError(
                f"{what} {type(module).__name__} has a forward of its own set on it, which fused "
                f"mode would not run. Remove it. {other_way}"
            )
    expected = _made_by_config(module)
    for name, part in module.named_modules():
        other = expected.get(name)
        if not name or other is None:
            continue
        found, wanted = type(part).__name__, type(other).__name__
        if type(part) is type(other):
            ours, theirs = _numbers(part), _numbers(other)
            changed = [k for k in ours if k in theirs and ours[k] != theirs[k]]
            if not changed:
                continue
            name, found, wanted = f"{name}.{changed[0]}", ours[changed[0]], theirs[changed[0]]
        raise ModelError(
            f"{name} of this {type(module).__name__} is {found}, and {wanted} by its config, which "
            f"fused mode goes by. {other_way}"
        )


def _numbers(part: Any) -> dict[str, float]:
    """Floats among a module's attributes, such as eps and scales; nothing that only trains."""
    return {k: v for k, v in vars(part).items() if isinstance(v, float) and "drop" not in k}


def _made_by_config(module: Any) -> dict[str, Any]:
    """The parts that a HF module's config makes, on the meta device; none if it makes none."""
    import torch

    class_ = next(
        (c for c in type(module).__mro__ if c.__module__.startswith("transformers.")), None
    )
    if class_ is None:
        return {}
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            made = class_(copy.deepcopy(module.config))
    except Exception:  # a class that needs more than its config
        return {}
    return {n: m for n, m in made.named_modules() if not isinstance(m, torch.nn.Dropout)}
