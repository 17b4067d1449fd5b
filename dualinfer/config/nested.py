"""The configs inside an InferenceConfig: parallelism, experts, quantization, checkpoints."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from .model import Model
from .values import AnyCase, Count, Integer, Number, PathText, one_of


def _only_true(value: bool) -> bool:
    if not value:
        raise ValueError("expected true: a copy from other memory does not overlap with work")
    return value


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


class TensorParallelConfig(Model):
    """Settings for sharing one model among several devices."""

    enabled: bool = True
    """False: one device, whatever `tp_size` says. DeepSpeed never reads it."""

    tp_size: Count = 1
    """Number of devices that share the model, 1 or more. On torch each has a process of its own,
    started by torchrun or `dualinfer launch`; on JAX one process drives them all. A torch job of
    several times as many processes runs as many copies; in DeepSpeed the others are left out."""

    tp_grain_size: Count = 64
    """The widths of MLP and vocabulary shards are multiples of this many columns, 1 or more, but
    for a rest at the end, as long as each device has one. DeepSpeed leaves devices without any."""

    mpu: Any = None
    """A model-parallel unit (an object with `get_model_parallel_world_size` and
    `get_model_parallel_group`), torch only: it says how many and which processes share the model.
    With a `tp_size` above 1 that says otherwise it is refused; in DeepSpeed it wins."""

    tp_group: Any = None
    """A process group of torch.distributed to share the model over, torch only. DeepSpeed
    overwrites it when `tp_size` is above 1."""

    mesh: Any = None
    """A jax.sharding.Mesh to share the model over along `axis`, JAX only. Unset: one of the first
    `tp_size` devices. Along its other axes the model is replicated."""

    axis: str = Field(default="tp", min_length=1)
    """The name of the mesh's axis that the model is split along, JAX only."""

    timeout: Annotated[Number, Field(gt=0, le=1e7)] = 600.0
    """Seconds that a process waits for the others before it gives up, more than 0, at most 1e7."""

    _asked_by: str = PrivateAttr("tensor_parallel.tp_size")

    @property
    def asked_by(self) -> str:
        """The field whose value `tp_size` is, for messages."""
        return self._asked_by

    def by_experts(self, parts: int) -> Self:
        """These settings for as many devices as `moe.ep_size` has parts."""
        settings = self.model_copy(update={"tp_size": parts})
        settings._asked_by = "moe.ep_size"
        return settings

    @property
    def degree(self) -> int:
        """The number of devices that share the model: `tp_size`, or 1 if not enabled."""
        return self.tp_size if self.enabled else 1


class MoEConfig(Model):
    """Settings for sharing experts among several devices. `True` is `{"enabled": True}`."""

    enabled: bool = True
    """False: the other fields ask for nothing. DeepSpeed never reads it."""

    ep_size: Count = 1
    """In how many parts the experts are shared out, 1 or more; it divides the number of devices
    that share the model. 1: each of these has a share of the width of every expert. As many as
    devices: each has whole experts. Between them `tp_size / ep_size` devices share the width of
    each part's. With `tp_size` unset `ep_size` devices share the model, attention too. Fused mode,
    and DeepSpeed's layers in module mode.

    In DeepSpeed, too, processes in a row share out all experts; its attention is then whole in
    each of them."""

    moe_experts: Annotated[list[Count], BeforeValidator(_as_list), Field(min_length=1)] = Field(
        default=[1], validation_alias="num_experts"
    )
    """Number of experts of a MoE layer, or of each one, 1 or more; an int is a list of one. Other
    than [1] it is compared with the model's own. DeepSpeed never reads it, and refuses the int that
    its tutorial shows."""

    type: Annotated[Literal["standard", "residual"], AnyCase] = "standard"
    """`standard`, or `residual`: a dense MLP beside the experts, as in DeepSpeed's layers. Where
    it is given it is compared with the module's own layers."""

    drop_tokens: bool = False
    """True: an expert of a DeepSpeed layer takes as many tokens as the layer's own
    `eval_capacity_factor` and `min_capacity` allow, and drops others. False: no token is dropped.
    Module mode on torch only. In DeepSpeed it is an argument of the layer, True by default."""

    ep_mp_group: Any = None
    """A process group of torch.distributed: those that have the same experts, and share their
    width. Unset: processes that are `ep_size` apart."""

    ep_group: Any = Field(default=None, validation_alias="expert_group")
    """A process group of torch.distributed: those that together have all experts, each a part.
    Its size is `ep_size`, which may then be left unset. Unset: `ep_size` processes in a row."""

    @classmethod
    def unfold(cls, value: Any) -> Mapping[Any, Any] | None:
        """As in Model; a bool is `enabled`."""
        return {"enabled": value} if isinstance(value, bool) else super().unfold(value)


