"""Values found once out of an object that never changes."""

from collections.abc import Callable
from typing import Any, Self, TypeVar

_Made = TypeVar("_Made")


class Once:
    """An object that keeps what functions make of it; `replace` makes one that has nothing yet."""

    def made(self, make: Callable[[Self], _Made]) -> _Made:
        """The result of `make` for this object, made when it is first asked for."""
        known: dict[Any, Any] = self.__dict__.setdefault("_made", {})  # no field, of no equality
        if make not in known:
            known[make] = make(self)
        return known[make]
