"""Attention of one new token a sequence: norm, rotary, KV append and split-KV softmax in a launch.

The cached tokens of a sequence are split over programs, as flash-decoding does; the last program
of a KV head to end joins their results, in their order, so that no second launch is needed and the
bits are the same every time. Where a KV head serves many queries, and there are few KV heads, a
program has some of the queries: to join those of 71 one after another took longer than all else.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .activation import activate
from .blocks import (
    count_of_entries,
    entries_of,
    places,
    places_of,
    slots_and_room,
    table_arguments,
)
from .codes import codes_by, scale_arguments, scale_of, sloped, values_of
from .launch import (
    INTERPRETED,
    dot,
    fetch_ahead,
    launch,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)
from .operands import empty, is_aligned
from .rotary import stretched
from .tunable import SHARED_BYTES, Key, Kind, Tunable, powers

_FEW_HEADS = 16  # queries that share a KV head, of which a program has all
_SHORT = 512  # places in the cache: few queries have a program each
_MOST_EARLY = 4  # slots
MOST_PARTS = 2048  # programs where it has not: fewer than multiprocessors times parts of a head


class DecodeConfig(NamedTuple):
    """Tokens read at a time, warps, programs over which a sequence is split, reads in flight."""

    block: int
    warps: int
    splits: int
    stages: int = 3


@triton.jit
def _load_head(at, inside, d, partner):
    """Heads [rows, BLOCK_D] at `at` [rows, 1], and each element's partner, float32."""
    x = tl.load(at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    return x, other


@triton.jit
def _gains(norm_ptr, d, partner, DIM: tl.constexpr, NORM_OFFSET: tl.constexpr):
    """What a norm multiplies elements with, and their partners, float32; 0 where there is none."""
    weight, other = 0.0, 0.0
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        other = tl.load(norm_ptr + partner, mask=d < DIM, other=0.0).to(tl.float32)
        if NORM_OFFSET:
            weight += 1.0
            other += 1.0
    return weight, other


@triton.jit
def _head(
    loaded, turn, norm_ptr, gains, eps, DIM: tl.constexpr, NORM_TURNED: tl.constexpr
):  # fmt: skip
    """Loaded heads, normed by `gains` where there is a norm, and rotated, float32.

    With NORM_TURNED the norm comes last. `turn` is each element's cos and sin; `sin` has the sign
    of the partner's part, and is 0 where nothing turns.
    """
    x, other = loaded
    cos, sin = turn[0][None, :], turn[1][None, :]
    if norm_ptr is not None:
        weight, other_weight = gains
        if NORM_TURNED:
            x = x * cos + other * sin
            x *= weight / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        else:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            x = x * (scale * weight) * cos + other * (scale * other_weight) * sin
    else:
        x = x * cos + other * sin
    return x


@triton.constexpr_function
def _unit(codes):
    """What weights times scales are multiplied with, a power of two, so that float16 holds them.

    A scale is the largest magnitude over 448 or 127.
    """
    return 256.0 if codes == "fp8_e4m3" else 64.0


@triton.jit
def _encoded(x, CODES: tl.constexpr):
    """Codes of one head x [1, BLOCK_D], its scale [1, 1], and what they mean, float32."""
    x = x.to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 1), CODES)[:, None]
    codes, new = codes_by(x, scale, CODES)
    return codes, scale, new


