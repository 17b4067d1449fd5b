"""What the fused kernels do not do to queries and keys before they turn them: a launch of its own.

LayerNorm of heads, norms by weights of each head's own, RMSNorm over all heads as one, and queries
that grow with their position.
"""

from typing import Any

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import dtype_name
from .rows import check_last_axis

WIDEST = 16384  # elements that are normed together


@triton.jit
def _weights(q_ptr, k_ptr, at, is_q, inside):
    """float32 weights of queries and of keys, each where its elements are."""
    q = tl.load(q_ptr + at, mask=inside & is_q, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + at, mask=inside & ~is_q, other=0.0).to(tl.float32)
    return q + k


@triton.jit
def _head_norm_kernel(
    qkv_ptr, positions_ptr, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, eps, beta, period,
    ahead, tokens, stride0, stride1, positions_stride0, positions_stride1,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr,
    OWN: tl.constexpr, CENTER: tl.constexpr, UNIT_OFFSET: tl.constexpr, UNITS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: UNITS of a token's QUERIES and KEYS, each of which is normed for itself."""
    let_next_start(PDL)
    blocks: tl.constexpr = (QUERIES + KEYS + UNITS - 1) // UNITS
    row = tl.program_id(0) // blocks
    unit = tl.program_id(0) % blocks * UNITS + tl.arange(0, UNITS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_q = unit < QUERIES
    width = tl.where(is_q, Q_WIDTH, K_WIDTH)
    inside = (unit < QUERIES + KEYS) & (column < width)
    first = tl.where(is_q, unit, unit - QUERIES) * width
    wait_for_inputs(PDL)
    b, t = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    at = qkv_ptr + b * stride0 + t * stride1
    at += tl.where(is_q, first, QUERIES * Q_WIDTH + first) + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if q_weight_ptr is not None:
        if CENTER:
            x = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / width, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / width + eps)
        of = (first if OWN else tl.zeros_like(first)) + column
        gain = _weights(q_weight_ptr, k_weight_ptr, of, is_q, inside)
        if UNIT_OFFSET:
            gain += 1.0
        x *= gain
        if q_bias_ptr is not None:
            x += _weights(q_bias_ptr, k_bias_ptr, of, is_q, inside)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + b * positions_stride0 + t * positions_stride1)
        growth = 1.0 + beta * tl.log(1.0 + tl.floor((position + ahead).to(tl.float32) / period))
        x = tl.where(is_q, x * growth, x)
    # Where several threads hold one element, all must have read it before one writes.
    tl.debug_barrier()
    tl.store(at, x.to(qkv_ptr.dtype.element_ty), mask=inside)


def is_apart(attention: Any) -> bool:
    """True if a `spec.Attention` needs this launch; else the one that turns heads has its norms."""
    a = attention
    if a.qk_norm is None or a.growth is not None:
        return a.growth is not None
    return a.qk_norm.kind == "layer" or a.qk_norm_over not in ("head", "turned")


def arguments(attention: Any, q_norm: Any, k_norm: Any) -> dict[str, Any]:
    """Those of `norm_heads` that are facts of a `spec.Attention`, with its `contract.NormOf`s."""
    a = attention
    how: dict[str, Any] = {"heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim}
    how["growth"] = a.growth
    if q_norm is None:
        return how
    assert not a.norm_turned
    how |= {"over": a.qk_norm_over, "center": a.qk_norm.kind == "layer"}
    how |= {"eps": a.qk_norm.eps, "unit_offset": a.qk_norm.unit_offset}
    how |= {"q_weight": q_norm.weight, "k_weight": k_norm.weight}
    return how | {"q_bias": q_norm.bias, "k_bias": k_norm.bias}


def norm_heads(
    qkv: Any,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_weight: Any = None,
    k_weight: Any = None,
    q_bias: Any = None,
    k_bias: Any = None,
    over: str = "head",
    center: bool = False,
    eps: float = 0.0,
    unit_offset: bool = False,
    positions: Any = None,
    growth: tuple[float, float, int] | None = None,
    pdl: bool = False,
) -> None:
    """Norm q and k in qkv [B, T, (H + 2K) D], in place; and let q grow with int positions [B, T].

    RMSNorm, with `center` LayerNorm: over each `head` by weights [D], over each with its `own` by
    weights [H, D] and [K, D], or over `all` heads as one by weights [H D] and [K D], which may be
    beside biases of the same shapes; `unit_offset` as in `norm`. `growth` is that of
    `spec.Attention`. In float32, rounded once. Without weights, q grows alone. At most 16384
    elements are normed together.
    """
    check_last_axis("qkv", qkv)
    total = (heads + 2 * kv_heads) * head_dim
    if qkv.dim() != 3 or qkv.shape[-1] != total:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}; [B, T, {total}] is expected.")
    if over not in ("head", "own", "all"):
        raise ValueError(f"over={over!r}; 'head', 'own' or 'all' is expected.")
    counts, each = [heads, kv_heads], [head_dim, head_dim]
    if over == "all":
        counts, each = [1, 1], [heads * head_dim, kv_heads * head_dim]
    if max(each) > WIDEST:
        raise ValueError(f"{max(each)} elements are normed together; at most {WIDEST} can be.")
    parts = {"q_weight": q_weight, "k_weight": k_weight, "q_bias": q_bias, "k_bias": k_bias}
    for i, (name, part) in enumerate(parts.items()):
        shape = (heads, kv_heads)[i % 2] * head_dim
        shape = {"head": (head_dim,), "all": (shape,)}.get(over, (shape // head_dim, head_dim))
        if part is not None and (tuple(part.shape) != shape or not part.is_contiguous()):
            raise ValueError(f"{name} has shape {tuple(part.shape)}; {shape} is expected.")
        if (part is None) != (parts[f"q_{name[2:]}"] is None):
            raise ValueError(f"{name} is {'missing' if part is None else 'alone'}.")
    if growth is None:
        positions = None
    elif positions is None or tuple(positions.shape) != tuple(qkv.shape[:2]):
        raise ValueError(f"Queries grow by int positions of shape {tuple(qkv.shape[:2])}.")
    elif dtype_name(positions.dtype) not in ("int32", "int64"):
        raise ValueError(f"positions have dtype {positions.dtype}; int32 or int64 is expected.")
    if q_weight is None:
        counts[1] = 0
    if not qkv.numel() or (q_weight is None and growth is None):
        return
    beta, period, ahead = growth or (0.0, 1.0, 0)
    block = next_power_of_2(max(each))
    units = min(max(1024 // block, 1), next_power_of_2(sum(counts)))
    launch(
        _head_norm_kernel,
        (qkv.shape[0] * qkv.shape[1] * triton.cdiv(sum(counts), units),),
        *(qkv, positions, q_weight, k_weight, q_bias, k_bias, eps, beta, period, ahead),
        qkv.shape[1],
        *qkv.stride()[:2],
        *((0, 0) if positions is None else positions.stride()),
        **{"QUERIES": counts[0], "KEYS": counts[1], "Q_WIDTH": each[0], "K_WIDTH": each[1]},
        **{"OWN": over == "own", "CENTER": center, "UNIT_OFFSET": unit_offset},
        **{"UNITS": units, "BLOCK": block},
        num_warps=min(max(block * units // 512, 1), 16),
        pdl=pdl,
    )
