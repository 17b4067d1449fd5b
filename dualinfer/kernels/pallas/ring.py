"""A row times a matrix on NVIDIA's GPUs, by Mosaic GPU: a ring of weights in shared memory.

One warpgroup a program, and programs stay: each asks for the rows of weights that come next by
asynchronous copies while it sums those that are there. A body of its own, since Mosaic GPU has
other memories than a TPU, and sums over all of a warpgroup alone. Codes become floats in registers,
and a row's sum takes its scale.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .product import Codes, as_planes, planes_of

_LINE = 256  # elements along an axis that one asynchronous copy takes at most
_SLOTS = 3  # of the ring, at least
_MOST_SLOTS = 8
_ASKED = 24 << 10  # bytes that a program asks for ahead, with more slots than the least
_SHARED = 200 << 10  # bytes of shared memory that the programs of a multiprocessor may take
_PROGRAMS = 4  # of a multiprocessor
_REGISTERS = 512  # of the four warps of each program there, for each of their lanes
_WIDEST = 16384  # columns, which a warpgroup holds in registers
# The index of a load, which JAX 0.12 takes of the reference alone, and 0.10 wants beside it.
ALL: tuple[Any, ...] = ((),) if jax.__version_info__ < (0, 11) else ()


KINDS = ("int8", "uint8", "fp8_e4m3", "fp8_e5m2", "int4", "uint4")
_FLOAT8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


def serves(count: int, matrix: jax.Array | Codes, gated: bool, dtype: Any) -> bool:
    """True if the kernel multiplies `count` rows of `dtype` with a matrix [features, width].

    Those are floats of that dtype, or codes with a scale for each row.
    """
    parts, codes = 2 if gated else 1, matrix if isinstance(matrix, Codes) else None
    if codes is not None and (codes.kind not in KINDS or codes.columns):
        return False
    data: Any = codes.data if codes else matrix
    features, row = data.shape
    width, bits = (codes.width, 8) if codes else (row, 16)
    fits = _SLOTS * parts * row * bits // 8 <= _SHARED and width <= _WIDEST
    known = jnp.dtype(dtype).itemsize == 2 and (codes is not None or data.dtype == dtype)
    whole = row * (planes_of(codes) if codes else 1) == width and row % _LINE == 0
    return count == 1 and known and whole and features % parts == 0 and fits


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
    matrix: jax.Array | Codes,
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
    """residual + activation(norm(x) matrix^T + bias) of x [width]: [out] in `dtype`.

    With `eps` x is RMS-normed, times `gain` [width]. With `gated` the matrix holds gate, then up.
    `sms` are the device's multiprocessors.
    """
    codes = matrix if isinstance(matrix, Codes) else None
    data: Any = codes.data if codes else matrix
    width, parts, planes = len(x), 2 if gated else 1, planes_of(codes) if codes else 1
    features, row_size = len(data) // parts, data.shape[1]
    lines = row_size // _LINE
    size = parts * row_size * data.dtype.itemsize
    slots = min(_MOST_SLOTS, max(_SLOTS, _ASKED // size))
    most = min(_PROGRAMS, _SHARED // (slots * size))
    if codes is not None:  # whose bytes are few: registers have room for fewer rows of x
        most = min(most, _REGISTERS // min(255, width // 64 + 16))
    programs = min(sms * max(1, most), features)

    def in_planes(row: jax.Array) -> jax.Array:
        """A row [width] as codes lie: [planes, lines, 256]."""
        return as_planes(row[None], width, planes).reshape(planes, lines, _LINE)

    names, args = ["x", "weight"], [in_planes(x), data.reshape(-1, lines, _LINE)]
    of_rows = {} if codes is None else _of_rows(codes)
    shared = {name: len(data) // len(array) for name, array in of_rows.items()}
    given = {"bias": bias, "residual": residual, **of_rows}
    if gain is not None:
        names.append("gain")
        args.append(in_planes(gain))
    for name, array in given.items():
        if array is not None:
            names.append(name)
            args.append(array.reshape(-1))

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
                return of[pl.ds(at, count)]
            layout = plgpu.Layout.WG_STRIDED((count, _LINE), vector)
            return plgpu.load(of.at[pl.ds(at, count)], *ALL, layout=layout, optimized=False)

        def floats(name: str) -> list[list[jax.Array]]:
            """A row's pieces, in each plane."""
            return [
                [load(ref[name].at[plane], piece).astype(jnp.float32) for plane in range(planes)]
                for piece in cut
            ]

        for slot in range(slots):
            pl.when(slot < count)(lambda slot=slot: fetch(slot, slot))
        cut = pieces(row_size)
        xs, factor, total = floats("x"), None, None
        if eps is not None:
            factor = lax.rsqrt(_sum(x * x for own in xs for x in own) / width + eps)
        if gain is not None:
            xs = [
                [x * g for x, g in zip(*own, strict=True)]
                for own in zip(xs, floats("gain"), strict=True)
            ]
        if "zero" in of_rows:
            total = _sum(x for own in xs for x in own)

        def of_row(name: str, row: Any) -> jax.Array:
            return ref[name][row].astype(jnp.float32)

        def beside(part: int, row: Any) -> dict[str, jax.Array]:
            """The numbers that a row's sum meets; they load while the row is waited for."""
            at = part * features + row
            own = {name: of_row(name, lax.div(at, n)) for name, n in shared.items()}
            return own if bias is None else {**own, "bias": of_row("bias", at)}

        def summed(slot: Any, part: int, own: dict[str, jax.Array]) -> jax.Array:
            products = []
            for piece, rows in zip(cut, xs, strict=True):
                held = load(ring.at[slot, part], piece)
                values = [held.astype(jnp.float32)] if codes is None else floats_of(codes, held)
                products.append(_add(v * x for v, x in zip(values, rows, strict=True)))
            y = _sum(products)
            if total is not None:
                y = y - own["zero"] * total
            for name in ("scale", "outer"):
                y = y * own[name] if name in own else y
            y = y if factor is None else y * factor
            return y + own["bias"] if "bias" in own else y

        def turn(i: Any, _: None) -> None:
            slot, row = lax.rem(i, slots), me + i * programs
            own = [beside(part, row) for part in range(parts)]
            plgpu.barrier_wait(barriers.at[slot])
            y, *up = [summed(slot, part, own[part]) for part in range(parts)]
            # The sums have synchronised the warpgroup: every lane has read the slot.
            pl.when(i + slots < count)(lambda: fetch(i + slots, slot))
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
            "ring": plgpu.SMEM((slots, parts, lines, _LINE), data.dtype),
            "barriers": plgpu.Barrier(num_arrivals=parts, num_barriers=slots),
        },
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
    )(*args)


def floats_of(codes: Codes, held: jax.Array) -> list[jax.Array]:
    """float32 of bytes of codes, in each plane; zeros and scales are not theirs."""
    if codes.kind in _FLOAT8:
        return [lax.bitcast_convert_type(held, _FLOAT8[codes.kind]).astype(jnp.float32)]
    if planes_of(codes) == 1:
        return [held.astype(jnp.float32)]
    wide = held.astype(jnp.int32)
    return [(half - codes.raised).astype(jnp.float32) for half in (wide & 15, (wide >> 4) & 15)]


def _of_rows(codes: Codes) -> dict[str, jax.Array]:
    """Scales and zeros by name: an array has a number for each row, or for some rows together."""
    given = {"scale": codes.scale, "zero": codes.zero, "outer": codes.outer}
    return {name: array for name, array in given.items() if array is not None}


def _add(arrays: Any) -> jax.Array:
    return functools.reduce(jnp.add, arrays)


def _sum(arrays: Any) -> jax.Array:
    """The sum of all elements of some arrays."""
    return _add(jnp.sum(x) for x in arrays)
