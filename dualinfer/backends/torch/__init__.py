"""The torch backend: `create_runner` loads a model onto a torch device."""

import torch

from ...config import InferenceConfig
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


def create_runner(
    config: InferenceConfig, spec: ModelSpec, plan: LoadPlan, source: TensorSource
) -> TorchRunner:
    """A runner on the default device with the plan's weights in the config's dtype."""
    device, dtype = default_device(), getattr(torch, config.dtype or default_dtype())
    params = load_params(spec, plan, source, dtype, device)
    return TorchRunner(spec, params, dtype, device, config.enable_cuda_graph is not False)
