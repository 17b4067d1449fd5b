"""A source that shows what adapters make of a model's tensors while these are read.

With several adapters a weight is W + the sum of w x (f(W) - W), where f is an adapter's and w the
factor that the caller gives it. All is computed in float32 and rounded once, when the weight
becomes of the model's dtype.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...arrays import to_numpy
from ...errors import CheckpointError, counted, listing
from ...model.load_plan import TensorSource
from ...model.weights import FLOATS, WeightTable
from ...quantization import Matrices, QuantizedMatrix
from ...quantization.meaning import dequantize
from .adapted_names import RESIZED, Names, settled, shape_of
from .adapters import (
    Adapter,
    Change,
    Factor,
    LowRank,
    Made,
    Rows,
    Stack,
    Stored,
    sliced,
)
from .stacked import StackedSource


class AdaptedSource:
    """A source over another one that shows what adapters make of its tensors, in float32.

    `matrices` gives those that are stored as codes. A tensor of several experts' matrices that an
    adapter changes is shown as a tensor for each; `whole` says in which HF holds them.
    """

    def __init__(
        self,
        source: TensorSource,
        adapters: Sequence[Adapter],
        table: WeightTable | None = None,
        matrices: Matrices | None = None,
    ):
        self.description = source.description
        self._matrices, self._lock = matrices, threading.Lock()
        names = Names(source, table, matrices)
        found = [names.settle(adapter) for adapter in adapters]
        if table is not None:
            source = names.split([name for own in found for name in own.changes])
        self._source = source
        # By the name that a tensor is shown under: what each adapter makes of it, with its factor.
        self._changes: dict[str, list[tuple[Adapter, list[Change]]]] = {}
        self._bases: dict[str, str] = {}
        self._brought: dict[str, Factor] = {}
        self._factors: dict[tuple[str, int, int], np.ndarray] = {}
        self._last: tuple[str, np.ndarray] | None = None
        self._whole_made: dict[tuple[str, int, int], np.ndarray] = {}
        self._making = threading.RLock()
        self._idle: list[str] = []
        self._added = names.added()  # by name, the shape
        for adapter in found:
            self._take(adapter, names)
        self._untie(names)
        for name in names.beside(self._changes):
            shown_as, self._bases[shown_as] = names.find(name) or (name, name)
            self._changes.setdefault(shown_as, [])
        self._taken = {
            part
            for base in self._bases.values()
            if (matrix := self._matrix(base)) is not None
            for part in matrix.stored
        }
        self._wholes = names.wholes(self._changes)
        self._whole_of = {n: whole for whole, own in self._wholes.items() for n in own.places}
        self._fit_vocabulary(names, found)
        for name in self._changes:
            self._check(name, names)
        labels = [a.label + (f" times {a.weight:g}" if a.weight != 1 else "") for a in adapters]
        opened = sum(1 for base in self._bases.values() if self._matrix(base) is not None)
        notes = [f"merged: {', '.join(labels)}, into {len(self._changes)} tensors"]
        if opened:
            notes.append(f"{opened} quantized matrices are plain here, since adapters change them")
        self.own_notes = (*notes, *self._idle)
        self.notes = (*source.notes, *self.own_notes)

    def _take(self, adapter: Adapter, names: Names) -> None:
        """Note what an adapter changes, and the weights of the model that it brings along."""
        lost = []
        for name in dict.fromkeys((*adapter.bases, *adapter.changes)):
            found = names.find(name)
            if found is None and names.is_added(name):
                found = name, name
            elif found is None and names.knows(name) and adapter.shape_of(name):
                found = self._add(adapter, name)
            if found is None:
                lost.append(name)
                continue
            shown_as, self._bases[shown_as] = found
            if name in adapter.bases:
                self._brought[shown_as] = adapter.bases[name]
            own = self._changes.setdefault(shown_as, [])
            if name in adapter.changes:
                own.append((adapter, [*adapter.changes[name]]))
        idle = [name for name in lost if names.is_unused(name)]
        if idle:
            self._idle.append(f"{adapter.label} also changes {counted(idle)}, without use here")
        lost = [name for name in lost if name not in idle]
        if lost:
            raise CheckpointError(
                f"The adapter {adapter.label} changes what {self.description} does not hold: "
                f"{counted(lost)}. {names.why_lost(lost)}"
            )

    def _add(self, adapter: Adapter, name: str) -> tuple[str, str]:
        """The place, as `find` gives it, of a head that the adapter has and the model has not."""
        if name in self._changes:
            raise CheckpointError(
                f"The adapter {adapter.label} has {name}, which another one has as well and the "
                "model has none of. Pass one of them."
            )
        whole = [c for c in adapter.changes.get(name, ()) if isinstance(c, Factor)]
        self._brought[name] = whole[-1] if whole else adapter.bases[name]
        return name, name

    def _untie(self, names: Names) -> None:
        """Show on its own what is tied to a tensor that an adapter changes, unless it names both.

        It is what the model has, or what the adapter brings along; trained tokens are of both.
        """
        for name in list(self._changes):
            for other in names.tied_to(name):
                if other in self._changes:
                    continue
                stored, base = names.held(other), self._bases[name]
                tokens: list[tuple[Adapter, list[Change]]] = []
                for adapter, own in self._changes[name]:
                    if any(isinstance(change, Rows) for change in own):
                        tokens.append((adapter, [c for c in own if isinstance(c, Rows)]))
                follows = bool(tokens) or name in self._brought
                if stored is not None and not (follows and names.are_same(base, stored)):
                    continue
                shown_as = other if stored is None else stored
                self._bases[shown_as] = base if stored is None else stored
                self._changes[shown_as] = tokens
                if name in self._brought:
                    self._brought[shown_as] = self._brought[name]

    def _matrix(self, name: str) -> QuantizedMatrix | None:
        return None if self._matrices is None else self._matrices(name)

    @property
    def merged(self) -> frozenset[str]:
        """Names of the tensors that are made here."""
        return frozenset(self._changes)

    def names(self) -> Iterable[str]:
        """Names as stored, and those that adapters untie or dequantize."""
        kept = [n for n in self._source.names() if n not in self._taken]
        return dict.fromkeys((*kept, *self._changes))

    def whole(self, name: str) -> str:
        """The tensor in which HF has a merged matrix and others; the name itself of all others."""
        inner = self._source.whole(name) if isinstance(self._source, StackedSource) else name
        return self._whole_of.get(name, inner if inner in self._wholes else name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored; of what an adapter replaces or brings along that of the new one."""
        if name in self._wholes:
            is_stored = isinstance(self._source, StackedSource)  # maybe with idle experts
            return self._source.shape(name) if is_stored else self._wholes[name].shape
        for _, own in reversed(self._changes.get(name, [])):
            for change in reversed(own):
                if isinstance(change, Factor):
                    return change.shape
        return self._base_shape(name)

    def _base_shape(self, name: str) -> tuple[int, ...]:
        if name in self._brought:
            return self._brought[name].shape
        if name in self._added:
            return self._added[name]
        base = self._bases.get(name, name)
        matrix = self._matrix(base)
        return tuple(matrix.shape if matrix is not None else self._source.shape(base))

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype: float32 of what adapters make."""
        made = name in self._changes or name in self._wholes
        return "float32" if made else self._source.dtype(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor, or what of it is at `index`."""
        if name in self._wholes:
            return self._joined(name)[index or ...]
        if name not in self._changes:
            return self._source.read(name, index)
        shape = self.shape(name)
        whole = (slice(None),) * len(shape)
        part = tuple(slice(*i.indices(n)) for i, n in zip(index or whole, shape, strict=True))
        changes = self._changes[name]
        if len(changes) == 1 and changes[0][0].weight == 1:
            return self._adapted(name, 0, part)
        base = self._read_base(name, part)
        result = base.copy()
        for i, (adapter, _) in enumerate(changes):
            result += np.float32(adapter.weight) * (self._adapted(name, i, part) - base)
        return result

    def _adapted(
        self, name: str, place: int, part: tuple[slice, ...], most: int | None = None
    ) -> np.ndarray:
        """The part as one adapter makes it, by the first `most` of its changes."""
        adapter, own = self._changes[name][place]
        own = own[:most]
        replaced = [i for i, change in enumerate(own) if isinstance(change, Factor)]
        value = None if replaced else self._read_base(name, part)
        for i, change in enumerate(own):
            if replaced and i < replaced[-1]:
                continue
            if isinstance(change, Factor):
                value = change.read(part)
                continue
            assert value is not None
            if isinstance(change, Made):
                value = self._made(name, place, i)[part]
            elif isinstance(change, Rows):
                value = _with_rows(value, change, part)
            elif isinstance(change, Stack):
                numbers = range(part[0].start, part[0].stop)
                matrices = [change.matrix(x, adapter.held) for x in numbers]
                value = value + np.stack([_product(own, part[1:]) for own in matrices])
            elif isinstance(change, LowRank):
                value = value + _product(change, part)
                if change.magnitude is not None:
                    factor = self._factor(name, place, i)
                    value *= factor[part[1]] if change.turned else factor[part[0]][:, None]
            else:
                value = value + np.float32(change.scale) * change.values.read(part)
        assert value is not None
        return value

    def _read_base(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        if name in self._brought:
            return self._brought[name].read(part)
        if name in self._added:  # a bias where the model has none
            return np.zeros([i.stop - i.start for i in part], np.float32)
        base = self._bases[name]
        matrix = self._matrix(base)
        if matrix is None:
            return np.asarray(to_numpy(self._source.read(base, part)), np.float32)
        with self._lock:
            if self._last is None or self._last[0] != base:
                self._last = base, dequantize(matrix)
            return self._last[1][part]

    def _made(self, name: str, place: int, number: int) -> np.ndarray:
        """A whole tensor, made at once; the last two that were made are held."""
        key = name, place, number
        with self._making:
            if key not in self._whole_made:
                change = self._changes[name][place][1][number]
                assert isinstance(change, Made)
                every = tuple(slice(0, size) for size in self.shape(name))
                made = change.make(self._adapted(name, place, every, number))
                for old in [*self._whole_made][:-1]:
                    del self._whole_made[old]
                self._whole_made[key] = np.asarray(made, np.float32)
            return self._whole_made[key]

    def _factor(self, name: str, place: int, number: int) -> np.ndarray:
        """DoRA's factor of each output [out]: few rows of the matrix are read at a time."""
        with self._lock:
            held = self._factors.get((name, place, number))
        if held is not None:
            return held
        change = self._changes[name][place][1][number]
        assert isinstance(change, LowRank) and change.magnitude is not None
        rows, columns = self.shape(name)
        squares = np.zeros(columns if change.turned else rows, np.float64)
        few = max(1, _AT_ONCE // max(1, columns))
        for start in range(0, rows, few):
            part = slice(start, min(start + few, rows)), slice(0, columns)
            merged = self._adapted(name, place, part, number) + _product(change, part)
            if change.turned:
                squares += (merged.astype(np.float64) ** 2).sum(0)
            else:
                squares[part[0]] = (merged.astype(np.float64) ** 2).sum(1)
        with np.errstate(divide="ignore"):  # the reader refuses a weight that is not finite
            factor = (change.magnitude.read() / np.sqrt(squares)).astype(np.float32)
        with self._lock:
            self._factors[name, place, number] = factor
        return factor

    def _joined(self, name: str) -> np.ndarray:
        """A tensor of several matrices, as HF has it."""
        if isinstance(self._source, StackedSource):
            array = np.array(to_numpy(self._source.read(name)), np.float32)
        else:
            array = np.empty(self._wholes[name].shape, np.float32)
        for piece, place in self._wholes[name].places.items():
            value = np.asarray(to_numpy(self.read(piece)), np.float32)
            value = value.swapaxes(-1, -2) if place.turned else value
            array[place.within()] = value if place.expert is None else value[None]
        return array

    def _check(self, name: str, names: Names) -> None:
        """Settle how changes lie; CheckpointError for one of another shape than its tensor."""
        base = self._bases[name]
        made = name in self._brought or name in self._added
        plain = self._matrix(base) is None and not made
        if plain and self._source.dtype(base) not in FLOATS:
            raise CheckpointError(
                f"{base} of {self.description} is stored in {self._source.dtype(base)}, to which "
                "an adapter cannot be added here. Pass the model in 16 or 32 bits."
            )
        alone = len(self._changes[name]) == 1
        for adapter, own in self._changes[name]:
            shape = self._base_shape(name)
            for i, change in enumerate(own):
                own[i] = change = settled(change, shape, names.is_turned(name))
                found = shape_of(change, shape)
                if isinstance(change, Factor) and alone and adapter.weight == 1:
                    shape = found
                if found != shape:
                    raise CheckpointError(
                        f"The adapter {adapter.label} changes {name} by {found}, and that of "
                        f"{self.description} is {shape}. {names.why_misshapen(name, found, shape)}"
                    )

    def _fit_vocabulary(self, names: Names, adapters: Sequence[Adapter]) -> None:
        """Cut what the model has of a vocabulary of which adapters bring tables with fewer rows.

        So does HF, whose new rows of a longer one are drawn: CheckpointError where some are not
        brought along.
        """
        held, tables = set(self.names()), names.tables()
        sizes = {n: self.shape(n)[0] - spare for n, spare in tables.items() if n in held}
        stored = {
            name: self._source.shape(base)[0] - tables[name]
            for name in sizes
            if (base := self._bases.get(name, name)) in names.stored
        }
        brought = [n for n, size in sizes.items() if size != stored.get(n, size)]
        for name in sizes if brought else ():
            rows = sizes[brought[0]]
            if name in brought or sizes[name] == rows:
                continue
            if rows > sizes[name] or name not in names.stored or name in self._changes:
                raise CheckpointError(
                    f"{listing([a.label for a in adapters])} brings {listing(brought)} for a "
                    f"vocabulary of {rows}, and not {name}, of which {self.description} has "
                    f"{sizes[name]} rows. {RESIZED}"
                )
            whole = sliced(Stored(self._source, name), adapters[0].held)
            every = (slice(None),) * (len(whole.ranges) - 1)
            self._brought[name] = whole.cut(slice(rows + tables[name]), *every)
            self._bases[name], self._changes[name] = name, []


_AT_ONCE = 1 << 22  # elements


def _with_rows(value: np.ndarray, change: Rows, part: tuple[slice, ...]) -> np.ndarray:
    """Some rows of a matrix, with those in them that are trained."""
    value, trained = value.copy(), change.values.read()[:, part[1]]
    for row, own in zip(change.ids, trained, strict=True):
        if part[0].start <= row < part[0].stop:
            value[row - part[0].start] = own
    return value


def _product(change: LowRank, part: tuple[slice, ...]) -> np.ndarray:
    """scale x up x down, at the part of the matrix as it is stored."""
    every = slice(0, change.down.shape[0])
    out, inner = (part[1], part[0]) if change.turned else (part[0], part[1])
    up, down = change.up.read((out, every)), change.down.read((every, inner))
    delta = (up @ down) * np.float32(change.scale)
    return delta.T if change.turned else delta
