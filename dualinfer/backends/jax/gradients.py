"""Derivatives of a model's forward: where there are none, and of what its weights have them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import UnsupportedError
from ...model.weights import (
    Leaf,
    Row,
    Source,
    Weight,
    get_leaf,
    leaves_of,
    parts_of,
    put_leaf,
    with_parts,
)
from ...ops.schemes import rounds_input
from ...parallel.shard import Shard
from ...parallel.sharding import ShardingPlan
from .params import Params


def check_derivative(leaves: Sequence[Leaf], kernels: str) -> None:
    """Raise UnsupportedError where a model of these weights and `kernels` has no derivatives."""
    if kernels:
        raise UnsupportedError(
            f"apply() has no derivatives here: this engine runs on {kernels} kernels, which give "
            "results alone. Make one on plain XLA, which has them: "
            "init_inference(..., replace_with_kernel_inject=False)."
        )
    own = [piece for leaf in leaves for piece in leaves_of(leaf)]
    if any(isinstance(weight, Weight) and rounds_input(weight) for weight in own):
        raise UnsupportedError(
            "apply() has no derivatives here: this checkpoint's scheme rounds what weights are "
            "multiplied with, and what is rounded has the derivative zero. Make the engine of a "
            "checkpoint that is not quantized, or whose weights alone are."
        )


class _Held(NamedTuple):
    """The way devices hold an array, with elements held twice, or that are none of a stored tensor.

    `places` int32 [devices, n] of each of `axes`, which have `extents` in the whole: the place of
    each element that a device holds, beyond the extent for one that no tensor has. With `is_split`
    devices hold parts of the array, else each holds all of it.
    """

    axes: tuple[int, ...]
    extents: tuple[int, ...]
    places: tuple[np.ndarray, ...]
    is_split: bool


class Derived:
    """The weights as derivatives see them: the parameters of HF's model.

    Of elements that are one parameter there, each has the gradient of all: several layers may share
    a weight (ALBERT), devices a head, distances a bias (T5). What is no parameter has none: padding
    between devices, a bias that only some parts of a product have, a table of sines, a buffer.
    """

    def __init__(self, plan: ShardingPlan, axis: str | None) -> None:
        self._axis, rows = axis, plan.table.rows
        self._constants = [row for row in rows if row.fixed or not row.sources]
        by_sources: dict[Any, list[Row]] = {}
        for row in rows:
            by_sources.setdefault((row.sources, row.axes, row.picks), []).append(row)
        self._shared = [own for key, own in by_sources.items() if key[0] and len(own) > 1]
        self._lent = _lent([own[0] for key, own in by_sources.items() if key[0]], plan)
        lent = [row for blocks in self._lent for row, _ in blocks]
        self._obstacle = ""
        if lent and (plan.size > 1 or any(row.scheme for row in lent)):
            self._obstacle = (
                f"apply() has no derivatives here: {lent[0].name} and {lent[1].name} have a tensor "
                "of the checkpoint in common, which is not followed over devices or in codes. "
                "Make the engine of a checkpoint that is not quantized, on one device."
            )
        held = (
            (row, part, _how_held(plan.shards, row, part)) for row in rows for part in row.parts
        )
        self._held = [(row, part, how) for row, part, how in held if how is not None]

    @property
    def joins(self) -> bool:
        """True if gradients are joined, by a rule in reverse alone."""
        return bool(self._shared or self._held or self._lent)

    def __call__(self, params: Params) -> Params:
        """The `params` of one device, with the same values; UnsupportedError where it cannot be."""
        if self._obstacle:
            raise UnsupportedError(self._obstacle)
        params = _copied(params)
        for row in self._constants:
            fixed = lax.stop_gradient(get_leaf(params.group(row), row))
            put_leaf(params.group(row), row, fixed)
        if not self.joins:
            return params
        same = jax.custom_vjp(lambda params: params)
        same.defvjp(lambda params: (params, None), lambda _, found: (self._joined(found),))
        return same(params)

    def _joined(self, found: Params) -> Params:
        """Gradients of parameters, of those that arrays alone would have."""
        joined = _copied(found)
        for row, part, how in self._held:
            leaf = get_leaf(joined.group(row), row)
            parts = parts_of(leaf)
            if parts[part].dtype != jax.dtypes.float0:
                parts[part] = self._of_places(parts[part], how)
                put_leaf(joined.group(row), row, with_parts(leaf, parts))
        for rows in self._shared:
            leaves = [get_leaf(joined.group(row), row) for row in rows]
            total = jax.tree.map(_sum, *leaves)
            for row in rows:
                put_leaf(joined.group(row), row, total)
        for blocks in self._lent:
            leaves = [get_leaf(joined.group(row), row) for row, _ in blocks]
            arrays = [parts_of(leaf)["data"] for leaf in leaves]
            total = sum(array[at] for array, (_, at) in zip(arrays, blocks, strict=True))
            for leaf, array, (row, at) in zip(leaves, arrays, blocks, strict=True):
                whole = with_parts(leaf, {"data": array.at[at].set(total)})
                put_leaf(joined.group(row), row, whole)
        return joined

    def _of_places(self, found: jax.Array, how: _Held) -> jax.Array:
        """Each element with the sum over those of the same place, 0 without a place."""
        own = [places[0] for places in how.places]
        if how.is_split:
            assert self._axis is not None
            rank = lax.axis_index(self._axis)
            own = [jnp.asarray(places)[rank] for places in how.places]
        at = jnp.ix_(*own)
        first = tuple(range(len(how.axes)))
        parts = jnp.moveaxis(found, how.axes, first)
        whole = jnp.zeros((*how.extents, *parts.shape[len(first) :]), parts.dtype)
        whole = whole.at[at].add(parts, mode="drop")
        if how.is_split:
            whole = lax.psum(whole, self._axis)
        return jnp.moveaxis(whole.at[at].get(mode="fill", fill_value=0), first, how.axes)


def _copied(params: Params) -> Params:
    """The same leaves in dicts of their own."""
    return params._replace(outer=dict(params.outer), layers=tuple(map(dict, params.layers)))


def _sum(*arrays: Any) -> Any:
    return arrays[0] if arrays[0].dtype == jax.dtypes.float0 else sum(arrays)


def _lent(rows: Sequence[Row], plan: ShardingPlan) -> list[list[tuple[Row, Any]]]:
    """The blocks of rows' arrays that are one stored tensor, of each that several rows have."""
    by_tensor: dict[str, list[tuple[Row, Source]]] = {}
    for row in rows:
        for source in row.sources:
            if source.part == "data":
                by_tensor.setdefault(source.name, []).append((row, source))
    several = [users for users in by_tensor.values() if len(users) > 1]
    return [[(row, _block(plan, row, source)) for row, source in users] for users in several]


