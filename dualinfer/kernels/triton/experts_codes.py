"""Device side of experts.py for quantized weights: codes of chosen experts, read as they lie.

How codes lie is told in `quantized_kernels`, and how tiles of them become products in
`quantized_tiles`; here each program first learns whose codes it reads. A matrix of an expert
follows the one before, and so do its scales.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
import triton
import triton.language as tl

from .experts_kernels import gated_value, number_here, tile_of
from .fragment_kernel import _RAISED
from .launch import let_next_start, wait_for_inputs
from .quantized_kernels import (
    _beside,
    _inputs,
    _of_rows,
    _of_whole_rows,
    _offset_leaves_last,
    _offsets,
    _products,
    _quads,
    _rows_of,
    _scale,
    _statistics,
    _sums,
    _unit,
)
from .quantized_tiles import _blocks, _row_of_codes, _sum_tile


@triton.constexpr_function
def _held(width, bits):
    """Elements of a row of codes as the kernels for few rows have them: words, else bytes."""
    if bits == 4:
        return (width + 31) // 32 * 4
    return width // 4 if width % 16 == 0 else width


@triton.jit
def _tile(
    weight_ptr, scale_ptr, zero_ptr, expert, block, features, scale_stride, q,
    K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Codes of a block of an expert's rows, and what lies beside them."""
    rows, inside = _rows_of(block, features, ROWS, PARTS)
    w = _quads(
        *(weight_ptr + expert * features * (PARTS * _held(K, BITS)), rows, inside, q, K, BITS)
    )
    scale_ptr += expert * scale_stride
    if zero_ptr is not None:
        zero_ptr += expert * scale_stride
    return w, _beside(scale_ptr, zero_ptr, rows, inside, q, K, BITS, BLOCK)


