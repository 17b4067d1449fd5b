"""Sharded checkpoints: HF's tensors in pieces, a file for each device that wrote some of them.

The index says for each tensor its shape, its dtype and where its pieces lie, so that any part of
it can be read, whatever the number of devices that read or wrote it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from ...arrays import numpy_dtype
from ...errors import CheckpointError, shortened
from ...model.load_plan import LoadPlan, MadeSource, TensorSource
from ...parallel.shard import Shard
from .safetensors import TensorFile, check_inside, read_json

INDEX = "dualinfer.index.json"
_MOST = 2**62  # elements along an axis, so that sums fit 64 bits
_FORMAT, _VERSION = "dualinfer-sharded", 1


class Box(NamedTuple):
    """A part of a tensor: elements `starts` to `stops` of its axes."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, index: Sequence[slice] | None, shape: Sequence[int]) -> Self:
        """The box at `index` of a tensor; None is all of it."""
        parts = [slice(None)] * len(shape) if index is None else index
        bounds = [part.indices(size)[:2] for part, size in zip(parts, shape, strict=True)]
        return cls(tuple(a for a, _ in bounds), tuple(max(a, b) for a, b in bounds))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(b - a for a, b in zip(self.starts, self.stops, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def overlap(self, other: "Box") -> "Box":
        """The box that lies in both; its size is 0 where nothing does."""
        starts = tuple(map(max, self.starts, other.starts))
        return Box(starts, tuple(map(max, starts, map(min, self.stops, other.stops))))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The index of this box in an array that holds `outer`."""
        return tuple(
            slice(a - start, b - start)
            for a, b, start in zip(self.starts, self.stops, outer.starts, strict=True)
        )


class Piece(NamedTuple):
    """A part of a tensor, and the file and the key under which it lies."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class Tensor:
    """One of HF's tensors: its shape, its dtype by NumPy's name, and its pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    def check(self, name: str, where: Path) -> None:
        """Raise CheckpointError unless the pieces are all of the tensor, and nothing twice."""
        whole = Box.of(None, self.shape)
        for piece in self.pieces:
            if len(piece.box.starts) != len(self.shape) or piece.box.overlap(whole) != piece.box:
                raise _damaged(where, f"{name} {self.shape} has a piece outside of it, {piece.box}")
            if not piece.box.size:
                raise _damaged(where, f"{name} has a piece without elements, {piece.key}")
        twice = _find_overlap([piece.box for piece in self.pieces])
        if twice is not None:
            one, other = (self.pieces[i].key for i in twice)
            raise _damaged(where, f"{name} has pieces that overlap: {one}, {other}")
        held = sum(piece.box.size for piece in self.pieces)
        if held != whole.size:
            raise _damaged(where, f"{name} has pieces of {held} elements, expected {whole.size}")


def _find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes that have elements in common, by their places in the list.

    Along the axis that parts them best, each is compared with those that begin within it.
    """
    if len(boxes) < 2:
        return None
    starts, stops = (np.array([box[i] for box in boxes], np.int64) for i in (0, 1))
    if not starts.shape[1]:
        return 0, 1
    axis = max(range(starts.shape[1]), key=lambda i: len(np.unique(starts[:, i])))
    order = np.argsort(starts[:, axis], kind="stable")
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(starts[:, axis], stops[:, axis])
    for i, end in enumerate(ends):
        if end <= i + 1:
            continue
        near = slice(i + 1, end)
        common = (starts[near] < stops[i]).all(1) & (starts[i] < stops[near]).all(1)
        if common.any():
            return int(order[i]), int(order[i + 1 + common.argmax()])
    return None


def _damaged(where: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {problem}. The checkpoint is damaged or was changed; write it again with "
        "save_mp_checkpoint_path."
    )


class Cut(NamedTuple):
    """A piece to write: HF's name of the tensor, and what to read by its name in the source.

    `dtype` is what it is written in, by NumPy's name; `shape` is the whole tensor's.
    """

    name: str
    stored: str
    dtype: str
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    piece: Piece


def cut_pieces(
    shards: Sequence[Shard],
    plan: LoadPlan,
    source: TensorSource,
    dtype: str,
    kept: Sequence[str] = (),
) -> list[list[Cut]]:
    """Cut the tensors for each shard's file: those that it reads, and no shard before it.

    All is in `dtype`, but the tensors of a quantized checkpoint's weights and those that are `kept`
    of it, by their stored names: they stay as they are stored. Of these and of what is kept of
    others each file has as many rows.
    """
    table, seen, cuts = plan.table, set(), []
    whole = [(name, source.shape(name), dtype) for name in kept]
    made: set[str] = set()
    if isinstance(source, MadeSource):
        plain, taken = source.plain(), source.taken()
        whole = [(name, plain.shape(name), plain.dtype(name)) for name in (*taken, *kept)]
        made = set(source.names()).difference(plain.names()).union(taken)
    for shard in shards:
        file, own = shard_name(shard.rank, len(shards)), []
        for name, shape, kind in whole:
            ends = (
                [shape[0] * i // len(shards) for i in (shard.rank, shard.rank + 1)] if shape else []
            )
            part = (slice(*ends), *map(slice, shape[1:])) if shape else ()
            box = Box.of(part, shape)
            if box.size and (shape or not shard.rank):
                own.append(
                    Cut(name, name, kind, shape, part, Piece(box, file, _key(name, box, shape)))
                )
        for row, names in plan.rows:
            if row.scheme is not None:
                continue
            for part, stored in zip(row.sources, names, strict=True):
                if stored in made:  # a quantized matrix that the engine takes by its values
                    continue
                shape = table.shape(row, part.axes)
                for read in shard.reads(row, part):
                    box = Box.of(read.index, shape)
                    if box.size and (part.name, box) not in seen:
                        seen.add((part.name, box))
                        piece = Piece(box, file, _key(part.name, box, shape))
                        own.append(Cut(part.name, stored, dtype, shape, read.index, piece))
        cuts.append(own)
    return cuts


def shard_name(rank: int, size: int) -> str:
    """The file of one shard; a model of one is a file that HF reads."""
    return f"shard-{rank:02}-of-{size:02}.safetensors" if size > 1 else "model.safetensors"


def _key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    if box.shape == shape:
        return name
    return f"{name}[{', '.join(f'{a}:{b}' for a, b in zip(*box, strict=True))}]"


def make_index(cuts: Iterable[Sequence[Cut]]) -> dict[str, Any]:
    """The content of the index file of pieces."""
    pieces: dict[str, list[Piece]] = {}
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for cut in (cut for own in cuts for cut in own):
        pieces.setdefault(cut.name, []).append(cut.piece)
        dtypes[cut.name], shapes[cut.name] = cut.dtype, cut.shape
    for name, tensor_pieces in pieces.items():
        Tensor(shapes[name], dtypes[name], tuple(tensor_pieces)).check(name, Path(INDEX))
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "tensors": {
            name: {
                "shape": shapes[name],
                "dtype": dtypes[name],
                "pieces": [
                    {"file": file, "key": key, "offset": box.starts, "shape": box.shape}
                    for box, file, key in tensor_pieces
                ],
            }
            for name, tensor_pieces in pieces.items()
        },
    }


def piece_files(index: Path) -> list[str]:
    """The files that an index of pieces names."""
    tensors = _read_index(index).values()
    return sorted({piece.file for tensor in tensors for piece in tensor.pieces})


class ShardedSource:
    """Tensors of a sharded checkpoint: each read puts together the pieces that it touches."""

    notes: tuple[str, ...] = ()

    def __init__(self, folder: Path):
        self.description = str(folder)
        index = folder / INDEX
        self._tensors = _read_index(index)
        files = {piece.file for tensor in self._tensors.values() for piece in tensor.pieces}
        self._files = {file: TensorFile(folder / file) for file in sorted(files)}
        self.metadata = {k: v for own in self._files.values() for k, v in own.metadata.items()}
        for name, tensor in self._tensors.items():
            tensor.check(name, index)
            for box, file, key in tensor.pieces:
                held = self._files[file]
                if key not in held.names():
                    raise _damaged(held.path, f"{key}, which the index names, is not in it")
                if (held.shape(key), held.dtype(key)) != (box.shape, tensor.dtype):
                    found = f"{held.dtype(key)} {held.shape(key)}"
                    problem = f"{key} is {found}, expected {tensor.dtype} {box.shape}"
                    raise _damaged(held.path, problem)

    def names(self) -> Iterable[str]:
        """HF's names."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype."""
        return self._tensors[name].dtype

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or the part of it at `index`; bfloat16 by ml_dtypes."""
        tensor = self._tensors[name]
        wanted = Box.of(index, tensor.shape)
        result = np.empty(wanted.shape, numpy_dtype(tensor.dtype))
        for box, file, key in tensor.pieces:
            common = wanted.overlap(box)
            if common.size:
                out = result[(*common.within(wanted), ...)]
                self._files[file].read(key, common.within(box), out)
        return result


def _read_index(path: Path) -> Mapping[str, Tensor]:
    """The tensors of an index file, by name; its form is checked, not what the files hold."""
    content = read_json(path)
    if content.get("format") != _FORMAT:
        raise _damaged(path, f"its format is {content.get('format')!r}, expected {_FORMAT!r}")
    if content.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} is of version {content.get('version')!r}, and this dualinfer reads "
            f"{_VERSION}. Read it with the dualinfer that wrote it, or a later one."
        )
    try:
        return {
            name: Tensor(
                _counts(fields["shape"]),
                str(fields["dtype"]),
                tuple(_read_piece(path, piece) for piece in fields["pieces"]),
            )
            for name, fields in content["tensors"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(path, f"a tensor is not described in full ({error!r})") from error


def _read_piece(path: Path, said: Mapping[str, Any]) -> Piece:
    starts, shape = _counts(said["offset"]), _counts(said["shape"])
    stops = tuple(a + n for a, n in zip(starts, shape, strict=True))
    return Piece(Box(starts, stops), check_inside(path, said["file"]), str(said["key"]))


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(
        type(n) is not int or not 0 <= n <= _MOST for n in values
    ):
        raise ValueError(f"{shortened(values)} is no list of numbers from 0 on")
    return tuple(values)