class OffloadParamConfig(Model):
    """The place where ZeRO keeps parameters."""

    device: Annotated[Literal["none", "cpu"], AnyCase] = "none"
    """"cpu": layers are streamed from the host's memory. "nvme" is refused: no weights are read
    from a disk in each pass."""

    pin_memory: Annotated[bool, AfterValidator(_only_true)] = True
    """True only: what is streamed is always pinned. In DeepSpeed it is False by default."""


class ZeroConfig(Model):
    """The settings of ZeRO that mean something without training."""

    stage: Annotated[Integer, AfterValidator(one_of(0, 3))] = 0
    """0, or 3 with `offload_param`; the others are about gradients and optimizers."""

    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Where parameters lie."""

    @property
    def on_host(self) -> bool:
        """True if parameters are to lie in the host's memory."""
        return self.offload_param.device == "cpu"

    @model_validator(mode="after")
    def _stage_3_is_offloading(self) -> Self:
        if (self.stage == 3) != self.on_host:
            raise ValueError(
                f"stage={self.stage} with offload_param.device={self.offload_param.device!r}: "
                "inference knows stage 3 with parameters on the 'cpu', and stage 0 without; to "
                "share a model's weights among devices set tensor_parallel.tp_size"
            )
        return self


# The names of `quantization.quantize.SCHEMES`.
QuantWord = Literal[
    "int8",
    "int4",
    "fp8",
    "nvfp4",
    "mxfp4",
    "int8_w8a8",
    "fp8_w8a8",
]


class BaseQuantConfig(Model):
    """Settings for quantizing one kind of tensor."""

    enabled: bool = True
    """True if this kind of tensor is quantized at all."""

    num_bits: Annotated[Count, AfterValidator(one_of(4, 8))] = 8
    """Bits of a quantized value: 4 or 8. DeepSpeed takes any number."""

    q_type: Annotated[Literal["symmetric", "asymmetric"], AnyCase] = "symmetric"
    """`symmetric`: a scale; `asymmetric`: a scale and a zero point."""

    q_groups: Count = 1
    """Number of groups along each row that have a scale of their own, 1 or more."""


class ActivationQuantConfig(BaseQuantConfig):
    """Settings for quantizing activations."""


class WeightQuantConfig(BaseQuantConfig):
    """Settings for quantizing weights."""

    group_size: Count | None = None
    """Elements of a row that share a scale, in the place of `q_groups`, which counts groups."""

    quantized_initialization: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed's quantization by patterns of names, of its training; refused."""

    post_init_quant: dict[str, Any] = Field(default_factory=dict)
    """The same for a loaded model; refused."""


class QKVQuantConfig(Model):
    """Settings for quantizing the query, key and value projections."""

    enabled: bool = True
    """True if they are quantized as the other weights are."""


class QuantizationConfig(Model):
    """Weights, and inputs of their products, quantized while the model is loaded."""

    enabled: bool = True
    """False: nothing is quantized, whatever the rest says."""

    scheme: Annotated[QuantWord | None, AnyCase] = None
    """How weights are quantized, in a word, in the place of `weight`: int8 and fp8 with a scale for
    each row, int4 in groups of 64, nvfp4 of 16, mxfp4 of 32. With `_w8a8` inputs of products become
    codes of the same kind, too, a scale for each token. `quant="int4"` is short for it."""

    activation: ActivationQuantConfig = ActivationQuantConfig()
    """Inputs of products, quantized only where this is given: 8 bits, a scale for each token."""

    weight: WeightQuantConfig = Field(default_factory=WeightQuantConfig)
    """Weights: int8 with a scale for each row, unless it says otherwise."""

    qkv: QKVQuantConfig = QKVQuantConfig()
    """The query, key and value projections."""

    @classmethod
    def unfold(cls, value: Any) -> Mapping[Any, Any] | None:
        """As in Model; a bool is `enabled`, and a str `scheme`."""
        if isinstance(value, bool):
            return {"enabled": value}
        return {"scheme": value} if isinstance(value, str) else super().unfold(value)


class CheckpointConfig(Model):
    """DeepSpeed's block of paths, which it never reads; `checkpoint` is what loads weights."""

    checkpoint_dir: PathText | None = None
    """Use the field `checkpoint` instead."""

    save_mp_checkpoint_path: PathText | None = None
    """Use the field `save_mp_checkpoint_path` instead."""

    base_dir: PathText | None = None
    """Use the field `base_dir` instead."""
