"""The config: every field of the contract, aliases, old names, merging."""

from .dtypes import DTYPES, dtype_name, serving_dtype
from .fields import InferenceConfig
from .merging import default_inference_config, make_config
from .nested import (
    ActivationQuantConfig,
    BaseQuantConfig,
    CheckpointConfig,
    MoEConfig,
    QKVQuantConfig,
    QuantizationConfig,
    TensorParallelConfig,
    WeightQuantConfig,
)

__all__ = [
    "DTYPES",
    "ActivationQuantConfig",
    "BaseQuantConfig",
    "CheckpointConfig",
    "InferenceConfig",
    "MoEConfig",
    "QKVQuantConfig",
    "QuantizationConfig",
    "TensorParallelConfig",
    "WeightQuantConfig",
    "default_inference_config",
    "dtype_name",
    "make_config",
    "serving_dtype",
]
