"""Types of single values that the config models share."""

import operator
import os
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

_MOST = 10**18


def _integer(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected an int, not a bool")
    if isinstance(value, float | str):
        return value  # pydantic reads these
    try:
        number = operator.index(value)  # NumPy's integers too
    except (TypeError, RuntimeError):  # the second from torch, for a tensor without values
        raise ValueError("expected an int") from None
    if abs(number) >= _MOST:
        raise ValueError("expected an int of at most 18 digits")
    return number


def _lower(value: Any) -> Any:
    return str.lower(value).strip() if isinstance(value, str) else value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, and no bool")
    return value


def _path_text(value: Any) -> Any:
    if isinstance(value, bytes):
        raise ValueError("a path is expected as text, not as bytes")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def empty_is_none(value: Any) -> Any:
    """None for an empty dict, which asks for nothing; else the value."""
    return None if isinstance(value, dict) and not value else value


def path_or_dict(value: Any) -> Any:
    """A str, also from a Path, a dict, or None for what is empty. Raises ValueError for others."""
    value = _path_text(value)
    if value is not None and not isinstance(value, str | dict):
        raise ValueError("expected a path or a dict")
    return value or None


def factors_by_path(value: Any) -> Any:
    """A dict of path and factor, of a path, of several, or of such a dict; None where empty."""
    value = _path_text(value)
    if isinstance(value, str):
        return {value: 1.0} if value else None
    if isinstance(value, list | tuple):
        paths = [_path_text(path) for path in value]
        if twice := [path for i, path in enumerate(paths) if path in paths[:i]]:
            raise ValueError(f"{twice[0]} is there twice; to count it doubly give it a factor of 2")
        value = dict.fromkeys(paths, 1.0)
    if value is not None and not isinstance(value, dict):
        raise ValueError("expected a path, a list of paths, or a dict of paths and factors")
    return {_path_text(path): factor for path, factor in (value or {}).items()} or None


Integer = Annotated[int, BeforeValidator(_integer)]
"""Also a string of digits; no bool, no fraction."""

Number = Annotated[float, BeforeValidator(_no_bool)]
"""No bool."""

Count = Annotated[Integer, Field(ge=1)]

AnyCase = BeforeValidator(_lower)
"""Marks words that may be written in any case."""

PathText = Annotated[str, BeforeValidator(_path_text)]
"""A str, also from a Path."""


def _no_empty(path: str) -> str:
    if not path:
        raise ValueError(
            "no folder has an empty path; pass that of a folder, or None to write none"
        )
    return path


NewFolder = Annotated[PathText, AfterValidator(_no_empty)]
"""The path of a folder to write to."""


def one_of(*allowed: int) -> Callable[[int], int]:
    """A validator's function for a number out of a few."""

    def check(value: int) -> int:
        if value not in allowed:
            raise ValueError(f"expected {' or '.join(map(str, allowed))}")
        return value

    return check
