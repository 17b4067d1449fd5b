"""How many sequences a runner has room for."""

from collections.abc import Callable

from ..backends.base import Runner

MOST_SLOTS = 256  # above it a step is bound by arithmetic, and more gain nothing
# A cache that grows is copied, by powers of two: old and new take one and a half of the new.
_SHARE = 0.6


def make_room(runner: Runner) -> tuple[int, Callable[[int, int], bool]]:
    """The most slots, and whether so many sequences of so many tokens have room.

    A cache that grows as it is needed is as large as the most that it has held.
    """
    free = runner.free_bytes()
    most = None if free is None else int(_SHARE * free)
    held = [0, 0]

    def fits(slots: int, tokens: int) -> bool:
        room = max(slots, held[0]), max(tokens, held[1])
        if most is not None and runner.cache_bytes_for(*room) > most:
            return False
        held[:] = room
        return True

    return MOST_SLOTS, fits
