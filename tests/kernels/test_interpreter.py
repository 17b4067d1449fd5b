"""Triton's interpreter as `tests/interpreter.py` makes it quicker gives what it gave before."""

import itertools

import numpy as np
import pytest

pytest.importorskip("triton")

from triton.language import core
from triton.runtime import interpreter

from ..interpreter import BEFORE as before

DTYPES = [core.dtype(name) for name in ("int1", "int8", "uint8", "int32", "int64", "uint64")]
DTYPES += [core.dtype(name) for name in ("fp8e4nv", "bf16", "fp16", "fp32", "fp64")]
SHAPES = [(), (1,), (8,), (1, 8), (4, 1), (4, 8)]


def outcome(function, *arguments):
    """What comes back, or the error."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error)


def tensor(shape, dtype):
    data = np.zeros(shape or 1, interpreter._get_np_dtype(dtype))
    kind = core.block_type(dtype, list(shape)) if shape else dtype
    return core.tensor(interpreter.TensorHandle(data, dtype), kind)


def described(value):
    if isinstance(value, core.tensor):
        handle = value.handle
        facts = str(value.type), str(value.dtype), [s.value for s in value.shape]
        return *facts, value.numel.value, handle.data.shape, handle.data.dtype, str(handle.dtype)
    return [described(x) for x in value] if isinstance(value, tuple) else value


def test_two_values_meet_in_the_types_and_shapes_that_they_met_in_before():
    semantic = interpreter.interpreter_semantic
    kind = type(semantic)
    with interpreter_patched():
        for a, b in itertools.product(DTYPES, DTYPES):
            for flags in itertools.product((False, True), repeat=3):
                how = a, flags[0], b, flags[1], flags[2]
                assert outcome(kind.computation_type_impl, semantic, *how) == outcome(
                    before.promote, semantic, *how
                )
            values = tensor((4, 1), a), tensor((8,), b)
            for pair in (values, values[::-1], (values[0], values[0])):
                found, wanted = (
                    described(outcome(check, semantic, *pair))
                    for check in (kind.binary_op_type_checking_impl, before.check)
                )
                assert found == wanted
        for a, b in itertools.product(SHAPES, SHAPES):
            values = tensor(a, DTYPES[3]), tensor(b, DTYPES[-2])
            found, wanted = (
                described(outcome(broadcast, semantic, *values))
                for broadcast in (kind.broadcast_impl_value, before.broadcast)
            )
            assert found == wanted


def interpreter_patched():
    """The language as a kernel sees it."""

    class Scope:
        def __enter__(self):
            self.scope = interpreter._LangPatchScope()
            interpreter._patch_lang_core(interpreter.tl, self.scope)

        def __exit__(self, *_):
            self.scope.restore()

    return Scope()


@pytest.mark.parametrize("shape", [s for s in SHAPES if s], ids=str)
def test_a_tensor_is_what_it_was_before(shape):
    for dtype in DTYPES:
        value = tensor(shape, dtype)
        other = object.__new__(core.tensor)
        before.tensor(other, value.handle, core.block_type(dtype, list(shape)))
        assert described(value) == described(other)
        assert interpreter._get_np_dtype(dtype) == before.np_dtype(dtype)


def test_values_are_unwrapped_as_before():
    for value in (3, True, None, [core.constexpr(2), 1], (core.constexpr(4),), DTYPES[0]):
        assert core._unwrap_if_constexpr(value) == before.unwrap(value)
    assert core._unwrap_if_constexpr(core.constexpr(5)) == 5


@pytest.mark.parametrize("shape", [[3], [], [2.0], [1 << 21]], ids=str)
def test_a_shape_that_no_block_has_is_refused(shape):
    with pytest.raises((ValueError, TypeError)):
        core.block_type(DTYPES[0], shape)
