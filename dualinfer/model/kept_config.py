"""A HF config known by its fields alone, for processes that have not imported transformers."""

import copy
from collections.abc import Callable
from typing import Any


class KeptConfig:
    """The fields of a HF config; `made` gives the object."""

    def __init__(self, fields: dict[str, Any], make: Callable[[], Any]) -> None:
        self._fields, self._make = fields, make
        self._made: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of what the object's `to_dict` gave, as it was kept."""
        return copy.deepcopy(self._fields)

    def make(self) -> Any:
        """HF's object, the same one each time."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getattr__(self, name: str) -> Any:
        """A field; whatever else the object has, by making it."""
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        if name in self._fields:
            return copy.deepcopy(self._fields[name])
        return getattr(self.make(), name)


def made(config: Any) -> Any:
    """HF's object of a config that may be a kept one."""
    return config.make() if isinstance(config, KeptConfig) else config
