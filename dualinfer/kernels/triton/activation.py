"""Activation functions: the device function that other kernels' epilogues call, and the ops."""

from typing import Any

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .rows import check_last_axis, leading_axes, row_offset

KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh")
_BLOCK = 2048


@triton.jit
def activate(x, KIND: tl.constexpr):
    """f(x) of float32 x, by the kinds of `reference.activation`; x itself where KIND is None."""
    if KIND is None:
        y = x
    elif KIND == "silu":
        y = _times_sigmoid(x, x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2 u
        y = _times_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        y = _times_sigmoid(x, 1.702 * x)
    elif KIND == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # a maximum would hide NaN
    elif KIND == "relu2":
        y = tl.where(x < 0.0, 0.0, x * x)
    else:
        tl.static_assert(KIND == "tanh", "unknown activation")
        y = _tanh(x)
    return y


@triton.jit
def _times_sigmoid(x, u):
    return x / (1.0 + tl.exp(tl.minimum(-u, 87.0)))  # exp(87) is below the largest float32


@triton.jit
def _tanh(x):
    """To float32's precision, relative at any size, without the interpreter's lack of libdevice."""
    far = 1.0 - 2.0 / (tl.exp(tl.minimum(2.0 * tl.abs(x), 87.0)) + 1.0)
    t = tl.minimum(x * x, 1.0)
    # tanh(x) / x = 1 + t P(t): near 0 the formula above loses its digits. The coefficients are a
    # minimax fit over |x| < 0.6, with a relative error of 3e-9.
    p = 0.020805347710847855 - 0.005905826576054096 * t
    p = -0.05378667265176773 + t * p
    p = 0.13331958651542664 + t * p
    near = x + x * t * (-0.33333298563957214 + t * p)
    # NaN, which minima hide, must take the last branch.
    return tl.where(x >= 0.6, far, tl.where(x <= -0.6, -far, near))


@triton.jit
def _activation_kernel(
    x_ptr, y_ptr, width, size1, size2, stride0, stride1, stride2,
    KIND: tl.constexpr, GATED: tl.constexpr, AXES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    blocks = tl.cdiv(width, BLOCK)
    row = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x_ptr += row_offset(row, (size1, size2), (stride0, stride1, stride2), AXES)
    y = activate(tl.load(x_ptr + column, mask=inside).to(tl.float32), KIND)
    if GATED:
        y *= tl.load(x_ptr + width + column, mask=inside).to(tl.float32)
    y_ptr += row.to(tl.int64) * width
    tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def activation(x: Any, kind: str, *, pdl: bool = False) -> Any:
    """f(x) of x [..., F], in float32, rounded once; `pdl` as in `launch`."""
    return _run(x, kind, False, pdl)


def gated_activation(x: Any, kind: str, *, pdl: bool = False) -> Any:
    """f(gate) * up for x [..., 2F] that holds gate, then up: [..., F], rounded once."""
    return _run(x, kind, True, pdl)


@triton.jit
def _softplus(a):
    return tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))


@triton.jit
def _expm1(x):
    """exp(x) - 1 of x <= 0; near 0, where the difference loses its digits, by its series."""
    near = 1.0 + x * (1.0 / 5.0) * (1.0 + x * (1.0 / 6.0) * (1.0 + x * (1.0 / 7.0)))
    near = x * (1.0 + x * 0.5 * (1.0 + x * (1.0 / 3.0) * (1.0 + x * 0.25 * near)))
    return tl.where(x > -0.25, near, tl.exp(x) - 1.0)


@triton.jit
def _xielu_kernel(
    x_ptr, y_ptr, alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr, count,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    positive = _softplus(tl.load(alpha_p_ptr).to(tl.float32))
    beta = tl.load(beta_ptr).to(tl.float32)
    negative = beta + _softplus(tl.load(alpha_n_ptr).to(tl.float32))
    eps = tl.load(eps_ptr).to(tl.float32)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    above = x * (positive * x + beta)
    below = (_expm1(tl.minimum(x, eps)) - x) * negative + beta * x
    y = tl.where(x > 0.0, above, below)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


def xielu(x: Any, alpha_p: Any, alpha_n: Any, beta: Any, eps: Any, *, pdl: bool = False) -> Any:
    """`reference.xielu` of contiguous x, in float32, rounded once; the numbers are one element."""
    if not x.is_contiguous():
        raise ValueError(f"x has strides {x.stride()}; contiguous memory is expected.")
    y = x.new_empty(x.shape)
    count = x.numel()
    if count:
        block = min(next_power_of_2(count), _BLOCK)
        launch(
            _xielu_kernel,
            (triton.cdiv(count, block),),
            *(x, y, alpha_p, alpha_n, beta, eps, count),
            BLOCK=block,
            num_warps=4 if block >= 1024 else 1,
            pdl=pdl,
        )
    return y


def _run(x: Any, kind: str, gated: bool, pdl: bool) -> Any:
    if kind not in KINDS:
        raise ValueError(f"The activation is {kind!r}; one of {', '.join(KINDS)} is expected.")
    check_last_axis("x", x)
    if gated and x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; gate and up need an even last axis.")
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    y = x.new_empty((*x.shape[:-1], width))
    if y.numel() == 0:
        return y
    if not gated and x.is_contiguous():
        width = x.numel()  # one long row leaves no block half empty
    if width == x.numel():
        axes, sizes, (strides,) = 1, (1, 1), [(0, 0, 0)]
    else:
        axes, sizes, (strides,) = leading_axes(x.shape[:-1], x.stride()[:-1])
    block = min(next_power_of_2(width), _BLOCK)
    launch(
        _activation_kernel,
        (y.numel() // width * triton.cdiv(width, block),),
        *(x, y, width, *sizes, *strides),
        **{"KIND": kind, "GATED": gated, "AXES": axes, "BLOCK": block},
        num_warps=4 if block >= 1024 else 1,
        pdl=pdl,
    )
    return y
