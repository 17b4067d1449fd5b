"""What torch does with quantized weights and with a cache in codes: SCHEMES and CACHE_CODES."""

from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from ....ops.cache_codes import CacheCodes
from ....ops.schemes import BlockArithmetic


class TorchMaths:
    """See `schemes.Maths`."""

    name = "torch"
    stack = staticmethod(torch.stack)
    join = staticmethod(torch.cat)
    round = staticmethod(torch.round)

    def where(self, condition: torch.Tensor, a: Any, b: Any, /) -> torch.Tensor:
        """See `schemes.Maths`."""
        return torch.where(condition, a, b)

    def clip(self, a: torch.Tensor, low: float, high: float, /) -> torch.Tensor:
        """See `schemes.Maths`."""
        return torch.clamp(a, low, high)

    def wide(self, a: torch.Tensor) -> torch.Tensor:
        """See `schemes.Maths`."""
        return a.float()

    def cast(self, a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `schemes.Maths`."""
        return a.to(dtype)

    def rounded(self, a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `schemes.Maths`."""
        return a.to(dtype).float()

    def float8(self, a: torch.Tensor, dtype: str) -> torch.Tensor:
        """See `schemes.Maths`."""
        return a.view(getattr(torch, dtype)).float()

    def nearest_e4m3(self, a: torch.Tensor) -> torch.Tensor:
        """See `schemes.Maths`."""
        return a.to(torch.float8_e4m3fn).float()

    def as_codes(self, a: torch.Tensor, codes: str) -> torch.Tensor:
        """See `schemes.Maths`."""
        if codes == "int8":
            return a.round().to(torch.int8)
        return a.to(torch.float8_e4m3fn).view(torch.uint8)

    def power(self, a: torch.Tensor, mantissa: int) -> torch.Tensor:
        """See `schemes.Maths`."""
        bits = a.view(torch.int32) + (1 << (22 - mantissa))
        return (bits & 0x7F800000).view(torch.float32)

    def epsilon(self, dtype: torch.dtype) -> float:
        """See `schemes.Maths`."""
        return torch.finfo(dtype).eps

    def quotient(self, a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
        """See `schemes.Maths`."""
        if not isinstance(b, torch.Tensor):  # on a GPU torch multiplies by a number's reciprocal
            b = a.new_full((), b)
        return a / b

    def table(self, values: tuple[float, ...], codes: torch.Tensor) -> torch.Tensor:
        """See `schemes.Maths`."""
        return _table(values, codes.device)[codes.int()]

    def repeat(self, a: torch.Tensor, count: int, axis: int) -> torch.Tensor:
        """See `schemes.Maths`."""
        return a.repeat_interleave(count, dim=axis)

    def rows(self, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """See `schemes.Maths`."""
        return a[ids]

    def along(self, a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `schemes.Maths`."""
        return torch.take_along_dim(a, index.long(), dim=-1)

    def most(self, a: torch.Tensor) -> torch.Tensor:
        """See `schemes.Maths`."""
        return a.amax(-1, keepdim=True)

    def pad(self, a: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See `schemes.Maths`."""
        return F.pad(a, (0, shape[-1] - a.shape[-1]))

    def product(self, x: torch.Tensor, matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `schemes.Maths`."""
        return F.linear(x, matrix)


@cache
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Made once: a CUDA graph may not capture a copy from the host."""
    return torch.tensor(values, dtype=torch.float32, device=device)


SCHEMES = BlockArithmetic(TorchMaths())
CACHE_CODES = CacheCodes(TorchMaths())
