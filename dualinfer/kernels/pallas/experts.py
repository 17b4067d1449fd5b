"""Experts of few and of many tokens: rows sorted by expert, in tiles of one expert each.

Matrices of floats are read by one kernel, which keeps hidden values where it makes them. Those in
codes are read by a kernel each, since scales of blocks lie along what is summed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import product
from .launch import LANES, Block, dot, run, sublanes
from .product import Codes

_BLOCK = 2 << 20  # bytes of an expert's first matrix that a program reads
_MANY = 128  # rows of a tile where experts have many


class Tiles(NamedTuple):
    """Where pairs of token and expert lie: `rows` int32 [tiles m] the pair of each row.

    A row without one has the number of pairs. `experts` int32 [tiles] are whose they are,
    `used` int32 [1] how many tiles are, and `places` int32 [P] the row of each pair.
    """

    rows: jax.Array
    experts: jax.Array
    used: jax.Array
    places: jax.Array


def tile_rows(pairs: int, total: int, dtype: Any) -> int:
    """Rows of a tile."""
    return sublanes(dtype) if pairs < total * _MANY // 4 else _MANY


def tiles_of(chosen: jax.Array, total: int, m: int) -> Tiles:
    """Tiles of `m` rows for pairs of tokens with experts `chosen`, int32 [P], of `total`.

    A pair with the number `total` itself has no row: its place is behind all tiles.
    """
    pairs = len(chosen)
    most = pairs // m + min(pairs, total)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.zeros(total, jnp.int32).at[chosen].add(1)
    tiles = (sizes + m - 1) // m
    first_tile = jnp.cumsum(tiles) - tiles
    first_pair = jnp.cumsum(sizes) - sizes
    ranked = chosen[order]
    places = first_tile[ranked] * m + jnp.arange(pairs, dtype=jnp.int32) - first_pair[ranked]
    places = jnp.where(ranked < total, places, most * m)
    rows = jnp.full(most * m, pairs, jnp.int32).at[places].set(order.astype(jnp.int32))
    used = tiles.sum()
    at = jnp.minimum(jnp.arange(most, dtype=jnp.int32), used - 1)
    own = jnp.searchsorted(jnp.cumsum(tiles), at, side="right").astype(jnp.int32)
    own = jnp.minimum(own, total - 1)
    placed = jnp.zeros(pairs, jnp.int32).at[order].set(places.astype(jnp.int32))
    return Tiles(rows, own, used[None].astype(jnp.int32), placed)


def columns_of(features: int, width: int, parts: int, itemsize: int) -> int:
    """Hidden features that a program computes: they divide all, in multiples of 128."""
    fit = [n for n in range(LANES, features, LANES) if features % n == 0]
    fit = [n for n in fit if parts * n * width * itemsize <= _BLOCK]
    return max(fit, default=LANES if features % LANES == 0 else features)


def experts(
    x: jax.Array,
    up: jax.Array,
    down: jax.Array,
    chosen: jax.Array,
    *,
    hidden: Callable[[jax.Array], jax.Array],
    gated: bool,
    up_bias: jax.Array | None = None,
    interpret: bool,
) -> jax.Array:
    """The products of rows x [R, E] with their experts int32 `chosen` [R, k]: float32 [R, k, out].

    An expert whose number is that of all, X, is none of them, and gives zeros.
    `up` [X, F or 2F, E] holds gate, then up if `gated`; `down` is [X, out, F]. `hidden` takes
    float32 [rows, F or 2F] to [rows, F], element by element.
    """
    (total, out, features), count = down.shape, chosen.shape[1]
    parts, width = 2 if gated else 1, x.shape[1]
    m = tile_rows(chosen.size, total, x.dtype)
    tiles = tiles_of(chosen.reshape(-1).astype(jnp.int32), total, m)
    rows = _sorted(x, tiles, count)
    own = columns_of(features, width, parts, x.dtype.itemsize)
    steps, most = features // own, len(tiles.experts)
    names = ["x", "up", "down"]
    inputs = [
        Block(rows, (m, width), lambda i, j, *_: (i, 0)),
        Block(
            up.reshape(total, parts, features, width),
            (None, parts, own, width),
            lambda i, j, number, used: (number[i], 0, _once(i, j, used, steps), 0),
        ),
        Block(
            down,
            (None, out, own),
            lambda i, j, number, used: (number[i], 0, _once(i, j, used, steps)),
        ),
    ]
    if up_bias is not None:
        names.append("bias")
        inputs.append(
            Block(
                up_bias.reshape(total, parts, 1, features),
                (None, parts, 1, own),
                lambda i, j, number, used: (number[i], 0, 0, _once(i, j, used, steps)),
            )
        )

    def body(_: Any, used: Any, *refs: Any) -> None:
        ref = dict(zip([*names, "out"], refs, strict=True))
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j == 0)
        def _() -> None:
            ref["out"][...] = jnp.zeros((m, out), jnp.float32)

        @pl.when(i < used[0])
        def _() -> None:
            found = []
            for part in range(parts):
                y = dot(ref["x"][...], ref["up"][part])
                if "bias" in ref:
                    y = y + ref["bias"][part].astype(jnp.float32)
                found.append(y.astype(x.dtype).astype(jnp.float32))
            h = hidden(found[0] if not gated else jnp.concatenate(found, -1))
            ref["out"][...] += dot(h.astype(x.dtype), ref["down"][...])

    result = jax.ShapeDtypeStruct((most * m, out), jnp.float32)
    (y,) = run(
        body,
        "experts",
        (most, steps),
        inputs,
        [Block(result, (m, out), lambda i, j, *_: (i, 0))],
        prefetch=[tiles.experts, tiles.used],
        parallel=[True, False],
        flops=2 * chosen.size * features * (parts * width + out),
        interpret=interpret,
    )
    return _of_pairs(y, tiles, chosen)


def in_codes(
    x: jax.Array,
    up: Codes,
    down: Codes,
    chosen: jax.Array,
    *,
    hidden: Callable[[jax.Array], jax.Array],
    up_bias: jax.Array | None = None,
    rounded: Sequence[Callable[[jax.Array, jax.Array], jax.Array]] = (),
    interpret: bool,
) -> jax.Array:
    """As `experts`, of matrices in codes, which have an axis of experts in front.

    `hidden` takes all of what `up` gives: float32 [rows, F or 2F]. Inputs of `up` and of `down` are
    `rounded` by these, if any, functions of rows and of the number of each one's expert.
    """
    total, count = up.data.shape[0], chosen.shape[1]
    m = tile_rows(chosen.size, total, x.dtype)
    tiles = tiles_of(chosen.reshape(-1).astype(jnp.int32), total, m)
    rows = _sorted(x, tiles, count)
    how: Any = {"pairs": chosen.size, "interpret": interpret}
    own = jnp.repeat(tiles.experts, m)
    round_up, round_down = rounded or [lambda rows, own: rows] * 2
    h = _each(round_up(rows, own), up, tiles, m, x.dtype, up_bias, **how)
    h = round_down(hidden(h.astype(jnp.float32)).astype(x.dtype), own)
    y = _each(h, down, tiles, m, jnp.dtype(jnp.float32), None, **how)
    return _of_pairs(y, tiles, chosen)


def serves_codes(codes: Codes, itemsize: int) -> bool:
    """True if `in_codes` reads a matrix of each expert that lies so."""
    return product.serves(_MANY, _of_one(codes), False, itemsize)


def _once(i: Any, j: Any, used: Any, steps: int) -> Any:
    """The step j of tile i, or the last one for a tile behind those used: it reads nothing anew."""
    return jnp.where(i < used[0], j, steps - 1)


def _of_pairs(y: jax.Array, tiles: Tiles, chosen: jax.Array) -> jax.Array:
    """The rows of pairs [R, k, out], of those of tiles; zeros for a pair that has none."""
    return y.at[tiles.places].get(mode="fill", fill_value=0).reshape(*chosen.shape, y.shape[1])


def _sorted(x: jax.Array, tiles: Tiles, count: int) -> jax.Array:
    """The rows of tiles, of x [R, width] with `count` pairs a row; zeros where there is no pair."""
    return x.at[tiles.rows // count].get(mode="fill", fill_value=0)


def _of_one(codes: Codes) -> Codes:
    """The shapes of one expert's codes."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if hasattr(a, "shape") else a, codes
    )


