"""What an op says of its configurations: `TUNABLE` in the op's file, which `tuning.py` lists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Key: TypeAlias = tuple[Any, ...]

MOST_CANDIDATES = 14  # that a search measures of a key
SHARED_BYTES = 220 << 10  # of shared memory that a program's stages may take on an H100


@dataclass(frozen=True)
class Kind:
    """One form of configuration, a NamedTuple, and the values that a file may give its fields.

    What memory bounds is not lent to another kind of device: see `tuning.shipped`.
    """

    config: type[Any]
    allowed: Mapping[str, Sequence[Any]]
    bound_by_memory: bool = False


@dataclass(frozen=True)
class Tunable:
    """An op by the numbers that decide how fast a configuration is, and the configurations.

    A key is the op's name and the values of `fields`, of which `flags` are bools and the others
    counts; those that vary from call to call are rounded up to powers of two. `kinds` by the names
    that files use. `fits` says whether the kernel can run a key's calls so: its registers, its
    shared memory, its rows. `candidates` of a key and the device's number of multiprocessors are
    worth measuring, the rule's own first; `most` of them are.
    """

    op: str
    fields: tuple[str, ...]
    kinds: Mapping[str, Kind]
    fits: Callable[[Key, Any], bool]
    candidates: Callable[[Key, int], Sequence[Any]]
    flags: tuple[str, ...] = ()
    most: Callable[[Key], int] = lambda key: MOST_CANDIDATES


def powers(least: int, most: int) -> list[int]:
    """The powers of two from `least` to `most`, both powers of two."""
    return [1 << i for i in range(least.bit_length() - 1, most.bit_length())]
