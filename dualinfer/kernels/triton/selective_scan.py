"""Mamba-1 behind its convolution: channels whose states are scanned, tokens and sequences alike.

arXiv:2312.00752. A sequence is convolved by a launch in front, and a token by `conv_token`; the
products that give steps, B and C are in between. One body scans: of a token it is one turn.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import as_bytes
from .past import COLUMNS, TILE, convolve_kernel, is_seen, keep, sigmoid, slot_of, softplus
from .rows import check_last_axis

_BLOCK = 32  # channels of a program that scans, a thread each
_LOG2: tl.constexpr = tl.constexpr(-1.4426950408889634)  # -1 / log(2): rates are those of exp2
MOST_STATE = 64  # elements of a channel's state, which a thread holds


@triton.jit
def _read(row, strides, mask_ptr, where, step_bias, t, tokens, length, WIDTH: tl.constexpr):
    """A token's value, step, B, C and gate, float32; the step of one that changes nothing is 0.

    `row` is where the row's x, values, steps, B and C begin, `where` says which channels and
    elements there are.
    """
    x_ptr, value_ptr, steps_ptr, b_ptr, c_ptr = row
    x_stride, b_stride, c_stride, mask_stride = strides
    channel, in_width, at_s, in_s = where
    t += tl.zeros([1], tl.int64)
    inside = in_width & (t < tokens)
    real = is_seen(mask_ptr, t * mask_stride + channel * 0, inside & (t < length))
    there = in_s & (t < tokens)
    value = tl.load(value_ptr + t * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(steps_ptr + t * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + t * x_stride + WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + t * b_stride + at_s, mask=there, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + t * c_stride + at_s, mask=there, other=0.0).to(tl.float32)
    return value, tl.where(real, softplus(step + step_bias), 0.0), b, c, gate


@triton.jit
def _advance(state, token, rate, skip):
    """Put a token into states [S, C]: the new ones, and its gated result [C]."""
    value, step, b, c, gate = token
    state = state * tl.exp2(step[None, :] * rate) + b[:, None] * (value * step)[None, :]
    y = tl.sum(state * c[:, None], 0) + value * skip
    return state, y * gate * sigmoid(gate)


@triton.jit
def _scan_kernel(
    x_ptr, value_ptr, steps_ptr, b_ptr, c_ptr, mask_ptr, lengths_ptr, past_ptr, state_ptr,
    slots_ptr, starts_ptr, step_bias_ptr, decay_ptr, skip_ptr, y_ptr, x_row, x_stride, b_row,
    b_stride, c_row, c_stride, mask_row, mask_stride, tokens, slots, WIDTH: tl.constexpr,
    STATE: tl.constexpr, TAPS: tl.constexpr, ALONE: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK channels of a row, from left to right, four tokens read at a time.

    ALONE: a row is the token of the slot of its number, if the mask names that.
    """
    let_next_start(PDL)
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    b = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at_s = tl.arange(0, BLOCK_S)
    in_width = channel < WIDTH
    where = (channel, in_width, at_s, at_s < STATE)
    held = (at_s < STATE)[:, None] & in_width[None, :]
    of_state = channel[None, :] * STATE + at_s[:, None]
    rate = tl.exp(tl.load(decay_ptr + of_state, mask=held, other=0.0)) * _LOG2
    step_bias = tl.load(step_bias_ptr + channel, mask=in_width, other=0.0)
    skip = tl.load(skip_ptr + channel, mask=in_width, other=0.0)
    wait_for_inputs(PDL)
    row = (
        x_ptr + b * x_row, value_ptr + b * tokens * WIDTH, steps_ptr + b * tokens * WIDTH,
        b_ptr + b * b_row, c_ptr + b * c_row,
    )  # fmt: skip
    strides = (x_stride, b_stride, c_stride, mask_stride)
    y_ptr += b * tokens * WIDTH + channel
    if mask_ptr is not None:
        mask_ptr += b * mask_row
    if ALONE:
        state_ptr += b * WIDTH * STATE + of_state
        moves = in_width & (tl.load(mask_ptr + channel * 0) != 0)
        held = held & moves[None, :]
        state = tl.load(state_ptr, mask=held, other=0.0).to(tl.float32)
        token = _read(row, strides, None, where, step_bias, 0, tokens, tokens, WIDTH)
        state, y = _advance(state, token, rate, skip)
        tl.store(y_ptr, tl.where(moves, y, 0.0).to(y_ptr.dtype.element_ty), mask=in_width)
        tl.store(state_ptr, state.to(state_ptr.dtype.element_ty), mask=held)
    else:
        state = tl.zeros([BLOCK_S, BLOCK], tl.float32)
        length, goes_on, there = tokens, 0, 0
        slot = b * 0
        if lengths_ptr is not None:
            length = tl.load(lengths_ptr + b).to(tl.int32)
        if state_ptr is not None:
            slot, there, goes_on = slot_of(slots_ptr, starts_ptr, b, slots)
            state_ptr += slot * WIDTH * STATE + of_state
            before = held & (at_s[:, None] < STATE * goes_on)
            state += tl.load(state_ptr, mask=before, other=0.0).to(tl.float32)
        for t in range(0, tokens, 4):
            # All that is read comes before all that is written, which a compiler cannot pass.
            one = _read(row, strides, mask_ptr, where, step_bias, t, tokens, length, WIDTH)
            two = _read(row, strides, mask_ptr, where, step_bias, t + 1, tokens, length, WIDTH)
            three = _read(row, strides, mask_ptr, where, step_bias, t + 2, tokens, length, WIDTH)
            four = _read(row, strides, mask_ptr, where, step_bias, t + 3, tokens, length, WIDTH)
            state, first = _advance(state, one, rate, skip)
            state, second = _advance(state, two, rate, skip)
            state, third = _advance(state, three, rate, skip)
            state, fourth = _advance(state, four, rate, skip)
            _write(y_ptr, first, t, tokens, in_width, WIDTH)
            _write(y_ptr, second, t + 1, tokens, in_width, WIDTH)
            _write(y_ptr, third, t + 2, tokens, in_width, WIDTH)
            _write(y_ptr, fourth, t + 3, tokens, in_width, WIDTH)
        if state_ptr is not None:
            kept = held & (at_s[:, None] < STATE * there)
            tl.store(state_ptr, state.to(state_ptr.dtype.element_ty), mask=kept)
            if there == 1:
                past_ptr += slot * (TAPS - 1) * WIDTH
                keep(x_ptr + b * x_row, mask_ptr, past_ptr, channel, in_width, length, goes_on,
                     x_stride, mask_stride, 1.0, WIDTH, TAPS, False)  # fmt: skip


