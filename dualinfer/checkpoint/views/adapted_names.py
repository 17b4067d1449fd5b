"""Names in adapters are matched to the tensors of a model that they change, and how these lie.

HF's names are found in whatever a checkpoint has. What HF has in one tensor, and this package as
several matrices, is changed matrix by matrix.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from ...errors import CheckpointError, listing
from ...model.load_plan import TensorSource, is_same
from ...model.spec import Experts
from ...model.weights import Row, Source, WeightTable
from ...quantization import Matrices
from .adapters import (
    MERGE,
    Adapter,
    Added,
    Change,
    Factor,
    Held,
    LowRank,
    Made,
    Nested,
    Rows,
    Stack,
    sliced,
)
from .stacked import Place, StackedSource, places_of, rows_of_experts, show_matrices

RESIZED = (
    "It was trained for another vocabulary and does not bring all of the embeddings, of which the "
    "new rows would be drawn. Take the model as it was trained: merge_and_unload(), and pass what "
    "save_pretrained() writes."
)


def settled(change: Change, shape: tuple[int, ...], is_turned: bool | None) -> Change:
    """The change, with factors that are known to be of a matrix or of its transpose."""
    if not isinstance(change, LowRank | Stack) or len(shape) != (
        2 if isinstance(change, LowRank) else 3
    ):
        return change
    matrix = (change.up.shape[0], change.down.shape[1])
    if isinstance(change, Stack):
        turned = change.old if matrix == matrix[::-1] else matrix[::-1] == shape[1:]
        return replace(change, turned=turned if change.turned is None else change.turned)
    turned = is_turned if change.turned is None else change.turned
    if turned is None:
        turned = change.wide if matrix == matrix[::-1] else matrix != shape
    return replace(change, turned=turned)


def shape_of(change: Change, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor that a change is made for, which has `shape`."""
    if isinstance(change, LowRank):
        matrix = (change.up.shape[0], change.down.shape[1])
        return matrix[::-1] if change.turned else matrix
    if isinstance(change, Stack):
        matrix = (change.up.shape[0], change.down.shape[1])
        return (change.count, *(matrix[::-1] if change.turned else matrix))
    if isinstance(change, Rows):
        fits = len(shape) == 2 and max(change.ids) < shape[0]
        return (shape[0] if fits else max(change.ids) + 1, change.values.shape[1])
    if isinstance(change, Made):
        return shape
    return change.values.shape if isinstance(change, Added) else change.shape


class Whole(NamedTuple):
    """A tensor in which HF has several matrices: its row, itself, and what it has of each."""

    row: Row
    source: Source | None  # None of one of which each matrix has some rows
    places: Mapping[str, Place]
    shape: tuple[int, ...]

    @property
    def is_turned(self) -> bool:
        """True if the matrices lie with columns before rows in HF's module."""
        turned = any(place.turned for place in self.places.values())
        return turned and not self.row.either  # of which some files alone have them so

    def turns(self, change: Stack) -> bool:
        """True if peft's factors are of the transposes of what HF's module has.

        Where the shapes do not say it, they are if HF's class says that it has the transposes.
        """
        matrix = (change.up.shape[0], change.down.shape[1])
        if matrix != matrix[::-1]:
            return matrix[::-1] == self.lies[1:]
        marked = self.is_turned and self.source is not None and self.source.marked
        return not self.row.either and (change.old or marked)

    @property
    def lies(self) -> tuple[int, ...]:
        """The shape that HF's module has it in."""
        turned = any(place.turned for place in self.places.values()) != self.is_turned
        return (self.shape[0], *self.shape[:0:-1]) if turned else self.shape

    def part(self, change: Change, place: Place, held: Held) -> Change:
        """A change of it as one of the matrices has it."""
        rows, every = slice(place.start, place.start + place.shape[-2:][0]), slice(None)
        if isinstance(change, Factor):
            index = place._replace(turned=self.is_turned).within()
            own = sliced(change, held).cut(*index)
            return replace(own, alone=place.expert is not None, turned=self.is_turned)
        if isinstance(change, Added):
            return replace(change, values=sliced(change.values, held).cut(rows))
        if isinstance(change, Stack):
            change = replace(change, turned=bool(change.turned) != self.is_turned)
            if place.expert is not None:
                change = change.matrix(place.expert, held)
        assert isinstance(change, LowRank | Stack)
        up, down = sliced(change.up, held), sliced(change.down, held)
        if change.turned:
            return replace(change, down=down.cut(every, rows))
        magnitude = change.magnitude if isinstance(change, LowRank) else None
        if magnitude is None:
            return replace(change, up=up.cut(rows, every))
        magnitude = sliced(magnitude, held).cut(rows)
        return replace(change, up=up.cut(rows, every), magnitude=magnitude)


