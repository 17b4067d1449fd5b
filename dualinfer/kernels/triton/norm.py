"""RMSNorm and LayerNorm over the last axis, with the residual's addition before or after them."""

from typing import Any

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .rows import check_last_axis, check_vector, leading_axes, row_offset

WIDEST = 16384


@triton.jit
def _load_weights(weight_ptr, bias_ptr, column, within):
    weight = tl.load(weight_ptr + column, mask=within, other=0.0)
    bias = weight
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=within, other=0.0)
    return weight, bias


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, rows, width, eps, size1, size2,
    x_stride0, x_stride1, x_stride2, residual_stride0, residual_stride1, residual_stride2,
    CENTER: tl.constexpr, UNIT_OFFSET: tl.constexpr, EARLY: tl.constexpr, AXES: tl.constexpr,
    AFTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    column = tl.arange(0, BLOCK)[None, :]
    within = column < width
    weight, bias = 0.0, 0.0
    if EARLY:
        weight, bias = _load_weights(weight_ptr, bias_ptr, column, within)
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & within
    sizes = (size1, size2)
    at = row_offset(row, sizes, (x_stride0, x_stride1, x_stride2), AXES)
    x = tl.load(x_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
    to = row.to(tl.int64) * width + column
    residual = x
    if residual_ptr is not None:
        strides = (residual_stride0, residual_stride1, residual_stride2)
        at = row_offset(row, sizes, strides, AXES)
        residual = tl.load(residual_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
        if not AFTER:
            x = (x + residual).to(y_ptr.dtype.element_ty).to(tl.float32)
    if CENTER:
        x = tl.where(within, x - tl.sum(x, 1, keep_dims=True) / width, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / width + eps)
    if not EARLY:
        weight, bias = _load_weights(weight_ptr, bias_ptr, column, within)
    gain = tl.cast(weight, tl.float32)
    if UNIT_OFFSET:
        gain += 1.0
    y *= gain
    if bias_ptr is not None:
        y += tl.cast(bias, tl.float32)
    if AFTER:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32) + residual
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: Any,
    weight: Any,
    eps: float,
    *,
    unit_offset: bool = False,
    residual: Any = None,
    after: bool = False,
    pdl: bool = False,
) -> Any:
    """x [..., E] over its root mean square, times weight [E], in float32, rounded once.

    With `unit_offset` times 1 + weight (Gemma). With `residual` [..., E] the sum x + residual,
    rounded to x's dtype, is normed; with `after` the residual is added to the rounded result.
    `pdl` as in `launch`: the weight is read before the kernel in front has ended. E is at most
    16384; leading axes may be strided.
    """
    return _run(x, weight, None, eps, False, unit_offset, residual, after, pdl)


def layer_norm(
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    *,
    unit_offset: bool = False,
    residual: Any = None,
    after: bool = False,
    pdl: bool = False,
) -> Any:
    """x [..., E] with mean 0 and variance 1, times weight [E], plus bias [E] or None.

    The variance is that of the differences from the mean, in float32. The rest as in `rms_norm`.
    """
    return _run(x, weight, bias, eps, True, unit_offset, residual, after, pdl)


def _run(
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    center: bool,
    unit_offset: bool,
    residual: Any,
    after: bool,
    pdl: bool,
) -> Any:
    check_last_axis("x", x)
    width = x.shape[-1]
    if width > WIDEST:
        raise ValueError(f"x has {width} elements a row; at most {WIDEST} are expected.")
    check_vector("weight", weight, width)
    if bias is not None:
        check_vector("bias", bias, width)
    tensors = [x]
    if residual is not None:
        check_last_axis("residual", residual)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(
                f"residual is {tuple(residual.shape)} {residual.dtype}; {tuple(x.shape)} "
                f"{x.dtype}, as x is, was expected."
            )
        tensors.append(residual)
    y = x.new_empty(x.shape)
    if y.numel():
        axes, sizes, strides = leading_axes(x.shape[:-1], *(t.stride()[:-1] for t in tensors))
        rows, block = y.numel() // width, next_power_of_2(width)
        # Narrow rows (heads) share a program; wide ones are spread over more warps.
        rows_each = max(min(1024 // block, next_power_of_2(rows)), 1)
        launch(
            _norm_kernel,
            (triton.cdiv(rows, rows_each),),
            x, residual, weight, bias, y, rows, width, eps, *sizes, *strides[0], *strides[-1],
            CENTER=center, UNIT_OFFSET=unit_offset, EARLY=block < WIDEST,  # as registers allow
            AXES=axes, AFTER=after and residual is not None, ROWS=rows_each, BLOCK=block,
            num_warps=min(max(block * rows_each // 512, 1), 16), pdl=pdl,
        )  # fmt: skip
    return y
