"""What JAX does with quantized weights and with a cache in codes: SCHEMES and CACHE_CODES."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....ops.cache_codes import CacheCodes
from ....ops.schemes import BlockArithmetic


def einsum(equation: str, *operands: jax.Array, **kwargs) -> jax.Array:
    """jnp.einsum in which float32 means float32: no TF32 on a GPU."""
    exact = lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(equation, *operands, precision=exact, **kwargs)


class JaxMaths:
    """See `schemes.Maths`."""

    name = "XLA"
    stack = staticmethod(jnp.stack)
    join = staticmethod(jnp.concatenate)
    round = staticmethod(jnp.round)

    def where(self, condition: jax.Array, a: Any, b: Any, /) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.where(condition, a, b)

    def clip(self, a: jax.Array, low: float, high: float, /) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.clip(a, low, high)

    def wide(self, a: jax.Array) -> jax.Array:
        """See `schemes.Maths`."""
        return a.astype(jnp.float32)

    def cast(self, a: jax.Array, dtype: Any) -> jax.Array:
        """See `schemes.Maths`."""
        return a.astype(dtype)

    def rounded(self, a: jax.Array, dtype: Any) -> jax.Array:
        """See `schemes.Maths`."""
        if dtype == jnp.float32:
            return a
        info = jnp.finfo(dtype)  # XLA may drop a cast and its way back
        y = lax.reduce_precision(a, info.nexp, info.nmant)
        if dtype != jnp.float16:
            return y
        # What is small there is a multiple of 2^-24, and zero here.
        return jnp.where(abs(a) < 2.0**-14, jnp.round(a * 2.0**24) / 2.0**24, y)

    def float8(self, a: jax.Array, dtype: str) -> jax.Array:
        """See `schemes.Maths`."""
        return lax.bitcast_convert_type(a, jnp.dtype(dtype)).astype(jnp.float32)

    def nearest_e4m3(self, a: jax.Array) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.where(abs(a) < 2.0**-6, jnp.round(a * 512) / 512, lax.reduce_precision(a, 8, 3))

    def as_codes(self, a: jax.Array, codes: str) -> jax.Array:
        """See `schemes.Maths`."""
        if codes == "int8":
            return jnp.round(a).astype(jnp.int8)
        nearest = self.nearest_e4m3(a).astype(jnp.float8_e4m3fn)
        return lax.bitcast_convert_type(nearest, jnp.uint8)

    def power(self, a: jax.Array, mantissa: int) -> jax.Array:
        """See `schemes.Maths`."""
        bits = lax.bitcast_convert_type(a, jnp.int32) + (1 << (22 - mantissa))
        return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)

    def epsilon(self, dtype: Any) -> float:
        """See `schemes.Maths`."""
        return float(jnp.finfo(dtype).eps)

    def quotient(self, a: jax.Array, b: jax.Array | float) -> jax.Array:
        """See `schemes.Maths`."""
        # XLA would multiply by the reciprocal; it does not see that nothing changes here.
        return a / jnp.where(jnp.isnan(a), 1, b)

    def table(self, values: tuple[float, ...], codes: jax.Array) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.take(jnp.array(values, jnp.float32), codes.astype(jnp.int32), mode="clip")

    def repeat(self, a: jax.Array, count: int, axis: int) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.repeat(a, count, axis=axis)

    def rows(self, a: jax.Array, ids: jax.Array) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.take(a, ids, axis=0, mode="clip")

    def along(self, a: jax.Array, index: jax.Array) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.take_along_axis(a, index, axis=-1, mode="clip")

    def most(self, a: jax.Array) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.max(a, axis=-1, keepdims=True)

    def pad(self, a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """See `schemes.Maths`."""
        return jnp.pad(a, [(0, n - m) for n, m in zip(shape, a.shape, strict=True)])

    def product(self, x: jax.Array, matrix: jax.Array, dtype: Any) -> jax.Array:
        """See `schemes.Maths`."""
        return einsum("...i,oi->...o", x, matrix, preferred_element_type=dtype)


SCHEMES = BlockArithmetic(JaxMaths())
CACHE_CODES = CacheCodes(JaxMaths())
