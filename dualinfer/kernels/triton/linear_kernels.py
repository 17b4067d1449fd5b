"""Device side of linear.py: two matrix-vector kernels, and the one for the matrix units."""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from .activation import activate
from .launch import dot, fetch_line, let_next_start, wait_for_inputs


@triton.jit
def _norm_weights(norm, inside, columns, NORM: tl.constexpr):
    """A LayerNorm's weight and bias, as they are held."""
    weight, bias = 0.0, 0.0
    if NORM == "layer":
        weight = tl.load(norm[0] + columns, mask=inside, other=0.0)
        bias = tl.load(norm[1] + columns, mask=inside, other=0.0)
    return weight, bias


@triton.jit
def _layer_normed(x, inside, weights, eps, K: tl.constexpr):
    """Float32 x of one row with mean 0 and variance 1, times weight, plus bias."""
    weight, bias = weights
    x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps) * weight.to(tl.float32)
    return x + bias.to(tl.float32)


@triton.jit
def _normed(x, inside, norm, columns, K: tl.constexpr, NORM: tl.constexpr):
    """Float32 x of one row, normed over its K elements; what lies outside is 0. And a factor.

    The factor, RMSNorm's or 1, belongs to the products of this x: their sums need not wait for it.
    """
    weight_ptr, bias_ptr, eps = norm
    factor = 1.0
    if NORM is not None:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if NORM == "layer":
            mean = tl.sum(x, 0) / K
            x = tl.where(inside, x - mean, 0.0)
            x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps) * weight
            x += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        else:
            factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
            if NORM == "rms_offset":
                weight += 1.0
            x *= weight
    return x, factor


@triton.jit
def _row(
    x_ptr, stream, inside, norm, weights, columns, K: tl.constexpr, NORM: tl.constexpr,
    LOADED: tl.constexpr,
):  # fmt: skip
    """A row of x, summed with what is to be added before its norm, and normed: as `_normed`.

    With LOADED a LayerNorm's `weights` are there. One program keeps the normed row for whoever adds
    it later.
    """
    before_ptr, normed_ptr = stream
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if before_ptr is not None:
        x += tl.load(before_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if LOADED:
        factor = 1.0
        x = _layer_normed(x, inside, weights, norm[2], K)
    else:
        x, factor = _normed(x, inside, norm, columns, K, NORM)
    if normed_ptr is not None:  # noqa: SIM102 - a constant, then a value
        if tl.program_id(0) == 0:
            normed = (x * factor).to(normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + columns, normed, mask=inside)
    return x, factor


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, before_ptr,
    normed_ptr, y_ptr, features, x_stride, residual_stride, eps,
    K: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [COUNT, features] of x [COUNT, K]; BLOCK_K covers K.

    `before` [K] is added to a single x before its norm, and `normed` [K] becomes norm(x + before).
    PROGRAMS 0 means a program for each block of weight rows.
    """
    let_next_start(PDL)
    norm = (norm_weight_ptr, norm_bias_ptr, eps)
    stream = (before_ptr, normed_ptr)
    ends = (bias_ptr, residual_ptr, y_ptr)
    pid = tl.program_id(0)
    columns = tl.arange(0, BLOCK_K)
    inside = columns < K
    rows = pid * ROWS + tl.arange(0, ROWS)
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]
    mask = (rows < features)[:, None] & inside[None, :]
    # The weights are on their way before the kernel in front has ended.
    w = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    up_ptr = weight_ptr + tl.cast(features, tl.int64) * K
    up = w
    if GATED:
        up = tl.load(up_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    # So are biases and, as registers allow, the weights of a norm.
    biases = _biases(bias_ptr, rows, features, GATED)
    LOADED: tl.constexpr = NORM == "layer" and BLOCK_K <= 2048
    weights = 0.0, 0.0
    if LOADED:
        weights = _norm_weights(norm, inside, columns, NORM)
    elif NORM is not None:
        fetch_line(norm_weight_ptr, K, pid, PDL)
    wait_for_inputs(PDL)
    if PROGRAMS == 0:
        for i in tl.static_range(COUNT):
            added = _added(residual_ptr, i * residual_stride, rows, features)
            x_at = x_ptr + i * x_stride
            x, factor = _row(x_at, stream, inside, norm, weights, columns, K, NORM, LOADED)
            y = tl.sum(w.to(tl.float32) * x[None, :], 1) * factor
            u = tl.sum(up.to(tl.float32) * x[None, :], 1) * factor if GATED else y
            y_offset = tl.cast(features, tl.int64) * i
            _end(y, u, rows, features, biases, added, ends, y_offset, ACTIVATION, GATED)
    else:
        tl.static_assert(COUNT == 1, "programs that go through several blocks keep one row of x")
        added = _added(residual_ptr, 0, rows, features)
        x, factor = _row(x_ptr, stream, inside, norm, weights, columns, K, NORM, LOADED)
        for block in range(pid, tl.cdiv(features, ROWS), PROGRAMS):
            rows = block * ROWS + tl.arange(0, ROWS)
            following = rows + PROGRAMS * ROWS
            at = following.to(tl.int64)[:, None] * K + columns[None, :]
            mask = (following < features)[:, None] & inside[None, :]
            w_next = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
            own_biases, own_added = biases, added
            if bias_ptr is not None:
                biases = _biases(bias_ptr, following, features, GATED)
            if residual_ptr is not None:
                added = _added(residual_ptr, 0, following, features)
            y = tl.sum(w.to(tl.float32) * x[None, :], 1) * factor
            u = y
            if GATED:
                up_next = tl.load(up_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
                u = tl.sum(up.to(tl.float32) * x[None, :], 1) * factor
                up = up_next
            w = w_next
            _end(y, u, rows, features, own_biases, own_added, ends, 0, ACTIVATION, GATED)


@triton.jit
def _biases(bias_ptr, rows, features, GATED: tl.constexpr):
    """Biases of `rows`, and of up's; 0 where there are none."""
    bias, up = 0.0, 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=rows < features, other=0.0)
        if GATED:
            up = tl.load(bias_ptr + features + rows, mask=rows < features, other=0.0)
    return bias, up


