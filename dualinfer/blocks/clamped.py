"""Experts whose products are clamped (GPT-OSS)."""

from dataclasses import dataclass

from ..model.spec import Mixing


@dataclass(frozen=True)
class Clamped(Mixing):
    """An expert's gates are at most `clamp`, its ups as far from 0, and `offset` is added to ups."""

    clamp: float | None
    offset: float
