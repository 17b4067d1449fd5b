"""The kernel of attention of whole prompts: FlashAttention-2's loop over keys, with every mask.

Dao, 2023 ("FlashAttention-2"). A program owns BLOCK_M queries of one head. Blocks of keys that all
its queries see pass without a mask; only those at the diagonal, the window's edge and the end are
masked. Scores are kept in units of log2, so that exp2 serves.
"""

# pyright: reportArgumentType=false
import triton
import triton.language as tl

from .codes import sloped, values_of
from .launch import dot, let_next_start, wait_for_inputs

_FRONT = tl.constexpr(0)
_ALL = tl.constexpr(0)
_SOME = tl.constexpr(1)
_ITSELF = tl.constexpr(2)
_COUNTED = tl.constexpr(512)  # segments that are read at once


@triton.jit
def _tile(
    x, strides, b, head, row, end,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head of x [B, T, heads, D], elements FIRST..; 0 beyond `end` and D.

    `strides` have a row of a table and the size of its blocks, by which x has its tokens.
    """
    if TMA:
        tile = x.load([b, head, row, FIRST]).reshape(ROWS, COLUMNS)
    else:
        rows = row + tl.arange(0, ROWS)
        columns = FIRST + tl.arange(0, COLUMNS)
        table_ptr = strides[3]
        if table_ptr is None:
            base = x + b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
            at = base + rows[:, None].to(tl.int64) * strides[2] + columns[None, :]
            inside = rows[:, None] < end
        else:
            # One block has all rows: `row` is a multiple of ROWS, and the size of blocks is, too.
            block = tl.load(table_ptr + tl.minimum(row, end - 1) // strides[4])
            base = x + block.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
            within = row % strides[4] + tl.arange(0, ROWS)
            at = base + within[:, None].to(tl.int64) * strides[2] + columns[None, :]
            inside = rows[:, None] < tl.where(block >= 0, end, 0)
        if FIRST + COLUMNS > DIM:
            inside = inside & (columns[None, :] < DIM)
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def _meant(
    tile, strides, b, head, row, end, dtype: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """What a tile's codes mean, rounded to `dtype`; `strides` end with their scales, or None."""
    scale_ptr = strides[5]
    if scale_ptr is not None:
        rows = row + tl.arange(0, ROWS)
        table_ptr = strides[3]
        inside = rows < end
        if table_ptr is None:
            at = b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
            at += rows.to(tl.int64) * strides[2]
        else:
            block = tl.load(table_ptr + tl.minimum(row, end - 1) // strides[4])
            at = block.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
            at += (row % strides[4] + tl.arange(0, ROWS)).to(tl.int64) * strides[2]
            inside = rows < tl.where(block >= 0, end, 0)
        scale = tl.load(scale_ptr + at // DIM, mask=inside, other=0.0)
        tile = (values_of(tile, tl.float32) * scale[:, None]).to(dtype)
    return tile


@triton.jit
def _span(segments_ptr, one, other, end):
    """From the first key of key `one`'s segment to the first one behind key `other`'s segment.

    Segments do not decrease, so that counting finds both. Loads that wait for nothing take less
    time than a search.
    """
    first = tl.load(segments_ptr + one)
    last = tl.load(segments_ptr + other)
    before = tl.zeros([_COUNTED], tl.int32)
    through = tl.zeros([_COUNTED], tl.int32)
    for n in range(0, end, _COUNTED):
        columns = n + tl.arange(0, _COUNTED)
        segment = tl.load(segments_ptr + columns, mask=columns < end, other=2147483647)
        before += (segment < first).to(tl.int32)
        through += (segment <= last).to(tl.int32)
    return tl.sum(before, 0), tl.sum(through, 0)


@triton.jit
def _tanh(x, ACCURATE: tl.constexpr):
    power = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2|x|)
    y = (1 - power) / (1 + power)
    y = tl.where(x < 0, -y, y)
    if ACCURATE:  # 1 - power cancels near 0; there the series is good to float32
        z = x * x
        series = 1 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835))))
        y = tl.where(tl.abs(x) < 0.25, x * series, y)
    return y


