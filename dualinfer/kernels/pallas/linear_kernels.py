"""Device side of linear.py: the matrix-vector kernel, and the one for the matrix units."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .activation import activate
from .launch import arrivals, cdiv, dot, forget, load, next_power_of_2, program, store


class _Turn(NamedTuple):
    """What a turn of a program reads: its rows of the weights, and what is added to their sums."""

    weights: jax.Array
    up: jax.Array | None
    biases: list[jax.Array]
    residuals: list[jax.Array]


@cache
def matvec_kernel(
    count: int,
    features: int,
    width: int,
    *,
    rows: int,
    turns: int,
    norm: str | None,
    eps: float,
    activation: str | None,
    gated: bool,
) -> Callable[..., None]:
    """y [count, features] of x [count, width]; a program takes `rows` rows of the weights a turn.

    It asks for those of its next turn before it sums this one's.
    """
    block = next_power_of_2(width)
    programs = cdiv(features, rows * turns)

    def _matvec_kernel(
        x_ref: Any,
        weight_ref: Any,
        bias_ref: Any,
        residual_ref: Any,
        norm_weight_ref: Any,
        norm_bias_ref: Any,
        y_ref: Any,
    ) -> None:
        own, column = program(0), jnp.arange(block)
        # A mask costs time, so that there is one only where a block may reach over the edge.
        inside = None if block == width else column < width

        def place(turn: Any) -> tuple[jax.Array, jax.Array | None]:
            row = (turn * programs + own) * rows + jnp.arange(rows)
            return row, None if features == rows * turns * programs else row < features

        def read(turn: Any) -> _Turn:
            row, within = place(turn)
            mask = _both(within, inside, (rows, block))

            def weights(first: int) -> jax.Array:
                at = ((row + first)[:, None], column[None, :])
                return load(weight_ref, at, mask, once=True)

            w, up = weights(0), weights(features) if gated else None
            biases = _biases(bias_ref, row, features, within, gated)
            places = range(count if residual_ref is not None else 0)
            return _Turn(w, up, biases, [load(residual_ref, (i, row), within) for i in places])

        def write(turn: Any, found: _Turn) -> None:
            row, within = place(turn)
            for i, (x, factor) in enumerate(xs):
                y = _product(found.weights, x, factor)
                u = None if found.up is None else _product(found.up, x, factor)
                residual = found.residuals[i] if found.residuals else None
                done = _finished(y, u, found.biases, residual, activation)
                store(y_ref, (i, row), done, within)

        # All that comes from memory is on its way before the first sum waits for something.
        first = read(0)
        gain = None if norm is None else load(norm_weight_ref, (column,), inside)
        shift = None if norm != "layer" else load(norm_bias_ref, (column,), inside)
        xs = []
        for i in range(count):
            x, factor = load(x_ref, (i, column), inside).astype(jnp.float32), None
            if gain is not None:
                x, factor = _normed(x, gain, shift, inside, width, eps, norm)
            xs.append((x, factor))

        def turn(i: Any, found: _Turn) -> _Turn:
            coming = read(i + 1)
            write(i, found)
            return coming

        last = turns - 1
        write(last, jax.lax.fori_loop(0, last, turn, first) if last else first)

    return _matvec_kernel


@cache
def tile_kernel(
    count: int,
    features: int,
    width: int,
    *,
    m: int,
    n: int,
    k: int,
    splits: int,
    share: int,
    activation: str | None,
    gated: bool,
    interpret: bool,
) -> Callable[..., None]:
    """y [count, features] of x [count, width]; a program sums an [m, n] tile.

    It sums over `share` blocks of k columns. Where `splits` is above 1 the kernel gets the counters
    too, read through their output, and outputs for the partial sums, float32 [tiles * splits *
    parts, m, n], and for the counters; parts are 2 with `gated`, else 1.
    """
    turns, parts = cdiv(width, k), 2 if gated else 1

    def _tile_kernel(
        x_ref: Any, weight_ref: Any, bias_ref: Any, residual_ref: Any, *refs: Any
    ) -> None:
        row = program(0) * m + jnp.arange(m)
        feature = program(1) * n + jnp.arange(n)
        # Rows outside repeat the last one: nothing of theirs is written.
        near_row = row if count % m == 0 else jnp.minimum(row, count - 1)
        near = feature if features % n == 0 else jnp.minimum(feature, features - 1)
        split = program(2)

        def turn(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            column = (split * share + i) * k + jnp.arange(k)
            inside = None if width % k == 0 else (column < width)[None, :]
            x_inside = None if inside is None else jnp.broadcast_to(inside, (m, k))
            w_inside = None if inside is None else jnp.broadcast_to(inside, (n, k))
            x = load(x_ref, (near_row[:, None], column[None, :]), x_inside)
            added = []
            for part, total in enumerate(sums):
                at = ((near + part * features)[:, None], column[None, :])
                added.append(total + dot(x, load(weight_ref, at, w_inside, once=True).T))
            return tuple(added)

        zeros = tuple(jnp.zeros((m, n), jnp.float32) for _ in range(parts))
        even = turns == splits * share
        end = share if even else jnp.minimum(share, turns - split * share)
        sums = jax.lax.fori_loop(0, end, turn, zeros)

        def finish(sums: Sequence[jax.Array], y_ref: Any) -> None:
            within = None if features % n == 0 else feature < features
            rows_within = None if count % m == 0 else row < count
            mask = _both(rows_within, within, (m, n))
            at = (row[:, None], feature[None, :])
            biases = _biases(bias_ref, feature, features, within, gated)
            residual = None if residual_ref is None else load(residual_ref, at, mask)
            up = sums[1] if gated else None
            store(y_ref, at, _finished(sums[0], up, biases, residual, activation), mask)

        if splits == 1:
            finish(sums, *refs)
            return
        _, y_ref, partial_ref, counter_ref = refs
        tile = program(0) * cdiv(features, n) + program(1)
        inner = (jnp.arange(m)[:, None], jnp.arange(n)[None, :])
        for part, total in enumerate(sums):
            store(partial_ref, ((tile * splits + split) * parts + part, *inner), total)
        before = arrivals(counter_ref, tile, interpret)

        @pl.when(before == splits - 1)
        def _() -> None:
            forget(counter_ref, tile)
            totals = []
            for part in range(parts):
                places = [((tile * splits + i) * parts + part, *inner) for i in range(splits)]
                total = load(partial_ref, places[0], shared=True)
                for at in places[1:]:
                    total = total + load(partial_ref, at, shared=True)
                totals.append(total)
            finish(totals, y_ref)

    return _tile_kernel


def _both(
    rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, int]
) -> jax.Array | None:
    """Mask of a block from those of its rows and columns; None where neither needs one."""
    mask = None if rows is None else jnp.broadcast_to(rows[:, None], shape)
    if columns is None:
        return mask
    other = jnp.broadcast_to(columns[None, :], shape)
    return other if mask is None else mask & other


def _normed(
    x: jax.Array,
    gain: jax.Array,
    shift: jax.Array | None,
    inside: jax.Array | None,
    width: int,
    eps: float,
    norm: str | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Float32 x of one row, normed over its elements, and a factor that its products lack still.

    What lies outside is 0. RMSNorm's own is left over: nothing waits for the sum behind it but the
    end, and a program holds fewer registers.
    """
    if norm == "layer":
        x = x - x.sum() / width
        x = x if inside is None else jnp.where(inside, x, 0.0)
    gain = gain.astype(jnp.float32)
    gain = gain + 1.0 if norm == "rms_offset" else gain
    factor = jax.lax.rsqrt((x * x).sum() / width + eps)
    if shift is None:
        return x * gain, factor
    return x * factor * gain + shift.astype(jnp.float32), None


def _product(w: jax.Array, x: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Float32 sums [rows] of weights [rows, width] times x, times what x lacks."""
    y = (w.astype(jnp.float32) * x[None, :]).sum(1)
    return y if factor is None else y * factor


def _biases(
    ref: Any, feature: jax.Array, features: int, within: jax.Array | None, gated: bool
) -> list[jax.Array]:
    """The bias at the features of a block and, behind it, that of their gates' other half."""
    if ref is None:
        return []
    starts = (0, features) if gated else (0,)
    return [load(ref, (feature + start,), within).astype(jnp.float32) for start in starts]


def _finished(
    y: jax.Array,
    up: jax.Array | None,
    biases: Sequence[jax.Array],
    residual: jax.Array | None,
    activation: str | None,
) -> jax.Array:
    """Bias, activation, gate and residual of float32 products, whose last axis the biases have."""
    if biases:
        y = y + biases[0]
    y = activate(y, activation)
    if up is not None:
        y = y * (up + biases[1] if biases else up)
    return y if residual is None else y + residual.astype(jnp.float32)