@triton.jit
def _with_block(
    q, held, s, real, seen, scoring, slope, alibi_scale, relative_ptr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and of weighted values, with those of the tokens `s`."""
    k, v, k_scale, v_scale = held
    top, total, acc = seen
    last, length, scale, softcap, most = scoring
    dtype = q.dtype
    if CODES is not None:
        k = values_of(k, dtype)
    if BLOCK_G == 1:
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :]
    else:
        score = dot(q, k.T, tl.zeros((BLOCK_G, BLOCK_S), tl.float32))
    if CODES is not None:
        score *= k_scale[None, :]
    score *= scale
    if SOFTCAP:
        score = softcap * activate(score / softcap, "tanh")
    if alibi_scale is None:
        score += slope[:, None] * (s - length).to(tl.float32)[None, :]
    else:
        ahead = sloped(slope[:, None], s[None, :]) - sloped(slope, length)[:, None]
        score += ahead * alibi_scale
    if relative_ptr is not None:
        behind = tl.maximum(s - length, -most)[None, :]
        bias = tl.load(relative_ptr + behind, mask=real[:, None], other=0.0)
        score += bias.to(tl.float32)
    score = tl.where((s < last)[None, :], score, -float("inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    kept = tl.exp(top - higher)
    weight = tl.exp(score - higher[:, None])
    total = total * kept + tl.sum(weight, 1)
    if CODES is not None:
        weight *= v_scale[None, :] * _unit(CODES)
        v = values_of(v, dtype)
    if BLOCK_G == 1:
        # The one row of weights stands across the tokens' axis.
        column = tl.reshape(weight, (BLOCK_S, 1))
        acc = acc * kept[:, None] + tl.sum(column * v.to(tl.float32), 0)[None, :]
    else:
        acc = dot(weight.to(dtype), v, acc * kept[:, None])
    return higher, total, acc


@triton.jit
def _decode_attention_kernel(
    qkv_ptr, k_ptr, v_ptr, lengths_ptr, y_ptr, partial_ptr, counter_ptr,
    frequencies_ptr, q_norm_ptr, k_norm_ptr, slopes_ptr, sinks_ptr, relative_ptr, most, table_ptr,
    k_scale_ptr, v_scale_ptr, original, table_stride, qkv_stride, slot_stride, head_stride,
    token_stride, capacity, scale, softcap, alibi_scale, window, eps, rotary_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr,
    ROTARY: tl.constexpr, TWO_TABLES: tl.constexpr, STRETCH: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_OFFSET: tl.constexpr,
    NORM_TURNED: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr,
    CODES: tl.constexpr, CROSS: tl.constexpr, EARLY: tl.constexpr, ENTRIES: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    PARTS: tl.constexpr = (GROUP + EACH - 1) // EACH
    part = tl.program_id(0) % PARTS
    pair = tl.program_id(0) // PARTS
    kv_head = pair % KV_HEADS
    slot = (pair // KV_HEADS).to(tl.int64)
    first_head = part * EACH
    heads = tl.minimum(GROUP - first_head, EACH)
    split = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    dtype = qkv_ptr.dtype.element_ty
    # Nothing in front of this kernel in a step writes lengths or the cache's older tokens: a step
    # begins with a kernel that waits for all before it.
    if CROSS:  # a slot that keeps nothing is nobody's, and gives what is finite
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + slot), 1), capacity).to(tl.int32)
    else:
        length = tl.minimum(tl.load(lengths_ptr + slot), capacity - 1).to(tl.int32)
    if ROTARY > 0:
        turn_of = d % (ROTARY // 2)
        partner = tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2)
        sign = tl.where(d < ROTARY // 2, -1.0, 1.0)
        if INTERLEAVED:
            turn_of = d // 2
            partner = d ^ 1
            sign = tl.where(d % 2 == 0, -1.0, 1.0)
        turned = d < ROTARY
        partner = tl.where(turned, partner, d)
        if TWO_TABLES:  # the second is that of long sequences
            frequencies_ptr += tl.where(length >= original, ROTARY // 2, 0)
        frequency = tl.load(frequencies_ptr + turn_of, mask=turned, other=0.0)
        if STRETCH > 0:
            frequency = stretched(frequency, turn_of, length, original, STRETCH, ROTARY // 2)
        angle = length.to(tl.float32) * frequency
        cos = tl.where(turned, tl.cos(angle) * rotary_scale, 1.0)
        sin = tl.where(turned, tl.sin(angle) * rotary_scale * sign, 0.0)
    else:
        partner, cos, sin = d, d * 0.0 + 1.0, d * 0.0
    begin = 0
    if WINDOWED:
        begin = length // window * window if CHUNKED else tl.maximum(length + 1 - window, 0)
    share = tl.cdiv(tl.cdiv(length - begin, BLOCK_S), SPLITS) * BLOCK_S
    first = begin + split * share
    last = tl.minimum(first + share, length)
    if table_ptr is None:
        base = slot * slot_stride + kv_head.to(tl.int64) * head_stride
    else:
        base = kv_head.to(tl.int64) * head_stride
        table_ptr += slot * table_stride
    entries = 0
    if ENTRIES > 0:
        entries = entries_of(table_ptr, first, last, SIZE, ENTRIES)
    if EARLY:  # this program's first block is on its way, and the L2 cache fetches the others
        early = first + tl.arange(0, BLOCK_S)
        early_to, early_known = places_of(
            table_ptr, entries, first, first, last, early, slot_stride, token_stride,
            SIZE, ENTRIES, WINDOWED,
        )  # fmt: skip
        early_at = base + early_to[:, None] + d[None, :]
        is_early = early_known[:, None] & (d < DIM)[None, :]
        k_first = tl.load(k_ptr + early_at, mask=is_early, other=0.0)
        v_first = tl.load(v_ptr + early_at, mask=is_early, other=0.0)
        held_first = (k_first, v_first, 1.0, 1.0)
        if PDL:
            tokens = first + BLOCK_S + tl.arange(0, THREADS)
            tokens_to, has_token = places_of(
                table_ptr, entries, first, first, last, tokens, slot_stride, token_stride,
                SIZE, 0, False,
            )  # fmt: skip
            size = DIM * (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
            fetch_ahead(k_ptr + base + tokens_to, has_token, size)
            fetch_ahead(v_ptr + base + tokens_to, has_token, size)
    q_gains = _gains(q_norm_ptr, d, partner, DIM, NORM_OFFSET)
    k_gains = _gains(k_norm_ptr, d, partner, DIM, NORM_OFFSET)
    wait_for_inputs(PDL)

    qkv_ptr += slot * qkv_stride
    q_heads = kv_head * GROUP + first_head + g
    q_at = qkv_ptr + q_heads[:, None] * DIM
    real = g < heads
    inside = real[:, None] & (d < DIM)[None, :]
    turn = (cos, sin)
    q_loaded = _load_head(q_at, inside, d, partner)
    # The new token's beside them, of the program that has it.
    k_at = qkv_ptr + (tl.full((1,), KV_HEADS * GROUP + kv_head, tl.int32) * DIM)[:, None]
    has_it = split + tl.zeros((1, 1), tl.int32) == (-1 if CROSS else SPLITS - 1)
    new = (d[None, :] < DIM) & has_it
    k_loaded = _load_head(k_at, new, d, partner)
    v_loaded = tl.load(k_at + KV_HEADS * DIM + d[None, :], mask=new, other=0.0)
    q = _head(q_loaded, turn, q_norm_ptr, q_gains, eps, DIM, NORM_TURNED).to(dtype)
    slope = tl.zeros((BLOCK_G,), tl.float32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + q_heads, mask=real, other=0.0)
    if relative_ptr is not None:
        relative_ptr += q_heads[:, None] * (2 * most + 1) + most
    top = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    if (split == SPLITS - 1) & (not CROSS):  # the new token
        k_new = _head(k_loaded, turn, k_norm_ptr, k_gains, eps, DIM, NORM_TURNED).to(dtype)
        v_new = v_loaded.to(dtype)
        if CODES is not None:
            k_codes, k_scale, k_new = _encoded(k_new, CODES)
            v_codes, v_scale, v_new = _encoded(v_new, CODES)
        if table_ptr is None:
            at = base + length.to(tl.int64) * token_stride + d[None, :]
        else:
            token = length + tl.zeros((1, 1), tl.int32)
            to, new = places(table_ptr, token, new, slot_stride, token_stride, SIZE)
            at = base + to + d[None, :]
        if PARTS > 1:
            new = new & (part + tl.zeros((1, 1), tl.int32) == 0)  # one of them writes
        if CODES is None:
            tl.store(k_ptr + at, k_new, mask=new)
            tl.store(v_ptr + at, v_new, mask=new)
        else:
            tl.store(k_ptr + at, k_codes, mask=new)
            tl.store(v_ptr + at, v_codes, mask=new)
            if table_ptr is None:
                row = base + length.to(tl.int64) * token_stride + tl.zeros((1, 1), tl.int64)
                there = row >= 0
            else:
                token = length + tl.zeros((1, 1), tl.int32)
                to, there = places(table_ptr, token, token >= 0, slot_stride, token_stride, SIZE)
                row = base + to
            if PARTS > 1:
                there = there & (part + tl.zeros((1, 1), tl.int32) == 0)
            tl.store(k_scale_ptr + row // DIM, k_scale, mask=there)
            tl.store(v_scale_ptr + row // DIM, v_scale, mask=there)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
        if SOFTCAP:
            score = softcap * activate(score / softcap, "tanh")
        if relative_ptr is not None:
            column = tl.zeros((BLOCK_G, 1), tl.int32)
            bias = tl.load(relative_ptr + column, mask=real[:, None], other=0.0)
            score += tl.sum(bias.to(tl.float32), 1)
        top = score
        total += 1.0
        acc += v_new.to(tl.float32) if CODES is None else v_new * _unit(CODES)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + q_heads, mask=real, other=-float("inf"))
            top = tl.maximum(score, sink)
            share_of_new = tl.exp(score - top)
            total = share_of_new + tl.exp(sink - top)
            acc *= share_of_new[:, None]
    scoring = (last, length, scale, softcap, most)
    start_of_rest = first
    if EARLY:
        start_of_rest += BLOCK_S
        if first < last:
            seen = (top, total, acc)
            top, total, acc = _with_block(
                q, held_first, first + tl.arange(0, BLOCK_S), real, seen, scoring, slope,
                alibi_scale, relative_ptr, BLOCK_G, BLOCK_S, SOFTCAP, CODES,
            )  # fmt: skip
    # Entries that are fetched ahead of what they name take twice the stages.
    for start in tl.range(
        start_of_rest, last, BLOCK_S,
        num_stages=STAGES if ENTRIES > 0 or table_ptr is None else 2 * STAGES - 1,
    ):  # fmt: skip
        s = start + tl.arange(0, BLOCK_S)
        to, known = places_of(
            table_ptr, entries, first, start, last, s, slot_stride, token_stride,
            SIZE, ENTRIES, WINDOWED,
        )  # fmt: skip
        there = known[:, None] & (d < DIM)[None, :]
        at = base + to[:, None] + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        k_scale, v_scale = 1.0, 1.0
        if CODES is not None:
            row = base // DIM + to // DIM
            k_scale = tl.load(k_scale_ptr + row, mask=known, other=0.0)
            v_scale = tl.load(v_scale_ptr + row, mask=known, other=0.0)
        held = (k, v, k_scale, v_scale)
        seen = (top, total, acc)
        top, total, acc = _with_block(
            q, held, s, real, seen, scoring, slope, alibi_scale, relative_ptr,
            BLOCK_G, BLOCK_S, SOFTCAP, CODES,
        )  # fmt: skip

    if CODES is not None:
        acc *= 1 / _unit(CODES)
    if SPLITS == 1:
        y_heads = pair.to(tl.int64) * GROUP + first_head + g
        y_at = y_ptr + y_heads[:, None] * DIM + d[None, :]
        tl.store(y_at, (acc / total[:, None]).to(y_ptr.dtype.element_ty), mask=inside)
    else:
        # Partials are [program, split, heads, D + 2]: the sums, their weight and exponent.
        width: tl.constexpr = BLOCK_D + 2
        base = tl.program_id(0).to(tl.int64) * SPLITS * EACH
        mine = partial_ptr + (base + split * EACH + g) * width
        tl.store(mine[:, None] + d[None, :], acc, mask=real[:, None])
        tl.store(mine + BLOCK_D, total, mask=real)
        tl.store(mine + BLOCK_D + 1, top, mask=real)
        tl.debug_barrier()  # all of the program's writes, before it says that they are there
        ended = tl.atomic_add(counter_ptr + tl.program_id(0), 1, sem="acq_rel")
        if ended == SPLITS - 1:
            tl.store(counter_ptr + tl.program_id(0), 0)
            tl.debug_barrier()
            parts = tl.arange(0, SPLIT_BLOCK)
            there = parts < SPLITS
            for head in range(heads):
                at = partial_ptr + (base + parts * EACH + head) * width
                tops = tl.load(at + BLOCK_D + 1, there, -float("inf"), cache_modifier=".cg")
                totals = tl.load(at + BLOCK_D, there, 0.0, cache_modifier=".cg")
                sums_at = at[:, None] + d[None, :]
                sums = tl.load(sums_at, there[:, None], 0.0, cache_modifier=".cg")
                weight = tl.exp(tops - tl.max(tops, 0))
                y = tl.sum(weight[:, None] * sums, 0) / tl.sum(weight * totals, 0)
                y_at = (pair.to(tl.int64) * GROUP + first_head + head) * DIM + d
                tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=d < DIM)


def decode_attention(
    qkv: Any,
    cache: tuple[Any, Any],
    lengths: Any,
    *,
    heads: int,
    scale: float,
    counters: Any,
    table: Any = None,
    scales: Any = None,
    window: int | None = None,
    chunk: int | None = None,
    alibi: Any = None,
    alibi_scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    relative: Any = None,
    inv_freq: Any = None,
    scaling: float = 1.0,
    interleaved: bool = False,
    q_norm: Any = None,
    k_norm: Any = None,
    norm_eps: float = 0.0,
    norm_unit_offset: bool = False,
    norm_turned: bool = False,
    original: int = 0,
    stretch: float = 0.0,
    cross: bool = False,
    reach: int | None = None,
    config: DecodeConfig | None = None,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """Attention of one new token a slot: packed qkv [N, (H + 2K) D] to [N, H D].

    The new token's position is lengths[n]: queries and keys are normed over D with `q_norm` and
    `k_norm` [D] if given, before or with `norm_turned` after they are rotated by that position
    times `inv_freq` float32 [R/2] (R <= D), with `original` [2, R/2], whose second row is that of
    positions from there on, or with `stretch` as well by frequencies [R/2] that are stretched as
    `spec.Rope` has it, and key and value are written to the cache, a pair of views [N, K, S, D]
    with D contiguous. A full slot overwrites its last place. With `table` int32 [N, blocks] the
    cache is of blocks (blocks.py), with `scales`, a pair float32 of the cache's axes before D, of
    codes (codes.py).
    `window`, `alibi`, `alibi_scale`, `softcap`, `sinks` and `relative` as in `attention`; with
    `chunk`, in a window's place, a token sees those of its own `chunk` tokens.
    `counters` int32, one a program (N K or MOST_PARTS suffice), are 0, and are again when the
    launch has ended. With `cross` qkv are queries alone, [N, H D], and attend to the lengths[n]
    places that slot n keeps: nothing is written, and of the options none but `scale` is known.
    The cache may have more slots than N. Where none of these has more than `reach` tokens, the work
    is shared out for so many.
    """
    keys, values = cache
    _, kv_heads, _, dim = keys.shape
    held_slots, capacity = slots_and_room(keys, table)
    slots, reach = qkv.shape[0], min(reach or capacity, capacity)
    table, table_stride, size = table_arguments(table, keys)
    most = check_relative(relative, heads)
    if chunk is not None and window is not None:
        raise ValueError(f"chunk={chunk} and window={window} were given; expected one of them.")
    *held, codes = scale_arguments(cache, scales, qkv.dtype)
    group = heads // kv_heads
    kept = qkv.element_size() if qkv.element_size() == 4 else keys.element_size()
    each = _heads_each(slots * kv_heads, group, reach, kept, sms)
    programs = slots * kv_heads * triton.cdiv(group, each)
    two = original > 0 and not stretch
    if slots > held_slots:
        raise ValueError(f"qkv has {slots} rows, and the cache {held_slots} slots.")
    _check(qkv, keys, values, slots, lengths, heads, counters, programs, inv_freq, two, cross)
    y = qkv.new_empty((slots, heads * dim))
    if config is None:
        config = default_config(programs, reach, dim, kept, sms)
    # The matrix units take 16 rows and more, and what they read is fetched ahead; float32, which
    # they do not take, would pay for the rows that are not there.
    block_g = max(16, next_power_of_2(each)) if group > 1 or qkv.element_size() == 2 else 1
    block_d = max(16, next_power_of_2(dim))
    partial = counters  # not read without splits
    if config.splits > 1:
        shape = programs * each, config.splits, block_d + 2
        partial = empty(counters, shape, "float32")
    seen = min(reach, window or chunk or reach)
    entries = count_of_entries(table, size, seen, config.block, config.splits)
    launch(
        _decode_attention_kernel,
        (programs, config.splits),
        *(qkv, keys, values, lengths, y, partial, counters, inv_freq, q_norm, k_norm),
        *(
            alibi,
            sinks,
            relative,
            most,
            table,
            *held,
            original,
            table_stride,
            qkv.stride(0),
            *keys.stride()[:3],
            capacity,
            scale,
            softcap or 0.0,
            alibi_scale,
        ),
        *(window or chunk or 0, norm_eps, scaling),
        **{"KV_HEADS": kv_heads, "GROUP": group, "EACH": each, "DIM": dim},
        INTERLEAVED=interleaved,
        ROTARY=0 if inv_freq is None else 2 * inv_freq.shape[-1],
        TWO_TABLES=two,
        STRETCH=stretch,
        **{"WINDOWED": (window or chunk) is not None, "CHUNKED": chunk is not None},
        SOFTCAP=softcap is not None,
        **{"NORM_OFFSET": norm_unit_offset, "NORM_TURNED": norm_turned, "STAGES": config.stages},
        **{"SPLITS": config.splits, "SPLIT_BLOCK": next_power_of_2(config.splits)},
        **{"BLOCK_G": block_g, "BLOCK_S": config.block, "BLOCK_D": block_d},
        **{"SIZE": size, "CODES": codes, "CROSS": cross},
        EARLY=codes is None and _reads_early(keys, values, slots, pdl),
        ENTRIES=entries,
        THREADS=32 * config.warps,
        num_warps=config.warps,
        pdl=pdl,
    )
    return y


def _reads_early(keys: Any, values: Any, slots: int, pdl: bool) -> bool:
    """True if programs read their first block of the cache before the kernel in front has ended.

    Of many slots memory is busy anyway. Tokens are fetched 16 bytes at a time.
    """
    if slots > _MOST_EARLY or not (pdl or INTERPRETED):
        return False
    sizes = keys.shape[-1], *keys.stride()[:3]
    whole = all(n * keys.element_size() % 16 == 0 for n in sizes)
    return INTERPRETED or (whole and is_aligned(keys, 16) and is_aligned(values, 16))


def _are_few(programs: int, itemsize: int, sms: int) -> bool:
    """True if so many programs leave most of the device without work; measured in 16 bits alone.

    They read a block of the cache at once then, and the more of the cache these blocks hold, the
    sooner they end; but the last of a head's programs sums what all of them found.
    """
    return itemsize == 2 and 2 * programs <= sms


def _heads_each(pairs: int, group: int, capacity: int, itemsize: int, sms: int) -> int:
    """Queries of a KV head that a program has: all, or what the matrix units take at a time.

    One where they are few and the cache is short: it is read several times from the L2 cache.
    """
    if capacity <= _SHORT and _are_few(pairs * group, itemsize, sms):
        return 1
    few = group <= _FEW_HEADS or pairs >= sms or pairs * triton.cdiv(group, _FEW_HEADS) > MOST_PARTS
    return group if few else _FEW_HEADS


def check_relative(relative: Any, heads: int) -> int:
    """M of biases [H, 2M+1]; 0 for none. ValueError for what is neither."""
    if relative is None:
        return 0
    rows, width = relative.shape
    if rows != heads or width % 2 == 0 or not relative.is_contiguous():
        raise ValueError(f"relative {tuple(relative.shape)}: ({heads}, 2M+1) is expected.")
    return width // 2


def default_config(pairs: int, capacity: int, dim: int, itemsize: int, sms: int) -> DecodeConfig:
    """A configuration for `pairs` of slot and KV head, or query, that nobody measured.

    Eight warps a multiprocessor, twice as many where few programs hold all of the cache so.
    `itemsize` is that of what the cache keeps, or of float32 heads. Codes, of which as many
    elements are half the bytes, want programs of two warps.
    """
    warps = 2 if itemsize == 1 else 4
    size = dim * max(itemsize, 2)  # codes become floats
    block = 16 if size > 256 else 32 if capacity <= 512 else 64  # as registers allow
    splits = max(1, min(round(8 // warps * sms / pairs), triton.cdiv(capacity, block), 32))
    if _are_few(pairs, itemsize, sms):
        wide = 32 if size > 256 or capacity <= 256 else 64
        parts = triton.cdiv(capacity, wide)
        if capacity <= _SHORT:
            block, splits = wide, min(parts, 8)
        elif parts <= 64 and pairs * parts <= 4 * sms:
            block, splits = wide, parts
    return DecodeConfig(block, warps, splits, 2 if splits > 1 and itemsize > 1 else 3)


def tuning_key(pairs: int, reach: int, group: int, dim: int, itemsize: int) -> Key:
    """Of one token's attention: `pairs` of slot and KV head, `reach` tokens that may be seen.

    `itemsize` is that of what the cache keeps.
    """
    return "decode_attention", next_power_of_2(pairs), next_power_of_2(reach), group, dim, itemsize


def _fits(key: Key, config: DecodeConfig) -> bool:
    dim, itemsize = key[4:]
    return 2 * config.stages * config.block * next_power_of_2(dim) * itemsize <= SHARED_BYTES


def _candidates(key: Key, sms: int) -> list[DecodeConfig]:
    _, pairs, reach, _, dim, itemsize = key
    default = default_config(pairs, reach, dim, itemsize, sms)
    base = next_power_of_2(default.splits)
    splits = [n for n in (base, base // 2, base * 2, base // 4) if 1 <= n <= 64]
    configs = [default]
    for n in splits:
        for block, warps in ((32, 4), (32, 2), (64, 4), (64, 2), (16, 2)):
            if n > triton.cdiv(reach, block) or block * dim > 8192:
                continue
            configs += [DecodeConfig(block, warps, n, stages) for stages in (2, 3)]
    return configs


TUNABLE = Tunable(
    op="decode_attention",
    fields=("pairs", "capacity", "group", "dim", "itemsize"),
    kinds={
        "decode": Kind(
            DecodeConfig,
            {
                **{"block": powers(16, 256), "warps": powers(1, 16)},
                **{"splits": range(1, 65), "stages": range(1, 9)},
            },
            bound_by_memory=True,
        )
    },
    fits=_fits,
    candidates=_candidates,
)


def _check(
    qkv: Any,
    keys: Any,
    values: Any,
    slots: int,
    lengths: Any,
    heads: int,
    counters: Any,
    programs: int,
    inv_freq: Any,
    two: bool,
    cross: bool,
) -> None:
    """Raise ValueError for arguments that the kernel would misread."""
    _, kv_heads, _, dim = keys.shape
    width = (heads if cross else heads + 2 * kv_heads) * dim
    if tuple(qkv.shape) != (slots, width) or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} does not fit {heads} heads and a cache {tuple(keys.shape)}: "
            f"({slots}, {width}) with a contiguous last axis is expected."
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} heads are no multiple of {kv_heads} KV heads.")
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(
            f"Keys {tuple(keys.shape)} with strides {keys.stride()} and values "
            f"{tuple(values.shape)} with strides {values.stride()}: both must be the same, with a "
            "contiguous last axis."
        )
    if tuple(lengths.shape) != (slots,) or lengths.stride(0) != 1:
        raise ValueError(f"lengths {tuple(lengths.shape)}: one for each of {slots} slots, please.")
    if counters.numel() < programs:
        raise ValueError(f"{counters.numel()} counters; {programs} are needed.")
    if inv_freq is not None and 2 * inv_freq.shape[-1] > dim:
        raise ValueError(f"{inv_freq.shape[-1]} frequencies turn more than {dim} elements.")
    if inv_freq is not None and two and (len(inv_freq.shape) != 2 or inv_freq.shape[0] != 2):
        raise ValueError(f"inv_freq is {tuple(inv_freq.shape)}; (2, R/2) is expected.")
