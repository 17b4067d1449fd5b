"""One token of Mamba-2 for each slot, from its projection to its normed result.

arXiv:2405.21060. A state is read and written once; norms over several heads are a launch behind.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import as_bytes, empty
from .past import MOST_COUNTERS, convolved, gathered, is_last, scaled, shift, sigmoid, softplus
from .rows import check_last_axis

_BLOCK, _WARPS = 16, 4  # elements of a head's that a program has, and its warps
# Of many rows a program is one warp, with as many numbers of a state as it has registers for: then
# little is loaded twice, and no warp waits for another.
_MANY, _HELD = 8, 4096
LARGEST = 16384  # elements of a head's state, and of what is normed together


@triton.jit
def _token_kernel(
    x_ptr, past_ptr, state_ptr, taps_ptr, taps_bias_ptr, step_bias_ptr, decay_ptr, skip_ptr,
    moves_ptr, y_ptr, counters_ptr, x_stride, least, most, out_scale, gate_scale, x_scale, b_scale,
    c_scale, step_scale, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    STATE: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_D elements of a head of a slot.

    Where it may start early, all that an earlier step wrote is on its way before it waits.
    """
    let_next_start(PDL)
    SHARING: tl.constexpr = HEADS // GROUPS
    WIDTH: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = WIDTH + 2 * GROUPS * STATE
    PARTS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    head = tl.program_id(0) // PARTS
    group = head // SHARING
    slot = tl.program_id(1).to(tl.int64)
    at_d = tl.program_id(0) % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
    at_s = tl.arange(0, BLOCK_S)
    in_d = tl.full([BLOCK_D], 1, tl.int1) if DIM % BLOCK_D == 0 else at_d < DIM
    in_s = tl.full([BLOCK_S], 1, tl.int1) if BLOCK_S == STATE else at_s < STATE
    own = head * DIM + at_d
    of_b = WIDTH + group * STATE + at_s
    of_c = GROUPS * STATE + of_b
    past_ptr += slot * (TAPS - 1) * CHANNELS
    states = state_ptr + slot * WIDTH * STATE + own[:, None] * STATE + at_s[None, :]
    inside = in_d[:, None] & in_s[None, :]
    taps = (taps_ptr, taps_bias_ptr)
    if PDL:
        state = tl.load(states, mask=inside, other=0.0)
        x_before = gathered(past_ptr, taps, own, in_d, CHANNELS, TAPS)
        b_before = gathered(past_ptr, taps, of_b, in_s, CHANNELS, TAPS)
        c_before = gathered(past_ptr, taps, of_c, in_s, CHANNELS, TAPS)
    step_bias = tl.load(step_bias_ptr + head)
    rate = tl.load(decay_ptr + head)
    skip = tl.load(skip_ptr + head)
    wait_for_inputs(PDL)
    y_ptr += slot * WIDTH + own
    if tl.load(moves_ptr + slot) != 0:
        if not PDL:
            state = tl.load(states, mask=inside, other=0.0)
            x_before = gathered(past_ptr, taps, own, in_d, CHANNELS, TAPS)
            b_before = gathered(past_ptr, taps, of_b, in_s, CHANNELS, TAPS)
            c_before = gathered(past_ptr, taps, of_c, in_s, CHANNELS, TAPS)
        x_ptr += slot * x_stride
        given_ptr = x_ptr + WIDTH
        b = tl.load(given_ptr + of_b, mask=in_s, other=0.0)
        c = tl.load(given_ptr + of_c, mask=in_s, other=0.0)
        x = tl.load(given_ptr + own, mask=in_d, other=0.0)
        gate = tl.load(x_ptr + own, mask=in_d, other=0.0) if GATED else x
        step = tl.load(given_ptr + CHANNELS + head)
        # The last program to have read what came before B and C writes it; the earlier it is known
        # who that is, the less there is to wait for.
        last = is_last(counters_ptr + slot * GROUPS + group, SHARING * PARTS)
        x = scaled(x, x_scale, SCALED)
        b = scaled(b, b_scale, SCALED)
        c = scaled(c, c_scale, SCALED)
        wide_x = convolved(x, x_before)
        wide_b = convolved(b, b_before)
        wide_c = convolved(c, c_before)
        step = softplus(scaled(step, step_scale, SCALED).to(tl.float32) + step_bias)
        step = tl.minimum(tl.maximum(step, least), most)
        new = state.to(tl.float32) * tl.exp(-step * tl.exp(rate))
        new += (wide_x * step)[:, None] * wide_b[None, :]
        y = tl.sum(new * wide_c[None, :], 1) + wide_x * skip
        if GATED:
            gate = scaled(gate, gate_scale, SCALED).to(tl.float32)
            y *= gate * sigmoid(gate) * out_scale
        tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=in_d)
        tl.store(states, new.to(state_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # all threads have read what came before
        shift(x, x_before, past_ptr, own, in_d, CHANNELS, TAPS)
        if last:
            shift(b, b_before, past_ptr, of_b, in_s, CHANNELS, TAPS)
            shift(c, c_before, past_ptr, of_c, in_s, CHANNELS, TAPS)
    else:
        tl.store(y_ptr, tl.zeros([BLOCK_D], y_ptr.dtype.element_ty), mask=in_d)


@triton.jit
def _norm_kernel(
    y_ptr, x_ptr, norm_ptr, out_ptr, tokens, x_row, x_stride, eps, out_scale, gate_scale,
    WIDTH: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: what is normed together of a token; GATED: the gate is behind the norm."""
    let_next_start(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < NORMED
    parts: tl.constexpr = WIDTH // NORMED
    column += tl.program_id(0) % parts * NORMED
    token = (tl.program_id(0) // parts).to(tl.int64)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    y = tl.load(y_ptr + token * WIDTH + column, mask=inside, other=0.0)
    y *= tl.rsqrt(tl.sum(y * y, 0) / NORMED + eps) * norm
    if GATED:
        x_ptr += token // tokens * x_row + token % tokens * x_stride
        gate = tl.load(x_ptr + column, mask=inside, other=0.0)
        gate = scaled(gate, gate_scale, SCALED).to(tl.float32)
        y *= gate * sigmoid(gate)
    y *= out_scale
    tl.store(out_ptr + token * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def serves(dim: int, state: int, normed: int, taps: int) -> bool:
    """True if the kernels take heads with states of so many elements, and norms over so many."""
    held = next_power_of_2(dim) * next_power_of_2(state)
    return held <= LARGEST and normed <= LARGEST and taps > 1


def counts(rows: int, groups: int) -> bool:
    """True if there are counters for so many slots."""
    return rows * groups <= MOST_COUNTERS


class StateLayer(NamedTuple):
    """What a layer's kernels know of it, for tokens and for sequences alike.

    Of `heads` with states of `head_dim` times `size` elements. `taps` [C, taps], with a bias [C],
    and `norm` [heads * head_dim], over `normed` elements each, are weights; `step_bias`, `decay`
    and `skip` are float32 [heads]. The rest as in `blocks.state_space`.
    """

    heads: int
    head_dim: int
    size: int
    groups: int
    taps: Any
    taps_bias: Any
    step_bias: Any
    decay: Any
    skip: Any
    norm: Any = None
    normed: int = 0
    eps: float = 0.0
    gated_last: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    scales: tuple[float, float, float, float, float] | None = None
    out_scale: float = 1.0


def state_token(
    x: Any,
    layer: StateLayer,
    past: Any,
    state: Any,
    moves: Any,
    *,
    counters: Any,
    leaves_norm: bool = False,
    pdl: bool = False,
) -> Any:
    """What a token of each slot gives, [N, heads * head_dim], from its projection x [N, W].

    x has gates, x, B, C and a number of each head. `past` [N', taps - 1, C] and `state` [N', heads,
    head_dim, state], float32 or 16 bits, N' >= N, are written in the slots that bool `moves` [N]
    names; others give zeros. int32 `counters`, N * groups at least, are zeros, and are left so.
    With `leaves_norm` the norm is not made, and what is to be normed comes in float32.
    """
    check_last_axis("x", x)
    heads, dim, size, groups = layer[:4]
    taps, taps_bias, step_bias, decay, skip, norm = layer[4:10]
    limits, scales, out_scale = layer.limits, layer.scales, layer.out_scale
    rows, width, channels = len(x), heads * dim, past.shape[2]
    if channels != width + 2 * groups * size or not (
        past.is_contiguous() and state.is_contiguous()
    ):
        raise ValueError(f"past has shape {tuple(past.shape)}, state {tuple(state.shape)}.")
    block, warps = min(next_power_of_2(dim), _BLOCK), _WARPS
    alone = min(next_power_of_2(dim), _HELD // next_power_of_2(size))
    if rows >= _MANY and alone >= block and dim % alone == 0:
        block, warps = alone, 1
    programs = heads * triton.cdiv(dim, block)
    if programs > groups and rows * groups > counters.numel():
        raise ValueError(f"{counters.numel()} counters; {rows * groups} are needed.")
    many = scales or (1.0,) * 5
    y = x.new_empty((rows, width)) if norm is None else empty(x, (rows, width), "float32")
    launch(
        _token_kernel,
        (programs, rows),
        *(x, past, state, taps, taps_bias, step_bias, decay, skip, as_bytes(moves), y, counters),
        *(x.stride(0), limits[0], limits[1], out_scale if norm is None else 1.0, *many),
        **{"HEADS": heads, "GROUPS": groups, "DIM": dim, "STATE": size, "TAPS": taps.shape[1]},
        **{"GATED": norm is None or not layer.gated_last, "SCALED": scales is not None},
        **{"BLOCK_D": block, "BLOCK_S": next_power_of_2(size)},
        num_warps=warps,
        pdl=pdl,
    )
    return y if norm is None or leaves_norm else norm_heads(y[None], x[None], layer, pdl)[0]


def norm_heads(y: Any, x: Any, layer: StateLayer, pdl: bool) -> Any:
    """Heads' results, float32 y [B, T, C], normed, in the dtype of projections x [B, T, W]."""
    normed, scale = layer.normed, layer.scales[0] if layer.scales else None
    batch, tokens, width = y.shape
    out = x.new_empty((batch, tokens, width))
    launch(
        _norm_kernel,
        (width // normed * batch * tokens,),
        *(y, x, layer.norm, out, tokens, x.stride(0), x.stride(1)),
        *(layer.eps, layer.out_scale, 1.0 if scale is None else scale),
        **{"WIDTH": width, "NORMED": normed, "GATED": layer.gated_last},
        SCALED=scale is not None,
        BLOCK=next_power_of_2(normed),
        num_warps=min(max(next_power_of_2(normed) // 512, 1), 16),
        pdl=pdl,
    )
    return out
