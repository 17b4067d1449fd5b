"""The JAX backend: `create_runner` loads a model onto a JAX device."""

from contextlib import suppress
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp

from ...config import InferenceConfig
from ...errors import ConfigError, OutOfMemoryError, UnsupportedError
from ...model.load_plan import LoadPlan, TensorSource
from ...model.spec import ModelSpec
from ...ops.caches import KeptIn
from ...parallel.agreement import Peers
from ...parallel.experts import describe_experts, parts_of_experts
from ...parallel.shard import fit_blocks
from ...parallel.sharding import ShardingPlan, make_plan
from ...system.memory import host_free_bytes
from ..base import NO_KERNELS
from ..held import no_room
from ..streaming import Streaming, check_host, choose_layers
from .adapter import OnJax as OnJax
from .adapter import engine_type as engine_type
from .adapter import register_outputs
from .cache import least_free_bytes
from .compilation_cache import keep_all, use_compilation_cache
from .device import KERNELS_NEED, NO_TRITON, has_triton, pallas_obstacle, runs_kernels
from .exchange import open_exchange
from .executables import check_untraced, compiler_options
from .forks import check_process
from .mesh import ManyDevices, Place, find_place, without_mesh
from .module.parts import Target
from .module.runner import JaxModuleRunner
from .ops.plain import PlainOps
from .parallel import Split
from .params import load_params
from .processes import join as join_processes
from .runner import JaxRunner
from .streaming_runner import StreamingRunner
from .whole import Placed

_MORE_ROOM = (
    "JAX takes three quarters of a GPU; XLA_PYTHON_CLIENT_MEM_FRACTION=.95, set before JAX is "
    "imported, lets it take more."
)


def default_device() -> jax.Device:
    """JAX's default device, else the first one of this process; UnsupportedError without any."""
    check_process()
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, jax.Device):
        return chosen
    try:
        return jax.local_devices(backend=chosen)[0]
    except (RuntimeError, AssertionError) as error:  # the latter where CUDA is asked for in vain
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        raise UnsupportedError(
            f"JAX finds no device: {str(error) or 'a platform that was asked for is not there'}. "
            f"JAX_PLATFORMS is {platforms!r}, and jax_default_device {chosen!r}: leave them unset, "
            "or name a platform that is there, as cpu always is."
        ) from error


def default_dtype() -> str:
    """float16 on a GPU, as in DeepSpeed; float32 on a CPU, and bfloat16 on a TPU."""
    return {"cpu": "float32", "tpu": "bfloat16"}.get(default_device().platform, "float16")


def device_kind() -> str:
    """The platform that JAX runs on: cpu, gpu or tpu."""
    return default_device().platform


def check_dtype(dtype: str) -> None:
    """Nothing to refuse: XLA computes in all three dtypes on every device."""


def join(config: InferenceConfig, is_module: bool = False) -> Peers:
    """This process among those that share the model, once its devices are known to suffice.

    UnsupportedError inside of jax.jit and the like.
    """
    check_untraced()
    return join_processes(_place(config, is_module), config.tensor_parallel.timeout)


def _place(config: InferenceConfig, is_module: bool = False) -> Place:
    """The config's place for the model; one kept on the host runs there in module mode only."""
    on_host = is_module and config.keep_module_on_host and device_kind() != "cpu"
    return find_place(config.tensor_parallel, host_device() if on_host else default_device())


