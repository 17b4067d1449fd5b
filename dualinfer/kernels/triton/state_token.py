"""One token of Mamba-2 for each slot, from its projection to its normed result.

arXiv:2405.21060. A state is read and written once; norms over several heads are a launch behind.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import fetch_ahead, launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import as_bytes, empty
from .past import MOST_COUNTERS, convolved, is_last, scaled, shift, sigmoid, softplus
from .rows import check_last_axis

_WARPS = 4
_PROGRAMS = 512  # up to so many, parts of heads are programs: a few would leave a GPU idle
LARGEST = 16384  # elements of a head's state, and of what is normed together


@triton.jit
def _token_kernel(
    x_ptr, past_ptr, state_ptr, taps_ptr, taps_bias_ptr, step_bias_ptr, decay_ptr, skip_ptr,
    moves_ptr, y_ptr, counters_ptr, x_stride, least, most, out_scale, gate_scale, x_scale, b_scale,
    c_scale, step_scale, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    STATE: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_D elements of a head of a slot."""
    let_next_start(PDL)
    SHARING: tl.constexpr = HEADS // GROUPS
    WIDTH: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = WIDTH + 2 * GROUPS * STATE
    PARTS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    head = tl.program_id(0) // PARTS
    slot = tl.program_id(1).to(tl.int64)
    first_d = tl.program_id(0) % PARTS * BLOCK_D
    at_d = first_d + tl.arange(0, BLOCK_D)
    at_s = tl.arange(0, BLOCK_S)
    in_d = at_d < DIM
    in_s = at_s < STATE
    rate = tl.exp(tl.load(decay_ptr + head))
    step_bias = tl.load(step_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    BYTES: tl.constexpr = state_ptr.dtype.element_ty.primitive_bitwidth // 8
    if PDL and FETCH > 0:  # the state, by as many threads as there are
        line = tl.arange(0, FETCH)
        first = state_ptr + ((slot * HEADS + head) * DIM + first_d) * STATE
        LINE: tl.constexpr = BLOCK_D * STATE // FETCH
        fetch_ahead(first + line * LINE, line >= 0, LINE * BYTES)
    wait_for_inputs(PDL)
    y_ptr += slot * WIDTH + head * DIM + at_d
    if tl.load(moves_ptr + slot) != 0:
        x_ptr += slot * x_stride
        given_ptr = x_ptr + WIDTH
        past_ptr += slot * (TAPS - 1) * CHANNELS
        states = state_ptr + (slot * HEADS + head) * DIM * STATE
        states += at_d[:, None] * STATE + at_s[None, :]
        inside = in_d[:, None] & in_s[None, :]
        state = tl.load(states, mask=inside, other=0.0).to(tl.float32)
        own = head * DIM + at_d
        of_b = WIDTH + head // SHARING * STATE + at_s
        of_c = GROUPS * STATE + of_b
        x = convolved(given_ptr, past_ptr, taps_ptr, taps_bias_ptr, own, in_d, x_scale, CHANNELS,
                      TAPS, SCALED)  # fmt: skip
        b = convolved(given_ptr, past_ptr, taps_ptr, taps_bias_ptr, of_b, in_s, b_scale, CHANNELS,
                      TAPS, SCALED)  # fmt: skip
        c = convolved(given_ptr, past_ptr, taps_ptr, taps_bias_ptr, of_c, in_s, c_scale, CHANNELS,
                      TAPS, SCALED)  # fmt: skip
        number = scaled(tl.load(given_ptr + CHANNELS + head), step_scale, SCALED).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(number + step_bias), least), most)
        state = state * tl.exp(-step * rate) + (x * step)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + x * skip
        tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)
        if GATED:
            gate = scaled(tl.load(x_ptr + own, mask=in_d, other=0.0), gate_scale, SCALED)
            gate = gate.to(tl.float32)
            y *= gate * sigmoid(gate) * out_scale
        tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=in_d)
        shift(given_ptr, past_ptr, own, in_d, x_scale, CHANNELS, TAPS, SCALED)
        if is_last(counters_ptr + slot * GROUPS + head // SHARING, SHARING * PARTS):
            shift(given_ptr, past_ptr, of_b, in_s, b_scale, CHANNELS, TAPS, SCALED)
            shift(given_ptr, past_ptr, of_c, in_s, c_scale, CHANNELS, TAPS, SCALED)
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


def counts(rows: int, heads: int, groups: int) -> bool:
    """True if there are counters for so many slots."""
    return heads == groups or rows * groups <= MOST_COUNTERS


def _elements(rows: int, heads: int, dim: int) -> int:
    """The elements of a head that a program has."""
    block = next_power_of_2(dim)
    while block > 16 and 2 * rows * heads * triton.cdiv(dim, block) <= _PROGRAMS:
        block //= 2
    return block


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
    block = _elements(rows, heads, dim)
    shared = heads * triton.cdiv(dim, block) > groups
    if shared and rows * groups > counters.numel():
        raise ValueError(f"{counters.numel()} counters; {rows * groups} are needed.")
    many, lines = scales or (1.0,) * 5, 16 * 32 * _WARPS  # of a thread each, 16 bytes at least
    y = x.new_empty((rows, width)) if norm is None else empty(x, (rows, width), "float32")
    launch(
        _token_kernel,
        (heads * triton.cdiv(dim, block), rows),
        *(x, past, state, taps, taps_bias, step_bias, decay, skip, as_bytes(moves), y, counters),
        *(x.stride(0), limits[0], limits[1], out_scale if norm is None else 1.0, *many),
        **{"HEADS": heads, "GROUPS": groups, "DIM": dim, "STATE": size, "TAPS": taps.shape[1]},
        **{"GATED": norm is None or not layer.gated_last, "SCALED": scales is not None},
        **{"BLOCK_D": block, "BLOCK_S": next_power_of_2(size)},
        FETCH=0 if dim % block or block * size * state.element_size() % lines else 32 * _WARPS,
        num_warps=_WARPS,
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
