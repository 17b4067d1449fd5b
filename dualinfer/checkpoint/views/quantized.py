"""Quantized weights of a checkpoint as canonical codes and scales, under names of their own."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...arrays import numpy_dtype
from ...errors import CheckpointError, ConfigError, blamed_on, counted
from ...model.load_plan import TensorSource, is_same
from ...model.weights import FLOATS, Row, WeightTable
from ...quantization import (
    BlockScheme,
    QuantizedMatrix,
    find_method,
    quantization_of,
    read_quantization,
)
from ...quantization.formats import Opener
from ...quantization.meaning import dequantize
from ...quantization.quantize import Quantizing, Recent
from ...quantization.recipe import HEAD, Recipe
from ...quantization.scheme import TakesBlocks
from .adapted import AdaptedSource
from .adapters import Adapter
from .stacked import has_rows_of_experts, show_matrices


class QuantizedSource:
    """A source over another one that shows the canonical parts of its quantized matrices.

    The codes [out, in] have HF's name of the weight, and what is beside them the part's name behind
    a colon: `w:scale@32x128` has a scale for each block of 32 rows and 128 columns, which divide
    those of the matrix; 0 are all. The stored tensors that matrices take are hidden, and all others
    shown as they are. Scales of eight bits are shown as their bytes. Of the `dense` ones, by HF's
    names, it shows what their codes mean, float32, under the name of the weight.
    """

    def __init__(
        self,
        source: TensorSource,
        matrices: Opener,
        names: Iterable[str],
        dense: Iterable[str] = (),
    ):
        self.description, self.notes = source.description, source.notes
        with blamed_on(source.description):
            found = {name: matrices(name) for name in dict.fromkeys(names)}
        self._matrices = {name: matrix for name, matrix in found.items() if matrix is not None}
        self._source, self._lock = source, threading.Lock()
        self._last: tuple[str, np.ndarray] | None = None
        stored = set(source.names())
        self._taken = {part for m in self._matrices.values() for part in m.stored}
        missing = sorted(self._taken - stored)
        if missing:
            raise CheckpointError(
                f"The quantized weights of {self.description} do not fit its config: missing "
                f"{counted(missing)}. Was the checkpoint fetched or saved in full?"
            )
        self._plain = [name for name in source.names() if name not in self._taken]
        self._dense = {n: self._matrices.pop(n) for n in dense if n in self._matrices}

    def matrix(self, name: str) -> QuantizedMatrix | None:
        """The matrix of HF's name; None where it is stored as it is."""
        return self._matrices.get(name)

    def plain(self) -> TensorSource:
        """The source as it is stored."""
        return self._source

    def taken(self) -> list[str]:
        """The stored tensors that quantized weights are made of."""
        return sorted(self._taken)

    def names(self) -> Iterable[str]:
        """Names of what is plain, and of codes."""
        parts = [name for n, m in self._matrices.items() for name in _names(n, m)]
        return [*self._plain, *self._dense, *parts]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor or part."""
        if name in self._dense:
            return self._dense[name].shape
        matrix, part, blocks = self._find(name)
        if matrix is None:
            return self._source.shape(name)
        rows, columns = matrix.shape
        if part in ("scale", "zero"):
            return _count(rows, blocks[0]), matrix.scheme.groups or _count(columns, blocks[1])
        return {"outer": (rows,), "group": (columns,), "input": ()}.get(part, matrix.shape)

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype."""
        if name in self._dense:
            return "float32"
        matrix, part, _ = self._find(name)
        if matrix is None:
            return self._source.dtype(name)
        scheme = matrix.scheme
        if part == "scale":
            return "uint8" if scheme.scale_dtype.startswith("float8") else scheme.scale_dtype
        names = {"": scheme.code.stored, "zero": "uint8", "group": "int32"}
        return names.get(part, "float32")

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor or part, or what of it is at `index`; codes as devices hold them."""
        with blamed_on(f"{name} of {self.description}"):
            return self._read(name, index)

    def _read(self, name: str, index: tuple[slice, ...] | None) -> Any:
        if name in self._dense:
            return dequantize(self._dense[name])[index or ...]
        matrix, part, blocks = self._find(name)
        if matrix is None:
            return self._source.read(name, index)
        shape = self.shape(name)
        whole = (slice(None),) * len(shape)
        index = tuple(slice(*i.indices(n)) for i, n in zip(index or whole, shape, strict=True))
        if not part:
            return _codes(matrix, *index)
        if part not in ("scale", "zero"):
            values = getattr(matrix, "input_scale" if part == "input" else part)()
            dtype = "int32" if part == "group" else "float32"
            return np.asarray(np.asarray(values, dtype).reshape(shape)[index])
        own = matrix.scheme.rows, 1 if matrix.scheme.groups else matrix.scheme.columns
        steps = blocks[0], 1 if matrix.scheme.groups else blocks[1]
        places = [
            np.arange(i.start, i.stop) * step // block if block else np.zeros(i.stop - i.start, int)
            for i, step, block in zip(index, steps, own, strict=True)
        ]
        if not all(at.size for at in places):
            return np.empty([at.size for at in places], numpy_dtype(self.dtype(name)))
        if isinstance(matrix, TakesBlocks):
            spans = [slice(at[0], at[-1] + 1) for at in places]
            held = matrix.take_blocks(part, *spans)
            places = [at - span.start for at, span in zip(places, spans, strict=True)]
        else:
            held = self._whole(name.partition("@")[0], matrix, part)
        array = held[np.ix_(*places)]
        if part == "zero":
            return array.view(np.uint8) + np.uint8(matrix.scheme.code.raised)
        return array.view(np.uint8) if matrix.scheme.scale_dtype.startswith("float8") else array

    def _whole(self, key: str, matrix: QuantizedMatrix, part: str) -> np.ndarray:
        """All scales or zeros of a matrix; those read last are held for the next device's share."""
        with self._lock:
            if self._last is not None and self._last[0] == key:
                return self._last[1]
        whole = matrix.scale() if part == "scale" else matrix.zero()
        assert whole is not None
        rows, columns = matrix.shape
        own = matrix.scheme
        shape = _count(rows, own.rows), own.groups or _count(columns, own.columns)
        if whole.shape != shape:
            raise CheckpointError(
                f"{key.partition(':')[0]} of {self.description}: its {part}s are {whole.shape}, "
                f"expected {shape}."
            )
        with self._lock:
            self._last = key, whole
        return whole

    def _find(self, name: str) -> tuple[QuantizedMatrix | None, str, tuple[int, int]]:
        """The matrix of a name, which part of it, and the blocks of its scales."""
        own, _, part = name.partition(":")
        matrix = self._matrices.get(own)
        part, _, blocks = part.partition("@")
        rows, _, columns = blocks.partition("x")
        return matrix, part, (int(rows or 0), int(columns or 0))


