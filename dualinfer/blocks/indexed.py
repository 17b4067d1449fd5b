"""Attention to what another product chooses of a long sequence (DeepSeek-V3.2)."""

from dataclasses import dataclass

from ..model.spec import Wiring


@dataclass(frozen=True)
class Indexed(Wiring):
    """A token sees all of a sequence of `most` tokens; of longer ones it would see a choice."""

    most: int
