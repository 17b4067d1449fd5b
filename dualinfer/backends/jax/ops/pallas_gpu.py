"""The ops of the contract by Pallas' kernels for NVIDIA's GPUs, by Mosaic GPU: products of a row.

All else is plain XLA, and `implementations` says so; ops/kernels.py has all ops by Triton.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.pallas import ring
from ....model.weights import Weight
from ....ops.contract import ALONE, Epilogue, NormOf
from ..parallel import Split
from .fused import FusedOps
from .pallas import in_kernel
from .plain import IMPLEMENTATIONS


class PallasGpuOps(FusedOps):
    """Products of a single row on a GPU from Hopper on, which has `sms` multiprocessors."""

    kernels = "Pallas"
    implementations: Mapping[str, str] = {
        **IMPLEMENTATIONS,
        "matmul": "Pallas by Mosaic GPU, fused, of a single row in 16 bits; XLA above",
        "rms_norm": "Pallas, fused into the product of a single row; XLA for others",
        "activation": "Pallas, fused into the product of a single row; XLA for others",
    }

    def __init__(
        self, split: Split | None = None, *, sms: int = 132, interpret: Any = None
    ) -> None:
        super().__init__(split)
        self._how: dict[str, Any] = {"sms": sms, "interpret": interpret}

    def linear(self, x: jax.Array, weight: Weight, epilogue: Epilogue = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        if not _serves(x, weight, epilogue.gated):
            return super().linear(x, weight, epilogue)
        norm, act, residual = epilogue.norm, epilogue.activation, epilogue.residual
        if norm is not None and not _fuses(norm):
            x, norm = self.norm(x, norm), None
        with jax.named_scope("matmul"):
            y = ring.product(
                x.reshape(-1),
                weight.data,
                dtype=jnp.float32 if epilogue.wide else x.dtype,
                bias=epilogue.bias,
                eps=None if norm is None else norm.spec.eps,
                gain=None if norm is None else norm.weight,
                activation=None if act is None else partial(in_kernel, act),
                gated=epilogue.gated,
                residual=residual,
                **self._how,
            )
        return y.reshape(*x.shape[:-1], -1)

    def _multiplies(self, x: jax.Array, weight: Weight) -> bool:
        """See `FusedOps._multiplies`."""
        return _serves(x, weight, False)


def _serves(x: jax.Array, weight: Weight, gated: bool) -> bool:
    if weight.pieces or weight.scheme is not None or weight.dtype != x.dtype:
        return False
    rows, (features, width) = math.prod(x.shape[:-1]), weight.shape
    return ring.serves(rows, features, width, x.dtype.itemsize, gated)


def _fuses(norm: NormOf) -> bool:
    """True if the kernel norms its row so."""
    spec = norm.spec
    if spec.kind != "rms" or spec.unit_offset:
        return False
    return norm.bias is None and (norm.weight is None or norm.weight.ndim == 1)
