"""The weight table: which HF tensors make which of our weights, by axis names, not layouts."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np

from ..errors import UnsupportedError, listing
from ..quantization import Blocks, BlockScheme, Matrices, QuantizedMatrix
from .once import Once
from .spec import ModelSpec

FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Mixed:
    """In a scheme's place: the pieces of a weight have schemes, or none, of their own."""

    name = "mixed"


@dataclass(frozen=True)
class Weight(Once):
    """One matrix of a model, as a backend's ops take it; biases and norms' weights are arrays.

    `axes` are the names of the matrix's own, outputs before inputs. Without a scheme `data` is the
    matrix. With one it is codes, which mean the matrix with the parts `beside` them: scale, zero,
    group, outer, input; `blocks` says how they lie, and `stands_for` is the dtype that the matrix
    has in computations. A fused weight whose parts are quantized in different ways is `pieces`,
    which give its rows one after another. Only ops, loading and saving read what it holds; everyone
    else asks for its shape and dtype.
    """

    data: Any
    axes: tuple[str, ...]
    scheme: BlockScheme | Mixed | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    stands_for: Any = None
    blocks: Blocks = field(default_factory=Blocks)
    pieces: tuple["Weight", ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape: outputs before inputs."""
        if self.pieces:
            first, *_ = shapes = [piece.shape for piece in self.pieces]
            return (sum(shape[0] for shape in shapes), *first[1:])
        shape = tuple(self.data.shape)
        if not isinstance(self.scheme, BlockScheme) or self.scheme.code.bits == 8:
            return shape
        width = self.blocks.width  # of each device's share: they lie side by side
        return (*shape[:-1], shape[-1] // self.scheme.code.packing.width(width) * width)

    @property
    def dtype(self) -> Any:
        """The backend's dtype of the matrix."""
        if self.pieces:
            return self.pieces[0].dtype
        return self.data.dtype if self.scheme is None else self.stands_for


Leaf: TypeAlias = Any  # a Weight, or a backend's array: a bias, or the weight of a norm


def parts_of(leaf: Leaf) -> dict[str, Any]:
    """The arrays of a leaf by their names; an array that is no Weight is its `data`."""
    if not isinstance(leaf, Weight):
        return {"data": leaf}
    if leaf.pieces:
        return {
            part_name(piece.axes[0], part): array
            for piece in leaf.pieces
            for part, array in parts_of(piece).items()
        }
    return {"data": leaf.data, **leaf.beside}


def with_parts(leaf: Leaf, parts: Mapping[str, Any]) -> Leaf:
    """The leaf with other arrays in the place of its own."""
    if not isinstance(leaf, Weight):
        return parts["data"]
    if leaf.pieces:
        own = [
            with_parts(w, {part: parts[part_name(w.axes[0], part)] for part in parts_of(w)})
            for w in leaf.pieces
        ]
        return replace(leaf, pieces=tuple(own))
    beside = {part: parts[part] for part in leaf.beside}
    return replace(leaf, data=parts["data"], beside=beside)


def leaves_of(leaf: Leaf) -> tuple[Leaf, ...]:
    """The pieces of a weight that has some, else the leaf."""
    return leaf.pieces if isinstance(leaf, Weight) and leaf.pieces else (leaf,)


def part_name(name: str, part: str) -> str:
    """The name for people of an array of the leaf `name`: its data has the leaf's own name."""
    return name if part == "data" else f"{name}_{part}"


def named_arrays(leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Every array of named leaves, as `part_name` calls it."""
    return {
        part_name(name, part): array
        for name, leaf in leaves.items()
        for part, array in parts_of(leaf).items()
    }


def count_leaves(leaves: Iterable[Leaf]) -> dict[str, int]:
    """A report's counts of leaves: their elements, and the bytes that hold them."""
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
    (BLOOM's `q+k+v/heads`), or each KV head's with its query heads (Falcon's `q+k+v/kv_heads`), or
    that of each of so many equal groups (CodeGen's `q+v+k/4`). With `:32` behind, 32 elements of
    the axis have one here, and with `=1` the axis has one element whatever its length is: so scales
    lie. `part` is the array of the weight that it belongs to, `dtypes` are those that it may have.
    `index` is its place along the row's first axis, where tensors without that axis are stacked; a
    name with `#` and this behind is that of as many rows of a tensor that holds all (DBRX). Of the
    `spare` rows that a file may hold behind those of the first axis none is read (Llama 3.2
    Vision's embeddings of what stands for images). Where that is below 0 a file lacks so many rows,
    which are zeros here, and no id reads them (Gemma 3n).
    """

    name: str
    axes: tuple[str, ...]
    part: str = "data"
    dtypes: tuple[str, ...] = FLOATS
    index: int | None = None
    spare: int = 0
    marked: bool = True


@dataclass(frozen=True)
class Row:
    """One of our weights: its axes, and the stored tensors that make it.

    Those of one part that lack the row's first axis are stacked along it, by their `index`; those
    that lie side by side are joined along its fused axis, in order, with zeros in the place of a
    part that none has. A row without sources is `constant` everywhere, or the table that this makes
    of a shape: HF computes it. `layer` is the number of the layer that it belongs to, None for
    none. Of a quantized row, by its `scheme`, sources are tensors of several parts; a part has
    those of the row's axes that its sources have. `blocks` are the rows and columns that have one
    scale. A row that is a piece of a fused weight has the axes of the `whole`. With `picks` the
    array has these elements of the last axis alone, in this order, as often as they are named.
    `others` are the tensors that a source may have in the place of all of `sources`; that of an
    `either` row may lie with its last two axes exchanged, which its shape tells. A `wide` row
    is float32 whatever the model computes in, and a `dense` one is never quantized: what a
    checkpoint quantizes of it is read as what its codes mean. A `fixed` one is HF's buffer, or a
    parameter that HF has frozen: training leaves it as it is.
    """

    name: str
    axes: tuple[str, ...]
    sources: tuple[Source, ...]
    constant: float | Callable[[tuple[int, ...]], np.ndarray] = 0.0
    layer: int | None = None
    scheme: BlockScheme | None = None
    blocks: tuple[int, int] = (0, 0)
    whole: tuple[str, ...] = ()
    dense: bool = False
    picks: tuple[int, ...] = ()
    others: tuple[Source, ...] = ()
    either: bool = False
    wide: bool = False
    fixed: bool = False

    @property
    def is_weight(self) -> bool:
        """True for a matrix, which is a Weight; biases and the weights of norms are arrays."""
        named = self.name.endswith("weight") and not self.name.endswith("norm.weight")
        return len(self.axes) > 1 and (bool(self.whole) or named)

    def permutation(self, source: Source) -> tuple[int, ...]:
        """Order of `source`'s axes that gives this row's order; the fused axis matches by part."""
        places = (self._place(axis, source) for axis in self.axes)
        return tuple(place for place in places if place is not None)

    def _place(self, axis: str, source: Source) -> int | None:
        """The source's axis that is (a part of) the row's `axis`."""
        parts = set(_blocks(axis))
        places = (i for i, own in enumerate(source.axes) if set(_blocks(own)) <= parts)
        return next(places, None)

    def axes_of(self, source: Source) -> tuple[str, ...]:
        """The row's axes that the source has, in the row's order, in the source's blocks."""
        places = [(axis, self._place(axis, source)) for axis in self.axes]
        return tuple(f"{a}{_divisor(source.axes[i])}" for a, i in places if i is not None)

    def names_of(self, source: Source, axis: str) -> list[str]:
        """The names that one of the row's axes joins of which the source has elements."""
        place = self._place(axis.removesuffix(_divisor(axis)), source)
        return [] if place is None else _blocks(source.axes[place])

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The axes of each array that makes the weight, by its name in `parts_of`."""
        axes = {"data": self.axes}
        for source in self.sources:
            stacked = () if source.index is None else self.axes[:1]
            axes[source.part] = (*stacked, *self.axes_of(source))
        return axes

    @property
    def local_name(self) -> str:
        """Its name without that of its layer."""
        return self.name if self.layer is None else self.name.split(".", 2)[2]

    def of_layer(self, layer: int, number: int) -> "Row":
        """The row of a layer, of this one as a template: `{i}` in HF's names is its `number`."""
        sources, others = (
            tuple(replace(s, name=s.name.replace("{i}", str(number))) for s in own)
            for own in (self.sources, self.others)
        )
        name = f"layers.{layer}.{self.name}"
        return replace(self, name=name, sources=sources, others=others, layer=layer)

    def stacked(self, count: int) -> "Row":
        """The row of `count` stored tensors of each kind: `{x}` in HF's names is the number."""
        sources = tuple(
            replace(s, name=s.name.replace("{x}", str(x)), index=x)
            for x in range(count)
            for s in self.sources
        )
        return replace(self, sources=sources)

    def quantized(self, find: "Find") -> tuple["Row", ...]:
        """The row of the canonical parts that stand in its tensors' place.

        Several, its pieces, where not all of its tensors are quantized, or they differ in more than
        what can lie in one array.
        """
        found = [find(source.name) for source in self.sources]
        if not any(found):
            return (self,)
        matrices = [one[1] for one in found if one is not None]
        if len(matrices) < len(found) or not self._fit_together(matrices):
            if any(source.index is not None for source in self.sources):
                names = listing([source.name for source in self.sources])
                raise UnsupportedError(
                    f"{names} are one weight here, and are quantized in different ways, or not all "
                    "of them. Pass a checkpoint in which they are alike."
                )
            pieces = [self._piece(source) for source in self.sources]
            return tuple(own for piece in pieces for own in piece.quantized(find))
        scheme, sources, seen = matrices[0].scheme, [], set()
        for source, one in zip(self.sources, found, strict=True):
            assert one is not None
            name, matrix = one
            axes = tuple(source.axes[i] for i in self.permutation(source))
            sources += _canonical(
                replace(source, name=name, axes=axes), matrix, source.index in seen
            )
            seen.add(source.index)
        blocks = scheme.rows, scheme.columns
        parts = {"sources": tuple(sources), "others": (), "scheme": scheme, "blocks": blocks}
        return (replace(self, **parts),)

    def _piece(self, source: Source) -> "Row":
        """The row of one of the tensors that are joined."""
        axes = tuple(source.axes[i] for i in self.permutation(source))
        name = f"{self.name}_{axes[0]}"
        return replace(self, name=name, axes=axes, sources=(source,), whole=self.axes)

    def _fit_together(self, matrices: Sequence[QuantizedMatrix]) -> bool:
        """True if the matrices, which are joined or stacked, can lie in one array of each part."""
        if len({matrix.scheme for matrix in matrices}) > 1:
            return False
        scheme, firsts = matrices[0].scheme, {}
        if not scheme.groups and scheme.activation is None:
            return True
        for source, matrix in zip(self.sources, matrices, strict=True):
            own = matrix.group(), matrix.input_scale()
            first = firsts.setdefault(source.index, own)
            if not all(_is_equal(a, b) for a, b in zip(first, own, strict=True)):
                return False
        return True

    def with_blocks(self, blocks: tuple[int, int]) -> "Row":
        """The row with a scale for each of smaller blocks, which divide its own."""
        if blocks == self.blocks:
            return self
        sources = [
            s
            if s.part not in ("scale", "zero")
            else replace(s, name=at_blocks(s.name, blocks), axes=_scale_axes(s.axes, blocks))
            for s in self.sources
        ]
        return replace(self, sources=tuple(sources), blocks=blocks)

    def with_groups(self, count: int) -> "Row":
        """The row with scales of so many groups by activation order; what files lack is zero."""
        sources = [
            s
            if s.part not in ("scale", "zero")
            else replace(s, axes=(s.axes[0], f"{s.axes[1].partition('=')[0]}={count}"))
            for s in self.sources
        ]
        return replace(self, sources=tuple(sources))


def _is_equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


# HF's name of a weight as the checkpoint spells it, and the matrix; None where it is plain.
Find: TypeAlias = Callable[[str], tuple[str, QuantizedMatrix] | None]


def _canonical(source: Source, matrix: QuantizedMatrix, later: bool) -> Iterable[Source]:
    """The parts of a matrix, as `checkpoint.views.quantized` names them, in the place of `source`.

    `later`: another one has given what the joined matrices have in common.
    """
    scheme, name, axes = matrix.scheme, source.name, source.axes
    yield replace(source, dtypes=(scheme.code.stored,))
    blocks = scheme.rows, scheme.columns
    scales = _scale_axes(axes, blocks)
    if scheme.groups:
        scales = scales[0], f"{axes[1]}={scheme.groups}"
    beside = {"scale": scales}
    if scheme.zeros:
        beside["zero"] = scales
    for part, own in beside.items():
        dtypes = (scheme.scale_dtype if part == "scale" else "uint8",)
        if part == "scale" and scheme.scale_dtype.startswith("float8"):
            dtypes = ("uint8",)
        stored = at_blocks(f"{name}:{part}@", blocks)
        yield replace(source, name=stored, axes=own, part=part, dtypes=dtypes)
    if scheme.outer:
        one = replace(source, name=f"{name}:outer", axes=axes[:1], part="outer")
        yield replace(one, dtypes=("float32",))
    if later:
        return
    if scheme.groups:
        one = replace(source, name=f"{name}:group", axes=axes[1:], part="group")
        yield replace(one, dtypes=("int32",))
    if matrix.input_scale() is not None:
        one = replace(source, name=f"{name}:input", axes=(), part="input")
        yield replace(one, dtypes=("float32",))


def at_blocks(name: str, blocks: tuple[int, int]) -> str:
    """The name of scales for blocks of another size."""
    return f"{name.rpartition('@')[0]}@{blocks[0]}x{blocks[1]}"


def _scale_axes(axes: tuple[str, ...], blocks: tuple[int, int]) -> tuple[str, ...]:
    """The axes of scales along those of codes; a literal extent stays but where it was 1."""
    own = []
    for axis, block in zip(axes, blocks, strict=True):
        name, literal = axis.partition(":")[0].partition("=")[::2]
        if literal not in ("", "1"):
            own.append(axis)
        else:
            own.append(f"{name}=1" if block == 0 else name if block == 1 else f"{name}:{block}")
    return tuple(own)


def make_leaf(row: Row, parts: Mapping[str, Any], dtype: Any, width: int) -> Leaf:
    """Make the leaf of a row's arrays, in a model that computes in `dtype`.

    `width` are the columns of a device's share.
    """
    if not row.is_weight:
        return parts["data"]
    if row.scheme is None:
        return Weight(parts["data"], row.axes)
    beside = {part: array for part, array in parts.items() if part != "data"}
    blocks = Blocks(*row.blocks, width)
    return Weight(parts["data"], row.axes, row.scheme, beside, dtype, blocks)


def put_leaf(group: dict[str, Leaf], row: Row, leaf: Leaf) -> None:
    """Put a row's leaf among the weights of its layer; a piece into the weight that it is of."""
    name = row.local_name
    if not row.whole:
        group[name] = leaf
        return
    name = name.removesuffix(f"_{row.axes[0]}")
    old = group[name].pieces if name in group else ()
    if any(piece.axes[0] == row.axes[0] for piece in old):
        pieces = tuple(leaf if piece.axes[0] == row.axes[0] else piece for piece in old)
    else:
        pieces = (*old, leaf)
    group[name] = Weight(None, row.whole, Mixed(), pieces=pieces)


def get_leaf(group: Mapping[str, Leaf], row: Row) -> Leaf:
    """The leaf that `put_leaf` has put there."""
    if not row.whole:
        return group[row.local_name]
    held = group[row.local_name.removesuffix(f"_{row.axes[0]}")]
    return next(piece for piece in held.pieces if piece.axes[0] == row.axes[0])


def encoder_weights(outer: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The weights outside of an encoder's layers, by their names in a model of its own.

    They are those of the whole model whose names begin so, and the embedding, which it shares.
    """
    own = {n.removeprefix("encoder."): w for n, w in outer.items() if n.startswith("encoder.")}
    shared = {n: w for n, w in outer.items() if n == "embed.weight"}
    return {**shared, **own}


def join_axis(axes: Sequence[str]) -> int:
    """Index of the axis along which several tensors are joined."""
    return next((i for i, axis in enumerate(axes) if "+" in axis), 0)


def _blocks(axis: str) -> list[str]:
    """The names that an axis joins."""
    return axis.removesuffix(_divisor(axis)).partition("/")[0].split("+")


def _divisor(axis: str) -> str:
    """The end that scales add to the name of an axis."""
    return axis[len(re.split("[:=]", axis, maxsplit=1)[0]) :]


def row(name: str, axes: str, *sources: tuple[str, str]) -> Row:
    """A Row from strings: axes separated by blanks, sources as (HF name, HF axes)."""
    return Row(name, tuple(axes.split()), tuple(Source(n, tuple(a.split())) for n, a in sources))


@dataclass(frozen=True)
class WeightTable:
    """All rows of a model, and how the names of older or headless checkpoints differ.

    `spec` says how long the axes are. `outer` are the rows outside of the layers, and `layers` each
    layer's as a template, whose names leave out the layer and whose HF names have `{i}` in its
    place: one and the same where layers are alike. Those of an encoder follow the others. `base` is
    HF's prefix of the headless model; files saved without a head lack it. `renames` are (ours,
    theirs) pieces of names that older files use. `unused` are patterns of tensors that belong to
    the family and change no result here; those of `kept` patterns HF reads for what is not served,
    so that what is saved has them. `tied` are rows that HF ties to another tensor, with that
    tensor's name: a file may hold both, and where they differ HF unties them. `optional` is a part,
    by the start of our names without the layer's, that a checkpoint may lack as a whole. `matrices`
    are the quantized weights of a checkpoint. HF's class has no place for those that are `added`.
    """

    spec: ModelSpec
    outer: tuple[Row, ...]
    layers: tuple[tuple[Row, ...], ...]
    base: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    tied: tuple[tuple[Row, str], ...] = ()
    optional: str | None = None
    matrices: Matrices | None = None
    added: tuple[str, ...] = ()

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every row: those outside of the layers, then each layer's."""
        own = len(self.spec.layers)
        inner = (
            row.of_layer(i, i if i < own else i - own)
            for i, layer in enumerate(self.layers)
            for row in layer
        )
        return tuple(own for row in (*self.outer, *inner) for own in self._resolve(row))

    @cached_property
    def twins(self) -> tuple[tuple[Row, Row], ...]:
        """The tied rows, each with the row as it is under the name that it is tied to."""
        return tuple(
            (own, other)
            for row, name in self.tied
            for source in row.sources
            for own in self._resolve(row)
            for other in self._resolve(replace(row, sources=(replace(source, name=name),)))
        )

    def _resolve(self, row: Row) -> tuple[Row, ...]:
        """The rows of the tensors that a checkpoint of this model holds."""
        if any("{x}" in source.name for source in row.sources):
            row = row.stacked(self.spec.extent(row.axes[0], row.layer))
        if self.matrices is None or not row.is_weight or row.dense:
            return (row,)
        return row.quantized(self._find)

    def _find(self, name: str) -> tuple[str, QuantizedMatrix] | None:
        assert self.matrices is not None
        found = ((own, self.matrices(own)) for own in self.candidates(name))
        return next(((own, matrix) for own, matrix in found if matrix is not None), None)

    def shape(self, row: Row, axes: Iterable[str] | None = None) -> tuple[int, ...]:
        """Extents of a row's weight, or of an array of its layer that has `axes`."""
        extents = (self.spec.extent(a, row.layer) for a in (row.axes if axes is None else axes))
        shape = tuple(extents)
        return (*shape[:-1], len(row.picks)) if axes is None and row.picks else shape

    def candidates(self, name: str) -> list[str]:
        """The names under which a checkpoint may hold the HF tensor `name`."""
        names = [name]
        if self.base:
            bare = name[len(self.base) :] if name.startswith(self.base) else None
            names.append(bare if bare is not None else self.base + name)
        for ours, theirs in self.renames:
            names += [n.replace(ours, theirs) for n in names if ours in n]
        return names
