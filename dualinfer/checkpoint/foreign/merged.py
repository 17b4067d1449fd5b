"""Whole tensors made of parts of stored ones: joined, turned, their rows in another order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...arrays import numpy_dtype, to_numpy
from ...errors import CheckpointError
from ...model.load_plan import TensorSource
from ..files.pieces import Box

_FAR = 64  # rows that are read along rather than skipped


class Held(Protocol):
    """Named tensors that can be read by parts: a file, or a source."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        ...

    def dtype(self, name: str) -> str:
        """NumPy's name of its dtype."""
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor, or the part at `index`."""
        ...


class Shard(NamedTuple):
    """A stored tensor: a rank's part of one of the model's."""

    file: Held
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as stored."""
        return self.file.shape(self.name)

    @property
    def dtype(self) -> str:
        """NumPy's name of its dtype."""
        return self.file.dtype(self.name)


class Patch(NamedTuple):
    """A part of a joined tensor: `box` of it is what lies in a shard from `start` on."""

    box: Box
    shard: Shard
    start: tuple[int, ...]


@dataclass(frozen=True)
class Merge:
    """The recipe of a tensor: `patches` joined to `shape`, which are all of it.

    Then `order`, if there is one, says for each place along `axis` which of the joined it is; and a
    `turned` matrix is transposed.
    """

    shape: tuple[int, ...]
    dtype: str
    patches: tuple[Patch, ...]
    order: np.ndarray | None = None
    axis: int = 0
    turned: bool = False

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of what is made."""
        shape = list(self.shape)
        if self.order is not None:
            shape[self.axis] = len(self.order)
        return tuple(shape[::-1] if self.turned else shape)

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """The part at `index` of what is made."""
        box = Box.of(index, self.result)
        spans = [slice(a, b) for a, b in zip(*box, strict=True)]
        if self.turned:
            spans = spans[::-1]
        found = self._joined(spans) if self.order is None else self._ordered(spans, self.order)
        return np.ascontiguousarray(found.T) if self.turned else found

    def _ordered(self, spans: list[slice], order: np.ndarray) -> np.ndarray:
        places = order[spans[self.axis]]
        found = np.empty([s.stop - s.start for s in spans], numpy_dtype(self.dtype))
        if not found.size:
            return found
        by_place = np.argsort(places, kind="stable")
        ordered = places[by_place]
        start = 0
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) > _FAR) + 1):
            own = list(spans)
            own[self.axis] = slice(int(run[0]), int(run[-1]) + 1)
            targets = by_place[start : start + len(run)]
            held = self._joined(own).take(run - run[0], self.axis)
            found[(*(slice(None),) * self.axis, targets)] = held
            start += len(run)
        return found

    def _joined(self, spans: Sequence[slice]) -> np.ndarray:
        wanted = Box(tuple(s.start for s in spans), tuple(s.stop for s in spans))
        out = np.empty(wanted.shape, numpy_dtype(self.dtype))
        for box, shard, start in self.patches:
            common = wanted.overlap(box)
            if not common.size:
                continue
            index = tuple(
                slice(s.start + at, s.stop + at)
                for s, at in zip(common.within(box), start, strict=True)
            )
            array = shard.file.read(shard.name, index)
            out[(*common.within(wanted), ...)] = to_numpy(array)
        return out


def take(shard: Shard) -> Merge:
    """A tensor as it is stored."""
    shape = shard.shape
    patch = Patch(Box.of(None, shape), shard, (0,) * len(shape))
    return Merge(shape, shard.dtype, (patch,))


def join(
    shards: Sequence[Shard],
    axis: int,
    blocks: Sequence[int] = (),
    taken: Sequence[int] | None = None,
) -> Merge:
    """The shards, in order, joined along `axis`.

    With `blocks`, how long several tensors in one are along that axis, each shard holds a part of
    each, one after another, as long as its share of the whole; `taken` are those that are wanted.
    Raises ValueError that says what does not fit.
    """
    shapes = [shard.shape for shard in shards]
    rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(rest) != 1 or len({len(shape) for shape in shapes}) != 1 or len(shapes[0]) <= axis:
        raise ValueError(f"shards of shapes {_listed(shapes)}")
    kinds = {shard.dtype for shard in shards}
    if len(kinds) > 1:
        raise ValueError(f"shards of dtypes {' and '.join(sorted(kinds))}")
    lengths = [shape[axis] for shape in shapes]
    total = sum(lengths)
    blocks = tuple(blocks) or (total,)
    if sum(blocks) != total or any(b * n % max(1, total) for b in blocks for n in lengths):
        raise ValueError(f"shards of {_listed(lengths)} rows, for blocks of {_listed(blocks)}")
    patches, at = [], 0
    for number in range(len(blocks)) if taken is None else taken:
        for shard, length in zip(shards, lengths, strict=True):
            parts = [block * length // max(1, total) for block in blocks]
            start, size = sum(parts[:number]), parts[number]
            if size:
                patches.append(_patch(shard, axis, at, start, size))
            at += size
    shape = (*shapes[0][:axis], at, *shapes[0][axis + 1 :])
    return Merge(shape, shards[0].dtype, tuple(patches))


def _patch(shard: Shard, axis: int, at: int, start: int, size: int) -> Patch:
    """`size` places along `axis` of a shard from `start` on, in the joined tensor from `at` on."""
    shape = shard.shape
    starts, stops = [0] * len(shape), list(shape)
    starts[axis], stops[axis] = at, at + size
    inside = [0] * len(shape)
    inside[axis] = start
    return Patch(Box(tuple(starts), tuple(stops)), shard, tuple(inside))


def cut(merge: Merge, rows: int) -> Merge:
    """The first `rows` of a joined tensor, which has none of its axes turned or ordered."""
    assert merge.order is None and not merge.turned
    limit = Box((0,) * len(merge.shape), (rows, *merge.shape[1:]))
    patches = [Patch(limit.overlap(box), shard, start) for box, shard, start in merge.patches]
    kept = tuple(patch for patch in patches if patch.box.size)
    return replace(merge, shape=(rows, *merge.shape[1:]), patches=kept)


def _listed(values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    return ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")


def swap(count: int, axes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """The order of `count` rows that have `axes` of their own, once these are in another order.

    Raises ValueError where the axes do not divide the rows.
    """
    return np.arange(count).reshape(axes).transpose(order).reshape(-1)


class MergedSource:
    """Tensors by HF's names, each made when it is read, of the parts that the read touches.

    Raises CheckpointError where the file of one rank is a copy of another's.
    """

    def __init__(
        self, tensors: Mapping[str, Merge], description: str, notes: Sequence[str] = ()
    ) -> None:
        _check_copies(tensors, description)
        self._tensors = dict(tensors)
        self.description, self.notes = description, tuple(notes)

    def names(self) -> Iterable[str]:
        """HF's names; the files' own of what HF has not."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._tensors[name].result

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype."""
        return self._tensors[name].dtype

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or the part of it at `index`; bfloat16 by ml_dtypes."""
        return self._tensors[name].read(index)