@triton.jit
def _scores(
    queries, keys, per_key, place, n, scoring,
    SEES: tl.constexpr, CAUSAL: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Of the keys n..n+BLOCK_N-1, -inf where hidden; these times `factor` are in units of log2.

    SEES says which of them a query sees: all, what the options leave, or itself if it is blind.
    """
    q, q_rest, rows, q_segment, q_position, blind = queries
    k, k_rest, k_strides = keys
    mask_ptr, segments_ptr, positions_ptr = per_key
    b, head, end, _ = place
    scale, softcap, slope, alibi_scale, window, relative_ptr, most = scoring
    columns = n + tl.arange(0, BLOCK_N)
    tile = _tile(k, k_strides, b, head, n, end, BLOCK_N, MAIN, _FRONT, DIM, TMA)
    tile = _meant(tile, k_strides, b, head, n, end, q.dtype, BLOCK_N, DIM)
    s = dot(q, tile.T, tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    if REST > 0:
        tile = _tile(k_rest, k_strides, b, head, n, end, BLOCK_N, REST, MAIN, DIM, TMA)
        tile = _meant(tile, k_strides, b, head, n, end, q.dtype, BLOCK_N, DIM)
        s = dot(q_rest, tile.T, s)
    if softcap is not None:
        s = _tanh(s * scale, q.dtype == tl.float32)
    if slope is not None:
        if positions_ptr is not None:
            k_position = tl.load(positions_ptr + columns, mask=columns < end, other=0)
        else:
            k_position = columns
        if alibi_scale is None:
            bias = slope * (k_position[None, :] - q_position[:, None]).to(tl.float32)
        else:
            ahead = sloped(slope, k_position)[None, :] - sloped(slope, q_position)[:, None]
            bias = ahead * alibi_scale
        s = s * (scale if softcap is None else softcap) + bias
    if relative_ptr is not None:
        behind = tl.minimum(tl.maximum(columns[None, :] - rows[:, None], -most), most)
        bias = tl.load(relative_ptr + behind + most).to(tl.float32) * 1.4426950408889634
        s = s * (scale if softcap is None else softcap) + bias
    if SEES == _ITSELF:
        s = tl.where((columns[None, :] == rows[:, None]) & blind[:, None], s, float("-inf"))
    if SEES == _SOME:
        seen = columns[None, :] < end
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        if window is not None:
            seen = seen & (columns[None, :] > rows[:, None] - window)
            if not CAUSAL:
                seen = seen & (columns[None, :] < rows[:, None] + window)
        if mask_ptr is not None:
            shown = tl.load(mask_ptr + columns, mask=columns < end, other=0)
            seen = seen & (shown != 0)[None, :]
        if segments_ptr is not None:
            k_segment = tl.load(segments_ptr + columns, mask=columns < end, other=0)
            seen = seen & (k_segment[None, :] == q_segment[:, None])
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _softmax(s, top, total, factor, SEES: tl.constexpr):
    """Weights of these scores, what the sums shrink by, and the new maximum and sum of weights."""
    new_top = tl.maximum(top, s.max(1) * factor)
    base = new_top
    if SEES != _ALL:  # -inf minus -inf, in a row that has seen nothing yet, is NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s * factor - base[:, None])
    shrink = tl.exp2(top - base)
    return p, shrink, new_top, total * shrink + tl.sum(p, 1)


@triton.jit
def _add(
    acc, acc_rest, p, shrink, values, place, n,
    SEES: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The shrunken sums plus the values n..n+BLOCK_N-1 times their weights.

    TMA reads those of a cache behind `end`, too, which may be stale: no weight makes inf a zero.
    """
    v, v_rest, v_strides = values
    b, head, end, stale = place
    acc = acc * shrink[:, None]
    tile = _tile(v, v_strides, b, head, n, end, BLOCK_N, MAIN, _FRONT, DIM, TMA)
    tile = _meant(tile, v_strides, b, head, n, end, p.dtype, BLOCK_N, DIM)
    if TMA and SEES != _ALL and stale is not None:
        tile = tl.where((n + tl.arange(0, BLOCK_N) < stale)[:, None], tile, 0.0)
    acc = dot(p, tile, acc)
    if REST > 0:
        acc_rest = acc_rest * shrink[:, None]
        tile = _tile(v_rest, v_strides, b, head, n, end, BLOCK_N, REST, MAIN, DIM, TMA)
        tile = _meant(tile, v_strides, b, head, n, end, p.dtype, BLOCK_N, DIM)
        if TMA and SEES != _ALL and stale is not None:
            tile = tl.where((n + tl.arange(0, BLOCK_N) < stale)[:, None], tile, 0.0)
        acc_rest = dot(p, tile, acc_rest)
    return acc, acc_rest


@triton.jit(do_not_specialize=["tokens", "room", "count", "pairs", "section"])
def attention_kernel(
    q, q_rest, k, k_rest, v, v_rest, out_ptr,
    mask_ptr, segments_ptr, positions_ptr, slopes_ptr, sinks_ptr, relative_ptr, most, table_ptr,
    table_stride, k_scale_ptr, v_scale_ptr, starts_ptr, slots_ptr,
    scale, softcap, alibi_scale, window, tokens, room, count, heads, pairs, section,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t,
    v_stride_b, v_stride_h, v_stride_t, mask_stride, segments_stride, positions_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head; its grid is blocks of queries times `pairs` of heads."""
    dtype = out_ptr.dtype.element_ty
    wait_for_inputs(PDL)
    let_next_start(PDL)
    # The programs of a section's heads run together and share the L2 cache; the last blocks of
    # queries, which are the longest if causal, run first.
    blocks = tl.cdiv(tokens, BLOCK_M)
    first = tl.program_id(0) // (section * blocks) * section
    within = tl.program_id(0) - first * blocks
    width = tl.minimum(section, pairs - first)
    pair = first + within % width
    m = (blocks - 1 - within // width) * BLOCK_M
    b = pair // heads
    head = pair % heads
    kv_head = head // GROUP

    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b).to(tl.int32)
    slot = b
    if slots_ptr is not None:
        slot = tl.minimum(tl.load(slots_ptr + b).to(tl.int32), count - 1)
    if table_ptr is not None:
        table_ptr += slot.to(tl.int64) * table_stride
    q_strides = (q_stride_b, q_stride_h, q_stride_t, None, SIZE, None)
    k_strides = (k_stride_b, k_stride_h, k_stride_t, table_ptr, SIZE, k_scale_ptr)
    v_strides = (v_stride_b, v_stride_h, v_stride_t, table_ptr, SIZE, v_scale_ptr)
    rows = start + m + tl.arange(0, BLOCK_M)
    end = tl.minimum(start + tokens, room)
    far = b.to(tl.int64)
    if mask_ptr is not None:
        mask_ptr += far * mask_stride
    q_segment = 0
    if segments_ptr is not None:
        segments_ptr += far * segments_stride
        q_segment = tl.load(segments_ptr + rows, mask=rows < end, other=0)
    q_position = rows
    if positions_ptr is not None:
        positions_ptr += far * positions_stride
        q_position = tl.load(positions_ptr + rows, mask=rows < end, other=0)
    q_main = _tile(q, q_strides, b, head, m, tokens, BLOCK_M, MAIN, _FRONT, DIM, TMA)
    q_more = q_main
    if REST > 0:
        q_more = _tile(q_rest, q_strides, b, head, m, tokens, BLOCK_M, REST, MAIN, DIM, TMA)
    queries = (q_main, q_more, rows, q_segment, q_position, None)
    keys = (k, k_rest, k_strides)
    values = (v, v_rest, v_strides)
    per_key = (mask_ptr, segments_ptr, positions_ptr)

    # Keys lo..end-1 are seen by some query of the block, those of full_lo..full_hi-1 by all.
    if CAUSAL:
        hi = tl.minimum(end, start + m + BLOCK_M)
        full_hi = tl.minimum(end, start + m + 1) // BLOCK_N * BLOCK_N
    else:
        hi = end
        full_hi = end // BLOCK_N * BLOCK_N
    lo = 0
    full_lo = 0
    if window is not None:
        lo = tl.maximum(start + m + 1 - window, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.maximum(tl.cdiv(start + m + BLOCK_M - window, BLOCK_N) * BLOCK_N, lo)
        if not CAUSAL:
            hi = tl.minimum(hi, start + m + BLOCK_M - 1 + window)
            full_hi = tl.minimum(end, start + m + window) // BLOCK_N * BLOCK_N
    if segments_ptr is not None:  # keys before the first query's segment, and after the last one's
        last = tl.minimum(start + m + BLOCK_M, end) - 1
        own_lo, own_hi = _span(segments_ptr, tl.minimum(start + m, last), last, end)
        lo = tl.maximum(lo, own_lo // BLOCK_N * BLOCK_N)
        hi = tl.minimum(hi, own_hi)
    if (mask_ptr is not None) or (segments_ptr is not None):  # then no block is seen by all
        full_lo = lo
        full_hi = lo
    full_hi = tl.maximum(full_hi, full_lo)
    lower = (full_lo - lo) // BLOCK_N
    masked = lower + tl.cdiv(tl.maximum(hi - full_hi, 0), BLOCK_N)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
    acc_rest = tl.zeros([BLOCK_M, REST if REST > 0 else 1], tl.float32)
    place = (slot, kv_head, end, None)
    if starts_ptr is not None:
        place = (slot, kv_head, end, end)
    scoring = (scale, softcap, None, None, window, None, most)
    factor = scale if softcap is None else softcap
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head)
        if alibi_scale is None:
            slope *= 1.4426950408889634
        scoring = (scale, softcap, slope, alibi_scale, window, None, most)
        factor = 1.0
    if relative_ptr is not None:
        relative_ptr += head * (2 * most + 1)
        scoring = (scale, softcap, None, None, window, relative_ptr, most)
        factor = 1.0
    for i in range(0, masked):
        n = tl.where(i < lower, lo + i * BLOCK_N, full_hi + (i - lower) * BLOCK_N)
        s = _scores(
            queries, keys, per_key, place, n, scoring, _SOME, CAUSAL, DIM, MAIN, REST, BLOCK_N, TMA
        )
        p, shrink, top, total = _softmax(s, top, total, factor, _SOME)
        acc, acc_rest = _add(
            acc, acc_rest, p.to(dtype), shrink, values, place, n,
            _SOME, DIM, MAIN, REST, BLOCK_N, TMA,
        )  # fmt: skip
    if (mask_ptr is None) and (segments_ptr is None):
        for n in range(full_lo, full_hi, BLOCK_N):
            s = _scores(
                queries, keys, per_key, place, n, scoring,
                _ALL, CAUSAL, DIM, MAIN, REST, BLOCK_N, TMA,
            )  # fmt: skip
            p, shrink, top, total = _softmax(s, top, total, factor, _ALL)
            acc, acc_rest = _add(
                acc, acc_rest, p.to(dtype), shrink, values, place, n,
                _ALL, DIM, MAIN, REST, BLOCK_N, TMA,
            )  # fmt: skip

    if mask_ptr is not None:
        blind = total == 0
        some_blind = tl.max(blind.to(tl.int32), 0) != 0
        queries = (q_main, q_more, rows, q_segment, q_position, blind)
        itself = start + m
        if table_ptr is not None:
            itself = itself // BLOCK_N * BLOCK_N
        for n in range(itself, tl.where(some_blind, start + m + BLOCK_M, 0), BLOCK_N):
            s = _scores(
                queries, keys, per_key, place, n, scoring,
                _ITSELF, CAUSAL, DIM, MAIN, REST, BLOCK_N, TMA,
            )  # fmt: skip
            p, shrink, top, total = _softmax(s, top, total, factor, _ITSELF)
            acc, acc_rest = _add(
                acc, acc_rest, p.to(dtype), shrink, values, place, n,
                _ITSELF, DIM, MAIN, REST, BLOCK_N, TMA,
            )  # fmt: skip

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        base = tl.maximum(top, sink)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        acc = acc * shrink[:, None]
        acc_rest = acc_rest * shrink[:, None]
    share = 1 / tl.where(total == 0, 1.0, total)  # 0 in rows beyond the last token
    i = m + tl.arange(0, BLOCK_M)
    at = out_ptr + ((far * tokens + i) * heads + head)[:, None] * DIM
    inside = i[:, None] < tokens
    columns = tl.arange(0, MAIN)[None, :]
    y = (acc * share[:, None]).to(dtype)
    tl.store(at + columns, y, mask=inside & (columns < DIM))
    if REST > 0:
        columns = MAIN + tl.arange(0, REST)[None, :]
        y = (acc_rest * share[:, None]).to(dtype)
        tl.store(at + columns, y, mask=inside & (columns < DIM))
