"""Cases of ways on that messages name."""

from collections.abc import Callable
from typing import Any


def cases_of(cases: dict[str, Any]) -> Callable[[str], Callable[[Any], Any]]:
    """A decorator that puts cases into a dict by their function's name: see `case`."""

    def case(said: str) -> Callable[[Any], Any]:
        """Register a generator of calls: the first is refused as `said`, and the next ones work.

        Between them it does what the message says.
        """

        def register(calls: Any) -> Any:
            cases[calls.__name__] = said, calls
            return calls

        return register

    return case
