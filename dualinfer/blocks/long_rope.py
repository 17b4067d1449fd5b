"""Longrope: a second table of frequencies for long sequences (arXiv:2402.13753)."""

from dataclasses import dataclass

from ..model.spec import ByLength
from ..ops.contract import Array
from ..ops.maths import Maths


@dataclass(frozen=True)
class LongRope(ByLength):
    """A sequence of more than `original` tokens turns by the frequencies `long`.

    A model that `rereads` reads one again that has grown past these (Phi-3).
    """

    original: int
    long: tuple[float, ...]
    rereads: bool = False

    def frequencies(self, m: Maths, tables: Array, last: Array) -> Array:
        """See `ByLength`."""
        return m.where((last >= self.original)[:, None], tables[1], tables[0])
