"""The ops of the contract by Pallas' kernels for NVIDIA's GPUs, by Mosaic GPU: products of a row.

All else is plain XLA, and `implementations` says so; ops/kernels.py has all ops by Triton.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.pallas import ring
from ....kernels.pallas.product import Codes
from ....model.spec import ModelSpec
from ....model.weights import Weight
from ....ops.contract import ALONE, Epilogue, NormOf, Weights
from ....ops.schemes import rounds_input
from ..parallel import Split
from .fused import FusedOps
from .pallas import codes_of, in_kernel, matrix_of
from .plain import IMPLEMENTATIONS
from .schemes import SCHEMES


class PallasGpuOps(FusedOps):
    """Products of a single row on a GPU from Hopper on, which has `sms` multiprocessors."""

    kernels = "Pallas"
    implementations: Mapping[str, str] = {
        **IMPLEMENTATIONS,
        "matmul": "Pallas by Mosaic GPU, fused, of a single row in 16 bits, and weights in 16 bits "
        "or in int8, uint8, fp8 or int4 with a scale for each row; XLA for others",
        "rms_norm": "Pallas, fused into the product of a single row; XLA for others",
        "activation": "Pallas, fused into the product of a single row; XLA for others",
    }

    def __init__(
        self, split: Split | None = None, *, sms: int = 132, interpret: Any = None
    ) -> None:
        super().__init__(split)
        self._how: dict[str, Any] = {"sms": sms, "interpret": interpret}

    def reads_codes(self, weight: Weight, spec: ModelSpec, layers: Sequence[Weights]) -> str | None:
        """See `PlainOps.reads_codes`."""
        codes = None if weight.pieces or weight.data.ndim > 2 else codes_of(weight)
        if codes is None or not ring.serves(1, codes, False, jnp.bfloat16):
            return None
        return "Pallas by Mosaic GPU, fused, a single row; above XLA, which makes values of them"

    def linear(self, x: jax.Array, weight: Weight, epilogue: Epilogue = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        matrix = _served(x, weight, epilogue.gated)
        if matrix is None:
            return super().linear(x, weight, epilogue)
        norm, act, residual = epilogue.norm, epilogue.activation, epilogue.residual
        if norm is not None and (rounds_input(weight) or not _fuses(norm)):
            x, norm = self.norm(x, norm), None
        if rounds_input(weight):
            x = SCHEMES.quantize_input(x, weight)
        with jax.named_scope("matmul"):
            y = ring.product(
                x.reshape(-1),
                matrix,
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
        return _served(x, weight, False) is not None


def _served(x: jax.Array, weight: Weight, gated: bool) -> jax.Array | Codes | None:
    """A weight's matrix as the kernel takes it; None if it multiplies no such rows with it."""
    if weight.pieces or weight.dtype != x.dtype or weight.data.ndim > 2:
        return None
    matrix = matrix_of(weight, 2 if gated else 1)
    served = matrix is not None and ring.serves(math.prod(x.shape[:-1]), matrix, gated, x.dtype)
    return matrix if served else None


def _fuses(norm: NormOf) -> bool:
    """True if the kernel norms its row so."""
    spec = norm.spec
    if spec.kind != "rms" or spec.unit_offset:
        return False
    return norm.bias is None and (norm.weight is None or norm.weight.ndim == 1)
