"""Many small arrays as one: each transfer to a device costs the host as much as a large one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def pack(tree: Any) -> np.ndarray:
    """The leaves of a tree of NumPy arrays as one int32 vector; 32-bit ones keep their bits."""
    return np.concatenate([_bits(x) for x in jax.tree.leaves(tree)])


def unpack(packed: jax.Array, like: Any) -> Any:
    """The tree again, traced; `like` has its structure, shapes and dtypes."""
    leaves, tree = jax.tree.flatten(like)
    arrays, start = [], 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape)
        bits = packed[start:end].reshape(leaf.shape)
        if leaf.dtype == bool:
            arrays.append(bits != 0)
        else:
            arrays.append(jax.lax.bitcast_convert_type(bits, jnp.dtype(leaf.dtype)))
        start = end
    return jax.tree.unflatten(tree, arrays)


def _bits(x: np.ndarray) -> np.ndarray:
    assert x.dtype == bool or x.dtype.itemsize == 4, x.dtype
    return (
        x.astype(np.int32) if x.dtype == bool else np.ascontiguousarray(x).view(np.int32)
    ).ravel()