class Names:
    """The search for the stored tensor that HF's name of a weight means.

    With a table it is found under each of the names that a checkpoint may have for it, and where
    tensors are tied under the other one's; without, by the name itself, or its end.
    """

    def __init__(self, source: TensorSource, table: WeightTable | None, matrices: Matrices | None):
        self.stored = set(source.names())
        self._source, self._matrices, self._table = source, matrices, table
        self._pairs: list[tuple[str, str]] = []
        if table is not None:
            self._pairs = [(s.name, other) for row, other in table.tied for s in row.sources]

    @cached_property
    def _rows(self) -> dict[str, Row]:
        """The row of each tensor and of each that stands for several, by HF's names, in order."""
        assert self._table is not None
        found: dict[str, Row] = {}
        for row in (*self._table.rows, *(row for row, _ in self._table.tied)):
            names = [s.name for s in (*row.sources, *row.others)]
            names += [name.partition("#")[0] for name in names if "#" in name]
            for name in names:
                found.setdefault(name, row)
        return found

    @cached_property
    def _known(self) -> dict[str, str]:
        """By every name that a checkpoint may have for a tensor, HF's own."""
        assert self._table is not None
        found = {c: name for name in self._rows for c in self._table.candidates(name)}
        return {**found, **{name: name for name in self._rows}}

    def _wholes_of(self, row: Row) -> Iterator[tuple[str, Whole]]:
        """The tensors that may stand for a row's, by HF's names."""
        table = self._table
        assert table is not None
        for source in row.others if row.sources else ():
            shape = table.shape(row, source.axes)
            yield source.name, Whole(row, source, places_of(row, source, table), shape)
        by_rows = rows_of_experts(row, table)
        for stem in dict.fromkeys(name.partition("#")[0] for name in by_rows):
            own = {n: place for n, place in by_rows.items() if n.startswith(f"{stem}#")}
            high, wide = next(iter(own.values())).shape
            yield stem, Whole(row, None, own, (high * len(own), wide))

    def settle(self, adapter: Adapter) -> Adapter:
        """The adapter by HF's own names, one for each matrix, and with its nested changes."""
        changes: dict[str, list[Change]] = {n: [*own] for n, own in adapter.changes.items()}
        for nested in adapter.nested:
            for name, change in self._unnested(adapter, nested).items():
                changes.setdefault(name, []).append(change)
        if self._table is None:
            return replace(adapter, changes=changes, nested=())
        split: dict[str, list[Change]] = {}
        for name, own in changes.items():
            for piece, parts in self._pieces(adapter, name, own).items():
                split.setdefault(piece, []).extend(parts)
        bases = {self._known.get(name, name): value for name, value in adapter.bases.items()}
        return replace(adapter, changes=split, bases=bases, nested=())

    def _unnested(self, adapter: Adapter, nested: Nested) -> dict[str, Change]:
        """The changes of a module's parameters, by their names."""
        names = {leaf: f"{nested.module}.{leaf}" for leaf in nested.targets}
        own = [leaf for leaf, name in names.items() if self._is_there(name)]
        matrix = f"{nested.module}.weight"
        if not own and len(nested.factors) == 1 and self._is_there(matrix):
            return {**nested.as_module(nested.module, nested.factors[0])}
        if len(own) != len(nested.factors):
            what = f"its config names {listing(own)} there" if own else "the model has none there"
            raise CheckpointError(
                f"The adapter {adapter.label} changes {len(nested.factors)} parameters of "
                f"{nested.module}, and {what}. Pass the model that it was trained for."
            )
        # peft's layers lie in one another in the order in which HF's module has its parameters.
        order = {leaf: self._order(names[leaf]) for leaf in own}

        def place(leaf: str) -> tuple[Any, bool]:
            stem = leaf.removesuffix("_bias")
            return order.get(stem, order[leaf]), leaf != stem

        found: dict[str, Change] = {}
        for leaf, factors in zip(sorted(own, key=place), nested.factors, strict=True):
            name = names[leaf]
            found[name] = nested.as_parameter(name, self._axes(name), factors)
        return found

    def _is_there(self, name: str) -> bool:
        return name in self._known if self._table is not None else self.find(name) is not None

    def _order(self, name: str) -> Any:
        if self._table is None:
            return name.rpartition(".")[2].startswith(("down", "w2", "output")), name
        return self._numbers[self._known[name]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The places of HF's names among them all."""
        return {name: i for i, name in enumerate(self._rows)}

    def _axes(self, name: str) -> int:
        """The number of axes of a parameter."""
        if self._table is None:
            found = self.find(name)
            assert found is not None
            return len(self._source.shape(found[1]))
        own = self._known[name]
        row = self._rows[own]
        if own in (wholes := dict(self._wholes_of(row))):
            return len(wholes[own].shape)
        return next(len(s.axes) for s in row.sources if s.name == own)

    def _pieces(
        self, adapter: Adapter, name: str, changes: Sequence[Change]
    ) -> dict[str, list[Change]]:
        """The changes of a weight by HF's own name, those of several matrices one by one."""
        own = self._known.get(name)
        if own is None:
            return {name: [*changes]}
        wholes = dict(self._wholes_of(self._rows[own]))
        whole = wholes.get(own)
        if whole is None:
            return {own: [*changes]}
        changes = [self._fitted(adapter, name, change, whole) for change in changes]
        return {
            piece: [whole.part(change, place, adapter.held) for change in changes]
            for piece, place in whole.places.items()
        }

    def _fitted(self, adapter: Adapter, name: str, change: Change, whole: Whole) -> Change:
        """A change of a tensor of several matrices, which it must fit; how it lies is settled."""
        if isinstance(change, Stack) and change.turned is None:
            change = replace(change, turned=whole.turns(change))
        if isinstance(change, LowRank):
            change = settled(change, whole.shape, self.is_turned(next(iter(whole.places))))
        found, shape = shape_of(change, whole.lies), whole.lies
        if isinstance(change, Stack) and self._has_idle(whole.row) and found[0] > shape[0]:
            found = (shape[0], *found[1:])
        if isinstance(change, Made):
            raise CheckpointError(
                f"The adapter {adapter.label} changes {name}, which is several weights here, by "
                f"another kind than LoRA. {MERGE}"
            )
        if found != shape or isinstance(change, Rows):
            raise CheckpointError(
                f"The adapter {adapter.label} changes {name} by {found}, and that of "
                f"{self._source.description} is {shape}. {self.why_misshapen(name, found, shape)}"
            )
        return change

    def _has_idle(self, row: Row) -> bool:
        """True if a tensor of all experts may have some without a use (LongCat)."""
        assert self._table is not None
        mixture = None if row.layer is None else self._table.spec.all_layers[row.layer].mlp
        return isinstance(mixture, Experts) and bool(mixture.idle)

    def split(self, names: Iterable[str]) -> TensorSource:
        """The source in which each matrix that is changed, and each joined one, is by itself."""
        assert self._table is not None
        if self._matrices is None:
            changed = {self._rows[n].name for n in names if n in self._rows}

            def splits(row: Row) -> bool:
                return row.sources[0].index is None or row.name in changed

            self._source = show_matrices(self._source, self._table, splits)
            self.stored = set(self._source.names())
        return self._source

    def _holds(self, name: str) -> bool:
        return name in self.stored or (
            self._matrices is not None and self._matrices(name) is not None
        )

    def held(self, name: str) -> str | None:
        """The name under which a tensor is stored; None where it is not."""
        candidates = [name] if self._table is None else self._table.candidates(name)
        return next((c for c in candidates if self._holds(c)), None)

    def find(self, name: str) -> tuple[str, str] | None:
        """The name under which the tensor is shown, and that of the stored one."""
        if self._table is None:
            if self._holds(name):
                return name, name
            alike = [s for s in self.stored if s.endswith(f".{name}") or name.endswith(f".{s}")]
            return (alike[0], alike[0]) if len(alike) == 1 else None
        own = self._known.get(name)
        if own is None:
            return None
        held = self.held(own)
        if held is not None:
            return held, held
        for pair in self._pairs:
            if own in pair:
                other = self.held(pair[1 - pair.index(own)])
                if other is not None:
                    return own, other
        return None

    def is_turned(self, name: str) -> bool | None:
        """True if a matrix is stored [in, out]; None where no table says it."""
        if self._table is None:
            return None
        own = self._known.get(name, name)
        row = self._rows.get(own)
        if row is None or not row.is_weight:
            return None
        source = next((s for s in row.sources if s.name == own), None)
        return None if source is None else row.permutation(source) == (1, 0)

    def tied_to(self, name: str) -> list[str]:
        """HF's names of what is tied to a tensor, by the name that it is shown under."""
        if not self._pairs:
            return []
        own = self._known.get(name, name)
        return [pair[1 - pair.index(own)] for pair in self._pairs if own in pair]

    def are_same(self, one: str, other: str) -> bool:
        """True if two stored tensors hold the same values."""
        return {one, other} <= self.stored and is_same(self._source, one, other)

    def beside(self, changed: Iterable[str]) -> list[str]:
        """The other matrices of a mixture that has one that is changed, if some are quantized.

        They are one weight, which is plain as a whole.
        """
        if self._table is None or self._matrices is None:
            return []
        changed = set(changed)
        rows = {self._known[n]: self._rows[self._known[n]] for n in changed if n in self._known}
        own = {id(row): row for row in rows.values() if row.sources and _is_stacked(row)}
        names = [held for row in own.values() for s in row.sources if (held := self.held(s.name))]
        return [name for name in names if name not in changed]

    def wholes(self, changed: Iterable[str]) -> dict[str, Whole]:
        """The tensors of several matrices that are changed, where these are stored in one, too.

        They are by the names that they are stored under, or HF's.
        """
        if self._table is None:
            return {}
        changed = set(changed)
        found: dict[str, Whole] = {}
        for name in changed:
            row = self._rows.get(self._known.get(name, ""))
            if row is None or not _is_stacked(row):
                continue
            for own, whole in self._wholes_of(row):
                if whole.source is None or own in found:
                    continue
                held = [self.held(piece) or "" for piece in whole.places]
                stored_as = self._stored_in(own, held)
                if stored_as is not None and changed.issuperset(held):
                    places = dict(zip(held, whole.places.values(), strict=True))
                    found[stored_as] = whole._replace(places=places)
        return found

    def _stored_in(self, whole: str, pieces: Sequence[str]) -> str | None:
        """The name of a tensor of which pieces are shown; None of pieces that are stored so."""
        if isinstance(self._source, StackedSource):
            names = {self._source.whole(piece) for piece in pieces}
            if names.isdisjoint(pieces):
                return next(iter(names)) if len(names) == 1 else None
        if self._matrices is None or len(pieces) < 2:
            return None
        both = [self._matrices(piece) for piece in pieces[:2]]
        parts = [set(matrix.stored) for matrix in both if matrix is not None]
        return whole if len(parts) == 2 and parts[0] & parts[1] else None

    def knows(self, name: str) -> bool:
        """True if the model has a weight of this name, which is HF's own, be it stored or not."""
        return self._table is not None and self._known.get(name) == name

    def tables(self) -> dict[str, int]:
        """The tables that have a row for each token, and how many more than that.

        They are by the names that they are stored under.
        """
        if self._table is None:
            return {}
        rows = (*self._table.outer, *(row for row, _ in self._table.tied))
        own = [source for row in rows if row.axes[:1] == ("vocab",) for source in row.sources]
        return {self.held(source.name) or source.name: source.spare for source in own}

    def added(self) -> dict[str, tuple[int, ...]]:
        """The biases that adapters add where the model has none, with their shapes."""
        if self._table is None or not self._table.added:
            return {}
        return {
            source.name: self._table.shape(row, source.axes)
            for row in self._table.rows
            for source in row.sources
            if source.name in self._table.added
        }

    def is_added(self, name: str) -> bool:
        """True if a bias is one of those that adapters add."""
        return self._table is not None and name in self._table.added

    def is_unused(self, name: str) -> bool:
        """True if the model has a weight of this name that changes no result here."""
        if self._table is None:
            return False
        spelt = [c for c in self._table.candidates(name) if c in self.stored]
        return any(re.search(pattern, c) for pattern in self._table.unused for c in spelt)

    def why_lost(self, names: Sequence[str]) -> str:
        """The way on where the model has nothing of some names."""
        if self._table is None:
            return (
                "In module mode it may change what the files have by these names, and no more. "
                "Merge it with peft (merge_and_unload()), and pass the model that comes back."
            )
        if all(
            name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in self._known
            for name in names
        ):
            return (
                "It adds biases (lora_bias=True) where the model has none, and fused mode adds "
                "none there. On torch a PeftModel runs as it is: leave "
                "replace_with_kernel_inject unset."
            )
        return "Pass the model that it was trained for."

    def why_misshapen(self, name: str, found: Sequence[int], shape: Sequence[int]) -> str:
        """The way on where a change has another shape than its tensor."""
        row = None
        if self._table is not None:
            row = self._rows.get(self._known.get(name, name))
        is_vocabulary = row is not None and "vocab" in (row.axes[0], row.axes[-1])
        if is_vocabulary and len(found) == len(shape) and found[0] != shape[0]:
            return RESIZED
        return "Pass the model that it was trained for."


def _is_stacked(row: Row) -> bool:
    return row.sources[0].index is not None
