"""Choosing a backend: imports it, or says what to install."""

import importlib
import importlib.util

from ..config import InferenceConfig
from ..errors import BackendNotAvailableError
from ..spec import ModelSpec
from ..weights import LoadPlan, TensorSource
from .base import Runner

BACKENDS = ("torch", "jax")
_NEEDS = {"torch": ("torch",), "jax": ("jax", "flax")}


def requirements(name: str) -> tuple[str, ...]:
    """The packages that a backend imports."""
    return _NEEDS[name]


def check_backend(name: str) -> None:
    """Raise BackendNotAvailableError, with what to install, if a backend cannot be imported."""
    missing = [m for m in _NEEDS[name] if not _is_installed(m)]
    if missing:
        other = next(b for b in BACKENDS if b != name)
        which = "which is" if len(missing) == 1 else "which are"
        raise BackendNotAvailableError(
            f"backend={name!r} needs {' and '.join(missing)}, {which} not installed. Install "
            f"`dualinfer[{name}]`, or use backend={other!r}."
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a finder may refuse it, a stub may have no spec
        return False


def default_dtype(name: str) -> str:
    """The dtype of an unset `dtype`: the contract's float16 on a GPU, float32 on a CPU."""
    check_backend(name)
    return importlib.import_module(f".{name}", __name__).default_dtype()


def create_runner(
    config: InferenceConfig, spec: ModelSpec, plan: LoadPlan, source: TensorSource
) -> Runner:
    """A runner of the config's backend and dtype, with the weights loaded on its device."""
    check_backend(config.backend)
    backend = importlib.import_module(f".{config.backend}", __name__)
    return backend.create_runner(config, spec, plan, source)
