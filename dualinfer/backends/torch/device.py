"""The torch device that a model goes to, and what it has free."""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ...errors import ConfigError
from ...system.memory import host_free_bytes

_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))  # A100, H100 and H200, B200 and B300

M = TypeVar("M", bound=Callable[..., Any])


def in_order(method: M) -> M:
    """A runner's method on the runner's own device, behind the runner's work on other streams.

    Kernels are launched on the thread's current device, and scratch memory serves one launch after
    another; callers may have other devices and streams of their own.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cuda":
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self.last_work is not None and self.last_work[0] != stream:
                stream.wait_event(self.last_work[1])
            try:
                return method(self, *args, **kwargs)
            finally:  # what was launched before an error runs all the same
                event = torch.cuda.Event()
                event.record(stream)
                self.last_work = stream, event

    return cast(M, call)


_STAGED_BYTES = 1 << 15  # that CUDA copies itself before a copy to the device returns


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values of host memory on the device, behind its work, for which the host does not wait."""
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")  # whatever the default device
    if device.type != "cuda":
        return tensor.to(device)
    return ready(tensor).to(device, non_blocking=True)


def fill(buffer: torch.Tensor, array: np.ndarray) -> None:
    """As `upload`, into a buffer that is there."""
    tensor = torch.from_numpy(array)
    if buffer.is_cuda:
        buffer.copy_(ready(tensor), non_blocking=True)
    else:
        buffer.copy_(tensor)


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of host memory where it can be copied to a GPU beside the GPU's work."""
    return tensor.pin_memory() if tensor.nbytes > _STAGED_BYTES else tensor


def default_device() -> torch.device:
    """The current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_device() -> torch.device:
    """The device of this process of a torchrun job: the one of its number on its host.

    Where nothing gives it a number, its current one.
    """
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        return default_device()
    local, count = number_of("LOCAL_RANK"), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"Process {local} of this host has no GPU of its own: there are {count}. Start at most "
            f"{count} processes on it."
        )
    return torch.device("cuda", local)


def number_of(name: str) -> int:
    """An environment variable that a launcher sets to a number; ConfigError where it is none."""
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise ConfigError(
            f"{name}={os.environ[name]!r} in the environment; expected a number, as `dualinfer "
            "launch` and torchrun set it. Unset it, or start the script with one of them."
        ) from error


def default_dtype() -> str:
    """float16 where there is a GPU, as in DeepSpeed; float32 on a CPU."""
    return "float16" if default_device().type == "cuda" else "float32"


def device_name(device: torch.device) -> str:
    """The device's name for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def has_triton() -> bool:
    """True where Triton is installed: CUDA builds of torch bring it."""
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """True on NVIDIA's data-centre GPUs from Ampere on.

    They have bfloat16, and more than 99 KiB of shared memory for a block, which the kernels'
    configurations fill.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) in _CAPABILITIES


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`, None where nothing tells.

    On CUDA, what the driver has free and what torch's allocator holds unused.
    """
    if device.type != "cuda":
        return host_free_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused
