"""The plan of loading: every row of a weight table matched to stored tensors, and checked."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..arrays import same_tensor, to_numpy
from ..errors import CheckpointError, counted
from ..quantization import is_of_cache
from .spec import Layer, ModelSpec
from .weights import Row, WeightTable


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


class TableSource:
    """A source without values: the tensors that a weight table asks for, all in one dtype."""

    notes: tuple[str, ...] = ()

    def __init__(self, table: WeightTable, dtype: str, description: str) -> None:
        self.description, self._dtype = description, dtype
        self._shapes = {
            source.name: table.shape(row, source.axes)
            for row in table.rows
            for source in row.sources
        }

    def names(self) -> Iterable[str]:
        """The first of the names that a checkpoint may have."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape by the table."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """The one of all."""
        return self._dtype

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """There are no values."""
        raise NotImplementedError(name)


@runtime_checkable
class MadeSource(Protocol):
    """A source that shows what it makes of the tensors of another one, and hides these."""

    def plain(self) -> TensorSource:
        """The source as it is stored."""
        ...

    def taken(self) -> list[str]:
        """The stored tensors that are hidden."""
        ...


@dataclass(frozen=True)
class LoadPlan:
    """Rows with their sources' stored names; checked, so that loading cannot fail on a name."""

    table: WeightTable
    rows: tuple[tuple[Row, tuple[str, ...]], ...]
    unused: tuple[str, ...]


def with_stored_turns(
    spec: ModelSpec, table: WeightTable, source: TensorSource
) -> tuple[ModelSpec, WeightTable]:
    """Spec and table with the rotary frequencies that a checkpoint stores, if the table has them.

    Those of ESM-2 are rounded to float16, as it was trained.
    """
    own = next((row for row in table.outer if row.name == "frequencies"), None)
    if own is None or isinstance(source, TableSource):
        return spec, table
    held = set(source.names())
    name = next((n for n in table.candidates(own.sources[0].name) if n in held), None)
    if name is None or tuple(source.shape(name)) != table.shape(own):
        return spec, table  # of which the plan's error tells
    values = np.asarray(to_numpy(source.read(name))).astype(np.float32)

    def turned(layer: Layer) -> Layer:
        a = layer.attending
        assert a.rope is not None
        rope = replace(a.rope, inv_freq=tuple(values.tolist()))
        return replace(layer, attention=replace(a, rope=rope))

    spec = spec.with_layers([turned(layer) for layer in spec.all_layers])
    return spec, replace(table, spec=spec)


def with_stored_order(table: WeightTable, source: TensorSource) -> WeightTable:
    """The table with the tensors of all experts as a checkpoint holds them: maybe turned.

    HF's Qwen3-VL has rows before columns, files on the hub columns before rows; where both have the
    same shape, HF takes them as it has them.
    """
    held: set[str] | None = None
    found: dict[int, tuple[Row, ...]] = {}
    for i, rows in enumerate(table.layers):
        if id(rows) in found or not any(own.either for own in rows):
            continue
        held = set(source.names()) if held is None else held

        def stored(own: Row, layer: int = i, held: set[str] = held) -> Row:
            if not own.either:
                return own
            whole = own.of_layer(layer, layer).others[0]
            name = next((n for n in table.candidates(whole.name) if n in held), None)
            shape = table.shape(own.of_layer(layer, layer), whole.axes)
            turned = shape[0], shape[2], shape[1]
            if name is None or turned == shape or tuple(source.shape(name)) != turned:
                return own
            experts, out, inner = whole.axes
            return replace(own, others=(replace(own.others[0], axes=(experts, inner, out)),))

        found[id(rows)] = tuple(map(stored, rows))
    layers = tuple(found.get(id(rows), rows) for rows in table.layers)
    return replace(table, layers=layers) if found else table


_MARKED = 4  # elements of a tensor's first and last row


def marks_of(source: TensorSource, plan: LoadPlan) -> list[Any]:
    """A few values of each stored tensor that the plan reads, which tell one model from another."""
    names = [name for row, stored in plan.rows if row.scheme is None for name in stored]
    marks = [(source, name) for name in names]
    if isinstance(source, MadeSource):  # of which to make a part may take long
        stored_as = source.plain()
        marks += [(stored_as, name) for name in source.taken()]
    return [own.read(name, corner) for own, name in marks for corner in _corners(own.shape(name))]


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


