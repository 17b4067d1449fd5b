"""The convolution before a recurrence: what came before is kept in the cache."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from .launch import let_next_start, wait_for_inputs

TILE, COLUMNS = 32, 128  # tokens and channels of a program that convolves
MOST_COUNTERS = 4096  # slots times the parts of a token that several programs read


@triton.jit
def sigmoid(x):
    """The logistic function of float32 x."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32 x."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def scaled(x, scale, SCALED: tl.constexpr):
    """x times a factor, rounded as x is; as it is where that is not asked for."""
    return (x.to(tl.float32) * scale).to(x.dtype) if SCALED else x


@triton.jit
def gathered(past_ptr, taps, channel, inside, CHANNELS, TAPS: tl.constexpr):
    """What some channels have before their token comes, for `convolved` and `shift`.

    Their sum so far, float32; the token's own tap and what came before, oldest first. `taps` are
    pointers to taps and, or None, a bias.
    """
    taps_ptr, bias_ptr = taps
    last = tl.load(taps_ptr + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros_like(last)
    if bias_ptr is not None:
        total = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    found = (last,)
    for i in tl.static_range(TAPS - 1):
        before = tl.load(past_ptr + i * CHANNELS + channel, mask=inside, other=0.0)
        weight = tl.load(taps_ptr + channel * TAPS + i, mask=inside, other=0.0)
        total += before.to(tl.float32) * weight.to(tl.float32)
        found += (before,)
    return total, found


@triton.jit
def convolved(x, before):
    """silu of channels convolved up to their token x, float32; `before` is what was `gathered`."""
    total, found = before
    total += x.to(tl.float32) * found[0]
    return total * sigmoid(total)


@triton.jit
def shift(x, before, past_ptr, channel, inside, CHANNELS, TAPS: tl.constexpr):
    """The token x becomes the last of what came before; of two taps or more.

    All threads that hold these channels, in all programs, have `gathered` them.
    """
    _, found = before
    for i in tl.static_range(TAPS - 2):
        tl.store(past_ptr + i * CHANNELS + channel, found[i + 2], mask=inside)
    tl.store(past_ptr + (TAPS - 2) * CHANNELS + channel, x, mask=inside)


@triton.jit
def is_last(counter_ptr, SHARING: tl.constexpr):
    """True in the last of SHARING programs to come here, which have all read what they share."""
    last = True
    if SHARING > 1:
        tl.debug_barrier()
        last = tl.atomic_add(counter_ptr, 1) == SHARING - 1
        if last:
            tl.store(counter_ptr, 0)
    return last


@triton.jit
def is_seen(mask_ptr, at, inside):
    """Which tokens a row's mask, with its own at `at`, shows."""
    if mask_ptr is not None:
        inside = inside & (tl.load(mask_ptr + at, mask=inside, other=0) != 0)
    return inside


@triton.jit
def slot_of(slots_ptr, starts_ptr, b, slots):
    """The slot of a row, 1 if it is there, and 1 if the row goes on from what that has; else 0."""
    slot = tl.load(slots_ptr + b).to(tl.int64)
    there = tl.where((slot >= 0) & (slot < slots), 1, 0)
    goes_on = there * 0
    if starts_ptr is not None:
        goes_on = there * tl.where(tl.load(starts_ptr + b) > 0, 1, 0)
    return slot * there, there, goes_on


@triton.jit
def convolved_tile(
    total, x_ptr, mask_ptr, past_ptr, slots_ptr, starts_ptr, taps_ptr, b, first, row, channel,
    inside, x_row, x_stride, mask_row, mask_stride, tokens, slots, scale, CHANNELS,
    TAPS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """silu of `total` and some channels [1, C] convolved over time, float32 [R, C].

    The tokens are those of row b at `first` and the int `row` [R, 1] behind it; what came before
    a row that goes on is in its slot's past.
    """
    x_ptr += b * x_row + first.to(tl.int64) * x_stride
    for i in tl.static_range(TAPS):
        by = row - (TAPS - 1) + i
        at = first + by
        in_mask = b * mask_row + at * mask_stride
        shown = is_seen(mask_ptr, in_mask, (at >= 0) & (at < tokens))
        near = tl.load(x_ptr + by * x_stride + channel, mask=shown & inside, other=0.0)
        near = scaled(near, scale, SCALED).to(tl.float32)
        if past_ptr is not None:
            slot, _, goes_on = slot_of(slots_ptr, starts_ptr, b, slots)
            before = past_ptr + (slot * (TAPS - 1) + at + TAPS - 1) * CHANNELS + channel
            near += tl.load(before, mask=(at * goes_on < 0) & inside, other=0.0).to(tl.float32)
        weight = tl.load(taps_ptr + channel * TAPS + i, mask=inside, other=0.0)
        total += near * weight.to(tl.float32)
    return total * sigmoid(total)


@triton.jit
def convolve_kernel(
    x_ptr, mask_ptr, past_ptr, slots_ptr, starts_ptr, taps_ptr, bias_ptr, y_ptr, x_row, x_stride,
    mask_row, mask_stride, tokens, slots, x_scale, b_scale, c_scale, FIRST: tl.constexpr,
    WIDTH: tl.constexpr, SHARED: tl.constexpr, TAPS: tl.constexpr, SCALED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK channels of TILE tokens of a row, whose channels begin at FIRST."""
    let_next_start(PDL)
    CHANNELS: tl.constexpr = WIDTH + 2 * SHARED
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    tiles = tl.cdiv(tokens, TILE)
    number = tl.program_id(0) // blocks
    b = (number // tiles).to(tl.int64)
    first = number % tiles * TILE
    row = tl.arange(0, TILE)[:, None]
    t = first + row
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < CHANNELS
    scale = tl.where(channel < WIDTH, x_scale, tl.where(channel < WIDTH + SHARED, b_scale, c_scale))
    total = tl.zeros([TILE, BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    total = convolved_tile(
        total, x_ptr + FIRST, mask_ptr, past_ptr, slots_ptr, starts_ptr, taps_ptr, b, first, row,
        channel, inside, x_row, x_stride, mask_row, mask_stride, tokens, slots, scale, CHANNELS,
        TAPS, SCALED,
    )  # fmt: skip
    y_ptr += (b * tokens + first) * CHANNELS + row * CHANNELS + channel
    tl.store(y_ptr, total.to(y_ptr.dtype.element_ty), mask=(t < tokens) & inside)


@triton.jit
def keep(
    x_ptr, mask_ptr, past_ptr, channel, inside, length, goes_on, x_stride, mask_stride, scale,
    CHANNELS, TAPS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Some channels of the last TAPS - 1 of a row's first `length` tokens; of those before it."""
    for i in tl.static_range(TAPS - 1):
        at = length - (TAPS - 1) + i
        here = inside & (at + channel * 0 >= 0)
        x = tl.load(x_ptr + at.to(tl.int64) * x_stride + channel, mask=here, other=0.0)
        x = scaled(x, scale, SCALED)
        if mask_ptr is not None:
            shown = tl.load(mask_ptr + at * mask_stride + channel * 0, mask=here, other=0)
            x *= shown.to(x.dtype)
        before = inside & (at * goes_on + channel * 0 < 0)
        old = tl.load(past_ptr + (at + TAPS - 1) * CHANNELS + channel, mask=before, other=0.0)
        tl.debug_barrier()
        tl.store(past_ptr + i * CHANNELS + channel, tl.where(at < 0, old, x), mask=inside)
