"""The config's fields as keyword arguments: what an editor completes and a type checker checks.

They are the fields of the config models by their names and aliases, without deprecated names and
without those that have one harmless value. `tests/test_types.py` keeps both equal.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from .nested import (
    ActivationQuantConfig,
    MoEConfig,
    OffloadParamConfig,
    QKVQuantConfig,
    QuantizationConfig,
    QuantWord,
    TensorParallelConfig,
    WeightQuantConfig,
    ZeroConfig,
)

Path = str | PathLike[str]
DType = Literal["float32", "float16", "bfloat16", "int8", "auto"] | Any  # or a framework's own


class TensorParallelFields(TypedDict, total=False):
    """The fields of TensorParallelConfig, as a dict."""

    enabled: bool
    tp_size: int
    tp_grain_size: int
    mpu: Any
    tp_group: Any
    mesh: Any
    axis: str
    timeout: float


class MoEFields(TypedDict, total=False):
    """The fields of MoEConfig, as a dict."""

    enabled: bool
    ep_size: int
    moe_experts: int | list[int]
    num_experts: int | list[int]
    type: Literal["standard", "residual"]
    drop_tokens: bool
    ep_mp_group: Any
    ep_group: Any
    expert_group: Any


class OffloadParamFields(TypedDict, total=False):
    """The fields of OffloadParamConfig, as a dict."""

    device: Literal["none", "cpu"]
    pin_memory: bool


class ZeroFields(TypedDict, total=False):
    """The fields of ZeroConfig, as a dict."""

    stage: int
    offload_param: OffloadParamFields | OffloadParamConfig


class ActivationQuantFields(TypedDict, total=False):
    """The fields of ActivationQuantConfig, as a dict."""

    enabled: bool
    num_bits: int
    q_type: Literal["symmetric", "asymmetric"]
    q_groups: int


class WeightQuantFields(ActivationQuantFields, total=False):
    """The fields of WeightQuantConfig, as a dict."""

    group_size: int | None
    quantized_initialization: dict[str, Any]
    post_init_quant: dict[str, Any]


class QKVQuantFields(TypedDict, total=False):
    """The fields of QKVQuantConfig, as a dict."""

    enabled: bool


class QuantizationFields(TypedDict, total=False):
    """The fields of QuantizationConfig, as a dict."""

    enabled: bool
    scheme: QuantWord | None
    activation: ActivationQuantFields | ActivationQuantConfig
    weight: WeightQuantFields | WeightQuantConfig
    qkv: QKVQuantFields | QKVQuantConfig


class ConfigFields(TypedDict, total=False):
    """The fields of InferenceConfig, but for `backend` and `config`.

    These are arguments of `init_inference` itself; `args` is the field `config` by its other name.
    """

    replace_with_kernel_inject: bool | None
    kernel_inject: bool | None
    dtype: DType | None
    tensor_parallel: TensorParallelFields | TensorParallelConfig
    tp: TensorParallelFields | TensorParallelConfig
    enable_cuda_graph: bool | None
    use_triton: bool | None
    kernels: Literal["triton", "pallas", "xla"] | None
    triton_autotune: bool
    moe: bool | MoEFields | MoEConfig
    keep_module_on_host: bool
    resident_layers: int | None
    zero: ZeroFields | ZeroConfig
    quant: QuantWord | bool | QuantizationFields | QuantizationConfig | None
    kv_cache_dtype: Literal["fp8_e4m3", "fp8", "int8", "auto"] | None
    state_dtype: Literal["float32", "fp32", "bfloat16", "bf16", "auto"] | None
    checkpoint: Path | dict[str, Any] | None
    adapter: Path | Sequence[Path] | Mapping[str, float] | None
    base_dir: Path
    save_mp_checkpoint_path: Path | None
    return_tuple: bool
    injection_policy: Mapping[Any, Any] | None
    injection_dict: Mapping[Any, Any] | None
    args: Mapping[str, Any] | None
    max_out_tokens: int | None
    max_tokens: int | None
    min_out_tokens: int
    min_tokens: int
