"""The config: every field of the contract, aliases, old names, merging."""

from .dtypes import DTYPES, dtype_name, serving_dtype
from .fields import InferenceConfig
from .merging import default_inference_config, make_config
from .nested import (
    ActivationQuantConfig,
    BaseQuantConfig,
    CheckpointConfig,
    MoEConfig,
    OffloadParamConfig,
    QKVQuantConfig,
    QuantizationConfig,
    TensorParallelConfig,
    WeightQuantConfig,
    ZeroConfig,
)

__all__ = [
    "DTYPES",
    "ActivationQuantConfig",
    "BaseQuantConfig",
    "CheckpointConfig",
    "InferenceConfig",
    "MoEConfig",
    "OffloadParamConfig",
    "QKVQuantConfig",
    "QuantizationConfig",
    "TensorParallelConfig",
    "WeightQuantConfig",
    "ZeroConfig",
    "default_inference_config",
    "dtype_name",
    "make_config",
    "serving_dtype",
]
