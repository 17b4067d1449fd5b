"""Device side of experts.py for few tokens: weights of chosen experts, read as they are needed.

Programs learn an expert's number from what the router wrote, so that no weight of an expert can be
on its way before the router has ended. Those of an expert that all tokens share can, and are.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
import triton
import triton.language as tl

from .activation import activate
from .launch import let_next_start, wait_for_inputs
from .linear_kernels import _normed


@triton.jit
def number_here(expert, own_ptr):
    """The number that an expert has here, -1 of one that is elsewhere.

    Without `own_ptr` all are here, else those from own[0] to before own[1].
    """
    if own_ptr is not None:
        first = tl.load(own_ptr)
        expert = tl.where((expert >= first) & (expert < tl.load(own_ptr + 1)), expert - first, -1)
    return expert


@triton.jit
def tile_of(experts_ptr, own_ptr, item, blocks, CHOSEN: tl.constexpr):
    """The expert of tile number `item` of a token, int64, and which of its tiles that is.

    Of an expert elsewhere, and beyond the last, it is one that there is not.
    """
    expert = number_here(tl.load(experts_ptr + tl.minimum(item // blocks, CHOSEN - 1)), own_ptr)
    away = (expert < 0) | (item >= CHOSEN * blocks)
    return tl.maximum(expert, 0).to(tl.int64), tl.where(away, blocks, item % blocks)


@triton.jit
def gated_value(
    y, up, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """activation(y), times up + OFFSET where GATED; y up to `limit` and up within it, if given."""
    if limit is not None:
        y = tl.where(y > limit, limit, y)  # a minimum would hide NaN
    y = activate(y, ACTIVATION)
    if GATED:
        if limit is not None:
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y *= up + OFFSET
    return y


@triton.jit
def _up_rows(
    x_ptr, weight_ptr, bias_ptr, gate_ptr, norm, h_ptr, block, features, limit,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Hidden values number `block` of one expert for one row of x."""
    columns = tl.arange(0, BLOCK_K)
    inside = columns < K
    rows = block * ROWS + tl.arange(0, ROWS)
    within = rows < features
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]
    mask = within[:, None] & inside[None, :]
    w = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    up = w
    if GATED:
        up_ptr = weight_ptr + tl.cast(features, tl.int64) * K
        up = tl.load(up_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x, factor = _normed(x, inside, norm, columns, K, NORM)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1) * factor
    u = tl.sum(up.to(tl.float32) * x[None, :], 1) * factor if GATED else y
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=within, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(bias_ptr + features + rows, mask=within, other=0.0).to(tl.float32)
    y = gated_value(y, u, limit, ACTIVATION, GATED, OFFSET)
    if gate_ptr is not None:
        g = tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        y /= 1.0 + tl.exp(-tl.sum(g * x, 0) * factor)
    tl.store(h_ptr + rows, y.to(h_ptr.dtype.element_ty), mask=within)