@triton.jit
def _summed(
    p, total, factor, scale_ptr, zero_ptr, outer_ptr, expert, rows, inside, features, scale_stride,
    CODES: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sums of an expert's rows, of their products `p`."""
    scale_ptr += expert * scale_stride
    if zero_ptr is not None:
        zero_ptr += expert * scale_stride
    if outer_ptr is not None:
        outer_ptr += expert * features * PARTS
    about = (scale_ptr, zero_ptr, outer_ptr)
    return _of_whole_rows(tl.sum(p, 1), total, factor, *about, rows, inside, CODES, SCALES, BLOCK)


@triton.jit
def up_codes_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, experts_ptr, own_ptr,
    norm_weight_ptr, norm_bias_ptr, h_ptr, features, scale_stride, x_stride, eps, limit, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr,
    QUADS: tl.constexpr, RAISE: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Hidden values [T, CHOSEN, features] of x [T, K], which QUADS cover: it stays in registers.

    A program goes through blocks of ROWS of a token's experts, and fetches the next one's codes
    while it sums. Where the product with down wants it so (RAISE), hidden values are written times
    _RAISED. Those of experts that are elsewhere are not written.
    """
    let_next_start(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    LATER: tl.constexpr = _offset_leaves_last(CODES, BLOCK[1], x_ptr.dtype.element_ty)
    blocks = tl.cdiv(features, ROWS)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    q = tl.arange(0, QUADS)
    wait_for_inputs(PDL)
    experts_ptr += token * CHOSEN
    h_ptr += token * CHOSEN * features
    x_ptr += token * x_stride
    expert, block = tile_of(experts_ptr, own_ptr, first, blocks, CHOSEN)
    w, beside = _tile(
        *(weight_ptr, scale_ptr, zero_ptr, expert, block, features, scale_stride, q),
        *(K, BITS, BLOCK, ROWS, PARTS),
    )
    mean = 0.0
    factor = 1.0
    if NORM is not None:
        mean, factor = _statistics(x_ptr, eps, K, NORM)
    x = _inputs(x_ptr, q, (norm_weight_ptr, norm_bias_ptr, mean, factor), K, BITS, NORM)
    factor = 1.0 if NORM == "layer" else factor
    sums = _sums(x, BITS) if zero_ptr is not None else 0.0
    total = tl.sum(sums, 0) if zero_ptr is not None else 0.0
    offsets = _offsets(x, CODES) if LATER else 0.0
    for item in range(first, CHOSEN * blocks, programs):
        expert_then, block_then = tile_of(experts_ptr, own_ptr, item + programs, blocks, CHOSEN)
        w_next, beside_next = _tile(
            *(weight_ptr, scale_ptr, zero_ptr, expert_then, block_then, features, scale_stride),
            *(q, K, BITS, BLOCK, ROWS, PARTS),
        )
        p = _products(
            *(w, x, beside, sums, offsets, mask, zero_ptr),
            *(CODES, BITS, TABLE, SCALES, BLOCK, LATER),
        )
        rows, inside = _rows_of(block, features, ROWS, PARTS)
        y = _summed(
            *(p, total, factor, scale_ptr, zero_ptr, outer_ptr, expert, rows, inside, features),
            *(scale_stride, CODES, SCALES, BLOCK, PARTS),
        )
        if bias_ptr is not None:
            at = bias_ptr + expert * features * PARTS + rows
            y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = y
        if GATED:
            y, up = tl.split(tl.permute(tl.reshape(y, (2, ROWS)), (1, 0)))
        y = gated_value(y, up, limit, ACTIVATION, GATED, OFFSET)
        if RAISE:
            y *= _RAISED
        own = block * ROWS + tl.arange(0, ROWS)
        h_at = h_ptr + (item // blocks).to(tl.int64) * features + own
        tl.store(h_at, y.to(h_ptr.dtype.element_ty), mask=own < features)
        w = w_next
        beside = beside_next
        expert = expert_then
        block = block_then


@triton.jit
def _item(
    weight_ptr, scale_ptr, zero_ptr, experts_ptr, own_ptr, item, rows, inside, features,
    scale_stride, K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    QUADS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Codes of chosen expert number item // TURNS, and what lies beside them.

    None of one that is elsewhere, and none beyond.
    """
    expert = tl.load(experts_ptr + tl.minimum(item // TURNS, CHOSEN - 1))
    expert = number_here(expert, own_ptr).to(tl.int64)
    if own_ptr is not None:
        inside = inside & (expert + rows * 0 >= 0)  # the interpreter takes no scalar masks
        expert = tl.maximum(expert, 0)
    there = inside & (item < CHOSEN * TURNS)
    q = item % TURNS * QUADS + tl.arange(0, QUADS)
    w = _quads(weight_ptr + expert * features * _held(K, BITS), rows, there, q, K, BITS)
    scale_ptr += expert * scale_stride
    if zero_ptr is not None:
        zero_ptr += expert * scale_stride
    return w, _beside(scale_ptr, zero_ptr, rows, there, q, K, BITS, BLOCK)


@triton.jit
def down_codes_kernel(
    h_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, experts_ptr, mixture_ptr, own_ptr,
    partial_ptr, residual_ptr, y_ptr, features, scale_stride, residual_stride, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, QUADS: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, features] of hidden values [T, CHOSEN, K]; a program goes through a token's experts.

    TURNS times QUADS quads cover K, and SLOTS cover CHOSEN. The next quads are on their way while a
    program sums.
    """
    let_next_start(PDL)
    LATER: tl.constexpr = _offset_leaves_last(CODES, BLOCK[1], h_ptr.dtype.element_ty)
    token = tl.program_id(1).to(tl.int64)
    rows, inside = _rows_of(tl.program_id(0), features, ROWS, 1)
    wait_for_inputs(PDL)
    experts_ptr += token * CHOSEN
    mixture_ptr += token * CHOSEN
    h_ptr += token * (CHOSEN * K)
    w, beside = _item(
        *(weight_ptr, scale_ptr, zero_ptr, experts_ptr, own_ptr, 0, rows, inside, features),
        *(scale_stride, K, BITS, BLOCK, CHOSEN, QUADS, TURNS),
    )
    acc = tl.zeros((ROWS, QUADS), tl.float32)
    for item in range(CHOSEN * TURNS):
        w_next, beside_next = _item(
            *(weight_ptr, scale_ptr, zero_ptr, experts_ptr, own_ptr, item + 1, rows, inside),
            *(features, scale_stride, K, BITS, BLOCK, CHOSEN, QUADS, TURNS),
        )
        slot = item // TURNS
        expert = number_here(tl.load(experts_ptr + slot), own_ptr).to(tl.int64)
        is_here = expert >= 0
        expert = tl.maximum(expert, 0)
        q = item % TURNS * QUADS + tl.arange(0, QUADS)
        x = _inputs(h_ptr + slot * K, q, (None, None, 0.0, 1.0), K, BITS, None)
        sums = _sums(x, BITS) if zero_ptr is not None else 0.0
        offsets = _offsets(x, CODES) if LATER else 0.0
        p = _products(
            *(w, x, beside, sums, offsets, mask, zero_ptr),
            *(CODES, BITS, TABLE, SCALES, BLOCK, LATER),
        )
        factor = tl.full((ROWS,), _unit(CODES), tl.float32) * tl.load(mixture_ptr + slot)
        if BLOCK[1] == 0:
            if zero_ptr is not None:
                own = zero_ptr + expert * scale_stride
                z = _of_rows(own, rows, inside, BLOCK).to(tl.float32)
                p -= z[:, None] * sums[None, :]
            own = scale_ptr + expert * scale_stride
            factor *= _scale(_of_rows(own, rows, inside, BLOCK), SCALES)
        if outer_ptr is not None:
            own = outer_ptr + expert * features
            factor *= tl.load(own + rows, mask=inside, other=0.0)
        p *= factor[:, None]
        acc += p if own_ptr is None else tl.where(is_here, p, 0.0)
        w = w_next
        beside = beside_next
    y = tl.sum(acc, 1)
    if bias_ptr is not None:
        slots = tl.arange(0, SLOTS)
        there = slots < CHOSEN
        expert = tl.load(experts_ptr + slots, mask=there, other=0)
        expert = number_here(expert, own_ptr).to(tl.int64)
        if own_ptr is not None:
            there = there & (expert >= 0)
        mixture = tl.load(mixture_ptr + slots, mask=there, other=0.0)
        at = expert[None, :] * features + rows[:, None]
        b = tl.load(bias_ptr + at, mask=inside[:, None] & there[None, :], other=0.0)
        y += tl.sum(b.to(tl.float32) * mixture[None, :], 1)
    if partial_ptr is not None:
        partial_ptr += token * features
        y += tl.load(partial_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptr += token * residual_stride
        y += tl.load(residual_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * features + rows, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def codes_tile_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, order_ptr, ends_ptr, blocks_ptr,
    y_ptr, most, features, scale_stride, x_stride, limit,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, QUADS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`experts_tiles.tile_kernel` of codes, by the plan of `quantized_tiles.tile_kernel`.

    Codes of 4 bits want rows of x as `quantized_tiles.order_kernel` gives them.
    """
    let_next_start(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    HELD: tl.constexpr = _row_of_codes(K, BITS)
    TURNS: tl.constexpr = (HELD + QUADS * 16 - 1) // (QUADS * 16)
    columns = tl.cdiv(features, BLOCK_N)
    wave = tl.program_id(0) // (GROUP * columns) * GROUP
    size = tl.minimum(most - wave, GROUP)
    within = tl.program_id(0) % (GROUP * columns)
    number = wave + within % size
    wait_for_inputs(PDL)
    expert = tl.load(blocks_ptr + number).to(tl.int64)
    if expert < 0:
        return
    m = tl.load(blocks_ptr + most + number) + tl.arange(0, BLOCK_M)
    end = tl.load(ends_ptr + expert)
    tile = within // size
    r = tl.arange(0, BLOCK_N * PARTS)
    own = tile * BLOCK_N + r % BLOCK_N
    # Rows outside repeat the last one: nothing of theirs is written.
    rows = tl.minimum(own, features - 1).to(tl.int64) + (r // BLOCK_N) * features
    row = tl.minimum(m, end - 1)
    if CHOSEN:
        row = tl.load(order_ptr + row) // CHOSEN
    x_row = x_ptr + row.to(tl.int64) * x_stride
    weight_ptr += expert * features * (PARTS * HELD)
    scale_ptr += expert * scale_stride
    if zero_ptr is not None:
        zero_ptr += expert * scale_stride
    if outer_ptr is not None:
        outer_ptr += expert * features * PARTS
    lying = (rows // BLOCK[0] if BLOCK[0] else rows * 0) * _blocks(K, BLOCK[1])
    acc = _sum_tile(
        *(x_row, weight_ptr, scale_ptr, zero_ptr, outer_ptr, rows, lying, 0),
        *(x_ptr.dtype.element_ty, K, CODES, BITS, TABLE, SCALES, BLOCK, QUADS, TURNS, STAGES),
    )
    if bias_ptr is not None:
        b = tl.load(bias_ptr + expert * features * PARTS + rows).to(tl.float32)
        acc += b[:, None]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        y, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_M)), (2, 1, 0)))
    else:
        y = tl.trans(acc)
        up = y
    y = gated_value(y, up, limit, ACTIVATION, GATED, OFFSET)
    y_at = y_ptr + m.to(tl.int64)[:, None] * features + n[None, :]
    mask = (m < end)[:, None] & (n < features)[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
