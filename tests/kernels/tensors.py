"""Tensors for Triton's kernels, on the CPU where they are interpreted, on the GPU where not."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from dualinfer.arrays import to_numpy  # noqa: E402
from dualinfer.kernels.triton.launch import INTERPRETED  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs CUDA, or Triton's interpreter: TRITON_INTERPRET=1",
)


def put(array: np.ndarray) -> torch.Tensor:
    """A tensor of the same dtype."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.tensor(array.view(np.int16), device=DEVICE).view(torch.bfloat16)
    return torch.tensor(array, device=DEVICE)


def get(tensor: torch.Tensor) -> np.ndarray:
    """An array of the same dtype."""
    return to_numpy(tensor)


def strided(array: np.ndarray) -> torch.Tensor:
    """As `put`, with other strides: every leading axis, and the rows, lie in something larger."""
    larger = np.pad(array, [(1, 2)] * array.ndim, constant_values=math.nan)
    return put(larger)[tuple(slice(1, 1 + size) for size in array.shape)]


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten in its output is NaN; bfloat16 is rounded as on a GPU."""
    new_empty = torch.Tensor.new_empty

    def filled(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = new_empty(x, *args, **kwargs)
        return y.fill_(math.nan) if y.is_floating_point() else y

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    if INTERPRETED:
        from triton.runtime import interpreter

        convert = interpreter._convert_float

        def rounded(x: np.ndarray, old: Any, new: Any, mode: Any) -> np.ndarray:
            """The interpreter itself cuts digits off."""
            if (old.name, new.name) == ("fp32", "bf16"):
                return x.astype(ml_dtypes.bfloat16).view(np.uint16)
            return convert(x, old, new, mode)

        monkeypatch.setattr(interpreter, "_convert_float", rounded)
        multiply = np.matmul

        def alike(a: np.ndarray, b: np.ndarray, **how: Any) -> np.ndarray:
            """NumPy's product has its last bits by how operands lie in memory, a GPU's has not."""
            return multiply(np.ascontiguousarray(a), np.ascontiguousarray(b), **how)

        monkeypatch.setattr(np, "matmul", alike)
