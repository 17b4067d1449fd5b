"""One token of each slot, convolved with what came before.

Gated, as in HF's `Lfm2ShortConv`, it is a product of two parts of the token, and what comes of it
is times the third part; else silu is taken, as before a scan.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
from typing import Any

import triton
import triton.language as tl

from .launch import launch, let_next_start, wait_for_inputs
from .operands import as_bytes
from .past import sigmoid
from .rows import check_last_axis

_BLOCK, _WARPS = 256, 1  # eight channels of a thread, whose loads are of 16 bytes


@triton.jit
def _token_kernel(
    x_ptr, past_ptr, taps_ptr, bias_ptr, moves_ptr, y_ptr, x_stride, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK channels of a slot, each of them a thread's own."""
    let_next_start(PDL)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    slot = tl.program_id(1).to(tl.int64)
    last = tl.load(taps_ptr + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    moving = inside & (tl.load(moves_ptr + slot + channel * 0) != 0)
    x_ptr += slot * x_stride + channel
    past_ptr += slot * (TAPS - 1) * WIDTH + channel
    given = tl.load(x_ptr, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(x_ptr + WIDTH, mask=inside, other=0.0).to(tl.float32)
        third = tl.load(x_ptr + 2 * WIDTH, mask=inside, other=0.0)
        given = (given.to(tl.float32) * third.to(tl.float32)).to(given.dtype)
    for i in tl.static_range(TAPS - 1):
        before = tl.load(past_ptr + i * WIDTH, mask=moving, other=0.0)
        weight = tl.load(taps_ptr + channel * TAPS + i, mask=inside, other=0.0)
        total += before.to(tl.float32) * weight.to(tl.float32)
        if i > 0:
            tl.store(past_ptr + (i - 1) * WIDTH, before, mask=moving)
    total += given.to(tl.float32) * last
    tl.store(past_ptr + (TAPS - 2) * WIDTH, given, mask=moving)
    total *= gate if GATED else sigmoid(total)
    y = tl.where(moving, total, 0.0)
    tl.store(y_ptr + slot * WIDTH + channel, y.to(y_ptr.dtype.element_ty), mask=inside)


def conv_token(
    x: Any,
    past: Any,
    moves: Any,
    *,
    taps: Any,
    taps_bias: Any = None,
    gated: bool = True,
    pdl: bool = False,
) -> Any:
    """Convolve a token of each slot: [N, C] of its projection x [N, W].

    `gated` x has what is multiplied, the gate and the other factor, W = 3 C; else the first C
    elements are convolved, and silu is taken. `past` [N', taps - 1, C], N' >= N, is written in the
    slots that bool `moves` [N] names; others give zeros. `taps` [C, taps], two or more, with a bias
    [C].
    """
    check_last_axis("x", x)
    rows, width = len(x), past.shape[2]
    wide = x.shape[1] == 3 * width if gated else x.shape[1] >= width
    if not wide or past.shape[1] < 1 or not past.is_contiguous():
        raise ValueError(f"x has shape {tuple(x.shape)}, past {tuple(past.shape)}.")
    y = x.new_empty((rows, width))
    launch(
        _token_kernel,
        (triton.cdiv(width, _BLOCK), rows),
        *(x, past, taps, taps_bias, as_bytes(moves), y, x.stride(0)),
        **{"WIDTH": width, "TAPS": taps.shape[1], "GATED": gated, "BLOCK": _BLOCK},
        num_warps=_WARPS,
        pdl=pdl,
    )
    return y
