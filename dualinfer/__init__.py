"""dualinfer: a Hugging Face model as a fast inference engine, on PyTorch or on JAX."""

from .api import init_inference
from .config import InferenceConfig
from .embedded import path as embedded_model
from .engine import InferenceEngine
from .errors import (
    ArgumentError,
    BackendNotAvailableError,
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    ConfigNotFoundError,
    DualinferError,
    LengthError,
    ModelError,
    StepError,
    UnsupportedError,
)
from .outputs import Outputs
from .report import Report

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BackendNotAvailableError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConfigError",
    "ConfigNotFoundError",
    "DualinferError",
    "InferenceConfig",
    "InferenceEngine",
    "LengthError",
    "ModelError",
    "Outputs",
    "Report",
    "StepError",
    "UnsupportedError",
    "embedded_model",
    "init_inference",
]
