"""A table of each device's part under tensor parallelism, for people, by a model's config alone."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..arrays import numpy_dtype
from ..backends.held import describe_rows, held_bytes, read_share
from ..backends.streaming import Streaming, choose_layers
from ..config import InferenceConfig
from ..model.spec import Experts, Layer
from ..model.weights import Row, WeightTable
from ..ops.caches import (
    LAYOUTS,
    KeptIn,
    cache_specs,
    check_kinds,
    describe_caches,
    state_bytes,
    token_bytes,
)
from ..parallel.experts import describe_experts
from ..parallel.shard import Held, Shard, fit_row, whole
from ..parallel.sharding import ShardingPlan, make_plan


@dataclass(frozen=True)
class PlanRow:
    """One weight, or that of `count` equal layers, whose numbers `name` has, as `layers.0-31.`.

    `shape` is the whole, `shapes` what each device holds, padding included, and `split` the axes
    that they share; None where each has all of it. `size` are the bytes of the whole, all layers.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    split: str | None
    count: int
    size: int


@dataclass(frozen=True)
class DevicePart:
    """The part of one device: bytes of weights and, for each token, of the cache; its shares.

    `cache` is None where it is a module's own.
    """

    weights: int
    cache: int | None
    shares: tuple[Held, ...]


@dataclass(frozen=True)
class PlanTable:
    """A model over devices. `sums` and `gathers` are the collectives of one token's pass.

    A sum is of `sum_size` bytes, in the weights' dtype; a gather joins the logits. `weights` says
    how the whole is held, as an engine's report does, and `streaming` what each device streams from
    host memory, empty where that is not asked for. `active` are the bytes of weights that so many
    tokens at once are expected to read of a mixture, without embeddings; empty where that is all.
    """

    architecture: str
    dtype: str
    rows: tuple[PlanRow, ...]
    devices: tuple[DevicePart, ...]
    whole: int
    sums: int
    sum_size: int
    gathers: int
    notes: tuple[str, ...]
    weights: dict[str, str]
    is_quantized: bool
    streaming: tuple[Streaming, ...] = ()
    active: Mapping[int, int] = field(default_factory=dict)


def make_plan_table(
    table: WeightTable,
    size: int,
    dtype: str,
    grain: int,
    equal: bool = False,
    rows: Sequence[Row] | None = None,
    settings: InferenceConfig | None = None,
    free: int | None = None,
    expert_parts: int = 1,
) -> PlanTable:
    """The table of a model over `size` devices.

    `grain`, `equal` and `expert_parts` are as in `sharding.make_plan`.

    `rows` are those of the table that a checkpoint fills, unset: all. `settings` may ask for
    streaming, and `free` are the bytes of a device that has the room for nothing else.
    """
    rows = table.rows if rows is None else rows
    settings = InferenceConfig() if settings is None else settings
    spec, asked_by = table.spec, settings.tensor_parallel.asked_by
    plan = make_plan(table, size, grain, equal, expert_parts, asked_by=asked_by)
    itemsize = numpy_dtype(dtype).itemsize
    kept = KeptIn.of(settings)
    own = [fit_row(row, plan.shards) for row in rows] if equal else rows
    layers = spec.all_layers
    # Rows of the same axes have the same shapes in layers that are one object.
    kinds = [
        (
            row.axes,
            row.scheme,
            *row.parts,
            row.layer if row.layer is None else id(layers[row.layer]),
        )
        for row in own
    ]
    firsts = dict(zip(reversed(kinds), reversed(own), strict=True))
    planned = {kind: _plan_row(row, plan, itemsize) for kind, row in firsts.items()}
    shown = [replace(planned[kind], name=row.name) for kind, row in zip(kinds, rows, strict=True)]
    counts = [(firsts[kind], count) for kind, count in Counter(kinds).items()]
    products = sum(map(_sums, layers))
    from_vocab = 1 + (spec.embedding.types == "vocab")
    if spec.crosses and spec.encoder is not None:
        # A table of another vocabulary is whole on each device.
        tables = [row for row in rows if row.name == "encoder.embed.weight"]
        from_vocab += spec.encoder.reads_ids and all(row.axes[0] == "vocab" for row in tables)
    return PlanTable(
        architecture=spec.architecture,
        dtype=dtype,
        rows=tuple(_joined_layers(rows, shown)),
        devices=tuple(_part(shard, itemsize, counts, kept) for shard in plan.shards),
        whole=sum(row.size for row in shown),
        sums=0 if size == 1 else products + from_vocab,
        sum_size=spec.embed * itemsize,
        gathers=int(size > 1 and spec.head is not None),
        notes=(
            *_notes(plan, rows),
            *describe_experts(plan),
            *_cache_notes(plan, kept, itemsize),
        ),
        weights=describe_rows(rows, whole(table), dtype),
        is_quantized=any(row.scheme is not None for row in rows),
        streaming=tuple(
            found
            for shard in plan.shards
            if (found := choose_layers(settings, shard, own, itemsize, free)) is not None
        ),
        active=_active(table, rows, itemsize),
    )