def is_same(source: TensorSource, one: str, other: str) -> bool:
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
    """Say what to do about a prefix that all stored names have; empty if there is none.

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


def _is_idle(name: str, source: TensorSource, used: Collection[str]) -> bool:
    """True for a stored tensor that no row has and that changes nothing.

    It is a cache's scale, or a bias of zeros: old tools wrote one for every quantized layer.
    """
    if is_of_cache(name):
        return True
    if not name.endswith(".bias") or name.removesuffix("bias") + "weight" not in used:
        return False
    return not np.asarray(to_numpy(source.read(name))).astype(np.float32).any()


def make_load_plan(table: WeightTable, source: TensorSource) -> LoadPlan:
    """Match every row to stored tensors.

    Raises CheckpointError that names each weight that is missing, left over, misshaped or of a
    dtype that means nothing without scales.
    """
    stored = set(source.names())
    missing: list[str] = []
    mistyped: list[str] = []
    misshaped: dict[str, str] = {}  # by the name of the matrix, whose scales go with its codes
    used: set[str] = set()
    matched: dict[str, tuple[Row, tuple[str, ...]]] = {}

    twins = [pair for pair in table.twins if pair[0].scheme == pair[1].scheme]
    other_names: dict[str, list[str]] = {}
    stand_ins: dict[str, str] = {}  # the stored tensor that was read in the place of a name
    row_names = {part.name: r.name for r in table.rows for part in r.sources}
    for pair in twins:
        for own, mirrored in zip(*(row.sources for row in pair), strict=True):
            names = other_names.setdefault(mirrored.name, [])
            # The twin that is the same weight here comes first: BART's decoder has the embedding
            # of the whole, and an encoder's may differ from it.
            is_own = row_names.get(mirrored.name) == pair[0].name
            names.insert(0 if is_own else len(names), own.name)

    def find(name: str) -> str | None:
        return next((c for c in table.candidates(name) if c in stored), None)

    def match(r: Row) -> None:
        stored_names = []
        if r.others and all(find(part.name) for part in r.others):
            r = replace(r, sources=r.others, others=())
        for part in r.sources:
            name = find(part.name)
            if name is None:  # HF may have kept the other name of two tied tensors
                name = next((n for n in map(find, other_names.get(part.name, ())) if n), None)
                if name is not None:
                    stand_ins[part.name] = name
            if name is None:
                missing.append(part.name)
                continue
            expected = table.shape(r, part.axes)
            found = tuple(source.shape(name))
            if part.spare and found[:1] == (expected[0] + part.spare,):
                found = expected[:1] + found[1:]
            if found != expected:
                fault = f"{name} is {found}, expected {expected}"
                misshaped.setdefault(name.partition(":")[0], fault)
            if source.dtype(name) not in part.dtypes:
                expected = " or ".join(part.dtypes)
                mistyped.append(f"{name} is {source.dtype(name)}, expected {expected}")
            used.add(name)
            stored_names.append(name)
        matched[r.name] = (r, tuple(stored_names))

    optional = [r for r in table.rows if table.optional and r.local_name.startswith(table.optional)]
    absent = not any(find(part.name) for r in optional for part in r.sources)
    for r in table.rows:
        if not (absent and r in optional):
            match(r)
    for pair in table.twins:
        own = [find(source.name) for source in pair[0].sources]
        other = [find(part.name) or stand_ins.get(part.name) for part in pair[1].sources]
        if own[0] is None or own[0] in used:
            continue
        both = zip(own, other, strict=True) if pair in twins else ()
        if pair in twins and all(a and b and is_same(source, a, b) for a, b in both):
            used.update(filter(None, own))
        else:
            match(pair[0])
    # What joined matrices have in common is read of the first one.
    left_over = sorted(n for n in stored - used if n.partition(":")[0] not in used)
    unused = [
        name
        for name in left_over
        if any(re.search(p, name) for p in table.unused) or _is_idle(name, source, used)
    ]
    extra = sorted(set(left_over) - set(unused))
    problems = [
        f"{what} {counted(names)}"
        for what, names in (
            ("missing", missing),
            ("misshaped", [*misshaped.values()]),
            ("of another dtype", mistyped),
            ("left over", extra),
        )
        if names
    ]
    if problems:
        hint = prefix_hint((c for name in missing for c in table.candidates(name)), extra)
        if any(".deepspeed_experts." in name for name in extra):
            hint = (
                " What is left over is of DeepSpeed's MoE layers, of which the config does not "
                "tell: make the module that has them, and pass it with this as checkpoint=."
            )
        raise CheckpointError(
            f"The weights of {source.description} do not fit its config: {'; '.join(problems)}."
            f"{hint}"
        )
    return LoadPlan(table, tuple(matched.values()), tuple(unused))
