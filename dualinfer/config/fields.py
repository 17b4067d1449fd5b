"""InferenceConfig: every field of the contract."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from ..errors import ConfigError, a_type
from .dtypes import INT8, asked_dtype, cache_codes, states_in
from .installed import default_backend
from .model import KeyPath
from .nested import MoEConfig, QuantizationConfig, TensorParallelConfig, ZeroConfig
from .stale import StaleFields
from .values import (
    Count,
    Integer,
    NewFolder,
    Number,
    PathText,
    empty_is_none,
    factors_by_path,
    path_or_dict,
)

_INT8 = QuantizationConfig(scheme=INT8)
_OF_DEVICES = ("device", "devices", "device_map", "device_id", "local_rank")
_DEVICE = (
    "no field chooses the device. Set CUDA_VISIBLE_DEVICES before the process starts (empty: the "
    "CPU); or, on torch, call torch.cuda.set_device first, and in a job of several processes "
    "LOCAL_RANK says which GPU is whose; on JAX, set JAX_PLATFORMS, or jax_default_device by "
    "jax.config.update"
)
_JSON = (
    "a dict or file of this form is DeepSpeed's checkpoint JSON: pass it as the field checkpoint"
)


class InferenceConfig(StaleFields):
    """Settings that turn a model into an engine; frozen once built. Unset fields serve the user.

    What depends on the mode, the device or this version is checked by `init_inference`.
    """

    moved: ClassVar[Mapping[str, KeyPath]] = MappingProxyType(
        {
            "mp_size": ("tensor_parallel", "tp_size"),
            "mpu": ("tensor_parallel", "mpu"),
            "ep_size": ("moe", "ep_size"),
            "ep_group": ("moe", "ep_group"),
            "expert_group": ("moe", "ep_group"),
            "ep_mp_group": ("moe", "ep_mp_group"),
            "expert_mp_group": ("moe", "ep_mp_group"),
            "moe_experts": ("moe", "moe_experts"),
            "moe_type": ("moe", "type"),
        }
    )
    arguments: ClassVar[tuple[str, ...]] = ("params", "revision")
    hints: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**dict.fromkeys(_OF_DEVICES, _DEVICE), "checkpoints": _JSON}
    )
    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "enable_qkv_quantization": "quant",
            "mp": "tensor_parallel",
            "quantization_setting": "quant",
            "torch_dtype": "dtype",
        }
    )

    backend: Literal["torch", "jax"] = Field(default_factory=default_backend)
    """The framework that runs the model. Unset: the one that is installed, torch where both are.
    DeepSpeed has torch only."""

    replace_with_kernel_inject: bool | None = Field(default=None, validation_alias="kernel_inject")
    """True: run dualinfer's own decoder (fused mode), on kernels where they can run. False: no
    kernels, and on torch a live module runs itself.

    Unset: as True for a checkpoint's folder or hub id, and for a live HF module on JAX; as False
    for every other module, and for a folder of no supported family. With True such a model is
    refused, where DeepSpeed replaces nothing and says nothing.
    """

    dtype: Annotated[str, BeforeValidator(asked_dtype)] | None = None
    """What the model computes in: float32, float16 or bfloat16, in any spelling or as a torch,
    NumPy or JAX dtype. "int8" is `quant="int8"` with the dtype left unset.

    Unset or "auto": for a folder or hub id the checkpoint's own, but on a GPU float16 for a float32
    one, and on a CPU float32. For a live module float16 on a GPU, as in DeepSpeed, bfloat16 on a
    TPU, and float32 on a CPU, where DeepSpeed fails.
    """

    tensor_parallel: TensorParallelConfig = Field(
        default=TensorParallelConfig(), validation_alias="tp"
    )
    """How several devices share one model: see docs/many-devices.md."""

    enable_cuda_graph: bool | None = None
    """On torch, True needs CUDA: forward is captured once for each signature of its inputs, in
    both modes, and decoding for each bucket. False: no graphs. Unset: decoding only, in fused mode.

    On JAX every bucket is an executable compiled ahead of time, which meets True; False turns off
    the command buffers, which are XLA's CUDA graphs. DeepSpeed has False for unset, one graph, and
    the caller's own tensors as its buffers.
    """

    use_triton: bool | None = None
    """Triton kernels: unset, where they can run; True, required; False, never.

    They are those of fused mode, unless `replace_with_kernel_inject` is False, and run on
    data-centre GPUs from Ampere on. DeepSpeed's serve BERT only.
    """

    kernels: Literal["triton", "pallas", "xla"] | None = None
    """Which kernels run fused mode on JAX; refused, with the reason, where they cannot run.

    "triton": as `use_triton=True`. "pallas": Pallas, for TPUs, and for products of a row on NVIDIA
    GPUs from Hopper on. "xla": none, plain XLA. Unset: on a TPU Pallas, on an NVIDIA GPU Triton
    where it can run, else plain XLA. DeepSpeed has no such field.
    """

    triton_autotune: bool = False
    """Measure which configurations of the Triton kernels serve the model best, when the engine is
    made: a minute or two the first time, then read from the user's cache.

    Refused where the kernels cannot run.
    """

    moe: MoEConfig = MoEConfig()
    """How devices share a mixture's experts; a bool is `enabled`. See docs/mixtures.md."""

    keep_module_on_host: bool = False
    """True: weights stay in the host's memory. In fused mode layers are streamed to the device,
    each ahead of its use, but for `resident_layers`; on a CPU there is nothing to do. In module
    mode the module runs on the host. DeepSpeed only skips the move to the device."""

    resident_layers: Annotated[Integer, Field(ge=0)] | None = None
    """With `keep_module_on_host`, in fused mode: how many layers lie on the device all the same, 0
    or more. Unset: as many as fit in three quarters of its free memory; the cache has the rest.

    Where it is set, a CPU streams as well, as a rehearsal. DeepSpeed has no such field.
    """

    zero: ZeroConfig = ZeroConfig()
    """ZeRO's part in inference, fused mode only: stage 3 with `offload_param` on the "cpu" is
    `keep_module_on_host`. DeepSpeed's init_inference never reads it."""

    quant: QuantizationConfig | None = None
    """Weights quantized while the model is loaded: "int8", "int4", "fp8", "nvfp4", "mxfp4", with
    inputs "int8_w8a8" or "fp8_w8a8", or a block of what is asked for. {} asks for nothing. In
    module mode the linear layers of a torch module become quantized in place; a Flax module is
    refused. DeepSpeed never reads it."""

    kv_cache_dtype: Annotated[str | None, BeforeValidator(cache_codes)] = None
    """What the cache keeps keys and values in: "fp8_e4m3" ("fp8") or "int8", codes of 8 bits with
    a float32 scale for each token and KV head, made as they come.

    Unset or "auto": the model's dtype. Fused mode only. DeepSpeed has no such field.
    """

    state_dtype: Annotated[str | None, BeforeValidator(states_in)] = None
    """What the states of recurrences are kept in: "float32" or "bfloat16", which halves what a
    step reads and writes of them.

    Unset or "auto": float32. A state is computed in float32 and rounded once in each step, or
    piece of a prompt. Fused mode only. DeepSpeed has no such field.
    """

    checkpoint: Annotated[str | dict[str, Any] | None, BeforeValidator(path_or_dict)] = None
    """What fills the module, one on the meta device too: a HF folder, a hub id, a state-dict file
    (.safetensors, .bin, .pt, .pth), DeepSpeed's checkpoint JSON as a path or a dict, a folder of
    its training, or Meta's of a Llama. A Path is kept as a str.

    The shards of several ranks are merged, and each device reads its share of them. DeepSpeed
    ignores the field in some modes, and runs a meta module with uninitialised weights.
    """

    adapter: Annotated[
        dict[str, Annotated[Number, Field(allow_inf_nan=False)]] | None,
        BeforeValidator(factors_by_path),
    ] = None
    """What peft has trained for the model: a folder with an adapter_config.json or a hub id, a list
    of them, or a dict of each with its factor. They are merged as the weights are loaded.

    LoRA, rsLoRA and DoRA, on both backends; see docs/checkpoints.md. DeepSpeed knows none.
    """

    base_dir: PathText = ""
    """The folder of the files that DeepSpeed's checkpoint JSON names, before its own base_dir;
    refused with another checkpoint."""

    save_mp_checkpoint_path: NewFolder | None = None
    """A folder, new or empty, to write the loaded model to, with a file of weights for each device;
    fused mode only. It loads at any degree on either backend. DeepSpeed writes pickled files.
    """

    return_tuple: bool = True
    """True: forward returns a named tuple as HF does. False: the bare first array.

    Fused mode only, on both backends; in module mode forward returns what the module returns. In
    DeepSpeed it is what an injected layer returns inside of the model.
    """

    injection_policy: Annotated[dict[Any, Any] | None, BeforeValidator(empty_is_none)] = Field(
        default=None, validation_alias="injection_dict"
    )
    """How a module is split over devices, in module mode: on torch {layer class: name or names} of
    the outputs that are summed, on JAX {path pattern: axes}.

    With one device torch checks the names and splits nothing, and JAX refuses it. Refused in fused
    mode, as in DeepSpeed.
    """

    config: Annotated[dict[str, Any] | None, BeforeValidator(empty_is_none)] = Field(
        default=None, validation_alias="args"
    )
    """Fields laid over the model's HF config in fused mode; in module mode, what `engine.config`
    gives. DeepSpeed replaces the whole config by it."""

    max_out_tokens: Count | None = Field(default=None, validation_alias="max_tokens")
    """Hard limit of generate on prompt plus new tokens, 1 or more, on both backends.

    Unset: the model's own limit in fused mode, and none in module mode. DeepSpeed has 1024 for
    unset, takes negative numbers, and checks the prompt alone.
    """

    min_out_tokens: Count = Field(default=1, validation_alias="min_tokens")
    """Tokens of one sequence, prompt included, that the device's cache must have room for, 1 or
    more and no more than `max_out_tokens`.

    Fused mode: without that room, making the engine fails with the bytes needed and free. In
    module mode the cache is the module's own, and more than 1 is refused.
    """

    @model_validator(mode="after")
    def _int8_is_of_weights(self) -> Self:
        if self.dtype == INT8 and self.quant is not None and self.quant != _INT8:
            raise ValueError(
                "dtype=int8 asks for weights of 8 bits, and quant for others; give quant, and as "
                "dtype what the model computes in"
            )
        return self

    def with_int8_as_quant(self) -> "InferenceConfig":
        """The config with dtype=int8 said by `quant`."""
        if self.dtype != INT8:
            return self
        return self.model_copy(update={"dtype": None, "quant": _INT8})

    def with_experts_shared(self) -> "InferenceConfig":
        """The config with `moe.ep_size` and, where it names no devices, `tensor_parallel.tp_size`.

        Raises ConfigError where `moe.ep_group` says another size than `moe.ep_size`.
        """
        moe, tp = self.moe, self.tensor_parallel
        if not moe.enabled:
            return self
        size = getattr(moe.ep_group, "size", None)
        if moe.ep_group is not None and self.backend == "torch":
            if not callable(size):
                raise ConfigError(
                    f"moe.ep_group is {a_type(moe.ep_group)}, which has no size(). Pass "
                    "a process group of torch.distributed that this process belongs to."
                )
            members = cast(int, size())
            if moe.ep_size not in (1, members):
                raise ConfigError(
                    f"moe.ep_size={moe.ep_size}, and moe.ep_group has {members} processes. Leave "
                    "one of them out."
                )
            moe = moe.model_copy(update={"ep_size": members})
        named = tp.tp_size > 1 or any(g is not None for g in (tp.mpu, tp.tp_group, tp.mesh))
        if moe.ep_size > 1 and tp.enabled and not named:
            tp = tp.by_experts(moe.ep_size)
        return self.model_copy(update={"moe": moe, "tensor_parallel": tp})

    @property
    def streams(self) -> bool:
        """True if weights are to stay in the host's memory."""
        return self.keep_module_on_host or self.zero.on_host

    @model_validator(mode="after")
    def _one_place_for_weights(self) -> Self:
        said = "keep_module_on_host" in self.model_fields_set
        if said and self.zero.on_host and not self.keep_module_on_host:
            raise ValueError(
                "keep_module_on_host=False, and zero.offload_param.device='cpu' asks for the "
                "contrary; leave one of them unset"
            )
        return self

    @model_validator(mode="after")
    def _room_for_min_out_tokens(self) -> Self:
        if self.max_out_tokens is not None and self.min_out_tokens > self.max_out_tokens:
            raise ValueError(
                f"min_out_tokens={self.min_out_tokens} is more than max_out_tokens="
                f"{self.max_out_tokens}; lower the one or raise the other"
            )
        return self
