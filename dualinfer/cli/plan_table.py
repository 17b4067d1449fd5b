"""Which device holds what under tensor parallelism, for people, from a model's config alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from ..arrays import numpy_dtype
from ..backends.base import cache_bytes, cache_specs
from ..model.spec import ModelSpec
from ..model.weights import Row, WeightTable
from ..parallel.sharding import Held, Plan, Shard, make_plan


@dataclass(frozen=True)
class PlanRow:
    """One weight, or that of `count` equal layers, whose numbers `name` has, as `layers.0-31.`.

    `shape` is the whole, `shapes` what each device holds, padding included, and `split` the axis
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
    """What one device holds: bytes of weights and, for each token, of the cache; its shares."""

    weights: int
    cache: int
    shares: tuple[Held, ...]


@dataclass(frozen=True)
class PlanTable:
    """A model over devices. `sums` and `gathers` are the collectives of one token's pass.

    A sum is of `sum_size` bytes, in the weights' dtype; a gather joins the logits.
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


def make_plan_table(
    spec: ModelSpec, table: WeightTable, size: int, dtype: str, grain: int = 64, equal: bool = False
) -> PlanTable:
    """The table of a model over `size` devices; `grain` and `equal` as in `sharding.make_plan`."""
    plan = make_plan(spec, table, size, grain, equal)
    itemsize = numpy_dtype(dtype).itemsize
    alike: dict[tuple[str, ...], PlanRow] = {}  # rows of the same axes have the same shapes
    for row in table.rows:
        if row.axes not in alike:
            alike[row.axes] = _plan_row(row, plan, itemsize)
    rows = [replace(alike[row.axes], name=row.name) for row in table.rows]
    counts = Counter(row.axes for row in table.rows)
    from_vocab = 1 + (spec.token_types_from_vocab and spec.token_types > 0)
    return PlanTable(
        architecture=spec.architecture,
        dtype=dtype,
        rows=tuple(_joined_layers(table.rows, rows)),
        devices=tuple(_part(shard, table, itemsize, counts) for shard in plan.shards),
        whole=sum(row.size for row in rows),
        sums=0 if size == 1 else 2 * len(spec.layers) + from_vocab,
        sum_size=spec.embed * itemsize,
        gathers=int(size > 1 and spec.head is not None),
        notes=tuple(_notes(plan)),
    )


def _plan_row(row: Row, plan: Plan, itemsize: int) -> PlanRow:
    table = plan.table
    shape = tuple(table.size(axis) for axis in row.axes)
    split = plan.shards[0].split_axis(row)
    return PlanRow(
        name=row.name,
        axes=row.axes,
        shape=shape,
        shapes=tuple(shard.shape(row.axes, table) for shard in plan.shards),
        split=None if split is None else row.axes[split],
        count=1,
        size=prod(shape) * itemsize,
    )


def _joined_layers(table: Sequence[Row], rows: Sequence[PlanRow]) -> Iterator[PlanRow]:
    """Rows outside the layers, then those of each run of equal layers once."""
    layers: dict[int, list[PlanRow]] = {}
    for (number, name), row in zip((r.place for r in table), rows, strict=True):
        if number is None:
            yield row
        else:
            layers.setdefault(number, []).append(replace(row, name=name))
    for own, run in groupby(sorted(layers), key=lambda number: layers[number]):
        numbers = list(run)
        many = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        for row in own:
            count = len(numbers)
            name = f"layers.{many}.{row.name}"
            yield replace(row, name=name, count=count, size=row.size * count)


def _part(
    shard: Shard, table: WeightTable, itemsize: int, counts: Counter[tuple[str, ...]]
) -> DevicePart:
    """What a device holds; `counts` says how many rows have the same axes."""
    weights = sum(n * prod(shard.shape(axes, table)) for axes, n in counts.items()) * itemsize
    first = replace(shard.spec, layers=shard.spec.layers[:1])  # caches are alike in all layers
    cache = cache_bytes(cache_specs(first), 1, 1, itemsize) * len(shard.spec.layers)
    cache = cache if first.causal else 0
    return DevicePart(weights, cache, tuple(shard.held(table)))


def _notes(plan: Plan) -> Iterator[str]:
    """What a reader of the shapes would wonder about."""
    table = plan.table
    present = {row.name for row in table.rows}
    for row, twin in table.tied:
        if row.name not in present:
            yield f"{row.name} is {twin} (tied), which is held once"
    if table.optional:
        yield f"{table.optional}* may be missing in the checkpoint as a whole"
    if plan.size == 1:
        return
    idle = [str(s.rank) for s in plan.shards if not s.shares["q"].real]
    if idle:
        yield f"without a head, so that one of zeros is held: device {', '.join(idle)}"
    if sum(shard.shares["k"].real for shard in plan.shards) > table.sizes["k"]:
        yield "KV heads are fewer than devices, so that several hold the same one"
    padding = {}
    for own in (own for shard in plan.shards for own in shard.held(table)):
        padding[own.name] = padding.get(own.name, 0) + own.extent - own.real
    padded = ", ".join(f"{name} {count}" for name, count in padding.items() if count)
    if padded:
        yield f"padding with zeros, over all devices: {padded}"
