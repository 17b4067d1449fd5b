"""The backends that are installed, found without importing their frameworks."""

import importlib.util
from typing import Literal

BACKENDS = ("torch", "jax")
_NEEDS = {"torch": ("torch",), "jax": ("jax", "flax")}


def requirements(name: str) -> tuple[str, ...]:
    """The packages that a backend imports."""
    return _NEEDS[name]


def missing(name: str) -> list[str]:
    """The packages that a backend needs and that are not installed."""
    return [package for package in _NEEDS[name] if not _is_installed(package)]


def default_backend() -> Literal["torch", "jax"]:
    """The backend that is installed; torch where both are, or none is."""
    return "jax" if missing("torch") and not missing("jax") else "torch"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a finder may refuse it, a stub may have no spec
        return False
