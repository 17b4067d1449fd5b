"""One device's part of a model: its part of each axis, and what it reads of stored tensors.

Axes are those of the weight table, so that one text serves every family and both backends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from ..model.load_plan import LoadPlan
from ..model.spec import ModelSpec
from ..model.weights import Row, Source, WeightTable, at_blocks, join_axis


@dataclass(frozen=True)
class Share:
    """One device's part of an axis: elements `start` to `stop` of all, then zeros to `extent`."""

    start: int
    stop: int
    extent: int

    @property
    def real(self) -> int:
        """Elements that are not padding."""
        return self.stop - self.start

    def times(self, width: int) -> "Share":
        """The same part counted in elements, each of the share's own `width` wide."""
        return Share(self.start * width, self.stop * width, self.extent * width)

    def by(self, block: int) -> "Share":
        """The same part counted in blocks; the last one may be cut short."""
        start = self.start // block
        stop = -(-self.stop // block) if self.real else start
        return Share(start, stop, -(-self.extent // block))


@dataclass(frozen=True)
class Shard:
    """The part of device `rank` of `size`: its share of each split axis, all of the others.

    `spec` is the model as this device computes it: with its own heads, slopes and MLP widths.
    `outer` are the shares of the axes outside of the layers, `layers` those of each layer's own.
    Padding is zeros, in the weights that make a value and in those that read it, so that it adds
    nothing.
    """

    rank: int
    size: int
    spec: ModelSpec
    table: WeightTable
    outer: Mapping[str, Share]
    layers: tuple[Mapping[str, Share], ...] = ()

    def share(self, axis: str, layer: int | None = None) -> Share:
        """This device's part of an axis that joins no others: all of one that is not split."""
        name, block = _divided(axis)
        share = self._split(name, layer)
        if share is not None:
            return share.by(block)
        extent = self.table.spec.extent(axis, layer)
        return Share(0, extent, extent)

    def _split(self, axis: str, layer: int | None) -> Share | None:
        own = self.layers[layer] if layer is not None and self.layers else {}
        return own.get(axis) or self.outer.get(axis)

    def extent(self, axis: str, layer: int | None = None) -> int:
        """Elements of an axis here, padding included; of a joined axis, the sum of its parts."""
        return sum(self.share(part, layer).extent for part in _parts(axis))

    def width(self, row: Row) -> int:
        """Elements here of a row's last axis; 1 of a single number."""
        return self.extent(row.axes[-1], row.layer) if row.axes else 1

    def shape(self, row: Row, axes: Sequence[str] | None = None) -> tuple[int, ...]:
        """Extents here of a row's weight, or of an array of its layer that has `axes`."""
        shape = tuple(self.extent(a, row.layer) for a in (row.axes if axes is None else axes))
        return (*shape[:-1], len(row.picks)) if axes is None and row.picks else shape

    def split_axis(self, row: Row, part: str = "data") -> int | None:
        """Index of the axis along which the devices' parts of the row's weight follow one another.

        The first of those that they share; None where each holds all of it.
        """
        return next(iter(self.split_axes(row, part)), None)

    def split_axes(self, row: Row, part: str = "data") -> list[int]:
        """Indices of the axes of a part of the row's weight that this device holds a share of."""
        return [
            i
            for i, axis in enumerate(row.parts[part])
            if any(self._split(_divided(name)[0], row.layer) for name in _parts(axis))
        ]

    def held(self, layer: int = 0) -> list["Held"]:
        """This device's shares of the axes that people know; nothing where it holds all.

        Of experts where they are shared out.
        """
        if self.size == 1:
            return []
        own = self.spec.all_layers[layer]
        heads = {}
        if own.attention is not None:
            key = (
                ("KV heads", "kv_heads")
                if own.attention.latent is None
                else ("latent width", "latent")
            )
            heads = dict([("query heads", "heads"), key])
        axes = {
            **heads,
            **(own.recurrence.held if own.recurrence else {}),
            **({"MLP width": "ffn"} if own.mlp is not None else {}),
            **({"experts": "experts"} if self._split("experts", layer) else {}),
            "vocabulary": "vocab",
        }
        return [
            Held(
                name,
                self.share(axis, layer).real,
                self.share(axis, layer).extent,
                self.table.spec.extent(axis, layer),
            )
            for name, axis in axes.items()
        ]

    def describe(self) -> str:
        """A text on this device's shares, for people, with padding; layers that are alike once."""
        firsts = {id(layer): i for i, layer in reversed(list(enumerate(self.spec.all_layers)))}
        kinds = {tuple(self.held(layer)): None for layer in sorted(firsts.values())}
        return "; ".join(
            ", ".join(f"{own.name} {own.extent} of {own.whole}" for own in held) for held in kinds
        )

    def reads(self, row: Row, part: Source) -> list["Read"]:
        """The reads of one stored tensor, in the order of the row's fused axis.

        One read, unless the tensor holds several blocks one after another, each split; none of a
        tensor that is stacked with others along an axis of which this device has another share.
        """
        if part.index is not None:
            stacked = self.share(row.axes[0], row.layer)
            if not stacked.start <= part.index < stacked.stop:
                return []
        order = row.permutation(part)
        joined = next((i for i, axis in enumerate(part.axes) if len(_parts(axis)) > 1), None)
        whole = [self._slice(axis, row.layer) for axis in part.axes]
        if joined is None or "/" in part.axes[joined]:
            return [Read(part, tuple(whole), order, tuple(part.axes[i] for i in order))]
        names = _parts(part.axes[joined])
        if not any(self._split(_divided(name)[0], row.layer) for name in names):
            return [Read(part, tuple(whole), order, tuple(part.axes[i] for i in order))]
        sizes = [self.table.spec.extent(name, row.layer) for name in names]
        reads = []
        for name, start in zip(names, accumulate(sizes[:-1], initial=0), strict=True):
            share = self.share(name, row.layer)
            index, axes = list(whole), list(part.axes)
            index[joined] = slice(start + share.start, start + share.stop)
            axes[joined] = name
            reads.append(Read(part, tuple(index), order, tuple(axes[i] for i in order)))
        return reads

    def _slice(self, axis: str, layer: int | None) -> slice:
        """The part of a stored axis that is read; all of one whose joined parts are not split."""
        spec = self.table.spec
        joined, groups, block = _interleaved(axis)
        if groups:  # all of those in which this device has a part
            width = spec.extent(joined, layer) // _count(spec, groups, layer)
            share = self._groups(axis, layer).times(width).by(block)
        elif len(_parts(axis)) > 1:
            return slice(0, spec.extent(axis, layer))
        else:
            share = self.share(axis, layer)
        return slice(share.start, share.stop)

    def _groups(self, axis: str, layer: int | None) -> Share:
        """The groups of an interleaved axis in which this device's parts lie."""
        spec, (joined, groups, _) = self.table.spec, _interleaved(axis)
        count, starts, stops = _count(spec, groups, layer), [], []
        for name in _parts(joined):
            share, width = self.share(name, layer), spec.extent(name, layer) // count
            starts.append(share.start // width)
            stops.append(-(-share.stop // width))
        return Share(min(starts), max(stops), max(stops) - min(starts))

    def blocks(self, row: Row, read: "Read", array: Any) -> list[Any]:
        """`array`, as read and in the row's order of axes, as blocks to pad and join.

        One block, itself, unless the blocks are interleaved by group. Of NumPy, torch or JAX.
        """
        spec = self.table.spec
        for at, axis in enumerate(read.axes):
            joined, groups, block = _interleaved(axis)
            if groups:
                before, after = array.shape[:at], array.shape[at + 1 :]
                held, whole = self._groups(axis, row.layer), _count(spec, groups, row.layer)
                widths = [spec.extent(n, row.layer) // whole // block for n in _parts(joined)]
                grouped = array.reshape(*before, held.real, sum(widths), *after)
                everything, own = (slice(None),) * at, {}
                ends = accumulate(widths, initial=0)
                for name, (start, end) in zip(_parts(axis), pairwise(ends), strict=True):
                    width, share = end - start, self.share(name, row.layer)
                    part = grouped[(*everything, slice(None), slice(start, end))]
                    part = part.reshape(*before, held.real * width, *after)
                    first = share.start - held.start * width
                    own[name] = part[(*everything, slice(first, first + share.real))]
                return [own[name] for name in _in_order(row, axis)]
        return [array]

    def block_shapes(self, row: Row, read: "Read") -> list[tuple[int, ...]]:
        """The shape here, padding included, of each block that `blocks` gives."""
        for at, axis in enumerate(read.axes):
            if _interleaved(axis)[1]:
                return [
                    self.shape(row, (*read.axes[:at], name, *read.axes[at + 1 :]))
                    for name in _in_order(row, axis)
                ]
        return [self.shape(row, read.axes)]

    def places(
        self, row: Row, part: str, number: int, names: Sequence[str] | None = None
    ) -> np.ndarray:
        """The places of this device's elements in the whole axis of a part of the row: int [n].

        -1 for those of padding, and of axes that it joins beside `names`: by default those that no
        stored tensor has.
        """
        axis = row.parts[part][number]
        if names is None:
            own = [source for source in row.sources if source.part == part]
            names = [name for source in own for name in row.names_of(source, axis)]
        places, first = [], 0
        for name in _parts(axis):
            share = self.share(name, row.layer)
            found = np.full(share.extent, -1)
            if not names or _divided(name)[0] in names:
                found[: share.real] = first + np.arange(share.start, share.stop)
            places.append(found)
            first += self.table.spec.extent(name, row.layer)
        joined = np.concatenate(places)
        is_picked = row.picks and part == "data" and number == len(row.axes) - 1
        return joined[np.array(row.picks)] if is_picked else joined

    def made(self, row: Row) -> np.ndarray:
        """The values that the row's function gives to this device's share; zeros for padding."""
        assert callable(row.constant)
        table = row.constant(self.table.shape(row))
        for i in self.split_axes(row):
            places = self.places(row, "data", i)
            table = np.where(
                (places >= 0).reshape(-1, *[1] * (table.ndim - i - 1)), table.take(places, i), 0
            )
        return table

    def assemble(
        self,
        row: Row,
        found: list["Found"],
        place: Callable[[Any, tuple[int, ...]], Any],
        pad: Callable[[Any, tuple[int, ...]], Any],
        join: Callable[[list[Any], int], Any],
    ) -> Any:
        """This device's array of one part of the row's weight, of all that was read of that part.

        By the backend's functions: `place(array, order)` puts what was read on the device, its axes
        in that order; `pad` adds zeros up to a shape; `join` puts arrays side by side along an
        axis. `found` is emptied: what lies on the device needs no twin on the host.
        """
        source = found[0].read.source
        by_index: dict[int | None, list[Any]] = {}
        by_axis: dict[str, Any] = {}  # of blocks that are a part of a joined axis each
        joint = join_axis(row.axes)
        while found:
            read, array = found.pop(0)
            kept, order = sorted(read.order), read.order
            if len(kept) < array.ndim:  # axes of one element that the row has not
                array = array.reshape([array.shape[i] for i in kept])
                order = tuple(map(kept.index, order))
            blocks = self.blocks(row, read, place(array, order))
            shapes = self.block_shapes(row, read)
            own = by_index.setdefault(read.source.index, [])
            own += [pad(block, shape) for block, shape in zip(blocks, shapes, strict=True)]
            if source.part == "data" and source.index is None and len(read.axes) > joint:
                by_axis[read.axes[joint]] = own[-1]
        axis = join_axis(row.axes_of(source))
        names = _parts(row.axes[axis]) if row.axes else []
        if 0 < len(by_axis) < len(names) and all(n in names for n in by_axis):
            shapes = {
                n: self.shape(row, (*row.axes[:axis], n, *row.axes[axis + 1 :])) for n in names
            }
            some = next(iter(by_axis.values()))
            empty = some[(slice(None),) * axis + (slice(0, 0),)]
            by_index[None] = [by_axis[n] if n in by_axis else pad(empty, shapes[n]) for n in names]
        arrays = [own[0] if len(own) == 1 else join(own, axis) for own in by_index.values()]
        if source.index is None:
            return arrays[0]
        return pad(
            join([array[None] for array in arrays], 0), self.shape(row, row.parts[source.part])
        )


def _parts(axis: str) -> list[str]:
    """The axes that one joins; each is divided as the whole is, a literal extent joins nothing."""
    if "=" in axis:
        return [axis]
    joined, _, block = axis.partition(":")
    names = joined.partition("/")[0].split("+")
    return [f"{name}:{block}" for name in names] if block else names


def _divided(axis: str) -> tuple[str, int]:
    """The name of an axis, and how many of its elements have one here."""
    name, _, block = axis.partition(":")
    return name, int(block or 1)


def _interleaved(axis: str) -> tuple[str, str, int]:
    """The axes that one joins and by what they are interleaved, "" for nothing; and its block."""
    name, block = _divided(axis)
    joined, _, groups = name.partition("/")
    return joined, groups, block


def _count(spec: ModelSpec, groups: str, layer: int | None) -> int:
    """The number of groups an axis is interleaved by: the extent of another, or a number."""
    return int(groups) if groups.isdecimal() else spec.extent(groups, layer)


def _in_order(row: Row, axis: str) -> list[str]:
    """The parts of a joined axis as they follow one another in the row's, which may have others."""
    names = _parts(axis)
    by_axis = {_divided(name)[0]: name for name in names}
    fused = next(own for own in map(_parts, row.axes) if set(own) >= set(by_axis))
    return [by_axis[name] for name in fused if name in by_axis]


class Held(NamedTuple):
    """A device's part of what people count, as heads: `real` of `whole`, `extent` with padding."""

    name: str
    real: int
    extent: int
    whole: int


@dataclass(frozen=True)
class Read:
    """A part of a stored tensor, `source`: `index` of its axes, and `order`, which permutes them.

    `axes` are the names after that.
    """

    source: Source
    index: tuple[slice, ...]
    order: tuple[int, ...]
    axes: tuple[str, ...]


class Found(NamedTuple):
    """An array read from one stored tensor: NumPy's, or torch's where that lends it."""

    read: Read
    array: Any


def whole(table: WeightTable) -> Shard:
    """The shard of a single device."""
    return Shard(0, 1, table.spec, table, {})


def fit_blocks(plan: LoadPlan, shards: Sequence[Shard]) -> LoadPlan:
    """The plan with scales for blocks that no share and no joint of `shards` cuts.

    Where one does, a scale is repeated for smaller blocks; so nothing changes of what they mean.
    """

    def fit(row: Row, names: tuple[str, ...]) -> tuple[Row, tuple[str, ...]]:
        fitted = fit_row(row, shards)
        parts = [(source.part, name) for source, name in zip(row.sources, names, strict=True)]
        return fitted, tuple(
            at_blocks(n, fitted.blocks) if p in ("scale", "zero") else n for p, n in parts
        )

    return replace(plan, rows=tuple(fit(row, names) for row, names in plan.rows))


def fit_row(row: Row, shards: Sequence[Shard]) -> Row:
    """See `fit_blocks`."""
    scheme = row.scheme
    if scheme is None:
        return row
    rows, columns = row.blocks
    per_row = not columns  # then a scale for each row costs nothing
    rows = _uncut(row, row.axes[-2], rows, shards, per_row, not scheme.zero_code)
    if not scheme.groups:
        columns = _uncut(row, row.axes[-1], columns, shards, False, not scheme.zero_code)
    elif not scheme.zero_code and _pads(row, row.axes[-1], shards):
        row = row.with_groups(scheme.groups + 1)  # whose scale is zero, for columns of padding
    activation = scheme.activation
    if activation is not None and activation.block:
        width = activation.block
        shares = [shard.share(row.axes[-1], row.layer) for shard in shards]
        if any(share.real and share.start % width for share in shares):
            raise ConfigError(
                f"tensor_parallel.tp_size={shards[0].size}: inputs of {row.name} are quantized in "
                f"groups of {width}, and a device's share would end within one. Use a smaller "
                f"degree, or a tp_grain_size that {width} divides."
            )
    is_dynamic = activation is not None and activation.dynamic
    if is_dynamic and row.local_name == "cross_out.weight" and _reads_past(shards, row.layer):
        raise ConfigError(
            f"tensor_parallel.tp_size={shards[0].size}: inputs of {row.name} are quantized by the "
            "largest of them, and a device would have some that are of no head. Use at most "
            f"{shards[0].table.spec.extent('kv_heads', row.layer)}, or backend='torch'."
        )
    return row.with_blocks((rows, columns))


def pads_heads(shards: Sequence[Shard], layer: int | None) -> bool:
    """True if a device has query heads of padding, and a KV head that is real."""
    held = ((own.share("heads", layer), own.share("kv_heads", layer)) for own in shards)
    return any(keys.real and heads.real < heads.extent for heads, keys in held)


def _reads_past(shards: Sequence[Shard], layer: int | None) -> bool:
    """True if a device's query heads of padding read a real KV head: others read zeros."""
    held = ((own.share("heads", layer), own.share("kv_heads", layer)) for own in shards)
    return any(
        heads.real < keys.real * (heads.extent // max(1, keys.extent)) for heads, keys in held
    )


def _pads(row: Row, axis: str, shards: Sequence[Shard]) -> bool:
    """True if a device has padding behind its share of an axis."""
    shares = (shard.share(name, row.layer) for shard in shards for name in _parts(axis))
    return any(share.real < share.extent for share in shares)


def _uncut(
    row: Row, axis: str, block: int, shards: Sequence[Shard], per_row: bool, exact: bool
) -> int:
    """The largest block along an axis that divides `block` and that no share or joint cuts.

    `exact`: nor where padding begins, as codes of zero bits are not zero there but by their scale.
    """
    names = _parts(axis)
    exact = exact and _pads(row, axis, shards)
    if block == 1 or (block == 0 and len(names) == 1 and not exact):
        return block
    if block == 0 and per_row:
        return 1
    spec, edges = shards[0].table.spec, [block]
    groups = {
        group
        for source in row.sources
        for joined, group, _ in map(_interleaved, source.axes)
        if group and not {*names}.isdisjoint(joined.split("+"))
    }
    for shard in shards:
        for name in names:
            share = shard.share(name, row.layer)
            if share.real:
                edges.append(share.start)
            if len(names) > 1 or (shard._split(name, row.layer) and len(shards) > 1):
                edges.append(share.extent)
            if exact and share.real < share.extent:
                edges.append(share.real or share.extent)
            whole = spec.extent(name, row.layer)
            edges += [whole // _count(spec, g, row.layer) for g in groups]
            edges += [whole] if len(names) > 1 else []
    return gcd(*edges)
