"""Device side of quantized.py for many rows: tiles of results, whose codes registers hand on.

The matrix units read the weights from registers and x from shared memory. How codes lie is told in
`quantized_kernels`; here they are bytes. Triton keeps an operand in registers as far as its values
come from loads by operations on single elements.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from .conversions import as_floats
from .launch import INTERPRETED, dot, let_next_start, wait_for_inputs
from .linear_kernels import _finish_tile
from .quantized_kernels import _entry, _plane, _scale, _unit

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.constexpr_function
def _chunk(bits, columns, quads):
    """Bytes of a row of codes that share a scale, of quads that are read at a time.

    Sixteen are the least that the matrix units take; smaller groups have scales of their own.
    """
    whole = 16 * quads
    block = columns * bits // 8
    return min(block & -block, whole) if block >= 16 else whole


@triton.jit
def _of_bytes(b, HALF: tl.constexpr, CODES: tl.constexpr, table, dtype: tl.constexpr):
    """What bytes of 8-bit codes mean, or nibble HALF of each, exactly, in `dtype`."""
    PLAIN: tl.constexpr = _INTERPRETED or dtype == tl.float32
    if CODES == "table":
        y = _entry(b.to(tl.uint32), HALF, table).to(dtype)
    elif PLAIN:  # as words of which one part is asked for
        y = (_plane(b.to(tl.uint32), HALF, CODES, None) * _unit(CODES)).to(dtype)
    elif CODES == "int8":
        y = b.to(tl.int8, bitcast=True).to(dtype)
    elif CODES == "uint8":
        y = b.to(dtype)
    else:
        y = as_floats(b, HALF, CODES, dtype)
    return y


@triton.jit
def _of_chunk(
    ptr, lying, chunk, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """What rows have for a chunk, [R]; the last one's beyond the last."""
    return tl.load(ptr + lying + tl.minimum(chunk * COLUMNS // BLOCK, BLOCKS - 1))


@triton.jit
def _of_chunks(
    ptr, lying, first, COUNT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """`_of_chunk` for COUNT chunks, up to four, from number `first` on."""
    a = _of_chunk(ptr, lying, first, COLUMNS, BLOCK, BLOCKS)
    if COUNT == 1:
        return (a,)
    else:
        b = _of_chunk(ptr, lying, first + 1, COLUMNS, BLOCK, BLOCKS)
        if COUNT == 2:
            return a, b
        else:
            c = _of_chunk(ptr, lying, first + 2, COLUMNS, BLOCK, BLOCKS)
            d = _of_chunk(ptr, lying, first + 3, COLUMNS, BLOCK, BLOCKS)
            return a, b, c, d


@triton.jit
def _bytes(weight_ptr, rows, b, HELD: tl.constexpr):
    """Bytes number b of rows of codes [R, bytes]."""
    at = weight_ptr + rows[:, None] * HELD + b[None, :]
    w = tl.load(at, mask=(b < HELD)[None, :], other=0, eviction_policy="evict_first")
    return w.to(tl.uint8, bitcast=True)


@triton.constexpr_function
def _row_of_codes(width, bits):
    """Bytes of a row of codes."""
    return (width + 31) // 32 * 16 if bits == 4 else width


@triton.constexpr_function
def _blocks(width, columns):
    """Scales of a row."""
    return (width + columns - 1) // columns if columns else 1


@triton.jit
def _beginning(
    scale_ptr, zero_ptr, lying, chunk, K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """The first scales that `_sum_tile` takes, of chunk number `chunk` on, and zeros of rows."""
    BYTES: tl.constexpr = _chunk(BITS, BLOCK[1], QUADS)
    COLUMNS: tl.constexpr = BYTES * 8 // BITS
    zero_of_row = 0.0
    if zero_ptr is not None and BLOCK[1] == 0:
        zero_of_row = tl.load(zero_ptr + lying).to(tl.float32)
    scales = (0.0,)
    if BLOCK[1] >= COLUMNS:
        CHUNKS: tl.constexpr = QUADS * 16 // BYTES
        of_row: tl.constexpr = _blocks(K, BLOCK[1])
        scales = _of_chunks(scale_ptr, lying, chunk, CHUNKS, COLUMNS, BLOCK[1], of_row)
    return scales, zero_of_row


@triton.jit
def _sum_tile(
    x_row, weight_ptr, scale_ptr, zero_ptr, outer_ptr, rows, lying, first, begun,
    dtype: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, QUADS: tl.constexpr,
    TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products [R, M] of R rows of codes and M rows of x, summed over TURNS times QUADS quads.

    They are summed chunk by chunk of one scale a row, from number `first` on, so that codes become
    values in the registers that the matrix units read. `lying` is where rows' scales begin, and
    `begun` what `_beginning` gave: scales are fetched a turn ahead, as no copy to shared memory
    carries them. Zeros are not, since the layout of an operand in registers goes back to loads
    alone.
    """
    BYTES: tl.constexpr = _chunk(BITS, BLOCK[1], QUADS)
    CHUNKS: tl.constexpr = QUADS * 16 // BYTES
    COLUMNS: tl.constexpr = BYTES * 8 // BITS
    SMALL: tl.constexpr = BLOCK[1] > 0 and BLOCK[1] < COLUMNS
    EACH: tl.constexpr = BLOCK[1] >= COLUMNS  # chunks have scales of their own
    HELD: tl.constexpr = _row_of_codes(K, BITS)
    BLOCKS: tl.constexpr = _blocks(K, BLOCK[1])
    R: tl.constexpr = rows.shape[0]
    M: tl.constexpr = x_row.shape[0]
    scales, zero_of_row = begun
    acc = tl.zeros((R, M), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        chunk = first + turn * CHUNKS
        next_scales = scales
        if EACH:
            at = chunk + CHUNKS
            next_scales = _of_chunks(scale_ptr, lying, at, CHUNKS, COLUMNS, BLOCK[1], BLOCKS)
        for part in tl.static_range(CHUNKS):
            b = (chunk + part) * BYTES + tl.arange(0, BYTES)
            w = _bytes(weight_ptr, rows, b, HELD)
            if SMALL:
                of_byte = (b // 16 * 32 + b % 4 * 8) // BLOCK[1]
                at = lying[:, None] + tl.minimum(of_byte, BLOCKS - 1)[None, :]
                s = _scale(tl.load(scale_ptr + at), SCALES)
            p = tl.zeros((R, M), tl.float32) if EACH else acc
            for half in tl.static_range(8 // BITS):
                v = _of_bytes(w, half, CODES, TABLE, dtype)
                if zero_ptr is not None:
                    z = zero_of_row
                    if EACH:
                        z = _of_chunk(zero_ptr, lying, chunk + part, COLUMNS, BLOCK[1], BLOCKS)
                    v = (v.to(tl.float32) - z.to(tl.float32)[:, None]).to(dtype)
                if SMALL:
                    v = (v.to(tl.float32) * s).to(dtype)
                k = b // 16 * 32 + half * 16 + b % 16 if BITS == 4 else b
                x = tl.load(x_row[None, :] + k[:, None], mask=(b < HELD)[:, None], other=0.0)
                p = dot(v, x, p)
            acc = acc + p * _scale(scales[part], SCALES)[:, None] if EACH else p
        scales = next_scales
    if BLOCK[1] == 0:
        acc *= _scale(tl.load(scale_ptr + lying), SCALES)[:, None]
    if outer_ptr is not None:
        acc *= tl.load(outer_ptr + rows)[:, None]
    return acc


@triton.jit
def order_kernel(
    x_ptr, y_ptr, x_stride, K: tl.constexpr, QUADS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rows of x [rows, K] in y [rows, quads * 32], in the order of nibbles; zeros follow K.

    Byte 4 c + i of a quad holds its columns 8 i + c and 8 i + 4 + c: of each quad the 16 columns of
    lower nibbles come first, then those of upper ones, both in the order of bytes.
    """
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    i = tl.arange(0, 32)
    k = q[:, None] * 32 + (i % 4 * 8 + i // 16 * 4 + i % 16 // 4)[None, :]
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0)
    COUNT: tl.constexpr = (K + 31) // 32
    y_at = y_ptr + row * (COUNT * 32) + q[:, None] * 32 + i[None, :]
    tl.store(y_at, x, mask=(q < COUNT)[:, None])


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

    Codes of 4 bits want x as `order_kernel` gives it. A program sums a tile over TURNS times QUADS
    quads. With GATED it has as many rows of gate, then of up.
    """
    let_next_start(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_N * PARTS)
    own = tl.program_id(1) * BLOCK_N + r % BLOCK_N
    # Rows outside repeat the last one: nothing of theirs is written.
    rows = tl.minimum(own, features - 1).to(tl.int64) + (r // BLOCK_N) * features
    x_row = x_ptr + tl.minimum(m, count - 1).to(tl.int64) * x_stride
    lying = (rows // BLOCK[0] if BLOCK[0] else rows * 0) * _blocks(K, BLOCK[1])
    first = split * TURNS * (QUADS * 16 // _chunk(BITS, BLOCK[1], QUADS))
    begun = _beginning(scale_ptr, zero_ptr, lying, first, K, BITS, BLOCK, QUADS)
    wait_for_inputs(PDL)
    acc = _sum_tile(
        *(x_row, weight_ptr, scale_ptr, zero_ptr, outer_ptr, rows, lying, first, begun),
        *(x_ptr.dtype.element_ty, K, CODES, BITS, TABLE, SCALES, BLOCK, QUADS, TURNS, STAGES),
    )
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
