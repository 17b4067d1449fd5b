"""The JAX backend: `create_runner` loads a model onto a JAX device."""

import jax
import jax.numpy as jnp

from ...config import InferenceConfig
from ...spec import ModelSpec
from ...weights import LoadPlan, TensorSource
from .params import load_model
from .runner import JaxRunner


def default_device() -> jax.Device:
    """JAX's default device, else the first one of this process."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def default_dtype() -> str:
    """float16 where there is a GPU, as in the contract; float32 on a CPU."""
    return "float32" if default_device().platform == "cpu" else "float16"


def create_runner(
    config: InferenceConfig, spec: ModelSpec, plan: LoadPlan, source: TensorSource
) -> JaxRunner:
    """A runner on the default device with the plan's weights in the config's dtype."""
    device, dtype = default_device(), jnp.dtype(config.dtype or default_dtype())
    return JaxRunner(spec, load_model(spec, plan, source, dtype, device), dtype, device)
