"""Positions as data: a table of them, and how tokens are counted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Positions:
    """The places of tokens as HF counts them, and the table of these, if there is one.

    The table has `rows`, 0 for none; that of a position is `offset` further. The positions that
    forward takes by default count `all` tokens, or those that a mask shows as `seen`; or they count
    the `ids` that are no padding, from its id plus one on, and are that id elsewhere (RoBERTa).
    Where padding takes no `rows` of the table, it has the one before the first, and other tokens
    follow one another without it (M2M100). Padding is told by the model's `pad_id`.
    """

    rows: int = 0
    offset: int = 0
    counted: Literal["all", "seen", "ids", "rows"] = "all"

    @property
    def axes(self) -> Mapping[str, int]:
        """Elements of the axis of its table, by name."""
        return {"positions": self.rows + self.offset}

    def tokens(self, pad: int | None) -> int:
        """The longest sequence for which the table has rows; 0 without a table."""
        return max(0, self.rows - self.before(pad))

    def before(self, pad: int | None) -> int:
        """Positions that no token has, ahead of the first one's."""
        return 0 if self.counted != "ids" or pad is None else pad + 1

    def of_tokens(
        self, shape: tuple[int, int], ids: Any, seen: Any, pad: int | None, xp: Any = np
    ) -> Any:
        """The positions int32 [B, T] for which a caller gives none.

        Of ids and bool `seen` [B, T] of the module `xp`, which may be traced, or None.
        """
        count = xp.zeros(shape, np.int32) + np.arange(shape[1], dtype=np.int32)
        if self.counted == "ids" and pad is not None:
            if ids is None:
                return count + (pad + 1)
            real = ids != pad
            return (real.cumsum(axis=1) * real + pad).astype(np.int32)
        if self.counted == "seen" and seen is not None:
            return xp.maximum(seen.cumsum(axis=1) - 1, 0).astype(np.int32) * seen
        return count

    def of_rows(self, positions: Any, ids: Any, pad: int | None) -> Any:
        """The positions [B, T] by which rows are read, of those given and of ids [B, T]."""
        if self.counted != "rows" or pad is None:
            return positions
        real = ids != pad
        return (real.cumsum(axis=1) + positions[:, :1]) * real - 1
