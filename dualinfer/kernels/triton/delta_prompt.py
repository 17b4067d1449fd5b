"""The gated delta rule over sequences, from their projections to their normed results.

arXiv:2406.06484, arXiv:2412.06464, arXiv:2510.26692. Four launches: what is convolved; of each
chunk of 64 tokens by itself, the products of tokens and the solution of what they take from one
another; over the chunks, the states; norm and gate. Only the third goes from left to right. Where
each channel decays by itself, the products of tokens are a launch of their own.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from typing import Any

import triton
import triton.language as tl

from .delta_token import DeltaLayer, log_decay
from .launch import dot, launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import as_bytes
from .past import convolved_tile, is_seen, keep, sigmoid, slot_of
from .rows import check_last_axis

CHUNK = 64
# Tokens of a program that convolves, and of one that norms; elements of a value of one that walks.
_TILE, _NORMED, _VALUES = 64, 16, 32
# Channels that a program of pairs holds at a time, its warps, and a thread's registers: so a
# multiprocessor has two programs.
_SLICE, _WARPS, _REGISTERS = 32, 8, 128
_CHUNK: tl.constexpr = tl.constexpr(CHUNK)
# A log-decay behind which nothing is left in float32; of larger ones sums would lose digits.
_GONE: tl.constexpr = tl.constexpr(-30.0)


@triton.jit
def _convolve_kernel(
    x_ptr, mask_ptr, past_ptr, slots_ptr, starts_ptr, taps_ptr, y_ptr, x_row, x_stride, mask_row,
    mask_stride, tokens, slots, root, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL:
    tl.constexpr,
):  # fmt: skip
    """One program: a head's queries, keys or values of TILE tokens of a row."""
    let_next_start(PDL)
    CHANNELS: tl.constexpr = 2 * KEYS * KEY + VALUES * VALUE
    tiles = tl.cdiv(tokens, TILE)
    unit = tl.program_id(0) % (2 * KEYS + VALUES)
    number = tl.program_id(0) // (2 * KEYS + VALUES)
    b = (number // tiles).to(tl.int64)
    first = number % tiles * TILE
    row = tl.arange(0, TILE)[:, None]
    t = first + row
    column = tl.arange(0, BLOCK)[None, :]
    is_key = unit < 2 * KEYS
    in_head = column < tl.where(is_key, KEY, VALUE)
    channel = tl.where(is_key, unit * KEY, 2 * KEYS * KEY + (unit - 2 * KEYS) * VALUE) + column
    total = tl.zeros([TILE, BLOCK], tl.float32)
    wait_for_inputs(PDL)
    total = convolved_tile(
        total, x_ptr, mask_ptr, past_ptr, slots_ptr, starts_ptr, taps_ptr, b, first, row, channel,
        in_head, x_row, x_stride, mask_row, mask_stride, tokens, slots, 1.0, CHANNELS, TAPS, False,
    )  # fmt: skip
    if is_key:
        total *= tl.rsqrt(tl.sum(total * total, 1, keep_dims=True) + 1e-6)
        total *= tl.where(unit < KEYS, root, 1.0)
    y_ptr += (b * tokens + first) * CHANNELS + row * CHANNELS + channel
    tl.store(y_ptr, total.to(y_ptr.dtype.element_ty), mask=(t < tokens) & in_head)


@triton.jit
def _product(a, b, FINE: tl.constexpr):
    """a b of float32 [64, 64]; without FINE of operands rounded to 10 bits behind the point."""
    zeros = tl.zeros([_CHUNK, _CHUNK], tl.float32)
    return dot(a, b, zeros) if FINE else tl.dot(a, b, zeros, input_precision="tf32")


@triton.jit
def _level(i):
    """Pairs of tokens of which the earlier is in the first half of 2 << i, the later in the second.

    Each pair is of one of the levels 0, 1, 2 and so on.
    """
    at = tl.arange(0, _CHUNK)
    same = at[:, None] >> (i + 1) == at[None, :] >> (i + 1)
    return same & (at[:, None] >> i > at[None, :] >> i)


@triton.jit
def _inverse(low, FINE: tl.constexpr):
    """The inverse of 1 + L, L float32 [64, 64] what is below the diagonal of `low`.

    Of blocks of 1, 2, 4 and so on tokens: that of twice as many is T - T L T, with what of L is
    between the two.
    """
    at = tl.arange(0, _CHUNK)
    found = tl.where(at[:, None] == at[None, :], 1.0, 0.0) - tl.where(_level(0), low, 0.0)
    if FINE:  # a product is thousands of instructions, which ptxas took two minutes over
        for i in range(1, 6):
            found = _twice(found, low, i, FINE)
    else:
        for i in tl.static_range(1, 6):
            found = _twice(found, low, i, FINE)
    return found


@triton.jit
def _twice(found, low, i, FINE: tl.constexpr):
    """The inverse of blocks of 2 << i tokens from that of blocks of 1 << i."""
    between = tl.where(_level(i), low, 0.0)
    return found - _product(_product(found, between, FINE), found, FINE)


@triton.jit
def _pairs_kernel(
    decays_ptr, mask_ptr, lengths_ptr, qkv_ptr, scale_ptr, bias_ptr, products_ptr, scores_ptr,
    sums_ptr, decayed_ptr, decays_row, decays_stride, mask_row, mask_stride, tokens,
    chunks, floor, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BOUNDED: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a value head of a chunk, whose channels decay each by itself.

    Products of queries, and of keys, with the keys before them, decayed since: float32 [64, 64]
    each, queries' with their own keys as well. Both tokens of a pair decay to, or from, the last
    token of the first half of their level, so that no factor is above 1. SLICE channels at a time:
    registers for all would leave a multiprocessor one program.
    """
    let_next_start(PDL)
    SHARING: tl.constexpr = VALUES // KEYS
    CHANNELS: tl.constexpr = 2 * KEYS * KEY + VALUES * VALUE
    head = tl.program_id(0) % VALUES
    b = (tl.program_id(0) // VALUES // chunks).to(tl.int64)
    chunk = tl.program_id(0) // VALUES % chunks
    at = tl.arange(0, _CHUNK)
    t = chunk * _CHUNK + at
    first = (chunk * _CHUNK).to(tl.int64)
    scale = tl.exp(tl.load(scale_ptr + head))
    wait_for_inputs(PDL)
    length = tokens
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b).to(tl.int32)
    real = is_seen(mask_ptr, b * mask_row + t * mask_stride, (t < tokens) & (t < length))
    number = (b * VALUES + head) * chunks + chunk
    decays_ptr += b * decays_row + first * decays_stride + at[:, None] * decays_stride
    qkv_ptr += (b * tokens + first) * CHANNELS + at[:, None] * CHANNELS
    sums_ptr += number * _CHUNK * BLOCK_K
    decayed_ptr += number * 3 * _CHUNK * BLOCK_K + at[:, None] * BLOCK_K
    by_q = tl.zeros([_CHUNK, _CHUNK], tl.float32)
    by_k = tl.zeros([_CHUNK, _CHUNK], tl.float32)
    own = tl.zeros([_CHUNK], tl.float32)
    for start in range(0, BLOCK_K, SLICE):
        at_k = start + tl.arange(0, SLICE)
        in_k = at_k < KEY
        loaded = real[:, None] & in_k[None, :]
        bias = tl.load(bias_ptr + head * KEY + at_k, mask=in_k, other=0.0)
        decay = tl.load(decays_ptr + (head * KEY + at_k)[None, :], mask=loaded, other=0.0)
        decay = log_decay(decay.to(tl.float32) + bias[None, :], scale, floor, BOUNDED)
        sums = tl.cumsum(tl.where(loaded, tl.maximum(decay, _GONE), 0.0), 0)
        tl.store(sums_ptr + at[:, None] * BLOCK_K + at_k[None, :], sums)
        key = (head // SHARING * KEY + at_k)[None, :]
        q = tl.load(qkv_ptr + key, mask=loaded, other=0.0)
        k = tl.load(qkv_ptr + KEYS * KEY + key, mask=loaded, other=0.0)
        dtype = k.dtype
        wide_q = q.to(tl.float32)
        wide_k = k.to(tl.float32)
        own += tl.sum(wide_q * wide_k, 1)
        since = tl.exp(sums)
        tl.store(decayed_ptr + at_k[None, :], (wide_k * since).to(dtype))
        tl.store(decayed_ptr + _CHUNK * BLOCK_K + at_k[None, :], (wide_q * since).to(dtype))
        tl.debug_barrier()
        last = tl.load(sums_ptr + (_CHUNK - 1) * BLOCK_K + at_k)
        left = (wide_k * tl.exp(last[None, :] - sums)).to(dtype)
        tl.store(decayed_ptr + 2 * _CHUNK * BLOCK_K + at_k[None, :], left)
        for i in range(6):
            middle = (at >> (i + 1) << (i + 1)) + (1 << i) - 1
            then = tl.load(sums_ptr + middle[:, None] * BLOCK_K + at_k[None, :])
            since = tl.exp(-tl.abs(sums - then))
            later = ((at >> i) & 1 == 1)[:, None]
            keys = (wide_k * since).to(dtype)
            earlier = tl.trans(tl.where(later, tl.zeros_like(keys), keys))
            zeros = tl.zeros([_CHUNK, _CHUNK], tl.float32)
            pairs = _level(i)
            late = tl.where(later, keys, tl.zeros_like(keys))
            by_k += tl.where(pairs, dot(late, earlier, zeros), 0.0)
            late = tl.where(later, (wide_q * since).to(dtype), tl.zeros_like(keys))
            by_q += tl.where(pairs, dot(late, earlier, zeros), 0.0)
    by_q += tl.where(at[:, None] == at[None, :], own[:, None], 0.0)
    found = number * _CHUNK * _CHUNK + at[:, None] * _CHUNK + at[None, :]
    tl.store(scores_ptr + found, by_q.to(scores_ptr.dtype.element_ty))
    tl.store(products_ptr + found, by_k)


@triton.jit
def _within_kernel(
    x_ptr, decays_ptr, mask_ptr, lengths_ptr, qkv_ptr, past_ptr, slots_ptr, starts_ptr, scale_ptr,
    bias_ptr, products_ptr, solved_ptr, scores_ptr, sums_ptr, x_row, x_stride, decays_row,
    decays_stride, mask_row, mask_stride, tokens, chunks, slots, beta_at, floor, KEYS: tl.constexpr,
    VALUES: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr, BY_CHANNEL:
    tl.constexpr, BOUNDED: tl.constexpr, DOUBLED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V:
    tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a value head of a chunk. That of a row's first chunk keeps its last tokens.

    Products of pairs of tokens are there where each channel decays by itself.
    """
    let_next_start(PDL)
    SHARING: tl.constexpr = VALUES // KEYS
    CHANNELS: tl.constexpr = 2 * KEYS * KEY + VALUES * VALUE
    head = tl.program_id(0) % VALUES
    b = (tl.program_id(0) // VALUES // chunks).to(tl.int64)
    chunk = tl.program_id(0) // VALUES % chunks
    at = tl.arange(0, _CHUNK)
    t = chunk * _CHUNK + at
    first = (chunk * _CHUNK).to(tl.int64)
    at_k = tl.arange(0, BLOCK_K)
    in_k = at_k < KEY
    wait_for_inputs(PDL)
    length = tokens
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b).to(tl.int32)
    in_mask = b * mask_row + t * mask_stride
    real = is_seen(mask_ptr, in_mask, (t < tokens) & (t < length))
    x_ptr += b * x_row
    betas_ptr = x_ptr + first * x_stride + beta_at + head
    beta = sigmoid(tl.load(betas_ptr + at * x_stride, mask=real, other=0.0).to(tl.float32))
    if DOUBLED:
        beta *= 2.0
    beta = tl.where(real, beta, 0.0)
    key = head // SHARING * KEY + at_k
    number = (b * VALUES + head) * chunks + chunk
    found = number * _CHUNK * _CHUNK + at[:, None] * _CHUNK + at[None, :]
    if BY_CHANNEL:
        by_k = tl.load(products_ptr + found)
    else:
        scale = tl.exp(tl.load(scale_ptr + head))
        qkv_ptr += (b * tokens + first) * CHANNELS
        places = at[:, None] * CHANNELS + key[None, :]
        loaded = real[:, None] & in_k[None, :]
        q = tl.load(qkv_ptr + places, mask=loaded, other=0.0)
        k = tl.load(qkv_ptr + KEYS * KEY + places, mask=loaded, other=0.0)
        bias = tl.load(bias_ptr + head)
        decays_ptr += b * decays_row + first * decays_stride
        decay = tl.load(decays_ptr + at * decays_stride + head, mask=real, other=0.0)
        decay = log_decay(decay.to(tl.float32) + bias, scale, floor, BOUNDED)
        sums = tl.cumsum(tl.where(real, tl.maximum(decay, _GONE), 0.0), 0)
        tl.store(sums_ptr + number * _CHUNK + at, sums)
        upto = at[:, None] >= at[None, :]
        since = tl.exp(tl.where(upto, sums[:, None] - sums[None, :], 0.0))
        zeros = tl.zeros([_CHUNK, _CHUNK], tl.float32)
        turned = tl.trans(k)
        by_q = tl.where(upto, dot(q, turned, zeros) * since, 0.0)
        tl.store(scores_ptr + found, by_q.to(scores_ptr.dtype.element_ty))
        by_k = dot(k, turned, zeros) * since
    by_k = tl.where(at[:, None] > at[None, :], by_k, 0.0) * beta[:, None]
    FINE: tl.constexpr = solved_ptr.dtype.element_ty == tl.float32
    solved = _inverse(by_k, FINE) * beta[None, :]
    tl.store(solved_ptr + found, solved.to(solved_ptr.dtype.element_ty))
    if past_ptr is not None:
        slot, there, goes_on = slot_of(slots_ptr, starts_ptr, b, slots)
        if there * (chunk + 1) == 1:
            past_ptr += slot * (TAPS - 1) * CHANNELS
            at_v = tl.arange(0, BLOCK_V)
            value = 2 * KEYS * KEY + head * VALUE + at_v
            if mask_ptr is not None:
                mask_ptr += b * mask_row
            keep(x_ptr, mask_ptr, past_ptr, value, at_v < VALUE, length, goes_on, x_stride,
                 mask_stride, 1.0, CHANNELS, TAPS, False)  # fmt: skip
            if head % SHARING == 0:
                keep(x_ptr, mask_ptr, past_ptr, key, in_k, length, goes_on, x_stride, mask_stride,
                     1.0, CHANNELS, TAPS, False)  # fmt: skip
                keep(x_ptr, mask_ptr, past_ptr, KEYS * KEY + key, in_k, length, goes_on, x_stride,
                     mask_stride, 1.0, CHANNELS, TAPS, False)  # fmt: skip


@triton.jit
def _over_kernel(
    qkv_ptr, solved_ptr, scores_ptr, sums_ptr, decayed_ptr, state_ptr, slots_ptr, starts_ptr,
    y_ptr, tokens, chunks, slots, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V elements of a value head of a row, chunk by chunk."""
    let_next_start(PDL)
    SHARING: tl.constexpr = VALUES // KEYS
    CHANNELS: tl.constexpr = 2 * KEYS * KEY + VALUES * VALUE
    parts: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // parts % VALUES
    b = (tl.program_id(0) // parts // VALUES).to(tl.int64)
    at = tl.arange(0, _CHUNK)
    at_k = tl.arange(0, BLOCK_K)
    at_v = tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = at_k < KEY
    in_v = at_v < VALUE
    wait_for_inputs(PDL)
    held = in_k[:, None] & in_v[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    there = 0
    if state_ptr is not None:
        slot, there, goes_on = slot_of(slots_ptr, starts_ptr, b, slots)
        state_ptr += (slot * VALUES + head) * KEY * VALUE
        state_ptr += at_k[:, None] * VALUE + at_v[None, :]
        before = tl.load(state_ptr, mask=held & (at_k[:, None] < KEY * goes_on), other=0.0)
        state = before.to(tl.float32)
    qkv_ptr += b * tokens * CHANNELS
    query = head // SHARING * KEY + at_k
    value = 2 * KEYS * KEY + head * VALUE + at_v
    number = (b * VALUES + head) * chunks
    square = at[:, None] * _CHUNK + at[None, :]
    solved_ptr += number * _CHUNK * _CHUNK + square
    scores_ptr += number * _CHUNK * _CHUNK + square
    y_ptr += (b * tokens * VALUES + head) * VALUE + at_v[None, :]
    SUMS: tl.constexpr = BLOCK_K if BY_CHANNEL else 1
    sums_ptr += number * _CHUNK * SUMS
    if BY_CHANNEL:
        decayed_ptr += number * 3 * _CHUNK * BLOCK_K + at[:, None] * BLOCK_K + at_k[None, :]
    for chunk in range(chunks):
        t = chunk * _CHUNK + at
        inside = t[:, None] < tokens
        rows = at[:, None] * CHANNELS
        v = tl.load(qkv_ptr + rows + value[None, :], mask=inside & in_v[None, :], other=0.0)
        solved = tl.load(solved_ptr)
        scores = tl.load(scores_ptr)
        zeros = tl.zeros([_CHUNK, BLOCK_V], tl.float32)
        held_now = state.to(v.dtype)
        if BY_CHANNEL:
            k = tl.load(decayed_ptr)
            q = tl.load(decayed_ptr + _CHUNK * BLOCK_K)
            left = tl.load(decayed_ptr + 2 * _CHUNK * BLOCK_K)
            last = tl.load(sums_ptr + (_CHUNK - 1) * BLOCK_K + at_k)
            u = dot(solved, (v.to(tl.float32) - dot(k, held_now, zeros)).to(v.dtype), zeros)
            y = dot(scores, u.to(v.dtype), dot(q, held_now, zeros))
            state = dot(tl.trans(left), u.to(v.dtype), state * tl.exp(last)[:, None])
        else:
            loaded = inside & in_k[None, :]
            q = tl.load(qkv_ptr + rows + query[None, :], mask=loaded, other=0.0)
            k = tl.load(qkv_ptr + rows + (KEYS * KEY + query)[None, :], mask=loaded, other=0.0)
            sums = tl.load(sums_ptr + at)
            last = tl.load(sums_ptr + _CHUNK - 1)
            since = tl.exp(sums)[:, None]
            read = dot(k, held_now, zeros) * since
            u = dot(solved, (v.to(tl.float32) - read).to(k.dtype), zeros)
            y = dot(q, held_now, zeros) * since
            y = dot(scores, u.to(k.dtype), y)
            u *= tl.exp(last - sums)[:, None]
            state = dot(tl.trans(k), u.to(k.dtype), state * tl.exp(last))
        tl.store(
            y_ptr + at[:, None] * (VALUES * VALUE),
            y.to(y_ptr.dtype.element_ty),
            mask=inside & in_v[None, :],
        )
        qkv_ptr += _CHUNK * CHANNELS
        y_ptr += _CHUNK * VALUES * VALUE
        solved_ptr += _CHUNK * _CHUNK
        scores_ptr += _CHUNK * _CHUNK
        sums_ptr += _CHUNK * SUMS
        if BY_CHANNEL:
            decayed_ptr += 3 * _CHUNK * BLOCK_K
    if state_ptr is not None:
        kept = state.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr, kept, mask=held & (at_k[:, None] < KEY * there))


@triton.jit
def _gate_kernel(
    y_ptr, gates_ptr, norm_ptr, gates_row, gates_stride, rows, tokens, eps, VALUES: tl.constexpr,
    VALUE: tl.constexpr, SILU: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head of TILE tokens, normed and times a function of its gates, in place."""
    let_next_start(PDL)
    row = (tl.program_id(0) // VALUES * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < VALUE)
    norm = tl.load(norm_ptr + column, mask=column < VALUE, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    channel = tl.program_id(0) % VALUES * VALUE + column
    y_ptr += row * (VALUES * VALUE) + channel
    gates_ptr += row // tokens * gates_row + row % tokens * gates_stride + channel
    y = tl.load(y_ptr, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates_ptr, mask=inside, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / VALUE + eps) * norm
    y *= gate * sigmoid(gate) if SILU else sigmoid(gate)
    tl.debug_barrier()
    tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=inside)


def delta_prompt(
    x: Any,
    layer: DeltaLayer,
    past: Any = None,
    state: Any = None,
    *,
    mask: Any = None,
    slots: Any = None,
    lengths: Any = None,
    starts: Any = None,
    pdl: bool = False,
) -> Any:
    """What tokens of sequences give, [B, T, values * value_dim], from projections x [B, T, W].

    Arguments as those of `delta_token.delta_token`, [B, T, ...] in the place of [N, ...]. bool
    `mask` [B, T] hides tokens, which then change nothing. With `past` and `state` the slots int
    `slots` [B] have what is behind the first int `lengths` [B] tokens; a row of a slot that there
    is not gives it to none. With int `starts` [B] a row that does not start at 0 goes on from what
    its slot has.
    """
    check_last_axis("x", x)
    batch, tokens, _ = x.shape
    keys, values, key_dim, value_dim, beta_at = layer[:5]
    taps, decay_scale, decay_bias, norm, eps = layer[5:10]
    gates, decays, floor, doubled, gate = layer[10:]
    width, channels = values * value_dim, 2 * keys * key_dim + values * value_dim
    by_channel = decay_bias.numel() != values
    if gates is None:
        gates = x.narrow(2, channels, width)
    if decays is None:
        decays = x.narrow(2, beta_at + values, decay_bias.numel())
    if (past is None) != (slots is None) or (past is None) != (state is None):
        raise ValueError("past, state and slots are given together.")
    if past is not None and (past.shape[2] != channels or not past.is_contiguous()):
        raise ValueError(f"past has shape {tuple(past.shape)}; [N, taps - 1, {channels}] expected.")
    rows, chunks = batch * tokens, triton.cdiv(tokens, CHUNK)
    slot_count = 0 if past is None else len(past)
    block_k, block_v = (max(next_power_of_2(n), 16) for n in (key_dim, value_dim))
    own = {"KEYS": keys, "VALUES": values, "KEY": key_dim, "VALUE": value_dim}
    kinds = {"BY_CHANNEL": by_channel, "BLOCK_K": block_k}
    in_mask = (0, 0) if mask is None else mask.stride()
    mask = None if mask is None else as_bytes(mask)
    qkv = x.new_empty((batch, tokens, channels))
    solved, scores = (x.new_empty((batch, values, chunks, CHUNK, CHUNK)) for _ in range(2))
    like = decay_bias
    sums = like.new_empty((batch, values, chunks, CHUNK, *((block_k,) if by_channel else ())))
    decayed = x.new_empty((batch, values, chunks, 3, CHUNK, block_k)) if by_channel else None
    y = x.new_empty((batch, tokens, width))
    if not rows:
        return y
    launch(
        _convolve_kernel,
        ((2 * keys + values) * batch * triton.cdiv(tokens, _TILE),),
        *(x, mask, past, slots, starts, taps, qkv, x.stride(0), x.stride(1), *in_mask),
        *(tokens, slot_count, key_dim**-0.5),
        **own,
        **{"TAPS": taps.shape[1], "TILE": _TILE, "BLOCK": max(block_k, block_v)},
        num_warps=8,
        pdl=pdl,
    )
    in_decays = decays.stride(0), decays.stride(1)
    is_bounded, is_fine = floor is not None, str(x.dtype).endswith("float32")
    products = None
    if by_channel:
        products = like.new_empty((batch, values, chunks, CHUNK, CHUNK))
        launch(
            _pairs_kernel,
            (values * batch * chunks,),
            *(decays, mask, lengths, qkv, decay_scale, decay_bias, products, scores, sums),
            *(decayed, *in_decays, *in_mask, tokens, chunks, floor or 0.0),
            **own,
            **{"BOUNDED": is_bounded, "BLOCK_K": block_k, "SLICE": min(block_k, _SLICE)},
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
            pdl=pdl,
        )
    launch(
        _within_kernel,
        (values * batch * chunks,),
        *(x, decays, mask, lengths, qkv, past, slots, starts, decay_scale, decay_bias, products),
        *(solved, scores, sums, x.stride(0), x.stride(1), *in_decays),
        *(*in_mask, tokens, chunks, slot_count, beta_at, floor or 0.0),
        **own,
        **kinds,
        **{"TAPS": taps.shape[1], "BOUNDED": is_bounded, "DOUBLED": doubled, "BLOCK_V": block_v},
        num_warps=8 if is_fine else 4,
        pdl=pdl,
    )
    block = min(_VALUES, block_v)
    launch(
        _over_kernel,
        (triton.cdiv(value_dim, block) * batch * values,),
        *(qkv, solved, scores, sums, decayed, state, slots, starts, y, tokens, chunks, slot_count),
        **own,
        **kinds,
        BLOCK_V=block,
        num_warps=4,
        num_stages=1 if is_fine else 3,  # whose next chunk there is no room for
        pdl=pdl,
    )
    launch(
        _gate_kernel,
        (values * triton.cdiv(rows, _NORMED),),
        *(y, gates, norm, gates.stride(0), gates.stride(1), rows, tokens, eps),
        **{"VALUES": values, "VALUE": value_dim, "SILU": gate == "silu"},
        **{"TILE": _NORMED, "BLOCK": block_v},
        num_warps=4,
        pdl=pdl,
    )
    return y
