"""The JAX backend: `create_runner` loads a model onto a JAX device."""

from typing import Any

import jax
import jax.numpy as jnp

from ...config import InferenceConfig
from ...errors import UnsupportedError
from ...spec import ModelSpec
from ...weights import LoadPlan, TensorSource
from .adapter import engine_type as engine_type
from .adapter import register_outputs
from .compilation_cache import use_compilation_cache
from .graphs import compiler_options
from .kernels import KernelOps, runs_kernels, unserved
from .modules import JaxModuleRunner
from .params import load_model
from .plain import PlainOps
from .runner import JaxRunner


def default_device() -> jax.Device:
    """JAX's default device, else the first one of this process."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def default_dtype() -> str:
    """float16 where there is a GPU, as in the contract; float32 on a CPU."""
    return "float32" if default_device().platform == "cpu" else "float16"


def device_kind() -> str:
    """What JAX runs on: cpu, gpu or tpu."""
    return default_device().platform


def check_dtype(dtype: str) -> None:
    """Nothing to refuse: XLA computes in all three dtypes on every device."""


def create_runner(
    config: InferenceConfig, spec: ModelSpec, plan: LoadPlan, source: TensorSource
) -> JaxRunner:
    """A runner on the default device with the plan's weights in the config's dtype."""
    device, dtype = default_device(), jnp.dtype(config.dtype or default_dtype())
    register_outputs()
    use_compilation_cache(device)
    model = load_model(spec, plan, source, dtype, device)
    options = compiler_options(config.enable_cuda_graph, device)
    return JaxRunner(spec, model, dtype, device, _make_ops(config, spec, device), options)


def _make_ops(config: InferenceConfig, spec: ModelSpec, device: jax.Device) -> PlainOps:
    """Pallas kernels where they are wanted and can run, else plain XLA."""
    if not config.replace_with_kernel_inject or config.use_triton is False:
        return PlainOps()
    if not runs_kernels(device) or unserved(spec):
        return PlainOps()
    return KernelOps(getattr(device, "core_count", 132))


def create_module_runner(
    config: InferenceConfig, module: Any, source: TensorSource | None = None
) -> JaxModuleRunner:
    """A runner of the caller's Flax module on the default device, or the host's if so configured.

    `source` is None: limits.py refuses checkpoint= here, since there are no agreed names to fill a
    Flax module by.
    """
    assert source is None
    device = host_device() if config.keep_module_on_host else default_device()
    dtype = jnp.dtype(config.dtype or default_dtype())
    use_compilation_cache(device)
    return JaxModuleRunner(
        module, dtype, device, compiler_options(config.enable_cuda_graph, device)
    )


def host_device() -> jax.Device:
    """The host as a JAX device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UnsupportedError(
            "keep_module_on_host=True needs JAX's CPU platform, which JAX_PLATFORMS "
            f"({jax.config.jax_platforms!r}) leaves out. Add cpu to it."  # pyright: ignore[reportAttributeAccessIssue]
        ) from error
