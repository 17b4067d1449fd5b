"""The pickle in a file of torch.save, read as inert values: nothing that it names is called.

DeepSpeed and Megatron pickle their arguments beside the weights, as objects of classes that may not
even be installed. Here each of them becomes a stand-in without content, and a tensor the place of
its elements. Work and memory are linear in the bytes that are read: an opcode touches what its own
bytes or those of opcodes before it have put on the stack, and no container is walked or copied for
being named again. torch's own reader promises less: it makes a bytearray of any size, hashes tuples
in one another, and copies a list as often as it is named.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_MOST_BYTES = 64 << 20
_MOST_STEPS = 10_000_000
_MOST = 2**62  # of a size, so that products fit Python's and NumPy's ints alike
_MOST_AXES = 64  # as in torch
_LONGEST_NAME = 1000  # letters of a module or of what is in it
_MOST_ARGUMENTS = 16
# How many arguments each takes before those that change what the elements mean.
_REBUILD = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch._tensor.Tensor")


class Global(NamedTuple):
    """A name that the pickle looks up."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The module and the name in it."""
        return f"{self.module}.{self.name}"


class Inert:
    """A stand-in for an object of a class that is not made; `made_by` is what would make it."""

    __slots__ = ("made_by",)

    def __init__(self, made_by: Global | None = None):
        self.made_by = made_by

    @property
    def kind(self) -> str:
        """The name of what would make it."""
        return "an object" if self.made_by is None else self.made_by.path


class Storage(NamedTuple):
    """A storage that the pickle names: the kind of its elements, its record, how many it holds."""

    kind: str
    key: str
    length: int


class StoredTensor(NamedTuple):
    """The place of a tensor: offset and strides in its own elements.

    `dtype` is torch's name of it where it is not that of the storage.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None = None


@dataclass
class Pickle:
    """A pickle's value, how many bytes it has, and the storages that it names, by their keys."""

    value: Any = None
    size: int = 0
    storages: dict[str, Storage] = field(default_factory=dict)


def read_pickle(data: bytes) -> Pickle:
    """The first pickle in `data`. Raises ValueError for one that is damaged or too long."""
    machine = _Machine(Pickle(), len(data))
    try:
        for step, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if step > _MOST_STEPS or (position or 0) > _MOST_BYTES:
                raise ValueError("its pickle describes more than a checkpoint does")
            if opcode.name == "STOP":
                machine.found.size = (position or 0) + 1
                machine.found.value = machine.pop()
                return machine.found
            machine.run(opcode.name, argument)
    except _DAMAGE as error:
        raise ValueError(f"its pickle is damaged ({type(error).__name__}: {error})") from error
    raise ValueError("its pickle has no end")


_DAMAGE = (IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,
}