@runtime_checkable
class HoldsMatrices(Protocol):
    """A source whose tensors say by themselves how they are quantized."""

    def matrices(self) -> Opener | None:
        """The matrices of its quantized weights; None where it has none."""
        ...


def open_quantized(
    source: TensorSource, table: WeightTable, matrices: Opener
) -> tuple[QuantizedSource, WeightTable]:
    """The source that shows canonical parts, and the table of the rows that they make."""
    rows = [row for row in table.rows if row.is_weight] + [row for row, _ in table.tied]
    tied = [name for _, name in table.tied]
    names = [source.name for row in rows for source in row.sources] + tied
    dense = [part.name for row in rows if row.dense for part in row.sources]
    spelt, dense = ([c for n in own for c in table.candidates(n)] for own in (names, dense))
    quantized = QuantizedSource(source, matrices, spelt, dense)
    return quantized, replace(table, matrices=quantized.matrix)


# A rounded one would choose other experts, or weigh all that the shared one gives, for few bytes.
_PLAIN = ("router.weight", "shared.gate.weight", "sides.weight")


def quantize_by(recipe: Recipe, table: WeightTable, source: TensorSource) -> Opener:
    """The matrices of a plain source, quantized when they are read.

    Those are the layers' and the head: it, and an embedding that is the head, are HEAD, and all
    else that lies outside of the layers stays plain, as routers do.
    """
    stored = set(source.names())
    schemes: dict[str, tuple[BlockScheme | None, bool]] = {}

    def find(name: str) -> str | None:
        return next((c for c in table.candidates(name) if c in stored), None)

    def is_one(row: Row, name: str) -> bool:
        """True if a head and an embedding that the config ties are one: a file may hold both."""
        own, other = find(row.sources[0].name), find(name)
        return own is None or other is None or is_same(source, own, other)

    tied = {name for row, name in table.tied if row.name == "head.weight" and is_one(row, name)}
    # A live module has the embedding by each of its names.
    tied |= {part.name for row, name in table.tied if name in tied for part in row.sources}
    for row in (*table.rows, *(row for row, _ in table.tied)):
        for part in row.sources if row.is_weight and not row.dense else ():
            if row.layer is not None:
                is_qkv = {axis.rstrip("12") for axis in row.axes[0].split("+")} <= {"q", "k", "v"}
                scheme = recipe.scheme if recipe.qkv or not is_qkv else None
                scheme = None if row.local_name in _PLAIN else scheme
            else:
                scheme = HEAD if row.name == "head.weight" or part.name in tied else None
            turned = row.permutation(part) != tuple(sorted(row.permutation(part)))
            schemes.update((name, (scheme, turned)) for name in table.candidates(part.name))

    recent = Recent()

    def matrix(name: str) -> QuantizedMatrix | None:
        scheme, turned = schemes.get(name, (None, False))
        if scheme is None or name not in stored:
            return None
        size = source.shape(name)
        if len(size) != 2 or source.dtype(name) not in FLOATS:
            return None  # the load plan says what is wrong with it
        shape = (size[1], size[0]) if turned else (size[0], size[1])
        if scheme is recipe.scheme:
            scheme = recipe.scheme_of(name, shape)
        return Quantizing(source, name, scheme, turned, recent)

    return Opener(matrix)


