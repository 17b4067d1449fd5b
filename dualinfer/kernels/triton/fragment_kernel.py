"""Device side of quantized.py for few rows: codes become the matrix units' operand in registers.

An operand in registers is a fragment: of 16 rows of codes and 16 columns, lane l of a warp holds
rows l / 4 and l / 4 + 8 of columns that depend on l % 4. A lane loads what it holds itself: 16
bytes of a row, its quad. Four quads of each of 16 rows are a chunk, which a warp multiplies with
the same columns of x, in an order that only the codes' places in their words decide. So no shared
memory is passed, and no code moves from one lane to another.

The products of a chunk have at least 8 columns where x may have one row. The other columns serve
other chunks and other groups of a chunk (its parts): x of chunk s lies in the columns of slot s,
and what a chunk gives in the columns of other slots is left out.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from .launch import dot, let_next_start, wait_for_inputs
from .linear_kernels import _finish_tile
from .quantized_kernels import _input, _of_rows, _rows_of, _scale, _statistics

# Before 3.8, Triton gives a lane four columns of an operand side by side, not two.
_FOUR: tl.constexpr = tl.constexpr(
    tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8)
)
# x is multiplied by it where values of floating codes are bfloat16s near the smallest there are.
_RAISED: tl.constexpr = tl.constexpr(2.0**96)


@triton.constexpr_function
def _raises(codes, half):
    """Whether x is multiplied by _RAISED; `half` says that it is of float16."""
    return not half and codes.startswith("fp")


@triton.constexpr_function
def _left(codes, half):
    """What the values of fragments leave to the scales."""
    if half:
        return {"fp8_e4m3": 2.0**8, "fp4_e2m1": 2.0**14}.get(codes, 1.0)
    exponents = {"fp8_e4m3": 120, "fp8_e5m2": 112, "fp4_e2m1": 126}
    return 2.0 ** (exponents[codes] - 96) if codes in exponents else 1.0


@triton.constexpr_function
def _added(codes, half):
    """What the values of integer codes have too much."""
    if codes.endswith("int4"):
        return (1024 if half else 128) + (8 if codes == "int4" else 0)
    if codes.endswith("int8"):
        return (1024 if half else 17 * 128) + (128 if codes == "int8" else 0)
    return 0


@triton.jit
def _lanes(B: tl.constexpr):
    """Of each lane of B warps [32 B]: its warp, its row of 8, its quad of 4."""
    i = tl.arange(0, 32 * B)
    return i // 32, (i // 4) % 8, i % 4


@triton.jit
def _rows(block, tile, features, M: tl.constexpr, GATED: tl.constexpr, B: tl.constexpr):
    """First and second rows [32 B] of a tile of a block, and which of them there are."""
    _, row, _ = _lanes(B)
    own = (block * M + tile) * (8 if GATED else 16) + row
    if GATED:
        return own, own + features, own < features, own < features
    else:
        return own, own + 8, own < features, own + 8 < features


@triton.jit
def _codes(
    weight_ptr, rows, inside, chunk, B: tl.constexpr, ROW: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Words [32 B, 4] of rows of ROW words."""
    _, _, q = _lanes(B)
    word = (chunk * 16 + q * 4)[:, None] + tl.arange(0, 4)[None, :]
    mask = inside[:, None]
    if MASKED:
        mask = mask & (word < ROW)
    at = weight_ptr + rows.to(tl.int64)[:, None] * ROW + word
    return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _lying(
    ptr, rows, inside, chunk, E: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What blocks have [32 B], for columns 2 q + E of the products of SLOTS chunks."""
    _, _, q = _lanes(B)
    n = (2 * q + E) % (PARTS * SLOTS)
    if BLOCK[1] == 0 or BLOCK[1] >= K:
        COUNT: tl.constexpr = 1
        group = n * 0
    elif BLOCK[1] <= CHUNK:
        COUNT: tl.constexpr = (K + BLOCK[1] - 1) // BLOCK[1]
        group = chunk * PARTS + n
    else:
        COUNT: tl.constexpr = (K + BLOCK[1] - 1) // BLOCK[1]
        group = (chunk + n) // (BLOCK[1] // CHUNK)
    first = rows.to(tl.int64) // BLOCK[0] * COUNT if BLOCK[0] else rows * 0
    return tl.load(ptr + first + group, mask=inside & (group < COUNT), other=0)


@triton.jit
def _beside(
    ptr, lo, hi, lo_in, hi_in, chunk, B: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What blocks have, [32 B, 2, 2]: of both rows of a lane, and of both columns."""
    lo0 = _lying(ptr, lo, lo_in, chunk, 0, B, CHUNK, PARTS, SLOTS, K, BLOCK)
    hi0 = _lying(ptr, hi, hi_in, chunk, 0, B, CHUNK, PARTS, SLOTS, K, BLOCK)
    s = tl.join(lo0, hi0)
    if PARTS * SLOTS > 1:
        lo1 = _lying(ptr, lo, lo_in, chunk, 1, B, CHUNK, PARTS, SLOTS, K, BLOCK)
        hi1 = _lying(ptr, hi, hi_in, chunk, 1, B, CHUNK, PARTS, SLOTS, K, BLOCK)
        return tl.join(s, tl.join(lo1, hi1))
    else:
        return tl.join(s, s)


@triton.jit
def _as_products(s, B: tl.constexpr, N: tl.constexpr):
    """`_beside` as the products [B, 16, N] lie: they repeat every 8 columns."""
    s = tl.reshape(s, (B, 8, 4, 2, 2))  # row, q, second row, second column
    s = tl.reshape(tl.permute(s, (0, 3, 1, 2, 4)), (B, 16, 1, 8))
    return tl.reshape(tl.broadcast_to(s, (B, 16, N // 8, 8)), (B, 16, N))


@triton.jit
def _fetch(
    weight_ptr, scale_ptr, zero_ptr, block, turn, features,
    B: tl.constexpr, M: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr,
    MASKED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Codes, scales and zeros of one turn of a block, in one tuple."""
    warp, _, _ = _lanes(B)
    chunk = (turn * B + warp) * T
    found = ()
    for m in tl.static_range(M):
        lo, hi, lo_in, hi_in = _rows(block, m, features, M, GATED, B)
        for t in tl.static_range(T):
            low = _codes(weight_ptr, lo, lo_in, chunk + t, B, ROW, MASKED)
            high = _codes(weight_ptr, hi, hi_in, chunk + t, B, ROW, MASKED)
            found += (tl.join(low, high),)
    for m in tl.static_range(M):
        lo, hi, lo_in, hi_in = _rows(block, m, features, M, GATED, B)
        for t in tl.static_range(0, T, SLOTS):
            if BLOCK[1]:
                found += (
                    _beside(
                        scale_ptr,
                        lo,
                        hi,
                        lo_in,
                        hi_in,
                        chunk + t,
                        *(B, CHUNK, PARTS, SLOTS, K, BLOCK),
                    ),
                )
            if zero_ptr is not None:
                found += (
                    _beside(
                        zero_ptr,
                        lo,
                        hi,
                        lo_in,
                        hi_in,
                        chunk + t,
                        *(B, CHUNK, PARTS, SLOTS, K, BLOCK),
                    ),
                )
    return found


@triton.jit
def _x8(
    x_ptr, norm, chunk, first, count, stride, EIGHT: tl.constexpr, B: tl.constexpr,
    BITS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, RAISES: tl.constexpr,
):  # fmt: skip
    """[32 B, 8] of x: eight values of each quad, for columns `first` + row of the products."""
    _, row, q = _lanes(B)
    PER: tl.constexpr = 128 // BITS
    n = first + row
    own = n // (PARTS * SLOTS)
    e = (q * PER + 8 * EIGHT)[:, None] + tl.arange(0, 8)[None, :]
    k = ((chunk + n // PARTS % SLOTS) * (4 * PER))[:, None] + e
    mask = (own < count)[:, None] & (k < K)
    if PARTS > 1:
        mask = mask & (e // (4 * PER // PARTS) == (n % PARTS)[:, None])
    if NORM is not None:  # of the one row
        x = _input(x_ptr, k, norm, K, NORM)
        if NORM != "layer":
            x *= norm[3]
        x = tl.where(mask, x, 0.0)
    else:
        x = tl.load(x_ptr + own.to(tl.int64)[:, None] * stride + k, mask=mask, other=0.0)
    if RAISES:
        x = x.to(tl.float32) * _RAISED
    return x.to(x_ptr.dtype.element_ty)


@triton.jit
def _x_of_8(
    x_ptr, norm, chunk, first, count, stride, B: tl.constexpr, BITS: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    RAISES: tl.constexpr,
):  # fmt: skip
    """[B, chunk, 8] of x, in the order of `_operand`."""
    about = (x_ptr, norm, chunk, first, count, stride)
    x0 = _x8(*about, 0, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES))
    x1 = _x8(*about, 1, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES))
    if BITS == 8:
        x = tl.reshape(tl.join(x0, x1), (B, 8, 4, 2, 2, 2, 2))  # n, q, c0, j1, j0, c1
        x = tl.permute(x, (0, 6, 3, 2, 5, 4, 1) if _FOUR else (0, 6, 3, 5, 2, 4, 1))
        return tl.reshape(x, (B, 64, 8))
    else:
        x2 = _x8(*about, 2, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES))
        x3 = _x8(*about, 3, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES))
        x = tl.join(tl.join(x0, x2), tl.join(x1, x3))
        x = tl.reshape(x, (B, 8, 4, 2, 2, 2, 2, 2))  # n, q, j0, c1, c0, j2, j1
        x = tl.permute(x, (0, 7, 3, 4, 2, 5, 6, 1) if _FOUR else (0, 7, 3, 4, 5, 2, 6, 1))
        return tl.reshape(x, (B, 128, 8))


@triton.jit
def _x(
    x_ptr, norm, chunk, count, stride, N: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    RAISES: tl.constexpr,
):  # fmt: skip
    """[B, chunk, N] of x."""
    x = _x_of_8(x_ptr, norm, chunk, 0, count, stride, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES))
    if N > 8:
        other = _x_of_8(
            x_ptr, norm, chunk, 8, count, stride, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES)
        )
        if N == 32:
            third = _x_of_8(
                x_ptr, norm, chunk, 16, count, stride, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES)
            )
            fourth = _x_of_8(
                x_ptr, norm, chunk, 24, count, stride, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES)
            )
            x = tl.permute(tl.join(tl.join(x, third), tl.join(other, fourth)), (0, 1, 3, 4, 2))
        else:
            x = tl.permute(tl.join(x, other), (0, 1, 3, 2))
        x = tl.reshape(x, (B, 512 // BITS, N))
    return x


@triton.jit
def _two(y, HALF: tl.constexpr):
    """The halves of words as two values, last axis."""
    dtype: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    low = (y & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (y >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _pair(w, J: tl.constexpr, mask, CODES: tl.constexpr, UPPER: tl.constexpr, HALF: tl.constexpr):
    """What part J of the halves of words means, but for `_added` and `_left`, two values.

    `mask` is 0x000F000F, in a register; see `quantized_kernels._nibble`. Of codes of 8 bits that
    a bfloat16 cannot hold, UPPER says which 4 bits are wanted.
    """
    if CODES == "int4" or CODES == "uint4":
        y = ((w >> (4 * J)) & mask) | (0x64006400 if HALF else 0x43004300)
    elif CODES == "fp4_e2m1":
        t = w << (12 - 4 * J)
        if HALF:
            y = (t & 0x80008000) | ((t >> 3) & 0x0E000E00)
        elif J < 2:
            y = (t & 0x80008000) | ((w << (6 - 4 * J)) & 0x01C001C0)
        else:
            y = (t & 0x80008000) | ((w >> (4 * J - 6)) & 0x01C001C0)
    elif CODES == "int8" or CODES == "uint8":
        # The sign of a signed code is turned, which adds 128.
        if HALF:
            y = ((w >> (8 * J)) & 0x00FF00FF) ^ (0x64806480 if CODES == "int8" else 0x64006400)
        elif UPPER:
            y = ((w >> (8 * J + 4)) & mask) ^ (0x43084308 if CODES == "int8" else 0x43004300)
        else:
            y = ((w >> (8 * J)) & mask) | 0x43004300
    else:
        t = w if J else w << 8
        if CODES == "fp8_e4m3":
            meant = (t >> 1) & 0x3F803F80 if HALF else (t >> 4) & 0x07F007F0
        else:
            meant = t & 0x7F007F00 if HALF else (t >> 3) & 0x0FE00FE0
        y = (t & 0x80008000) | meant
    return _two(y, HALF)


@triton.jit
def _operand(
    w, mask, B: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, UPPER: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Words [32 B, 4, 2] as values [B, 16, chunk]."""
    if BITS == 8:
        v = tl.join(_pair(w, 0, mask, CODES, UPPER, HALF), _pair(w, 1, mask, CODES, UPPER, HALF))
        v = tl.reshape(v, (B, 8, 4, 2, 2, 2, 2, 2))  # row, q, c1, c0, second row, j1, j0
        v = tl.permute(v, (0, 5, 1, 3, 4, 2, 7, 6) if _FOUR else (0, 5, 1, 3, 4, 7, 2, 6))
        return tl.reshape(v, (B, 16, 64))
    else:
        even = tl.join(_pair(w, 0, mask, CODES, UPPER, HALF), _pair(w, 2, mask, CODES, UPPER, HALF))
        odd = tl.join(_pair(w, 1, mask, CODES, UPPER, HALF), _pair(w, 3, mask, CODES, UPPER, HALF))
        # row, q, c1, c0, second row, j2, j1, j0
        v = tl.reshape(tl.join(even, odd), (B, 8, 4, 2, 2, 2, 2, 2, 2))
        v = tl.permute(v, (0, 5, 1, 7, 8, 3, 2, 4, 6) if _FOUR else (0, 5, 1, 7, 8, 3, 4, 2, 6))
        return tl.reshape(v, (B, 16, 128))


@triton.jit
def _chunk(
    w, x, zero, mask, B: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Products of a chunk of codes with x, [B, 16, N]."""
    d = dot(_operand(w, mask, B, CODES, BITS, False, HALF), x, zero)
    if BITS == 8 and not HALF and not CODES.startswith("fp"):
        d += dot(_operand(w, mask, B, CODES, BITS, True, HALF), x, zero) * 16.0
    return d


@triton.jit
def fragment_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, residual_ptr, norm_weight_ptr,
    norm_bias_ptr, y_ptr, count, features, x_stride, residual_stride, eps, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, B: tl.constexpr, M: tl.constexpr, T: tl.constexpr, TURNS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [count, features] of x [count, K]; a program goes through blocks of M tiles of results.

    Each of its B warps sums T chunks a turn, of all rows of a block, and fetches the next ones
    while it does. N columns of products are those of the rows of x, of SLOTS chunks of each and
    of PARTS groups of a chunk. Where TURNS is 1, x stays in registers. A norm is of one row.
    """
    let_next_start(PDL)
    HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    CHUNK: tl.constexpr = 512 // BITS
    ROW: tl.constexpr = (K + 31) // 32 * 4 if BITS == 4 else K // 4
    MASKED: tl.constexpr = ROW % (B * T * TURNS * 16) != 0
    TILE: tl.constexpr = 8 if GATED else 16
    F: tl.constexpr = T // SLOTS
    ADDED: tl.constexpr = _added(CODES, HALF)
    EACH: tl.constexpr = (1 if BLOCK[1] else 0) + (1 if zero_ptr is not None else 0)
    RAISES: tl.constexpr = _raises(CODES, HALF)
    arrays = (weight_ptr, scale_ptr, zero_ptr)
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    mask = mask.to(tl.uint32)
    # Codes and scales are on their way before the kernel in front has ended.
    held = _fetch(
        *arrays, first, 0, features, *(B, M, T, CHUNK, PARTS, SLOTS, K, BLOCK, ROW, MASKED, GATED)
    )
    wait_for_inputs(PDL)
    mean = 0.0
    factor = 1.0
    if NORM is not None:
        mean, factor = _statistics(x_ptr, eps, K, NORM)
    norm = (norm_weight_ptr, norm_bias_ptr, mean, factor)
    warp, _, _ = _lanes(B)
    zero = tl.zeros((B, 16, N), tl.float32)
    ones = tl.full((B, 16, CHUNK), 1.0, x_ptr.dtype.element_ty)
    slot = (tl.arange(0, N) // PARTS % SLOTS)[None, None, :]
    xs = ()
    sums = ()
    if TURNS == 1:
        for f in tl.static_range(F):
            x = _x(
                x_ptr,
                norm,
                warp * T + f * SLOTS,
                count,
                x_stride,
                *(N, B, BITS, PARTS, SLOTS, K, NORM, RAISES),
            )
            xs += (x,)
            sums += (dot(ones, x, zero),)
    acc = ()
    for _ in tl.static_range(M):
        acc += (zero,)
    blocks = tl.cdiv(features, M * TILE)
    items = (blocks - first + programs - 1) // programs * TURNS
    for item in tl.range(0, items, num_stages=1):
        block = first + item // TURNS * programs
        turn = item % TURNS
        then = first + (item + 1) // TURNS * programs
        ahead = _fetch(
            *arrays,
            then,
            (item + 1) % TURNS,
            features,
            *(B, M, T, CHUNK, PARTS, SLOTS, K, BLOCK, ROW, MASKED, GATED),
        )
        for f in tl.static_range(F):
            if TURNS == 1:
                x = xs[f]
                total = sums[f]
            else:
                chunk = (turn * B + warp) * T + f * SLOTS
                x = _x(
                    x_ptr,
                    norm,
                    chunk,
                    count,
                    x_stride,
                    *(N, B, BITS, PARTS, SLOTS, K, NORM, RAISES),
                )
                total = dot(ones, x, zero) if ADDED else zero
            added = ()
            for m in tl.static_range(M):
                d = _chunk(held[m * T + f * SLOTS], x, zero, mask, B, CODES, BITS, HALF)
                for s in tl.static_range(1, SLOTS):
                    w = held[m * T + f * SLOTS + s]
                    d = tl.where(slot == s, _chunk(w, x, zero, mask, B, CODES, BITS, HALF), d)
                if zero_ptr is not None:
                    z = _as_products(
                        held[M * T + (m * F + f) * EACH + EACH - 1].to(tl.float32), B, N
                    )
                    d -= total * (z + ADDED)
                elif ADDED:
                    d -= total * ADDED
                if BLOCK[1]:
                    d *= _as_products(_scale(held[M * T + (m * F + f) * EACH], SCALES), B, N)
                added += (acc[m] + d,)
            acc = added
        last = turn == TURNS - 1
        if last:
            ends = (bias_ptr, residual_ptr, residual_stride, y_ptr)
            for m in tl.static_range(M):
                y = tl.sum(acc[m], 0)
                rows, inside = _rows_of(block * M + m, features, TILE, 2 if GATED else 1)
                if PARTS * SLOTS > 1:
                    y = tl.sum(tl.reshape(y, (16, N // (PARTS * SLOTS), PARTS * SLOTS)), 2)
                if BLOCK[1] == 0:
                    y *= _scale(_of_rows(scale_ptr, rows, inside, BLOCK), SCALES)[:, None]
                y *= _left(CODES, HALF)
                if outer_ptr is not None:
                    y *= tl.load(outer_ptr + rows, mask=inside, other=0.0)[:, None]
                i = tl.arange(0, N // (PARTS * SLOTS))
                n = (block * M + m) * TILE + tl.arange(0, TILE)
                if GATED:
                    y = tl.permute(tl.reshape(y, (2, 8, N // (PARTS * SLOTS))), (2, 1, 0))
                    gate, up = tl.split(y)
                    _finish_tile(gate, up, i, n, count, features, ends, ACTIVATION, GATED)
                else:
                    y = tl.trans(y)
                    _finish_tile(y, y, i, n, count, features, ends, ACTIVATION, GATED)
        added = ()
        for m in tl.static_range(M):
            added += (tl.where(last, 0.0, acc[m]) if TURNS > 1 else zero,)
        acc = added
        held = ahead
