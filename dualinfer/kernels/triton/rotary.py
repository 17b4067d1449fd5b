"""Rotary embedding with head norms and the cache's append, in one launch for prefill.

Su et al., 2021. The first R elements of a head of D are turned, the rest passes. A pair is one
complex number: elements i and i + R/2 (HF's `rotate_half`), or 2 i and 2 i + 1 (GPT-J).
"""

# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
from typing import Any

import triton
import triton.language as tl

from .blocks import places, slots_and_room, table_arguments
from .codes import codes_by, scale_arguments, scale_of
from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import dtype_name
from .rows import check_last_axis, check_vector

_TILE = 2048


@triton.jit
def _load_pairs(at, inside, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Both parts of pairs [heads, HALF], float32, of heads that begin at `at` [heads, 1]."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(at + column, mask=inside & (column < 2 * PAIRS), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [both.shape[0], HALF, 2]))
    else:
        column = tl.arange(0, HALF)[None, :]
        mask = inside & (column < PAIRS)
        first = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + PAIRS + column, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    at, first, second, inside,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = at.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(first, second), [first.shape[0], 2 * HALF])
        tl.store(at + column, both.to(dtype), mask=inside & (column < 2 * PAIRS))
    else:
        column = tl.arange(0, HALF)[None, :]
        mask = inside & (column < PAIRS)
        tl.store(at + column, first.to(dtype), mask=mask)
        tl.store(at + PAIRS + column, second.to(dtype), mask=mask)


