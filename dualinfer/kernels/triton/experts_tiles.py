"""Device side of experts.py for many tokens: pairs in the order of experts, and tiles over them.

A pair is a token and one of its chosen experts, number t k + j. In the order of experts those of
one expert lie side by side, in their own order, and are cut into blocks for the matrix units. No
float is added by atomics, so that the same call gives the same bits.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
import triton
import triton.language as tl

from .experts_kernels import gated_value, number_here
from .launch import dot, let_next_start, wait_for_inputs


@triton.jit
def _expert_of(experts_ptr, own_ptr, pair, pairs, X: tl.constexpr):
    """The experts of pairs by their number here; X of those elsewhere and of what is no pair."""
    there = pair < pairs
    expert = tl.load(experts_ptr + pair, mask=there, other=X)
    if own_ptr is not None:
        expert = number_here(expert, own_ptr)
        expert = tl.where(there & (expert >= 0), expert, X)
    return expert


@triton.jit
def order_pairs_kernel(
    experts_ptr, own_ptr, order_ptr, places_ptr, ends_ptr, blocks_ptr, counter_ptr, pairs, most,
    X: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The pairs of each expert here, which a program has: ALL, a power of two, covers X.

    `order` has the pair of each place, `places` the place of each pair, `ends` [X] the place behind
    an expert's last pair. The last program cuts blocks: their experts, -1 beyond the last one, in
    `blocks` [2, most], then their first places. Pairs of experts elsewhere have no place.
    """
    let_next_start(PDL)
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    smaller = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        own = _expert_of(experts_ptr, own_ptr, start + i, pairs, X)
        smaller += (own < expert).to(tl.int32)
    end = tl.sum(smaller, 0)
    for start in range(0, pairs, BLOCK):
        own = _expert_of(experts_ptr, own_ptr, start + i, pairs, X)
        hit = (own == expert).to(tl.int32)
        place = end + tl.cumsum(hit, 0) - 1
        tl.store(order_ptr + place, start + i, mask=hit > 0)
        tl.store(places_ptr + start + i, place, mask=hit > 0)
        end += tl.sum(hit, 0)
    tl.store(ends_ptr + expert, end)
    tl.debug_barrier()  # all of the program's writes, before it says that they are there
    ended = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if ended == X - 1:
        tl.store(counter_ptr, 0)
        tl.debug_barrier()
        x = tl.arange(0, ALL)
        ends = tl.load(ends_ptr + x, mask=x < X, other=0, cache_modifier=".cg")
        begun = (x > 0) & (x < X)
        starts = tl.load(ends_ptr + x - 1, mask=begun, other=0, cache_modifier=".cg")
        counts = tl.where(x < X, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
        first = tl.cumsum(counts, 0) - counts
        for number in range(tl.max(counts, 0)):
            mask = number < counts
            tl.store(blocks_ptr + first + number, x, mask=mask)
            tl.store(blocks_ptr + most + first + number, starts + number * BLOCK_M, mask=mask)
        for start in range(tl.sum(counts, 0), most, ALL):
            tl.store(blocks_ptr + start + x, -1, mask=x < most - start)


@triton.jit
def tile_kernel(
    x_ptr, weight_ptr, bias_ptr, order_ptr, ends_ptr, blocks_ptr, y_ptr, most, features, first,
    known, x_stride, limit,
    K: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [pairs, features] in the order of experts; a program has a tile of one block of pairs.

    The weights are those of `known` experts from number `first` on; other blocks are left alone.

    x are tokens [T, K], or with CHOSEN 0 rows [pairs, K] in the order of experts. Programs of GROUP
    blocks follow one another for the same columns, so that these are read once.
    """
    let_next_start(PDL)
    columns = tl.cdiv(features, BLOCK_N)
    wave = tl.program_id(0) // (GROUP * columns) * GROUP
    size = tl.minimum(most - wave, GROUP)
    within = tl.program_id(0) % (GROUP * columns)
    block = wave + within % size
    wait_for_inputs(PDL)
    expert = tl.load(blocks_ptr + block).to(tl.int64)
    if (expert < first) | (expert >= first + known):
        return
    m = tl.load(blocks_ptr + most + block) + tl.arange(0, BLOCK_M)
    end = tl.load(ends_ptr + expert)
    n = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows outside repeat the last one: nothing of theirs is written.
    row = tl.minimum(m, end - 1)
    if CHOSEN:
        row = tl.load(order_ptr + row) // CHOSEN
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    PARTS: tl.constexpr = 2 if GATED else 1
    weight_ptr += (expert - first) * features * (K * PARTS)
    w_at = weight_ptr + tl.minimum(n, features - 1).to(tl.int64)[:, None] * K + k[None, :]
    up_offset = tl.cast(features, tl.int64) * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            inside = (k < K - done)[None, :]
            x = tl.load(x_at, mask=inside, other=0.0)
            w = tl.load(w_at, mask=inside, other=0.0)
        acc = dot(x, w.T, acc)
        if GATED:
            if K % BLOCK_K == 0:
                w = tl.load(w_at + up_offset)
            else:
                w = tl.load(w_at + up_offset, mask=inside, other=0.0)
            up = dot(x, w.T, up)
        x_at += BLOCK_K
        w_at += BLOCK_K
    there = n < features
    if bias_ptr is not None:
        bias_ptr += expert * features * PARTS
        acc += tl.load(bias_ptr + n, mask=there, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + features + n, mask=there, other=0.0).to(tl.float32)[None, :]
    y = gated_value(acc, up, limit, ACTIVATION, GATED, OFFSET)
    y_at = y_ptr + m.to(tl.int64)[:, None] * features + n[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(m < end)[:, None] & there[None, :])


@triton.jit
def gather_kernel(
    x_ptr, order_ptr, y_ptr, x_stride, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [pairs, width]: rows of x in the order of experts."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = (tl.load(order_ptr + place) // CHOSEN).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, mask=at < width, other=0.0)
    tl.store(y_ptr + place * width + at, x, mask=at < width)


@triton.jit
def between_kernel(
    x_ptr, bias_ptr, order_ptr, experts_ptr, y_ptr, features, limit,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What `tile_kernel` does at its end, for products of another's: y [pairs, features]."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < features
    x_ptr += place * features * PARTS
    y = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = y
    if GATED:
        up = tl.load(x_ptr + features + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        expert = tl.load(experts_ptr + tl.load(order_ptr + place)).to(tl.int64)
        bias_ptr += expert * features * PARTS
        y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + features + at, mask=inside, other=0.0).to(tl.float32)
    y = gated_value(y, up, limit, ACTIVATION, GATED, OFFSET)
    tl.store(y_ptr + place * features + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mix_kernel(
    x_ptr, places_ptr, experts_ptr, mixture_ptr, own_ptr, bias_ptr, partial_ptr, residual_ptr,
    y_ptr, features, residual_stride,
    CHOSEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, features]: products [pairs, features] in the order of experts, summed by token.

    SLOTS, a power of two, cover CHOSEN; the order of a token's sum is that of its experts.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    there = slot < CHOSEN
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < features
    pair = token * CHOSEN + slot
    if own_ptr is not None:
        expert = tl.load(experts_ptr + pair, mask=there, other=0)
        there = there & (number_here(expert, own_ptr) >= 0)
    mask = there[:, None] & inside[None, :]
    place = tl.load(places_ptr + pair, mask=there, other=0).to(tl.int64)
    mixture = tl.load(mixture_ptr + pair, mask=there, other=0.0)
    x_at = x_ptr + place[:, None] * features + at[None, :]
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        expert = number_here(tl.load(experts_ptr + pair, mask=there, other=0), own_ptr)
        expert = expert.to(tl.int64)
        bias_at = bias_ptr + expert[:, None] * features + at[None, :]
        x += tl.load(bias_at, mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(x * mixture[:, None], 0)
    if partial_ptr is not None:
        own = partial_ptr + token * features
        y += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        own = residual_ptr + token * residual_stride
        y += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * features + at, y.to(y_ptr.dtype.element_ty), mask=inside)
