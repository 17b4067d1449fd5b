"""Device side of quantized.py: one row times codes, and a matrix of what codes mean.

A row of codes is read 16 bytes at a time, a quad of four words: 32 codes of 4 bits, of which nibble
j of word c is column 4 j + c (see `dualinfer.quantization.packing`), or 16 of 8 bits in their
order, so that byte j of word c is column 4 c + j. Part j of all words is a plane. Codes of 8 bits
whose rows do not begin at a multiple of 16 bytes are gathered into words byte by byte.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from .launch import fetch_line, let_next_start, wait_for_inputs
from .linear_kernels import _finish


@triton.jit
def _nibble(w, J: tl.constexpr, mask):
    """2048 or 128 plus nibble J of words, float32, by two operations on bits.

    `mask` is 0xF000. As a kernel's argument it stays in a register; ptxas moves a constant into one
    again and again, since an instruction has room for one constant alone.
    """
    # An exponent is laid over a nibble that lies at bit 12 or 16 of the mantissa.
    if J == 0:
        y = w << 12
    elif J == 1 or J == 2:
        y = w << 8
    elif J == 5 or J == 6:
        y = w >> 8
    elif J == 7:
        y = w >> 12
    else:
        y = w
    y = (y & (mask << 4)) | 0x43000000 if _offset(J) == 128 else (y & mask) | 0x45000000
    return y.to(tl.float32, bitcast=True)


@triton.constexpr_function
def _offset(j):
    """What `_nibble` adds to nibble j."""
    return 128 if j in (2, 4, 6, 7) else 2048


@triton.jit
def _e2m1(w, J: tl.constexpr):
    """Nibble J of words as a float of 4 bits, times 2**-14, as a float16."""
    t = w << (4 * (3 - J % 4))  # nibbles J and J + 4 at the upper ends of the halves
    t = (t & 0x80008000) | ((t >> 3) & 0x0E000E00)
    return ((t >> 16) if J >= 4 else t).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _of_four(low, high, table, FIRST: tl.constexpr):
    """One of four entries of a table, by two bits."""
    upper = tl.where(low, table[FIRST + 3], table[FIRST + 2])
    return tl.where(high, upper, tl.where(low, table[FIRST + 1], table[FIRST]))


@triton.jit
def _entry(w, J: tl.constexpr, table):
    """The entry of a table of 16 by nibble J of words."""
    b0 = (w & (1 << (4 * J))) != 0
    b1 = (w & (2 << (4 * J))) != 0
    b2 = (w & (4 << (4 * J))) != 0
    lower = tl.where(b2, _of_four(b0, b1, table, 4), _of_four(b0, b1, table, 0))
    upper = tl.where(b2, _of_four(b0, b1, table, 12), _of_four(b0, b1, table, 8))
    return tl.where(((w >> (4 * J)) & 8) != 0, upper, lower)


@triton.jit
def _plane(w, J: tl.constexpr, CODES: tl.constexpr, table):
    """What part J of words means, float32, exactly but for the factor that `_unit` gives."""
    if CODES == "fp4_e2m1":
        y = _e2m1(w, J).to(tl.float32)
    elif CODES == "table":
        y = _entry(w, J, table)
    elif CODES == "int4" or CODES == "uint4":
        y = _nibble(w, J, 0xF000) - (_offset(J) + (8 if CODES == "int4" else 0))
    elif CODES == "int8":
        y = ((w << (24 - 8 * J)).to(tl.int32, bitcast=True) >> 24).to(tl.float32)
    elif CODES == "uint8":
        y = ((w >> (8 * J)) & 255).to(tl.float32)
    else:
        # Bytes 1 and 3 are the upper ends of the halves.
        t = w if J % 2 else w << 8
        four = CODES == "fp8_e4m3"  # bits of an exponent; a half has five, as e5m2 has
        t = (t & 0x80008000) | ((t & 0x7F007F00) >> 1) if four else t & 0xFF00FF00
        t = ((t >> 16) if J >= 2 else t).to(tl.uint16)
        y = t.to(tl.float16, bitcast=True).to(tl.float32)
    return y


@triton.constexpr_function
def _unit(codes):
    """What `_plane` leaves to the scales."""
    return {"fp4_e2m1": 16384.0, "fp8_e4m3": 256.0}.get(codes, 1.0)


@triton.jit
def _scale(s, SCALES: tl.constexpr):
    """Scales in float32; those of 8 bits are bytes."""
    if SCALES == "float8_e8m0fnu":
        bits = s.to(tl.uint32)
        y = tl.maximum(bits << 23, 0x00400000).to(tl.float32, bitcast=True)
    elif SCALES == "float8_e4m3fn":
        y = _plane(s.to(tl.uint32), 0, "fp8_e4m3", None) * 256.0
    else:
        y = s.to(tl.float32)
    return y


@triton.jit
def _quads(weight_ptr, rows, inside, q, K: tl.constexpr, BITS: tl.constexpr):
    """Words of rows by quads, [R, Q, 4]."""
    PER: tl.constexpr = 128 // BITS
    COUNT: tl.constexpr = (K + PER - 1) // PER
    mask = inside[:, None, None] & (q < COUNT)[None, :, None]
    if BITS == 4 or K % 16 == 0:
        at = rows[:, None, None] * (COUNT * 4) + q[None, :, None] * 4
        at += tl.arange(0, 4)[None, None, :]
        w = tl.load(weight_ptr + at, mask=mask, other=0, eviction_policy="evict_first")
    else:
        k = q[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
        at = rows[:, None, None] * K + k[None, :, :]
        w = tl.zeros(at.shape, tl.uint32)
        for j in tl.static_range(4):
            near = mask & (k + j < K)[None, :, :]
            byte = tl.load(weight_ptr + at + j, mask=near, other=0).to(tl.uint8, bitcast=True)
            w |= byte.to(tl.uint32) << (8 * j)
    return w


@triton.jit
def _lying(
    ptr, rows, inside, q, PART: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What blocks have, [R, Q], for each quad, or for its half number PART where they have 16.

    BLOCK is the rows and the columns of a block, 0 for all.
    """
    PER: tl.constexpr = 128 // BITS
    COUNT: tl.constexpr = (K + BLOCK[1] - 1) // BLOCK[1]
    columns = (q * PER + PART * BLOCK[1]) // BLOCK[1]
    mask = inside[:, None] & (columns < COUNT)[None, :]
    first = rows // BLOCK[0] * COUNT if BLOCK[0] else rows * 0
    return tl.load(ptr + first[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def _of_rows(ptr, rows, inside, BLOCK: tl.constexpr):
    """What rows have where a block has all columns, [R]."""
    at = rows // BLOCK[0] if BLOCK[0] else rows * 0
    return tl.load(ptr + at, mask=inside, other=0)


@triton.jit
def _statistics(x_ptr, eps, K: tl.constexpr, NORM: tl.constexpr):
    """The mean of a row of x, 0 of RMSNorm, and what its values are multiplied by."""
    k = tl.arange(0, triton.next_power_of_2(K))
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    mean = 0.0
    if NORM == "layer":
        mean = tl.sum(x, 0) / K
        x = tl.where(k < K, x - mean, 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)


@triton.jit
def _input(x_ptr, k, norm, K: tl.constexpr, NORM: tl.constexpr):
    """Float32 values number `k` of a row of x, normed but for the factor of an RMSNorm."""
    weight_ptr, bias_ptr, mean, factor = norm
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM is not None:
        weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM == "rms_offset":
            weight += 1.0
        if NORM == "layer":
            x = (x - mean) * factor * weight  # outside, where the weight is 0, it is 0
            x += tl.load(bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        else:
            x *= weight
    return x


@triton.jit
def _inputs(x_ptr, q, norm, K: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr):
    """Values of a row of x that quads are multiplied by, a tuple of planes [Q, 4]."""
    if BITS == 8:
        k = q[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.reshape(_input(x_ptr, k, norm, K, NORM), (q.shape[0], 4, 2, 2))
        even, odd = tl.split(x)
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        return x0, x1, x2, x3
    else:
        k = q[:, None] * 32 + tl.arange(0, 4)[None, :]
        x0 = _input(x_ptr, k, norm, K, NORM)
        x1 = _input(x_ptr, k + 4, norm, K, NORM)
        x2 = _input(x_ptr, k + 8, norm, K, NORM)
        x3 = _input(x_ptr, k + 12, norm, K, NORM)
        x4 = _input(x_ptr, k + 16, norm, K, NORM)
        x5 = _input(x_ptr, k + 20, norm, K, NORM)
        x6 = _input(x_ptr, k + 24, norm, K, NORM)
        x7 = _input(x_ptr, k + 28, norm, K, NORM)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _beside(
    scale_ptr, zero_ptr, rows, inside, q, K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Scales of quads and of their second halves, and zeros, as they lie, [R, Q]."""
    s = 0.0
    s2 = 0.0
    z = 0.0
    if BLOCK[1]:
        s = _lying(scale_ptr, rows, inside, q, 0, K, BITS, BLOCK)
        if BITS == 4 and BLOCK[1] == 16:
            s2 = _lying(scale_ptr, rows, inside, q, 1, K, BITS, BLOCK)
        if zero_ptr is not None:
            z = _lying(zero_ptr, rows, inside, q, 0, K, BITS, BLOCK)
    return s, s2, z


@triton.jit
def _sums(x, BITS: tl.constexpr):
    """Of planes of x, by quads, [Q]."""
    total = x[0]
    for j in tl.static_range(1, 32 // BITS):
        total += x[j]
    return tl.sum(total, 1)


@triton.jit
def _offsets(x, CODES: tl.constexpr):
    """What `_nibble` adds to the products of quads with planes of x, [Q]."""
    total = (_offset(0) + (8 if CODES == "int4" else 0)) * x[0]
    for j in tl.static_range(1, 8):
        total += (_offset(j) + (8 if CODES == "int4" else 0)) * x[j]
    return tl.sum(total, 1)


@triton.constexpr_function
def _offset_leaves_last(codes, columns, dtype):
    """True if codes of x's dtype are multiplied with what `_nibble` adds, which `_offsets` takes.

    Float32 is to be exact, and half a quad has no sum of its own.
    """
    return codes in ("int4", "uint4") and columns != 16 and dtype != tl.float32


@triton.jit
def _products(
    w, x, beside, sums, offsets, mask, zero_ptr, CODES: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Products of quads with planes of x, [R, Q], by their blocks' scales and zeros."""
    s, s2, z = beside
    HALVES: tl.constexpr = 2 if BITS == 4 and BLOCK[1] == 16 else 1
    part = tl.zeros(w.shape, tl.float32)
    other = tl.zeros(w.shape, tl.float32)
    for j in tl.static_range(32 // BITS):
        if OFFSET:
            part += _nibble(w, j, mask.to(tl.uint32)) * x[j][None, :, :]
        elif HALVES == 2 and j >= 4:
            other += _plane(w, j, CODES, TABLE) * x[j][None, :, :]
        else:
            part += _plane(w, j, CODES, TABLE) * x[j][None, :, :]
    p = tl.sum(part, 2)
    if OFFSET:
        p -= offsets[None, :]
    if BLOCK[1]:
        if zero_ptr is not None:
            p -= z.to(tl.float32) * sums[None, :]
        p *= _scale(s, SCALES)
        if HALVES == 2:
            p += tl.sum(other, 2) * _scale(s2, SCALES)
    return p


@triton.jit
def _of_whole_rows(
    y, total, factor, scale_ptr, zero_ptr, outer_ptr, rows, inside,
    CODES: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of rows, by their scales and zeros; `total` is the sum of x, `factor` its norm's."""
    if BLOCK[1] == 0:
        if zero_ptr is not None:
            y -= _of_rows(zero_ptr, rows, inside, BLOCK).to(tl.float32) * total
        y *= _scale(_of_rows(scale_ptr, rows, inside, BLOCK), SCALES)
    y *= _unit(CODES) * factor
    if outer_ptr is not None:
        y *= tl.load(outer_ptr + rows, mask=inside, other=0.0)
    return y


@triton.jit
def _end(
    y, block, ends, features, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Write the sums of one block of rows; those of gate come before those of up."""
    own = block * ROWS + tl.arange(0, ROWS)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, ROWS)), (1, 0)))
        _finish(gate, up, own, features, ends, (0, 0), ACTIVATION, GATED)
    else:
        _finish(y, y, own, features, ends, (0, 0), ACTIVATION, GATED)


@triton.jit
def _rows_of(block, features, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Rows of the matrix that a block of results needs, and which of them there are."""
    r = tl.arange(0, ROWS * PARTS)
    own = block * ROWS + r % ROWS
    return own.to(tl.int64) + (r // ROWS) * features, own < features


@triton.jit
def stream_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, residual_ptr, norm_weight_ptr,
    norm_bias_ptr, y_ptr, features, eps, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [features] of one row x [K], which QUADS cover: it stays in registers.

    A program goes through blocks of ROWS results, and fetches the next one's codes while it sums.
    """
    let_next_start(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    OFFSET: tl.constexpr = _offset_leaves_last(CODES, BLOCK[1], x_ptr.dtype.element_ty)
    q = tl.arange(0, QUADS)
    first = tl.program_id(0)
    rows, inside = _rows_of(first, features, ROWS, PARTS)
    # Codes and scales are on their way before the kernel in front has ended.
    w = _quads(weight_ptr, rows, inside, q, K, BITS)
    beside = _beside(scale_ptr, zero_ptr, rows, inside, q, K, BITS, BLOCK)
    if NORM is not None:
        fetch_line(norm_weight_ptr, K, first, PDL)
    wait_for_inputs(PDL)
    mean = 0.0
    factor = 1.0
    if NORM is not None:
        mean, factor = _statistics(x_ptr, eps, K, NORM)
    x = _inputs(x_ptr, q, (norm_weight_ptr, norm_bias_ptr, mean, factor), K, BITS, NORM)
    factor = 1.0 if NORM == "layer" else factor
    sums = _sums(x, BITS) if zero_ptr is not None else 0.0
    total = tl.sum(sums, 0) if zero_ptr is not None else 0.0
    offsets = _offsets(x, CODES) if OFFSET else 0.0
    ends = (bias_ptr, residual_ptr, y_ptr)
    for block in range(first, tl.cdiv(features, ROWS), tl.num_programs(0)):
        rows, inside = _rows_of(block + tl.num_programs(0), features, ROWS, PARTS)
        w_next = _quads(weight_ptr, rows, inside, q, K, BITS)
        beside_next = _beside(scale_ptr, zero_ptr, rows, inside, q, K, BITS, BLOCK)
        p = _products(
            *(w, x, beside, sums, offsets, mask, zero_ptr),
            *(CODES, BITS, TABLE, SCALES, BLOCK, OFFSET),
        )
        rows, inside = _rows_of(block, features, ROWS, PARTS)
        about = (scale_ptr, zero_ptr, outer_ptr)
        y = _of_whole_rows(tl.sum(p, 1), total, factor, *about, rows, inside, CODES, SCALES, BLOCK)
        _end(y, block, ends, features, ROWS, ACTIVATION, GATED)
        w = w_next
        beside = beside_next


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, residual_ptr, norm_weight_ptr,
    norm_bias_ptr, y_ptr, partial_ptr, counter_ptr, features, eps, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
    TURNS: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [features] of one row x [K]; a program sums ROWS of them over TURNS times QUADS quads.

    With GATED it has as many rows of gate, then of up.
    """
    let_next_start(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    OFFSET: tl.constexpr = _offset_leaves_last(CODES, BLOCK[1], x_ptr.dtype.element_ty)
    pid = tl.program_id(0)
    split = tl.program_id(1)
    rows, inside = _rows_of(pid, features, ROWS, PARTS)
    first = split * (TURNS * QUADS) + tl.arange(0, QUADS)
    # Codes and scales are on their way before the kernel in front has ended.
    w = _quads(weight_ptr, rows, inside, first, K, BITS)
    beside = _beside(scale_ptr, zero_ptr, rows, inside, first, K, BITS, BLOCK)
    if NORM is not None:
        fetch_line(norm_weight_ptr, K, pid, PDL)
    wait_for_inputs(PDL)
    mean = 0.0
    factor = 1.0
    if NORM is not None:
        mean, factor = _statistics(x_ptr, eps, K, NORM)
    norm = (norm_weight_ptr, norm_bias_ptr, mean, factor)
    acc = tl.zeros((ROWS * PARTS, QUADS), tl.float32)
    total = tl.zeros((QUADS,), tl.float32)  # of x, where rows have zeros
    for turn in range(TURNS):
        q = first + turn * QUADS
        x = _inputs(x_ptr, q, norm, K, BITS, NORM)
        sums = 0.0
        if zero_ptr is not None:
            sums = _sums(x, BITS)
            total += sums
        offsets = _offsets(x, CODES) if OFFSET else 0.0
        acc += _products(
            *(w, x, beside, sums, offsets, mask, zero_ptr),
            *(CODES, BITS, TABLE, SCALES, BLOCK, OFFSET),
        )
        if TURNS > 1:
            there = inside & (turn + 1 < TURNS)
            w = _quads(weight_ptr, rows, there, q + QUADS, K, BITS)
            beside = _beside(scale_ptr, zero_ptr, rows, there, q + QUADS, K, BITS, BLOCK)
    factor = 1.0 if NORM == "layer" else factor
    about = (scale_ptr, zero_ptr, outer_ptr)
    whole = tl.sum(total, 0)
    y = _of_whole_rows(tl.sum(acc, 1), whole, factor, *about, rows, inside, CODES, SCALES, BLOCK)
    ended = 0
    if SPLITS > 1:
        area: tl.constexpr = ROWS * PARTS
        theirs = partial_ptr + pid * (SPLITS * area) + tl.arange(0, area)
        tl.store(theirs + split * area, y)
        tl.debug_barrier()  # all of the program's writes, before it says that they are there
        ended = tl.atomic_add(counter_ptr + pid, 1, sem="acq_rel")
        if ended == SPLITS - 1:
            tl.store(counter_ptr + pid, 0)
            tl.debug_barrier()
            y = tl.zeros((area,), tl.float32)
            for i in tl.static_range(SPLITS):
                y += tl.load(theirs + i * area, cache_modifier=".cg")
    if ended == SPLITS - 1:
        _end(y, pid, (bias_ptr, residual_ptr, y_ptr), features, ROWS, ACTIVATION, GATED)


@triton.jit
def _all_lying(
    scale_ptr, zero_ptr, rows, inside, q, K: tl.constexpr, BITS: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Scales of quads and of their second halves, and zeros; [R, Q, 1] in float32."""
    s, s2, z = _beside(scale_ptr, zero_ptr, rows, inside, q, K, BITS, BLOCK)
    if BLOCK[1]:
        s = (_scale(s, SCALES) * _unit(CODES))[:, :, None]
        halves: tl.constexpr = BITS == 4 and BLOCK[1] == 16
        s2 = (_scale(s2, SCALES) * _unit(CODES))[:, :, None] if halves else s
        if zero_ptr is not None:
            z = z.to(tl.float32)[:, :, None]
    elif zero_ptr is not None:
        z = _of_rows(zero_ptr, rows, inside, BLOCK).to(tl.float32)[:, None, None]
    return s, s2, z


@triton.jit
def _meant(v, beside, HALF: tl.constexpr, zero_ptr, BLOCK: tl.constexpr):
    """Values of codes less their zeros, times the scales of blocks; those of rows come later."""
    s, s2, z = beside
    if zero_ptr is not None:
        v -= z
    if BLOCK[1]:
        v *= s2 if HALF == 1 else s
    return v


@triton.jit
def _all_planes(
    w, beside, zero_ptr, dtype: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What quads of codes mean, in the order of a matrix's columns, in `dtype`."""
    v0 = _meant(_plane(w, 0, CODES, TABLE), beside, 0, zero_ptr, BLOCK).to(dtype)
    v1 = _meant(_plane(w, 1, CODES, TABLE), beside, 0, zero_ptr, BLOCK).to(dtype)
    v2 = _meant(_plane(w, 2, CODES, TABLE), beside, 0, zero_ptr, BLOCK).to(dtype)
    v3 = _meant(_plane(w, 3, CODES, TABLE), beside, 0, zero_ptr, BLOCK).to(dtype)
    lower = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    if BITS == 8:
        return lower  # planes are bytes, of words in their order
    else:
        v4 = _meant(_plane(w, 4, CODES, TABLE), beside, 1, zero_ptr, BLOCK).to(dtype)
        v5 = _meant(_plane(w, 5, CODES, TABLE), beside, 1, zero_ptr, BLOCK).to(dtype)
        v6 = _meant(_plane(w, 6, CODES, TABLE), beside, 1, zero_ptr, BLOCK).to(dtype)
        v7 = _meant(_plane(w, 7, CODES, TABLE), beside, 1, zero_ptr, BLOCK).to(dtype)
        upper = tl.join(tl.join(v4, v6), tl.join(v5, v7))
        # [R, Q, word, j % 4 // 2, j % 2, j // 4]: columns are numbered by nibbles, then words.
        return tl.permute(tl.join(lower, upper), (0, 1, 5, 3, 4, 2))


@triton.jit
def values_kernel(
    weight_ptr, scale_ptr, zero_ptr, outer_ptr, y_ptr, features,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [features, K]: what codes mean, rounded once."""
    let_next_start(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < features
    q = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    w = _quads(weight_ptr, rows, inside, q, K, BITS)
    beside = _all_lying(scale_ptr, zero_ptr, rows, inside, q, K, BITS, SCALES, BLOCK, CODES)
    last = tl.full((ROWS,), 1.0, tl.float32)
    if BLOCK[1] == 0:
        last = _scale(_of_rows(scale_ptr, rows, inside, BLOCK), SCALES) * _unit(CODES)
    if outer_ptr is not None:
        last *= tl.load(outer_ptr + rows, mask=inside, other=0.0)
    wait_for_inputs(PDL)  # what reads the memory that is written here has ended
    PER: tl.constexpr = 128 // BITS
    v = _all_planes(w, beside, zero_ptr, tl.float32, CODES, BITS, TABLE, BLOCK)
    v = tl.reshape(v, (ROWS, QUADS * PER)) * last[:, None]
    k = tl.program_id(1) * (QUADS * PER) + tl.arange(0, QUADS * PER)
    y_at = y_ptr + rows[:, None] * K + k[None, :]
    tl.store(y_at, v.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (k < K)[None, :])
