"""Experts whose products are clamped (GPT-OSS)."""

from dataclasses import dataclass

from ..model.spec import Mixing


@dataclass(frozen=True)
class Clamped(Mixing):
    """Of an expert, gates are at most `clamp`, and ups at most as far from 0, and `offset` more."""

    clamp: float | None
    offset: float
