"""Mamba-2 over sequences, from their projections to their normed results.

arXiv:2405.21060. Two launches: what is convolved; and chunk by chunk, from left to right, the
states, with all pairs of a chunk's tokens. Norms over several heads are one behind.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from typing import Any

import triton
import triton.language as tl

from .launch import dot, launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import as_bytes, empty
from .past import (
    COLUMNS,
    TILE,
    convolve_kernel,
    is_seen,
    keep,
    scaled,
    sigmoid,
    slot_of,
    softplus,
)
from .rows import check_last_axis
from .state_token import StateLayer, norm_heads

# Tokens of a chunk, and elements of a head that a program walks with; of float32, whose products
# are thousands of instructions, fewer.
_CHUNK, _VALUES = (64, 32), (32, 16)
# A log-decay behind which nothing is left in float32; of larger ones sums would lose digits.
_GONE: tl.constexpr = tl.constexpr(-30.0)


@triton.jit
def _walk_kernel(
    x_ptr, given_ptr, mask_ptr, lengths_ptr, past_ptr, state_ptr, slots_ptr, starts_ptr,
    step_bias_ptr, decay_ptr, skip_ptr, y_ptr, x_row, x_stride, mask_row, mask_stride, tokens,
    chunks, slots, least, most, out_scale, gate_scale, x_scale, b_scale, c_scale, step_scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    TAPS: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_D elements of a head of a row, chunk by chunk.

    The first of a head, and of a group's heads, keeps the last tokens of its channels.
    """
    let_next_start(PDL)
    SHARING: tl.constexpr = HEADS // GROUPS
    WIDTH: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = WIDTH + 2 * GROUPS * STATE
    parts: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    part = tl.program_id(0) % parts
    head = tl.program_id(0) // parts % HEADS
    b = (tl.program_id(0) // parts // HEADS).to(tl.int64)
    at = tl.arange(0, CHUNK)
    at_s = tl.arange(0, BLOCK_S)
    at_d = part * BLOCK_D + tl.arange(0, BLOCK_D)
    in_s = at_s < STATE
    in_d = at_d < DIM
    rate = tl.exp(tl.load(decay_ptr + head))
    step_bias = tl.load(step_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    wait_for_inputs(PDL)
    length = tokens
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b).to(tl.int32)
    state = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    there = 0
    goes_on = 0
    slot = b * 0
    held = in_d[:, None] & in_s[None, :]
    if state_ptr is not None:
        slot, there, goes_on = slot_of(slots_ptr, starts_ptr, b, slots)
        state_ptr += (slot * HEADS + head) * DIM * STATE + at_d[:, None] * STATE + at_s[None, :]
        before = tl.load(state_ptr, mask=held & (at_d[:, None] < DIM * goes_on), other=0.0)
        state = tl.trans(before.to(tl.float32))
    x_ptr += b * x_row
    if mask_ptr is not None:
        mask_ptr += b * mask_row
    own = head * DIM + at_d
    of_b = WIDTH + head // SHARING * STATE + at_s
    upto = at[:, None] >= at[None, :]
    FINE: tl.constexpr = given_ptr.dtype.element_ty == tl.float32
    for chunk in range(chunks):
        t = chunk * CHUNK + at
        inside = t < tokens
        real = is_seen(mask_ptr, t * mask_stride, inside & (t < length))
        tokens_ptr = x_ptr + t.to(tl.int64) * x_stride
        number = tl.load(tokens_ptr + WIDTH + CHANNELS + head, mask=inside, other=0.0)
        number = scaled(number, step_scale, SCALED).to(tl.float32) + step_bias
        step = tl.minimum(tl.maximum(softplus(number), least), most)
        step = tl.where(real, step, 0.0)
        decay = tl.maximum(-step * rate, _GONE)
        sums = tl.cumsum(decay, 0)
        last = tl.sum(decay, 0)
        if FINE:  # each pair's by itself: differences of sums would round
            behind = tl.where(at[:, None] > at[None, :], decay[:, None], 0.0)
            spans = tl.cumsum(behind, 0)
            rest = tl.sum(behind, 0)
        else:
            spans = tl.where(upto, sums[:, None] - sums[None, :], 0.0)
            rest = last - sums
        rows = given_ptr + (b * tokens + t)[:, None] * CHANNELS
        of_state = inside[:, None] & in_s[None, :]
        of_head = inside[:, None] & in_d[None, :]
        keys = tl.load(rows + of_b[None, :], mask=of_state, other=0.0)
        queries = tl.load(rows + (GROUPS * STATE + of_b)[None, :], mask=of_state, other=0.0)
        values = tl.load(rows + own[None, :], mask=of_head, other=0.0)
        dtype = values.dtype
        square = tl.zeros([CHUNK, CHUNK], tl.float32)
        since = tl.exp(spans) * step[None, :]
        scores = tl.where(upto, dot(queries, tl.trans(keys), square) * since, 0.0)
        zeros = tl.zeros([CHUNK, BLOCK_D], tl.float32)
        y = dot(queries, state.to(dtype), zeros) * tl.exp(sums)[:, None]
        y = dot(scores.to(dtype), values, y)
        left = (keys.to(tl.float32) * (tl.exp(rest) * step)[:, None]).to(dtype)
        state = dot(tl.trans(left), values, state * tl.exp(last))
        y += values.to(tl.float32) * skip
        if GATED:
            gate = tl.load(tokens_ptr[:, None] + own[None, :], mask=of_head, other=0.0)
            gate = scaled(gate, gate_scale, SCALED).to(tl.float32)
            y *= gate * sigmoid(gate) * out_scale
        found = y_ptr + (b * tokens + t)[:, None] * WIDTH + own[None, :]
        tl.store(found, y.to(y_ptr.dtype.element_ty), mask=of_head)
    if state_ptr is not None:
        kept = tl.trans(state).to(state_ptr.dtype.element_ty)
        tl.store(state_ptr, kept, mask=held & (at_d[:, None] < DIM * there))
        if there * (part + 1) == 1:
            past_ptr += slot * (TAPS - 1) * CHANNELS
            x_ptr += WIDTH
            whole = tl.arange(0, WHOLE)
            keep(x_ptr, mask_ptr, past_ptr, head * DIM + whole, whole < DIM, length, goes_on,
                 x_stride, mask_stride, x_scale, CHANNELS, TAPS, SCALED)  # fmt: skip
            if head % SHARING == 0:
                keep(x_ptr, mask_ptr, past_ptr, of_b, in_s, length, goes_on, x_stride, mask_stride,
                     b_scale, CHANNELS, TAPS, SCALED)  # fmt: skip
                keep(x_ptr, mask_ptr, past_ptr, GROUPS * STATE + of_b, in_s, length, goes_on,
                     x_stride, mask_stride, c_scale, CHANNELS, TAPS, SCALED)  # fmt: skip


def state_prompt(
    x: Any,
    layer: StateLayer,
    past: Any = None,
    state: Any = None,
    *,
    mask: Any = None,
    slots: Any = None,
    lengths: Any = None,
    starts: Any = None,
    pdl: bool = False,
) -> Any:
    """Run sequences through their states: [B, T, heads * head_dim] of projections x [B, T, W].

    Arguments as those of `state_token.state_token`, [B, T, ...] in the place of [N, ...]. bool
    `mask` [B, T] hides tokens, which then change nothing. With `past` and `state` the slots int
    `slots` [B] have what is behind the first int `lengths` [B] tokens; a row of a slot that there
    is not gives it to none. With int `starts` [B] a row that does not start at 0 goes on from what
    its slot has.
    """
    check_last_axis("x", x)
    batch, tokens, _ = x.shape
    heads, head_dim, size, groups = layer[:4]
    taps, taps_bias, step_bias, decay, skip, norm = layer[4:10]
    limits, scales, out_scale = layer.limits, layer.scales, layer.out_scale
    width, shared = heads * head_dim, groups * size
    channels = width + 2 * shared
    if (past is None) != (slots is None) or (past is None) != (state is None):
        raise ValueError("past, state and slots are given together.")
    if past is not None and (past.shape[2] != channels or not past.is_contiguous()):
        raise ValueError(f"past has shape {tuple(past.shape)}; [N, taps - 1, {channels}] expected.")
    rows, slot_count = batch * tokens, 0 if past is None else len(past)
    in_mask = (0, 0) if mask is None else mask.stride()
    mask = None if mask is None else as_bytes(mask)
    many = scales or (1.0,) * 5
    given = x.new_empty((batch, tokens, channels))
    shape = batch, tokens, width
    y = x.new_empty(shape) if norm is None else empty(x, shape, "float32")
    if not rows:
        return y
    is_scaled = {"TAPS": taps.shape[1], "SCALED": scales is not None}
    launch(
        convolve_kernel,
        (triton.cdiv(channels, COLUMNS) * batch * triton.cdiv(tokens, TILE),),
        *(x, mask, past, slots, starts, taps, taps_bias, given, x.stride(0), x.stride(1), *in_mask),
        *(tokens, slot_count, *many[1:4]),
        **{"FIRST": width, "WIDTH": width, "SHARED": shared, **is_scaled},
        **{"TILE": TILE, "BLOCK": COLUMNS},
        num_warps=4,
        pdl=pdl,
    )
    whole = max(next_power_of_2(head_dim), 16)
    is_fine = str(x.dtype).endswith("float32")
    chunk, block = _CHUNK[is_fine], min(_VALUES[is_fine], whole)
    launch(
        _walk_kernel,
        (triton.cdiv(head_dim, block) * batch * heads,),
        *(x, given, mask, lengths, past, state, slots, starts, step_bias, decay, skip, y),
        *(x.stride(0), x.stride(1), *in_mask, tokens, triton.cdiv(tokens, chunk), slot_count),
        *(*limits, out_scale if norm is None else 1.0, *many),
        **{"HEADS": heads, "GROUPS": groups, "DIM": head_dim, "STATE": size, **is_scaled},
        **{"GATED": norm is None or not layer.gated_last, "WHOLE": whole, "BLOCK_D": block},
        CHUNK=chunk,
        BLOCK_S=max(next_power_of_2(size), 16),
        num_warps=8,
        num_stages=1 if is_fine else 2,
        pdl=pdl,
    )
    return y if norm is None else norm_heads(y, x, layer, pdl)