class _Machine:
    """The stack on which a pickle's opcodes work, and what they have remembered."""

    def __init__(self, found: Pickle, most_pairs: int):
        self.found = found
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._most_pairs = most_pairs  # that are still to be walked through

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError("a mark in the place of a value")
        return value

    def _from_mark(self) -> list[Any]:
        """Take the values above the last mark from the stack."""
        values = []
        while True:
            value = self._stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(value)

    def run(self, name: str, argument: Any) -> None:
        """One opcode."""
        if name in _ARGUMENTS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self._stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name not in ("PROTO", "FRAME"):
            method = getattr(self, f"_{name.lower()}", None)
            if method is None:
                raise ValueError(f"its pickle has the opcode {name}, which torch.save never writes")
            method(*(() if argument is None else (argument,)))

    def _top(self) -> Any:
        value = self._stack[-1]
        if value is _MARK:
            raise IndexError("a mark in the place of a value")
        return value

    def _mark(self) -> None:
        self._stack.append(_MARK)

    def _pop(self) -> None:
        self._stack.pop()

    def _pop_mark(self) -> None:
        self._from_mark()

    def _dup(self) -> None:
        self._stack.append(self._top())

    def _append(self) -> None:
        self._extend([self.pop()])

    def _appends(self) -> None:
        self._extend(self._from_mark())

    _additems = _appends

    def _extend(self, values: list[Any]) -> None:
        if isinstance(target := self._top(), list):
            target.extend(values)

    def _list(self) -> None:
        self._stack.append(self._from_mark())

    _frozenset = _list

    def _tuple(self) -> None:
        self._stack.append(tuple(self._from_mark()))

    def _tuple1(self) -> None:
        self._stack.append((self.pop(),))

    def _tuple2(self) -> None:
        second, first = self.pop(), self.pop()
        self._stack.append((first, second))

    def _tuple3(self) -> None:
        third, second, first = self.pop(), self.pop(), self.pop()
        self._stack.append((first, second, third))

    def _setitem(self) -> None:
        value, key = self.pop(), self.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._from_mark())

    def _dict(self) -> None:
        values = self._from_mark()
        self._stack.append({})
        self._set(values)

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        if len(values) % 2:
            raise IndexError("a key without a value")
        if isinstance(target, dict):
            for key, value in zip(values[::2], values[1::2], strict=True):
                put(target, key, value)

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._look_up(module, name)

    def _stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise TypeError("a global without a name")
        self._look_up(module, name)

    def _look_up(self, module: str, name: str) -> None:
        if max(len(module), len(name)) > _LONGEST_NAME:
            raise ValueError("its pickle has a name that is longer than any is")
        self._stack.append(Global(module, name))

    def _inst(self, argument: str) -> None:
        self._from_mark()
        self._global(argument)
        self._stack.append(self._made(self.pop()))

    def _obj(self) -> None:
        self._stack.append(self._made(self._from_mark()[0]))

    def _newobj(self) -> None:
        self.pop()
        self._stack.append(self._made(self.pop()))

    def _newobj_ex(self) -> None:
        self.pop()
        self._newobj()

    def _build(self) -> None:
        self.pop()  # an object's state; a tensor's or dict's attributes
        self._top()

    def _made(self, what: Any) -> Inert:
        """The stand-in of a new object, by what made that of what makes it."""
        if isinstance(what, Inert):
            return Inert(what.made_by)
        return Inert(what if isinstance(what, Global) else None)

    def _persid(self, argument: str) -> None:
        raise ValueError("its pickle names storages as text, as torch.save never does")

    def _binpersid(self) -> None:
        said = self.pop()
        if type(said) is not tuple or not 5 <= len(said) <= 6 or any(said[5:]):
            raise TypeError("no storage, or a part of another one")
        mark, kind, key, _, count = said[:5]
        if mark != "storage" or not isinstance(kind, Global):
            raise TypeError("no storage")
        if not isinstance(key, str) or type(count) is not int or not 0 <= count < _MOST:
            raise TypeError("no storage")
        found = Storage(kind.name, key, count)
        if self.found.storages.setdefault(key, found) != found:
            raise ValueError("its pickle names a storage twice, and not alike")
        self._stack.append(found)

    def _reduce(self) -> None:
        arguments, what = self.pop(), self.pop()
        self._stack.append(self._called(what, arguments))

    def _called(self, what: Any, arguments: Any) -> Any:
        """The value that a call would give."""
        if not isinstance(what, Global) or not _is_few(arguments):
            return self._made(what)
        if what == ("collections", "OrderedDict") and len(arguments) < 2:
            made: dict[Any, Any] = {}
            pairs = arguments[0] if arguments else ()
            self._most_pairs -= len(pairs)
            if self._most_pairs < 0:  # a list is named again and again
                raise ValueError("its pickle describes more than it holds")
            for pair in pairs:
                key, value = pair
                put(made, key, value)
            return made
        if what == ("torch", "Size") and len(arguments) == 1 and _is_shape(arguments[0]):
            return arguments[0]
        if what == ("torch._tensor", "_rebuild_from_type_v2"):  # a tensor with attributes
            function, kind, inner = arguments[:3]
            is_plain = isinstance(kind, Global) and kind.path in _TENSORS
            if is_plain and isinstance(function, Global) and _is_few(inner):
                what, arguments = function, inner
        if what.module == "torch._utils" and what.name in _REBUILD:
            return _tensor(what, arguments)
        is_parameter = what.module == "torch._utils" and what.name in _PARAMETERS
        if is_parameter and isinstance(arguments[0], StoredTensor | Inert):
            return arguments[0]
        return self._made(what)


def _tensor(what: Global, arguments: tuple[Any, ...]) -> StoredTensor | Inert:
    storage, offset, shape, strides, *_ = arguments
    count = _REBUILD[what.name]
    if not isinstance(storage, Storage) or any(arguments[count:]):  # conjugated or negated
        return Inert(what)
    is_offset = type(offset) is int and 0 <= offset < _MOST
    if not (is_offset and _is_shape(shape) and _is_shape(strides)):
        raise TypeError("a tensor without a shape")
    if len(shape) != len(strides):
        raise TypeError("a tensor with strides of another shape")
    dtype = arguments[6] if what.name == "_rebuild_tensor_v3" else None
    if dtype is not None and not isinstance(dtype, Global):
        raise TypeError("a tensor of no dtype")
    return StoredTensor(storage, offset, shape, strides, None if dtype is None else dtype.name)


def _is_few(arguments: Any) -> bool:
    return type(arguments) is tuple and len(arguments) <= _MOST_ARGUMENTS


def _is_shape(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) <= _MOST_AXES
        and all(type(n) is int and 0 <= n < _MOST for n in value)
    )


def put(target: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an item; ValueError for a name that is there already.

    A key that is no text or small number becomes a stand-in: no hash of others is kept, and tuples
    may lie deep in one another.
    """
    is_small = not isinstance(key, int) or key.bit_length() < 64
    if not (isinstance(key, str | int | float | bytes | None) and is_small):
        key = Inert()
    if isinstance(key, str) and key in target:
        raise ValueError(f"it names {key[:80]!r} twice")
    target[key] = value
