"""The kinds of codes that stand in a weight's place: a row of CODES each, by the name in schemes.

A new one is a file beside these and a row; see docs/contributing/adding-a-code.md.
"""

from functools import cache

from .code import Code
from .floats import E2M1, E4M3, E5M2
from .integers import INT4, INT8, UINT4, UINT8
from .lookup import Lookup

__all__ = ["CODES", "TABLE", "Code", "code_of"]

TABLE = "table"  # the codes of four bits whose values the scheme lists
CODES: dict[str, Code] = {
    own.name: own
    for own in (
        INT4,
        UINT4,
        INT8,
        UINT8,
        E4M3,
        E5M2,
        E2M1,
    )
}


@cache
def code_of(name: str, table: tuple[float, ...] = ()) -> Code:
    """The code of a name; that of TABLE has the values of `table`."""
    return Lookup(TABLE, table) if name == TABLE else CODES[name]
