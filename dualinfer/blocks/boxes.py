"""Tokens that have boxes on a page (LayoutLM, arXiv:1912.13318)."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import rows as make
from ..model.spec import Entry
from ..model.weights import Row
from ..ops.contract import Array, BlockOps, Weights


@dataclass(frozen=True)
class Boxes(Entry):
    """A token has a box, of left, upper, right and lower edges below `edges`, behind its type.

    Rows for these, for its height and for its width are added to it, unless a block reads them.
    """

    edges: int
    added: bool = True

    @property
    def boxes(self) -> int:
        """See `Entry`."""
        return self.edges

    @property
    def axes(self) -> Mapping[str, int]:
        """See `Entry`."""
        return {"boxes": self.edges}

    def rows(self, hf: str, width: str) -> list[Row]:
        """Its tables, of elements by the name `width`, of the embedding that HF calls `hf`."""
        names = ((f"boxes.{x}", f"{hf}{x}_position_embeddings") for x in "xyhw")
        return make.tables((ours, f"boxes {width}", theirs) for ours, theirs in names)

    def add(self, ops: BlockOps, w: Weights, x: Array, token_types: Array) -> tuple[Array, Array]:
        """See `Entry`."""
        if self.added:
            x = sum(self.rows_of(ops, w, token_types), x)
        return x, token_types if token_types.ndim == 2 else token_types[..., 0]

    def rows_of(self, ops: BlockOps, w: Weights, token_types: Array) -> list[Array]:
        """Rows for left, upper, right, lower, height and width, of types and boxes [B, T, 5].

        Tokens without boxes, [B, T], have empty ones.
        """
        boxes = ops.maths.zeros((*token_types.shape, 4), token_types.dtype, token_types)
        if token_types.ndim == 3:
            boxes = token_types[..., 1:]
        left, upper, right, lower = (boxes[..., i] for i in range(4))
        edges = ("x", left), ("y", upper), ("x", right), ("y", lower)
        sides = ("h", lower - upper), ("w", right - left)
        return [ops.schemes.embed(at, w[f"boxes.{x}.weight"]) for x, at in (*edges, *sides)]
