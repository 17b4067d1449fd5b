"""Rotary frequencies that ask for a sequence's length, so that nobody else knows how."""

from typing import Any


class ByLength:
    """Other frequencies for sequences of more than `original` tokens.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    All of a prompt turns by its length, and each later token by the length then; what is cached
    stays as it is, unless a model `rereads` a sequence that has grown past `original`.
    """

    original: int
    long: tuple[float, ...] = ()  # a table of its own, which kernels take beside the other
    stretch: float = 0.0  # by which kernels change the frequencies; 0 for not
    rereads: bool = False

    def frequencies(self, m: Any, tables: Any, last: Any) -> Any:
        """float32 [B, R/2] by which sequences turn whose last tokens' positions are int `last` [B].

        Of arrays of `m`, an `ops.maths.Maths`; `tables` are `Rope.tables` on the device.
        """
        raise NotImplementedError
