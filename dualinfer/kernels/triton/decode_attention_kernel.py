"""The kernel of one token's attention; who launches it, and how, says `decode_attention.py`."""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
import triton
import triton.language as tl

from .activation import activate
from .blocks import entries_of, places, places_of
from .codes import codes_by, scale_of, sloped, values_of
from .launch import dot, fetch_ahead, let_next_start, wait_for_inputs
from .rotary import stretched


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
def decode_attention_kernel(
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
    """One program: EACH queries of a slot's KV head, over one of SPLITS of its tokens."""
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
