"""Experts whose products are clamped (GPT-OSS)."""

from dataclasses import dataclass

from ..model.spec import Mixing


@dataclass(frozen=True)
class Clamped(Mixing):
    """Gates of an expert are at most `clamp`, its ups as far from 0, and `offset` is added."""

    clamp: float | None
    offset: float
