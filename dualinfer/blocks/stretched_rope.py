"""Dynamic NTK: frequencies that a sequence's length stretches."""

from dataclasses import dataclass

from ..model.spec import ByLength
from ..ops.contract import Array
from ..ops.maths import Maths


@dataclass(frozen=True)
class StretchedRope(ByLength):
    """Of R/2 frequencies number i of a sequence of L > n = `original` tokens is times a power.

    With s = `stretch` it is (s L / n - s + 1) ** (-2 i / (R - 2)).
    """

    original: int
    stretch: float

    def frequencies(self, m: Maths, tables: Array, last: Array) -> Array:
        """See `ByLength`."""
        length = m.wide((last + 1).clip(self.original))
        base = self.stretch * length / self.original - (self.stretch - 1)
        share = m.arange(len(tables), tables) / (len(tables) - 1)
        return tables * base[:, None] ** -share
