"""One token of the gated delta rule for each slot, from its projection to its normed result.

arXiv:2412.06464, arXiv:2510.26692. A state is read and written once.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import as_bytes
from .past import MOST_COUNTERS, convolved, gathered, is_last, shift, sigmoid, softplus
from .rows import check_last_axis

LARGEST = 128  # elements of a key, and of a value
_WARPS = 4  # more would sum over keys by shared memory, fewer have no registers for a state


@triton.jit
def log_decay(x, scale, floor, BOUNDED: tl.constexpr):
    """The logarithm of what a state is times, of float32 x, with exp(A) as `scale`."""
    return floor * sigmoid(scale * x) if BOUNDED else -scale * softplus(x)


@triton.jit
def _token_kernel(
    x_ptr, gates_ptr, decays_ptr, past_ptr, state_ptr, taps_ptr, scale_ptr, bias_ptr, norm_ptr,
    moves_ptr, y_ptr, counters_ptr, x_stride, gates_stride, decays_stride, beta_at, eps, floor,
    root, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    TAPS: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, SILU: tl.constexpr,
    DOUBLED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a value head of a slot.

    Where it may start early, all that an earlier step wrote is on its way before it waits.
    """
    let_next_start(PDL)
    SHARING: tl.constexpr = VALUES // KEYS
    CHANNELS: tl.constexpr = 2 * KEYS * KEY + VALUES * VALUE
    head = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    at_k = tl.arange(0, BLOCK_K)
    at_v = tl.arange(0, BLOCK_V)
    in_k = tl.full([BLOCK_K], 1, tl.int1) if BLOCK_K == KEY else at_k < KEY
    in_v = tl.full([BLOCK_V], 1, tl.int1) if BLOCK_V == VALUE else at_v < VALUE
    past_ptr += slot * (TAPS - 1) * CHANNELS
    states = state_ptr + (slot * VALUES + head) * KEY * VALUE
    states += at_k[:, None] * VALUE + at_v[None, :]
    inside = in_k[:, None] & in_v[None, :]
    query = head // SHARING * KEY + at_k
    key = KEYS * KEY + query
    value = 2 * KEYS * KEY + head * VALUE + at_v
    taps = (taps_ptr, None)
    if PDL:
        state = tl.load(states, mask=inside, other=0.0)
        q_before = gathered(past_ptr, taps, query, in_k, CHANNELS, TAPS)
        k_before = gathered(past_ptr, taps, key, in_k, CHANNELS, TAPS)
        v_before = gathered(past_ptr, taps, value, in_v, CHANNELS, TAPS)
    scale = tl.exp(tl.load(scale_ptr + head))
    norm = tl.load(norm_ptr + at_v, mask=in_v, other=0.0)
    if BY_CHANNEL:
        bias = tl.load(bias_ptr + head * KEY + at_k, mask=in_k, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    wait_for_inputs(PDL)
    y_ptr += (slot * VALUES + head) * VALUE + at_v
    if tl.load(moves_ptr + slot) != 0:
        if not PDL:
            state = tl.load(states, mask=inside, other=0.0)
            q_before = gathered(past_ptr, taps, query, in_k, CHANNELS, TAPS)
            k_before = gathered(past_ptr, taps, key, in_k, CHANNELS, TAPS)
            v_before = gathered(past_ptr, taps, value, in_v, CHANNELS, TAPS)
        x_ptr += slot * x_stride
        given_q = tl.load(x_ptr + query, mask=in_k, other=0.0)
        given_k = tl.load(x_ptr + key, mask=in_k, other=0.0)
        given_v = tl.load(x_ptr + value, mask=in_v, other=0.0)
        beta = tl.load(x_ptr + beta_at + head)
        gate = tl.load(gates_ptr + slot * gates_stride + head * VALUE + at_v, mask=in_v, other=0.0)
        decays_ptr += slot * decays_stride
        if BY_CHANNEL:
            decay = tl.load(decays_ptr + head * KEY + at_k, mask=in_k, other=0.0)
        else:
            decay = tl.load(decays_ptr + head)
        q = convolved(given_q, q_before)
        k = convolved(given_k, k_before)
        v = convolved(given_v, v_before)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * root
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        beta = sigmoid(beta.to(tl.float32))
        if DOUBLED:
            beta *= 2.0
        decay = tl.exp(log_decay(decay.to(tl.float32) + bias, scale, floor, BOUNDED))
        new = state.to(tl.float32) * (decay[:, None] if BY_CHANNEL else decay)
        u = beta * (v - tl.sum(new * k[:, None], 0))
        new += k[:, None] * u[None, :]
        y = tl.sum(new * q[:, None], 0)
        tl.store(states, new.to(state_ptr.dtype.element_ty), mask=inside)
        y *= tl.rsqrt(tl.sum(y * y, 0) / VALUE + eps) * norm.to(tl.float32)
        gate = gate.to(tl.float32)
        y *= gate * sigmoid(gate) if SILU else sigmoid(gate)
        tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=in_v)
        tl.debug_barrier()  # all threads have read what came before
        shift(given_v, v_before, past_ptr, value, in_v, CHANNELS, TAPS)
        # Of the heads that share a key the last one to have read what came before writes it.
        if is_last(counters_ptr + slot * KEYS + head // SHARING, SHARING):
            shift(given_q, q_before, past_ptr, query, in_k, CHANNELS, TAPS)
            shift(given_k, k_before, past_ptr, key, in_k, CHANNELS, TAPS)
    else:
        tl.store(y_ptr, tl.zeros([BLOCK_V], y_ptr.dtype.element_ty), mask=in_v)


def serves(key_dim: int, value_dim: int, taps: int) -> bool:
    """True if the kernels take heads of so many elements, behind a convolution of so many taps."""
    return max(key_dim, value_dim) <= LARGEST and taps > 1


def counts(rows: int, keys: int, values: int) -> bool:
    """True if there are counters for so many slots."""
    return keys == values or rows * keys <= MOST_COUNTERS


class DeltaLayer(NamedTuple):
    """What a layer's kernels know of it, for tokens and for sequences alike.

    Of `keys` and `values` heads with so many elements each; a projection has a number of each head
    from `beta_at` on. `taps` [C, taps] and `norm` [value_dim] are weights; float32 `decay_scale`
    [values] and `decay_bias`, as many as decays. `gates` [..., values * value_dim] and `decays`
    [..., values] or [..., values * key_dim], where the projection does not have them. The rest as
    in `blocks.delta_rule`.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    beta_at: int
    taps: Any
    decay_scale: Any
    decay_bias: Any
    norm: Any
    eps: float
    gates: Any = None
    decays: Any = None
    floor: float | None = None
    doubled: bool = False
    gate: str = "silu"


def delta_token(
    x: Any,
    layer: DeltaLayer,
    past: Any,
    state: Any,
    moves: Any,
    *,
    counters: Any,
    pdl: bool = False,
) -> Any:
    """What a token of each slot gives, [N, values * value_dim], from its projection x [N, W].

    x has queries, keys and values, then gates and what decays are made of, if `layer` has these
    not. `past` [N', taps - 1, C] and `state` [N', values, key_dim, value_dim], float32 or 16 bits,
    N' >= N, are written in the slots that bool `moves` [N] names; others give zeros. int32
    `counters`, N * keys at least, are zeros, and are left so.
    """
    check_last_axis("x", x)
    keys, values, key_dim, value_dim, beta_at = layer[:5]
    taps, decay_scale, decay_bias, norm, eps = layer[5:10]
    gates, decays, floor, doubled, gate = layer[10:]
    channels, rows = 2 * keys * key_dim + values * value_dim, len(x)
    by_channel = decay_bias.numel() != values
    width = values * value_dim
    if gates is None:
        gates = x.narrow(1, channels, width)
    if decays is None:
        decays = x.narrow(1, beta_at + values, decay_bias.numel())
    if past.shape[2] != channels or not (past.is_contiguous() and state.is_contiguous()):
        raise ValueError(f"past has shape {tuple(past.shape)}; [N, taps - 1, {channels}] expected.")
    if values > keys and rows * keys > counters.numel():
        raise ValueError(f"{counters.numel()} counters; {rows * keys} are needed.")
    y = x.new_empty((rows, width))
    launch(
        _token_kernel,
        (values, rows),
        *(x, gates, decays, past, state, taps, decay_scale, decay_bias, norm),
        *(as_bytes(moves), y, counters, x.stride(0), gates.stride(0), decays.stride(0)),
        *(beta_at, eps, floor or 0.0, key_dim**-0.5),
        **{"KEYS": keys, "VALUES": values, "KEY": key_dim, "VALUE": value_dim},
        **{"TAPS": taps.shape[1], "BY_CHANNEL": by_channel, "BOUNDED": floor is not None},
        **{"SILU": gate == "silu", "DOUBLED": doubled},
        **{"BLOCK_K": next_power_of_2(key_dim), "BLOCK_V": next_power_of_2(value_dim)},
        num_warps=_WARPS,
        pdl=pdl,
    )
    return y
