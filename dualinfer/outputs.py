"""What forward returns: a tuple whose fields also have names."""

from collections.abc import ItemsView, KeysView, Mapping
from typing import Any

FIELDS = ("logits", "last_hidden_state", "pooler_output", "hidden_states")  # in HF's order


class Outputs(tuple):
    """Forward's results in HF's order, by position, attribute or key.

    `out[0]`, `out.logits` and `out["logits"]` are the same array; unpacking gives the values.
    """

    _fields: dict[str, Any]

    def __new__(cls, fields: Mapping[str, Any]) -> "Outputs":
        """Fields that are None are left out."""
        present = {name: value for name, value in fields.items() if value is not None}
        self = super().__new__(cls, present.values())
        self._fields = present
        return self

    def __getattr__(self, name: str) -> Any:
        """A field; those of HF that this output lacks are None."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._fields:
            return self._fields[name]
        if name in (*FIELDS, "loss"):
            return None
        raise AttributeError(f"Outputs has no field {name!r}; it holds {', '.join(self._fields)}.")

    def __getitem__(self, key: Any) -> Any:
        """By position, slice or name."""
        return self._fields[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        """Whether a field of this name is here."""
        return key in self._fields if isinstance(key, str) else super().__contains__(key)

    def __reduce__(self) -> tuple:
        """Pickled and copied by field."""
        return Outputs, (self._fields,)

    def keys(self) -> KeysView[str]:
        """Field names."""
        return self._fields.keys()

    def items(self) -> ItemsView[str, Any]:
        """Names and values."""
        return self._fields.items()

    def to_tuple(self) -> tuple:
        """The plain tuple."""
        return tuple(self)

    def __repr__(self) -> str:
        """Names and shapes, not contents."""
        parts = (f"{n}={getattr(v, 'shape', f'{len(v)} arrays')}" for n, v in self._fields.items())
        return f"Outputs({', '.join(parts)})"
