"""The embedding lookup: rows of tokens, positions and token types, summed."""

# pyright: reportArgumentType=false
from typing import Any

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import dtype_name
from .rows import check_last_axis, leading_axes, row_offset


@triton.jit
def _load_row(ids_ptr, at, shift, table, column, width, SHARE: tl.constexpr):
    """Part of the row of an id, in float32; one outside of the table takes its nearest row.

    Where the table is a SHARE of a larger one, it takes zeros.
    """
    table_ptr, size, stride = table
    row = tl.load(ids_ptr + at).to(tl.int64) + shift
    near = tl.minimum(tl.maximum(row, 0), size - 1)
    x = tl.load(table_ptr + near * stride + column, mask=column < width).to(tl.float32)
    if SHARE:
        x = tl.where(row == near, x, 0.0)
    return x


@triton.jit
def _embed_kernel(
    ids_ptr, weight_ptr, types_ptr, type_weight_ptr, positions_ptr, position_weight_ptr, y_ptr,
    width, scale, position_offset, first,
    size, type_size, position_size,
    stride, type_stride, position_stride, size1, size2,
    ids_stride0, ids_stride1, ids_stride2, types_stride0, types_stride1, types_stride2,
    positions_stride0, positions_stride1, positions_stride2,
    SCALED: tl.constexpr, AXES: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    blocks = tl.cdiv(width, BLOCK)
    token = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    sizes = (size1, size2)
    at = row_offset(token, sizes, (ids_stride0, ids_stride1, ids_stride2), AXES)
    x = _load_row(ids_ptr, at, -first, (weight_ptr, size, stride), column, width, SHARE)
    if SCALED:
        x = (x * scale).to(dtype).to(tl.float32)
    if types_ptr is not None:
        at = row_offset(token, sizes, (types_stride0, types_stride1, types_stride2), AXES)
        table = (type_weight_ptr, type_size, type_stride)
        x += _load_row(types_ptr, at, 0, table, column, width, False)
        x = x.to(dtype).to(tl.float32)
    if positions_ptr is not None:
        strides = (positions_stride0, positions_stride1, positions_stride2)
        at = row_offset(token, sizes, strides, AXES)
        table = (position_weight_ptr, position_size, position_stride)
        x += _load_row(positions_ptr, at, position_offset, table, column, width, False)
    y_ptr += token.to(tl.int64) * width
    tl.store(y_ptr + column, x.to(dtype), mask=column < width)


def embed(
    ids: Any,
    weight: Any,
    *,
    positions: Any = None,
    position_weight: Any = None,
    position_offset: int = 0,
    token_types: Any = None,
    type_weight: Any = None,
    scale: float = 1.0,
    first: int | None = None,
) -> Any:
    """Row ids[...] of weight [V, E], times `scale`: [..., E].

    Then the row of the token type, then that of the position plus `position_offset` are added, each
    from a table [rows, E]. Each step rounds to the tables' one dtype; `scale` itself is not
    rounded. Ids, positions and types are int32 or int64 of one shape (expanded views will do); one
    outside of its table takes the nearest row. With `first`, `weight` is a share of a table, whose
    rows begin with that id's: other ids take zeros.
    """
    check_last_axis("weight", weight)
    _check_lookup("ids", ids, ids, "weight", weight, weight)
    _check_lookup("positions", positions, ids, "position_weight", position_weight, weight)
    _check_lookup("token_types", token_types, ids, "type_weight", type_weight, weight)
    width = weight.shape[1]
    y = weight.new_empty((*ids.shape, width))
    if y.numel() == 0:
        return y
    types, at = (ids if t is None else t for t in (token_types, positions))
    tables = [weight if t is None else t for t in (weight, type_weight, position_weight)]
    axes, sizes, strides = leading_axes(ids.shape, ids.stride(), types.stride(), at.stride())
    block = min(next_power_of_2(width), 1024)
    launch(
        _embed_kernel,
        (ids.numel() * triton.cdiv(width, block),),
        *(ids, weight, token_types, type_weight, positions, position_weight, y),
        *(width, scale, position_offset, first or 0),
        *(table.shape[0] for table in tables),
        *(table.stride(0) for table in tables),
        *(*sizes, *strides[0], *strides[1], *strides[2]),
        **{"SCALED": scale != 1.0, "AXES": axes, "SHARE": first is not None, "BLOCK": block},
        num_warps=4 if block >= 1024 else 1,
    )
    return y


def _check_lookup(
    ids_name: str, ids: Any, like: Any, table_name: str, table: Any, weight: Any
) -> None:
    """Raise ValueError unless `table` has rows as `weight` does, and `ids` choose among them."""
    if (ids is None) != (table is None):
        raise ValueError(f"{ids_name} and {table_name} belong together: pass both, or neither.")
    if ids is None:
        return
    if dtype_name(ids.dtype) not in ("int64", "int32") or ids.shape != like.shape:
        raise ValueError(
            f"{ids_name} is {tuple(ids.shape)} {ids.dtype}; int32 or int64 {tuple(like.shape)} is "
            "expected."
        )
    check_last_axis(table_name, table)
    if (
        table.dim() != 2
        or table.shape[1] != weight.shape[-1]
        or table.dtype != weight.dtype
        or not len(table)
    ):
        raise ValueError(
            f"{table_name} is {tuple(table.shape)} {table.dtype}; [rows, {weight.shape[-1]}] "
            f"{weight.dtype} is expected."
        )
