"""Few rows times a matrix on NVIDIA's Hopper GPUs, by Mosaic GPU and the matrix units (wgmma).

A program has 64 rows of the matrix and all rows of x. The result is made turned, so that the
matrix is the operand of 64 rows and x the one of 8 to 256; its columns come by asynchronous copies,
a few hundred bytes a step, through rings in shared memory, one of each warpgroup. Codes become
values in registers, of which the matrix units read them. Warpgroups share the steps, and the first
adds what the others have.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .launch import rounded_up
from .product import Codes, as_planes, planes_of
from .ring import ALL, KINDS, floats_of

MOST_ROWS = 256  # of x
_ROWS = 64  # of the matrix, of a program
_FEW = 8  # rows of x come in so many
_SHARED = 200 << 10  # bytes of shared memory of a program, at most
_HALF = 100 << 10  # as many, for two programs of a multiprocessor
_SUMMED = 64  # rows of sums, at most, for which registers have room for sums of each block, too
_SLOTS = 3  # of a ring, at least
_MOST_SLOTS = 8
_UNITS = (128, 64, 32)  # columns of a step, and bytes of codes that share scales


class Plan(NamedTuple):
    """How a product is cut: `rows` of x at once, `columns` of data a step, `unit` of them at once.

    `groups` are the warpgroups of a program, each with a ring of `slots`.
    """

    rows: int
    columns: int
    unit: int
    groups: int
    slots: int


def plan_of(count: int, matrix: jax.Array | Codes, gated: bool) -> Plan | None:
    """The cut of a product of `count` rows in 16 bits; None where there is none.

    Two programs of a multiprocessor ask for columns while one of them ends or begins.
    """
    codes, parts = matrix if isinstance(matrix, Codes) else None, 2 if gated else 1
    data: Any = codes.data if codes else matrix
    row, itemsize, planes = data.shape[1], data.dtype.itemsize, planes_of(codes) if codes else 1
    own = row if codes is None or not codes.columns else codes.columns // planes
    rows = rounded_up(-(-count // -(-count * parts // MOST_ROWS)), _FEW)
    units = [n for n in (_UNITS if codes else (64,)) if own % n == 0]
    cuts = [(room, n) for room in (_HALF, _SHARED) for n in _UNITS if row % n == 0]
    for room, columns in cuts:
        unit = next((n for n in units if columns % n == 0), 0)
        steps, slot = row // columns, (parts * _ROWS * itemsize + planes * rows * 2) * columns
        for groups in (n for n in (4, 2, 1) if unit and n <= min(steps, max(1, 64 // rows))):
            own_steps, sums = -(-steps // groups), (groups - 1) * parts * _ROWS * rows * 4
            slots = min(_MOST_SLOTS, (room - sums) // (groups * slot), own_steps)
            if slots >= min(_SLOTS, own_steps):
                return Plan(rows, columns, unit, groups, slots)
    return None


def serves(count: int, matrix: jax.Array | Codes, gated: bool, dtype: Any) -> bool:
    """True if the kernel multiplies `count` rows of `dtype` with a matrix [features, width].

    Those are floats of that dtype, or codes with scales and zeros of rows or of their blocks.
    """
    codes = matrix if isinstance(matrix, Codes) else None
    data: Any = codes.data if codes else matrix
    if jnp.dtype(dtype).itemsize != 2 or not 0 < count <= MOST_ROWS:
        return False
    if codes is None and data.dtype != dtype:
        return False
    if codes is not None:
        whole = codes.data.shape[1] * planes_of(codes) == codes.width
        if codes.kind not in KINDS or not whole or (codes.shared > 1 and codes.shared % _ROWS):
            return False
    parts = 2 if gated else 1
    return len(data) % (parts * _ROWS) == 0 and plan_of(count, matrix, gated) is not None


def product(
    x: jax.Array,
    matrix: jax.Array | Codes,
    *,
    dtype: Any,
    bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    gated: bool = False,
    residual: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """residual + activation(x matrix^T + bias) of x [count, width]: [count, out] in `dtype`.

    With `gated` the matrix holds gate, then up. A scale meets the sums of its row, or of its block
    in a row; that of a block meets its codes where registers have no room for other sums, whose
    products are rounded to x's dtype then.
    """
    codes, plan = matrix if isinstance(matrix, Codes) else None, plan_of(len(x), matrix, gated)
    assert plan is not None
    data: Any = codes.data if codes else matrix
    count, width = x.shape
    parts, planes = 2 if gated else 1, planes_of(codes) if codes else 1
    features, steps = len(data) // parts, data.shape[1] // plan.columns
    rows, columns, unit, groups, slots = plan
    blocked = codes is not None and bool(codes.columns)
    by_blocks = blocked and parts * rows <= _SUMMED
    padded = rounded_up(count, rows)

    x = as_planes(jnp.pad(x, ((0, padded - count), (0, 0))), width, planes)[0]
    names, args = ["x", "data"], [x, data]
    for name, array in _beside(codes).items():
        names.append(name)
        args.append(array.reshape(len(array), -1) if name != "outer" else array.reshape(-1, 1))
    if bias is not None:
        names.append("bias")
        args.append(bias)
    if residual is not None:
        names.append("residual")
        args.append(jnp.pad(residual, ((0, padded - count), (0, 0))))

    def body(*refs: Any, tiles: Any, xs: Any, barriers: Any, **scratch: Any) -> None:
        ref = dict(zip([*names, "out"], refs, strict=True))
        first, own_rows = lax.axis_index("tile") * _ROWS, lax.axis_index("rows") * rows
        me = lax.axis_index("group") if groups > 1 else jnp.int32(0)
        count = lax.div(steps - me + groups - 1, groups)

        def fetch(i: Any, slot: Any) -> None:
            at, place = pl.ds((me + i * groups) * columns, columns), me * slots + slot
            for part in range(parts):
                source = ref["data"].at[pl.ds(part * features + first, _ROWS), at]
                plgpu.copy_gmem_to_smem(source, tiles.at[place, part], barriers.at[place])
            for plane in range(planes):
                source = ref["x"].at[plane, pl.ds(own_rows, rows), at]
                plgpu.copy_gmem_to_smem(source, xs.at[place, plane], barriers.at[place])

        def load(of: Any, *, turned: bool = False, row: bool = False) -> jax.Array:
            """float32 of the device's memory, as sums lie, or a number for each row of these."""
            if interpret is not None:  # which knows neither layouts nor turned references
                return (of[...].T if turned else of[...]).astype(jnp.float32)
            layout: Any = plgpu.Layout.WGMMA.reduce(1) if row else plgpu.Layout.WGMMA_TRANSPOSED
            of = plgpu.transpose_ref(of, (1, 0)) if turned else of
            return plgpu.load(of, *ALL, layout=layout, optimized=False).astype(jnp.float32)

        def of_rows(name: str, part: int, block: Any = 0) -> jax.Array:
            """The numbers of rows of a part, one of each, or one of all: [64, any]."""
            at, shared = part * features + first, len(data) // ref[name].shape[0]
            if shared > 1:
                return ref[name][lax.div(at, shared), block].astype(jnp.float32)
            return load(ref[name].at[pl.ds(at, _ROWS), block], row=True)

        def met(x: jax.Array, of: jax.Array) -> jax.Array:
            """Numbers of rows as those of x [64, any] meet them."""
            return lax.broadcast_in_dim(of, x.shape, (0,)) if of.ndim else of

        def multiply(sums: Any, left: Any, right: Any) -> None:
            """sums += left [64, K] times the rows right [rows, K]."""
            if interpret is None:
                plgpu.wgmma(sums, left, plgpu.transpose_ref(right, (1, 0)))
                return
            # JAX's interpreter multiplies references alone, and none that is turned.
            scratch["left"][me], scratch["right"][me] = left[...], right[...].T
            plgpu.wgmma(sums, scratch["left"].at[me], scratch["right"].at[me])

        def values(held: jax.Array, given: dict[str, jax.Array]) -> list[jax.Array]:
            """The values of codes [64, unit] in each plane; scales that meet sums are left out."""
            assert codes is not None
            found = _values(codes, held, x.dtype)
            if "zero" in given:
                found = [y - met(y, given["zero"].astype(x.dtype)) for y in found]
            if "scale" in given and not by_blocks:
                wide = [y.astype(jnp.float32) for y in found]
                found = [(y * met(y, given["scale"])).astype(x.dtype) for y in wide]
            return found

        fixed: Any = [{} for _ in range(parts)]
        if codes is not None and codes.zero is not None and not blocked:
            fixed = [{"zero": of_rows("zero", part)} for part in range(parts)]

        def beside(i: Any) -> Any:
            """What each unit's rows in each part meet, on its way while the step is waited for."""
            if not blocked:
                return [fixed] * (columns // unit)
            assert codes is not None
            start, own = (me + i * groups) * columns, codes.columns // planes
            blocks = [lax.div(start + at, own) for at in range(0, columns, unit)]
            present = [name for name in ("scale", "zero") if name in ref]
            return [
                [{name: of_rows(name, part, block) for name in present} for part in range(parts)]
                for block in blocks
            ]

        def of_floats(i: Any, sums: Any) -> None:
            place, before = me * slots + lax.rem(i, slots), lax.rem(i + slots - 1, slots)
            plgpu.barrier_wait(barriers.at[place])
            for part in range(parts):
                multiply(sums[part], tiles.at[place, part], xs.at[place, 0])
            plgpu.wgmma_wait(parts)  # those of the step before are done
            more = (i > 0) & (i + slots - 1 < count)
            pl.when(more)(lambda: fetch(i + slots - 1, before))

        def of_codes(i: Any, sums: Any, totals: Any) -> Any:
            slot, place = lax.rem(i, slots), me * slots + lax.rem(i, slots)
            given, totals = beside(i), list(totals)
            plgpu.barrier_wait(barriers.at[place])

            def add(own: Any, part: int, unit_of: int) -> Any:
                """Adds a unit's products to sums."""
                at = pl.ds(unit_of * unit, unit)
                held = tiles.at[place, part, :, at][...]
                for plane, left in enumerate(values(held, given[unit_of][part])):
                    multiply(own, left, xs.at[place, plane, :, at])
                    plgpu.wgmma_wait(0)
                return own[...] if by_blocks else None

            for unit_of in range(columns // unit):
                for part in range(parts):
                    run = functools.partial(add, part=part, unit_of=unit_of)
                    if by_blocks:
                        y = pl.run_scoped(run, own=empty)
                        totals[part] += y * met(y, given[unit_of][part]["scale"])
                    else:
                        run(sums[part])
            pl.when(i + slots < count)(lambda: fetch(i + slots, slot))
            return tuple(totals)

        def summed(*sums: Any) -> Any:
            if by_blocks:
                zeros = (jnp.zeros((_ROWS, rows), jnp.float32),) * parts
                return lax.fori_loop(0, count, lambda i, own: of_codes(i, (), own), zeros)
            if codes is None:
                lax.fori_loop(0, count, lambda i, _: of_floats(i, sums), None)
            else:
                lax.fori_loop(0, count, lambda i, _: of_codes(i, sums, ()), ())
            return tuple(own[...] for own in sums)

        for slot in range(slots):
            pl.when(slot < count)(lambda slot=slot: fetch(slot, slot))
        empty: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
        empty = empty((_ROWS, rows), jnp.float32)
        y = summed() if by_blocks else pl.run_scoped(summed, *[empty] * parts)

        def finish() -> None:
            found = list(y)
            if groups > 1:
                plgpu.barrier_wait(scratch["done"])
            for part in range(parts):
                for other in range(groups - 1):
                    found[part] = found[part] + scratch["sums"][other, part]
                for name in ("scale", "outer"):
                    if name in ref and not (blocked and name == "scale"):
                        found[part] = found[part] * met(found[part], of_rows(name, part))
                if bias is not None:
                    at = pl.ds(part * features + first, _ROWS)
                    found[part] += met(found[part], load(ref["bias"].at[at], row=True))
            z = found[0] if activation is None else activation(found[0])
            z = z * found[1] if gated else z
            if interpret is None:
                z = plgpu.layout_cast(z, plgpu.Layout.WGMMA_TRANSPOSED)
            own = pl.ds(own_rows, rows), pl.ds(first, _ROWS)
            if residual is not None:
                z = z + load(ref["residual"].at[own], turned=True)
            z, out = z.astype(dtype), ref["out"].at[own]
            if interpret is None:
                plgpu.transpose_ref(out, (1, 0))[...] = z
            else:
                out[...] = z.T

        def hand_over() -> None:
            for part in range(parts):
                scratch["sums"][me - 1, part] = y[part]
            plgpu.barrier_arrive(scratch["done"])

        if groups == 1:
            finish()
        else:
            pl.when(me > 0)(hand_over)
            pl.when(me == 0)(finish)

    of_x, of_data = _transforms(min(unit, 64), 2), _transforms(unit, data.dtype.itemsize)
    places = groups * slots
    scratch: dict[str, Any] = {
        "tiles": plgpu.SMEM((places, parts, _ROWS, columns), data.dtype, transforms=of_data),
        "xs": plgpu.SMEM((places, planes, rows, columns), x.dtype, transforms=of_x),
        "barriers": plgpu.Barrier(num_arrivals=parts + planes, num_barriers=places),
    }
    how: dict[str, Any] = {}
    if groups > 1:
        sums = (groups - 1, parts, _ROWS, rows)
        scratch["sums"] = plgpu.SMEM(sums, jnp.float32, transforms=_transforms(8, 4))
        scratch["done"] = plgpu.Barrier(num_arrivals=groups - 1)
        how = {"num_threads": groups, "thread_name": "group"}
    if interpret is not None:
        size = columns if codes is None else unit
        scratch["left"] = plgpu.SMEM((groups, _ROWS, size), x.dtype)
        scratch["right"] = plgpu.SMEM((groups, size, rows), x.dtype)
    semantics = plgpu.LoweringSemantics.Warpgroup  # the other cannot lay sums out so
    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((padded, features), dtype),
        scratch_types=scratch,
        grid=(features // _ROWS, padded // rows),
        grid_names=("tile", "rows"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        interpret=interpret,
        **how,
    )(*args)
    return y[:count]


def _values(codes: Codes, held: jax.Array, dtype: Any) -> list[jax.Array]:
    """Bytes of codes as floats of 16 bits, in each plane, exactly; zeros and scales are not theirs.

    4 bits are the last ones of a float so large that its last bit is 1.
    """
    if planes_of(codes) == 1:
        wide = floats_of(codes, held) if codes.kind.startswith("fp8") else [held]
        return [y.astype(dtype) for y in wide]
    least = 1 << jnp.finfo(dtype).nmant
    bits = np.asarray(least, dtype).view(np.uint16)
    wide = held.astype(jnp.uint16)
    both = [half | bits for half in (wide & np.uint16(15), wide >> np.uint16(4))]
    base = np.asarray(least + codes.raised, dtype)
    return [lax.bitcast_convert_type(y, dtype) - base for y in both]


def _transforms(columns: int, itemsize: int) -> tuple[Any, ...]:
    """How tiles of so many columns lie in shared memory, as the matrix units read them."""
    return (
        plgpu.TilingTransform((8, columns)),
        plgpu.SwizzleTransform(columns * itemsize),
    )


def _beside(codes: Codes | None) -> dict[str, jax.Array]:
    """What codes' rows, or blocks of these, have numbers of."""
    if codes is None:
        return {}
    given = {"scale": codes.scale, "zero": codes.zero, "outer": codes.outer}
    return {name: array for name, array in given.items() if array is not None}
