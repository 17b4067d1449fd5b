"""An entry owns how some ids are embedded otherwise, so that nobody else knows of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .model import ModelSpec


class Entry:
    """Another way from ids to embeddings than the rows of a table.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    What a kind leaves out is as with other models.
    """

    blanks: ClassVar[bool] = False  # what a mask hides enters the first layer as zeros

    @property
    def boxes(self) -> int:
        """Edges that a token's box may have; 0 where tokens have none."""
        return 0

    @property
    def axes(self) -> Mapping[str, int]:
        """Elements of the axes of its own weights, by their names."""
        return {}

    def embed(self, ops: Any, spec: "ModelSpec", w: Any, ids: Any, where: Any, seen: Any) -> Any:
        """Embedded tokens [B, T, E] of ids [B, T], in the place of `contract.BlockOps.embed`.

        `where` has positions and token types [B, T], and `seen` is a `contract.Seen`.
        """
        return ops.embed(spec, w, ids, *where)

    def add(self, ops: Any, w: Any, x: Any, token_types: Any) -> tuple[Any, Any]:
        """Tokens x [B, T, E] with what is added beside rows of types and positions, and the types.

        `token_types` [B, T] may have more numbers of a token behind them, as [B, T, ...].
        """
        return x, token_types

    def known(self, ids: Any) -> Any:
        """The ids of which layers read embeddings of their own, in the place of ids [B, T]."""
        return ids
