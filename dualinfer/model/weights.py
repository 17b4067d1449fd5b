"""The weight table: which HF tensors make which of our weights, by axis names, not layouts."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any, Protocol, TypeAlias

from ..arrays import same_tensor
from ..errors import CheckpointError, UnsupportedError, counted, listing
from ..quantization import Choose, Scheme
from .spec import ModelSpec

FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Weight:
    """One matrix of a model, as a backend's ops take it; biases and norms' weights are arrays.

    `axes` are the names of the matrix's own, outputs before inputs. Without a scheme `data` is the
    matrix. With one, `data`, `scale` and `zero` together mean it, and `stands_for` is the dtype
    that it has in computations. Only ops, loading and saving read what it holds; everyone else asks
    for its shape and dtype.
    """

    data: Any
    axes: tuple[str, ...]
    scheme: Scheme | None = None
    scale: Any = None
    zero: Any = None
    stands_for: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape: outputs before inputs."""
        shape = self.data.shape
        return shape if self.scheme is None else self.scheme.shape(tuple(shape))

    @property
    def dtype(self) -> Any:
        """The backend's dtype of the matrix."""
        return self.data.dtype if self.scheme is None else self.stands_for


Leaf: TypeAlias = Any  # a Weight, or a backend's array: a bias, or the weight of a norm
_PARTS = ("data", "scale", "zero")


def parts_of(leaf: Leaf) -> dict[str, Any]:
    """The arrays of a leaf by the field of `Weight`; an array that is no Weight is its data."""
    if not isinstance(leaf, Weight):
        return {"data": leaf}
    return {part: array for part in _PARTS if (array := getattr(leaf, part)) is not None}


def with_parts(leaf: Leaf, parts: Mapping[str, Any]) -> Leaf:
    """The leaf with other arrays in the place of its own."""
    return replace(leaf, **parts) if isinstance(leaf, Weight) else parts["data"]


def part_name(name: str, part: str) -> str:
    """What people call an array of the leaf `name`: its data has the leaf's own name."""
    return name if part == "data" else f"{name}_{part}"