def _each(
    x: jax.Array,
    codes: Codes,
    tiles: Tiles,
    m: int,
    dtype: Any,
    bias: jax.Array | None,
    *,
    pairs: int,
    interpret: bool,
) -> jax.Array:
    """Rows x [tiles m, width] times the matrix of each tile's expert, plus `bias` [X, out].

    So many `pairs` of them are a token's.
    """
    features, (count, width) = codes.data.shape[1], x.shape
    rows, columns = product.blocks_at(jax.ShapeDtypeStruct((m, width), x.dtype), _of_one(codes), 1)
    planes, groups = product.planes_and_groups(codes, columns)
    steps = width // columns
    held = codes.data.shape[2] // steps
    inputs = [
        Block(
            product.as_planes(x, columns, planes),
            (steps, planes, m, columns // planes),
            lambda r, i, j, *_: (0, 0, i, 0),
        ),
        Block(
            codes.data[:, None],
            (None, 1, rows, held),
            lambda r, i, j, number, used: (number[i], 0, r, _once(i, j, used, steps)),
        ),
    ]
    names = ["x", "data"]
    for name, array in (("scale", codes.scale), ("zero", codes.zero)):
        if array is None:
            continue
        own = steps if codes.columns else 1
        array, shape, place = product.scales(array, rows, own, codes.shared)
        names.append(name)
        inputs.append(
            Block(
                array[:, None],
                (None, 1, *shape),
                lambda r, i, j, number, used, place=place: (
                    *(number[i], 0),
                    *place(r, _once(i, j, used, steps)),
                ),
            )
        )
    if codes.outer is not None:
        names.append("outer")
        inputs.append(
            Block(
                product.loadable(codes.outer)[:, None],
                (None, 1, rows),
                lambda r, i, j, number, _: (number[i], 0, r),
            )
        )
    if bias is not None:
        names.append("bias")
        inputs.append(
            Block(bias[:, None], (None, 1, rows), lambda r, i, j, number, _: (number[i], 0, r))
        )

    def body(_: Any, used: Any, *refs: Any) -> None:
        ref = dict(zip([*names, "out", "sums"], refs, strict=True))
        i, j, sums = pl.program_id(1), pl.program_id(2), ref["sums"]

        @pl.when(j == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        @pl.when(i < used[0])
        def _() -> None:
            sums[...] += product.of_codes(codes, ref, 0, j, groups, x.dtype)

        @pl.when(j == steps - 1)
        def _() -> None:
            y = sums[...].T
            if codes.outer is not None:
                y = y * product.widened(ref["outer"][...], codes.outer)
            if "bias" in ref:
                y = y + ref["bias"][...].astype(jnp.float32)
            ref["out"][...] = y.astype(dtype)

    (y,) = run(
        body,
        "experts",
        (pl.cdiv(features, rows), len(tiles.experts), steps),
        inputs,
        [
            Block(
                jax.ShapeDtypeStruct((count, features), dtype),
                (m, rows),
                lambda r, i, j, *_: (i, r),
            )
        ],
        scratch=[((rows, m), jnp.float32)],
        prefetch=[tiles.experts, tiles.used],
        parallel=[True, True, False],
        between=product.between(codes, rows, columns),
        flops=2 * pairs * features * width,
        interpret=interpret,
    )
    return y
