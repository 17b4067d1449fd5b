"""Device side of quantized.py for many rows: tiles of results, whose codes registers hand on.

The matrix units read the weights from registers and x from shared memory. How codes lie is told in
`quantized_kernels`; here they are read as units of one or two bytes, a turn of some quads at a
time, which has one or more shares with scales of their own. Triton keeps an operand in registers as
far as its values come from loads by operations on single elements.
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
def _shares(bits, columns, quads):
    """Shares of a turn of so many quads; 0 if groups are smaller than a quad."""
    whole, block = 16 * quads, columns * bits // 8
    return whole // min(block & -block, whole) if block >= 16 else 0


@triton.constexpr_function
def unit_bytes(bits, columns):
    """What is loaded as one: two bytes of codes of 4 bits where they share a scale, else one."""
    return 2 if bits == 4 and columns % 32 == 0 else 1


@triton.jit
def _of_units(w, PART: tl.constexpr, CODES: tl.constexpr, table, dtype: tl.constexpr):
    """What units mean, exactly, in `dtype`: as 8-bit codes, or their nibble PART as 4-bit ones."""
    PLAIN: tl.constexpr = _INTERPRETED or dtype == tl.float32
    if CODES == "table":
        y = _entry(w.to(tl.uint32), PART, table).to(dtype)
    elif PLAIN:  # as words of which one part is asked for
        y = (_plane(w.to(tl.uint32), PART, CODES, None) * _unit(CODES)).to(dtype)
    elif CODES == "uint8":
        y = w.to(dtype)
    else:
        y = as_floats(w, PART, CODES, dtype)
    return y


@triton.constexpr_function
def _is_exact(scales, dtype):
    """True if a float of 16 bits has all bits of a scale; those that float16 cuts off are tiny."""
    return scales.startswith("float8") or scales == (
        "float16" if dtype == tl.float16 else "bfloat16"
    )


@triton.constexpr_function
def _raised(scales, dtype):
    """What scales are multiplied by, and values divided: float16 has few bits of small numbers."""
    return 128.0 if dtype == tl.float16 and not _is_exact(scales, dtype) else 1.0


@triton.constexpr_function
def _product(scales, dtype):
    """PTX for two values of 16 bits times a scale, whose second part is what the first lacks."""
    kind = "f16x2" if dtype == tl.float16 else "bf16x2"
    if _is_exact(scales, dtype):
        return f"mul.rn.{kind} $0, $1, $2;"
    divided = "mov.b32 v, $1; "
    if dtype == tl.float16:
        divided = "mov.b32 v, 0x20002000; mul.rn.f16x2 v, $1, v; "  # 1 / 128
    sums = f"mul.rn.{kind} t, v, $4; fma.rn.{kind} $0, v, $2, t; "
    return "{ .reg .b32 t, v; " + divided + sums + "}"


@triton.jit
def _times(v, s, rest, PLAIN: tl.constexpr, SCALES: tl.constexpr, dtype: tl.constexpr):
    """v [R, C] times s, rounded once: s in float32 if PLAIN, else s and `rest` of `_words`.

    Two values that a thread has one after the other must share a scale, if not PLAIN.
    """
    if PLAIN:
        y = (v.to(tl.float32) * s).to(dtype)
    else:
        CODE: tl.constexpr = _product(SCALES, dtype)
        how: tl.constexpr = "=r,r,r,r,r,r"
        if dtype == tl.float16:
            y = tl.inline_asm_elementwise(CODE, how, [v, s, rest], tl.float16, True, 2)
        else:
            y = tl.inline_asm_elementwise(CODE, how, [v, s, rest], tl.bfloat16, True, 2)
    return y


@triton.jit
def _of_share(
    ptr, lying, share, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """What rows have for share number `share`, of COLUMNS columns, [R, 1]; the last's beyond it."""
    return tl.load(ptr + lying + tl.minimum(share * COLUMNS // BLOCK, BLOCKS - 1))[:, None]


@triton.jit
def _from_unit(ptr, never, FIRST: tl.constexpr, UNITS: tl.constexpr):
    """All bits set for units from number FIRST on, [1, UNITS] int32; `never` is at most 0.

    An operand in registers goes back to loads alone, so that it is a load that never happens.
    """
    i = tl.arange(0, UNITS)
    at = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + i
    return tl.load(at, mask=i < never, other=-(i // FIRST > 0).to(tl.int32))[None, :]


@triton.jit
def _words(s, SCALES: tl.constexpr, dtype: tl.constexpr):
    """Each s in float32 as a word of two equal floats of 16 bits, and what they lack likewise."""
    s *= _raised(SCALES, dtype)
    high = s.to(dtype)
    low = (s - high.to(tl.float32)).to(dtype)
    both = high.to(tl.uint16, bitcast=True).to(tl.int32) * 0x10001
    return both, low.to(tl.uint16, bitcast=True).to(tl.int32) * 0x10001


@triton.jit
def _units(weight_ptr, rows, u, HELD: tl.constexpr, WIDE: tl.constexpr):
    """Units number u of rows of codes [R, units], of WIDE bytes each."""
    COUNT: tl.constexpr = HELD // WIDE
    kind: tl.constexpr = tl.uint16 if WIDE == 2 else tl.uint8
    at = weight_ptr.to(tl.pointer_type(kind), bitcast=True) + rows[:, None] * COUNT + u[None, :]
    return tl.load(at, mask=(u < COUNT)[None, :], other=0, eviction_policy="evict_first")


@triton.constexpr_function
def _row_of_codes(width, bits):
    """Bytes of a row of codes."""
    return (width + 31) // 32 * 16 if bits == 4 else width


@triton.constexpr_function
def _blocks(width, columns):
    """Scales of a row."""
    return (width + columns - 1) // columns if columns else 1


@triton.jit
def _sum_tile(
    x_row, weight_ptr, scale_ptr, zero_ptr, outer_ptr, rows, lying, first,
    dtype: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, QUADS: tl.constexpr,
    TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products [R, M] of R rows of codes and M rows of x, summed over TURNS times QUADS quads.

    Codes become values in the registers that the matrix units read, times the scales of groups;
    those of rows, and `outer`, are left to the sums. `first` is the number of the first turn, and
    `lying` is where rows' scales begin. The layout of an operand in registers goes back to loads
    alone, so that scales are not fetched a turn ahead. Codes of 4 bits want x in blocks of QUADS
    quads, as `order_kernel` gives it.
    """
    COLUMNS: tl.constexpr = QUADS * 128 // BITS
    SHARES: tl.constexpr = _shares(BITS, BLOCK[1], QUADS)
    WIDE: tl.constexpr = unit_bytes(BITS, BLOCK[1])
    UNITS: tl.constexpr = QUADS * 16 // WIDE
    HELD: tl.constexpr = _row_of_codes(K, BITS)
    BLOCKS: tl.constexpr = _blocks(K, BLOCK[1])
    # Of rows that begin anywhere threads have columns in an order that `_times` does not know.
    PLAIN: tl.constexpr = _INTERPRETED or dtype == tl.float32 or HELD % 4 != 0
    R: tl.constexpr = rows.shape[0]
    M: tl.constexpr = x_row.shape[0]
    zero_of_row = 0.0
    if zero_ptr is not None and BLOCK[1] == 0:
        zero_of_row = tl.load(zero_ptr + lying)[:, None]
    acc = tl.zeros((R, M), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        u = (first + turn) * UNITS + tl.arange(0, UNITS)
        w = _units(weight_ptr, rows, u, HELD, WIDE)
        z, s, rest = zero_of_row, 0.0, 0.0
        if BLOCK[1] > 0 and SHARES == 0:
            of_unit = (u // 16 * 32 + u % 4 * 8 if BITS == 4 else u) // BLOCK[1]
            at = lying[:, None] + tl.minimum(of_unit, BLOCKS - 1)[None, :]
            s = _scale(tl.load(scale_ptr + at), SCALES)
            if not PLAIN:
                s, rest = _words(s, SCALES, dtype)
        elif BLOCK[1] > 0:
            for part in tl.static_range(SHARES):
                share = (first + turn) * SHARES + part
                own = _of_share(scale_ptr, lying, share, COLUMNS // SHARES, BLOCK[1], BLOCKS)
                own = _scale(own, SCALES)
                if PLAIN:
                    own = own.to(tl.int32, bitcast=True)
                else:
                    own, more = _words(own, SCALES, dtype)
                if zero_ptr is not None:
                    zero = _of_share(zero_ptr, lying, share, COLUMNS // SHARES, BLOCK[1], BLOCKS)
                    zero = zero.to(tl.float32)
                # Each unit gets the scale of its share by operations on the scale's bits.
                if part == 0:
                    s = own
                    if not PLAIN:
                        rest = more
                    if zero_ptr is not None:
                        z = zero
                else:
                    here = _from_unit(scale_ptr, -first, part * (UNITS // SHARES), UNITS)
                    s = s ^ ((s ^ own) & here)
                    if not PLAIN:
                        rest = rest ^ ((rest ^ more) & here)
                    if zero_ptr is not None:
                        z = tl.where(here != 0, zero, z)
            if PLAIN:
                s = s.to(tl.float32, bitcast=True)
        if _is_exact(SCALES, dtype):
            rest = s
        for nibble in tl.static_range(WIDE * 8 // BITS):
            v = _of_units(w, nibble, CODES, TABLE, dtype)
            if zero_ptr is not None:
                v = (v.to(tl.float32) - z.to(tl.float32)).to(dtype)
            if BLOCK[1] > 0:
                v = _times(v, s, rest, PLAIN, SCALES, dtype)
            k = u
            if BITS == 4:
                k = (first + turn) * COLUMNS + nibble * UNITS + tl.arange(0, UNITS)
            mask = (u < HELD // WIDE)[:, None]
            x = tl.load(x_row[None, :] + k[:, None], mask=mask, other=0.0)
            acc = dot(v, x, acc)
    if BLOCK[1] == 0:
        acc *= _scale(tl.load(scale_ptr + lying), SCALES)[:, None]
    if outer_ptr is not None:
        acc *= tl.load(outer_ptr + rows)[:, None]
    return acc


@triton.jit
def order_kernel(
    x_ptr, y_ptr, x_stride, K: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of x [rows, K] in y [rows, blocks * UNITS * 2 * WIDE], in the order of nibbles.

    Of each block of UNITS units of WIDE bytes the columns of the lowest nibbles come first. Byte
    4 c + i of a quad holds its columns 8 i + c and 8 i + 4 + c. Zeros follow K.
    """
    let_next_start(PDL)
    COLUMNS: tl.constexpr = UNITS * 2 * WIDE
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    i = tl.arange(0, COLUMNS)
    nibble = i // UNITS
    byte = i % UNITS * WIDE + nibble // 2
    k = byte // 16 * 32 + byte % 4 * 8 + nibble % 2 * 4 + byte % 16 // 4
    k = block[:, None] * COLUMNS + k[None, :]
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0)
    COUNT: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    y_at = y_ptr + row * (COUNT * COLUMNS) + block[:, None] * COLUMNS + i[None, :]
    tl.store(y_at, x, mask=(block < COUNT)[:, None])


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
    first = split * TURNS
    wait_for_inputs(PDL)
    acc = _sum_tile(
        *(x_row, weight_ptr, scale_ptr, zero_ptr, outer_ptr, rows, lying, first),
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