def create_runner(
    config: InferenceConfig, spec: ModelSpec, plan: LoadPlan, source: TensorSource, peers: Peers
) -> JaxRunner:
    """A runner on the config's devices with the plan's weights in its dtype."""
    place, dtype = _place(config), jnp.dtype(config.dtype or default_dtype())
    _check_kernels(config, spec, place.device)  # before any weight is read
    register_outputs()
    use_compilation_cache(place.device)
    if _kernels_of(config, place.device) == "triton" and runs_kernels(place.device):
        Thread(target=_prepare_kernels, args=(place.device,), name="dualinfer-triton").start()
    parts, tp = parts_of_experts(config.moe, spec, place.size), config.tensor_parallel
    how: Any = {"equal": True, "expert_parts": parts, "asked_by": tp.asked_by}
    tp_plan = make_plan(plan.table, place.size, tp.tp_grain_size, **how)
    streaming = _streaming(config, place, tp_plan, plan, dtype.itemsize, peers)
    with without_mesh():
        free = least_free_bytes(place)
        try:
            with keep_all():  # what joins pieces of a weight
                params, model, notes = load_params(place, tp_plan, plan, source, dtype, streaming)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            rows = [row for row, _ in plan.rows]
            message = no_room(tp_plan.shards[0], rows, dtype.itemsize, free, _MORE_ROOM)
            raise OutOfMemoryError(message) from error
        ops = _make_ops(config, spec, place.device, Split.of(place, tp_plan), place)
        options = compiler_options(config.enable_cuda_graph, place.device, ops.launches)
        most = spec.most_tokens(config.max_out_tokens)
        streams = streaming is not None and streaming.layers
        placed = Placed(
            *(spec, tp_plan, params, model, dtype, place, ops, peers, most, options, streaming),
            KeptIn.of(config),
        )
        runner = (StreamingRunner if streams else JaxRunner)(placed)
    runner.notes += (*notes, *describe_experts(tp_plan))
    if streaming:
        runner.notes += (streaming.describe(),)
    if _kernels_of(config, place.device) == "triton" and not ops.kernels:
        runner.notes += (f"{NO_KERNELS}{_obstacle(spec, place.device)}",)
    return runner


def _prepare_kernels(device: jax.Device) -> None:
    """Import Triton and have it looked through, while weights are read.

    Whatever fails here fails again where the kernels are needed, and is told there.
    """
    with suppress(Exception):
        from ...kernels.xla.handler import prepare
        from ...kernels.xla.launches import capability_of
        from .ops import kernels  # noqa: F401

        prepare(capability_of(device))


def _streaming(
    config: InferenceConfig,
    place: Place,
    tp_plan: ShardingPlan,
    plan: LoadPlan,
    itemsize: int,
    peers: Peers,
) -> Streaming | None:
    """Choose what each device streams, the same in all processes that share the model."""
    if not config.streams:
        return None
    rows = [row for row, _ in fit_blocks(plan, tp_plan.shards).rows]
    amounts = peers.tell("Choosing resident layers", free=least_free_bytes(place))["free"]
    free = min((n for n in amounts if n is not None), default=None)
    on_cpu = place.device.platform == "cpu"
    streaming = choose_layers(config, tp_plan.shards[0], rows, itemsize, free, on_cpu)
    check_host(streaming, host_free_bytes(), len(place.devices))
    return streaming


def describe_kernels() -> str:
    """Name the kernels that can run here, for people."""
    device = default_device()
    if device.platform != "gpu" and not pallas_obstacle(device):
        how = "usable" if device.platform == "tpu" else "interpreted"
        return f"Pallas: {how}"
    if not runs_kernels(device):
        others = "Pallas: on TPUs, and on GPUs from Hopper on"
        return f"Triton: not usable here; {KERNELS_NEED}; {others}; plain XLA"
    if not has_triton():
        return f"{NO_TRITON}; plain XLA"
    return "Triton: usable"


def _kernels_of(config: InferenceConfig, device: jax.Device) -> str:
    """Name the kernels wanted on a device: triton, pallas or xla; see `InferenceConfig`."""
    if config.kernels is not None:
        return config.kernels
    if not config.replace_with_kernel_inject:
        return "xla"
    if config.use_triton is not None:
        return "triton" if config.use_triton else "xla"
    if device.platform == "tpu":
        return "xla" if config.dtype == "float16" else "pallas"
    return "triton"


def _obstacle(spec: ModelSpec, device: jax.Device) -> str:
    """Why the kernels do not run a model here; "" where they do."""
    if not runs_kernels(device):
        kind = getattr(device, "device_kind", device.platform)
        return f"{KERNELS_NEED}, and this is a {kind}"
    if not has_triton():
        return NO_TRITON
    from ..kernels import unserved

    beyond = unserved(spec)
    return "" if beyond is None else f"the kernels do not serve {beyond}"