@triton.jit
def _write(y_ptr, y, t, tokens, in_width, WIDTH: tl.constexpr):
    """A token's result, where there is such a token."""
    t += tl.zeros([1], tl.int64)
    tl.store(y_ptr + t * WIDTH, y.to(y_ptr.dtype.element_ty), mask=in_width & (t < tokens))


class ScanLayer(NamedTuple):
    """A layer's weights as the kernels take them: float32 [I], and `decay` [I, state]."""

    step_bias: Any
    decay: Any
    skip: Any


def serves(state: int, taps: int) -> bool:
    """True if the kernels take states of so many elements, and so many taps before them."""
    return state <= MOST_STATE and taps > 1


def convolve(
    x: Any,
    taps: Any,
    taps_bias: Any = None,
    past: Any = None,
    *,
    mask: Any = None,
    slots: Any = None,
    starts: Any = None,
    pdl: bool = False,
) -> Any:
    """silu of the first C elements of x [B, T, W], each convolved over time: [B, T, C].

    `taps` [C, taps], with a bias [C]. bool `mask` [B, T] hides tokens. A row that does not start at
    0, by int `starts` [B], goes on from what `past` [N, taps - 1, C] has of its slot, by `slots`.
    """
    check_last_axis("x", x)
    batch, tokens, _ = x.shape
    width = len(taps)
    if past is not None and (past.shape[2] != width or not past.is_contiguous()):
        raise ValueError(f"past has shape {tuple(past.shape)}; [N, taps - 1, {width}] expected.")
    y = x.new_empty((batch, tokens, width))
    if not batch * tokens:
        return y
    in_mask = (0, 0) if mask is None else mask.stride()
    launch(
        convolve_kernel,
        (triton.cdiv(width, COLUMNS) * batch * triton.cdiv(tokens, TILE),),
        *(x, None if mask is None else as_bytes(mask), past, slots, starts, taps, taps_bias, y),
        *(x.stride(0), x.stride(1), *in_mask, tokens, 0 if past is None else len(past)),
        *(1.0, 1.0, 1.0),  # of what is not scaled
        **{"FIRST": 0, "WIDTH": width, "SHARED": 0, "TAPS": taps.shape[1], "SCALED": False},
        **{"TILE": TILE, "BLOCK": COLUMNS},
        num_warps=4,
        pdl=pdl,
    )
    return y


