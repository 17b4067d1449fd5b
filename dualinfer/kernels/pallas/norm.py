"""Norms over the last axis, with a residual in front of or behind them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import Block, held_bytes, rounded_up, run, sublanes

_BLOCK = 2 << 20  # bytes of float32 rows that a program has
Norm = Callable[..., Any]  # of rows and the weights that follow, in float32


def rows_of(count: int, width: int, dtype: Any) -> int:
    """Rows that a program norms."""
    fitting = max(1, _BLOCK // held_bytes((1, width), jnp.float32))
    return min(rounded_up(count, sublanes(dtype)), rounded_up(fitting, sublanes(dtype)))


def norm(
    x: jax.Array,
    norm: Norm,
    weights: Sequence[jax.Array],
    residual: jax.Array | None = None,
    *,
    after: bool = False,
    interpret: bool,
) -> jax.Array:
    """The norm of x + residual, rows [R, E] in x's dtype; `after`: residual + the norm of x.

    `norm` takes rows and `weights` [E] as float32 [R, E] and [1, E]; what it gives is rounded once.
    """
    rows, width = x.shape
    own = rows_of(rows, width, x.dtype)

    def row(array: Any) -> Block:
        return Block(array, (own, width), lambda i: (i, 0))

    def body(*refs: Any) -> None:
        x_ref, *rest, out_ref = refs
        y = x_ref[...]
        if residual is not None and not after:
            y = rest[0][...] + y
        gains = [ref[...].astype(jnp.float32) for ref in rest[residual is not None :]]
        y = norm(y.astype(jnp.float32), *gains).astype(out_ref.dtype)
        if residual is not None and after:
            y = rest[0][...] + y
        out_ref[...] = y

    inputs = [row(x), *([] if residual is None else [row(residual)])]
    for weight in weights:
        inputs.append(Block(weight.reshape(1, width), (1, width), lambda i: (0, 0)))
    (y,) = run(
        body,
        "norm",
        (pl.cdiv(rows, own),),
        inputs,
        [row(x)],
        parallel=[True],
        interpret=interpret,
    )
    return y
