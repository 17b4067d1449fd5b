"""Tell how a device holds a model's weights, in bytes and for people: planned, or loaded."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ..arrays import numpy_dtype
from ..model.spec import Experts, ModelSpec
from ..model.weights import Leaf, Row, leaves_of, parts_of
from ..parallel.shard import Shard, fit_row


def describe_weights(named: Mapping[str, Leaf]) -> dict[str, str]:
    """Tell people how many weights are held in which way, and the head; `named` are all leaves."""
    leaves = [own for whole in named.values() for own in leaves_of(whole)]
    head = named.get("head.weight", named.get("embed.weight"))
    return _described(
        ((_kind(leaf), prod(leaf.shape), sum(a.nbytes for a in parts_of(leaf).values())))
        for leaf in leaves
    ) | ({} if head is None else {"head": _kind(head)})


def describe_rows(rows: Sequence[Row], shard: Shard, dtype: str) -> dict[str, str]:
    """The text of `describe_weights` for a device that has loaded `rows` in `dtype`."""
    size = numpy_dtype(dtype).itemsize
    named = {row.name: row for row in rows}
    head = named.get("head.weight", named.get("embed.weight"))
    return _described(
        (_row_kind(row, dtype), prod(shard.shape(row)), held_bytes(shard, row, size))
        for row in rows
    ) | ({} if head is None else {"head": _row_kind(head, dtype)})


def held_bytes(shard: Shard, row: Row, itemsize: int) -> int:
    """Bytes of a device's part of a row; `itemsize`: of an element that is not quantized."""
    scheme, size = row.scheme, 0
    if scheme is None:
        return prod(shard.shape(row)) * (4 if row.wide else itemsize)
    row = fit_row(row, [shard])
    sizes = {source.part: numpy_dtype(source.dtypes[0]).itemsize for source in row.sources}
    for part, axes in row.parts.items():
        *rest, last = shard.shape(row, axes) or (1,)
        if part == "data":
            last = scheme.code.packing.width(last)
        size += prod(rest) * last * sizes[part]
    return size


def no_room(shard: Shard, rows: Sequence[Row], itemsize: int, free: int | None, way: str) -> str:
    """The message where a device's share of `rows` found no room; `way` is one out of it."""
    needed = sum(held_bytes(shard, row, itemsize) for row in rows)
    there = "" if free is None else f", and {free:,} were free"
    return (
        f"A device has no room for the weights: it holds {needed:,} bytes of them{there}. {way} "
        'Else use more devices, a smaller dtype, quant="int8" or keep_module_on_host=True.'
    )


def read_share(spec: ModelSpec, row: Row, tokens: int) -> float:
    """The part of a row that so many tokens are expected to read: of a mixture, the chosen experts.

    Each token takes as if by lot: X (1 - (1 - k / X)^tokens) of X experts are chosen, and one that
    all tokens have is read besides, and none that has no weights. 1 for a row that all tokens read.
    """
    if row.layer is None or row.axes[:1] != ("experts",) or not row.is_weight:
        return 1.0
    mlp = spec.all_layers[row.layer].mlp
    assert isinstance(mlp, Experts)
    read = (mlp.choices - mlp.idle) * (1 - (1 - mlp.router.chosen / mlp.choices) ** tokens)
    read += mlp.blended
    return read / mlp.count


def _described(weights: Iterable[tuple[str, int, int]]) -> dict[str, str]:
    """Kinds of weights; one has a kind, elements and bytes."""
    counts: dict[str, list[int]] = {}
    for kind, elements, size in weights:
        own = counts.setdefault(kind, [0, 0, 0])
        for i, n in enumerate((1, elements, size)):
            own[i] += n
    return {
        kind: f"{many:,} weights, {elements:,} elements, {size / 2**20:,.1f} MiB, "
        f"{8 * size / max(elements, 1):.2f} bits an element"
        for kind, (many, elements, size) in counts.items()
    }


def _row_kind(row: Row, dtype: str) -> str:
    if row.scheme is not None:
        return row.scheme.name
    return "float32" if row.wide else dtype


def _kind(leaf: Leaf) -> str:
    scheme = getattr(leaf, "scheme", None)
    return str(leaf.dtype).removeprefix("torch.") if scheme is None else scheme.name
