"""Ids of images and sounds, which have tables of their own (Gemma 3n)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..model import rows as make
from ..model.spec import Entry, ModelSpec, Norm
from ..model.weights import Row, row
from ..ops.contract import Array, BlockOps, Epilogue, NormOf, Weights
from ..ops.projection import project


@dataclass(frozen=True)
class Embedder:
    """The embeddings of `count` ids from `first` on.

    Rows of a table, of `width` elements, are normed, projected to the model's width and normed
    again, without a weight.
    """

    first: int
    count: int
    width: int
    norm: Norm

    def rows(self, i: int, hf: str, spare: int) -> list[Row]:
        """The rows of the model's embedder `i`, whose table has `spare` rows behind those ids."""
        ours, axes = f"embedders.{i}", f"ids.{i} width.{i}"
        table = row(f"{ours}.table.weight", axes, (f"{hf}.embedding.weight", axes))
        (source,) = table.sources
        projection = f"{hf}.embedding_projection", f"embed width.{i}"
        return [
            replace(table, sources=(replace(source, spare=spare),)),
            *make.norm(self.norm, f"{ours}.norm", f"{hf}.hard_embedding_norm", f"width.{i}"),
            *make.linear(f"{ours}.project", *projection, bias=False),
            *make.plain_norm(self.norm, f"{ours}.out_norm"),
        ]

    def embed(self, ops: BlockOps, w: Weights, name: str, x: Array, ids: Array) -> Array:
        """Embeddings x [B, T, E], with its own in the place of its ids'."""
        at = ids - self.first
        is_own = (at >= 0) * (at < self.count)
        y = ops.schemes.embed(at * is_own, w[f"{name}.table.weight"])
        norm = NormOf.named(self.norm, w, f"{name}.norm")
        y = project(ops, w, f"{name}.project", y, Epilogue(norm=norm))
        y = ops.norm(y, NormOf.named(self.norm, w, f"{name}.out_norm"))
        share = ops.maths.cast(is_own[..., None] * 1.0, x.dtype)
        return x * (1 - share) + y * share


@dataclass(frozen=True)
class Embedders(Entry):
    """Some ids have embedders; of ids from `layers_ids` on layers read what they read of id 0."""

    layers_ids: int
    parts: tuple[Embedder, ...] = ()

    @property
    def axes(self) -> Mapping[str, int]:
        """See `Entry`."""
        counts = {f"ids.{i}": own.count for i, own in enumerate(self.parts)}
        return counts | {f"width.{i}": own.width for i, own in enumerate(self.parts)}

    def embed(
        self, ops: BlockOps, spec: ModelSpec, w: Weights, ids: Array, where: Any, seen: Any
    ) -> Array:
        """See `Entry`."""
        x = ops.embed(spec, w, ids, *where)
        for i, own in enumerate(self.parts):
            x = own.embed(ops, w, f"embedders.{i}", x, ids)
        return x

    def known(self, ids: Array) -> Array:
        """See `Entry`."""
        return ids * (ids < self.layers_ids)
