"""Codes of four bits whose values a table lists, as bitsandbytes has them (nf4)."""

from typing import Any

import numpy as np

from .code import Code


class Lookup(Code):
    """Codes that are places in a table."""

    def __init__(self, name: str, table: tuple[float, ...]) -> None:
        low, high = min(table), max(table)
        super().__init__(name=name, label="4-bit table", bits=4, low=low, high=high, has_zero=False)
        object.__setattr__(self, "table", table)

    table: tuple[float, ...]

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """See `Code`."""
        return np.array(self.table, np.float32)[codes]

    def encode(self, values: np.ndarray) -> np.ndarray:
        """See `Code`; of two codes that are equally near, the first."""
        table = np.array(self.table, np.float32)
        order = np.argsort(table, kind="stable")
        places = np.searchsorted((table[order][1:] + table[order][:-1]) / 2, values)
        return order[places].astype(np.uint8)

    def values(self, m: Any, held: Any, zeros: bool) -> Any:
        """See `Code`."""
        return m.table(self.table, held)

    def nearest(self, m: Any, a: Any) -> Any:
        """No input becomes such codes."""
        raise NotImplementedError
