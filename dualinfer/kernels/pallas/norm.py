"""RMSNorm and LayerNorm over the last axis, with the addition of the residual in front of them."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from .launch import cdiv, launch, load, next_power_of_2, program, store

WIDEST = 16384


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    residual: jax.Array | None = None,
    unit_offset: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """x [..., E] over its root mean square, times weight [E], in float32, rounded once.

    With `unit_offset` times 1 + weight (Gemma). With `residual` [..., E] the sum x + residual,
    rounded to x's dtype, is normed. E is at most 16384.
    """
    return _run(x, weight, None, eps, False, unit_offset, residual, interpret)


def layer_norm(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    eps: float,
    *,
    residual: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [..., E] with mean 0 and variance 1, times weight [E], plus bias [E] or None.

    The variance is that of the differences from the mean, in float32. The rest as in `rms_norm`.
    """
    return _run(x, weight, bias, eps, True, False, residual, interpret)


def _run(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    eps: float,
    center: bool,
    unit_offset: bool,
    residual: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    if not x.ndim or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.shape} {x.dtype}; floats [..., E] are expected.")
    width = x.shape[-1]
    if width > WIDEST:
        raise ValueError(f"x has {width} elements a row; at most {WIDEST} are expected.")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != (width,):
            raise ValueError(f"{name} has shape {vector.shape}; ({width},) is expected.")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {residual.shape} {residual.dtype}; {x.shape} {x.dtype}, as x is, was "
            "expected."
        )
    if not x.size:
        return x
    rows, block = math.prod(x.shape[:-1]), next_power_of_2(width)
    # Narrow rows (heads) share a program; wide ones are spread over more warps.
    rows_each = max(min(1024 // block, next_power_of_2(rows)), 1)

    flat = x.reshape(rows, width)
    (y,) = launch(
        _kernel(rows, rows_each, width, eps, center, unit_offset),
        (cdiv(rows, rows_each),),
        flat,
        None if residual is None else residual.reshape(rows, width),
        weight,
        bias,
        out=[jax.ShapeDtypeStruct(flat.shape, x.dtype)],
        warps=min(max(block * rows_each // 512, 1), 16),
        interpret=interpret,
    )
    return y.reshape(x.shape)


@cache
def _kernel(
    rows: int, rows_each: int, width: int, eps: float, center: bool, unit_offset: bool
) -> Callable[..., None]:
    """A program norms `rows_each` of the `rows`."""
    block = next_power_of_2(width)

    def _norm_kernel(x_ref: Any, residual_ref: Any, weight_ref: Any, bias_ref: Any, y_ref: Any):
        row = program(0) * rows_each + jnp.arange(rows_each)[:, None]
        column = jnp.arange(block)[None, :]
        within = None if block == width else column < width
        inside = within
        if rows % rows_each:
            inside = row < rows if within is None else (row < rows) & within
        if inside is not None:
            inside = jnp.broadcast_to(inside, (rows_each, block))

        def values(ref: Any) -> jax.Array:
            return load(ref, (row, column), inside).astype(jnp.float32)

        def vectors() -> tuple[jax.Array, jax.Array | None]:
            gain = load(weight_ref, (column,), within).astype(jnp.float32)
            if bias_ref is None:
                return gain, None
            return gain, load(bias_ref, (column,), within).astype(jnp.float32)

        early = block < WIDEST  # as registers allow
        gain, shift = vectors() if early else (None, None)
        x = values(x_ref)
        if residual_ref is not None:
            x = (x + values(residual_ref)).astype(y_ref.dtype).astype(jnp.float32)
        if center:
            x = x - x.sum(1, keepdims=True) / width
            x = x if within is None else jnp.where(within, x, 0.0)
        y = x * jax.lax.rsqrt((x * x).sum(1, keepdims=True) / width + eps)
        if gain is None:
            gain, shift = vectors()
        y = y * (gain + 1.0 if unit_offset else gain)
        store(y_ref, (row, column), y if shift is None else y + shift, inside)

    return _norm_kernel
