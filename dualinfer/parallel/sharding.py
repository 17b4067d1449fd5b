"""The plan of tensor parallelism: which part of which axis each device holds.

Column-parallel products give a share of heads, of the MLP's width or of the vocabulary; the
row-parallel ones behind them take that share, and their results are summed over devices: twice a
layer.

Of a mixture's experts devices have a share of the width, or whole ones: `expert_parts` parts of
the experts, each of which as many devices as are left share by its width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

from ..errors import ConfigError
from ..model.spec import Attention, Experts, Layer, Mlp, Recurrence
from ..model.weights import WeightTable
from .shard import Shard, Share, whole


@dataclass(frozen=True)
class ShardingPlan:
    """The split of a model over devices: a shard for each."""

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


@dataclass(frozen=True)
class Devices:
    """The devices that share a model, and how they share axes out.

    Widths are in multiples of `grain`, and with `equal` all shares have one extent, as `make_plan`
    says.
    """

    size: int
    grain: int
    equal: bool
    asked_by: str
    architecture: str

    def width(self, name: str, extent: int, parts: int = 0) -> list[Share]:
        """Shares of a width that people know by a name; of `parts` devices, 0 for all.

        Raises ConfigError where a device would have none.
        """
        parts = parts or self.size
        shares = (_equal if self.equal else split_evenly)(extent, parts, self.grain)
        if not all(share.extent for share in shares):
            raise ConfigError(
                f"{self.asked_by}={self.size}: {self.architecture} has {name} of {extent}, which "
                f"is less than one for each of the {parts} devices that share it. Use fewer."
            )
        return shares

    def heads(self, heads: int, kv_heads: int) -> tuple[list[Share], list[Share]]:
        """Shares of query heads and of KV heads, which stay together."""
        return split_heads(heads, kv_heads, self.size, self.equal)


class Place(NamedTuple):
    """The part of the experts that a device has, and the part of their width, by number."""

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
    asked_by: str = "tensor_parallel.tp_size",
) -> ShardingPlan:
    """The plan of a model over `size` devices.

    KV heads stay whole, with their query heads; where devices outnumber them, several devices hold
    the same one and share its query heads; of halves of heads that are subtracted, both parts of a
    pair. Widths of MLPs and of the vocabulary are multiples of
    `grain` but for a rest at the end, as long as every device has one. With `equal` all shards have
    the same extents (JAX), else they are as even as that allows (torch). Devices beyond the heads
    hold one of zeros. Layers may differ: each is split for itself. Experts are shared out in
    `expert_parts`, which divides `size`: `places` says which device has what, unset `make_places`.
    Raises ConfigError, in which `asked_by` is the field that says `size`, where that is too many.
    """
    if size == 1:
        return ShardingPlan(table, (whole(table),))
    spec, devices = table.spec, size // expert_parts
    shared_by = Devices(size, grain, equal, asked_by, spec.architecture)
    width = shared_by.width
    places = make_places(size, expert_parts) if places is None else places

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

    none = Share(0, 0, 0)  # of what a model or a layer has not
    vocab = width("vocab", spec.vocab) if spec.vocab else [none] * size
    by_kind: dict[Any, list[_Cut]] = {}
    cuts = {}  # of each layer; most models repeat one object
    for key, layer in {id(layer): layer for layer in spec.all_layers}.items():
        a, mlp = layer.attention, layer.mlp
        shared = mlp.shared if isinstance(mlp, Experts) else 0
        kind = (
            a and (a.heads, a.kv_heads, a.head_dim),
            mlp and (mlp.ffn, shared, layer.experts),
            layer.recurrence,
        )
        if a is not None and a.wiring is not None and a.wiring.why_whole and size > a.kv_heads:
            raise ConfigError(
                f"{asked_by}={size}: {spec.architecture} has {a.kv_heads} KV heads, and "
                f"{a.wiring.why_whole}, which devices do not share within a KV head. Use at most "
                f"{a.kv_heads}."
            )
        if kind not in by_kind:
            heads = [none] * size, [none] * size
            if a is not None:
                heads = shared_by.heads(a.heads // a.halves, a.kv_heads // a.halves)
            all_have = width("shared", shared) if shared else [none] * size
            experts: Sequence[Share | None] = [None] * size
            if mlp is None:
                ffn = [none] * size
            elif isinstance(mlp, Experts) and expert_parts > 1:
                experts, ffn = zip(*of_experts(mlp), strict=True)
            else:
                ffn = width("gate" if mlp.gated else "ffn", mlp.ffn)
            recurrent: Sequence[_Part | None] = [None] * size
            if layer.recurrence is not None:
                recurrent = layer.recurrence.share(shared_by)
            own = *heads, ffn, all_have, experts, recurrent
            by_kind[kind] = [_Cut(*parts) for parts in zip(*own, strict=True)]
        cuts[key] = layer, by_kind[kind]
    shards = []
    for rank in range(size):
        local = {key: cut[rank].layer(layer) for key, (layer, cut) in cuts.items()}
        shares = {key: cut[rank].shares(layer) for key, (layer, cut) in cuts.items()}
        own = spec.with_layers([local[id(layer)] for layer in spec.all_layers])
        by_layer = tuple(shares[id(layer)] for layer in spec.all_layers)
        shards.append(Shard(rank, size, own, table, {"vocab": vocab[rank]}, by_layer))
    return ShardingPlan(table, tuple(shards), expert_parts)


# One device's part of a recurrence: what it computes, and its shares by the names of axes.
_Part: TypeAlias = tuple[Recurrence, Mapping[str, Share]]


class _Cut(NamedTuple):
    """One device's part of layers of one kind: its query heads, KV heads and MLP widths.

    The latter are those of the MLP or of every expert, and of an expert that all tokens share.
    `experts` are those that it has, None for all. Where one half of heads is subtracted from the
    other, heads are pairs of both. `recurrent` is its part of a recurrence.
    """

    query: Share
    key: Share
    ffn: Share
    shared: Share
    experts: Share | None
    recurrent: _Part | None

    def shares(self, layer: Layer) -> dict[str, Share]:
        """By the names of axes."""
        streams: dict[str, Share] = {}
        if layer.block is not None:
            streams |= layer.block.share(layer, self.query)
        for edit in layer.edits:
            streams |= edit.share(layer, self.query)
        if self.recurrent is not None:
            streams |= self.recurrent[1]
        return self._of_attention(layer.attention) | self._of_mlp(layer.mlp) | streams

    def _of_attention(self, a: Attention | None) -> dict[str, Share]:
        if a is None:
            return {}
        (q, k, v), query, key = a.head_widths, self.query, self.key
        own = dict(a.wiring.share(a, query, key)) if a.wiring is not None else {}
        query, key = query.times(a.halves), key.times(a.halves)
        return {
            **own,
            **{"heads": query, "kv_heads": key},
            **{"q": query.times(q), "k": key.times(k), "v": key.times(v)},
            "given": query.times(v),
        }

    def _of_mlp(self, mlp: Mlp | Experts | None) -> dict[str, Share]:
        if mlp is None:
            return {}
        found: dict[str, Share] = {}
        found |= dict.fromkeys(("shared", "shared_gate", "shared_up"), self.shared)
        if self.experts is not None:
            found["experts"] = self.experts
        if self.experts is None or self.ffn != Share(0, mlp.ffn, mlp.ffn):
            found |= dict.fromkeys(("ffn", "gate", "up"), self.ffn)
        return found

    def layer(self, layer: Layer) -> Layer:
        """The layer as this device computes it."""
        mlp = layer.mlp.of_width(self.ffn.extent) if layer.mlp is not None else None
        if isinstance(mlp, Experts):
            mlp = replace(mlp, shared=self.shared.extent)
        return replace(
            layer,
            attention=self._attends(layer.attention),
            cross=self._attends(layer.cross),
            mlp=mlp,
            recurrence=None if self.recurrent is None else self.recurrent[0],
        )

    def _attends(self, a: Attention | None) -> Attention | None:
        if a is None:
            return None
        query, slopes = self.query, a.alibi
        if slopes is not None:
            slopes = slopes[query.start : query.stop] + (0.0,) * (query.extent - query.real)
        heads, kv_heads = a.halves * query.extent, a.halves * self.key.extent
        return replace(a, heads=heads, kv_heads=kv_heads, alibi=slopes)


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
