"""Rows of strided tensors: where the elements of the last axis begin, whatever the leading axes."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

MOST_AXES = 3


@triton.jit
def row_offset(row, sizes, strides, AXES: tl.constexpr):
    """Offset, int64, of row `row` of a tensor with AXES leading axes; see `leading_axes`."""
    row = row.to(tl.int64)
    if AXES == 1:
        offset = row * strides[2]
    elif AXES == 2:
        offset = row // sizes[1] * strides[1] + row % sizes[1] * strides[2]
    else:
        outer = row // sizes[1]
        offset = outer // sizes[0] * strides[0] + outer % sizes[0] * strides[1]
        offset += row % sizes[1] * strides[2]
    return offset


def leading_axes(
    shape: Sequence[int], *strides: Sequence[int]
) -> tuple[int, tuple[int, int], list[tuple[int, int, int]]]:
    """The fewest axes that walk the rows of several tensors of one shape in the same order.

    `shape` and `strides` are those of the leading axes. Returns `row_offset`'s arguments: AXES, the
    sizes of the last two axes, and three strides a tensor. Raises ValueError where more than three
    axes are needed.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(
            mine[-1] == size * theirs[axis] for mine, theirs in zip(steps, strides, strict=True)
        ):
            sizes[-1] *= size
            for mine, theirs in zip(steps, strides, strict=True):
                mine[-1] = theirs[axis]
        else:
            sizes.append(size)
            for mine, theirs in zip(steps, strides, strict=True):
                mine.append(theirs[axis])
    axes = max(len(sizes), 1)
    if axes > MOST_AXES:
        raise ValueError(
            f"The leading axes {tuple(shape)} with strides {[tuple(s) for s in strides]} are "
            f"{axes} strided axes; at most {MOST_AXES} are expected. Pass contiguous tensors."
        )
    sizes = [1] * (MOST_AXES - len(sizes)) + sizes
    padded = [(*[0] * (MOST_AXES - len(mine)), *mine) for mine in steps]
    return axes, (sizes[1], sizes[2]), padded  # pyright: ignore[reportReturnType]


def check_last_axis(name: str, x: Any) -> None:
    """Raise ValueError unless the last axis of a float tensor is contiguous."""
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}; a float dtype is expected.")
    if x.dim() == 0 or (x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel()):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; a contiguous last axis "
            "is expected."
        )


def check_vector(name: str, x: Any, size: int) -> None:
    """Raise ValueError unless `x` is a contiguous float vector of `size` elements."""
    check_last_axis(name, x)
    if tuple(x.shape) != (size,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; ({size},) is expected.")
