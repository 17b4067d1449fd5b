"""Layers that end with a number (Gemma 4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..decoder.run import Block, Run
from ..model.spec import Edit
from ..model.weights import Row, row
from ..ops.contract import Array


@dataclass(frozen=True)
class Multiplied(Edit):
    """A learned number that multiplies the layer's output."""

    def rows(self, hf: str) -> list[Row]:
        """The number's row, of the layer that HF calls `hf`."""
        return [replace(row("multiplier", "one", (f"{hf}layer_scalar", "one")), fixed=True)]

    def parts(self, parts: Sequence[Block]) -> Sequence[Block]:
        """See `Edit`."""
        return [*parts, _multiplied]


def _multiplied(run: Run, x: Array) -> Array:
    return x * run.w["multiplier"]
