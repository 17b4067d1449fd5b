"""Device side of linear.py: the matrix-vector kernel, and the one for the matrix units."""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from .activation import activate
from .launch import dot, let_next_start, wait_for_inputs


@triton.constexpr_function
def _start(blocks, part):
    """The first column of a part."""
    return sum(blocks[:part])


@triton.constexpr_function
def _fills(blocks, part, width):
    """Whether a part lies within the columns as a whole."""
    return sum(blocks[: part + 1]) <= width


@triton.jit
def _columns(PART: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr):
    """Columns of a part, and which of them there are."""
    columns = _start(BLOCKS, PART) + tl.arange(0, BLOCKS[PART])
    return columns, columns < K


@triton.jit
def _input(x_ptr, norm, K: tl.constexpr, BLOCKS: tl.constexpr, NORM: tl.constexpr):
    """Float32 x of one row in parts, normed over its K elements; what lies outside is 0.

    And a factor, RMSNorm's or 1, that belongs to the products of this x: their sums need not wait
    for it.
    """
    weight_ptr, bias_ptr, eps = norm
    xs = ()
    for part in tl.static_range(len(BLOCKS)):
        columns, inside = _columns(part, K, BLOCKS)
        xs += (tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32),)
    factor = 1.0
    if NORM is not None:
        weights = ()
        for part in tl.static_range(len(BLOCKS)):
            columns, inside = _columns(part, K, BLOCKS)
            weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            weights += (weight + 1.0 if NORM == "rms_offset" else weight,)
        if NORM == "layer":
            mean = tl.sum(xs[0], 0)
            for part in tl.static_range(1, len(BLOCKS)):
                mean += tl.sum(xs[part], 0)
            mean = mean / K
            moved = ()
            for part in tl.static_range(len(BLOCKS)):
                _, inside = _columns(part, K, BLOCKS)
                moved += (tl.where(inside, xs[part] - mean, 0.0),)
            xs = moved
        squares = tl.sum(xs[0] * xs[0], 0)
        for part in tl.static_range(1, len(BLOCKS)):
            squares += tl.sum(xs[part] * xs[part], 0)
        scale = 1.0 / tl.sqrt(squares / K + eps)
        normed = ()
        for part in tl.static_range(len(BLOCKS)):
            if NORM == "layer":
                columns, inside = _columns(part, K, BLOCKS)
                bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
                normed += (xs[part] * (scale * weights[part]) + bias,)
            else:
                normed += (xs[part] * weights[part],)
        xs = normed
        if NORM != "layer":
            factor = scale
    return xs, factor


