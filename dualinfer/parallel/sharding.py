"""The plan of tensor parallelism: which part of which axis each device holds.

Column-parallel products give a share of heads, of the MLP's width or of the vocabulary; the
row-parallel ones behind them take that share, and their results are summed over devices: twice a
layer. Axes are those of the weight table, so that one plan serves every family and both backends.

Of a mixture's experts devices have a share of the width, or whole ones: `expert_parts` parts of
the experts, each of which as many devices as are left share by its width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..model.load_plan import LoadPlan
from ..model.spec import Experts, Layer, ModelSpec
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
    """What device `rank` of `size` holds: its share of each axis that is split, all of the others.

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
        """What this device holds of the axes that people know; nothing where it holds all.

        Of experts where they are shared out.
        """
        if self.size == 1:
            return []
        is_latent = self.spec.all_layers[layer].attention.latent is not None
        axes = {
            "query heads": "heads",
            **({"latent width": "latent"} if is_latent else {"KV heads": "kv_heads"}),
            "MLP width": "ffn",
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
        """What this device holds, for people, padding included; layers that are alike once."""
        firsts = {id(layer): i for i, layer in reversed(list(enumerate(self.spec.all_layers)))}
        kinds = {tuple(self.held(layer)): None for layer in sorted(firsts.values())}
        return "; ".join(
            ", ".join(f"{own.name} {own.extent} of {own.whole}" for own in held) for held in kinds
        )

    def reads(self, row: Row, part: Source) -> list["Read"]:
        """What to read of one stored tensor, in the order of the row's fused axis.

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
    """How many groups an axis is interleaved by: the extent of another, or a number."""
    return int(groups) if groups.isdecimal() else spec.extent(groups, layer)


def _in_order(row: Row, axis: str) -> list[str]:
    """The parts of a joined axis as they follow one another in the row's."""
    names = _parts(axis)
    by_axis = {_divided(name)[0]: name for name in names}
    fused = next(own for own in map(_parts, row.axes) if set(own) == set(by_axis))
    return [by_axis[name] for name in fused]


class Held(NamedTuple):
    """A device's part of what people count, as heads: `real` of `whole`, `extent` with padding."""

    name: str
    real: int
    extent: int
    whole: int


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
    return row.with_blocks((rows, columns))


def _uncut(
    row: Row, axis: str, block: int, shards: Sequence[Shard], per_row: bool, exact: bool
) -> int:
    """The largest block along an axis that divides `block` and that no share or joint cuts.

    `exact`: nor where padding begins, as codes of zero bits are not zero there.
    """
    names = _parts(axis)
    if block == 1 or (block == 0 and len(names) == 1):
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
                edges.append(share.real)
            whole = spec.extent(name, row.layer)
            edges += [whole // _count(spec, g, row.layer) for g in groups]
            edges += [whole] if len(names) > 1 else []
    return gcd(*edges)


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
    """What was read of one stored tensor: NumPy's, or torch's where that lends it."""

    read: Read
    array: Any


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is split over devices: a shard for each."""

    table: WeightTable
    shards: tuple[Shard, ...]
    expert_parts: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.shards)

    def key_parts(self, layer: int) -> list[float]:
        """Of each device, the part that its KV heads have in a sum over all devices.

        Less than 1 where several devices hold the same ones, 0 where one holds padding alone.
        """
        held = [shard.share("k", layer) for shard in self.shards]
        return [1 / held.count(own) if own.real else 0.0 for own in held]

    def own_experts(self, count: int) -> list[Share] | None:
        """Of each device the share of a layer's `count` experts; None where each has all of them.

        Layers of as many experts are shared out alike.
        """
        if self.expert_parts == 1:
            return None
        layers = enumerate(self.table.spec.all_layers)
        layer = next(i for i, own in layers if own.experts == count)
        return [shard.share("experts", layer) for shard in self.shards]


class Place(NamedTuple):
    """Which part of the experts a device has, and which part of their width, by number."""

    part: int
    width: int


def make_places(size: int, parts: int) -> list[Place]:
    """The places of `size` devices that share experts out in `parts`: ranks in a row have each one.

    So `parts` ranks in a row hold all experts, as DeepSpeed's groups do.
    """
    return [Place(rank % parts, rank // parts) for rank in range(size)]


def make_plan(
    table: WeightTable,
    size: int = 1,
    grain: int = 64,
    equal: bool = False,
    expert_parts: int = 1,
    places: Sequence[Place] | None = None,
) -> ShardingPlan:
    """The plan of a model over `size` devices.

    KV heads stay whole, with their query heads; where devices outnumber them, several devices hold
    the same one and share its query heads. Widths of MLPs and of the vocabulary are multiples of
    `grain` but for a rest at the end, as long as every device has one. With `equal` all shards have
    the same extents (JAX), else they are as even as that allows (torch). Devices beyond the heads
    hold one of zeros. Layers may differ: each is split for itself. Experts are shared out in
    `expert_parts`, which divides `size`: `places` says which device has what, unset `make_places`.
    """
    if size == 1:
        return ShardingPlan(table, (whole(table),))
    spec, devices = table.spec, size // expert_parts
    split = _equal if equal else split_evenly
    places = make_places(size, expert_parts) if places is None else places

    def width(name: str, extent: int, parts: int = size) -> list[Share]:
        shares = split(extent, parts, grain)
        if not all(share.extent for share in shares):
            raise ConfigError(
                f"tensor_parallel.tp_size={size}: {spec.architecture} has {name} of {extent}, "
                "which is less than one for each device. Use a smaller one."
            )
        return shares

    def of_experts(mlp: Experts) -> Iterator[tuple[Share, Share]]:
        """Each device's share of experts, and of their width."""
        own = [Share(0, mlp.ffn, mlp.ffn)]
        if devices > 1:
            own = width("gate" if mlp.gated else "ffn", mlp.ffn, devices)
        experts = split_evenly(mlp.count, expert_parts, 1)
        if equal:
            most = max(share.extent for share in experts)
            experts = [replace(share, extent=most) for share in experts]
        yield from ((experts[place.part], own[place.width]) for place in places)

    none = Share(0, 0, 0)  # of a model that reads no ids
    vocab = width("vocab", spec.vocab) if spec.vocab else [none] * size
    by_kind: dict[tuple[int, ...], list[_Cut]] = {}
    cuts = {}  # of each layer; most models repeat one object
    for key, layer in {id(layer): layer for layer in spec.all_layers}.items():
        a = layer.attention
        mlp = layer.mlp
        shared = mlp.shared if isinstance(mlp, Experts) else 0
        kind = a.heads, a.kv_heads, a.head_dim, mlp.ffn, shared, layer.experts
        if kind not in by_kind:
            heads = split_heads(a.heads, a.kv_heads, size, equal)
            all_have = width("shared", shared) if shared else [Share(0, 0, 0)] * size
            experts: Sequence[Share | None] = [None] * size
            if isinstance(mlp, Experts) and expert_parts > 1:
                experts, ffn = zip(*of_experts(mlp), strict=True)
            else:
                ffn = width("gate" if mlp.gated else "ffn", mlp.ffn)
            by_kind[kind] = [_Cut(*own) for own in zip(*heads, ffn, all_have, experts, strict=True)]
        cuts[key] = layer, by_kind[kind]
    shards = []
    for rank in range(size):
        local = {key: cut[rank].layer(layer) for key, (layer, cut) in cuts.items()}
        shares = {key: cut[rank].shares(layer) for key, (layer, cut) in cuts.items()}
        own = spec.with_layers([local[id(layer)] for layer in spec.all_layers])
        by_layer = tuple(shares[id(layer)] for layer in spec.all_layers)
        shards.append(Shard(rank, size, own, table, {"vocab": vocab[rank]}, by_layer))
    return ShardingPlan(table, tuple(shards), expert_parts)


class _Cut(NamedTuple):
    """One device's part of layers of one kind: its query heads, KV heads and MLP widths.

    The latter are those of the MLP or of every expert, and of an expert that all tokens share.
    `experts` are those that it has, None for all.
    """

    query: Share
    key: Share
    ffn: Share
    shared: Share
    experts: Share | None

    def shares(self, layer: Layer) -> dict[str, Share]:
        """By the names of axes."""
        q, k, v = layer.attention.head_widths
        experts = {} if self.experts is None else {"experts": self.experts}
        is_whole = self.experts and self.ffn == Share(0, layer.mlp.ffn, layer.mlp.ffn)
        return {
            **experts,
            **{"heads": self.query, "kv_heads": self.key},
            **{"q": self.query.times(q), "k": self.key.times(k), "v": self.key.times(v)},
            **({} if is_whole else dict.fromkeys(("ffn", "gate", "up"), self.ffn)),
            **dict.fromkeys(("shared", "shared_gate", "shared_up"), self.shared),
        }

    def layer(self, layer: Layer) -> Layer:
        """The layer as this device computes it."""
        query, slopes = self.query, layer.attention.alibi
        if slopes is not None:
            slopes = slopes[query.start : query.stop] + (0.0,) * (query.extent - query.real)
        heads = {"heads": query.extent, "kv_heads": self.key.extent, "alibi": slopes}
        attention = replace(layer.attention, **heads)
        cross = replace(layer.cross, **heads) if layer.cross else None
        mlp = replace(layer.mlp, ffn=self.ffn.extent)
        if isinstance(mlp, Experts):
            mlp = replace(mlp, shared=self.shared.extent)
        return replace(layer, attention=attention, mlp=mlp, cross=cross)


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
