"""InferenceConfig: the contract's fields that this version honours, their aliases and merging."""

import difflib
import json
import os
import reprlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .errors import ConfigError, ConfigNotFoundError

DTYPES = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bfloat": "bfloat16",
    "bf16": "bfloat16",
}
# Fields of DeepSpeed's config that this version does not honour, with the values, beside None, at
# which they ask for nothing: those pass with a warning, so that old scripts run.
_DEEPSPEED_ONLY: dict[str, tuple[Any, ...]] = {
    "args": ({},),
    "base_dir": ("",),
    "checkpoint": ({},),
    "checkpoint_config": ({},),
    "ckpt_config": ({},),
    "config": ({},),
    "ep_group": (),
    "ep_mp_group": (),
    "ep_size": (1,),
    "expert_group": (),
    "expert_mp_group": (),
    "injection_dict": ({},),
    "injection_policy": ({},),
    "injection_policy_tuple": ((),),
    "keep_module_on_host": (False,),
    "min_out_tokens": (1,),
    "min_tokens": (1,),
    "moe": (False, {}),
    "moe_experts": (1, [1]),
    "moe_type": ("standard",),
    "mp_size": (1,),
    "mpu": (),
    "quant": ({}, {"enabled": False}),
    "replace_method": ("auto", ""),
    "save_mp_checkpoint_path": (),
    "set_empty_params": (False,),
    "tm": (True,),
    "training_mp_size": (1,),
    "transposed_mode": (False,),
    "triangular_masking": (True,),
    "triton_autotune": (False,),
    "zero": ({},),
}


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True
    )


class TensorParallelConfig(_Model):
    """Tensor parallelism. This version runs on one device."""

    tp_size: int = Field(default=1, ge=1)
    """Number of devices that share the model; 1 for now."""

    @field_validator("tp_size")
    @classmethod
    def _one_device(cls, value: int) -> int:
        if value != 1:
            raise ValueError(
                f"tensor_parallel.tp_size={value}, but this version runs on one device. Use 1."
            )
        return value


class InferenceConfig(_Model):
    """How a model is turned into an engine; frozen once built. Unset fields serve the user."""

    backend: Literal["torch", "jax"] = "torch"
    """The framework that runs the model."""

    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")
    """Run dualinfer's own decoder in place of a live module's forward.

    On a CPU, plain ops stand behind the kernels' signatures. A checkpoint's folder and the JAX
    backend always run dualinfer's decoder.
    """

    dtype: str | None = None
    """float32, float16 or bfloat16, in any spelling or as a torch, NumPy or JAX dtype.

    Unset: float16 on a GPU, as in the contract, and float32 on a CPU.
    """

    tensor_parallel: TensorParallelConfig = Field(TensorParallelConfig(), alias="tp")
    """Tensor parallelism; `tp_size` 1 for now."""

    max_out_tokens: int | None = Field(None, ge=1, alias="max_tokens")
    """Hard limit for generate on prompt plus new tokens. Unset: the model's own limit."""

    return_tuple: bool = True
    """True: forward returns a named tuple as HF does. False: the bare first array."""

    enable_cuda_graph: bool | None = None
    """On torch and CUDA, unset: decoding is replayed from a graph; False: no graphs.

    True, which captures forward as well, is not in this version. On JAX every step is compiled.
    """

    use_triton: bool | None = None
    """None or False; Triton kernels are not in this version."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: Any) -> str | None:
        return None if value is None else dtype_name(value)

    @field_validator("max_out_tokens", mode="before")
    @classmethod
    def _no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("expected an int")
        return value

    @field_validator("enable_cuda_graph", "use_triton")
    @classmethod
    def _not_yet(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("true is not supported in this version; leave it unset or false")
        return value


def dtype_name(value: Any) -> str:
    """`float32`, `float16` or `bfloat16` for any spelling or framework's dtype object."""
    name = value if isinstance(value, str) else str(getattr(value, "dtype", value))
    if isinstance(value, type):  # numpy.float16, jax.numpy.bfloat16
        name = getattr(value, "__name__", name)
    key = name.strip().lower().removeprefix("torch.").removeprefix("jnp.").removeprefix("np.")
    if key not in DTYPES:
        raise ValueError(f"dtype={value!r} is not supported; use float32, float16 or bfloat16")
    return DTYPES[key]


def make_config(
    config: InferenceConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
) -> InferenceConfig:
    """One InferenceConfig from `config` (object, dict or a JSON file's path) and keyword arguments.

    The same field may be given twice with the same meaning. Raises ConfigError for a conflict, an
    unknown key or a bad value; the caller's dict stays as it is.
    """
    first = config if isinstance(config, InferenceConfig) else _validated(_as_dict(config))
    second = _validated(dict(overrides))
    return _merged(first, second, "")


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config is a {type(config).__name__}; expected a dict, an InferenceConfig or the path "
            "of a JSON file."
        )
    path = Path(config)
    if not path.exists():
        raise ConfigNotFoundError(f"config={str(config)!r}: there is no such file.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config={str(config)!r} cannot be read as a file: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    return value


def _validated(given: dict[str, Any]) -> InferenceConfig:
    values = {key: value for key, value in given.items() if not _is_harmless(key, value)}
    try:
        return InferenceConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e, values) for e in error.errors())) from error


def _is_harmless(key: Any, value: Any) -> bool:
    """True, with a warning, for a field of DeepSpeed's that asks for nothing."""
    if key not in _DEEPSPEED_ONLY or not (value is None or value in _DEEPSPEED_ONLY[key]):
        return False
    warnings.warn(f"{key}={value!r} has no effect in dualinfer; remove it.", stacklevel=5)
    return True


def _explain(error: Any, values: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{key}: {error['msg'].removeprefix('Value error, ')} (got {error['input']!r})"
    if key in _DEEPSPEED_ONLY:
        value = reprlib.repr(error["input"])
        return f"{key}={value}: a field of DeepSpeed's that this version does not honour; remove it"
    model = TensorParallelConfig if len(error["loc"]) > 1 else InferenceConfig
    names = [*model.model_fields, *(f.alias for f in model.model_fields.values() if f.alias)]
    if key in names:  # pydantic reports the name when its alias is there as well
        return f"{key}: given twice, by its name and its alias; give one"
    near = difflib.get_close_matches(str(error["loc"][-1]), names, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(names))}"
    return f"unknown key {key!r}; {hint}"


def _merged(first: Any, second: Any, prefix: str) -> Any:
    values = {name: getattr(first, name) for name in first.model_fields_set}
    for name in second.model_fields_set:
        new = getattr(second, name)
        if name in values and isinstance(new, _Model):
            new = _merged(values[name], new, f"{prefix}{name}.")
        elif name in values and values[name] != new:
            raise ConfigError(
                f"{prefix}{name} is {values[name]!r} in config and {new!r} as a keyword argument; "
                "give one of them."
            )
        values[name] = new
    return type(first).model_construct(_fields_set=set(values), **values)
