"""How Pallas kernels are launched: the one place that knows which lowering is used.

It is the Triton lowering, on every version of JAX that we support, though a later one will drop it:
a kernel sees whole arrays in memory, as pointers, and reads blocks of them by index arrays whose
extents are powers of two. Kernels call the functions below, and nothing of Pallas' Triton module.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as lowering


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    *args: jax.Array | None,
    out: Sequence[jax.ShapeDtypeStruct],
    warps: int = 4,
    stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """The outputs of `kernel` run as `grid` programs, described by `out`.

    The kernel gets a reference for each of `args`, None where that is None, then one for each
    output. `aliases` maps places in `args` to places in `out` that are the same memory; such an
    argument must be read and written through its output. What no program writes is undefined.
    `interpret` runs it on any device, slowly, program after program. Launches of the same kernel,
    the same object, that are alike in all else are traced and lowered once in a step.
    """
    given = tuple(x is not None for x in args)
    places = tuple((aliases or {}).items())
    call = _call(kernel, grid, given, tuple(out), warps, stages, places, interpret)
    with jax.enable_x64(False):  # kernels count in 32 bits, whatever the caller's code does
        return call(*(x for x in args if x is not None))


@lru_cache(maxsize=1024)
def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    given: tuple[bool, ...],
    out: tuple[jax.ShapeDtypeStruct, ...],
    warps: int,
    stages: int,
    aliases: tuple[tuple[int, int], ...],
    interpret: bool,
) -> Callable[..., list[jax.Array]]:
    """A function of those arguments of a launch that are `given`."""

    def body(*refs: Any) -> None:
        rest = iter(refs)
        inputs = [next(rest) if there else None for there in given]
        kernel(*inputs, *rest)

    present = [i for i, there in enumerate(given) if there]
    call = pl.pallas_call(
        body,
        out_shape=list(out),
        grid=grid,
        input_output_aliases={present.index(at): result for at, result in aliases},
        compiler_params=lowering.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )
    return jax.jit(call)


def program(axis: int) -> jax.Array:
    """Number of this program along an axis of the grid, int32."""
    return pl.program_id(axis)


def load(
    ref: Any,
    index: tuple[Any, ...],
    mask: jax.Array | None = None,
    other: float = 0.0,
    *,
    once: bool = False,
    shared: bool = False,
) -> jax.Array:
    """Elements of `ref` at index arrays that are broadcast together; `other` outside of `mask`.

    `once` says that nothing will read them again soon; `shared` that another program of this launch
    has written them.
    """
    return lowering.load(
        ref.at[index],
        mask=mask,
        other=None if mask is None else other,
        eviction_policy="evict_first" if once else None,
        volatile=shared,
    )


def store(
    ref: Any, index: tuple[Any, ...], value: jax.Array, mask: jax.Array | None = None
) -> None:
    """Write `value`, rounded to the reference's dtype, where `mask` allows."""
    lowering.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b on the matrix units, float32; float32 operands are not rounded to TF32.

    Extents are powers of two, at least 16.
    """
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=exact, preferred_element_type=jnp.float32)


def arrivals(counters: Any, index: Any, interpret: bool = False) -> jax.Array:
    """How many programs of a group had come here before this one, whose writes are visible to it.

    `counters` int32 holds a count a group; the last to come must set it back by `forget`.
    """
    if not interpret:  # all of the program's writes, before it says that they are there
        lowering.debug_barrier()
    before = lowering.atomic_add(counters, (index,), jnp.int32(1))
    if not interpret:
        lowering.debug_barrier()
    return before


def forget(counters: Any, index: Any) -> None:
    """Set a group's count back to 0, for the next launch."""
    store(counters, (index,), jnp.int32(0))


def assembly(text: str, dtype: Any, *args: jax.Array) -> jax.Array:
    """What PTX `text` leaves in $0, of `dtype`, for each element of `args`, from $1 on.

    All have 32 bits and one shape. The compiler takes it for a function of `args` without effects:
    only its results order it. It runs once for an element where there is one to a thread.
    """
    kinds = ["f" if jnp.issubdtype(a.dtype, jnp.floating) else "r" for a in args]
    result = "=&f" if jnp.issubdtype(dtype, jnp.floating) else "=&r"
    (found,) = lowering.elementwise_inline_asm(  # JAX 0.11 lowers no more results than one
        text,
        args=args,
        constraints=",".join([result, *kinds]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return found


def both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Both masks, where None is everywhere true."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def next_power_of_2(count: int) -> int:
    """The extent of a block that holds `count` elements."""
    return 1 << max(count - 1, 0).bit_length()


def cdiv(count: int, size: int) -> int:
    """Number of blocks of `size` that hold `count` elements."""
    return -(-count // size)
