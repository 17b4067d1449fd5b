"""Device side of eight_bit.py: rows of x become codes, and codes are multiplied."""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from .codes import nearest_e4m3, nearest_integer
from .launch import INTERPRETED, let_next_start, wait_for_inputs
from .linear_kernels import _finish_tile
from .quantized_kernels import _scale

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def _rounded(a, dtype: tl.constexpr):
    """float32 `a` with the precision of `dtype`."""
    return a.to(dtype).to(tl.float32)


@triton.jit
def _normed(x, inside, k, norm, K: tl.constexpr, NORM: tl.constexpr):
    """Float32 x of one row, normed as norm.py does, before it is rounded."""
    weight_ptr, bias_ptr, eps = norm
    if NORM == "layer":
        x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    gain = tl.load(weight_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if NORM == "rms_offset":
        gain += 1.0
    x *= gain
    if NORM == "layer":
        x += tl.load(bias_ptr + k, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def quantize_kernel(
    x_ptr, given_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr, scale_ptr, x_stride, eps,
    K: tl.constexpr, CODES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Codes of a row of x [K], and its scale or, with GROUPS, that of each GROUP columns.

    The steps are rounded to x's dtype, as plain ops' are: see `BlockArithmetic.quantize_input`.
    """
    let_next_start(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    if NORM is not None:
        norm = (norm_weight_ptr, norm_bias_ptr, eps)
        x = _rounded(_normed(x, inside, k, norm, K, NORM), dtype)
    least: tl.constexpr = -448.0 if CODES == "fp8_e4m3" else -128.0
    largest: tl.constexpr = 448.0 if CODES == "fp8_e4m3" else 127.0
    half: tl.constexpr = (largest - least) / 2
    parts: tl.constexpr = BLOCK // GROUP if GROUPS else 1
    x = tl.reshape(x, (parts, BLOCK // parts))
    if given_ptr is not None:
        scale = _rounded(tl.load(given_ptr).to(tl.float32), dtype) + tl.zeros((parts,), tl.float32)
    else:
        most = tl.max(tl.abs(x), 1)
        scale = _rounded(tl.div_rn(most, tl.full((parts,), half, tl.float32)), dtype)
        epsilon: tl.constexpr = 2.0**-7 if dtype == tl.bfloat16 else 2.0**-10
        scale = tl.where(scale == 0, 2.0**-23 if dtype == tl.float32 else epsilon, scale)
    held: tl.constexpr = GROUPS if GROUPS else 1
    group = tl.arange(0, parts)
    tl.store(scale_ptr + row * held + group, scale, mask=group < held)
    a = _rounded(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), dtype)
    a = tl.minimum(tl.maximum(a, least), largest)
    if CODES == "fp8_e4m3":
        codes = nearest_e4m3(a).to(tl.uint8, bitcast=True)
    else:
        codes = nearest_integer(a).to(tl.int8)
    tl.store(y_ptr + row * K + k, tl.reshape(codes, (BLOCK,)), mask=inside)


@triton.jit
def _summed(x, w, acc, CODES: tl.constexpr):
    """x w + acc: int32 of int8, else float32, where sums of 128 columns are added."""
    if CODES == "int8":
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    elif _INTERPRETED:
        acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, w, acc, max_num_imprecise_acc=128)
    return acc


@triton.jit
def _blocks_scale(
    scale_ptr, rows, inside, turn, K: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Scales of rows of a weight, where the columns of a turn have one."""
    at = rows // BLOCK[0] if BLOCK[0] else rows * 0
    if BLOCK[1]:
        at = at * ((K + BLOCK[1] - 1) // BLOCK[1]) + turn
    return _scale(tl.load(scale_ptr + at, mask=inside, other=0), SCALES)


@triton.jit
def tile_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr,
    count, features, residual_stride,
    K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [count, features] of codes x [count, K] and their scales [count, max(GROUPS, 1)].

    With GROUPS sums of BLOCK_K columns are scaled one by one, else those of all columns.
    """
    let_next_start(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if CODES == "fp8_e4m3":
        x_ptr = x_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        weight_ptr = weight_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    # Rows outside repeat the last one: nothing of theirs is written.
    m_held = tl.minimum(m, count - 1).to(tl.int64)
    n_held = tl.minimum(n, features - 1).to(tl.int64)
    within = n < features
    x_at = x_ptr + m_held[:, None] * K + k[None, :]
    w_at = weight_ptr + n_held[:, None] * K + k[None, :]
    up_offset = tl.cast(features, tl.int64) * K
    exact: tl.constexpr = CODES == "int8"
    kind: tl.constexpr = tl.int32 if exact and not GROUPS else tl.float32
    part_kind: tl.constexpr = tl.int32 if exact else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), kind)
    up = tl.zeros((BLOCK_M, BLOCK_N), kind)
    wait_for_inputs(PDL)
    for turn in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            inside = (k < K - turn * BLOCK_K)[None, :]
            x = tl.load(x_at, mask=inside, other=0.0)
            w = tl.load(w_at, mask=inside, other=0.0)
        if GROUPS:
            by_rows = tl.load(x_scale_ptr + m_held * GROUPS + (turn if GROUPS > 1 else 0))
            s = _blocks_scale(scale_ptr, n_held, within, turn, K, BLOCK, SCALES)
            part = _summed(x, w.T, tl.zeros((BLOCK_M, BLOCK_N), part_kind), CODES)
            acc += part.to(tl.float32) * (by_rows[:, None] * s[None, :])
        else:
            acc = _summed(x, w.T, acc, CODES)
        if GATED:
            if K % BLOCK_K == 0:
                w = tl.load(w_at + up_offset)
            else:
                w = tl.load(w_at + up_offset, mask=inside, other=0.0)
            if GROUPS:
                own = n_held + features
                s = _blocks_scale(scale_ptr, own, within, turn, K, BLOCK, SCALES)
                part = _summed(x, w.T, tl.zeros((BLOCK_M, BLOCK_N), part_kind), CODES)
                up += part.to(tl.float32) * (by_rows[:, None] * s[None, :])
            else:
                up = _summed(x, w.T, up, CODES)
        x_at += BLOCK_K
        w_at += BLOCK_K
    y = acc.to(tl.float32)
    u = up.to(tl.float32)
    if GROUPS == 0:
        by_rows = tl.load(x_scale_ptr + m_held)
        s = _blocks_scale(scale_ptr, n_held, within, 0, K, BLOCK, SCALES)
        y *= by_rows[:, None] * s[None, :]
        if GATED:
            s = _blocks_scale(scale_ptr, n_held + features, within, 0, K, BLOCK, SCALES)
            u *= by_rows[:, None] * s[None, :]
    ends = (bias_ptr, residual_ptr, residual_stride, y_ptr)
    _finish_tile(y, u, m, n, count, features, ends, ACTIVATION, GATED)