@triton.jit
def _added(residual_ptr, offset, rows, features):
    """What is added to `rows`; 0 where nothing is."""
    added = 0.0
    if residual_ptr is not None:
        added = tl.load(residual_ptr + offset + rows, mask=rows < features, other=0.0)
    return added


@triton.jit
def _end(
    y, up, rows, features, biases, added, ends, offset, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Bias, activation, gate and residual of one row's products `y`, written at `rows`."""
    bias_ptr, residual_ptr, y_ptr = ends
    bias, up_bias = biases
    if bias_ptr is not None:
        y += bias.to(tl.float32)
    y = activate(y, ACTIVATION)
    if GATED:
        if bias_ptr is not None:
            up += up_bias.to(tl.float32)
        y *= up
    if residual_ptr is not None:
        y += added.to(tl.float32)
    tl.store(y_ptr + offset + rows, y.to(y_ptr.dtype.element_ty), mask=rows < features)


@triton.jit
def _finish(
    y, up, rows, features, ends, offsets, ACTIVATION: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """As `_end`, with biases and the residual by pointers."""
    bias_ptr, residual_ptr, _ = ends
    residual_offset, offset = offsets
    biases = _biases(bias_ptr, rows, features, GATED)
    added = _added(residual_ptr, residual_offset, rows, features)
    _end(y, up, rows, features, biases, added, ends, offset, ACTIVATION, GATED)


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


@triton.constexpr_function
def parts(width, columns):
    """Where the parts begin that `columns` at most are read in, and their sizes, powers of two.

    The widest comes first. They are exact but for the last: a rest of an eighth of the width or
    less is one part, which may reach past the end.
    """
    found, begin = [], 0
    while begin < width:
        rest = width - begin
        size = min(columns, 1 << (rest.bit_length() - 1))
        if rest <= columns and 8 * rest <= width:
            size = 1 << (rest - 1).bit_length()
        found.append((begin, size))
        begin += size
    return tuple(found)


@triton.constexpr_function
def _count(width, columns):
    return len(parts(width, columns))


@triton.constexpr_function
def _begin(i, width, columns):
    return parts(width, columns)[i][0]


@triton.constexpr_function
def _size(i, width, columns):
    return parts(width, columns)[i][1]


@triton.constexpr_function
def _is_alike(i, width, columns):
    """True if part i is as wide as the one in front of it."""
    sizes = [size for _, size in parts(width, columns)]
    return sizes[i] == sizes[i - 1]


@triton.constexpr_function
def _is_exact(i, width, columns):
    """True if part i reaches no further than the width."""
    return sum(parts(width, columns)[i]) <= width


@triton.jit
def _part(i: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of part i."""
    SIZE: tl.constexpr = _size(i, K, COLUMNS)
    return _begin(i, K, COLUMNS) + tl.arange(0, SIZE)


@triton.jit
def _weights_in_parts(weight_ptr, rows, features, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of the weights, a tuple of parts [ROWS, size]."""
    found = ()
    for i in tl.static_range(_count(K, COLUMNS)):
        columns = _part(i, K, COLUMNS)
        at = rows.to(tl.int64)[:, None] * K + columns[None, :]
        mask = (rows < features)[:, None]
        if not _is_exact(i, K, COLUMNS):
            mask = mask & (columns < K)[None, :]
        w = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        found = found + (w,)  # noqa: RUF005 - Triton unpacks no tuples
    return found


@triton.jit
def _row_in_parts(ptr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """A row, a tuple of float32 parts; what lies outside is 0."""
    found = ()
    for i in tl.static_range(_count(K, COLUMNS)):
        columns = _part(i, K, COLUMNS)
        if _is_exact(i, K, COLUMNS):
            x = tl.load(ptr + columns)
        else:
            x = tl.load(ptr + columns, mask=columns < K, other=0.0)
        found = found + (x.to(tl.float32),)  # noqa: RUF005
    return found


@triton.jit
def _sum_of_parts(terms, AXIS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum over all parts: those of one size are added before their lanes' sums are."""
    total = 0.0
    own = terms[0]
    for i in tl.static_range(1, _count(K, COLUMNS)):
        if _is_alike(i, K, COLUMNS):
            own += terms[i]
        else:
            total += tl.sum(own, AXIS)
            own = terms[i]
    return total + tl.sum(own, AXIS)


@triton.jit
def _squares(x, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of the squares of a row in parts."""
    found = ()
    for i in tl.static_range(_count(K, COLUMNS)):
        found = found + (x[i] * x[i],)  # noqa: RUF005
    return _sum_of_parts(found, 0, K, COLUMNS)


@triton.jit
def _products(w, x, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Products [ROWS] of rows of the weights with a row of x, both in parts."""
    found = ()
    for i in tl.static_range(_count(K, COLUMNS)):
        found = found + (w[i].to(tl.float32) * x[i][None, :],)  # noqa: RUF005
    return _sum_of_parts(found, 1, K, COLUMNS)


@triton.jit
def _normed_in_parts(x, norm, weights, K: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr):
    """As `_normed`, of a row in parts; `weights` and biases of a LayerNorm are there already."""
    factor = 1.0
    mean = 0.0
    if NORM == "layer":
        mean = _sum_of_parts(x, 0, K, COLUMNS) / K
        centered = ()
        for i in tl.static_range(_count(K, COLUMNS)):
            less = x[i] - mean
            if not _is_exact(i, K, COLUMNS):
                less = tl.where(_part(i, K, COLUMNS) < K, less, 0.0)
            centered = centered + (less,)  # noqa: RUF005
        x = centered
    if NORM is not None:
        factor = 1.0 / tl.sqrt(_squares(x, K, COLUMNS) / K + norm[2])
        gains, shifts = weights
        found = ()
        for i in tl.static_range(_count(K, COLUMNS)):
            if NORM == "layer":
                own = x[i] * (factor * gains[i]) + shifts[i]
            elif NORM == "rms_offset":
                own = x[i] * (gains[i] + 1.0)
            else:
                own = x[i] * gains[i]
            found = found + (own,)  # noqa: RUF005
        x = found
        if NORM == "layer":
            factor = 1.0
    return x, factor


@triton.jit
def _norm_in_parts(norm, K: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr):
    """A norm's weight and a LayerNorm's bias, rows in parts."""
    gains, shifts = (), ()
    if NORM is not None:
        gains = _row_in_parts(norm[0], K, COLUMNS)
    if NORM == "layer":
        shifts = _row_in_parts(norm[1], K, COLUMNS)
    return gains, shifts


@triton.jit
def _input_in_parts(
    x_ptr, stream, norm, weights, K: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    LOADED: tl.constexpr,
):  # fmt: skip
    """As `_row`, in parts."""
    before_ptr, normed_ptr = stream
    x = _row_in_parts(x_ptr, K, COLUMNS)
    if before_ptr is not None:
        before = _row_in_parts(before_ptr, K, COLUMNS)
        both = ()
        for i in tl.static_range(_count(K, COLUMNS)):
            rounded = (x[i] + before[i]).to(x_ptr.dtype.element_ty).to(tl.float32)
            both = both + (rounded,)  # noqa: RUF005
        x = both
    if not LOADED:
        weights = _norm_in_parts(norm, K, COLUMNS, NORM)
    x, factor = _normed_in_parts(x, norm, weights, K, COLUMNS, NORM)
    if normed_ptr is not None:  # noqa: SIM102 - a constant, then a value
        if tl.program_id(0) == 0:
            for i in tl.static_range(_count(K, COLUMNS)):
                columns = _part(i, K, COLUMNS)
                normed = (x[i] * factor).to(normed_ptr.dtype.element_ty)
                tl.store(normed_ptr + columns, normed, mask=columns < K)
    return x, factor


@triton.jit
def matvec_parts_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, before_ptr,
    normed_ptr, y_ptr, features, eps,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `matvec_kernel` for a single x [K], read in `parts` of COLUMNS at most.

    A width that is no power of two costs no lanes and registers so.
    """
    let_next_start(PDL)
    norm = (norm_weight_ptr, norm_bias_ptr, eps)
    stream = (before_ptr, normed_ptr)
    ends = (bias_ptr, residual_ptr, y_ptr)
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    # All parts of the weights are on their way before the kernel in front has ended.
    w = _weights_in_parts(weight_ptr, rows, features, K, COLUMNS)
    up_ptr = weight_ptr + tl.cast(features, tl.int64) * K
    up = w
    if GATED:
        up = _weights_in_parts(up_ptr, rows, features, K, COLUMNS)
    biases = _biases(bias_ptr, rows, features, GATED)
    LOADED: tl.constexpr = NORM == "layer" and K <= 2048
    weights = (), ()
    if LOADED:
        weights = _norm_in_parts(norm, K, COLUMNS, NORM)
    elif NORM is not None:
        fetch_line(norm_weight_ptr, K, pid, PDL)
    wait_for_inputs(PDL)
    added = _added(residual_ptr, 0, rows, features)
    x, factor = _input_in_parts(x_ptr, stream, norm, weights, K, COLUMNS, NORM, LOADED)
    if PROGRAMS == 0:
        y = _products(w, x, K, COLUMNS) * factor
        u = _products(up, x, K, COLUMNS) * factor if GATED else y
        _end(y, u, rows, features, biases, added, ends, 0, ACTIVATION, GATED)
    else:
        for block in range(pid, tl.cdiv(features, ROWS), PROGRAMS):
            rows = block * ROWS + tl.arange(0, ROWS)
            following = rows + PROGRAMS * ROWS
            w_next = _weights_in_parts(weight_ptr, following, features, K, COLUMNS)
            own_biases, own_added = biases, added
            if bias_ptr is not None:
                biases = _biases(bias_ptr, following, features, GATED)
            if residual_ptr is not None:
                added = _added(residual_ptr, 0, following, features)
            y = _products(w, x, K, COLUMNS) * factor
            u = y
            if GATED:
                up_next = _weights_in_parts(up_ptr, following, features, K, COLUMNS)
                u = _products(up, x, K, COLUMNS) * factor
                up = up_next
            w = w_next
            _end(y, u, rows, features, own_biases, own_added, ends, 0, ACTIVATION, GATED)