def _block(plan: ShardingPlan, row: Row, source: Source) -> tuple[slice, ...]:
    """The place of a stored tensor in the row's array."""
    at = []
    for number, axis in enumerate(row.axes):
        places = plan.shards[0].places(row, "data", number, row.names_of(source, axis))
        own = np.flatnonzero(places >= 0)
        at.append(slice(int(own[0]), int(own[-1]) + 1))
    return tuple(at)


def _how_held(shards: Sequence[Shard], row: Row, part: str) -> _Held | None:
    """The way devices hold a row's part; None where each element is a parameter, held once."""
    if not row.sources:
        return None
    spec, axes = shards[0].table.spec, row.parts[part]
    is_split = shards[0].split_axis(row, part) is not None
    all_places, extents, held = [], [], []
    for i, axis in enumerate(axes):
        own = [shard.places(row, part, i) for shard in (shards if is_split else shards[:1])]
        whole = spec.extent(axis, row.layer)
        if all(np.array_equal(places, np.arange(whole)) for places in own):
            continue
        beyond = [np.where(places < 0, whole, places) for places in own]
        all_places.append(np.array(beyond, np.int32))
        extents.append(whole)
        held.append(i)
    if not held:
        return None
    shape = [n + 1 for n in extents]
    flat = [
        np.ravel_multi_index(np.ix_(*own), shape).ravel() for own in zip(*all_places, strict=True)
    ]
    every = np.concatenate(flat)
    is_real = not any((own == n).any() for own, n in zip(all_places, extents, strict=True))
    if is_real and len(np.unique(every)) == len(every):
        return None
    return _Held(tuple(held), tuple(extents), tuple(all_places), is_split)
