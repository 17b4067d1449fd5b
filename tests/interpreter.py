"""Triton's interpreter with less work around each value: results and errors are those it has."""

import dataclasses
import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

BEFORE = SimpleNamespace()  # what was replaced


def quicken() -> None:
    """Replace what takes most of the interpreter's time.

    A program of a few hundred values spends its time on types that are made again for each of
    them. Types do not change, so that one of a kind serves.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if os.environ.get("TRITON_INTERPRET") != "1" or not hasattr(interpreter, "_LangPatchScope"):
        return  # kernels are compiled, or this Triton is another one
    from triton.language import core, semantic

    _patch_once(interpreter)
    _call_builtins(interpreter, core)
    _check_no_overflow(interpreter)
    _unwrap(core)
    _share_types(interpreter, core)
    _compare(core)
    _find_numpy_types(interpreter, core)
    _make_handles(interpreter, core)
    _promote(semantic.TritonSemantic, core)
    _broadcast(interpreter, core, semantic.TritonSemantic)


def _patch_once(interpreter: Any) -> None:
    """The language is patched at each call within a kernel: half of the time."""
    patch, language = interpreter._patch_lang, interpreter.tl
    seen: dict[int, tuple[Any, list[Any]]] = {}

    def once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in seen:  # kept with it, so that no other takes its place
            used = [x for x in names.values() if x is language or x is language.core]
            seen[id(names)] = names, used
        if any(language.core.is_builtin(module.load) for module in seen[id(names)][1]):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


def _call_builtins(interpreter: Any, core: Any) -> None:
    """Builtins are called without the wrapper that asks whether they are."""
    wrapper = core.builtin(lambda: None).__code__
    found: dict[Any, list[tuple[str, Any]]] = {}

    def called(member: Any) -> Any:
        bare = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return bare(*args, **kwargs)

        return call

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in found:
            members = inspect.getmembers(owner, core.is_builtin)
            found[owner] = [(name, called(member)) for name, member in members]
        for name, call in found[owner]:
            scope.set_attr(owner, name, call)

    interpreter._patch_builtin = patch


def _check_no_overflow(interpreter: Any) -> None:
    """Sums of integers are not computed a second time for an assert that is off."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _unwrap(core: Any) -> None:
    BEFORE.unwrap = unwrap = core._unwrap_if_constexpr
    constexpr = core.constexpr
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype}
    plain |= {core.block_type, core.pointer_type}

    def quick(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = quick


def _share_types(interpreter: Any, core: Any) -> None:
    """A block's type is made once for each shape and dtype, a tensor's shape once for its type."""
    block_type, dtype, constexpr = core.block_type, core.dtype, core.constexpr
    BEFORE.tensor = make_tensor = core.tensor.__init__
    BEFORE.with_element = with_element = block_type.with_element_ty
    init, to_ir = block_type.__init__, block_type.to_ir
    made: dict[Any, Any] = {}

    def new(cls: Any, element: Any = None, shape: Any = None) -> Any:
        if cls is not block_type or element.__class__ is not dtype:
            return object.__new__(cls)
        values = shape.values if shape.__class__ is core.tuple else shape
        sizes = [x.value if x.__class__ is constexpr else x for x in values]
        if not all(size.__class__ is int for size in sizes):
            return object.__new__(cls)
        key = (element.name, *sizes)
        found = made.get(key)
        if found is None:
            found = object.__new__(cls)
            init(found, element, shape)  # which refuses some
            made[key] = found
        return found

    def once(self: Any, *args: Any, **kwargs: Any) -> None:
        if "name" not in self.__dict__:
            init(self, *args, **kwargs)

    def with_element_ty(self: Any, element: Any) -> Any:
        if element.__class__ is not dtype:
            return with_element(self, element)
        others = self.__dict__.setdefault("_others", {})
        if element.name not in others:
            others[element.name] = with_element(self, element)
        return others[element.name]

    def same(self: Any, builder: Any) -> Any:
        return self if builder is interpreter.interpreter_builder else to_ir(self, builder)

    block_type.__new__, block_type.__init__ = new, once
    block_type.with_element_ty, block_type.to_ir = with_element_ty, same

    def tensor(self: Any, handle: Any, type: Any) -> None:
        like = type.__dict__.get("_like")
        if like is None:
            make_tensor(self, handle, type)
            type._like = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = like

    core.tensor.__init__ = tensor


def _compare(core: Any) -> None:
    for kind in (core.dtype, core.block_type):

        def equal(self: Any, other: Any, rest: Any = kind.__eq__) -> Any:
            return self is other or rest(self, other)

        kind.__eq__ = equal


def _find_numpy_types(interpreter: Any, core: Any) -> None:
    BEFORE.np_dtype = find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def quick(kind: Any) -> Any:
        if kind.__class__ is core.block_type:
            kind = kind.element_ty
        if kind.__class__ is not core.dtype:
            return find(kind)
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    interpreter._get_np_dtype = quick


def _make_handles(interpreter: Any, core: Any) -> None:
    handle = interpreter.TensorHandle
    check = handle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if dtype.__class__ is not core.dtype or 8 * data.itemsize > dtype.primitive_bitwidth:
            check(self)

    handle.__init__ = init


def _promote(semantic: Any, core: Any) -> None:
    BEFORE.promote = promote = semantic.computation_type_impl
    BEFORE.check = check = semantic.binary_op_type_checking_impl
    found: dict[Any, Any] = {}

    def quick(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, divides: bool) -> Any:
        key = a.name, a_scalar, b.name, b_scalar, divides
        if key not in found:
            found[key] = promote(self, a, a_scalar, b, b_scalar, divides)
        return found[key]

    def alike(self: Any, lhs: Any, rhs: Any, *pointers: Any, **how: Any) -> Any:
        if lhs.__class__ is rhs.__class__ is core.tensor and lhs.type is rhs.type:
            kind, divides = lhs.dtype, how.get("div_or_mod", pointers[3:] == (True,))
            same = kind.__class__ is core.dtype
            if same and quick(self, kind, False, kind, False, divides) == kind:
                return lhs, rhs
        return check(self, lhs, rhs, *pointers, **how)

    semantic.computation_type_impl, semantic.binary_op_type_checking_impl = quick, alike


def _broadcast(interpreter: Any, core: Any, semantic: Any) -> None:
    BEFORE.broadcast = broadcast = semantic.broadcast_impl_value
    builder, handle_of = interpreter.interpreter_builder, interpreter.TensorHandle

    def sizes_of(kind: Any) -> tuple[int, ...]:
        if "_sizes" not in kind.__dict__:
            kind._sizes = tuple(kind.shape)
        return kind._sizes

    def spread(self: Any, value: Any, like: Any) -> Any:
        kind, dtype = like.with_element_ty(value.dtype), value.handle.dtype.scalar
        numbers = interpreter._get_np_dtype(dtype)
        data = np.full(sizes_of(kind), value.handle.data, dtype=numbers)
        return self.tensor(handle_of(data, dtype), kind)

    def grown(self: Any, value: Any, sizes: tuple[int, ...]) -> Any:
        if sizes_of(value.type) == sizes:
            return value
        kind = core.block_type(value.dtype, list(sizes))
        data = np.broadcast_to(value.handle.data, sizes)
        return self.tensor(handle_of(data, value.handle.dtype.scalar), kind)

    def quick(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b:
            return lhs, rhs
        if self.builder is not builder:
            return broadcast(self, lhs, rhs)
        if not b.is_block():
            return (lhs, spread(self, rhs, a)) if a.is_block() else (lhs, rhs)
        if not a.is_block():
            return spread(self, lhs, b), rhs
        one, two = sizes_of(a), sizes_of(b)
        if len(one) != len(two) or any(
            x != y and 1 not in (x, y) for x, y in zip(one, two, strict=True)
        ):
            return broadcast(self, lhs, rhs)
        sizes = tuple(y if x == 1 else x for x, y in zip(one, two, strict=True))
        return grown(self, lhs, sizes), grown(self, rhs, sizes)

    semantic.broadcast_impl_value = quick
