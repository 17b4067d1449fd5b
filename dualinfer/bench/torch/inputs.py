"""Parts that the ops of `dualinfer bench ops` share: our kernels, inputs, and making of cases."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..case import Filling, OpCase


@dataclass(frozen=True)
class Op:
    """One op at one size, and what makes its inputs, alike for all who implement it."""

    name: str
    description: str
    bytes: int
    flops: int
    inputs: Callable[[], tuple[Any, ...]]

    def by(self, reference: str, function: Callable[..., Any]) -> OpCase:
        """The case of `function`, which takes the inputs; `reference` is empty for ours."""
        return self.made(reference, lambda *inputs: partial(function, *inputs))

    def made(self, reference: str, make: Callable[..., Callable[[], Any]]) -> OpCase:
        """The case of the call that `make` makes of the inputs."""

        def prepare() -> Callable[[], Any]:
            return make(*self.inputs())

        return OpCase(self.name, self.description, self.bytes, self.flops, prepare, reference)


class Bench:
    """One dtype on one device, and the engine's ops there."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        from ...backends.torch.ops.kernels import KernelOps
        from ...backends.torch.tuning.store import load_configurations

        self.ops = KernelOps(device, load_configurations(device))
        self.dtype, self.device = dtype, device

    def fill(self, part: Filling) -> torch.Tensor:
        """An array of a quantized matrix: the same one, every time."""
        dtype = getattr(torch, part.dtype)
        if not part.mask:
            return torch.full(part.shape, part.value, dtype=dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        how: dict[str, Any] = {"dtype": torch.uint8, "device": self.device}
        codes = torch.randint(0, 256, part.shape, generator=generator, **how)
        return codes.bitwise_and_(part.mask).view(dtype)

    def put(self, array: np.ndarray) -> torch.Tensor:
        """An array of the host's, on the device."""
        return torch.from_numpy(array).to(self.device)

    def draws(self, dtype: torch.dtype | None = None) -> Callable[..., torch.Tensor]:
        """A function that makes normal numbers of a shape: the same ones, every time."""
        generator = torch.Generator(self.device).manual_seed(0)
        how: dict[str, Any] = {"dtype": dtype or self.dtype, "device": self.device}

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator, **how).mul_(scale)

        return draw
