"""One token of a gated short convolution for each slot, from its projection to what is projected.

HF's `Lfm2ShortConv`: a product of two parts of the token, convolved with what came before, times
the third part.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from typing import Any

import triton
import triton.language as tl

from .launch import launch, let_next_start, wait_for_inputs
from .operands import as_bytes
from .rows import check_last_axis

_BLOCK, _WARPS = 256, 1  # eight channels of a thread, whose loads are of 16 bytes


@triton.jit
def _token_kernel(
    x_ptr, past_ptr, taps_ptr, bias_ptr, moves_ptr, y_ptr, x_stride, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    first = tl.load(x_ptr, mask=inside, other=0.0)
    gate = tl.load(x_ptr + WIDTH, mask=inside, other=0.0).to(tl.float32)
    third = tl.load(x_ptr + 2 * WIDTH, mask=inside, other=0.0)
    given = (first.to(tl.float32) * third.to(tl.float32)).to(first.dtype)
    for i in tl.static_range(TAPS - 1):
        before = tl.load(past_ptr + i * WIDTH, mask=moving, other=0.0)
        weight = tl.load(taps_ptr + channel * TAPS + i, mask=inside, other=0.0)
        total += before.to(tl.float32) * weight.to(tl.float32)
        if i > 0:
            tl.store(past_ptr + (i - 1) * WIDTH, before, mask=moving)
    total += given.to(tl.float32) * last
    tl.store(past_ptr + (TAPS - 2) * WIDTH, given, mask=moving)
    y = tl.where(moving, gate * total, 0.0)
    tl.store(y_ptr + slot * WIDTH + channel, y.to(y_ptr.dtype.element_ty), mask=inside)


def conv_token(
    x: Any,
    past: Any,
    moves: Any,
    *,
    taps: Any,
    taps_bias: Any = None,
    counters: Any = None,
    pdl: bool = False,
) -> Any:
    """Convolve and gate a token of each slot: [N, C] of its projection x [N, 3 C].

    x has what is multiplied, the gate and the other factor. `past` [N', taps - 1, C], N' >= N, is
    written in the slots that bool `moves` [N] names; others give zeros. `taps` [C, taps], two or
    more, with a bias [C]. No `counters` are needed: programs share nothing.
    """
    check_last_axis("x", x)
    rows, width = len(x), past.shape[2]
    if x.shape[1] != 3 * width or past.shape[1] < 1 or not past.is_contiguous():
        raise ValueError(f"x has shape {tuple(x.shape)}, past {tuple(past.shape)}.")
    y = x.new_empty((rows, width))
    launch(
        _token_kernel,
        (triton.cdiv(width, _BLOCK), rows),
        *(x, past, taps, taps_bias, as_bytes(moves), y, x.stride(0)),
        **{"WIDTH": width, "TAPS": taps.shape[1], "BLOCK": _BLOCK},
        num_warps=_WARPS,
        pdl=pdl,
    )
    return y
