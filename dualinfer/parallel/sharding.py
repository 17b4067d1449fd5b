"""The plan of tensor parallelism: which part of which axis each device holds.

Column-parallel products give a share of heads, of the MLP's width or of the vocabulary; the
row-parallel ones behind them take that share, and their results are summed over devices: twice a
layer. Axes are those of the weight table, so that one plan serves every family and both backends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..model.spec import Layer, ModelSpec
from ..model.weights import Row, Source, WeightTable

_WIDTHS = ("ffn", "gate", "up")


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


@dataclass(frozen=True)
class Shard:
    """What device `rank` of `size` holds: its share of each axis that is split, all of the others.

    `spec` is the model as this device computes it: with its own heads, slopes and MLP width.
    Padding is zeros, in the weights that make a value and in those that read it, so that it adds
    nothing.
    """

    rank: int
    size: int
    spec: ModelSpec
    shares: Mapping[str, Share]

    def extent(self, axis: str, table: WeightTable) -> int:
        """Elements of an axis here, padding included; of a joined axis, the sum of its parts."""
        return sum(
            self.shares[part].extent if part in self.shares else table.sizes[part]
            for part in axis.partition("/")[0].split("+")
        )

    def shape(self, axes: Sequence[str], table: WeightTable) -> tuple[int, ...]:
        """Extents of an array with these axes here."""
        return tuple(self.extent(axis, table) for axis in axes)

    def split_axis(self, row: Row) -> int | None:
        """Index of the row's axis of which this device holds a part; None where it holds all."""
        shared = (not self.shares.keys().isdisjoint(axis.split("+")) for axis in row.axes)
        return next((i for i, is_shared in enumerate(shared) if is_shared), None)

    def held(self, table: WeightTable) -> list["Held"]:
        """What this device holds of the axes that people know; nothing where it holds all."""
        if not self.shares:
            return []
        head_dim = self.spec.layers[0].attention.head_dim
        width = "up" if "up" in self.shares else "ffn"
        units = (
            ("query heads", "q", head_dim),
            ("KV heads", "k", head_dim),
            ("MLP width", width, 1),
            ("vocabulary", "vocab", 1),
        )
        return [
            Held(
                name,
                self.shares[axis].real // unit,
                self.shares[axis].extent // unit,
                table.sizes[axis] // unit,
            )
            for name, axis, unit in units
        ]

    def describe(self, table: WeightTable) -> str:
        """What this device holds, for people, padding included."""
        return ", ".join(f"{own.name} {own.extent} of {own.whole}" for own in self.held(table))

    def reads(self, row: Row, part: Source, table: WeightTable) -> list["Read"]:
        """What to read of one stored tensor, in the order of the row's fused axis.

        One read, unless the tensor holds several blocks one after another, each split.
        """
        joined = next((i for i, axis in enumerate(part.axes) if "+" in axis), None)
        if joined is None or "/" in part.axes[joined]:
            blocks = [None]
        else:
            names = part.axes[joined].split("+")
            sizes = [table.sizes[name] for name in names]
            starts = accumulate(sizes[:-1], initial=0)
            if not any(name in self.shares for name in names):
                names, sizes, starts = ["+".join(names)], [sum(sizes)], [0]
            blocks = list(zip(names, sizes, starts, strict=True))
        order = row.permutation(part)
        reads = []
        for block in blocks:
            index, axes = [], []
            for i, axis in enumerate(part.axes):
                if block is not None and i == joined:
                    name, size, start = block
                    share = self.shares.get(name, Share(0, size, size))
                    index.append(slice(start + share.start, start + share.stop))
                    axes.append(name)
                else:
                    index.append(self._slice(axis, table))
                    axes.append(axis)
            reads.append(Read(tuple(index), order, tuple(axes[i] for i in order)))
        return reads

    def _slice(self, axis: str, table: WeightTable) -> slice:
        joined, _, heads = axis.partition("/")
        if heads and heads in self.shares:  # each head's blocks lie together
            width = sum(table.sizes[name] for name in joined.split("+")) // table.sizes[heads]
            share = self.shares[heads].times(width)
        elif axis in self.shares:
            share = self.shares[axis]
        else:
            return slice(0, table.size(axis))
        return slice(share.start, share.stop)

    def blocks(self, read: "Read", array: Any, table: WeightTable) -> list[Any]:
        """`array`, as read and in the row's order of axes, as blocks to pad and join.

        One block, itself, unless the blocks are interleaved by head. Of NumPy, torch or JAX.
        """
        for at, axis in enumerate(read.axes):
            joined, _, heads = axis.partition("/")
            if heads:
                before, after = array.shape[:at], array.shape[at + 1 :]
                count = self.shares[heads].real if heads in self.shares else table.sizes[heads]
                widths = [table.sizes[name] // table.sizes[heads] for name in joined.split("+")]
                grouped = array.reshape(*before, count, sum(widths), *after)
                everything = (slice(None),) * (at + 1)
                return [
                    grouped[(*everything, slice(start, end))].reshape(
                        *before, count * (end - start), *after
                    )
                    for start, end in pairwise(accumulate(widths, initial=0))
                ]
        return [array]

    def block_shapes(self, read: "Read", table: WeightTable) -> list[tuple[int, ...]]:
        """The shape here, padding included, of each block that `blocks` gives."""
        for at, axis in enumerate(read.axes):
            joined, _, heads = axis.partition("/")
            if heads:
                return [
                    self.shape((*read.axes[:at], name, *read.axes[at + 1 :]), table)
                    for name in joined.split("+")
                ]
        return [self.shape(read.axes, table)]


class Held(NamedTuple):
    """A device's part of what people count, as heads: `real` of `whole`, `extent` with padding."""

    name: str
    real: int
    extent: int
    whole: int


def whole(spec: ModelSpec) -> Shard:
    """The shard of a single device."""
    return Shard(0, 1, spec, {})


@dataclass(frozen=True)
class Read:
    """A part of one stored tensor: `index` of its axes, and `order`, which permutes them.

    `axes` are the names after that.
    """

    index: tuple[slice, ...]
    order: tuple[int, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """How a model is split over devices: a shard for each."""

    table: WeightTable
    shards: tuple[Shard, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.shards)


def make_plan(
    spec: ModelSpec, table: WeightTable, size: int = 1, grain: int = 64, equal: bool = False
) -> Plan:
    """The plan of a model over `size` devices.

    KV heads stay whole, with their query heads; where devices outnumber them, several devices hold
    the same one and share its query heads. Widths of the MLP and of the vocabulary are multiples of
    `grain` but for a rest at the end, as long as every device has one. With `equal` all shards have
    the same extents (JAX), else they are as even as that allows (torch). Devices beyond the heads
    hold one of zeros.
    """
    if size == 1:
        return Plan(table, (whole(spec),))
    kinds = {(a.heads, a.kv_heads, a.head_dim) for a in (x.attention for x in spec.layers)}
    assert len(kinds) == 1, "the axes of a table have one size"
    heads, kv_heads, head_dim = kinds.pop()
    query, key = split_heads(heads, kv_heads, size, equal)
    split = _equal if equal else split_evenly
    vocab = split(table.sizes["vocab"], size, grain)
    widths = {n: split(table.sizes[n], size, grain) for n in _WIDTHS if n in table.sizes}
    for name, shares in ({"vocab": vocab} | widths).items():
        if not all(share.extent for share in shares):
            raise ConfigError(
                f"tensor_parallel.tp_size={size}: {spec.architecture} has {name} of "
                f"{table.sizes[name]}, which is less than one for each device. Use a smaller one."
            )
    kinds_of_layer = list({id(layer): layer for layer in spec.layers}.values())
    shards = []
    for rank in range(size):
        kv = key[rank].times(head_dim)
        shares = {
            "vocab": vocab[rank],
            "q": query[rank].times(head_dim),
            "k": kv,
            "v": kv,
            **{name: width[rank] for name, width in widths.items()},
        }
        if "heads" in table.sizes:
            shares["heads"] = query[rank]
        ffn = next(iter(widths.values()))[rank].extent
        alike = {id(x): _local_layer(x, query[rank], key[rank], ffn) for x in kinds_of_layer}
        local = tuple(alike[id(layer)] for layer in spec.layers)
        shards.append(Shard(rank, size, replace(spec, layers=local), shares))
    return Plan(table, tuple(shards))


def _local_layer(layer: Layer, query: Share, key: Share, ffn: int) -> Layer:
    slopes = layer.attention.alibi
    if slopes is not None:
        slopes = slopes[query.start : query.stop] + (0.0,) * (query.extent - query.real)
    attention = replace(layer.attention, heads=query.extent, kv_heads=key.extent, alibi=slopes)
    return replace(layer, attention=attention, mlp=replace(layer.mlp, ffn=ffn))


def split_heads(
    heads: int, kv_heads: int, size: int, equal: bool
) -> tuple[list[Share], list[Share]]:
    """Shares of query heads and of KV heads."""
    group = heads // kv_heads
    if size <= kv_heads:
        key = (_equal if equal else split_evenly)(kv_heads, size, 1)
        return [share.times(group) for share in key], key
    query, key = [], []
    for kv, sharers in enumerate(split_evenly(size, kv_heads, 1)):
        for part in split_evenly(group, sharers.real, 1):
            start = kv * group + part.start
            query.append(Share(start, start + part.real, max(part.real, 1)))
            key.append(Share(kv, kv + bool(part.real), 1))
    if equal:
        widest = max(share.extent for share in query)
        query = [replace(share, extent=widest) for share in query]
    return query, key


def split_evenly(size: int, parts: int, grain: int) -> list[Share]:
    """Shares that differ by one grain at most, and a rest at the end; by one where grains lack."""
    if size < grain * parts:
        grain = 1
    count, rest = divmod(size, grain)
    grains = [count // parts + (i < count % parts) for i in range(parts)]
    ends = list(accumulate(n * grain for n in grains))
    ends[-1] += rest
    return [Share(a, b, b - a) for a, b in pairwise([0, *ends])]


def _equal(size: int, parts: int, grain: int) -> list[Share]:
    """Shares of one extent; the last ones are padded."""
    if size < grain * parts:
        grain = 1
    extent = -(-size // (parts * grain)) * grain
    bounds = [min(i * extent, size) for i in range(parts + 1)]
    return [Share(a, b, extent) for a, b in pairwise(bounds)]