def open_as_held(
    source: TensorSource,
    table: WeightTable,
    config: Mapping[str, Any],
    recipe: Recipe | None,
    quantize: Callable[[Recipe, WeightTable, TensorSource], Opener] = quantize_by,
    adapters: Sequence[Adapter] = (),
) -> tuple[TensorSource, WeightTable, tuple[str, ...]]:
    """The source and the table of weights as a device holds them, and notes for people.

    They are quantized where the model's HF config or the source says so, or where there is a
    `recipe`, by which `quantize` makes them, once the `adapters` are merged. Raises ConfigError
    where both ask for it.
    """
    own, stored = quantization_of(config), read_quantization(config)
    matrices = source.matrices() if isinstance(source, HoldsMatrices) else None
    if recipe is not None:
        if own is not None or matrices is not None:
            method = "GGUF" if own is None else find_method(own)
            raise ConfigError(
                f"quant is given, and the weights of {source.description} are quantized already "
                f"({method}). Leave it unset, or pass the model that they were made from."
            )
    elif stored is not None:
        with blamed_on(f"The quantization of {source.description}"):
            matrices = stored(source)
    notes = () if matrices is None else matrices.notes
    if adapters:
        source = AdaptedSource(source, adapters, table, matrices)
        merged, held = source.merged, matrices
        notes += source.own_notes
        if held is not None:
            matrices = replace(held, open=lambda name: None if name in merged else held(name))
    if recipe is not None or has_rows_of_experts(table):
        source = show_matrices(source, table)
    if recipe is not None:
        matrices = quantize(recipe, table, source)
    if matrices is None:
        return source, table, notes
    return *open_quantized(source, table, matrices), notes


def _names(name: str, matrix: QuantizedMatrix) -> Iterable[str]:
    """The names of a matrix' parts, in its own blocks."""
    scheme = matrix.scheme
    at = f"@{scheme.rows}x{scheme.columns}"
    yield name
    yield f"{name}:scale{at}"
    if scheme.zeros:
        yield f"{name}:zero{at}"
    if scheme.outer:
        yield f"{name}:outer"
    if scheme.groups:
        yield f"{name}:group"
    if matrix.input_scale() is not None:
        yield f"{name}:input"


def _count(size: int, block: int) -> int:
    return -(-size // block) if block else 1


_AT_ONCE = 1 << 20  # codes that are not packed yet


def _codes(matrix: QuantizedMatrix, rows: slice, columns: slice) -> np.ndarray:
    """Codes of a part as a device holds them: few rows at a time are one byte a code."""
    code, width = matrix.scheme.code, columns.stop - columns.start
    held = np.empty((rows.stop - rows.start, code.packing.width(width)), code.stored)
    if not held.size:
        return held
    taken = matrix.take(rows, columns) if isinstance(matrix, Quantizing) else None
    if taken is not None:
        return taken
    if code.bits == 8:
        return matrix.codes(rows, columns)
    if matrix.inputs_first:
        few = max(32, _AT_ONCE // max(1, len(held)) // 32 * 32)
        for i in range(0, width, few):
            part = slice(columns.start + i, min(columns.start + i + few, columns.stop))
            packed = code.pack(matrix.codes(rows, part))
            held[:, code.packing.width(i) :][:, : packed.shape[1]] = packed
        return held
    few = max(1, _AT_ONCE // max(1, width))
    for i in range(0, len(held), few):
        part = slice(rows.start + i, min(rows.start + i + few, rows.stop))
        held[i : i + few] = code.pack(matrix.codes(part, columns))
    return held