def _sums(layer: Layer) -> int:
    """Sums over the devices of a layer, one of each product back; not those that norms share."""
    if layer.block is not None:
        return layer.block.sums
    mlp = layer.mlp
    more = mlp.mixing.sums if isinstance(mlp, Experts) and mlp.mixing else 0
    parts = layer.attention, layer.recurrence, mlp, layer.cross
    return sum(own is not None for own in parts) + more


_TOKENS = (1, 8, 64)  # of a step: what one reads, and what sequences that run together do


def _active(table: WeightTable, rows: Sequence[Row], itemsize: int) -> dict[int, int]:
    """The bytes that so many tokens read of a mixture's weights; nothing without a mixture."""
    spec = table.spec
    if not any(isinstance(layer.mlp, Experts) for layer in spec.layers):
        return {}
    tied = {name for _, name in table.tied}
    read = [
        row
        for row in rows
        if row.name not in ("embed.weight", "positions.weight")
        or any(source.name in tied for source in row.sources)
    ]
    sizes = [(held_bytes(whole(table), row, itemsize), row) for row in read]
    return {
        tokens: round(sum(size * read_share(spec, row, tokens) for size, row in sizes))
        for tokens in _TOKENS
    }


def _plan_row(row: Row, plan: ShardingPlan, itemsize: int) -> PlanRow:
    shape = plan.table.shape(row)
    split = [row.axes[i] for i in plan.shards[0].split_axes(row)]
    return PlanRow(
        name=row.name,
        axes=row.axes,
        shape=shape,
        shapes=tuple(shard.shape(row) for shard in plan.shards),
        split=", ".join(split) or None,
        count=1,
        size=held_bytes(whole(plan.table), row, itemsize),
    )


def _joined_layers(table: Sequence[Row], rows: Sequence[PlanRow]) -> Iterator[PlanRow]:
    """Rows outside the layers, then those of each run of equal layers once."""
    layers: dict[int, list[PlanRow]] = {}
    for own, row in zip(table, rows, strict=True):
        if own.layer is None:
            yield row
        else:
            layers.setdefault(own.layer, []).append(replace(row, name=own.local_name))
    for own, run in groupby(sorted(layers), key=lambda number: layers[number]):
        numbers = list(run)
        many = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        for row in own:
            count = len(numbers)
            name = f"layers.{many}.{row.name}"
            yield replace(row, name=name, count=count, size=row.size * count)


def _part(
    shard: Shard, itemsize: int, counts: Sequence[tuple[Row, int]], kept: KeptIn
) -> DevicePart:
    """The part of a device; `counts` has a row of each kind, and how many there are of it."""
    weights = sum(count * held_bytes(shard, row, itemsize) for row, count in counts)
    cache = 0
    if shard.spec.causal:
        cache = token_bytes(cache_specs(shard.spec, kept), itemsize)
    layers = enumerate(shard.spec.all_layers)
    mixture = next((i for i, layer in layers if layer.experts), 0)
    shares = shard.held(mixture)
    if not any(own.name == "experts" for own in shares):
        shares = shard.held()
    return DevicePart(weights, cache, tuple(shares))


def _cache_notes(plan: ShardingPlan, kept: KeptIn, itemsize: int) -> Iterator[str]:
    """Notes on the cache where it keeps codes, states, or what all heads share."""
    spec, size = plan.table.spec, plan.size
    if not spec.causal:
        return
    if states := state_bytes(cache_specs(plan.shards[0].spec, kept), itemsize):
        on_each = " on each device" if size > 1 else ""
        yield f"cache: {states:,} bytes of states as well for each sequence of any length{on_each}"
    specs = cache_specs(spec, kept)
    check_kinds(specs, LAYOUTS, "torch")
    if size > 1 and any(own.kind == "latent" for own in specs):
        yield "cache: latent vectors, which all heads read, so that each device holds all of them"
    if kept.codes is not None:
        kinds = describe_caches(specs)
        yield f"cache: {kinds}, with a float32 scale for each token and KV head, which is counted"


def _notes(plan: ShardingPlan, rows: Sequence[Row]) -> Iterator[str]:
    """Notes on what a reader of the shapes would wonder about."""
    table = plan.table
    present = {row.name for row in rows}
    for row, twin in table.tied:
        if row.name not in present:
            yield f"{row.name} is {twin} (tied), which is held once"
    if table.optional:
        yield f"{table.optional}* may be missing in the checkpoint as a whole"
    if plan.size == 1:
        return
    layers = enumerate(table.spec.all_layers)
    attending = next((i for i, own in layers if own.attention is not None), None)
    if attending is not None:
        idle = [str(s.rank) for s in plan.shards if not s.share("q", attending).real]
        if idle:
            yield f"without a head, so that one of zeros is held: device {', '.join(idle)}"
        held = sum(shard.share("k", attending).real for shard in plan.shards)
        if held > table.spec.extent("k", attending):
            yield "KV heads are fewer than devices, so that several hold the same one"
    padding = {}
    for own in (own for shard in plan.shards for own in shard.held()):
        padding[own.name] = padding.get(own.name, 0) + own.extent - own.real
    padded = ", ".join(f"{name} {count}" for name, count in padding.items() if count)
    if padded:
        yield f"padding with zeros, over all devices: {padded}"
