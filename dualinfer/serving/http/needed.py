"""The packages that the routes need, and are not among those of the library."""

import importlib.util

from ...errors import BackendNotAvailableError

NEEDED = "starlette", "uvicorn"


def check_needed(what: str, way: str = "", more: tuple[str, ...] = ()) -> None:
    """Raise BackendNotAvailableError where a package is missing that `what` needs.

    `more` are needed beside those of the routes, and `way` is what else may be done.
    """
    absent = [x for x in (*more, *NEEDED) if importlib.util.find_spec(x) is None]
    if absent:
        raise BackendNotAvailableError(
            f"{what} {' and '.join(absent)}. Install `dualinfer[serve]`{way}."
        )
