"""Operands answer as torch tensors do, and write launches down."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dualinfer.kernels.triton.operands import (  # noqa: E402
    Operand,
    Pointer,
    Recording,
    dtype_name,
    empty,
)

VIEWS: dict[str, Any] = {
    "all": lambda x: x,
    "reshape": lambda x: x.reshape(6, 20),
    "reshape, one left": lambda x: x.reshape((-1, 4)),
    "transpose": lambda x: x.transpose(0, 2),
    "transpose from behind": lambda x: x.transpose(-1, 1),
    "narrow": lambda x: x.narrow(1, 2, 2),
    "narrow from behind": lambda x: x.narrow(-1, 1, 1),
    "nothing": lambda x: x.narrow(1, 2, 0),
    "split": lambda x: x.split((1, 3, 1), dim=1)[1],
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "unflatten, one left": lambda x: x.unflatten(0, (-1, 3)),
    "index": lambda x: x[2],
    "last index": lambda x: x[-1],
    "index behind a slice": lambda x: x[:, 3],
    "new axes": lambda x: x[None, :, None, 1],
    "all at once": lambda x: x.transpose(1, 2)[4].narrow(0, 1, 2)[:, None],
    "heads of a packed row": lambda x: x.reshape(6, 20).unflatten(-1, (5, 4)).narrow(1, 2, 2),
    "a row of one element": lambda x: x.narrow(0, 3, 1).transpose(0, 1),
}


def both(shape: tuple[int, ...] = (6, 5, 4), dtype: str = "bfloat16") -> tuple[Operand, Any]:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return Recording().operand(shape, dtype), tensor


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_those_of_a_tensor(view):
    operand, tensor = both()
    operand = view(operand.reshape(6, 5, 4))
    tensor = view(tensor)
    assert operand.shape == tuple(tensor.shape)
    if tensor.numel():
        assert operand.stride() == tensor.stride() and operand.stride(-1) == tensor.stride(-1)
        assert operand.offset == tensor.storage_offset()
    assert operand.is_contiguous() == tensor.is_contiguous() or not tensor.numel()
    assert (operand.numel(), operand.dim(), len(operand)) == (
        *(tensor.numel(), tensor.dim()),
        len(tensor),
    )
    assert operand.pointer == Pointer(0, 2 * operand.offset, "bfloat16")


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float16", "bfloat16", "float32"])
def test_dtypes_are_those_of_a_tensor(dtype):
    operand, tensor = both((3,), dtype)
    assert dtype_name(tensor.dtype) == dtype_name(operand.dtype) == dtype
    assert operand.element_size() == tensor.element_size()
    assert operand.is_floating_point() == tensor.is_floating_point()


def test_new_memory_is_a_buffer_of_the_recording():
    operand, tensor = both((2, 3))
    for made in (operand.new_empty((4, 5)), empty(operand, [4, 5], "bfloat16")):
        assert made.recording is operand.recording and made.offset == 0
        assert made.shape == (4, 5) and made.dtype == "bfloat16"
    assert [made.shape for made in operand.recording.buffers] == [(2, 3), (4, 5), (4, 5)]
    assert empty(tensor, [4, 5], "int32").dtype == torch.int32


WRONG: dict[str, Any] = {
    "other numbers of elements": lambda x: x.reshape(7, 20),
    "rows that do not follow one another": lambda x: x.transpose(0, 1).reshape(-1),
    "more than there is": lambda x: x.narrow(1, 3, 3),
    "parts of an axis": lambda x: x.unflatten(1, (2, 2)),
    "beyond the end": lambda x: x[6],
    "parts by an index": lambda x: x[1:3],
}


@pytest.mark.parametrize("view", WRONG.values(), ids=WRONG)
def test_what_is_no_view_is_refused(view):
    with pytest.raises(ValueError, match=r"has no|is not"):
        view(both()[0])
