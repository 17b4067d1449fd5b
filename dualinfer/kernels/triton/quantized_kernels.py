"""Device side of quantized.py: products that read codes, and a matrix of what codes mean.

A row of codes is read 16 bytes at a time, a quad of four words: 32 codes of 4 bits, of which nibble
j of word c is column 4 j + c (see `dualinfer.quantization.packing`), or 16 of 8 bits in their
order, so that byte j of word c is column 4 c + j. Part j of all words is a plane. Codes of 8 bits
whose rows do not begin at a multiple of 16 bytes are gathered into words byte by byte.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
import triton
import triton.language as tl

from .launch import dot, let_next_start, wait_for_inputs
from .linear_kernels import _finish, _finish_tile


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
    """What `_plane` and `_bytes` leave to the scales."""
    return {"fp4_e2m1": 16384.0, "fp8_e4m3": 256.0}.get(codes, 1.0)


@triton.jit
def _scale(s, SCALES: tl.constexpr):
    """Scales in float32; those of 8 bits are bytes."""
    if SCALES == "float8_e8m0fnu":
        bits = s.to(tl.uint32)
        y = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
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
def _bytes_apart(x):
    """Values [Q, 16] as the planes of bytes 0 to 3, [Q, 4]."""
    x = tl.reshape(x, (x.shape[0], 4, 2, 2))
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, residual_ptr, norm_weight_ptr,
    norm_bias_ptr, y_ptr, partial_ptr, counter_ptr, features, eps, mask,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
    TURNS: tl.constexpr, AHEAD: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [features] of one row x [K]; a program sums ROWS of them over TURNS times QUADS quads.

    With GATED it has as many rows of gate, then of up.
    """
    let_next_start(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    PLANES: tl.constexpr = 32 // BITS
    HALVES: tl.constexpr = 2 if BITS == 4 and BLOCK[1] == 16 else 1
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    INTEGERS: tl.constexpr = CODES == "int4" or CODES == "uint4"
    OFFSET: tl.constexpr = INTEGERS and HALVES == 1 and not EXACT  # leaves by one sum of x
    pid = tl.program_id(0)
    split = tl.program_id(1)
    r = tl.arange(0, ROWS * PARTS)
    own = pid * ROWS + r % ROWS
    inside = own < features
    rows = own.to(tl.int64) + (r // ROWS) * features
    first = split * (TURNS * QUADS) + tl.arange(0, QUADS)
    # Codes and scales are on their way before the kernel in front has ended.
    w = _quads(weight_ptr, rows, inside, first, K, BITS)
    if BLOCK[1]:
        s = _lying(scale_ptr, rows, inside, first, 0, K, BITS, BLOCK)
        if HALVES == 2:
            s2 = _lying(scale_ptr, rows, inside, first, 1, K, BITS, BLOCK)
        if zero_ptr is not None:
            z = _lying(zero_ptr, rows, inside, first, 0, K, BITS, BLOCK)
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
        if TURNS > 1 and AHEAD:
            after = q + QUADS
            there = inside & (turn + 1 < TURNS)
            w_next = _quads(weight_ptr, rows, there, after, K, BITS)
            if BLOCK[1]:
                s_next = _lying(scale_ptr, rows, there, after, 0, K, BITS, BLOCK)
                if HALVES == 2:
                    s2_next = _lying(scale_ptr, rows, there, after, 1, K, BITS, BLOCK)
                if zero_ptr is not None:
                    z_next = _lying(zero_ptr, rows, there, after, 0, K, BITS, BLOCK)
        part = tl.zeros((ROWS * PARTS, QUADS, 4), tl.float32)
        other = tl.zeros((ROWS * PARTS, QUADS, 4), tl.float32)
        sums = tl.zeros((QUADS, 4), tl.float32)
        offset = tl.zeros((QUADS, 4), tl.float32)
        if BITS == 8:
            k = q[:, None] * 16 + tl.arange(0, 16)[None, :]
            planes = _bytes_apart(_input(x_ptr, k, norm, K, NORM))
        for j in tl.static_range(PLANES):
            if BITS == 8:
                x = planes[j]
            else:
                k = q[:, None] * 32 + 4 * j + tl.arange(0, 4)[None, :]
                x = _input(x_ptr, k, norm, K, NORM)
            if OFFSET:
                part += _nibble(w, j, mask.to(tl.uint32)) * x[None, :, :]
                offset += (_offset(j) + (8 if CODES == "int4" else 0)) * x
            elif HALVES == 2 and j >= 4:
                other += _plane(w, j, CODES, TABLE) * x[None, :, :]
            else:
                part += _plane(w, j, CODES, TABLE) * x[None, :, :]
            if zero_ptr is not None:
                sums += x
        p = tl.sum(part, 2)
        if OFFSET:
            p -= tl.sum(offset, 1)[None, :]
        if BLOCK[1]:
            if zero_ptr is not None:
                p -= z.to(tl.float32) * tl.sum(sums, 1)[None, :]
            acc += p * _scale(s, SCALES)
            if HALVES == 2:
                acc += tl.sum(other, 2) * _scale(s2, SCALES)
        else:
            acc += p
            if zero_ptr is not None:
                total += tl.sum(sums, 1)
        if TURNS > 1 and not AHEAD:
            after = q + QUADS
            there = inside & (turn + 1 < TURNS)
            w = _quads(weight_ptr, rows, there, after, K, BITS)
            if BLOCK[1]:
                s = _lying(scale_ptr, rows, there, after, 0, K, BITS, BLOCK)
                if HALVES == 2:
                    s2 = _lying(scale_ptr, rows, there, after, 1, K, BITS, BLOCK)
                if zero_ptr is not None:
                    z = _lying(zero_ptr, rows, there, after, 0, K, BITS, BLOCK)
        elif TURNS > 1:
            w = w_next
            if BLOCK[1]:
                s = s_next
                if HALVES == 2:
                    s2 = s2_next
                if zero_ptr is not None:
                    z = z_next
    y = tl.sum(acc, 1)
    if BLOCK[1] == 0:
        if zero_ptr is not None:
            y -= _of_rows(zero_ptr, rows, inside, BLOCK).to(tl.float32) * tl.sum(total, 0)
        y *= _scale(_of_rows(scale_ptr, rows, inside, BLOCK), SCALES)
    y *= _unit(CODES)
    if outer_ptr is not None:
        y *= tl.load(outer_ptr + rows, mask=inside, other=0.0)
    if NORM is not None and NORM != "layer":
        y *= factor
    ended = 0
    if SPLITS > 1:
        area: tl.constexpr = ROWS * PARTS
        theirs = partial_ptr + pid * (SPLITS * area) + r
        tl.store(theirs + split * area, y)
        tl.debug_barrier()  # all of the program's writes, before it says that they are there
        ended = tl.atomic_add(counter_ptr + pid, 1, sem="acq_rel")
        if ended == SPLITS - 1:
            tl.store(counter_ptr + pid, 0)
            tl.debug_barrier()
            y = tl.zeros((ROWS * PARTS,), tl.float32)
            for i in tl.static_range(SPLITS):
                y += tl.load(theirs + i * area, cache_modifier=".cg")
    if ended == SPLITS - 1:
        ends = (bias_ptr, residual_ptr, y_ptr)
        mine = pid * ROWS + tl.arange(0, ROWS)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(y, (2, ROWS)), (1, 0)))
            _finish(gate, up, mine, features, ends, (0, 0), ACTIVATION, GATED)
        else:
            _finish(y, y, mine, features, ends, (0, 0), ACTIVATION, GATED)


