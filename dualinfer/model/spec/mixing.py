"""A mixing owns all that a mixture of another build needs, so that nobody else knows of it."""

from collections.abc import Mapping
from typing import Any


class Mixing:
    """The ways in which a kind of mixture of experts differs from others.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    What a kind leaves out is as with other mixtures. A function that a kind has not is None here,
    so that layers are made without it, and that kernels know what they serve. `run` is a
    `decoder.run.Run`, and `x` and `norm` are what a `decoder.run.SubLayer` takes.
    """

    clamp: float | None = None  # gates are at most that, and ups at most as far from 0
    offset: float = 0.0  # added to ups; kernels know both
    idle: int = 0  # experts without weights that the router knows, behind the others
    sees_others: bool = False  # what a token gets depends on the other tokens of its sequence
    leaves: bool = False  # a part of what it gives is added behind the next layer
    sums: int = 0  # sums over devices, besides that of the experts

    @property
    def axes(self) -> Mapping[str, int]:
        """Elements of the axes of its own weights, by their names."""
        return {}

    sublayer: Any = None  # (run, x, norm, residual, spend): all of it, a `SubLayer`
    routed: Any = None  # (run, routing): the routing that is taken in the place of the router's
    shared: Any = None  # (run, x, norm): the part of the expert of all tokens, before the sum
    hidden: Any = None  # (maths, h, activation): an expert's hidden values of its first product
