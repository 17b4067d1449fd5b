"""Products with few rows, bound by reading the weights, with norm, bias, activation and residual.

One row is a matrix-vector product on the plain cores: a program holds the whole row of x in
registers and streams rows of the weights past it. More rows go to the matrix units. Neither
splits a sum over programs, so that results are the same bits every time.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .activation import KINDS, activate
from .launch import dot, launch, let_next_start, next_power_of_2, wait_for_inputs

MOST_ROWS = 256


class VectorConfig(NamedTuple):
    """How the matrix-vector kernel runs: weight rows a program takes at a time, and programs.

    `per_sm` 0 gives each block of rows a program of its own; else so many programs an SM (of
    `SMS`) go through all blocks, each with its next block's weights on their way.
    """

    rows: int
    warps: int
    per_sm: int = 0


class TileConfig(NamedTuple):
    """Tile of the matrix-unit kernel: `m` rows of x by `n` weight rows, `k` columns at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@triton.jit
def _normed(x, inside, weight_ptr, bias_ptr, columns, eps, K: tl.constexpr, NORM: tl.constexpr):
    """Float32 x of one row, normed over its K elements; what lies outside is 0."""
    if NORM == "layer":
        mean = tl.sum(x, 0) / K
        x = tl.where(inside, x - mean, 0.0)
    if NORM is not None:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if NORM == "rms_offset":
            weight += 1.0
        x = x * scale * weight
    if NORM == "layer":
        x += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _matvec_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    y_ptr,
    features,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [features] of x [K]; BLOCK_K covers K, and PROGRAMS 0 means a program for each block."""
    let_next_start(PDL)
    pid = tl.program_id(0)
    columns = tl.arange(0, BLOCK_K)
    inside = columns < K
    rows = pid * ROWS + tl.arange(0, ROWS)
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]
    mask = (rows < features)[:, None] & inside[None, :]
    # The weights are on their way before the kernel in front has ended.
    w = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_ptr = weight_ptr + tl.cast(features, tl.int64) * K
        up = tl.load(up_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = _normed(x, inside, norm_weight_ptr, norm_bias_ptr, columns, eps, K, NORM)
    if PROGRAMS == 0:
        y = tl.sum(w.to(tl.float32) * x[None, :], 1)
        u = y
        if GATED:
            u = tl.sum(up.to(tl.float32) * x[None, :], 1)
        _finish(y, u, rows, features, bias_ptr, residual_ptr, y_ptr, ACTIVATION, GATED)
    else:
        for block in range(pid, tl.cdiv(features, ROWS), PROGRAMS):
            rows = block * ROWS + tl.arange(0, ROWS)
            following = rows + PROGRAMS * ROWS
            at = following.to(tl.int64)[:, None] * K + columns[None, :]
            mask = (following < features)[:, None] & inside[None, :]
            w_next = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
            y = tl.sum(w.to(tl.float32) * x[None, :], 1)
            w = w_next
            u = y
            if GATED:
                up_next = tl.load(up_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
                u = tl.sum(up.to(tl.float32) * x[None, :], 1)
                up = up_next
            _finish(y, u, rows, features, bias_ptr, residual_ptr, y_ptr, ACTIVATION, GATED)


@triton.jit
def _finish(
    y,
    up,
    rows,
    features,
    bias_ptr,
    residual_ptr,
    y_ptr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """Bias, activation, gate and residual of the products `y`, written at `rows`."""
    inside = rows < features
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    y = activate(y, ACTIVATION)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + features + rows, mask=inside, other=0.0).to(tl.float32)
        y *= up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    count,
    features,
    x_stride,
    residual_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [count, features] of x [count, K]; a program makes one tile over the whole of K."""
    let_next_start(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows outside repeat the last one: nothing of theirs is written.
    x_at = x_ptr + tl.minimum(m, count - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight_ptr + tl.minimum(n, features - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait_for_inputs(PDL)
    for done in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_at)
            w = tl.load(w_at, eviction_policy="evict_first")
        else:
            inside = (k < K - done)[None, :]
            x = tl.load(x_at, mask=inside, other=0.0)
            w = tl.load(w_at, mask=inside, other=0.0, eviction_policy="evict_first")
        acc = dot(x, w.T, acc)
        if GATED:
            up_at = w_at + tl.cast(features, tl.int64) * K
            if K % BLOCK_K == 0:
                w = tl.load(up_at, eviction_policy="evict_first")
            else:
                w = tl.load(up_at, mask=inside, other=0.0, eviction_policy="evict_first")
            up = dot(x, w.T, up)
        x_at += BLOCK_K
        w_at += BLOCK_K
    within = n < features
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=within, other=0.0).to(tl.float32)[None, :]
    y = activate(acc, ACTIVATION)
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


class NormArguments(NamedTuple):
    """A norm over the rows of x: `rms`, `rms_offset` (times 1 + weight) or `layer`."""

    kind: str
    weight: Any
    bias: Any
    eps: float


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    norm: NormArguments | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: Any = None,
    dtype: Any = None,
    config: VectorConfig | TileConfig | None = None,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """residual + activation(norm(x) weight^T + bias): x [..., in] to [..., out] in `dtype`.

    `weight` [out, in] is contiguous; with `gated` it holds gate, then up, and the result is
    activation(gate) * up, half as wide. All sums are in float32 and rounded once. `norm` goes with
    a single row only. `dtype` is x's own if None. `sms` is the device's number of multiprocessors.
    """
    width = x.shape[-1]
    count = x.numel() // width
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    _check(x, weight, bias, activation, gated, residual, norm, count, features)
    y = x.new_empty((*x.shape[:-1], features), dtype=dtype or x.dtype)
    if y.numel() == 0:
        return y
    if config is None:
        config = default_config(count, features, width, x.element_size(), gated, sms)
    if isinstance(config, VectorConfig):
        blocks = triton.cdiv(features, config.rows)
        programs = min(config.per_sm * sms, blocks)
        kind, norm_weight, norm_bias, eps = norm or (None, None, None, 0.0)
        launch(
            _matvec_kernel,
            (programs or blocks,),
            *(x, weight, bias, residual, norm_weight, norm_bias, y, features, eps),
            K=width,
            ROWS=config.rows,
            BLOCK_K=next_power_of_2(width),
            PROGRAMS=programs,
            NORM=kind,
            ACTIVATION=activation,
            GATED=gated,
            num_warps=config.warps,
            pdl=pdl,
        )
        return y
    rows = x.reshape(count, width)
    residual = None if residual is None else residual.reshape(count, features)
    launch(
        _tile_kernel,
        (triton.cdiv(count, config.m), triton.cdiv(features, config.n)),
        *(rows, weight, bias, residual, y, count, features),
        *(rows.stride(0), 0 if residual is None else residual.stride(0)),
        K=width,
        BLOCK_M=config.m,
        BLOCK_N=config.n,
        BLOCK_K=config.k,
        STAGES=config.stages,
        ACTIVATION=activation,
        GATED=gated,
        num_warps=config.warps,
        pdl=pdl,
    )
    return y


def default_config(
    count: int, features: int, width: int, itemsize: int, gated: bool, sms: int
) -> VectorConfig | TileConfig:
    """A configuration for a shape that nobody measured."""
    if count == 1:
        elements = next_power_of_2(width) * (2 if gated else 1)
        rows = max(1, min(8, 16384 // elements))
        while rows > 1 and features // rows < 2 * sms:
            rows //= 2
        return VectorConfig(rows, 4 if rows * elements <= 8192 else 8)
    m = min(max(next_power_of_2(count), 16), 64)
    n = 32 if features * triton.cdiv(count, m) >= 32 * sms else 16
    if itemsize == 4:
        return TileConfig(min(m, 32), n, 32, 4, 2)
    return TileConfig(m, n, 128 if m <= 32 else 64, 4, 4)


def _check(
    x: Any,
    weight: Any,
    bias: Any,
    activation: str | None,
    gated: bool,
    residual: Any,
    norm: NormArguments | None,
    count: int,
    features: int,
) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    width = x.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != width or not weight.is_contiguous():
        raise ValueError(
            f"weight {tuple(weight.shape)} with strides {tuple(weight.stride())} does not fit x "
            f"{tuple(x.shape)}: a contiguous [out, {width}] is expected."
        )
    if gated and (weight.shape[0] % 2 or activation is None):
        raise ValueError(
            f"A gated product needs an activation and an even number of rows, gate and up; it has "
            f"{activation!r} and {weight.shape[0]}."
        )
    if activation is not None and activation not in KINDS:
        raise ValueError(f"The activation is {activation!r}; one of {', '.join(KINDS)} is known.")
    if x.stride(-1) != 1:
        raise ValueError(f"x has stride {x.stride(-1)} along its last axis; 1 is expected.")
    if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or bias.stride(0) != 1):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}.")
    if residual is not None:
        expected = (*x.shape[:-1], features)
        if tuple(residual.shape) != expected or residual.stride(-1) != 1:
            raise ValueError(f"residual is {tuple(residual.shape)}; {expected} is expected.")
    if norm is not None and count != 1:
        raise ValueError(f"x has {count} rows; a norm is fused into the product of a single one.")
