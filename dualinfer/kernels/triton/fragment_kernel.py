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

from .launch import dot, fetch_line, let_next_start, wait_for_inputs
from .linear_kernels import _finish_tile
from .quantized_kernels import _input, _of_rows, _plane, _rows_of, _scale, _statistics

# Before 3.8, Triton gives a lane four columns of an operand side by side, not two.
_FOUR: tl.constexpr = tl.constexpr(
    tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8)
)
# x is multiplied by it where values of floating codes are bfloat16s near the smallest there are.
_RAISED: tl.constexpr = tl.constexpr(2.0**96)

# A normed row is multiplied by it, so that what is far above the others is a float16 as well.
_LESSENED: tl.constexpr = tl.constexpr(2.0**-4)


@triton.constexpr_function
def _is_half(dtype, norm):
    """True if values and x are float16s: those of x, and a row that is normed here.

    A normed row is of moderate size, and a float16 rounds it by an eighth of what a bfloat16 does.
    """
    return norm is not None or dtype == tl.float16


@triton.constexpr_function
def _raises(codes, half):
    """True if x is multiplied by _RAISED; `half` says that it is of float16."""
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


@triton.constexpr_function
def _pairs(dtype, columns, width, chunk, products):
    """True if what both columns of a lane have lies side by side, at a multiple of its size."""
    side_by_side = 0 < columns <= chunk and products > 1 and -(-width // columns) % 2 == 0
    return side_by_side and dtype.primitive_bitwidth in (8, 16)


@triton.jit
def _lying(
    ptr, rows, inside, chunk, E: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr = False,
):  # fmt: skip
    """What blocks have [32 B], for columns 2 q + E of the products of SLOTS chunks.

    With PAIRS that of the next column is in the upper half of each.
    """
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
    mask = inside & (group < COUNT)
    if PAIRS:
        wide: tl.constexpr = (
            tl.uint16 if ptr.dtype.element_ty.primitive_bitwidth == 8 else tl.uint32
        )
        ptr = ptr.to(tl.pointer_type(wide), bitcast=True)
        return tl.load(ptr + (first // 2 + group // 2), mask=mask, other=0)
    else:
        return tl.load(ptr + first + group, mask=mask, other=0)


@triton.jit
def _beside(
    ptr, lo, hi, lo_in, hi_in, chunk, B: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What blocks have, of both rows of a lane and of both columns, as `_both` takes it."""
    PAIRS: tl.constexpr = _pairs(ptr.dtype.element_ty, BLOCK[1], K, CHUNK, PARTS * SLOTS)
    lo0 = _lying(ptr, lo, lo_in, chunk, 0, B, CHUNK, PARTS, SLOTS, K, BLOCK, PAIRS)
    hi0 = _lying(ptr, hi, hi_in, chunk, 0, B, CHUNK, PARTS, SLOTS, K, BLOCK, PAIRS)
    s = tl.join(lo0, hi0)
    if PARTS * SLOTS > 1 and not PAIRS:
        lo1 = _lying(ptr, lo, lo_in, chunk, 1, B, CHUNK, PARTS, SLOTS, K, BLOCK)
        hi1 = _lying(ptr, hi, hi_in, chunk, 1, B, CHUNK, PARTS, SLOTS, K, BLOCK)
        s = tl.join(s, tl.join(lo1, hi1))
    return s


@triton.jit
def _both(s, dtype: tl.constexpr):
    """`_beside` by rows and columns [32 B, 2, 2], in the dtype that blocks have."""
    if len(s.shape) == 3:
        return s
    elif s.dtype == dtype:
        return tl.join(s, s)
    else:
        narrow: tl.constexpr = tl.uint8 if dtype.primitive_bitwidth == 8 else tl.uint16
        low = s.to(narrow)
        high = (s >> dtype.primitive_bitwidth).to(narrow)
        return tl.join(low, high).to(dtype, bitcast=True)


@triton.jit
def _scales(s, dtype: tl.constexpr, SCALES: tl.constexpr):
    """Scales of `_beside` in float32, but for `_left_of`; of exponents of 8 bits 2**-127 is 0."""
    if SCALES == "float8_e8m0fnu":
        if len(s.shape) == 3 or s.dtype == dtype:
            return (_both(s, dtype).to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        else:
            low = (s.to(tl.uint32) << 23) & 0x7F800000
            high = (s.to(tl.uint32) << 15) & 0x7F800000
            return tl.join(low, high).to(tl.float32, bitcast=True)
    elif SCALES == "float8_e4m3fn":
        return _plane(_both(s, dtype).to(tl.uint32), 0, "fp8_e4m3", None)
    else:
        return _both(s, dtype).to(tl.float32)


@triton.constexpr_function
def _left_of(scales, columns):
    """What `_scales` leave to the end."""
    return 256.0 if scales == "float8_e4m3fn" and columns else 1.0


@triton.jit
def _as_products(s, B: tl.constexpr, N: tl.constexpr):
    """What both rows and both columns of lanes have as the products [B, 16, N] lie.

    They repeat every 8 columns.
    """
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
    x_ptr, norm, chunk, first, count, stride, at, EIGHT: tl.constexpr, B: tl.constexpr,
    BITS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, RAISES: tl.constexpr,
):  # fmt: skip
    """[32 B, 8] of x: eight values of each quad, for columns `first` + row of the products.

    Rows of x are `stride` elements apart; lanes find the first one `at` elements behind x_ptr.
    """
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
        x = _input(x_ptr, k, norm, K, NORM) * _LESSENED
        if NORM != "layer":
            x *= norm[3]
        return tl.where(mask, x, 0.0).to(tl.float16)
    else:
        row = own.to(tl.int64) * stride + at
        x = tl.load(x_ptr + row[:, None] + k, mask=mask, other=0.0)
        if RAISES:
            x = x.to(tl.float32) * _RAISED
        return x.to(x_ptr.dtype.element_ty)


@triton.jit
def _x_of_8(
    x_ptr, norm, chunk, first, count, stride, at, B: tl.constexpr, BITS: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    RAISES: tl.constexpr,
):  # fmt: skip
    """[B, chunk, 8] of x, in the order of `_operand`."""
    about = (x_ptr, norm, chunk, first, count, stride, at)
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
    x_ptr, norm, chunk, count, stride, at, N: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
    RAISES: tl.constexpr,
):  # fmt: skip
    """[B, chunk, N] of x."""
    x = _x_of_8(x_ptr, norm, chunk, 0, count, stride, at, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES))
    if N > 8:
        other = _x_of_8(
            x_ptr, norm, chunk, 8, count, stride, at, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES)
        )
        if N == 32:
            third = _x_of_8(
                x_ptr, norm, chunk, 16, count, stride, at, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES)
            )
            fourth = _x_of_8(
                x_ptr, norm, chunk, 24, count, stride, at, *(B, BITS, PARTS, SLOTS, K, NORM, RAISES)
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
def _chosen(a, b, mask):
    """Bits of a where those of a mask are, else of b."""
    return (a & mask) | (b & ~mask)


@triton.jit
def _pair(w, J: tl.constexpr, mask, CODES: tl.constexpr, UPPER: tl.constexpr, HALF: tl.constexpr):
    """What part J of the halves of words means, but for `_added` and `_left`, two values.

    `mask` is 0x000F000F, in a register; see `quantized_kernels._nibble`. Of codes of 8 bits that
    a bfloat16 cannot hold, UPPER says which 4 bits are wanted.
    """
    if CODES == "int4" or CODES == "uint4":
        y = ((w >> (4 * J)) & mask) | (0x64006400 if HALF else 0x43004300)
    elif CODES == "fp4_e2m1" and HALF:
        y = ((w << (12 - 4 * J)) & 0x80008000) | ((w << (12 - 4 * J)) >> 3 & 0x0E000E00)
    elif CODES == "fp4_e2m1":
        # `mask` is 0x01C001C0, where a value's bits go. The sign of another code, which stays
        # beside that of the wanted one, goes there as well and is left out with them.
        signs = w & (0x80808080 if J % 2 else 0x08080808)
        if J == 0:
            y = _chosen(w << 6, signs << 12, mask)
        elif J == 1:
            y = _chosen(w << 2, signs << 8, mask)
        elif J == 2:
            y = _chosen(w >> 2, signs << 4, mask)
        else:
            y = _chosen(w >> 6, signs, mask)
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
def _scaled_chunks(
    held, m: tl.constexpr, f: tl.constexpr, x, total, zero, slot, mask, scale_ptr, zero_ptr,
    M: tl.constexpr, T: tl.constexpr, B: tl.constexpr, N: tl.constexpr, CODES: tl.constexpr,
    BITS: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Products [B, 16, N] of tile m and chunks number f of what `_fetch` found, by their scales."""
    ADDED: tl.constexpr = _added(CODES, HALF)
    EACH: tl.constexpr = (1 if BLOCK[1] else 0) + (1 if zero_ptr is not None else 0)
    BESIDE: tl.constexpr = M * T + (m * (T // SLOTS) + f) * EACH
    d = _chunk(held[m * T + f * SLOTS], x, zero, mask, B, CODES, BITS, HALF)
    for s in tl.static_range(1, SLOTS):
        w = held[m * T + f * SLOTS + s]
        d = tl.where(slot == s, _chunk(w, x, zero, mask, B, CODES, BITS, HALF), d)
    if zero_ptr is not None:
        z = _both(held[BESIDE + EACH - 1], zero_ptr.dtype.element_ty)
        d -= total * (_as_products(z.to(tl.float32), B, N) + ADDED)
    elif ADDED:
        d -= total * ADDED
    if BLOCK[1]:
        d *= _as_products(_scales(held[BESIDE], scale_ptr.dtype.element_ty, SCALES), B, N)
    return d


@triton.jit
def _summed(
    acc, held, xs, sums, zero, slot, mask, about, turn, scale_ptr, zero_ptr, ODD: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, B: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    CODES: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Sums of the tiles of a block and what one turn of it adds.

    x of KEPT turns is in registers, of the second one where the turn is ODD.
    """
    x_ptr, norm, count, stride = about
    HALF: tl.constexpr = _is_half(x_ptr.dtype.element_ty, NORM)
    F: tl.constexpr = T // SLOTS
    CHUNK: tl.constexpr = 512 // BITS
    warp, _, _ = _lanes(B)
    for f in tl.static_range(F):
        if KEPT:
            x = xs[(F if ODD and KEPT == 2 else 0) + f]
            total = sums[(F if ODD and KEPT == 2 else 0) + f]
        else:
            x = _x(
                *(x_ptr, norm, (turn * B + warp) * T + f * SLOTS, count, stride, 0),
                *(N, B, BITS, PARTS, SLOTS, K, NORM, _raises(CODES, HALF)),
            )
            total = zero
            if _added(CODES, HALF):
                ones = tl.full((B, 16, CHUNK), 1.0, tl.float16 if HALF else x_ptr.dtype.element_ty)
                total = dot(ones, x, zero)
        added = ()
        for m in tl.static_range(M):
            d = _scaled_chunks(
                *(held, m, f, x, total, zero, slot, mask, scale_ptr, zero_ptr),
                *(M, T, B, N, CODES, BITS, SCALES, BLOCK, SLOTS, HALF),
            )
            added += (acc[m] + d,)
        acc = added
    return acc


@triton.jit
def _write(
    acc, block, ends, scale_ptr, outer_ptr, factor, count, features,
    M: tl.constexpr, N: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, HALF: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Write the results of a block whose sums are `acc`."""
    TILE: tl.constexpr = 8 if GATED else 16
    for m in tl.static_range(M):
        y = tl.sum(acc[m], 0)
        rows, inside = _rows_of(block * M + m, features, TILE, 2 if GATED else 1)
        if PARTS * SLOTS > 1:
            y = tl.sum(tl.reshape(y, (16, N // (PARTS * SLOTS), PARTS * SLOTS)), 2)
        if BLOCK[1] == 0:
            y *= _scale(_of_rows(scale_ptr, rows, inside, BLOCK), SCALES)[:, None]
        y *= _left(CODES, HALF) * _left_of(SCALES, BLOCK[1]) * factor
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


@triton.jit
def fragment_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, residual_ptr, norm_weight_ptr,
    norm_bias_ptr, y_ptr, count, features, x_stride, residual_stride, eps, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, B: tl.constexpr, M: tl.constexpr, T: tl.constexpr, TURNS: tl.constexpr,
    KEPT: tl.constexpr, TWO: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [count, features] of x [count, K]; a program goes through blocks of M tiles of results.

    Each of its B warps sums T chunks a turn, of all rows of a block. N columns of products are
    those of the rows of x, of SLOTS chunks of each and of PARTS groups of a chunk. If KEPT is 1 or
    2, it is all TURNS, and x stays in registers. A norm is of one row.

    With TWO, what two turns read is held, and asked for again as soon as it is summed: the codes of
    one turn are on their way while those of the other are summed. Else they are asked for at the
    beginning of the turn before; but ptxas moves loads down, past all that does not wait for other
    warps, so that few are on their way. That takes less registers.
    """
    let_next_start(PDL)
    HALF: tl.constexpr = _is_half(x_ptr.dtype.element_ty, NORM)
    CHUNK: tl.constexpr = 512 // BITS
    ROW: tl.constexpr = (K + 31) // 32 * 4 if BITS == 4 else K // 4
    MASKED: tl.constexpr = ROW % (B * T * TURNS * 16) != 0
    TILE: tl.constexpr = 8 if GATED else 16
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    mask = mask.to(tl.uint32)
    # Codes and scales are on their way before the kernel in front has ended.
    held = _fetch(
        *(weight_ptr, scale_ptr, zero_ptr, first, 0, features),
        *(B, M, T, CHUNK, PARTS, SLOTS, K, BLOCK, ROW, MASKED, GATED),
    )
    if TWO:
        other = _fetch(
            *(weight_ptr, scale_ptr, zero_ptr, first + 1 // TURNS * programs, 1 % TURNS, features),
            *(B, M, T, CHUNK, PARTS, SLOTS, K, BLOCK, ROW, MASKED, GATED),
        )
    if NORM is not None:
        fetch_line(norm_weight_ptr, K, first, PDL)
    wait_for_inputs(PDL)
    mean = 0.0
    factor = 1.0
    if NORM is not None:
        mean, factor = _statistics(x_ptr, eps, K, NORM)
    norm = (norm_weight_ptr, norm_bias_ptr, mean, factor)
    warp, _, _ = _lanes(B)
    zero = tl.zeros((B, 16, N), tl.float32)
    ones = tl.full((B, 16, CHUNK), 1.0, tl.float16 if HALF else x_ptr.dtype.element_ty)
    slot = (tl.arange(0, N) // PARTS % SLOTS)[None, None, :]
    xs = ()
    sums = ()
    if KEPT:
        for i in tl.static_range(KEPT * (T // SLOTS)):
            chunk = (i // (T // SLOTS) * B + warp) * T + i % (T // SLOTS) * SLOTS
            x = _x(
                *(x_ptr, norm, chunk, count, x_stride, 0),
                *(N, B, BITS, PARTS, SLOTS, K, NORM, _raises(CODES, HALF)),
            )
            xs += (x,)
            sums += (dot(ones, x, zero),)
    factor = 1.0 if NORM is None else 1.0 / _LESSENED
    none = ()
    for _ in tl.static_range(M):
        none += (zero,)
    acc = none
    ends = (bias_ptr, residual_ptr, residual_stride, y_ptr)
    about = (x_ptr, norm, count, x_stride)
    blocks = tl.cdiv(features, M * TILE)
    items = (blocks - first + programs - 1) // programs * TURNS
    if TWO:
        for item in tl.range(0, items, 2, num_stages=1):
            acc = _summed(
                *(acc, held, xs, sums, zero, slot, mask, about, item % TURNS, scale_ptr, zero_ptr),
                *(False, M, T, B, N, K, CODES, BITS, SCALES, BLOCK, PARTS, SLOTS, KEPT, NORM),
            )
            then = item + 2
            held = _fetch(
                *(weight_ptr, scale_ptr, zero_ptr, first + then // TURNS * programs, then % TURNS),
                *(features, B, M, T, CHUNK, PARTS, SLOTS, K, BLOCK, ROW, MASKED, GATED),
            )
            if TURNS > 1:
                tl.debug_barrier()
            if item % TURNS == TURNS - 1:
                _write(
                    *(acc, first + item // TURNS * programs, ends, scale_ptr, outer_ptr, factor),
                    *(count, features, M, N, CODES, SCALES, BLOCK, PARTS, SLOTS, HALF),
                    *(ACTIVATION, GATED),
                )
                acc = none
            if item + 1 < items:
                acc = _summed(
                    *(acc, other, xs, sums, zero, slot, mask, about, (item + 1) % TURNS, scale_ptr),
                    *(zero_ptr, True, M, T, B, N, K, CODES, BITS, SCALES, BLOCK, PARTS, SLOTS),
                    *(KEPT, NORM),
                )
                then = item + 3
                block = first + then // TURNS * programs
                other = _fetch(
                    *(weight_ptr, scale_ptr, zero_ptr, block, then % TURNS, features, B, M, T),
                    *(CHUNK, PARTS, SLOTS, K, BLOCK, ROW, MASKED, GATED),
                )
                if TURNS > 1:
                    tl.debug_barrier()
                if (item + 1) % TURNS == TURNS - 1:
                    block = first + (item + 1) // TURNS * programs
                    _write(
                        *(acc, block, ends, scale_ptr, outer_ptr, factor, count, features, M, N),
                        *(CODES, SCALES, BLOCK, PARTS, SLOTS, HALF, ACTIVATION, GATED),
                    )
                    acc = none
    else:
        for item in tl.range(0, items, num_stages=1):
            then = item + 1
            ahead = _fetch(
                *(weight_ptr, scale_ptr, zero_ptr, first + then // TURNS * programs, then % TURNS),
                *(features, B, M, T, CHUNK, PARTS, SLOTS, K, BLOCK, ROW, MASKED, GATED),
            )
            acc = _summed(
                *(acc, held, xs, sums, zero, slot, mask, about, item % TURNS, scale_ptr, zero_ptr),
                *(False, M, T, B, N, K, CODES, BITS, SCALES, BLOCK, PARTS, SLOTS, KEPT, NORM),
            )
            if item % TURNS == TURNS - 1:
                _write(
                    *(acc, first + item // TURNS * programs, ends, scale_ptr, outer_ptr, factor),
                    *(count, features, M, N, CODES, SCALES, BLOCK, PARTS, SLOTS, HALF),
                    *(ACTIVATION, GATED),
                )
                acc = none
            held = ahead
