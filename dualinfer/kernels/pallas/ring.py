"""A row times a matrix on NVIDIA's GPUs, by Mosaic GPU: a ring of weights in shared memory.

One warpgroup a program, and programs stay: each asks for the rows of weights that come next by
asynchronous copies while it sums those that are there. A body of its own, since Mosaic GPU has
other memories than a TPU, and sums over all of a warpgroup alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_LINE = 256  # elements along an axis that one asynchronous copy takes at most
_SLOTS = 3  # of the ring
_SHARED = 200 << 10  # bytes of shared memory that the programs of a multiprocessor may take
_PROGRAMS = 4  # of a multiprocessor
_WIDEST = 16384  # columns, which a warpgroup holds in registers
# The index of a load, which JAX 0.12 takes of the reference alone, and 0.10 wants beside it.
_ALL: tuple[Any, ...] = ((),) if jax.__version_info__ < (0, 11) else ()


def serves(count: int, features: int, width: int, itemsize: int, gated: bool) -> bool:
    """True if the kernel multiplies `count` rows with a matrix [features, width]."""
    parts = 2 if gated else 1
    fits = _SLOTS * parts * width * itemsize <= _SHARED and width <= _WIDEST
    return count == 1 and itemsize == 2 and width % _LINE == 0 and features % parts == 0 and fits


def pieces(width: int) -> list[tuple[int, int, int]]:
    """First line, lines and elements of a load of parts of a row, as a warpgroup reads it."""
    lines, found, at = width // _LINE, [], 0
    for vector, least in ((8, 4), (4, 2), (2, 1)):
        count = (lines - at) // least * least
        if count:
            found.append((at, count, vector))
            at += count
    return found


def product(
    x: jax.Array,
    weight: jax.Array,
    *,
    dtype: Any,
    bias: jax.Array | None = None,
    eps: float | None = None,
    gain: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    gated: bool = False,
    residual: jax.Array | None = None,
    sms: int = 132,
    interpret: Any = None,
) -> jax.Array:
    """residual + activation(norm(x) weight^T + bias) of x [width]: [out] in `dtype`.

    With `eps` x is RMS-normed, times `gain` [width]. With `gated` the weight holds gate, then up.
    `sms` are the device's multiprocessors.
    """
    width, parts = len(x), 2 if gated else 1
    features, lines = len(weight) // parts, len(x) // _LINE
    size = _SLOTS * parts * width * weight.dtype.itemsize
    programs = min(sms * max(1, min(_PROGRAMS, _SHARED // size)), features)
    names, args = ["x", "weight"], [x.reshape(lines, _LINE), weight.reshape(-1, lines, _LINE)]
    for name, array in (("gain", gain), ("bias", bias), ("residual", residual)):
        if array is not None:
            names.append(name)
            args.append(array.reshape(lines, _LINE) if name == "gain" else array.reshape(-1))

    def body(*refs: Any, ring: Any, barriers: Any) -> None:
        ref = dict(zip([*names, "out"], refs, strict=True))
        me = lax.axis_index("program")
        count = (features - me + programs - 1) // programs

        def fetch(i: Any, slot: Any) -> None:
            for part in range(parts):
                row = part * features + me + i * programs
                to = ring.at[slot, part]
                plgpu.copy_gmem_to_smem(ref["weight"].at[row], to, barriers.at[slot])

        def load(of: Any, piece: tuple[int, int, int]) -> jax.Array:
            at, count, vector = piece
            if interpret is not None:  # which knows no layouts
                return of[pl.ds(at, count)].astype(jnp.float32)
            layout = plgpu.Layout.WG_STRIDED((count, _LINE), vector)
            loaded = plgpu.load(of.at[pl.ds(at, count)], *_ALL, layout=layout, optimized=False)
            return loaded.astype(jnp.float32)

        for slot in range(_SLOTS):
            pl.when(slot < count)(lambda slot=slot: fetch(slot, slot))
        cut = pieces(width)
        xs, factor = [load(ref["x"], piece) for piece in cut], None
        if eps is not None:
            factor = lax.rsqrt(sum(jnp.sum(x * x) for x in xs) / width + eps)
        if gain is not None:
            xs = [x * load(ref["gain"], piece) for x, piece in zip(xs, cut, strict=True)]

        def summed(slot: Any, part: int, row: Any) -> jax.Array:
            pairs = zip(cut, xs, strict=True)
            parts_of_sum = [jnp.sum(load(ring.at[slot, part], piece) * x) for piece, x in pairs]
            y = functools.reduce(jnp.add, parts_of_sum)
            y = y if factor is None else y * factor
            if bias is None:
                return y
            return y + ref["bias"][part * features + row].astype(jnp.float32)

        def turn(i: Any, _: None) -> None:
            slot, row = lax.rem(i, _SLOTS), me + i * programs
            plgpu.barrier_wait(barriers.at[slot])
            y, *up = [summed(slot, part, row) for part in range(parts)]
            # The sums have synchronised the warpgroup: every lane has read the slot.
            pl.when(i + _SLOTS < count)(lambda: fetch(i + _SLOTS, slot))
            y = y if activation is None else activation(y)
            y = y * up[0] if up else y
            if residual is not None:
                y = y + ref["residual"][row].astype(jnp.float32)
            ref["out"][row] = y.astype(dtype)

        lax.fori_loop(0, count, turn, None)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((features,), dtype),
        scratch_types={
            "ring": plgpu.SMEM((_SLOTS, parts, lines, _LINE), weight.dtype),
            "barriers": plgpu.Barrier(num_arrivals=parts, num_barriers=_SLOTS),
        },
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
    )(*args)
