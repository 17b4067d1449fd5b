"""Tell which of JAX's devices run which kernels; nothing here imports Triton."""

import importlib.util
import sys

import jax

from ...kernels.pallas.launch import VARIABLE, interpreted

KERNELS_NEED = "the kernels run on NVIDIA's data-centre GPUs (A100, H100, H200, B200)"
NO_TRITON = "Triton is not installed (pip install triton)"
_INTERPRET = f"{VARIABLE}=1 in the environment interprets them, slowly, as tests do"
_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3")
_MOSAIC = ("9.0", "10.0", "10.3")  # which Pallas' lowering for GPUs knows


def runs_kernels(device: jax.Device) -> bool:
    """True on NVIDIA's data-centre GPUs from Ampere on.

    They have more than 99 KiB of shared memory for a block, which the kernels' configurations fill.
    """
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform == "gpu" and capability in _CAPABILITIES


def has_triton() -> bool:
    """True where Triton is installed; JAX itself does not bring it."""
    if "triton" in sys.modules:
        return sys.modules["triton"] is not None
    return importlib.util.find_spec("triton") is not None


def pallas_obstacle(device: jax.Device) -> str:
    """Why Pallas' kernels do not run on a device; "" where they do, interpreted or not."""
    capability = str(getattr(device, "compute_capability", ""))
    is_known_gpu = device.platform == "gpu" and capability in _MOSAIC
    if device.platform == "tpu" or is_known_gpu or interpreted():
        return ""
    kind = getattr(device, "device_kind", device.platform)
    where = "TPUs and on NVIDIA's GPUs from Hopper on"
    return f"Pallas' kernels run on {where}, and this is a {kind}; {_INTERPRET}"
