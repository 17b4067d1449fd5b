"""An entry owns how some ids are embedded otherwise, so that nobody else knows of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import ModelSpec


class Entry:
    """Another way from ids to embeddings than the rows of a table.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    What a kind leaves out is as with other models.
    """

    @property
    def axes(self) -> Mapping[str, int]:
        """Elements of the axes of its own weights, by their names."""
        return {}

    def embed(self, ops: Any, spec: "ModelSpec", w: Any, ids: Any, where: Any, seen: Any) -> Any:
        """Embedded tokens [B, T, E] of ids [B, T], in the place of `contract.BlockOps.embed`.

        `where` has positions and token types [B, T], and `seen` is a `contract.Seen`.
        """
        return ops.embed(spec, w, ids, *where)

    def known(self, ids: Any) -> Any:
        """The ids of which layers read embeddings of their own, in the place of ids [B, T]."""
        return ids
