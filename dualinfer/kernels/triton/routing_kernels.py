"""Device side of routing.py: which experts rows choose, and what each of them counts."""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false
import triton
import triton.language as tl

from .launch import dot, fetch_line, let_next_start, wait_for_inputs
from .linear_kernels import _normed


@triton.jit
def _places(GROUPS: tl.constexpr, X: tl.constexpr, GROUP_BLOCK: tl.constexpr, EACH: tl.constexpr):
    """Numbers of experts as a block holds them, group by group, and which of them there are.

    The block is GROUP_BLOCK times EACH wide, both powers of two, and ascends.
    """
    i = tl.arange(0, GROUP_BLOCK * EACH)
    within = i % EACH
    per: tl.constexpr = X // GROUPS
    return i // EACH * per + within, (i // EACH < GROUPS) & (within < per)


@triton.jit
def _best(values, open, at, END: tl.constexpr):
    """Where each row of values [M, N] has the greatest that is open, the first of equal ones."""
    most = tl.max(tl.where(open, values, -float("inf")), 1)
    best = open & (values >= most[:, None])
    return tl.min(tl.where(best, at[None, :], END), 1)


@triton.jit
def _of_groups(
    values, there, GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr, TWO: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Which values [M, N] are in one of the best groups, by the greatest or the sum of TWO."""
    M: tl.constexpr = values.shape[0]
    by_group = tl.reshape(tl.where(there[None, :], values, -float("inf")), (M, GROUP_BLOCK, EACH))
    scores = tl.max(by_group, 2)
    if TWO:
        at = tl.arange(0, EACH)[None, None, :]
        first = tl.min(tl.where(by_group >= scores[:, :, None], at, EACH), 2)
        rest = tl.where(at == first[:, :, None], -float("inf"), by_group)
        scores += tl.max(rest, 2)
    group = tl.arange(0, GROUP_BLOCK)
    left = tl.where((group < GROUPS)[None, :], tl.full((M, GROUP_BLOCK), 1, tl.int32), 0)
    chosen = tl.zeros((M, GROUP_BLOCK), tl.int32)
    for _ in range(GROUPS_CHOSEN):
        best = _best(scores, left > 0, group, GROUP_BLOCK - 1)
        hit = group[None, :] == best[:, None]
        chosen = tl.where(hit, 1, chosen)
        left = tl.where(hit, 0, left)
    wide = tl.broadcast_to(chosen[:, :, None], (M, GROUP_BLOCK, EACH))
    return tl.reshape(wide, (M, GROUP_BLOCK * EACH)) > 0


@triton.jit
def _among_near(logits, open, at, reach):
    """Of the logit at `at` of each row [M, N], the softmax among the open ones that are near it."""
    most = tl.max(tl.where(at, logits, -float("inf")), 1)[:, None]
    logits = tl.where(open, logits, most)
    far = most - logits > reach * tl.maximum(tl.abs(logits), most)
    e = tl.where(far, 0.0, tl.exp(logits - most))
    return 1.0 / tl.sum(tl.where(open, e, 0.0), 1)[:, None]


@triton.jit
def _choose(
    logits, choice_ptr, experts_ptr, weights_ptr, rows, count, least, scale, reach,
    X: tl.constexpr, CHOSEN: tl.constexpr, SCORE: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr, TWO: tl.constexpr, RENORMALIZED: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write the CHOSEN experts of rows with logits [M, N], ascending, and their weights."""
    at, there = _places(GROUPS, X, GROUP_BLOCK, EACH)
    logits = tl.where(there[None, :], logits, -float("inf"))
    scores = logits
    if SCORE == "softmax":
        e = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = e / tl.sum(e, 1)[:, None]
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    values = scores
    if choice_ptr is not None:
        values += tl.load(choice_ptr + at, mask=there, other=0.0).to(tl.float32)[None, :]
    values = tl.where(values != values, float("inf"), values)  # an expert there is, even of NaN
    left = tl.broadcast_to(there[None, :], logits.shape).to(tl.int32)
    if GROUPS > 1 and GROUPS_CHOSEN < GROUPS:
        inside = _of_groups(values, there, GROUPS, GROUPS_CHOSEN, TWO, GROUP_BLOCK, EACH)
        left = tl.where(inside, left, 0)
    chosen = tl.zeros(logits.shape, tl.int32)
    for _ in range(CHOSEN):
        best = _best(values, left > 0, at, X - 1)
        hit = at[None, :] == best[:, None]
        hit = hit & there[None, :]
        if SCORE == "sparse":
            scores = tl.where(hit, _among_near(logits, left > 0, hit, reach), scores)
        chosen = tl.where(hit, 1, chosen)
        left = tl.where(hit, 0, left)
    if SCORE == "chosen":
        logits = tl.where(chosen > 0, logits, -float("inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores /= tl.sum(scores, 1)[:, None]
    elif SCORE == "gates":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    weights = tl.where(chosen > 0, scores, 0.0)
    if RENORMALIZED:
        weights /= (tl.sum(weights, 1) + least)[:, None]
    weights *= scale
    to = rows.to(tl.int64)[:, None] * CHOSEN + tl.cumsum(chosen, 1) - 1
    mask = (chosen > 0) & (rows < count)[:, None]
    tl.store(experts_ptr + to, tl.broadcast_to(at[None, :], chosen.shape), mask=mask)
    tl.store(weights_ptr + to, weights, mask=mask)


@triton.jit
def route_vector_kernel(
    x_ptr, weight_ptr, bias_ptr, choice_ptr, norm_weight_ptr, norm_bias_ptr, logits_ptr,
    experts_ptr, weights_ptr, counter_ptr, x_stride, eps, least, scale, reach,
    K: tl.constexpr, X: tl.constexpr, CHOSEN: tl.constexpr, SCORE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr, TWO: tl.constexpr,
    RENORMALIZED: tl.constexpr, GROUP_BLOCK: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has ROWS logits of one row of x; the last of a row's programs chooses."""
    let_next_start(PDL)
    token = tl.program_id(1)
    columns = tl.arange(0, BLOCK_K)
    inside = columns < K
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < X
    mask = there[:, None] & inside[None, :]
    # The weights are on their way before the kernel in front has ended.
    w = tl.load(weight_ptr + rows[:, None] * K + columns[None, :], mask=mask, other=0.0)
    if NORM is not None:
        fetch_line(norm_weight_ptr, K, tl.program_id(0), PDL)
    wait_for_inputs(PDL)
    x_ptr += token.to(tl.int64) * x_stride
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x, factor = _normed(x, inside, (norm_weight_ptr, norm_bias_ptr, eps), columns, K, NORM)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1) * factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=there, other=0.0).to(tl.float32)
    logits_ptr += token.to(tl.int64) * X
    tl.store(logits_ptr + rows, y, mask=there)
    tl.debug_barrier()  # all of the program's writes, before it says that they are there
    ended = tl.atomic_add(counter_ptr + token, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        tl.store(counter_ptr + token, 0)
        tl.debug_barrier()
        at, known = _places(GROUPS, X, GROUP_BLOCK, EACH)
        logits = tl.load(logits_ptr + at, mask=known, other=0.0, cache_modifier=".cg")
        own = token + tl.arange(0, 1)
        _choose(
            *(logits[None, :], choice_ptr, experts_ptr, weights_ptr, own, token + 1, least, scale),
            *(reach, X, CHOSEN, SCORE, GROUPS, GROUPS_CHOSEN, TWO, RENORMALIZED, GROUP_BLOCK, EACH),
        )


@triton.jit
def route_tile_kernel(
    x_ptr, weight_ptr, bias_ptr, choice_ptr, experts_ptr, weights_ptr, count, x_stride, least,
    scale, reach,
    K: tl.constexpr, X: tl.constexpr, CHOSEN: tl.constexpr, SCORE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr, TWO: tl.constexpr,
    RENORMALIZED: tl.constexpr, GROUP_BLOCK: tl.constexpr, EACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has all logits of BLOCK_M rows of x, and chooses for them."""
    let_next_start(PDL)
    at, there = _places(GROUPS, X, GROUP_BLOCK, EACH)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    # What lies outside repeats the last one: nothing of it is written.
    x_at = x_ptr + tl.minimum(m, count - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight_ptr + tl.minimum(at, X - 1)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_M, GROUP_BLOCK * EACH), tl.float32)
    wait_for_inputs(PDL)
    for done in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (k < K - done)[None, :]
        x = tl.load(x_at, mask=inside, other=0.0)
        w = tl.load(w_at, mask=inside, other=0.0)
        if x.dtype != w.dtype:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = dot(x, w.T, acc)
        x_at += BLOCK_K
        w_at += BLOCK_K
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + at, mask=there, other=0.0).to(tl.float32)[None, :]
    _choose(
        *(acc, choice_ptr, experts_ptr, weights_ptr, m, count, least, scale, reach),
        *(X, CHOSEN, SCORE, GROUPS, GROUPS_CHOSEN, TWO, RENORMALIZED, GROUP_BLOCK, EACH),
    )
