"""Experts that a live module holds in one tensor, by the names that files have for each."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from ..model.load_plan import TensorSource
from ..model.weights import Row, Source, WeightTable


class _Part(NamedTuple):
    """The matrix of an `expert` in a tensor: its rows from `start` on, or all of it, `turned`.

    Without an expert the tensor is a matrix itself.
    """

    name: str
    expert: int | None
    start: int
    shape: tuple[int, int]
    turned: bool


class StackedSource:
    """A source over another one in which each expert of a mixture is a tensor of its own.

    So what is done matrix by matrix needs no other way for experts that are stacked. The tensors
    that hold all of them are hidden.
    """

    def __init__(self, source: TensorSource, table: WeightTable) -> None:
        self.description, self.notes = source.description, source.notes
        self._source = source
        self._stored = set(source.names())
        self.matrices: dict[str, _Part] = {}
        for row in table.rows:
            for own in row.sources:
                if "#" in own.name:
                    self._show_rows(row, own, table)
            for whole in row.others:
                self._show(row, whole, table)
        self._hidden = {part.name for part in self.matrices.values()}

    def _show_rows(self, row: Row, source: Source, table: WeightTable) -> None:
        whole = table.candidates(source.name.partition("#")[0])
        name = next((n for n in whole if n in self._stored), None)
        if name is None:
            return
        high, wide = table.shape(row, source.axes)
        assert source.index is not None
        if self._source.shape(name) == (high * table.spec.extent("experts", row.layer), wide):
            part = name, None, source.index * high, (high, wide), False
            self.matrices[source.name] = _Part(*part)

    def _show(self, row: Row, whole: Source, table: WeightTable) -> None:
        name = next((n for n in table.candidates(whole.name) if n in self._stored), None)
        if name is None:
            return
        for source in row.sources:
            shape = table.shape(row, source.axes)
            assert source.index is not None and len(shape) == 2
            turned = whole.axes[1] == source.axes[1]  # columns before rows, as GPT-OSS's
            names = whole.axes[2 if turned else 1].split("+")
            sizes = [table.spec.extent(axis, row.layer) for axis in names]
            starts = dict(zip(names, accumulate(sizes[:-1], initial=0), strict=True))
            start = starts.get(source.axes[0], 0)
            own = name, source.index, start, (shape[0], shape[1]), turned
            self.matrices[source.name] = _Part(*own)

    def names(self) -> Iterable[str]:
        """Names of each expert's matrices, and of all that is no expert's."""
        return [
            *(name for name in self._source.names() if name not in self._hidden),
            *self.matrices,
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a matrix or tensor."""
        part = self.matrices.get(name)
        return self._source.shape(name) if part is None else part.shape

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype."""
        part = self.matrices.get(name)
        return self._source.dtype(name if part is None else part.name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The matrix or tensor, or the part of it at `index`."""
        part = self.matrices.get(name)
        if part is None:
            return self._source.read(name, index)
        rows, columns = index or (slice(None), slice(None))
        start, stop, _ = rows.indices(part.shape[0])
        own = slice(part.start + start, part.start + max(start, stop))
        if part.expert is None:
            return self._source.read(part.name, (own, columns))
        expert = slice(part.expert, part.expert + 1)
        if part.turned:
            return self._source.read(part.name, (expert, columns, own))[0].T
        return self._source.read(part.name, (expert, own, columns))[0]


def show_experts(source: TensorSource, table: WeightTable) -> TensorSource:
    """The source with a tensor for each expert's matrix, where it has one for all experts."""
    stacked = StackedSource(source, table)
    return stacked if stacked.matrices else source


def has_rows_of_experts(table: WeightTable) -> bool:
    """True of a family whose files have a tensor of which each expert has some rows."""
    templates = {id(rows): rows for rows in table.layers}.values()
    return any("#" in source.name for rows in templates for row in rows for source in row.sources)
