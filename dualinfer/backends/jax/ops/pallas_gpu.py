"""The ops of the contract by Mosaic GPU, for NVIDIA's GPUs: products, and a token's attention.

All else is plain XLA, and `implementations` says so; ops/kernels.py has all ops by Triton.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.pallas import ring, tiles
from ....kernels.pallas.product import Codes
from ....model.spec import ModelSpec
from ....model.weights import Weight
from ....ops.contract import ALONE, Epilogue, NormOf, Weights
from ....ops.schemes import rounds_input
from .pallas import in_kernel, matrix_of
from .pallas_gpu_attention import PallasGpuAttention
from .plain import IMPLEMENTATIONS
from .schemes import SCHEMES

_CODES = "int8, uint8, fp8 or int4"


class PallasGpuOps(PallasGpuAttention):
    """Products of few rows on a GPU from Hopper on, which has `sms` multiprocessors.

    A single row goes through `ring` where that serves it; other rows, and rows with codes in
    blocks, through `tiles`, whose instructions Hopper has alone.
    """

    kernels = "Pallas"
    implementations: Mapping[str, str] = {
        **IMPLEMENTATIONS,
        "matmul": "Pallas by Mosaic GPU, fused, of rows in 16 bits with weights in 16 bits or in "
        f"{_CODES}: a single row, on Hopper up to {tiles.MOST_ROWS}; XLA for others",
        "rms_norm": "Pallas, fused into the product of a single row; XLA for others",
        "activation": "Pallas, fused into these products; XLA for others",
        "decode_attention": "Pallas by Mosaic GPU, on Hopper, behind an append in place, to 16-bit "
        "caches in slots or blocks, of heads of 64 to 256; XLA, dense softmax, for others",
    }

    def reads_codes(self, weight: Weight, spec: ModelSpec, layers: Sequence[Weights]) -> str | None:
        """See `PlainOps.reads_codes`."""
        served = [
            rows
            for rows in (1, 2)
            if self._served(jax.ShapeDtypeStruct((rows, 1), jnp.bfloat16), weight, False)
        ]
        if not served:
            return None
        few = f"up to {tiles.MOST_ROWS} rows" if 2 in served else "a single row"
        return f"Pallas by Mosaic GPU, fused, {few}; above XLA, which makes values of them"

    def linear(self, x: jax.Array, weight: Weight, epilogue: Epilogue = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        served = self._served(x, weight, epilogue.gated)
        if served is None:
            return super().linear(x, weight, epilogue)
        kernel, matrix = served
        norm, act, residual = epilogue.norm, epilogue.activation, epilogue.residual
        fuses = kernel is ring and not rounds_input(weight)
        if norm is not None and not (fuses and _fuses(norm)):
            x, norm = self.norm(x, norm), None
        if rounds_input(weight):
            x = SCHEMES.quantize_input(x, weight)
        how: dict[str, Any] = {
            "dtype": jnp.float32 if epilogue.wide else x.dtype,
            "bias": epilogue.bias,
            "activation": None if act is None else partial(in_kernel, act),
            "gated": epilogue.gated,
            "interpret": self._interpret,
        }
        rows = x.reshape(-1, x.shape[-1])
        beside = None if residual is None else residual.reshape(len(rows), -1)
        with jax.named_scope("matmul"):
            if kernel is tiles:
                y = tiles.product(rows, matrix, residual=beside, **how)
            else:
                how |= {"residual": residual, "sms": self._sms}
                if norm is not None:
                    how |= {"eps": norm.spec.eps, "gain": norm.weight}
                y = ring.product(rows[0], matrix, **how)
        return y.reshape(*x.shape[:-1], -1)

    def _multiplies(self, x: jax.Array, weight: Weight) -> bool:
        """See `FusedOps._multiplies`."""
        return self._served(x, weight, False) is not None

    def _served(self, x: Any, weight: Weight, gated: bool) -> tuple[Any, jax.Array | Codes] | None:
        """The kernel that multiplies rows x with a weight, and its matrix as it takes it."""
        if weight.pieces or weight.dtype != x.dtype or weight.data.ndim > 2:
            return None
        matrix, count = matrix_of(weight, 2 if gated else 1), math.prod(x.shape[:-1])
        for kernel in (ring, tiles) if self._hopper else (ring,):
            if matrix is not None and kernel.serves(count, matrix, gated, x.dtype):
                return kernel, matrix
        return None


def _fuses(norm: NormOf) -> bool:
    """True if the kernel norms its row so."""
    spec = norm.spec
    if spec.kind != "rms" or spec.unit_offset:
        return False
    return norm.bias is None and (norm.weight is None or norm.weight.ndim == 1)
