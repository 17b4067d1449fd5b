"""The torch backend: `create_runner` loads a model onto a torch device."""

import os
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from ...checkpoint.described.auto_class import classes_of_type
from ...config import InferenceConfig
from ...errors import ConfigError, ModelError, OutOfMemoryError, warn_caller
from ...model.deepspeed_moe import MoeLayer
from ...model.load_plan import LoadPlan, TensorSource
from ...model.spec import ModelSpec
from ...ops.caches import KeptIn
from ...parallel.experts import describe_experts, parts_of_experts
from ...parallel.sharding import make_plan
from ...system.memory import host_free_bytes
from ..base import NO_KERNELS
from ..held import no_room
from ..streaming import check_host, choose_layers
from .adapter import OnTorch as OnTorch
from .adapter import engine_type as engine_type
from .ahead import prepare
from .device import (
    default_device,
    device_name,
    free_bytes,
    has_triton,
    number_of,
    rank_device,
    runs_kernels,
)
from .device import default_dtype as default_dtype
from .ops.plain import PlainOps
from .parallel import Ranks, Split
from .params import load_params
from .process_groups import degree_of, find_places, forget_graphs_at_exit
from .process_groups import join as join_ranks
from .runner import TorchRunner

if TYPE_CHECKING:
    from .module.autotp.plan import Described
    from .module.runner import TorchModuleRunner

_KERNELS_NEED = (
    "the kernels run on CUDA devices from Ampere on that have the shared memory of an A100 or more "
    "(A100, H100, H200, B200)"
)


def device_kind() -> str:
    """The platform that torch runs on: cuda or cpu."""
    return default_device().type


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for bfloat16 on a GPU that has none (before Ampere)."""
    device = default_device()
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise ConfigError(
            f"dtype={dtype!r}: {torch.cuda.get_device_name(device)} does not compute in bfloat16. "
            "Use float16 or float32."
        )


def join(config: InferenceConfig, is_module: bool = False) -> Ranks:
    """This process among those that share the model, in either mode; see `process_groups.join`."""
    degree = degree_of(config.tensor_parallel)
    device = default_device() if degree == 1 else rank_device()
    return join_ranks(config.tensor_parallel, device)


def describe_split(class_name: str, config: Any, size: int, grain: int) -> "Described":
    """Tell how each layer of a class of transformers splits over `size` ranks; no weights are made.

    Raises ModelError where transformers has no such model.
    """
    from .module.autotp.plan import describe

    config._attn_implementation = "eager"
    return describe(make_empty_module(class_name, config), size, grain)


def find_mixtures(*given: Any) -> list[MoeLayer]:
    """DeepSpeed's MoE layers in a HF module; see `module.trials.find_layers`."""
    from .module.trials import find_layers

    return find_layers(*given)


def make_empty_module(class_name: str, config: Any) -> torch.nn.Module:
    """A HF model on the meta device, made as transformers' Auto classes make it.

    ModelError where transformers has none of that name, or none for such a config.
    """
    import transformers

    model_type = getattr(transformers, class_name, None)
    if not (isinstance(model_type, type) and issubclass(model_type, transformers.PreTrainedModel)):
        raise ModelError(f"transformers {transformers.__version__} has no model {class_name}.")
    own = model_type.config_class
    if own is not None and config.sub_configs.get("text_config") == own:
        config = config.get_text_config()  # of the one part that this class is
    elif not isinstance(config, own or ()) and class_name not in classes_of_type(config.model_type):
        raise ModelError(
            f"transformers makes no {class_name} of a config of model_type {config.model_type!r}."
        )
    with torch.device("meta"):
        return model_type(config)


