"""How a Pallas kernel is called, and how much fast memory (VMEM) it holds while it runs."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

VARIABLE = "DUALINFER_PALLAS_INTERPRET"  # "1": kernels are interpreted where there is no TPU
LANES = 128
BUDGET = 32 << 20  # bytes of VMEM for blocks; a core of v5e and v6e has 128 MiB, of v5p 64
_SLACK = 4 << 20  # what Mosaic holds beside blocks and scratch
_PIPELINED = 2  # buffers of a block: one is copied while the other is read


class NoRoomError(ValueError):
    """A kernel of these shapes would hold more than `BUDGET`."""


class Block(NamedTuple):
    """An argument or result, and the part of it that a program has, whose number is `number`'s.

    None in `shape` is an axis of which a program has one element, and which it does not see. A
    result's `array` is a ShapeDtypeStruct.
    """

    array: Any
    shape: tuple[int | None, ...]
    number: Callable[..., tuple[Any, ...]]


def interpreted() -> bool:
    """True where the environment asks for interpreted kernels, as tests do."""
    return os.environ.get(VARIABLE) == "1"


def whole(array: jax.Array) -> Block:
    """A block that is the whole array, for every program."""
    return Block(array, array.shape, lambda *_: (0,) * array.ndim)


def sublanes(dtype: Any) -> int:
    """Rows of a tile of elements of a dtype."""
    return 8 * max(1, 4 // jnp.dtype(dtype).itemsize)


def rounded_up(count: int, by: int) -> int:
    """The least multiple of `by` that is no less than `count`."""
    return -(-count // by) * by


def held_bytes(shape: Sequence[int | None], dtype: Any) -> int:
    """Bytes of a block in VMEM, which lies there in tiles of 128 lanes."""
    sizes = [size for size in shape if size is not None] or [1]
    sizes = [1, *sizes] if len(sizes) == 1 else sizes
    *lead, rows, columns = sizes
    tiled = rounded_up(rows, sublanes(dtype)) * rounded_up(columns, LANES)
    return math.prod(lead) * tiled * jnp.dtype(dtype).itemsize


def vmem_bytes(blocks: Sequence[Block], scratch: Sequence[tuple[tuple[int, ...], Any]]) -> int:
    """Bytes of VMEM that a kernel's blocks and scratch take, blocks twice."""
    own = sum(_PIPELINED * held_bytes(b.shape, b.array.dtype) for b in blocks)
    return own + sum(held_bytes(shape, dtype) for shape, dtype in scratch)


def run(
    body: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    inputs: Sequence[Block],
    outputs: Sequence[Block],
    *,
    scratch: Sequence[tuple[tuple[int, ...], Any]] = (),
    prefetch: Sequence[jax.Array] = (),
    parallel: Sequence[bool] = (),
    changes: Mapping[int, int] | None = None,
    between: int = 0,
    flops: int = 0,
    interpret: bool,
) -> list[jax.Array]:
    """The results of a kernel over a grid; NoRoomError if it would hold too much.

    `body` takes references to int32 `prefetch`, which indices of blocks take as well, then to
    inputs, outputs and scratch. `parallel` says of each axis of the grid whether its programs do
    not depend on one another, None of all if left out. `changes` maps inputs to the outputs that
    take their memory. `between` are bytes of what the body makes on its way, where it is much.
    `flops` are those of its products, which XLA counts with the bytes of its blocks.
    """
    count = check_room(name, [*inputs, *outputs], scratch)
    semantics = [pltpu.PARALLEL if p else pltpu.ARBITRARY for p in parallel or [False] * len(grid)]
    call = pl.pallas_call(
        body,
        name=name,
        out_shape=[jax.ShapeDtypeStruct(b.array.shape, b.array.dtype) for b in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=grid,
            in_specs=[pl.BlockSpec(b.shape, b.number) for b in inputs],
            out_specs=[pl.BlockSpec(b.shape, b.number) for b in outputs],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch],
        ),
        input_output_aliases={i + len(prefetch): o for i, o in (changes or {}).items()},
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=moved_bytes([*inputs, *outputs], grid)
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=count + between + _SLACK
        ),
        interpret=interpret,
    )
    arrays = [b.array for b in inputs]
    for i in () if interpret else changes or ():
        # XLA may bring a whole array to VMEM, and back, where it fits. Where a call of several
        # results ends a program, which has these alone, libtpu 0.0.42 refuses it: no step is one.
        arrays[i] = pltpu.with_memory_space_constraint(arrays[i], pltpu.HBM)
    return call(*prefetch, *arrays)


def moved_bytes(blocks: Sequence[Block], grid: tuple[int, ...]) -> int:
    """Bytes that blocks read and write, each of them once, in all programs of a grid."""
    total = 0
    for block in blocks:
        own = math.prod(grid) * math.prod(size or 1 for size in block.shape)
        total += min(own, math.prod(block.array.shape)) * block.array.dtype.itemsize
    return total


def check_room(
    name: str, blocks: Sequence[Block], scratch: Sequence[tuple[tuple[int, ...], Any]]
) -> int:
    """The bytes that a kernel holds; NoRoomError above `BUDGET`."""
    count = vmem_bytes(blocks, scratch)
    if count > BUDGET:
        raise NoRoomError(f"{name} would hold {count:,} bytes of VMEM; at most {BUDGET:,} are.")
    return count


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, K] times b [N, K]: float32 [M, N]; float32 operands stay float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
