"""dualinfer: a Hugging Face model as a fast inference engine, on PyTorch or on JAX."""

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

__version__ = "0.1.0"

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
    "LengthError",
    "ModelError",
    "OutOfMemoryError",
    "ProfilingError",
    "Report",
    "StaleWeightsError",
    "StepError",
    "UnservedError",
    "UnsupportedError",
    "default_inference_config",
    "embedded_model",
    "init_inference",
]
