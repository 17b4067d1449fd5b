"""Refusals, before anything is loaded, of what a backend, a mode or this version cannot honour."""

import importlib.util
from typing import Any, Literal

from ..errors import ConfigError, shown
from . import InferenceConfig

Mode = Literal["fused", "module"]


def check_config(config: InferenceConfig, mode: Mode, device: str) -> None:
    """Raise ConfigError for the first field that cannot be honoured; `device` is cpu, cuda ...

    Fields at values that ask for nothing pass.
    """
    _check_parallelism(config)
    _check_later(config)
    if mode == "fused" and config.resident_layers is not None and not config.streams:
        reason = "without keep_module_on_host=True all layers are on the device. Set it, too."
        _refuse("resident_layers", config.resident_layers, reason)
    _check_kernels(config, mode)
    _check_triton(config, mode, device)
    on_torch = config.backend == "torch"
    if config.enable_cuda_graph and on_torch and device != "cuda":
        raise ConfigError(
            f"enable_cuda_graph=True needs a CUDA device, but torch runs on {device} here. Leave "
            "enable_cuda_graph unset."
        )
    if mode == "module":
        _check_module_mode(config)
    else:
        _check_fused_mode(config, device)


def _refuse(name: str, value: Any, reason: str) -> None:
    raise ConfigError(f"{name}={shown(value)}: {reason}")


def _check_parallelism(config: InferenceConfig) -> None:
    """Check how devices share the model; the backend checks their number, in `join`."""
    tp, moe = config.tensor_parallel, config.moe
    if config.backend == "jax":
        sizes = {"mpu": "get_model_parallel_world_size", "tp_group": "size"}
        for name, method in sizes.items():
            size = getattr(getattr(tp, name), method, None)
            if getattr(tp, name) is not None and not (callable(size) and size() == 1):
                reason = "processes in groups are torch's. On JAX set tp_size, or pass a mesh."
                _refuse(f"tensor_parallel.{name}", getattr(tp, name), reason)
    else:
        reason = "meshes are JAX's. On torch set tp_size, or pass tp_group."
        if tp.mesh is not None:
            _refuse("tensor_parallel.mesh", tp.mesh, reason)
        if tp.axis != type(tp).model_fields["axis"].default:
            _refuse("tensor_parallel.axis", tp.axis, reason)
    if moe.enabled:
        for name in ("ep_group", "ep_mp_group"):
            if getattr(moe, name) is not None and config.backend == "jax":
                reason = "processes in groups are torch's. On JAX set moe.ep_size."
                _refuse(f"moe.{name}", getattr(moe, name), reason)


_OTHER_MODEL = "A Flax module runs as it is: leave this unset, or pass a HF model."


def _check_later(config: InferenceConfig) -> None:
    """Refuse what the contract has and this version does not serve yet."""
    if str(config.checkpoint).endswith(".index.json"):
        reason = "this is the index of a HF checkpoint. Pass its folder."
        _refuse("checkpoint", config.checkpoint, reason)
    is_listed = isinstance(config.checkpoint, dict) or str(config.checkpoint).endswith(".json")
    if config.base_dir and not is_listed:
        reason = (
            "it completes the paths in DeepSpeed's checkpoint JSON, and checkpoint names none. "
            "Leave it unset."
        )
        _refuse("base_dir", config.base_dir, reason)


def _check_kernels(config: InferenceConfig, mode: Mode) -> None:
    """A choice of kernels by name is JAX's, of fused mode, and agrees with the other fields."""
    name = config.kernels
    if name is None:
        return
    if config.backend != "jax":
        _refuse("kernels", name, "on torch there are Triton's alone; use_triton says whether.")
    if mode == "module":
        _refuse("kernels", name, f"the kernels are those of fused mode. {_OTHER_MODEL}")
    if not config.replace_with_kernel_inject and name != "xla":
        reason = "replace_with_kernel_inject=False says that there are none. Leave out one of them."
        _refuse("kernels", name, reason)
    if config.use_triton is not None and config.use_triton is not (name == "triton"):
        reason = f"use_triton={config.use_triton} says otherwise. Leave out one of them."
        _refuse("kernels", name, reason)


def _check_triton(config: InferenceConfig, mode: Mode, device: str) -> None:
    """Refuse Triton kernels without the mode, backend and device that they run in."""
    asked = [name for name in ("use_triton", "triton_autotune") if getattr(config, name)]
    if not asked:
        return
    name, way = asked[0], "Leave it unset."
    if config.backend == "jax" and config.triton_autotune:
        reason = "the search is torch's; on JAX the tables that dualinfer brings choose"
        _refuse("triton_autotune", True, f"{reason}. Use backend='torch', or leave it unset.")
    if device not in ("cuda", "gpu"):
        where = f"{config.backend} runs on {device} here"
        _refuse(name, True, f"Triton needs a CUDA device, and {where}. {way}")
    if mode == "module" or not config.replace_with_kernel_inject:
        reason = "the kernels are those of replace_with_kernel_inject=True. Set it, too."
        if mode == "module" and config.backend == "jax":
            reason = f"the kernels are those of fused mode. {_OTHER_MODEL}"
        _refuse(name, True, reason)
    if importlib.util.find_spec("triton") is None:
        _refuse(name, True, f"Triton is not installed. Run `pip install triton`. {way}")
    if config.use_triton is False:
        _refuse(name, True, "with use_triton=False there are no kernels to tune. Set one of them.")


