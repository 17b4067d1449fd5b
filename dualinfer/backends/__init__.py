"""Choosing a backend: imports it, or says what to install."""

import importlib
from collections.abc import Mapping
from typing import Any

from ..config import InferenceConfig
from ..config.installed import BACKENDS as BACKENDS
from ..config.installed import default_backend as default_backend
from ..config.installed import missing
from ..config.installed import requirements as requirements
from ..errors import BackendNotAvailableError
from ..model.deepspeed_moe import MoeLayer
from ..model.load_plan import LoadPlan, TensorSource
from ..model.spec import ModelSpec
from ..parallel.agreement import Peers
from .base import ModuleRunner, Runner


def check_backend(name: str) -> None:
    """Raise BackendNotAvailableError, with what to install, if a backend cannot be imported."""
    absent = missing(name)
    if absent:
        other = next(b for b in BACKENDS if b != name)
        which = "which is" if len(absent) == 1 else "which are"
        raise BackendNotAvailableError(
            f"backend={name!r} needs {' and '.join(absent)}, {which} not installed. Install "
            f"`dualinfer[{name}]`, or use backend={other!r}."
        )


def default_dtype(name: str) -> str:
    """The dtype of an unset `dtype`: the contract's float16 on a GPU, float32 on a CPU."""
    return _import(name).default_dtype()


def device_kind(name: str) -> str:
    """The platform for an engine of this backend now: "cpu", "cuda", "gpu" or another one."""
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


def describe_split(class_name: str, config: Any, size: int, grain: int) -> Any:
    """Tell how module mode splits each layer of a HF class of transformers over `size` ranks.

    By its config alone, on torch; a line for layers alike. See `autotp.table.Described`.
    """
    return _import("torch").describe_split(class_name, config, size, grain)


def make_empty_module(class_name: str, config: Any) -> Any:
    """A HF model of this class on torch's meta device; ModelError where transformers has none."""
    return _import("torch").make_empty_module(class_name, config)


def find_mixtures(
    parts: Mapping[str, Any], expected: Mapping[str, Any], kind: str, other_way: str
) -> list[MoeLayer]:
    """DeepSpeed's MoE layers among the parts of a torch module; see `module.trials.find_layers`."""
    return _import("torch").find_mixtures(parts, expected, kind, other_way)


def join(config: InferenceConfig, is_module: bool = False) -> Peers:
    """This process among those that share the model, as `tensor_parallel` says; all must call it.

    On torch every device has its own process; on JAX one process drives several, and there are
    others only in jax.distributed. `is_module`: in module mode, where that is known before.
    """
    return _import(config.backend).join(config, is_module)


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