def _check_kernels(config: InferenceConfig, spec: ModelSpec, device: jax.Device) -> None:
    """ConfigError for kernels that are asked for by name and cannot run here."""
    wanted = _kernels_of(config, device)
    if wanted == "pallas":
        obstacle = pallas_obstacle(device)
        if device.platform == "tpu" and config.dtype == "float16":
            obstacle = "the compiler for TPUs takes no float16; with dtype='bfloat16' they run"
    elif wanted == "triton" and (config.kernels or config.use_triton):
        obstacle = _obstacle(spec, device)
    else:
        return
    if obstacle:
        asked = f"kernels={wanted!r}" if config.kernels else "use_triton=True"
        raise ConfigError(f"{asked}: {obstacle}. Leave it unset.")


def _make_ops(
    config: InferenceConfig,
    spec: ModelSpec,
    device: jax.Device,
    split: Split | None = None,
    place: Place | None = None,
) -> PlainOps:
    """The kernels that are wanted where they can run, else plain XLA; see `_check_kernels`."""
    wanted = _kernels_of(config, device)
    if wanted == "pallas":
        return _make_pallas_ops(spec, device, split)
    if wanted == "xla" or _obstacle(spec, device):
        return PlainOps(split)
    return _make_kernel_ops(config, spec, device, split, place)


def _make_pallas_ops(spec: ModelSpec, device: jax.Device, split: Split | None) -> PlainOps:
    """Pallas' kernels for a TPU or a GPU, else interpreted ones."""
    from .ops.pallas import PallasOps
    from .ops.pallas_gpu import PallasGpuOps

    if device.platform == "gpu":
        sms, capability = (getattr(device, a, None) for a in ("core_count", "compute_capability"))
        return PallasGpuOps(split, sms=sms or 132, hopper=str(capability) == "9.0")
    ops = PallasOps(split, interpret=device.platform != "tpu")
    ops.holds_scores = any(a.distances or a.alibi_rounded for a in spec.attentions)
    return ops


def _make_kernel_ops(
    config: InferenceConfig,
    spec: ModelSpec,
    device: jax.Device,
    split: Split | None,
    place: Place | None,
) -> PlainOps:
    """Triton kernels, with exchanges peer to peer where several GPUs allow it."""
    from ..kernels import has_wide_heads
    from .ops.kernels import KernelOps
    from .ops.split import SplitKernelOps

    if split is None or not isinstance(place, ManyDevices):
        ops = KernelOps(device, split)
    else:
        exchange = open_exchange(place, spec.vocab, config.tensor_parallel.timeout)
        if isinstance(exchange, str):
            ops = SplitKernelOps(device, split, None, exchange)
        else:
            ops = SplitKernelOps(device, split, exchange)
    ops.holds_scores = any(has_wide_heads(a.head_dim) for a in spec.attentions)
    return ops


def create_module_runner(
    config: InferenceConfig, module: Any, source: TensorSource | None, _: Peers
) -> JaxModuleRunner:
    """A runner of the caller's Flax module on the config's devices, or the host's if so configured.

    `source` is None: `config.refusals` refuses checkpoint= here, since there are no agreed names to
    fill a Flax module by. Its steps ask no other process for anything.
    """
    assert source is None
    place = _place(config, is_module=True)
    if isinstance(place, ManyDevices):
        place = place.automatic()
    use_compilation_cache(place.device)
    target = Target(jnp.dtype(config.dtype or default_dtype()), place, config.injection_policy)
    options = compiler_options(config.enable_cuda_graph, place.device)
    with place.context():
        return JaxModuleRunner(module, target, options)


def host_device() -> jax.Device:
    """The host as a JAX device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UnsupportedError(
            "keep_module_on_host=True needs JAX's CPU platform, which JAX_PLATFORMS "
            f"({jax.config.jax_platforms!r}) leaves out. Add cpu to it."  # pyright: ignore[reportAttributeAccessIssue]
        ) from error
