"""The embedding as data: what lies between ids and the first layer's input."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .entry import Entry
from .parts import Norm

Step = Literal["project", "tables", "norm"]


@dataclass(frozen=True)
class Embedding:
    """The way from ids, or from embeddings that a caller gives, to the first layer's input.

    - `scale` multiplies embedded `ids`; it is itself `rounded` to their dtype first (HF's Gemma),
      or multiplies `all`, embeddings that a caller gives in their place as well (HF's Granite).
    - In an `order` tokens are projected from the table's `width` to that of the layers, if they
      differ, rows of `tables` of positions and types are added, and the sum up to there passes the
      `norm`, if there is one. What comes before the projection has the `width`: in ALBERT the
      tables and the norm, in DeBERTa the tables. The norm stands ahead of the tables in
      BlenderbotSmall.
    - `types` counts the types of tokens, 0 for none, whose rows are a table's; those of the `vocab`
      are ids, whose rows are the embedding's. Types of a `prefix` change no embedding: in HF those
      of 0 mark tokens that see one another both ways, which is not served (PaliGemma).
    - `entry`: some ids are embedded otherwise, or more is added, as that says.
    """

    scale: float = 1.0
    scaled: Literal["ids", "rounded", "all"] = "ids"
    width: int | None = None
    norm: Norm | None = None
    order: tuple[Step, ...] = ("project", "tables", "norm")
    types: int | Literal["vocab", "prefix"] = 0
    entry: Entry | None = None

    def axes(self, embed: int) -> Mapping[str, int]:
        """Elements of the axes of its weights, by their names, in front of layers of `embed`."""
        found = {"width": self.width or embed, "rest": embed - (self.width or 0)}
        found |= {"inner": found["width"] if self.is_factored else embed, "types": self.own_types}
        return found | (dict(self.entry.axes) if self.entry else {})

    @property
    def own_types(self) -> int:
        """Types of tokens with a table of their own; 0 without one."""
        return self.types if isinstance(self.types, int) else 0

    @property
    def is_factored(self) -> bool:
        """True if the tables are as wide as the embedding, and a projection comes behind them."""
        last = self.order.index("project") > self.order.index("tables")
        return self.width is not None and last

    @property
    def norms_tokens(self) -> bool:
        """True if the norm is over tokens alone, before rows of tables are added."""
        return self.norm is not None and self.order[0] == "norm"

    @property
    def adds_tables(self) -> bool:
        """True if an embedded token is a sum of rows: its own, of its type and of its position."""
        return self.width is None and not self.norms_tokens and not self.boxes

    @property
    def boxes(self) -> int:
        """Edges that a token's box on a page may have; 0 where tokens have no boxes."""
        return self.entry.boxes if self.entry else 0