class RenamedSource:
    """The tensors of another source under other names."""

    def __init__(self, source: TensorSource, stored: Mapping[str, str], notes: Sequence[str]):
        self._source, self._stored = source, dict(stored)
        self.description, self.notes = source.description, (*source.notes, *notes)

    def names(self) -> Iterable[str]:
        """The new names."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return self._source.shape(self._stored[name])

    def dtype(self, name: str) -> str:
        """NumPy's name of the stored dtype."""
        return self._source.dtype(self._stored[name])

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """As of the source."""
        return self._source.read(self._stored[name], index)


def check_alike(shards: Sequence[Shard], label: str) -> None:
    """Raise CheckpointError unless the ends of each shard are those of the first one.

    A tensor that every rank holds whole is taken once.
    """
    first = shards[0]
    if any(_ends(shard) != _ends(first) for shard in shards[1:]):
        raise CheckpointError(
            f"{label}: {first.name} {first.shape} is whole in each rank's file, and not the "
            "same in all. Were the files written by one run? Write them again."
        )


def _check_copies(tensors: Mapping[str, Merge], label: str) -> None:
    """Raise CheckpointError where two ranks have the same part of every tensor that they share.

    What is the same number everywhere, as biases of zeros are, tells nothing.
    """
    parts: dict[int, dict[str, tuple[bytes, ...]]] = {}
    files: dict[int, Held] = {}
    for merge in tensors.values():
        shards = {id(patch.shard.file): patch.shard for patch in merge.patches}
        for key, shard in shards.items() if len(shards) > 1 else ():
            files[key] = shard.file
            parts.setdefault(key, {})[shard.name] = _ends(shard)
    seen: dict[Any, int] = {}
    for key, own in parts.items():
        telling = {n: ends for n, ends in own.items() if any(len({*end}) > 1 for end in ends)}
        first = seen.setdefault(tuple(telling.items()), key) if telling else key
        if first != key:
            names = [str(getattr(files[k], "path", "a file")) for k in (first, key)]
            raise CheckpointError(
                f"{label}: {names[1]} holds the same weights as {names[0]}, which is the file of "
                "another rank. Copy or fetch that rank's own file again."
            )


def _ends(shard: Shard) -> tuple[bytes, ...]:
    """The first few and the last few elements along each axis of a shard."""
    parts = [[slice(0, min(n, 4)) for n in shard.shape]]
    parts.append([slice(max(0, n - 4), n) for n in shard.shape])
    return tuple(to_numpy(shard.file.read(shard.name, tuple(p))).tobytes() for p in parts)
