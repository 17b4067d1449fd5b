"""The torch backend: `create_runner` loads a model onto a torch device."""

import torch

from ...spec import ModelSpec
from ...weights import LoadPlan, TensorSource
from .params import load_params
from .runner import TorchRunner


def default_device() -> torch.device:
    """The current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_dtype() -> str:
    """float16 where there is a GPU, as in the contract; float32 on a CPU."""
    return "float16" if default_device().type == "cuda" else "float32"


def create_runner(spec: ModelSpec, plan: LoadPlan, source: TensorSource, dtype: str) -> TorchRunner:
    """A runner on the default device with the plan's weights in `dtype`."""
    device, torch_dtype = default_device(), getattr(torch, dtype)
    return TorchRunner(
        spec, load_params(spec, plan, source, torch_dtype, device), torch_dtype, device
    )