@triton.jit
def _weights(weight_ptr, rows, features, K: tl.constexpr, BLOCKS: tl.constexpr):
    """Rows of weights in parts [ROWS, part]."""
    held = ()
    for part in tl.static_range(len(BLOCKS)):
        columns, inside = _columns(part, K, BLOCKS)
        at = rows.to(tl.int64)[:, None] * K + columns[None, :]
        mask = (rows < features)[:, None]
        if not _fills(BLOCKS, part, K):
            mask = mask & inside[None, :]
        held += (tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return held


@triton.jit
def _products(w, xs, BLOCKS: tl.constexpr):
    """Sums [ROWS] of weights times x, both in parts."""
    y = tl.sum(w[0].to(tl.float32) * xs[0][None, :], 1)
    for part in tl.static_range(1, len(BLOCKS)):
        y += tl.sum(w[part].to(tl.float32) * xs[part][None, :], 1)
    return y


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr,
    features, x_stride, residual_stride, eps,
    K: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [COUNT, features] of x [COUNT, K]; BLOCKS are widths of parts, which cover K.

    PROGRAMS 0 means a program for each block of weight rows.
    """
    let_next_start(PDL)
    norm = (norm_weight_ptr, norm_bias_ptr, eps)
    ends = (bias_ptr, residual_ptr, y_ptr)
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    # The weights are on their way before the kernel in front has ended.
    w = _weights(weight_ptr, rows, features, K, BLOCKS)
    up_ptr = weight_ptr + tl.cast(features, tl.int64) * K
    up = w
    if GATED:
        up = _weights(up_ptr, rows, features, K, BLOCKS)
    wait_for_inputs(PDL)
    if PROGRAMS == 0:
        for i in tl.static_range(COUNT):
            xs, factor = _input(x_ptr + i * x_stride, norm, K, BLOCKS, NORM)
            y = _products(w, xs, BLOCKS) * factor
            u = _products(up, xs, BLOCKS) * factor if GATED else y
            offsets = (i * residual_stride, tl.cast(features, tl.int64) * i)
            _finish(y, u, rows, features, ends, offsets, ACTIVATION, GATED)
    else:
        tl.static_assert(COUNT == 1, "programs that go through several blocks keep one row of x")
        xs, factor = _input(x_ptr, norm, K, BLOCKS, NORM)
        for block in range(pid, tl.cdiv(features, ROWS), PROGRAMS):
            rows = block * ROWS + tl.arange(0, ROWS)
            following = rows + PROGRAMS * ROWS
            w_next = _weights(weight_ptr, following, features, K, BLOCKS)
            y = _products(w, xs, BLOCKS) * factor
            u = y
            if GATED:
                up_next = _weights(up_ptr, following, features, K, BLOCKS)
                u = _products(up, xs, BLOCKS) * factor
                up = up_next
            w = w_next
            _finish(y, u, rows, features, ends, (0, 0), ACTIVATION, GATED)


@triton.jit
def _finish(
    y, up, rows, features, ends, offsets, ACTIVATION: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Bias, activation, gate and residual of one row's products `y`, written at `rows`."""
    bias_ptr, residual_ptr, y_ptr = ends
    residual_offset, y_offset = offsets
    inside = rows < features
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    y = activate(y, ACTIVATION)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + features + rows, mask=inside, other=0.0).to(tl.float32)
        y *= up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + residual_offset + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_offset + rows, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def tile_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr,
    count, features, x_stride, residual_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [count, features] of x [count, K]; a program sums one tile over SPLIT_K of the columns."""
    let_next_start(PDL)
    ends = (bias_ptr, residual_ptr, residual_stride, y_ptr)
    split = tl.program_id(2)
    begin = split * SPLIT_K
    end = tl.minimum(begin + SPLIT_K, K)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows outside repeat the last one: nothing of theirs is written.
    n_at = weight_ptr + tl.minimum(n, features - 1).to(tl.int64)[:, None] * K
    up_offset = tl.cast(features, tl.int64) * K
    x_at = x_ptr + tl.minimum(m, count - 1).to(tl.int64)[:, None] * x_stride + begin + k[None, :]
    w_at = n_at + begin + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait_for_inputs(PDL)
    for done in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_at)
            w = tl.load(w_at, eviction_policy="evict_first")
        else:
            inside = (k < K - done)[None, :]
            x = tl.load(x_at, mask=inside, other=0.0)
            w = tl.load(w_at, mask=inside, other=0.0, eviction_policy="evict_first")
        acc = dot(x, w.T, acc)
        if GATED:
            if K % BLOCK_K == 0:
                w = tl.load(w_at + up_offset, eviction_policy="evict_first")
            else:
                w = tl.load(w_at + up_offset, mask=inside, other=0.0, eviction_policy="evict_first")
            up = dot(x, w.T, up)
        x_at += BLOCK_K
        w_at += BLOCK_K
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if SPLITS == 1:
        _finish_tile(acc, up, m, n, count, features, ends, ACTIVATION, GATED)
    else:
        parts: tl.constexpr = GATED + 1
        inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        area: tl.constexpr = BLOCK_M * BLOCK_N
        mine = partial_ptr + (tile.to(tl.int64) * SPLITS + split) * parts * area
        tl.store(mine + inner, acc)
        if GATED:
            tl.store(mine + area + inner, up)
        tl.debug_barrier()  # all of the program's writes, before it says that they are there
        ended = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if ended == SPLITS - 1:
            tl.store(counter_ptr + tile, 0)
            tl.debug_barrier()
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            theirs = partial_ptr + tile.to(tl.int64) * SPLITS * parts * area + inner
            for _ in tl.static_range(SPLITS):
                acc += tl.load(theirs, cache_modifier=".cg")
                if GATED:
                    up += tl.load(theirs + area, cache_modifier=".cg")
                theirs += parts * area
            _finish_tile(acc, up, m, n, count, features, ends, ACTIVATION, GATED)


@triton.jit
def _finish_tile(
    y, up, m, n, count, features, ends, ACTIVATION: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Bias, activation, gate and residual of a tile of products, written at rows m, columns n."""
    bias_ptr, residual_ptr, residual_stride, y_ptr = ends
    within = n < features
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=within, other=0.0).to(tl.float32)[None, :]
    y = activate(y, ACTIVATION)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + features + n, mask=within, other=0.0).to(tl.float32)[None, :]
        y *= up
    m = m.to(tl.int64)
    mask = (m < count)[:, None] & within[None, :]
    if residual_ptr is not None:
        at = m[:, None] * residual_stride + n[None, :]
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y_at = y_ptr + m[:, None] * features + n[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
