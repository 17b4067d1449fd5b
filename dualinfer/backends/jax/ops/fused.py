"""Kernels take the products and norms that they can, and plain operations take the others."""

import math

import jax
import jax.numpy as jnp

from ....model.weights import Weight
from ....ops.contract import Epilogue, NormOf
from .plain import PlainOps


class FusedOps(PlainOps):
    """Ops by kernels, of Triton or of Pallas, which take some products and norms."""

    def _multiplies(self, x: jax.Array, weight: Weight) -> bool:
        """True if a kernel takes the product of x [..., in] with a weight by itself."""
        raise NotImplementedError

    def _with_values(self, x: jax.Array, weight: Weight) -> tuple[jax.Array, Weight]:
        """The operands of a plain product, in the place of what no kernel multiplies."""
        return x, weight

    def _norms(self, norm: NormOf, rows: int, *, in_front: bool) -> bool:
        """True if a kernel norms so many rows, with a residual in front of the norm or without."""
        return False

    def _normed(
        self, x: jax.Array, norm: NormOf, residual: jax.Array | None, after: bool = False
    ) -> jax.Array:
        """The kernel's norm of x, with a residual in front, or behind if `after`."""
        raise NotImplementedError

    def norm(self, x: jax.Array, norm: NormOf, residual: jax.Array | None = None) -> jax.Array:
        """See `PlainOps.norm`."""
        if self._norms(norm, math.prod(x.shape[:-1]), in_front=residual is not None):
            return self._normed(x, norm, residual)
        return super().norm(x, norm, residual)

    def add(self, x: jax.Array, y: jax.Array, norm: NormOf | None = None) -> jax.Array:
        """See `PlainOps.add`."""
        if norm is not None and self._norms(norm, math.prod(y.shape[:-1]), in_front=False):
            return self._normed(y, norm, x, after=True)
        return super().add(x, y, norm)

    def matmul(self, x: jax.Array, weight: Weight, bias: jax.Array | None) -> jax.Array:
        """See `PlainOps.matmul`; the pieces of a weight are multiplied one by one."""
        if not weight.pieces:
            return super().matmul(x, weight, bias)
        y = jnp.concatenate([self.linear(x, piece) for piece in weight.pieces], -1)
        return y if bias is None else y + bias

    def _part_of_sum(self, x: jax.Array, weight: Weight) -> jax.Array:
        """See `PlainOps._part_of_sum`."""
        if self._multiplies(x, weight):
            return self.linear(x, weight, Epilogue(wide=True))
        return super()._part_of_sum(*self._with_values(x, weight))
