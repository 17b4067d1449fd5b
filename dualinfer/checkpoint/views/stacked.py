"""Matrices that a source holds several of in one tensor, by the names that other files have."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ...model.load_plan import TensorSource
from ...model.spec import Experts
from ...model.weights import Row, Source, WeightTable


class Place(NamedTuple):
    """A name's part of a tensor: `shape[-2]` rows, or `shape[0]` elements, from `start` on.

    Of an `expert`, where the tensor has all of a mixture's and the name is one's. `turned`: the
    tensor has the columns of a matrix before its rows.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    expert: int | None = None
    turned: bool = False

    def within(self, part: tuple[slice, ...] | None = None) -> tuple[slice, ...]:
        """The tensor's slices for a part of what the name means; an expert's with its own axis."""
        part = part or (slice(None),) * len(self.shape)
        *lead, rows = part if len(part) == 1 else part[:-1]
        start, stop, _ = rows.indices(self.shape[len(lead)])
        own = slice(self.start + start, self.start + max(start, stop))
        lead = [slice(self.expert, self.expert + 1)] if self.expert is not None else lead
        inner = (own, *part[len(part) - 1 :]) if len(part) > 1 else (own,)
        return (*lead, *(inner[::-1] if self.turned else inner))


def places_of(row: Row, whole: Source, table: WeightTable, name: str = "") -> dict[str, Place]:
    """By the names of a row's sources, what a tensor that may stand for all of them has of each."""
    places = {}
    for source in row.sources:
        shape = table.shape(row, source.axes)
        inner = whole.axes[len(whole.axes) - len(shape) :]
        turned = len(whole.axes) == 3 and inner[-2] == source.axes[-1]  # as GPT-OSS's
        at = len(shape) - (1 if turned or len(shape) == 1 else 2)
        joined = inner[at].removesuffix("/1").split("+")
        sizes = [table.spec.extent(axis, row.layer) for axis in joined]
        starts = dict(zip(joined, accumulate(sizes[:-1], initial=0), strict=True))
        own = source.axes[max(0, len(shape) - 2)]
        start = starts.get(own, 0)
        places[source.name] = Place(name, start, tuple(shape), source.index, turned)
    return places


def rows_of_experts(row: Row, table: WeightTable, name: str = "") -> dict[str, Place]:
    """By the names of a row's sources, each some rows of a tensor, what that has of them."""
    return {
        source.name: Place(name, source.index * shape[0], tuple(shape))
        for source in row.sources
        if "#" in source.name and source.index is not None
        for shape in [table.shape(row, source.axes)]
    }


@runtime_checkable
class Splits(Protocol):
    """A source that shows matrices by themselves which lie in one tensor."""

    def whole(self, name: str) -> str:
        """The tensor that holds a matrix, which may be read as well; of any other name itself."""
        ...


class StackedSource:
    """A source over another one in which each matrix is a tensor of its own.

    So what is done matrix by matrix needs no other way for experts that are stacked, and for
    projections that are joined. The tensors that hold several are hidden; those stay as they are of
    whose rows `splits` is False.
    """

    def __init__(
        self,
        source: TensorSource,
        table: WeightTable,
        splits: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        self.description, self.notes = source.description, source.notes
        self._source = source
        self._stored = set(source.names())
        self.matrices: dict[str, Place] = {}
        for row in table.rows:
            is_other = len(row.axes) > 1 and not row.is_weight  # such as a convolution's kernel
            if not row.sources or is_other or not splits(row):
                continue
            self._show_rows(row, table)
            for whole in row.others:
                self._show(row, whole, table)
        self._hidden = {part.name for part in self.matrices.values()}

    def _show_rows(self, row: Row, table: WeightTable) -> None:
        for source in row.sources:
            stem = source.name.partition("#")[0]
            name = next((n for n in table.candidates(stem) if n in self._stored), None)
            if stem == source.name or name is None:
                continue
            high, wide = table.shape(row, source.axes)
            if self._source.shape(name) == (high * table.spec.extent("experts", row.layer), wide):
                self.matrices[source.name] = rows_of_experts(row, table, name)[source.name]

    def _show(self, row: Row, whole: Source, table: WeightTable) -> None:
        name = next((n for n in table.candidates(whole.name) if n in self._stored), None)
        if name is None:
            return
        for source, own in places_of(row, whole, table, name).items():
            self.matrices[source] = own
            if own.expert == 0 and row.layer is not None:
                for x in self._idle(name, table.spec.all_layers[row.layer].mlp):
                    idle = source.replace(".experts.0.", f".experts.{x}.")
                    self.matrices[idle] = own._replace(expert=x)

    def _idle(self, name: str, mixture: Any) -> range:
        """Experts of a tensor behind those that have a use (LongCat)."""
        if not isinstance(mixture, Experts) or not mixture.idle:
            return range(0)
        return range(mixture.count, self._source.shape(name)[0])

    def whole(self, name: str) -> str:
        """The stored tensor that holds the matrix or tensor, which may be read as well."""
        part = self.matrices.get(name)
        if part is not None:
            return part.name
        return self._source.whole(name) if isinstance(self._source, Splits) else name

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
        held = self._source.read(part.name, part.within(index))
        held = held if part.expert is None else held[0]
        return held.swapaxes(-1, -2) if part.turned else held


def show_matrices(
    source: TensorSource, table: WeightTable, splits: Callable[[Row], bool] = lambda row: True
) -> TensorSource:
    """The source with a tensor for each matrix, where it has one for several."""
    stacked = StackedSource(source, table, splits)
    return stacked if stacked.matrices else source


def has_rows_of_experts(table: WeightTable) -> bool:
    """True of a family whose files have a tensor of which each expert has some rows.

    Or of which those of a mixture have the first, where there are more without a use (LongCat).
    """
    if any(isinstance(layer.mlp, Experts) and layer.mlp.idle for layer in table.spec.all_layers):
        return True
    templates = {id(rows): rows for rows in table.layers}.values()
    return any("#" in source.name for rows in templates for row in rows for source in row.sources)