@triton.jit
def _store_head(
    at, first, second, z, rest, inside,
    D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Pairs, and the elements `z` behind them at `rest`, of heads that begin at `at` [heads, 1]."""
    _store_pairs(at, first, second, inside, PAIRS, INTERLEAVED, HALF)
    if REST:
        tl.store(at + rest[None, :], z, mask=inside & (rest < D)[None, :])


@triton.jit
def _rounded(a, dtype: tl.constexpr):
    """float32 `a` with the precision of `dtype`."""
    return a.to(dtype).to(tl.float32)


@triton.jit
def _gain(weight_ptr, at, inside, UNIT_OFFSET: tl.constexpr):
    """A head norm's weight at elements `at`; 1 where there is no norm."""
    gain = tl.full(at.shape, 1.0, tl.float32)
    if weight_ptr is not None:
        gain = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            gain += 1.0
    return gain


@triton.jit
def stretched(frequency, i, end, original, STRETCH: tl.constexpr, PAIRS: tl.constexpr):
    """The frequency of pair i in a sequence whose last token's position is `end` (dynamic NTK)."""
    length = tl.maximum(end + 1, original).to(tl.float32)
    base = STRETCH * length / original - (STRETCH - 1.0)
    return frequency * tl.exp2(tl.log2(base) * i.to(tl.float32) * (-1.0 / (PAIRS - 1)))


@triton.jit
def _rotary_append_kernel(
    qkv_ptr, positions_ptr, frequencies_ptr, q_norm_ptr, k_norm_ptr, keys_ptr, values_ptr,
    slots_ptr, starts_ptr, q_out_ptr, k_out_ptr, v_out_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    ends_ptr, original, table_stride,
    scaling, eps, tokens, room, slots,
    qkv_stride0, qkv_stride1, positions_stride0, positions_stride1,
    keys_stride0, keys_stride1, keys_stride2, values_stride0, values_stride1, values_stride2,
    PAIRS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    NORM_TURNED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    SIZE: tl.constexpr, CODES: tl.constexpr, STRETCH: tl.constexpr, ROUNDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one token's heads, HEADS of those from FIRST to LAST of q, k and v.

    With CODES keys and values become what their codes mean.
    """
    let_next_start(PDL)
    i = tl.arange(0, HALF)
    first = i * 2 if INTERLEAVED else i
    second = first + (1 if INTERLEAVED else PAIRS)
    rest = 2 * PAIRS + tl.arange(0, REST if REST else 1)
    frequency = 0.0
    if frequencies_ptr is not None:
        frequency = tl.load(frequencies_ptr + i, mask=i < PAIRS, other=0.0)
    q1 = _gain(q_norm_ptr, first, i < PAIRS, UNIT_OFFSET)
    q2 = _gain(q_norm_ptr, second, i < PAIRS, UNIT_OFFSET)
    q3 = _gain(q_norm_ptr, rest, rest < D, UNIT_OFFSET)
    k1 = _gain(k_norm_ptr, first, i < PAIRS, UNIT_OFFSET)
    k2 = _gain(k_norm_ptr, second, i < PAIRS, UNIT_OFFSET)
    k3 = _gain(k_norm_ptr, rest, rest < D, UNIT_OFFSET)
    wait_for_inputs(PDL)
    blocks = (LAST - FIRST + HEADS - 1) // HEADS
    row = tl.program_id(0) // blocks
    head = FIRST + tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)[:, None]
    inside = head < LAST
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), head >= H + K
    b, t = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    at = qkv_ptr + b * qkv_stride0 + t * qkv_stride1 + head * D
    x, y = _load_pairs(at, inside, PAIRS, INTERLEAVED, HALF)
    z = tl.load(at + rest[None, :], mask=inside & (rest < D)[None, :], other=0.0).to(tl.float32)
    changed = head < 0
    if q_norm_ptr is not None or k_norm_ptr is not None:
        if q_norm_ptr is not None:
            changed |= is_q
        if k_norm_ptr is not None:
            changed |= is_k
        normed = changed
        if not NORM_TURNED:
            factor = _factor(x, y, z, normed, eps, D)
            x *= factor * _of_head(is_q, is_v, q1, k1)
            y *= factor * _of_head(is_q, is_v, q2, k2)
            z *= factor * _of_head(is_q, is_v, q3, k3)
    if frequencies_ptr is not None:
        if STRETCH > 0:
            end = tl.load(ends_ptr + b)
            frequency = stretched(frequency, i, end, original, STRETCH, PAIRS)
        elif ends_ptr is not None:  # the second row of frequencies is that of long sequences
            at_f = frequencies_ptr + tl.where(tl.load(ends_ptr + b) >= original, PAIRS, 0) + i
            frequency = tl.load(at_f, mask=i < PAIRS, other=0.0)
        position = tl.load(positions_ptr + b * positions_stride0 + t * positions_stride1)
        angle = position.to(tl.float32) * frequency
        # Gathered, lest each thread computes the angles of all its columns of the tile.
        cos = tl.gather(tl.cos(angle) * scaling, i, 0)[None, :]
        sin = tl.gather(tl.sin(angle) * scaling, i, 0)[None, :]
        if ROUNDED:
            cos, sin = _rounded(cos, at.dtype.element_ty), _rounded(sin, at.dtype.element_ty)
        turned, other = x * cos - y * sin, y * cos + x * sin
        x, y = tl.where(is_v, x, turned), tl.where(is_v, y, other)
        changed = head < H + K
    if NORM_TURNED and (q_norm_ptr is not None or k_norm_ptr is not None):
        factor = _factor(x, y, z, normed, eps, D)
        x *= factor * _of_head(is_q, is_v, q1, k1)
        y *= factor * _of_head(is_q, is_v, q2, k2)
        z *= factor * _of_head(is_q, is_v, q3, k3)
    if CODES is not None:
        dtype: tl.constexpr = at.dtype.element_ty
        parts = (_rounded(x, dtype), _rounded(y, dtype), _rounded(z, dtype))
        most = tl.maximum(tl.max(tl.abs(parts[0]), 1), tl.max(tl.abs(parts[1]), 1))
        scale = scale_of(tl.maximum(most, tl.max(tl.abs(parts[2]), 1)), CODES)[:, None]
        codes_x, new_x = codes_by(parts[0], scale, CODES)
        codes_y, new_y = codes_by(parts[1], scale, CODES)
        codes_z, new_z = codes_by(parts[2], scale, CODES)
        x = tl.where(is_q, x, new_x)
        y = tl.where(is_q, y, new_y)
        z = tl.where(is_q, z, new_z)
        changed |= head >= H
    z = z.to(at.dtype.element_ty)
    if q_out_ptr is None:
        # Where several threads hold one element, all must have read it before one writes.
        tl.debug_barrier()
        _store_head(at, x, y, z, rest, changed & inside, D, PAIRS, INTERLEAVED, HALF, REST)
    else:
        token = row.to(tl.int64)
        q_at = q_out_ptr + token * H * D + head * D
        _store_head(q_at, x, y, z, rest, inside & is_q, D, PAIRS, INTERLEAVED, HALF, REST)
        k_out = k_out_ptr + token * K * D + (head - H) * D
        _store_head(k_out, x, y, z, rest, inside & is_k, D, PAIRS, INTERLEAVED, HALF, REST)
        v_out = v_out_ptr + token * K * D + (head - H - K) * D
        _store_head(v_out, x, y, z, rest, inside & is_v, D, PAIRS, INTERLEAVED, HALF, REST)
    if keys_ptr is not None:
        slot, start = b, 0
        if slots_ptr is not None:
            slot = tl.load(slots_ptr + b)
        if starts_ptr is not None:
            start = tl.load(starts_ptr + b)
        zero = tl.zeros([1, 1], tl.int64)  # places are no scalars: they make masks
        place = start + t + zero
        there = (place < room) & (slot + zero < slots)
        if table_ptr is not None:
            row = table_ptr + slot.to(tl.int64) * table_stride
            at_k, _ = places(row, place, there, keys_stride0, keys_stride2, SIZE)
            at_v, there = places(row, place, there, values_stride0, values_stride2, SIZE)
        to_k, to_v = inside & is_k & there, inside & is_v & there
        if table_ptr is None:
            k_at = keys_ptr + slot.to(tl.int64) * keys_stride0 + place * keys_stride2
        else:
            k_at = keys_ptr + at_k
        k_at += (head - H).to(tl.int64) * keys_stride1
        if table_ptr is None:
            v_at = values_ptr + slot.to(tl.int64) * values_stride0 + place * values_stride2
        else:
            v_at = values_ptr + at_v
        v_at += (head - H - K).to(tl.int64) * values_stride1
        if CODES is None:
            _store_head(k_at, x, y, z, rest, to_k, D, PAIRS, INTERLEAVED, HALF, REST)
            _store_head(v_at, x, y, z, rest, to_v, D, PAIRS, INTERLEAVED, HALF, REST)
        else:
            x, y, z = codes_x, codes_y, codes_z
            _store_head(k_at, x, y, z, rest, to_k, D, PAIRS, INTERLEAVED, HALF, REST)
            _store_head(v_at, x, y, z, rest, to_v, D, PAIRS, INTERLEAVED, HALF, REST)
            if table_ptr is None:
                at_k = slot.to(tl.int64) * keys_stride0 + place * keys_stride2
                at_v = slot.to(tl.int64) * values_stride0 + place * values_stride2
            at_k += (head - H).to(tl.int64) * keys_stride1
            at_v += (head - H - K).to(tl.int64) * values_stride1
            tl.store(k_scale_ptr + at_k // D, scale, mask=to_k)
            tl.store(v_scale_ptr + at_v // D, scale, mask=to_v)


@triton.jit
def _factor(x, y, z, normed, eps, D: tl.constexpr):
    """What RMSNorm multiplies heads with, [heads, 1]; 1 where they are not `normed`."""
    squares = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
    return tl.where(normed, tl.rsqrt(squares / D + eps)[:, None], 1.0)


@triton.jit
def _of_head(is_q, is_v, q, k):
    return tl.where(is_q, q[None, :], tl.where(is_v, 1.0, k[None, :]))


def _blocks(pairs: int, head_dim: int, heads: int) -> dict[str, int]:
    """The tile of `heads` heads; REST is 0 where all of a head is turned."""
    half, rest = next_power_of_2(pairs), head_dim - 2 * pairs
    rest = next_power_of_2(rest) if rest else 0
    width = 2 * half + rest
    each = min(max(_TILE // next_power_of_2(width), 1), next_power_of_2(heads))
    tile = {"PAIRS": pairs, "D": head_dim, "HEADS": each, "HALF": half, "REST": rest}
    return {**tile, "num_warps": 4 if width * each >= 1024 else 1}


def rotary_append(
    qkv: Any,
    positions: Any,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inv_freq: Any = None,
    scaling: float = 1.0,
    interleaved: bool = False,
    q_norm: Any = None,
    k_norm: Any = None,
    norm_eps: float = 0.0,
    norm_unit_offset: bool = False,
    norm_turned: bool = False,
    cache: Any = None,
    scales: Any = None,
    slots: Any = None,
    starts: Any = None,
    table: Any = None,
    ends: Any = None,
    original: int = 0,
    stretch: float = 0.0,
    rounded: bool = False,
    apart: bool = False,
    pdl: bool = False,
) -> tuple[Any, Any, Any] | None:
    """Norm and turn q and k in qkv [B, T, (H + 2K) D], in place, and append k and v to the cache.

    With `apart` qkv stays as it is: q [B, T, H, D], k and v [B, T, K, D] are given in new memory.

    RMSNorm over each head with the weights q_norm and k_norm [D] (1 + weight with
    `norm_unit_offset`), then, or with `norm_turned` before it, a turn by positions[b, t] * inv_freq
    (float32 [R/2], R <= D), cos and sin times `scaling`, and if `rounded` with the precision of
    qkv. `cache` is a pair (k, v) of views [N, K, S, D]: token t of sequence b goes to place
    starts[b] + t (default t) of slot slots[b] (default b), or nowhere from place S or slot N on; no
    other place is written. With `table` int32 [N, blocks] the cache is of blocks (blocks.py). With
    `scales`, a pair float32 of the cache's axes before D, the cache is of codes (codes.py), and k
    and v become what these mean. Positions, slots [B] and starts [B] are int32 or int64. With
    `original` frequencies are [2, R/2], and sequences whose last token's position, int `ends` [B],
    is that or more turn by the second row; with `stretch` as well they are [R/2], and stretched as
    `spec.Rope` has it. What is None falls away. Everything is computed in float32 and rounded once.
    `pdl` as in `launch`: norms and frequencies are read before the kernel in front has ended.
    """
    check_last_axis("qkv", qkv)
    width = (heads + 2 * kv_heads) * head_dim
    if qkv.dim() != 3 or qkv.shape[-1] != width:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}; [B, T, {width}] is expected.")
    batch, tokens, _ = qkv.shape
    pairs = 0 if inv_freq is None else inv_freq.shape[-1]
    if inv_freq is not None:
        if (ends is None) != (not original):
            raise ValueError("Positions of last tokens go with frequencies by length.")
        if original:
            _check_integers("ends", ends, (batch,))
        if original and not stretch:
            if tuple(inv_freq.shape) != (2, pairs) or not inv_freq.is_contiguous():
                raise ValueError(f"inv_freq is {tuple(inv_freq.shape)}; (2, R/2) is expected.")
        else:
            check_vector("inv_freq", inv_freq, pairs)
        if inv_freq.element_size() != 4:
            raise ValueError(f"inv_freq has dtype {inv_freq.dtype}; float32 is expected.")
        if not 0 < 2 * pairs <= head_dim:
            raise ValueError(f"{pairs} angles turn {2 * pairs} elements; a head has {head_dim}.")
        _check_integers("positions", positions, (batch, tokens))
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_vector(name, weight, head_dim)
    keys, values = (None, None) if cache is None else cache
    count, room, held = 0, 0, (None, None, None)
    if keys is not None:
        _check_cache(keys, values, kv_heads, head_dim)
        held = scale_arguments(cache, scales, qkv.dtype)
        count, room = slots_and_room(keys, table)
        if slots is None and batch > count:
            raise ValueError(f"{batch} sequences without slots, but {count} slots.")
    elif slots is not None or starts is not None or table is not None:
        raise ValueError("slots, starts or a table without a cache. Pass cache, or none of them.")
    table, table_stride, size = table_arguments(table, keys)
    for name, index in (("slots", slots), ("starts", starts)):
        if index is not None:
            _check_integers(name, index, (batch,))
    first = 0 if pairs or q_norm is not None else heads
    last = heads + kv_heads if pairs or k_norm is not None else heads
    last = last if keys is None else heads + 2 * kv_heads
    parts = None
    if apart:
        first, last = 0, heads + 2 * kv_heads
        counts = heads, kv_heads, kv_heads
        parts = tuple(qkv.new_empty((batch, tokens, n, head_dim)) for n in counts)
    if last <= first or not qkv.numel():
        return parts
    # Without rotation the halves of a head are pairs all the same, which only pass.
    meta = _blocks(pairs or head_dim // 2, head_dim, last - first)
    launch(
        _rotary_append_kernel,
        (batch * tokens * triton.cdiv(last - first, meta["HEADS"]),),
        *(qkv, positions, inv_freq, q_norm, k_norm, keys, values, slots, starts),
        *(parts or (None, None, None)),
        *(table, *held[:2], ends if original else None, original),
        *(table_stride, scaling, norm_eps, tokens, room, count),
        *qkv.stride()[:2],
        *((0, 0) if positions is None else positions.stride()),
        *((0, 0, 0) if keys is None else keys.stride()[:3]),
        *((0, 0, 0) if values is None else values.stride()[:3]),
        **{"H": heads, "K": kv_heads, "FIRST": first, "LAST": last},
        INTERLEAVED=interleaved and pairs > 0,
        **{"UNIT_OFFSET": norm_unit_offset, "NORM_TURNED": norm_turned},
        **{"SIZE": size, "CODES": held[2], "STRETCH": stretch, "ROUNDED": rounded},
        pdl=pdl,
        **meta,
    )
    return parts


def _check_integers(name: str, x: Any, shape: tuple[int, ...]) -> None:
    description = "None" if x is None else f"{tuple(x.shape)} {x.dtype}"
    if x is None or x.shape != shape or dtype_name(x.dtype) not in ("int32", "int64"):
        raise ValueError(f"{name} is {description}; int32 or int64 {shape} is expected.")
    if len(shape) == 1 and not x.is_contiguous():
        raise ValueError(f"{name} has stride {x.stride(0)}; a contiguous vector is expected.")


def _check_cache(keys: Any, values: Any, kv_heads: int, head_dim: int) -> None:
    for name, part in (("keys", keys), ("values", values)):
        if part.numel() and part.shape[-1] > 1 and part.stride(-1) != 1:
            raise ValueError(f"cache {name} has stride {part.stride(-1)} in its last axis, not 1.")
        shape = tuple(part.shape)
        if (
            len(shape) != 4
            or shape != tuple(keys.shape)
            or (shape[1], shape[3]) != (kv_heads, head_dim)
        ):
            raise ValueError(
                f"cache {name} is {shape}; [N, {kv_heads}, S, {head_dim}] is expected."
            )
