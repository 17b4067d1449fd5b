"""dualinfer: a Hugging Face model as a fast inference engine, on PyTorch or on JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from .api import init_inference
from .config import InferenceConfig, default_inference_config
from .embedded import path as embedded_model
from .engine.base import InferenceEngine
from .engine.report import Report
from .errors import (
    ArgumentError,
    BackendNotAvailableError,
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    ConfigNotFoundError,
    DeadlineError,
    DistributedError,
    DualinferError,
    GraphError,
    LengthError,
    ModelError,
    OutOfMemoryError,
    ProfilingError,
    StaleWeightsError,
    StepError,
    UnservedError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from .engines import JaxEngine, TorchEngine

__version__ = "1.0.0"

__all__ = [
    "ArgumentError",
    "BackendNotAvailableError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConfigError",
    "ConfigNotFoundError",
    "DeadlineError",
    "DistributedError",
    "DualinferError",
    "GraphError",
    "InferenceConfig",
    "InferenceEngine",
    "JaxEngine",
    "LengthError",
    "ModelError",
    "OutOfMemoryError",
    "ProfilingError",
    "Report",
    "StaleWeightsError",
    "StepError",
    "TorchEngine",
    "UnservedError",
    "UnsupportedError",
    "default_inference_config",
    "embedded_model",
    "init_inference",
]


def __getattr__(name: str) -> Any:
    """TorchEngine or JaxEngine, whose framework is imported with it."""
    if name in ("JaxEngine", "TorchEngine"):
        return getattr(importlib.import_module(f"{__name__}.engines"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