def named_arrays(leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Every array of named leaves, as `part_name` calls it."""
    return {
        part_name(name, part): array
        for name, leaf in leaves.items()
        for part, array in parts_of(leaf).items()
    }


def count_leaves(leaves: Iterable[Leaf]) -> dict[str, int]:
    """What a report says of leaves: their elements, and the bytes that hold them."""
    leaves = list(leaves)
    return {
        "parameters": sum(prod(leaf.shape) for leaf in leaves),
        "parameter_bytes": sum(a.nbytes for leaf in leaves for a in parts_of(leaf).values()),
    }


@dataclass(frozen=True)
class Source:
    """One stored tensor, by its name in the model with a head, and its axes as stored.

    An axis is a name, or several joined by `+` where the tensor holds blocks one after another
    (GPT-2's `q+k+v`); with `/heads` behind, each head's share of every block, head after head
    (BLOOM's `q+k+v/heads`). `part` is the field of `Weight` that it belongs to, `dtypes` are those
    that it may have. `index` is its place along the row's first axis, where tensors without that
    axis are stacked.
    """

    name: str
    axes: tuple[str, ...]
    part: str = "data"
    dtypes: tuple[str, ...] = FLOATS
    index: int | None = None


@dataclass(frozen=True)
class Row:
    """One of our weights: its axes, and the stored tensors that make it.

    Those of one part that lack the row's first axis are stacked along it, by their `index`; those
    that lie side by side are joined along its fused axis, in order. A row without sources is
    `constant` everywhere: HF computes without it. `layer` is the number of the layer that it
    belongs to, None for none. Of a quantized row, by its `scheme`, sources are tensors of several
    parts; a part has those of the row's axes that its sources have.
    """

    name: str
    axes: tuple[str, ...]
    sources: tuple[Source, ...]
    constant: float = 0.0
    layer: int | None = None
    scheme: Scheme | None = None

    @property
    def is_weight(self) -> bool:
        """True for a matrix, which is a Weight; biases and the weights of norms are arrays."""
        return len(self.axes) > 1 and self.name.endswith("weight")

    def permutation(self, source: Source) -> tuple[int, ...]:
        """Order of `source`'s axes that gives this row's order; the fused axis matches by part."""
        places = (self._place(axis, source) for axis in self.axes)
        return tuple(place for place in places if place is not None)

    def _place(self, axis: str, source: Source) -> int | None:
        """Which of the source's axes is (a part of) the row's `axis`."""
        parts = set(axis.split("+"))
        places = (i for i, own in enumerate(source.axes) if set(_blocks(own)) <= parts)
        return next(places, None)

    def axes_of(self, source: Source) -> tuple[str, ...]:
        """The row's axes that the source has, in the row's order."""
        return tuple(axis for axis in self.axes if self._place(axis, source) is not None)

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The axes of each array that makes the weight, by the field of `Weight`."""
        axes = {"data": self.axes}
        for source in self.sources:
            stacked = () if source.index is None else self.axes[:1]
            axes[source.part] = (*stacked, *self.axes_of(source))
        return axes

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

    def stacked(self, count: int) -> "Row":
        """The row of `count` stored tensors of each kind: `{x}` in HF's names is the number."""
        sources = tuple(
            replace(s, name=s.name.replace("{x}", str(x)), index=x)
            for x in range(count)
            for s in self.sources
        )
        return replace(self, sources=sources)

    def quantized(self, choose: Choose) -> "Row":
        """The row of what a checkpoint holds by the schemes of its tensors."""
        schemes = {choose(source.name) for source in self.sources}
        if len(schemes) > 1:
            names = listing([source.name for source in self.sources])
            raise UnsupportedError(
                f"{names} are one weight here, and are quantized in different ways, or not all of "
                "them. Pass a checkpoint in which they are alike."
            )
        scheme = schemes.pop() if schemes else None
        if scheme is None:
            return self
        sources = tuple(
            replace(s, name=t.name, axes=t.axes, part=t.part, dtypes=t.dtypes)
            for s in self.sources
            for t in scheme.stored(s.name, tuple(s.axes[i] for i in self.permutation(s)))
        )
        return replace(self, sources=sources, scheme=scheme)


def make_leaf(row: Row, parts: Mapping[str, Any], dtype: Any) -> Leaf:
    """What the row's arrays make, in a model that computes in `dtype`."""
    if not row.is_weight:
        return parts["data"]
    stands_for = None if row.scheme is None else dtype
    return Weight(axes=row.axes, scheme=row.scheme, stands_for=stands_for, **parts)


def join_axis(axes: Sequence[str]) -> int:
    """Index of the axis along which several tensors are joined."""
    return next((i for i, axis in enumerate(axes) if "+" in axis), 0)


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
    checkpoint may lack as a whole. `choose` says which weights are quantized, None that none is.
    """

    spec: ModelSpec
    outer: tuple[Row, ...]
    layers: tuple[tuple[Row, ...], ...]
    base: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    tied: tuple[tuple[Row, str], ...] = ()
    optional: str | None = None
    choose: Choose | None = None

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every row: those outside of the layers, then each layer's."""
        inner = (row.of_layer(i) for i, layer in enumerate(self.layers) for row in layer)
        return tuple(self._resolve(row) for row in (*self.outer, *inner))

    @cached_property
    def twins(self) -> tuple[tuple[Row, Row], ...]:
        """The tied rows, each with the row as it is under the name that it is tied to."""
        return tuple(
            (self._resolve(row), self._resolve(replace(row, sources=(replace(source, name=name),))))
            for row, name in self.tied
            for source in row.sources
        )

    def _resolve(self, row: Row) -> Row:
        """The row of the tensors that a checkpoint of this model holds."""
        if any("{x}" in source.name for source in row.sources):
            row = row.stacked(self.spec.extent(row.axes[0], row.layer))
        return row if self.choose is None or not row.is_weight else row.quantized(self.choose)

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

    twins = [pair for pair in table.twins if pair[0].scheme == pair[1].scheme]
    other_names: dict[str, list[str]] = {}
    for pair in twins:
        for own, mirrored in zip(*(row.sources for row in pair), strict=True):
            other_names.setdefault(mirrored.name, []).append(own.name)

    def find(name: str) -> str | None:
        return next((c for c in table.candidates(name) if c in stored), None)

    def match(r: Row) -> None:
        stored_names = []
        for part in r.sources:
            name = find(part.name)
            if name is None:  # HF may have kept the other name of two tied tensors
                name = next((n for n in map(find, other_names.get(part.name, ())) if n), None)
            if name is None:
                missing.append(part.name)
                continue
            expected = table.shape(r, part.axes)
            if tuple(source.shape(name)) != expected:
                misshaped.append(f"{name} is {tuple(source.shape(name))}, expected {expected}")
            if source.dtype(name) not in part.dtypes:
                expected = " or ".join(part.dtypes)
                mistyped.append(f"{name} is {source.dtype(name)}, expected {expected}")
            used.add(name)
            stored_names.append(name)
        matched[r.name] = (r, tuple(stored_names))

    optional = [r for r in table.rows if table.optional and r.name.startswith(table.optional)]
    absent = not any(find(part.name) for r in optional for part in r.sources)
    for r in table.rows:
        if not (absent and r in optional):
            match(r)
    for pair in table.twins:
        own, other = ([find(source.name) for source in row.sources] for row in pair)
        if own[0] is None or own[0] in used:
            continue
        both = zip(own, other, strict=True) if pair in twins else ()
        if pair in twins and all(a and b and _is_same(source, a, b) for a, b in both):
            used.update(filter(None, own))
        else:
            match(pair[0])
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