@triton.jit
def tile_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr,
    counter_ptr, count, features, x_stride, residual_stride,
    K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    QUADS: tl.constexpr, TURNS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [count, features] of x [count, K] on the matrix units, which take the weights first.

    A program sums a tile over TURNS times QUADS quads. With GATED it has as many rows of gate, then
    of up.
    """
    let_next_start(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    PLANES: tl.constexpr = 32 // BITS
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_N * PARTS)
    own = tl.program_id(1) * BLOCK_N + r % BLOCK_N
    inside = own < features
    rows = own.to(tl.int64) + (r // BLOCK_N) * features
    # Rows of x outside repeat the last one: nothing of theirs is written.
    x_row = x_ptr + tl.minimum(m, count - 1).to(tl.int64)[None, :] * x_stride
    first = split * (TURNS * QUADS) + tl.arange(0, QUADS)
    acc = tl.zeros((BLOCK_N * PARTS, BLOCK_M), tl.float32)
    wait_for_inputs(PDL)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        q = first + turn * QUADS
        w = _quads(weight_ptr, rows, inside, q, K, BITS)
        beside = _all_lying(scale_ptr, zero_ptr, rows, inside, q, K, BITS, SCALES, BLOCK, CODES)
        i = tl.arange(0, QUADS * 4)
        begin = (split * TURNS + turn) * (QUADS * 4 * PLANES)
        for j in tl.static_range(PLANES):
            k = begin + (4 * i + j if BITS == 8 else i // 4 * 32 + i % 4 + 4 * j)
            x = tl.load(x_row + k[:, None], mask=(k < K)[:, None], other=0.0)
            v = _meant(_plane(w, j, CODES, TABLE), beside, j // 4, zero_ptr, BLOCK)
            acc = dot(tl.reshape(v.to(x.dtype), (BLOCK_N * PARTS, QUADS * 4)), x, acc)
    if BLOCK[1] == 0:
        acc *= (_scale(_of_rows(scale_ptr, rows, inside, BLOCK), SCALES) * _unit(CODES))[:, None]
    if outer_ptr is not None:
        acc *= tl.load(outer_ptr + rows, mask=inside, other=0.0)[:, None]
    ended = 0
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        area: tl.constexpr = BLOCK_M * BLOCK_N * PARTS
        inner = r[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        theirs = partial_ptr + tile.to(tl.int64) * (SPLITS * area) + inner
        tl.store(theirs + split * area, acc)
        tl.debug_barrier()  # all of the program's writes, before it says that they are there
        ended = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if ended == SPLITS - 1:
            tl.store(counter_ptr + tile, 0)
            tl.debug_barrier()
            acc = tl.zeros((BLOCK_N * PARTS, BLOCK_M), tl.float32)
            for i in tl.static_range(SPLITS):
                acc += tl.load(theirs + i * area, cache_modifier=".cg")
    if ended == SPLITS - 1:
        ends = (bias_ptr, residual_ptr, residual_stride, y_ptr)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_M)), (2, 1, 0)))
            _finish_tile(gate, up, m, n, count, features, ends, ACTIVATION, GATED)
        else:
            y = tl.trans(acc)
            _finish_tile(y, y, m, n, count, features, ends, ACTIVATION, GATED)


@triton.jit
def _all_lying(
    scale_ptr, zero_ptr, rows, inside, q, K: tl.constexpr, BITS: tl.constexpr,
    SCALES: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Scales of quads and of their second halves, and zeros; [R, Q, 1] in float32."""
    s = 1.0
    s2 = 1.0
    z = 0.0
    if BLOCK[1]:
        s = _scale(_lying(scale_ptr, rows, inside, q, 0, K, BITS, BLOCK), SCALES) * _unit(CODES)
        s = s[:, :, None]
        s2 = s
        if BITS == 4 and BLOCK[1] == 16:
            s2 = _lying(scale_ptr, rows, inside, q, 1, K, BITS, BLOCK)
            s2 = (_scale(s2, SCALES) * _unit(CODES))[:, :, None]
        if zero_ptr is not None:
            z = _lying(zero_ptr, rows, inside, q, 0, K, BITS, BLOCK).to(tl.float32)[:, :, None]
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
    last = last[:, None, None]
    wait_for_inputs(PDL)  # what reads the memory that is written here has ended
    y_row = y_ptr + rows[:, None, None] * K
    dtype = y_ptr.dtype.element_ty
    for j in tl.static_range(32 // BITS):
        c = tl.arange(0, 4)[None, :]
        k = q[:, None] * 16 + 4 * c + j if BITS == 8 else q[:, None] * 32 + 4 * j + c
        v = _meant(_plane(w, j, CODES, TABLE), beside, j // 4, zero_ptr, BLOCK) * last
        mask = inside[:, None, None] & (k < K)[None, :, :]
        tl.store(y_row + k[None, :, :], v.to(dtype), mask=mask)
