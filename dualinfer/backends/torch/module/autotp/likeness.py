"""The marks that tell layers of a stack apart: all their forward may go by but their weights."""

import functools
import hashlib
import re
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_PLACE = re.compile(r"_*(((layer|block)_?)?(idx|index|id|number)|(layer|block)_?(num|name))")
_IRRELEVANT = re.compile(r"drop|_is_hf_initialized")  # in eval mode
_BASE = frozenset(vars(nn.Module()))
_DEPTH = 4  # of objects in objects
_MOST_HASHED = 2**22  # elements of a buffer; of a larger one, about as many


class Likeness:
    """Marks of layers, equal where layers do the same with other weights.

    They tell types, shapes, attributes, and buffers' values, but not a layer's own place.
    """

    def __init__(self) -> None:
        # The objects are kept with their marks: an id must stay its owner's.
        self._known: dict[int, tuple[Any, Any]] = {}

    def mark(self, layer: nn.Module) -> Any:
        """A hashable mark."""
        return tuple((name, self._part(part)) for name, part in layer.named_modules())

    def _part(self, part: nn.Module) -> Any:
        own = {name: value for name, value in vars(part).items() if name not in _BASE}
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        return (
            type(part),
            tuple((n, None if p is None else tuple(p.shape)) for n, p in part._parameters.items()),
            tuple((n, None if b is None else _values(b)) for n, b in part._buffers.items()),
            self._fields(own, _DEPTH),
            tuple(self._value(hook, _DEPTH) for hook in hooks),
        )

    def _fields(self, fields: Mapping[Any, Any], depth: int) -> Any:
        return tuple(
            (str(name), self._value(value, depth))
            for name, value in sorted(fields.items(), key=lambda item: str(item[0]))
            if not _PLACE.fullmatch(str(name)) and not _IRRELEVANT.search(str(name))
        )

    def _value(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | type):
            return type(value), repr(value)  # NaN is not equal to itself
        if isinstance(value, torch.dtype | torch.device | torch.Size):
            return str(value)
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            return shape if isinstance(value, nn.Parameter) else _values(value)
        if isinstance(value, nn.Module) or depth == 0:
            return type(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, type(value)  # of an object that holds itself
            self._known[id(value)] = value, self._object(value, depth - 1)
        return self._known[id(value)][1]

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return type(value), self._fields(value, depth)
        if isinstance(value, set | frozenset):
            return type(value), frozenset(self._value(item, depth) for item in value)
        if isinstance(value, list | tuple):
            return type(value), tuple(self._value(item, depth) for item in value)
        if isinstance(value, FunctionType):
            cells = []
            for cell in value.__closure__ or ():
                try:
                    cells.append(self._value(cell.cell_contents, depth))
                except ValueError:  # nothing in it yet
                    cells.append(None)
            defaults = self._value(value.__defaults__, depth)
            return value.__module__, value.__code__, defaults, tuple(cells)
        if isinstance(value, MethodType):
            return self._value(value.__func__, depth), self._value(value.__self__, depth)
        if isinstance(value, functools.partial):
            return tuple(self._value(v, depth) for v in (value.func, value.args, value.keywords))
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict):
            return type(value), self._fields(fields, depth)
        return type(value), getattr(value, "__qualname__", "")


def _values(tensor: torch.Tensor) -> Any:
    """Shape, dtype and a digest of the values, where there are any."""
    facts = tuple(tensor.shape), str(tensor.dtype)
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return facts
    flat = tensor.detach().flatten()
    flat = flat[:: -(-flat.numel() // _MOST_HASHED)].contiguous().cpu()
    return *facts, hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
