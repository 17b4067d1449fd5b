"""Matrices that a source holds several of in one tensor, by the names that other files have."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from ..model.load_plan import TensorSource
from ..model.spec import Experts
from ..model.weights import Row, Source, WeightTable


class _Part(NamedTuple):
    """What a tensor holds of a name: `shape[0]` rows from `start` on.

    Of an `expert`, where the tensor has all of a mixture's, maybe `turned`.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    expert: int | None = None
    turned: bool = False


class StackedSource:
    """A source over another one in which each matrix is a tensor of its own.

    So what is done matrix by matrix needs no other way for experts that are stacked, and for
    projections that are joined. The tensors that hold several are hidden; those of experts stay as
    they are unless `experts`.
    """

    def __init__(self, source: TensorSource, table: WeightTable, experts: bool = True) -> None:
        self.description, self.notes = source.description, source.notes
        self._source = source
        self._stored = set(source.names())
        self.matrices: dict[str, _Part] = {}
        for row in table.rows:
            for own in row.sources:
                if experts and "#" in own.name:
                    self._show_rows(row, own, table)
            for whole in row.others:
                if experts or row.sources[0].index is None:
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
            self.matrices[source.name] = _Part(name, source.index * high, (high, wide))

    def _show(self, row: Row, whole: Source, table: WeightTable) -> None:
        name = next((n for n in table.candidates(whole.name) if n in self._stored), None)
        if name is None:
            return
        for source in row.sources:
            shape = table.shape(row, source.axes)
            stacked = source.index is not None
            turned = stacked and whole.axes[1] == source.axes[1]  # columns first, as GPT-OSS's
            joined = whole.axes[2 if turned else 1 if stacked else 0]
            names = joined.removesuffix("/1").split("+")
            sizes = [table.spec.extent(axis, row.layer) for axis in names]
            starts = dict(zip(names, accumulate(sizes[:-1], initial=0), strict=True))
            start = starts.get(source.axes[0], 0)
            own = _Part(name, start, tuple(shape), source.index, turned)
            self.matrices[source.name] = own
            if source.index == 0 and row.layer is not None:
                for x in self._idle(name, table.spec.all_layers[row.layer].mlp):
                    idle = source.name.replace(".experts.0.", f".experts.{x}.")
                    self.matrices[idle] = own._replace(expert=x)

    def _idle(self, name: str, mixture: Any) -> range:
        """Experts of a tensor behind those that have a use (LongCat)."""
        if not isinstance(mixture, Experts) or not mixture.zeros:
            return range(0)
        return range(mixture.count, self._source.shape(name)[0])

    def whole(self, name: str) -> str:
        """The stored tensor that holds the matrix or tensor, which may be read as well."""
        part = self.matrices.get(name)
        return name if part is None else part.name

    def names(self) -> Iterable[str]:
        """Names of each matrix, and of all that hold no several."""
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
        rows, *rest = index or (slice(None),) * len(part.shape)
        start, stop, _ = rows.indices(part.shape[0])
        own = slice(part.start + start, part.start + max(start, stop))
        if part.expert is None:
            return self._source.read(part.name, (own, *rest))
        expert = slice(part.expert, part.expert + 1)
        if part.turned:
            return self._source.read(part.name, (expert, *rest, own))[0].T
        return self._source.read(part.name, (expert, own, *rest))[0]


def show_matrices(source: TensorSource, table: WeightTable, experts: bool = True) -> TensorSource:
    """The source with a tensor for each matrix, where it has one for several."""
    stacked = StackedSource(source, table, experts)
    return stacked if stacked.matrices else source


def has_rows_of_experts(table: WeightTable) -> bool:
    """True of a family whose files have a tensor of which each expert has some rows.

    Or of which those of a mixture have the first, where there are more without a use (LongCat).
    """
    if any(isinstance(layer.mlp, Experts) and layer.mlp.zeros for layer in table.spec.all_layers):
        return True
    templates = {id(rows): rows for rows in table.layers}.values()
    return any("#" in source.name for rows in templates for row in rows for source in row.sources)
