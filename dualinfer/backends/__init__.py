"""Choosing a backend: imports it, or says what to install."""

import importlib
import importlib.util
from typing import Any

from ..config import InferenceConfig
from ..errors import BackendNotAvailableError
from ..model.spec import ModelSpec
from ..model.weights import LoadPlan, TensorSource
from ..parallel.agreement import Peers
from .base import ModuleRunner, Runner

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
    return _import(name).default_dtype()


def device_kind(name: str) -> str:
    """What an engine of this backend would run on now: "cpu", "cuda", "gpu" or another platform."""
    return _import(name).device_kind()


def check_dtype(name: str, dtype: str) -> None:
    """Raise ConfigError if the backend's device does not compute in `dtype`."""
    _import(name).check_dtype(dtype)


def engine_type(name: str, base: type) -> Any:
    """The engine class `base` as the backend offers it: on torch it is an nn.Module as well."""
    return _import(name).engine_type(base)


def _import(name: str) -> Any:
    check_backend(name)
    return importlib.import_module(f".{name}", __name__)


def describe_split(class_name: str, config: Any, size: int) -> list[Any]:
    """What each layer of a HF class of transformers becomes over `size` ranks in module mode.

    By its config alone, on torch; a line for layers alike. See `torch.autotp.table.Line`.
    """
    return _import("torch").describe_split(class_name, config, size)


def join(config: InferenceConfig) -> Peers:
    """This process among those that share the model, as `tensor_parallel` says; all must call it.

    On torch every device has its own process; on JAX one process drives several, and there are
    others only in jax.distributed.
    """
    return _import(config.backend).join(config)


def create_runner(
    config: InferenceConfig, spec: ModelSpec, plan: LoadPlan, source: TensorSource, peers: Peers
) -> Runner:
    """A runner of the config's backend and dtype, with the weights loaded on its device.

    `peers` is what `join` gave, and stays the caller's to close.
    """
    return _import(config.backend).create_runner(config, spec, plan, source, peers)


def create_module_runner(
    config: InferenceConfig, module: Any, source: TensorSource | None, peers: Peers
) -> ModuleRunner:
    """A runner of the user's own module, filled from `source` where one is given.

    On torch an nn.Module; on JAX an nnx module, a bound Linen module, or (Linen module, variables).
    `peers` as in `create_runner`.
    """
    return _import(config.backend).create_module_runner(config, module, source, peers)