def _check_module_mode(config: InferenceConfig) -> None:
    moe = config.moe
    if moe.enabled and config.backend == "jax":
        reason = (
            "in module mode dualinfer knows the MoE layers of torch modules alone, DeepSpeed's. "
            "Leave it unset, or pass a HF model that fused mode serves."
        )
        asked = {"ep_size": 1, "moe_experts": [1], "type": "standard", "drop_tokens": False}
        for name, nothing in asked.items():
            if getattr(moe, name) != nothing:
                _refuse(f"moe.{name}", getattr(moe, name), reason)
    if config.backend == "jax" and config.quant is not None and config.quant.enabled:
        reason = (
            "a Flax module multiplies by arrays of its own, in code that takes no codes and scales "
            "(dtype=int8 asks for quant, too). Use backend='torch', pass a HF model that fused "
            "mode serves, or leave quant unset."
        )
        asked = config.quant.scheme or config.quant.model_dump(exclude_unset=True)
        _refuse("quant", asked, reason)
    if config.zero.on_host or config.resident_layers is not None:
        name = "zero" if config.zero.on_host else "resident_layers"
        asked = config.zero.model_dump(exclude_unset=True) if name == "zero" else True
        value = asked if name == "zero" else config.resident_layers
        streams = "" if config.streams else " and keep_module_on_host=True"
        reason = (
            f"layers are streamed in fused mode only. Set replace_with_kernel_inject=True{streams}"
            "; or leave it unset: with keep_module_on_host=True a module runs on the host."
        )
        if config.backend == "jax":
            reason = f"layers are streamed in fused mode only. {_OTHER_MODEL}"
        _refuse(name, value, reason)
    if config.kv_cache_dtype is not None:
        reason = (
            "in module mode the cache is the module's own. Set replace_with_kernel_inject=True, or "
            "leave it unset."
        )
        if config.backend == "jax":
            reason = f"in module mode the cache is the module's own. {_OTHER_MODEL}"
        _refuse("kv_cache_dtype", config.kv_cache_dtype, reason)
    if config.state_dtype is not None:
        way = "Set replace_with_kernel_inject=True, or leave it unset."
        way = _OTHER_MODEL if config.backend == "jax" else way
        reason = f"in module mode states are the module's own. {way}"
        _refuse("state_dtype", config.state_dtype, reason)
    if config.min_out_tokens > 1:
        reason = "in module mode the cache is the module's own, and dualinfer reserves none. Use 1."
        _refuse("min_out_tokens", config.min_out_tokens, reason)
    if not config.return_tuple:
        reason = "in module mode forward returns what the module returns. Leave it unset."
        _refuse("return_tuple", False, reason)
    if config.save_mp_checkpoint_path:
        reason = (
            "in module mode the module keeps its own names and layers. Save it with its own "
            "save_pretrained(), or leave this unset."
        )
        _refuse("save_mp_checkpoint_path", config.save_mp_checkpoint_path, reason)
    if config.backend == "jax" and config.checkpoint is not None:
        reason = (
            "the names of a Flax module's parameters follow no convention that a checkpoint could "
            "be matched by. Load the weights into the module first, with orbax for example."
        )
        _refuse("checkpoint", config.checkpoint, reason)


def _check_fused_mode(config: InferenceConfig, device: str) -> None:
    moe = config.moe
    if moe.enabled and moe.drop_tokens:
        reason = (
            "fused mode drops no token. Leave it unset; a live module with DeepSpeed's own MoE "
            "layers drops them with backend='torch' and without replace_with_kernel_inject."
        )
        _refuse("moe.drop_tokens", True, reason)
    if config.injection_policy:
        way = "Leave it unset, or pass the live module with backend='torch'."
        if config.replace_with_kernel_inject and config.backend == "torch":
            way = "Leave out one of injection_policy and replace_with_kernel_inject."
        reason = (
            "a policy says how the model's own layers are split, and in fused mode dualinfer's "
            f"run instead. {way}"
        )
        _refuse("injection_policy", config.injection_policy, reason)
    if config.streams and (device != "cpu" or config.resident_layers is not None):
        _check_streaming(config)


def _check_streaming(config: InferenceConfig) -> None:
    """Refuse what needs weights that lie still on the device."""
    way = "Leave it unset, or keep_module_on_host."
    if config.backend == "torch" and config.enable_cuda_graph:
        reason = "with weights on the host passes are launched one by one, and copies beside them."
        _refuse("enable_cuda_graph", True, f"{reason} {way}")
    if config.triton_autotune:
        reason = (
            "the search measures on weights that lie on the device. Search without "
            "keep_module_on_host, for a smaller model of the same shapes of layers: what it finds "
            "is kept and serves here, too."
        )
        _refuse("triton_autotune", True, reason)
