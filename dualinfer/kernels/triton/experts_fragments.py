"""Device side of experts.py for one token or two: fragments of codes of chosen experts.

How codes become the matrix units' operand in registers, and why a program holds what two turns
read, is told in `fragment_kernel`; here each program first learns whose codes it reads. A matrix of
an expert follows the one before, and so do its scales.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
import triton
import triton.language as tl

from .experts_kernels import gated_value, number_here, tile_of
from .fragment_kernel import (
    _LESSENED,
    _RAISED,
    _added,
    _as_products,
    _beside,
    _codes,
    _fetch,
    _is_half,
    _lanes,
    _left,
    _left_of,
    _raises,
    _rows,
    _scaled_chunks,
    _x,
)
from .launch import dot, let_next_start, wait_for_inputs
from .quantized_kernels import _of_rows, _rows_of, _scale, _statistics


@triton.constexpr_function
def _row_words(width, bits):
    """Words of a row of codes."""
    return (width + 31) // 32 * 4 if bits == 4 else width // 4


@triton.jit
def _fetch_tile(
    weight_ptr, scale_ptr, zero_ptr, expert, block, features, scale_stride,
    B: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Codes, scales and zeros of a tile of an expert, as `_fetch` gives them."""
    ROW: tl.constexpr = _row_words(K, BITS)
    MASKED: tl.constexpr = ROW != B * T * 16
    if zero_ptr is not None:
        zero_ptr += expert * scale_stride
    return _fetch(
        weight_ptr + expert * features * ((2 if GATED else 1) * ROW),
        *(scale_ptr + expert * scale_stride, zero_ptr, block, 0, features),
        *(B, 1, T, 512 // BITS, PARTS, SLOTS, K, BLOCK, ROW, MASKED, GATED),
    )


@triton.jit
def _tile_summed(
    held, xs, sums, zero, slot, mask, scale_ptr, zero_ptr, T: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Sums [B, 16, N] of a tile with a row of x that is in registers."""
    acc = zero
    for f in tl.static_range(T // SLOTS):
        acc += _scaled_chunks(
            *(held, 0, f, xs[f], sums[f], zero, slot, mask, scale_ptr, zero_ptr),
            *(1, T, B, N, CODES, BITS, SCALES, BLOCK, SLOTS, HALF),
        )
    return acc


@triton.jit
def _write_hidden(
    acc, item, expert, block, factor, scale_ptr, outer_ptr, bias_ptr, h_ptr, features,
    scale_stride, blocks, limit, CODES: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, RAISE: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """Write the hidden values of a tile whose sums are `acc`."""
    TILE: tl.constexpr = 8 if GATED else 16
    PER: tl.constexpr = 2 if GATED else 1
    y = tl.sum(tl.sum(acc, 0), 1) * (_left(CODES, HALF) * _left_of(SCALES, BLOCK[1])) * factor
    rows, inside = _rows_of(block, features, TILE, PER)
    if BLOCK[1] == 0:
        y *= _scale(_of_rows(scale_ptr + expert * scale_stride, rows, inside, BLOCK), SCALES)
    at = expert * features * PER + rows
    if outer_ptr is not None:
        y *= tl.load(outer_ptr + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = y
    if GATED:
        y, up = tl.split(tl.permute(tl.reshape(y, (2, TILE)), (1, 0)))
    y = gated_value(y, up, limit, ACTIVATION, GATED, OFFSET)
    if RAISE:
        y *= _RAISED
    own = block * TILE + tl.arange(0, TILE)
    h_at = h_ptr + (item // blocks).to(tl.int64) * features + own
    tl.store(h_at, y.to(h_ptr.dtype.element_ty), mask=own < features)


@triton.jit
def up_fragments_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, experts_ptr, own_ptr,
    norm_weight_ptr, norm_bias_ptr, h_ptr, features, scale_stride, x_stride, eps, limit, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, N: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, B: tl.constexpr, T: tl.constexpr,
    RAISE: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Hidden values [T, CHOSEN, features] of x [T, K]; a program goes through a token's tiles.

    T chunks of each of B warps are all of K, and x stays in registers. Where the product with down
    wants it so (RAISE), hidden values are written times _RAISED. Those of experts that are
    elsewhere are not written.
    """
    let_next_start(PDL)
    HALF: tl.constexpr = _is_half(x_ptr.dtype.element_ty, NORM)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    blocks = tl.cdiv(features, 8 if GATED else 16)
    mask = mask.to(tl.uint32)
    warp, _, _ = _lanes(B)
    wait_for_inputs(PDL)
    experts_ptr += token * CHOSEN
    h_ptr += token * CHOSEN * features
    x_ptr += token * x_stride
    expert, block = tile_of(experts_ptr, own_ptr, first, blocks, CHOSEN)
    held = _fetch_tile(
        *(weight_ptr, scale_ptr, zero_ptr, expert, block, features, scale_stride),
        *(B, T, PARTS, SLOTS, K, BITS, BLOCK, GATED),
    )
    other_expert, other_block = tile_of(experts_ptr, own_ptr, first + programs, blocks, CHOSEN)
    other = _fetch_tile(
        *(weight_ptr, scale_ptr, zero_ptr, other_expert, other_block, features, scale_stride),
        *(B, T, PARTS, SLOTS, K, BITS, BLOCK, GATED),
    )
    mean = 0.0
    factor = 1.0
    if NORM is not None:
        mean, factor = _statistics(x_ptr, eps, K, NORM)
    norm = (norm_weight_ptr, norm_bias_ptr, mean, factor)
    zero = tl.zeros((B, 16, N), tl.float32)
    ones = tl.full((B, 16, 512 // BITS), 1.0, tl.float16 if HALF else x_ptr.dtype.element_ty)
    slot = (tl.arange(0, N) // PARTS % SLOTS)[None, None, :]
    xs = ()
    sums = ()
    for f in tl.static_range(T // SLOTS):
        x = _x(
            *(x_ptr, norm, warp * T + f * SLOTS, 1, 0, 0),
            *(N, B, BITS, PARTS, SLOTS, K, NORM, _raises(CODES, HALF)),
        )
        xs += (x,)
        sums += (dot(ones, x, zero),)
    factor = 1.0 if NORM is None else 1.0 / _LESSENED
    for item in tl.range(first, CHOSEN * blocks, 2 * programs, num_stages=1):
        acc = _tile_summed(
            *(held, xs, sums, zero, slot, mask, scale_ptr, zero_ptr),
            *(T, B, N, CODES, BITS, SCALES, BLOCK, SLOTS, HALF),
        )
        then = item + 2 * programs
        expert_then, block_then = tile_of(experts_ptr, own_ptr, then, blocks, CHOSEN)
        held = _fetch_tile(
            *(weight_ptr, scale_ptr, zero_ptr, expert_then, block_then, features, scale_stride),
            *(B, T, PARTS, SLOTS, K, BITS, BLOCK, GATED),
        )
        _write_hidden(
            *(acc, item, expert, block, factor, scale_ptr, outer_ptr, bias_ptr, h_ptr, features),
            *(scale_stride, blocks, limit, CODES, SCALES, BLOCK, HALF, RAISE, ACTIVATION, GATED),
            OFFSET,
        )
        expert = expert_then
        block = block_then
        if item + programs < CHOSEN * blocks:
            acc = _tile_summed(
                *(other, xs, sums, zero, slot, mask, scale_ptr, zero_ptr),
                *(T, B, N, CODES, BITS, SCALES, BLOCK, SLOTS, HALF),
            )
            then += programs
            expert_then, block_then = tile_of(experts_ptr, own_ptr, then, blocks, CHOSEN)
            other = _fetch_tile(
                *(weight_ptr, scale_ptr, zero_ptr, expert_then, block_then, features),
                *(scale_stride, B, T, PARTS, SLOTS, K, BITS, BLOCK, GATED),
            )
            _write_hidden(
                *(acc, item + programs, other_expert, other_block, factor, scale_ptr, outer_ptr),
                *(bias_ptr, h_ptr, features, scale_stride, blocks, limit, CODES, SCALES, BLOCK),
                *(HALF, RAISE, ACTIVATION, GATED, OFFSET),
            )
            other_expert = expert_then
            other_block = block_then


@triton.jit
def _unit_of(
    experts_ptr, own_ptr, turn, B: tl.constexpr, CHOSEN: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Of each lane's warp [32 B] in a turn: which of the token's experts, its number, the unit.

    And whether there is such a unit here.
    """
    warp, _, _ = _lanes(B)
    number = turn * B + warp
    chosen = tl.minimum(number // UNITS, CHOSEN - 1)
    expert = number_here(tl.load(experts_ptr + chosen), own_ptr)
    there = (number < CHOSEN * UNITS) & (expert >= 0)
    return chosen, tl.maximum(expert, 0).to(tl.int64), number % UNITS, there


@triton.jit
def _fetch_units(
    weight_ptr, scale_ptr, zero_ptr, experts_ptr, own_ptr, turn, block, features, scale_stride,
    B: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """What warps read in one turn, as `_fetch` gives it: each T chunks of an expert."""
    ROW: tl.constexpr = _row_words(K, BITS)
    MASKED: tl.constexpr = ROW != UNITS * T * 16
    _, expert, unit, there = _unit_of(experts_ptr, own_ptr, turn, B, CHOSEN, UNITS)
    before = expert * features
    scale_ptr += expert * scale_stride
    if zero_ptr is not None:
        zero_ptr += expert * scale_stride
    found = ()
    for m in tl.static_range(M):
        lo, hi, lo_in, hi_in = _rows(block, m, features, M, False, B)
        for t in tl.static_range(T):
            chunk = unit * T + t
            low = _codes(weight_ptr, before + lo, lo_in & there, chunk, B, ROW, MASKED)
            high = _codes(weight_ptr, before + hi, hi_in & there, chunk, B, ROW, MASKED)
            found += (tl.join(low, high),)
    for m in tl.static_range(M):
        lo, hi, lo_in, hi_in = _rows(block, m, features, M, False, B)
        for t in tl.static_range(0, T, SLOTS):
            rows = (lo, hi, lo_in & there, hi_in & there, unit * T + t)
            if BLOCK[1]:
                found += (_beside(scale_ptr, *rows, B, 512 // BITS, PARTS, SLOTS, K, BLOCK),)
            if zero_ptr is not None:
                found += (_beside(zero_ptr, *rows, B, 512 // BITS, PARTS, SLOTS, K, BLOCK),)
    return found


@triton.jit
def _units_summed(
    acc, held, turn, block, zero, slot, mask, h_ptr, scale_ptr, zero_ptr, outer_ptr, experts_ptr,
    mixture_ptr, own_ptr, features, scale_stride,
    M: tl.constexpr, T: tl.constexpr, B: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    CODES: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, CHOSEN: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Sums of M tiles and what one turn adds, by the weights of the mixture."""
    HALF: tl.constexpr = h_ptr.dtype.element_ty == tl.float16
    CHUNK: tl.constexpr = 512 // BITS
    chosen, expert, unit, there = _unit_of(experts_ptr, own_ptr, turn, B, CHOSEN, UNITS)
    factor = tl.load(mixture_ptr + chosen, mask=there, other=0.0)
    of_turn = ()
    for _ in tl.static_range(M):
        of_turn += (zero,)
    for f in tl.static_range(T // SLOTS):
        # Hidden values of experts elsewhere were not written: theirs are beyond K.
        chunk = tl.where(there, unit * T, UNITS * T) + f * SLOTS
        x = _x(
            *(h_ptr, None, chunk, 1, 0, chosen * K),
            *(N, B, BITS, PARTS, SLOTS, K, None, False),
        )
        total = zero
        if _added(CODES, HALF) or zero_ptr is not None:
            total = dot(tl.full((B, 16, CHUNK), 1.0, h_ptr.dtype.element_ty), x, zero)
        added = ()
        for m in tl.static_range(M):
            d = _scaled_chunks(
                *(held, m, f, x, total, zero, slot, mask, scale_ptr, zero_ptr),
                *(M, T, B, N, CODES, BITS, SCALES, BLOCK, SLOTS, HALF),
            )
            added += (of_turn[m] + d,)
        of_turn = added
    summed = ()
    for m in tl.static_range(M):
        lo, hi, lo_in, hi_in = _rows(block, m, features, M, False, B)
        low = factor
        high = factor
        if BLOCK[1] == 0:
            ptr = scale_ptr + expert * scale_stride
            low *= _scale(_of_rows(ptr, lo, lo_in, BLOCK), SCALES)
            high *= _scale(_of_rows(ptr, hi, hi_in, BLOCK), SCALES)
        if outer_ptr is not None:
            low *= tl.load(outer_ptr + expert * features + lo, mask=lo_in, other=0.0)
            high *= tl.load(outer_ptr + expert * features + hi, mask=hi_in, other=0.0)
        both = tl.join(low, high)
        summed += (acc[m] + of_turn[m] * _as_products(tl.join(both, both), B, N),)
    return summed


@triton.jit
def down_fragments_kernel(
    h_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, experts_ptr, mixture_ptr, own_ptr,
    partial_ptr, residual_ptr, y_ptr, features, scale_stride, residual_stride, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, ALL: tl.constexpr,
    N: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, B: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, features] of hidden values [T, CHOSEN, K]; a program has M tiles of 16 results.

    Its B warps go through the units of T chunks that a token's experts have. ALL cover CHOSEN.
    Hidden values are as `up_fragments_kernel` writes them.
    """
    let_next_start(PDL)
    HALF: tl.constexpr = h_ptr.dtype.element_ty == tl.float16
    UNITS: tl.constexpr = (_row_words(K, BITS) + T * 16 - 1) // (T * 16)
    TURNS: tl.constexpr = (CHOSEN * UNITS + B - 1) // B
    token = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    mask = mask.to(tl.uint32)
    wait_for_inputs(PDL)
    experts_ptr += token * CHOSEN
    mixture_ptr += token * CHOSEN
    h_ptr += token * (CHOSEN * K)
    held = _fetch_units(
        *(weight_ptr, scale_ptr, zero_ptr, experts_ptr, own_ptr, 0, block, features),
        *(scale_stride, B, M, T, PARTS, SLOTS, K, BITS, BLOCK, CHOSEN, UNITS),
    )
    other = _fetch_units(
        *(weight_ptr, scale_ptr, zero_ptr, experts_ptr, own_ptr, 1, block, features),
        *(scale_stride, B, M, T, PARTS, SLOTS, K, BITS, BLOCK, CHOSEN, UNITS),
    )
    zero = tl.zeros((B, 16, N), tl.float32)
    slot = (tl.arange(0, N) // PARTS % SLOTS)[None, None, :]
    acc = ()
    for _ in tl.static_range(M):
        acc += (zero,)
    for turn in tl.range(0, TURNS, 2, num_stages=1):
        acc = _units_summed(
            *(acc, held, turn, block, zero, slot, mask, h_ptr, scale_ptr, zero_ptr, outer_ptr),
            *(experts_ptr, mixture_ptr, own_ptr, features, scale_stride, M, T, B, N, K, CODES),
            *(BITS, SCALES, BLOCK, PARTS, SLOTS, CHOSEN, UNITS),
        )
        held = _fetch_units(
            *(weight_ptr, scale_ptr, zero_ptr, experts_ptr, own_ptr, turn + 2, block, features),
            *(scale_stride, B, M, T, PARTS, SLOTS, K, BITS, BLOCK, CHOSEN, UNITS),
        )
        tl.debug_barrier()
        acc = _units_summed(
            *(acc, other, turn + 1, block, zero, slot, mask, h_ptr, scale_ptr, zero_ptr),
            *(outer_ptr, experts_ptr, mixture_ptr, own_ptr, features, scale_stride, M, T, B, N, K),
            *(CODES, BITS, SCALES, BLOCK, PARTS, SLOTS, CHOSEN, UNITS),
        )
        other = _fetch_units(
            *(weight_ptr, scale_ptr, zero_ptr, experts_ptr, own_ptr, turn + 3, block, features),
            *(scale_stride, B, M, T, PARTS, SLOTS, K, BITS, BLOCK, CHOSEN, UNITS),
        )
        tl.debug_barrier()
    slots = tl.arange(0, ALL)
    of_bias = slots < CHOSEN
    experts = number_here(tl.load(experts_ptr + slots, mask=of_bias, other=0), own_ptr)
    experts = experts.to(tl.int64)
    if own_ptr is not None:
        of_bias = of_bias & (experts >= 0)
    mixture = tl.load(mixture_ptr + slots, mask=of_bias, other=0.0)
    for m in tl.static_range(M):
        rows, inside = _rows_of(block * M + m, features, 16, 1)
        y = tl.sum(tl.sum(acc[m], 0), 1) * (_left(CODES, HALF) * _left_of(SCALES, BLOCK[1]))
        if bias_ptr is not None:
            at = experts[None, :] * features + rows[:, None]
            b = tl.load(bias_ptr + at, mask=inside[:, None] & of_bias[None, :], other=0.0)
            y += tl.sum(b.to(tl.float32) * mixture[None, :], 1)
        if partial_ptr is not None:
            at = token * features + rows
            y += tl.load(partial_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            at = token * residual_stride + rows
            y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y_at = y_ptr + token * features + rows
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
