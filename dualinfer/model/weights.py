"""The weight table: which HF tensors make which of our weights, by axis names, not layouts."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any, Protocol

from ..arrays import same_tensor
from ..errors import CheckpointError, counted
from .spec import ModelSpec


@dataclass(frozen=True)
class Weight:
    """One parameter leaf, used only through `ops.matmul`, `ops.embed` and the norms.

    `data` is the backend's array; `scale` and `zero` belong to quantization schemes; `axes` names
    the logical axes of `data` in order, so that a sharding plan can find its axis.
    """

    data: Any
    axes: tuple[str, ...]
    scheme: str = "dense"
    scale: Any = None
    zero: Any = None


@dataclass(frozen=True)
class Source:
    """One HF tensor, by its name in the model with a head, and its axes as HF stores them.

    An axis is a name, or several joined by `+` where the tensor holds blocks one after another
    (GPT-2's `q+k+v`); with `/heads` behind, each head's share of every block, head after head
    (BLOOM's `q+k+v/heads`).
    """

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One of our weights: its axes, and the HF tensors joined along its fused axis, in order.

    One without sources is `constant` everywhere: HF computes without it. `layer` is the number of
    the layer that it belongs to, None for none.
    """

    name: str
    axes: tuple[str, ...]
    sources: tuple[Source, ...]
    constant: float = 0.0
    layer: int | None = None

    def permutation(self, source: Source) -> tuple[int, ...]:
        """Order of `source`'s axes that gives this row's order; the fused axis matches by part."""
        order = []
        for axis in self.axes:
            parts = axis.split("+")
            order.append(
                next(i for i, own in enumerate(source.axes) if set(_blocks(own)) <= set(parts))
            )
        return tuple(order)

    @property
    def local_name(self) -> str:
        """Its name without that of its layer."""
        return self.name if self.layer is None else self.name.split(".", 2)[2]

    def of_layer(self, layer: int) -> "Row":
        """The row of a layer, of this one as a template: `{i}` in HF's names is its number."""
        sources = (replace(s, name=s.name.replace("{i}", str(layer))) for s in self.sources)
        return replace(
            self, name=f"layers.{layer}.{self.name}", sources=tuple(sources), layer=layer
        )

    @property
    def join_axis(self) -> int:
        """Index of the axis along which several sources are joined."""
        return next((i for i, axis in enumerate(self.axes) if "+" in axis), 0)


def _blocks(axis: str) -> list[str]:
    """The names that an axis joins."""
    return axis.partition("/")[0].split("+")


def row(name: str, axes: str, *sources: tuple[str, str]) -> Row:
    """A Row from strings: axes separated by blanks, sources as (HF name, HF axes)."""
    return Row(name, tuple(axes.split()), tuple(Source(n, tuple(a.split())) for n, a in sources))


@dataclass(frozen=True)
class WeightTable:
    """All rows of a model, and how the names of older or headless checkpoints differ.

    `spec` says how long the axes are. `outer` are the rows outside of the layers, and `layers` each
    layer's as a template, whose names leave out the layer and whose HF names have `{i}` in its
    place: one and the same where layers are alike. `base` is HF's prefix of the headless model;
    files saved without a head lack it. `renames` are (ours, theirs) pieces of names that older
    files use. `unused` are patterns of tensors that belong to the family and change no result here.
    `tied` are rows that HF ties to another tensor, with that tensor's name: a file may hold both,
    and where they differ HF unties them. `optional` is a part, by the start of our names, that a
    checkpoint may lack as a whole.
    """

    spec: ModelSpec
    outer: tuple[Row, ...]
    layers: tuple[tuple[Row, ...], ...]
    base: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    tied: tuple[tuple[Row, str], ...] = ()
    optional: str | None = None

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every row: those outside of the layers, then each layer's."""
        inner = (row.of_layer(i) for i, layer in enumerate(self.layers) for row in layer)
        return (*self.outer, *inner)

    def shape(self, row: Row, axes: Iterable[str] | None = None) -> tuple[int, ...]:
        """Extents of a row's weight, or of an array of its layer that has `axes`."""
        return tuple(self.spec.extent(axis, row.layer) for axis in axes or row.axes)

    def candidates(self, name: str) -> list[str]:
        """The names under which a checkpoint may hold the HF tensor `name`."""
        names = [name]
        if self.base:
            bare = name[len(self.base) :] if name.startswith(self.base) else None
            names.append(bare if bare is not None else self.base + name)
        for ours, theirs in self.renames:
            names += [n.replace(ours, theirs) for n in names if ours in n]
        return names


class TensorSource(Protocol):
    """Named tensors of a checkpoint or a module; nothing is read before `read`."""

    description: str
    notes: tuple[str, ...]  # on how it was chosen, for people

    def names(self) -> Iterable[str]:
        """Names as stored."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        ...

    def dtype(self, name: str) -> str:
        """NumPy's name of the stored dtype, such as `bfloat16`."""
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor, as a NumPy array (ml_dtypes for bfloat16) or a torch tensor.

        With `index`, a slice for each axis, that part of it alone.
        """
        ...


@dataclass(frozen=True)
class LoadPlan:
    """Rows with their sources' stored names; checked, so that loading cannot fail on a name."""

    table: WeightTable
    rows: tuple[tuple[Row, tuple[str, ...]], ...]
    unused: tuple[str, ...]


_MARKED = 4  # elements of a tensor's first and last row


def marks_of(source: TensorSource, plan: LoadPlan) -> list[Any]:
    """A few values of each tensor that the plan reads, which tell one model from another."""
    names = [name for _, stored in plan.rows for name in stored]
    return [source.read(name, corner) for name in names for corner in _corners(source.shape(name))]


def _corners(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The first and the last few elements of a tensor, as indices."""
    if not shape or not prod(shape):
        return []
    *rows, width = shape
    few = min(width, _MARKED)
    first = (*(slice(0, 1) for _ in rows), slice(0, few))
    last = (*(slice(n - 1, n) for n in rows), slice(width - few, width))
    return [first, last]


_COMPARED = 1 << 22  # elements of two tensors at a time


def _is_same(source: TensorSource, one: str, other: str) -> bool:
    """True if two stored tensors hold the same values; few rows of them are in memory at a time."""
    shape = source.shape(one)
    if shape != source.shape(other):
        return False
    rows = max(1, _COMPARED // max(1, prod(shape[1:])))
    rest = tuple(slice(0, size) for size in shape[1:])
    parts = ((slice(i, min(i + rows, shape[0])), *rest) for i in range(0, shape[0], rows))
    return all(same_tensor(source.read(one, p), source.read(other, p)) for p in parts)


_TRIED = 16  # missing names that are looked for with a prefix
_PREFIXES = {
    "module.": ", as DistributedDataParallel and DeepSpeed save them",
    "_orig_mod.": ", as torch.compile saves them",
}


def prefix_hint(missing: Iterable[str], stored: Collection[str]) -> str:
    """What to do about a prefix that all tensors have in the file; empty if there is none.

    `missing` are names that a checkpoint should have; `stored` those of what nothing asked for.
    """
    for name in islice(missing, _TRIED):
        for prefix in (s[: -len(name)] for s in stored if s.endswith(f".{name}")):
            if all(other.startswith(prefix) for other in stored):
                by = _PREFIXES.get(prefix, "")
                return (
                    f" The names in the file begin with {prefix!r}{by}: save it again without, by "
                    f"{{name.removeprefix({prefix!r}): tensor for name, tensor in state.items()}}."
                )
    return ""


_DTYPES = ("float32", "bfloat16", "float16", "float64")


def make_load_plan(table: WeightTable, source: TensorSource) -> LoadPlan:
    """Match every row to stored tensors.

    Raises CheckpointError that names each weight that is missing, left over, misshaped or of a
    dtype that means nothing without scales.
    """
    stored = set(source.names())
    missing: list[str] = []
    mistyped: list[str] = []
    misshaped: list[str] = []
    used: set[str] = set()
    matched: dict[str, tuple[Row, tuple[str, ...]]] = {}

    def find(name: str) -> str | None:
        return next((c for c in table.candidates(name) if c in stored), None)

    def match(r: Row) -> None:
        found = []
        for part in r.sources:
            name = find(part.name)
            if name is None:  # HF may have kept the other name of two tied tensors
                twins = (t.sources[0].name for t, mirrored in table.tied if mirrored == part.name)
                name = next((n for n in map(find, twins) if n), None)
            if name is None:
                missing.append(part.name)
                continue
            expected = table.shape(r, part.axes)
            if tuple(source.shape(name)) != expected:
                misshaped.append(f"{name} is {tuple(source.shape(name))}, expected {expected}")
            if source.dtype(name) not in _DTYPES:
                mistyped.append(f"{name} is {source.dtype(name)}, expected {' or '.join(_DTYPES)}")
            used.add(name)
            found.append(name)
        matched[r.name] = (r, tuple(found))

    optional = [r for r in table.rows if table.optional and r.name.startswith(table.optional)]
    absent = not any(find(part.name) for r in optional for part in r.sources)
    for r in table.rows:
        if not (absent and r in optional):
            match(r)
    for r, mirrored in table.tied:
        own, other = find(r.sources[0].name), find(mirrored)
        if own is None or own in used:
            continue
        if other is not None and _is_same(source, own, other):
            used.add(own)
        else:
            match(r)
    left_over = sorted(stored - used)
    unused = [n for n in left_over if any(re.search(p, n) for p in table.unused)]
    extra = sorted(set(left_over) - set(unused))
    problems = [
        f"{what} {counted(names)}"
        for what, names in (
            ("missing", missing),
            ("misshaped", misshaped),
            ("of another dtype", mistyped),
            ("left over", extra),
        )
        if names
    ]
    if problems:
        hint = prefix_hint((c for name in missing for c in table.candidates(name)), extra)
        raise CheckpointError(
            f"The weights of {source.description} do not fit its config: {'; '.join(problems)}."
            f"{hint}"
        )
    return LoadPlan(table, tuple(matched.values()), tuple(unused))
