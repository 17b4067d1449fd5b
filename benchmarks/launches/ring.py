"""A matrix-vector product by Pallas' Mosaic GPU lowering: a ring of weights in shared memory.

One warpgroup a program; programs are persistent. Copies of the first rows are asked for before the
kernel waits for the one in front of it, each later one as soon as its slot has been read. There is
one warpgroup a program because a sum over it goes through one scratch for the whole block: two
warpgroups that sum at the same time would share it (jax 0.11.2).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LINE = 256  # elements along an axis that one asynchronous copy takes at most


def pieces(width: int) -> list[tuple[int, int, int]]:
    """(first line, lines, elements of a load) of a row, as a warpgroup reads it together."""
    lines, found, at = width // LINE, [], 0
    for vector, least in ((8, 4), (4, 2), (2, 1)):
        count = (lines - at) // least * least
        if count:
            found.append((at, count, vector))
            at += count
    return found


@lru_cache(maxsize=256)
def product(
    features: int,
    width: int,
    *,
    gated: bool = False,
    eps: float | None = None,
    residual: bool = False,
    slots: int = 3,
    rows: int = 1,
    programs: int = 528,
    early: bool = True,
    interpret: Any = None,
) -> Callable[..., jax.Array]:
    """x [width or more], weights [features (twice if gated), width] to [features], bfloat16.

    With `eps` x is RMS-normed first, `gated` is silu(gate) * up. A slot of the ring holds `rows`
    rows, twice as many if gated. `early` lets the next kernel start at once, and waits before x.
    """
    if width % LINE or features % rows:
        raise ValueError(f"{features} x {width} is no multiple of {rows} x {LINE}.")
    parts, blocks = 2 if gated else 1, features // rows

    def body(*refs: Any, ring: Any, barriers: Any) -> None:
        x_ref, w_ref, *rest = refs
        gain_ref = rest.pop(0) if eps is not None else None
        residual_ref = rest.pop(0) if residual else None
        (y_ref,) = rest
        me = lax.axis_index("program")
        count = (blocks - me + programs - 1) // programs

        def fetch(i: Any, slot: Any) -> None:
            for part in range(parts):
                first = (part * blocks + me + i * programs) * rows
                to = ring.at[slot, part]
                plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(first, rows)], to, barriers.at[slot])

        def load(ref: Any, piece: tuple[int, int, int]) -> jax.Array:
            at, lines, vector = piece
            layout = plgpu.Layout.WG_STRIDED((lines, LINE), vector)
            return plgpu.load(ref.at[pl.ds(at, lines)], layout=layout, optimized=False)

        if early:
            plgpu.griddepcontrol_launch_dependents()
        for slot in range(slots):
            pl.when(slot < count)(lambda slot=slot: fetch(slot, slot))
        cut = pieces(width)
        gains = [] if gain_ref is None else [load(gain_ref, piece) for piece in cut]
        if early:
            plgpu.griddepcontrol_wait()
        xs, factor = [load(x_ref, piece).astype(jnp.float32) for piece in cut], None
        if eps is not None:
            factor = lax.rsqrt(sum(jnp.sum(x * x) for x in xs) / width + eps)
            xs = [x * gain.astype(jnp.float32) for x, gain in zip(xs, gains, strict=True)]

        def summed(slot: Any, part: int, row: int) -> jax.Array:
            ref = ring.at[slot, part, row]
            pairs = zip(cut, xs, strict=True)
            total = sum(jnp.sum(load(ref, piece).astype(jnp.float32) * x) for piece, x in pairs)
            return total if factor is None else total * factor

        def turn(i: Any, _: None) -> None:
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(barriers.at[slot])
            sums = [[summed(slot, part, row) for part in range(parts)] for row in range(rows)]
            # The sums have synchronised the warpgroup: every lane has read the slot.
            pl.when(i + slots < count)(lambda: fetch(i + slots, slot))
            for row, (y, *up) in enumerate(sums):
                at = (me + i * programs) * rows + row
                if up:
                    y = y / (1.0 + jnp.exp(-y)) * up[0]
                if residual_ref is not None:
                    y = y + residual_ref[at].astype(jnp.float32)
                y_ref[at] = y.astype(y_ref.dtype)

        lax.fori_loop(0, count, turn, None)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((features,), jnp.bfloat16),
        scratch_types=dict(
            ring=plgpu.SMEM((slots, parts, rows, width // LINE, LINE), jnp.bfloat16),
            barriers=plgpu.Barrier(num_arrivals=parts, num_barriers=slots),
        ),
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
    )

    def call(
        x: jax.Array,
        weight: jax.Array,
        gain: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        args = [x.reshape(-1, LINE), weight.reshape(-1, width // LINE, LINE)]
        args += [] if gain is None else [gain.reshape(-1, LINE)]
        return kernel(*args, *([] if residual is None else [residual]))

    return call