@triton.jit
def up_vector_kernel(
    x_ptr, weight_ptr, bias_ptr, experts_ptr, own_ptr, shared_ptr, shared_gate_ptr,
    norm_weight_ptr, norm_bias_ptr, h_ptr, shared_h_ptr, features, shared_features, x_stride, eps,
    limit, K: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Hidden values [T, CHOSEN, features] of x [T, K], and [T, shared_features] of all tokens'.

    Those of experts that are elsewhere are not written.
    """
    let_next_start(PDL)
    block = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    norm = (norm_weight_ptr, norm_bias_ptr, eps)
    x_ptr += token * x_stride
    first = 0
    if shared_ptr is not None:
        first = tl.cdiv(shared_features, ROWS)
        if block < first:
            _up_rows(
                *(x_ptr, shared_ptr, None, shared_gate_ptr, norm),
                *(shared_h_ptr + token * shared_features, block, shared_features, limit),
                *(K, ROWS, BLOCK_K, NORM, ACTIVATION, GATED, OFFSET, PDL),
            )
    if block >= first:
        blocks = tl.cdiv(features, ROWS)
        pair = token * CHOSEN + (block - first) // blocks
        wait_for_inputs(PDL)
        expert = number_here(tl.load(experts_ptr + pair), own_ptr).to(tl.int64)
        if own_ptr is None or expert >= 0:
            PARTS: tl.constexpr = 2 if GATED else 1
            weight_ptr += expert * features * (K * PARTS)
            if bias_ptr is not None:
                bias_ptr += expert * features * PARTS
            _up_rows(
                *(x_ptr, weight_ptr, bias_ptr, None, norm),
                *(h_ptr + pair * features, (block - first) % blocks, features, limit),
                *(K, ROWS, BLOCK_K, NORM, ACTIVATION, GATED, OFFSET, PDL),
            )


@triton.jit
def _chunk(weight_ptr, at, mask):
    return tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def down_vector_kernel(
    h_ptr, weight_ptr, bias_ptr, experts_ptr, mixture_ptr, own_ptr, shared_h_ptr, shared_ptr,
    partial_ptr, residual_ptr, y_ptr, features, residual_stride,
    K: tl.constexpr, SHARED_K: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, features] of hidden values [T, CHOSEN, K]; a program adds up a token's experts here.

    SLOTS cover CHOSEN. The chunks of the next columns are on their way while a program sums.
    """
    let_next_start(PDL)
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within = rows < features
    k = tl.arange(0, BLOCK_K)
    BLOCK_S: tl.constexpr = SLOTS * BLOCK_K
    s = tl.arange(0, BLOCK_S)
    if shared_ptr is not None:
        shared_at = rows.to(tl.int64)[:, None] * SHARED_K + s[None, :]
        mask = within[:, None] & (s < SHARED_K)[None, :]
        ws = _chunk(shared_ptr, shared_at, mask)
    wait_for_inputs(PDL)
    slot = tl.arange(0, SLOTS)
    there = slot < CHOSEN
    pair = token * CHOSEN + slot
    expert = tl.load(experts_ptr + pair, mask=there, other=0)
    expert = number_here(expert, own_ptr).to(tl.int64)
    if own_ptr is not None:
        there = there & (expert >= 0)
    mixture = tl.load(mixture_ptr + pair, mask=there, other=0.0)
    row = expert[None, :] * features + rows[:, None]
    known = within[:, None] & there[None, :]
    at = row[:, :, None] * K + k[None, None, :]
    w = _chunk(weight_ptr, at, known[:, :, None] & (k < K)[None, None, :])
    h_at = h_ptr + pair[:, None] * K + k[None, :]
    acc = tl.zeros((ROWS, SLOTS, BLOCK_K), tl.float32)
    for done in range(0, K, BLOCK_K):
        h = tl.load(h_at + done, mask=there[:, None] & (k < K - done)[None, :], other=0.0)
        if K > BLOCK_K:
            left = k < K - done - BLOCK_K
            w_next = _chunk(
                weight_ptr, at + (done + BLOCK_K), known[:, :, None] & left[None, None, :]
            )
            acc += w.to(tl.float32) * h.to(tl.float32)[None, :, :]
            w = w_next
        else:
            acc += w.to(tl.float32) * h.to(tl.float32)[None, :, :]
    y = tl.sum(acc, 2)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=known, other=0.0).to(tl.float32)
    y = tl.sum(y * mixture[None, :], 1)
    if shared_ptr is not None:
        sums = tl.zeros((ROWS, BLOCK_S), tl.float32)
        shared_h_ptr += token * SHARED_K + s
        for done in range(0, SHARED_K, BLOCK_S):
            h = tl.load(shared_h_ptr + done, mask=s < SHARED_K - done, other=0.0)
            if SHARED_K > BLOCK_S:
                left = s < SHARED_K - done - BLOCK_S
                ws_next = _chunk(
                    shared_ptr, shared_at + (done + BLOCK_S), within[:, None] & left[None, :]
                )
                sums += ws.to(tl.float32) * h.to(tl.float32)[None, :]
                ws = ws_next
            else:
                sums += ws.to(tl.float32) * h.to(tl.float32)[None, :]
        y += tl.sum(sums, 1)
    if partial_ptr is not None:
        at = token * features + rows
        y += tl.load(partial_ptr + at, mask=within, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        at = token * residual_stride + rows
        y += tl.load(residual_ptr + at, mask=within, other=0.0).to(tl.float32)
    y_at = y_ptr + token * features + rows
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=within)