def scan(
    x: Any,
    values: Any,
    steps: Any,
    b: Any,
    c: Any,
    layer: ScanLayer,
    past: Any = None,
    state: Any = None,
    *,
    mask: Any = None,
    slots: Any = None,
    lengths: Any = None,
    starts: Any = None,
    pdl: bool = False,
) -> Any:
    """Scan sequences: gated results [B, T, I] of projections x [B, T, 2 I], whose gates are last.

    `values` [B, T, I] are what was convolved, `steps` [B, T, I] come before their bias and
    softplus, `b` and `c` [B, T, state]. `mask`, `past` [N, taps - 1, I], `state` [N, I, state],
    `slots`, `lengths` and `starts` as in `state_prompt.state_prompt`.
    """
    if (past is None) != (slots is None) or (past is None) != (state is None):
        raise ValueError("past, state and slots are given together.")
    y = x.new_empty(values.shape)
    if not y.numel():
        return y
    in_mask = (0, 0) if mask is None else mask.stride()
    mask = None if mask is None else as_bytes(mask)
    where = mask, lengths, past, state, slots, starts
    _launch((x, values, steps, b, c), layer, y, where, in_mask, pdl, alone=False)
    return y


def scan_token(
    x: Any,
    values: Any,
    steps: Any,
    b: Any,
    c: Any,
    layer: ScanLayer,
    state: Any,
    moves: Any,
    *,
    pdl: bool = False,
) -> Any:
    """Put a token of each slot into its state: [N, I] of projections x [N, 2 I].

    As `scan`, [N, ...] in the place of [B, T, ...]. `state` [N', I, state], N' >= N, is written in
    the slots that bool `moves` [N] names; others give zeros.
    """
    y = x.new_empty(values.shape)
    where = as_bytes(moves), None, None, state, None, None
    rows = tuple(part[:, None] for part in (x, values, steps, b, c))
    _launch(rows, layer, y, where, (moves.stride(0), 0), pdl, alone=True)
    return y


def _launch(
    given: tuple[Any, ...],
    layer: ScanLayer,
    y: Any,
    where: tuple[Any, ...],
    in_mask: tuple[int, int],
    pdl: bool,
    alone: bool,
) -> None:
    """Launch the scan of rows into y; `where` is its mask and what follows that in the kernel."""
    x, values, steps, b, c = given
    batch, tokens, width = values.shape
    mask, lengths, past, state, slots, starts = where
    size, taps = layer.decay.shape[1], 2 if past is None else past.shape[1] + 1
    for name, part in (("x", x), ("b", b), ("c", c)):
        check_last_axis(name, part)
    whole = (values, steps, *(part for part in (past, state) if part is not None))
    if x.shape[2] != 2 * width or not all(part.is_contiguous() for part in whole):
        raise ValueError(f"x has shape {tuple(x.shape)}, values {tuple(values.shape)}.")
    launch(
        _scan_kernel,
        (triton.cdiv(width, _BLOCK) * batch,),
        *(*given, mask, lengths, past, state, slots, starts, *layer, y),
        *(x.stride(0), x.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1), *in_mask),
        *(tokens, 0 if state is None else len(state)),
        **{"WIDTH": width, "STATE": size, "TAPS": taps, "ALONE": alone},
        **{"BLOCK_S": next_power_of_2(size), "BLOCK": _BLOCK},
        num_warps=1,
        pdl=pdl,
    )
