"""The torch device that a model goes to, and what it has free."""

import importlib.util

import torch

from ...memory import host_free_bytes


def default_device() -> torch.device:
    """The current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_dtype() -> str:
    """float16 where there is a GPU, as in the contract; float32 on a CPU."""
    return "float16" if default_device().type == "cuda" else "float32"


def device_name(device: torch.device) -> str:
    """The device's name for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def has_triton() -> bool:
    """True where Triton is installed: CUDA builds of torch bring it."""
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """True on CUDA devices from Ampere on, the first with bfloat16."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`, None where nothing tells.

    On CUDA, what the driver has free and what torch's allocator holds unused.
    """
    if device.type != "cuda":
        return host_free_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused
