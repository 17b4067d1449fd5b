"""Latent attention of new tokens: norm, rotary and append in a launch, and split-KV decoding.

DeepSeek-V2 (arXiv:2405.04434). What all heads share of a token, a latent vector and a turned part
of a key, is read once for a block of heads, as keys and as values. A sequence is split over
programs; a second launch joins what they found, in their order, and makes each head's value of it.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .blocks import (
    count_of_entries,
    entries_of,
    places,
    places_of,
    slots_and_room,
    table_arguments,
)
from .launch import dot, launch, let_next_start, next_power_of_2, wait_for_inputs
from .operands import empty
from .rotary import _load_pairs, _store_pairs, stretched
from .tunable import SHARED_BYTES, Key, Kind, Tunable, powers

LARGEST_RANK = 512  # elements of a latent vector that a program holds for a block of heads
_TURNED = 2048  # elements of queries that a program turns


class LatentConfig(NamedTuple):
    """Heads and tokens at a time, warps, programs that share a sequence, reads in flight."""

    heads: int
    block: int
    warps: int
    splits: int
    stages: int = 2


@triton.jit
def _turn_latents_kernel(
    queries_ptr, shared_ptr, positions_ptr, frequencies_ptr, norm_ptr, cache_ptr, table_ptr,
    slots_ptr, ends_ptr, original, scaling, eps, tokens, room, slots, positions_stride0,
    positions_stride1, slot_stride, token_stride, table_stride, SIZE: tl.constexpr,
    PAIRS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    STRETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: what heads share of one token, or the queries of HEADS heads."""
    let_next_start(PDL)
    parts = 1 + (H + HEADS - 1) // HEADS
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    b, t = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    i = tl.arange(0, HALF)
    frequency = tl.load(frequencies_ptr + i, mask=i < PAIRS, other=0.0)
    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + b * positions_stride0 + t * positions_stride1)
    if STRETCH > 0:
        end = tl.load(ends_ptr + b)
        frequency = stretched(frequency, i, end, original, STRETCH, PAIRS)
    angle = position.to(tl.float32) * frequency
    # Gathered, lest each thread computes the angles of all its columns of the tile.
    cos = tl.gather(tl.cos(angle) * scaling, i, 0)[None, :]
    sin = tl.gather(tl.sin(angle) * scaling, i, 0)[None, :]
    if part == 0:
        width: tl.constexpr = RANK + 2 * PAIRS
        zero = tl.zeros([1, 1], tl.int64)  # places are no scalars: they make masks
        place, slot = position.to(tl.int64) + zero, b + zero
        if slots_ptr is not None:
            slot = tl.load(slots_ptr + b).to(tl.int64) + zero
        else:
            place = tl.minimum(place, room - 1)  # a full slot overwrites its last token
        inside = (place < room) & (slot < slots)
        at = shared_ptr + row.to(tl.int64) * width
        r = tl.arange(0, BLOCK)[None, :]
        z = tl.load(at + r, mask=r < RANK, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
        z = z * tl.rsqrt(tl.sum(z * z, 1) / RANK + eps)[:, None] * weight
        z = z.to(shared_ptr.dtype.element_ty)
        x, y = _load_pairs(at + RANK + zero, zero == 0, PAIRS, INTERLEAVED, HALF)
        x, y = x * cos - y * sin, y * cos + x * sin
        # Where several threads hold one element, all must have read it before one writes.
        tl.debug_barrier()
        tl.store(at + r, z, mask=r < RANK)
        _store_pairs(at + RANK + zero, x, y, zero == 0, PAIRS, INTERLEAVED, HALF)
        if cache_ptr is not None:
            if table_ptr is None:
                to = cache_ptr + slot * slot_stride + place * token_stride
            else:
                row_of = table_ptr + slot * table_stride
                to, inside = places(row_of, place, inside, slot_stride, token_stride, SIZE)
                to = cache_ptr + to
            tl.store(to + r, z, mask=inside & (r < RANK))
            _store_pairs(to + RANK, x, y, inside, PAIRS, INTERLEAVED, HALF)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        query_at = queries_ptr + (row.to(tl.int64) * H + head) * D + (D - 2 * PAIRS)
        q1, q2 = _load_pairs(query_at, head < H, PAIRS, INTERLEAVED, HALF)
        turned1, turned2 = q1 * cos - q2 * sin, q2 * cos + q1 * sin
        tl.debug_barrier()
        _store_pairs(query_at, turned1, turned2, head < H, PAIRS, INTERLEAVED, HALF)


@triton.jit
def _absorb_kernel(
    queries_ptr, keys_ptr, own_ptr, slots, H: tl.constexpr, D: tl.constexpr, NOPE: tl.constexpr,
    RANK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R elements of one head's query as it meets latent vectors, of slots."""
    let_next_start(PDL)
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    weight_at = keys_ptr + (head * NOPE + d).to(tl.int64)[:, None] * RANK + r[None, :]
    weight = tl.load(weight_at, mask=(d < NOPE)[:, None] & (r < RANK)[None, :], other=0.0)
    wait_for_inputs(PDL)
    row = n.to(tl.int64) * H + head
    if BLOCK_N == 1:
        at = queries_ptr + (tl.program_id(0).to(tl.int64) * H + head) * D + d
        q = tl.load(at, mask=d < NOPE, other=0.0).to(tl.float32)
        own = tl.sum(q[:, None] * weight.to(tl.float32), 0)[None, :]
    else:
        inside = (n < slots)[:, None] & (d < NOPE)[None, :]
        q = tl.load(queries_ptr + row[:, None] * D + d[None, :], mask=inside, other=0.0)
        own = dot(q, weight, tl.zeros((BLOCK_N, BLOCK_R), tl.float32))
    mask = (n < slots)[:, None] & (r < RANK)[None, :]
    tl.store(
        own_ptr + row[:, None] * RANK + r[None, :], own.to(own_ptr.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=["tokens", "slots"])
def _decode_latents_kernel(
    own_ptr, queries_ptr, cache_ptr, table_ptr, lengths_ptr, slots_ptr, partial_ptr, tokens, slots,
    slot_stride, token_stride, table_stride, capacity, scale, SIZE: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, RANK: tl.constexpr, TURNING: tl.constexpr, SEVERAL: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H pairs of token and head over a part of what their sequence has.

    Of a sequence there are `tokens` tokens, one if not SEVERAL. With ENTRIES a program loads those
    of its part of the table once, and each turn's tokens have one.
    """
    let_next_start(PDL)
    pairs = tokens * H if SEVERAL else H
    blocks = (pairs + BLOCK_H - 1) // BLOCK_H
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    split = tl.program_id(1)
    pair = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    r, t = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    length = tl.load(lengths_ptr + sequence)
    if not SEVERAL:
        count = tl.minimum(length, capacity - 1).to(tl.int32) + 1
    else:  # up to the last token of these pairs; each sees those that stand before it, and itself
        end = tl.minimum((tl.program_id(0) % blocks + 1) * BLOCK_H, pairs)
        count = tl.minimum(length + (end + H - 1) // H, capacity).to(tl.int32)
        place = length.to(tl.int32) + pair // H
    share = tl.cdiv(tl.cdiv(count, BLOCK_S), SPLITS) * BLOCK_S
    first = split * share
    last = tl.minimum(first + share, count)
    row = (sequence * pairs + pair)[:, None]
    real = (pair < pairs)[:, None]
    wait_for_inputs(PDL)
    own = tl.load(own_ptr + row * RANK + r[None, :], mask=real & (r < RANK)[None, :], other=0.0)
    turned_at = queries_ptr + row * D + (D - TURNING) + t[None, :]
    turned = tl.load(turned_at, mask=real & (t < TURNING)[None, :], other=0.0)
    base = cache_ptr
    slot = sequence
    read = last
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        read = tl.where(slot < slots, last, 0)  # of no slot nothing, as if zeros were there
        slot = tl.minimum(slot, slots - 1)
    if table_ptr is None:
        base += slot * slot_stride
    else:
        table_ptr += slot * table_stride
    entries = 0
    if ENTRIES > 0:
        entries = entries_of(table_ptr, first, last, SIZE, ENTRIES)
    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    for start in tl.range(first, last, BLOCK_S, num_stages=STAGES):
        s = start + tl.arange(0, BLOCK_S)
        to, known = places_of(
            table_ptr, entries, first, start, read, s, slot_stride, token_stride,
            SIZE, ENTRIES, False,
        )  # fmt: skip
        at, there = base + to[:, None], known[:, None]
        vectors = tl.load(at + r[None, :], mask=there & (r < RANK)[None, :], other=0.0)
        keys = tl.load(at + RANK + t[None, :], mask=there & (t < TURNING)[None, :], other=0.0)
        score = dot(turned, keys.T, tl.zeros((BLOCK_H, BLOCK_S), tl.float32))
        score = dot(own, vectors.T, score) * scale
        seen = (s < last)[None, :]
        if SEVERAL:
            seen = seen & (s[None, :] <= place[:, None])
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        unit = higher
        if SEVERAL:  # one of several tokens may see nothing of a part that a later one sees
            unit = tl.where(higher == -float("inf"), 0.0, higher)
        kept = tl.exp(top - unit)
        weight = tl.exp(score - unit[:, None])
        total = total * kept + tl.sum(weight, 1)
        acc = dot(weight.to(vectors.dtype), vectors, acc * kept[:, None])
        top = higher
    # Partials are [token, head, split, BLOCK_R + 2]: the sums, their weight and exponent.
    mine = partial_ptr + ((sequence * pairs + pair) * SPLITS + split) * (BLOCK_R + 2)
    tl.store(mine[:, None] + r[None, :], acc, mask=real)
    tl.store(mine + BLOCK_R, total, mask=pair < pairs)
    tl.store(mine + BLOCK_R + 1, top, mask=pair < pairs)


@triton.jit
def _join_latents_kernel(
    partial_ptr, values_ptr, y_ptr, slots, H: tl.constexpr, RANK: tl.constexpr,
    VALUE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V elements of one head's value, for BLOCK_N slots."""
    let_next_start(PDL)
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    inside = (v < VALUE)[:, None] & (r < RANK)[None, :]
    weight_at = values_ptr + (head * VALUE + v).to(tl.int64)[:, None] * RANK + r[None, :]
    weight = tl.load(weight_at, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    width: tl.constexpr = BLOCK_R + 2
    base = partial_ptr + (n.to(tl.int64) * H + head) * (SPLITS * width)
    top = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for split in range(SPLITS):
        at = base + split * width
        own = tl.load(at + BLOCK_R + 1, mask=n < slots, other=0.0)
        sums = tl.load(at[:, None] + r[None, :], mask=(n < slots)[:, None], other=0.0)
        higher = tl.maximum(top, own)
        kept, gain = tl.exp(top - higher), tl.exp(own - higher)
        total = total * kept + tl.load(at + BLOCK_R, mask=n < slots, other=1.0) * gain
        acc = acc * kept[:, None] + sums * gain[:, None]
        top = higher
    mean = (acc / total[:, None]).to(weight.dtype)
    if BLOCK_N == 1:
        y = tl.sum(weight.to(tl.float32) * mean.to(tl.float32), 1)[None, :]
    else:
        y = dot(mean, weight.T, tl.zeros((BLOCK_N, BLOCK_V), tl.float32))
    y_at = y_ptr + (n.to(tl.int64) * H + head)[:, None] * VALUE + v[None, :]
    mask = (n < slots)[:, None] & (v < VALUE)[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def turn_latents(
    queries: Any,
    shared: Any,
    positions: Any,
    *,
    heads: int,
    rank: int,
    norm: Any,
    eps: float,
    inv_freq: Any,
    scaling: float = 1.0,
    interleaved: bool = False,
    cache: Any = None,
    table: Any = None,
    slots: Any = None,
    ends: Any = None,
    original: int = 0,
    stretch: float = 0.0,
    pdl: bool = False,
) -> None:
    """Norm and turn in place queries [B, T, H D] and what heads share [B, T, rank + R]; cache it.

    The first `rank` elements of `shared` are normed by `norm` [rank] with `eps`, its last R and
    those of each head's query turn by int positions [B, T] times `inv_freq` float32 [R/2]. With a
    cache [N, S, rank + R], contiguous in its last axis, row b goes to slot `slots[b]`, each token
    to the place that its position says; without `slots` to slot b, of which a full one overwrites
    its last place. With `table` int32 [N, blocks] the cache is [blocks, size, rank + R], see
    blocks.py. `ends`, `original` and `stretch` as in `rotary_append`.
    """
    batch, tokens, _ = shared.shape
    turning = 2 * inv_freq.shape[-1]
    dim = queries.shape[-1] // heads
    _check(queries, shared, heads, rank, turning, cache)
    half = max(8, next_power_of_2(turning // 2))
    at_once = max(1, min(next_power_of_2(heads), _TURNED // (2 * half)))
    parts = 1 + -(-heads // at_once)
    if not batch * tokens:
        return
    count, room = (0, 0) if cache is None else slots_and_room(cache, table, 1)
    table, table_stride, size = table_arguments(table, cache, 1)
    launch(
        _turn_latents_kernel,
        (batch * tokens * parts,),
        *(queries, shared, positions, inv_freq, norm, cache, table, slots, ends, original),
        *(scaling, eps, tokens, room, count),
        *positions.stride()[:2],
        *((0, 0) if cache is None else cache.stride()[:2]),
        *(table_stride, size),
        **{"PAIRS": turning // 2, "D": dim, "H": heads, "RANK": rank, "HEADS": at_once},
        **{"HALF": half, "INTERLEAVED": interleaved, "BLOCK": next_power_of_2(rank)},
        STRETCH=stretch,
        num_warps=4,
        pdl=pdl,
    )


def decode_latents(
    queries: Any,
    cache: Any,
    lengths: Any,
    kv: Any,
    *,
    heads: int,
    turning: int,
    scale: float,
    table: Any = None,
    slots: Any = None,
    reach: int | None = None,
    config: LatentConfig | None = None,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """Attention of new tokens to what heads share of all: heads' values [N T, H value_dim].

    `queries` [N, T, H D] of N sequences have their last `turning` elements turned; the cache is
    [N, S, rank + turning] with token t of sequence n at lengths[n] + t, or, of T = 1 in a full
    slot, at the last place. With `slots` [N] these are the sequences' slots, and where there is no
    such slot, or no such place, the result is finite. With `table` int32 [N, blocks] the cache is
    [blocks, size, rank + turning], see blocks.py.
    `kv` [H (D - turning) + H value_dim, rank] makes each head's key, and then its value, of a
    latent vector: here its first part makes a query that meets latent vectors as they are. `reach`
    as in `decode_attention`.
    """
    (count, tokens, _), rank = queries.shape, kv.shape[1]
    dim, nope = queries.shape[-1] // heads, queries.shape[-1] // heads - turning
    value_dim, rows = kv.shape[0] // heads - nope, count * tokens
    _check(queries, cache, heads, rank, turning, cache)
    if rank > LARGEST_RANK:
        raise ValueError(f"Latent vectors of {rank} elements: at most {LARGEST_RANK}.")
    if kv.shape[0] % heads or value_dim < 1 or not kv.is_contiguous():
        raise ValueError(f"kv {tuple(kv.shape)}: contiguous, of {heads} heads, expected.")
    held, capacity = slots_and_room(cache, table, 1)
    table, table_stride, size = table_arguments(table, cache, 1)
    most = min(reach or capacity, capacity)
    if config is None:
        config = default_config(count, tokens * heads, most, queries.element_size(), sms)
    block_r = max(16, next_power_of_2(rank))
    at_once = 1 if rows == 1 else 16  # what the matrix units take
    grid = -(-rows // at_once), heads
    own = queries.new_empty((rows, heads, rank))
    launch(
        _absorb_kernel,
        (*grid, -(-rank // _ABSORBED)),
        *(queries, kv, own, rows),
        **{"H": heads, "D": dim, "NOPE": nope, "RANK": rank, "BLOCK_N": at_once},
        **{"BLOCK_D": max(16, next_power_of_2(nope)), "BLOCK_R": _ABSORBED},
        num_warps=4,
        pdl=pdl,
    )
    partial = empty(queries, (rows * heads, config.splits, block_r + 2), "float32")
    launch(
        _decode_latents_kernel,
        (count * -(-tokens * heads // config.heads), config.splits),
        *(own, queries, cache, table, lengths, slots, partial, tokens, held, *cache.stride()[:2]),
        *(table_stride, capacity, scale, size),
        **{"H": heads, "D": dim, "RANK": rank, "TURNING": turning, "SEVERAL": tokens > 1},
        **{"SPLITS": config.splits, "STAGES": config.stages},
        **{"BLOCK_H": config.heads, "BLOCK_S": config.block},
        **{"BLOCK_R": block_r, "BLOCK_T": max(16, next_power_of_2(turning))},
        ENTRIES=count_of_entries(table, size, most, config.block, config.splits),
        num_warps=config.warps,
        pdl=pdl,
    )
    y = queries.new_empty((rows, heads * value_dim))
    launch(
        _join_latents_kernel,
        (*grid, -(-value_dim // _VALUES)),
        *(partial, kv.narrow(0, heads * nope, heads * value_dim), y, rows),
        **{"H": heads, "RANK": rank, "VALUE": value_dim, "SPLITS": config.splits},
        **{"BLOCK_N": at_once, "BLOCK_R": block_r, "BLOCK_V": _VALUES},
        num_warps=4,
        pdl=pdl,
    )
    return y


def meets_latents(tokens: int, dim: int, value_dim: int, rank: int, turning: int) -> bool:
    """True if queries of so many `tokens` of a sequence better meet latent vectors themselves.

    Else keys of `dim` and values are made of every vector, and padded to one width: that takes
    more than it spares until so many queries read them that all of a vector is much to multiply
    each with. DeepSeek's part at 186 tokens.
    """
    spared = 2 * rank + turning - 2 * max(dim, value_dim)
    return tokens * spared <= rank * (dim - turning + value_dim)


_ABSORBED, _VALUES = 32, 16  # elements of a query, and of a value, that a program makes


def default_config(slots: int, heads: int, capacity: int, itemsize: int, sms: int) -> LatentConfig:
    """A configuration that nobody measured: two programs an SM, of 64 tokens at least."""
    at_once, block, warps = 16, 32, 4
    if itemsize == 4:
        block = 16
    elif heads > 16:
        at_once, block, warps = 32, 64, 8
    programs = slots * -(-heads // at_once)
    splits = max(1, min(round(2 * sms / programs), -(-capacity // max(block, 64)), 32))
    return LatentConfig(at_once, block, warps, splits)


def tuning_key(slots: int, reach: int, heads: int, rank: int, itemsize: int) -> Key:
    """Of one token's attention over latent vectors: `reach` tokens that may be seen."""
    return "latent_attention", next_power_of_2(slots), next_power_of_2(reach), heads, rank, itemsize


def _fits(key: Key, config: LatentConfig) -> bool:
    rank, itemsize = key[4:]
    held = config.heads + config.stages * config.block
    return held * next_power_of_2(rank) * itemsize <= SHARED_BYTES


def _candidates(key: Key, sms: int) -> list[LatentConfig]:
    _, slots, reach, heads, _, itemsize = key
    default = default_config(slots, heads, reach, itemsize, sms)
    base = next_power_of_2(default.splits)
    configs = [default]
    for splits in (base, base // 2, base * 2, base // 4):
        if not 1 <= splits <= 64:
            continue
        for at_once, block, warps in ((16, 32, 4), (16, 32, 8), (16, 64, 8), (32, 64, 8)):
            if at_once == 16 or heads > 16:
                configs.append(LatentConfig(at_once, block, warps, splits))
    return configs


TUNABLE = Tunable(
    op="latent_attention",
    fields=("slots", "capacity", "heads", "rank", "itemsize"),
    kinds={
        "latent": Kind(
            LatentConfig,
            {
                **{"heads": powers(16, 128), "block": powers(16, 256), "warps": powers(1, 16)},
                **{"splits": range(1, 65), "stages": range(1, 9)},
            },
            bound_by_memory=True,
        )
    },
    fits=_fits,
    candidates=_candidates,
)


def _check(queries: Any, shared: Any, heads: int, rank: int, turning: int, cache: Any) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    width = rank + turning
    if queries.shape[-1] % heads or not queries.is_contiguous():
        raise ValueError(f"queries {tuple(queries.shape)}: contiguous, of {heads} heads, expected.")
    if shared.shape[-1] != width or (cache is not shared and not shared.is_contiguous()):
        raise ValueError(f"shared {tuple(shared.shape)}: contiguous [B, T, {width}] expected.")
    if cache is not None and (cache.shape[-1] != width or cache.stride(2) != 1):
        raise ValueError(f"A cache {tuple(cache.shape)}: [N, S, {width}] is expected.")
