"""Which of JAX's devices run Triton's kernels; nothing here imports Triton."""

import importlib.util
import sys

import jax

KERNELS_NEED = "the kernels run on NVIDIA's data-centre GPUs (A100, H100, H200, B200)"
NO_TRITON = "Triton is not installed (pip install triton)"
_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3")


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