def create_runner(
    config: InferenceConfig, spec: ModelSpec, plan: LoadPlan, source: TensorSource, peers: Ranks
) -> TorchRunner:
    """A runner on the rank's device with its share of the plan's weights in the config's dtype."""
    device, dtype = peers.device, getattr(torch, config.dtype or default_dtype())
    parts, tp = parts_of_experts(config.moe, spec, peers.size), config.tensor_parallel
    places = find_places(config.moe, parts, peers)
    how: Any = {"expert_parts": parts, "places": places, "asked_by": tp.asked_by}
    tp_plan = make_plan(plan.table, peers.size, tp.tp_grain_size, **how)
    shard = tp_plan.shards[peers.rank]
    ops = _make_ops(config, shard.spec, device, Split.of(peers, tp_plan))
    if ops.kernels and shard.size == 1 and not config.streams:
        Thread(target=prepare, args=(device,), name="dualinfer-triton").start()
    streaming, free = None, free_bytes(device)
    if config.streams:
        on_cpu = device.type == "cpu"
        rows = [row for row, _ in plan.rows]
        streaming = choose_layers(config, shard, rows, dtype.itemsize, free, on_cpu)
        shares = number_of("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else 1
        check_host(streaming, host_free_bytes(), min(shares, peers.size))
    try:
        params = load_params(shard, plan, source, dtype, device, streaming)
    except torch.OutOfMemoryError as error:
        rows = [row for row, _ in plan.rows]
        message = no_room(shard, rows, dtype.itemsize, free, "Free what other work on it takes.")
        raise OutOfMemoryError(message) from error
    if config.triton_autotune:
        from .tuning.search import autotune

        autotune(shard.spec, params, ops, config.kv_cache_dtype)
    graphs = config.enable_cuda_graph
    graphs = graphs is not False, graphs is True
    runner = TorchRunner(shard, params, dtype, ops, device, peers, *graphs, KeptIn.of(config))
    if streaming:
        runner.notes += (streaming.describe(),)
    if _wants_kernels(config) and not ops.kernels:
        runner.notes += (f"{NO_KERNELS}{_obstacle(shard.spec, device)}",)
    if shard.size > 1:
        forget_graphs_at_exit(runner)
        share = shard.describe()
        runner.notes += (f"rank {shard.rank} of {shard.size}; counts are its own: {share}",)
        runner.notes += (*describe_experts(tp_plan),)
    return runner


def create_module_runner(
    config: InferenceConfig, module: Any, source: TensorSource | None, peers: Ranks
) -> "TorchModuleRunner":
    """See `module.runner`, which fused mode starts sooner without."""
    from .module.runner import create_module_runner

    return create_module_runner(config, module, source, peers)


def describe_kernels() -> str:
    """True if Triton's kernels can run here, for people."""
    if not has_triton():
        return "Triton is not installed; plain operations"
    if not runs_kernels(default_device()):
        return f"Triton: not usable here; {_KERNELS_NEED}; plain operations"
    return "Triton: usable"


def _wants_kernels(config: InferenceConfig) -> bool:
    return bool(config.replace_with_kernel_inject) and config.use_triton is not False


def _obstacle(spec: ModelSpec, device: torch.device) -> str:
    """Why the kernels do not run a model here; "" where they do."""
    if not runs_kernels(device):
        return f"{_KERNELS_NEED}, and this is a {device_name(device)}"
    if not has_triton():
        return "Triton is not installed"
    from ..kernels import unserved

    beyond = unserved(spec)
    if beyond is None:
        return ""
    return f"the kernels do not serve {beyond}, which {spec.architecture} has here"


def _make_ops(
    config: InferenceConfig, spec: ModelSpec, device: torch.device, split: Split | None
) -> PlainOps:
    """Triton kernels where they are wanted and can run, else plain torch."""
    if not _wants_kernels(config):
        return PlainOps(split)
    obstacle = _obstacle(spec, device)
    if not obstacle:
        from .ops.kernels import KernelOps
        from .tuning.store import load_configurations

        if split is not None:
            return _make_split_ops(device, split)
        return KernelOps(device, load_configurations(device))
    if config.use_triton or config.triton_autotune:
        name = "use_triton" if config.use_triton else "triton_autotune"
        raise ConfigError(f"{name}=True: {obstacle}. Leave it unset.")
    return PlainOps(split)


def _make_split_ops(device: torch.device, split: Split) -> PlainOps:
    """Kernels of one rank of several, with exchanges peer to peer where the GPUs allow it."""
    from .exchange import open_exchange
    from .ops.split import SplitKernelOps
    from .tuning.store import load_configurations

    try:
        exchange = open_exchange(split)
    except RuntimeError as error:
        warn_caller(f"The GPUs do not write to each other's memory, so that NCCL sums: {error}")
        exchange = None
    return SplitKernelOps(device, load_configurations(device), split, exchange)
