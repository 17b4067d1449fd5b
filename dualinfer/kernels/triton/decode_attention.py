"""Attention of one new token a sequence: norm, rotary, KV append and split-KV softmax in a launch.

The cached tokens of a sequence are split over programs, as flash-decoding does; the last program
of a KV head to end joins their results, in their order, so that no second launch is needed and the
bits are the same every time. Where a KV head serves many queries, and there are few KV heads, a
program has some of the queries: to join those of 71 one after another took longer than all else.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
from typing import Any, NamedTuple

import triton

from .blocks import count_of_entries, slots_and_room, table_arguments
from .codes import scale_arguments
from .decode_attention_kernel import decode_attention_kernel
from .launch import INTERPRETED, launch, next_power_of_2
from .operands import empty, is_aligned
from .tunable import SHARED_BYTES, Key, Kind, Tunable, powers

_FEW_HEADS = 16  # queries that share a KV head, of which a program has all
_SHORT = 512  # places in the cache: few queries have a program each
_MOST_EARLY = 4  # slots
MOST_PARTS = 2048  # programs where it has not: fewer than multiprocessors times parts of a head


class DecodeConfig(NamedTuple):
    """Tokens read at a time, warps, programs over which a sequence is split, reads in flight."""

    block: int
    warps: int
    splits: int
    stages: int = 3


def decode_attention(
    qkv: Any,
    cache: tuple[Any, Any],
    lengths: Any,
    *,
    heads: int,
    scale: float,
    counters: Any,
    table: Any = None,
    scales: Any = None,
    window: int | None = None,
    chunk: int | None = None,
    alibi: Any = None,
    alibi_scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    relative: Any = None,
    inv_freq: Any = None,
    scaling: float = 1.0,
    interleaved: bool = False,
    q_norm: Any = None,
    k_norm: Any = None,
    norm_eps: float = 0.0,
    norm_unit_offset: bool = False,
    norm_turned: bool = False,
    original: int = 0,
    stretch: float = 0.0,
    cross: bool = False,
    reach: int | None = None,
    config: DecodeConfig | None = None,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """Attention of one new token a slot: packed qkv [N, (H + 2K) D] to [N, H D].

    The new token's position is lengths[n]: queries and keys are normed over D with `q_norm` and
    `k_norm` [D] if given, before or with `norm_turned` after they are rotated by that position
    times `inv_freq` float32 [R/2] (R <= D), with `original` [2, R/2], whose second row is that of
    positions from there on, or with `stretch` as well by frequencies [R/2] that are stretched as
    `spec.Rope` has it, and key and value are written to the cache, a pair of views [N, K, S, D]
    with D contiguous. A full slot overwrites its last place. With `table` int32 [N, blocks] the
    cache is of blocks (blocks.py), with `scales`, a pair float32 of the cache's axes before D, of
    codes (codes.py).
    `window`, `alibi`, `alibi_scale`, `softcap`, `sinks` and `relative` as in `attention`; with
    `chunk`, in a window's place, a token sees those of its own `chunk` tokens.
    `counters` int32, one a program (N K or MOST_PARTS suffice), are 0, and are again when the
    launch has ended. With `cross` qkv are queries alone, [N, H D], and attend to the lengths[n]
    places that slot n keeps: nothing is written, and of the options none but `scale` is known.
    The cache may have more slots than N. Where none of these has more than `reach` tokens, the work
    is shared out for so many.
    """
    keys, values = cache
    _, kv_heads, _, dim = keys.shape
    held_slots, capacity = slots_and_room(keys, table)
    slots, reach = qkv.shape[0], min(reach or capacity, capacity)
    table, table_stride, size = table_arguments(table, keys)
    most = check_relative(relative, heads)
    if chunk is not None and window is not None:
        raise ValueError(f"chunk={chunk} and window={window} were given; expected one of them.")
    *held, codes = scale_arguments(cache, scales, qkv.dtype)
    group = heads // kv_heads
    kept = qkv.element_size() if qkv.element_size() == 4 else keys.element_size()
    each = _heads_each(slots * kv_heads, group, reach, kept, sms)
    programs = slots * kv_heads * triton.cdiv(group, each)
    two = original > 0 and not stretch
    if slots > held_slots:
        raise ValueError(f"qkv has {slots} rows, and the cache {held_slots} slots.")
    _check(qkv, keys, values, slots, lengths, heads, counters, programs, inv_freq, two, cross)
    y = qkv.new_empty((slots, heads * dim))
    if config is None:
        config = default_config(programs, reach, dim, kept, sms)
    # The matrix units take 16 rows and more, and what they read is fetched ahead; float32, which
    # they do not take, would pay for the rows that are not there.
    block_g = max(16, next_power_of_2(each)) if group > 1 or qkv.element_size() == 2 else 1
    block_d = max(16, next_power_of_2(dim))
    partial = counters  # not read without splits
    if config.splits > 1:
        shape = programs * each, config.splits, block_d + 2
        partial = empty(counters, shape, "float32")
    seen = min(reach, window or chunk or reach)
    entries = count_of_entries(table, size, seen, config.block, config.splits)
    launch(
        decode_attention_kernel,
        (programs, config.splits),
        *(qkv, keys, values, lengths, y, partial, counters, inv_freq, q_norm, k_norm),
        *(
            alibi,
            sinks,
            relative,
            most,
            table,
            *held,
            original,
            table_stride,
            qkv.stride(0),
            *keys.stride()[:3],
            capacity,
            scale,
            softcap or 0.0,
            alibi_scale,
        ),
        *(window or chunk or 0, norm_eps, scaling),
        **{"KV_HEADS": kv_heads, "GROUP": group, "EACH": each, "DIM": dim},
        INTERLEAVED=interleaved,
        ROTARY=0 if inv_freq is None else 2 * inv_freq.shape[-1],
        TWO_TABLES=two,
        STRETCH=stretch,
        **{"WINDOWED": (window or chunk) is not None, "CHUNKED": chunk is not None},
        SOFTCAP=softcap is not None,
        **{"NORM_OFFSET": norm_unit_offset, "NORM_TURNED": norm_turned, "STAGES": config.stages},
        **{"SPLITS": config.splits, "SPLIT_BLOCK": next_power_of_2(config.splits)},
        **{"BLOCK_G": block_g, "BLOCK_S": config.block, "BLOCK_D": block_d},
        **{"SIZE": size, "CODES": codes, "CROSS": cross},
        EARLY=codes is None and _reads_early(keys, values, slots, pdl),
        ENTRIES=entries,
        THREADS=32 * config.warps,
        num_warps=config.warps,
        pdl=pdl,
    )
    return y


def _reads_early(keys: Any, values: Any, slots: int, pdl: bool) -> bool:
    """True if programs read their first block of the cache before the kernel in front has ended.

    Of many slots memory is busy anyway. Tokens are fetched 16 bytes at a time.
    """
    if slots > _MOST_EARLY or not (pdl or INTERPRETED):
        return False
    sizes = keys.shape[-1], *keys.stride()[:3]
    whole = all(n * keys.element_size() % 16 == 0 for n in sizes)
    return INTERPRETED or (whole and is_aligned(keys, 16) and is_aligned(values, 16))


def _are_few(programs: int, itemsize: int, sms: int) -> bool:
    """True if so many programs leave most of the device without work; measured in 16 bits alone.

    They read a block of the cache at once then, and the more of the cache these blocks hold, the
    sooner they end; but the last of a head's programs sums what all of them found.
    """
    return itemsize == 2 and 2 * programs <= sms


def _heads_each(pairs: int, group: int, capacity: int, itemsize: int, sms: int) -> int:
    """Queries of a KV head that a program has: all, or what the matrix units take at a time.

    One where they are few and the cache is short: it is read several times from the L2 cache.
    """
    if capacity <= _SHORT and _are_few(pairs * group, itemsize, sms):
        return 1
    few = group <= _FEW_HEADS or pairs >= sms or pairs * triton.cdiv(group, _FEW_HEADS) > MOST_PARTS
    return group if few else _FEW_HEADS


def check_relative(relative: Any, heads: int) -> int:
    """M of biases [H, 2M+1]; 0 for none. ValueError for what is neither."""
    if relative is None:
        return 0
    rows, width = relative.shape
    if rows != heads or width % 2 == 0 or not relative.is_contiguous():
        raise ValueError(f"relative {tuple(relative.shape)}: ({heads}, 2M+1) is expected.")
    return width // 2


def default_config(pairs: int, capacity: int, dim: int, itemsize: int, sms: int) -> DecodeConfig:
    """A configuration for `pairs` of slot and KV head, or query, that nobody measured.

    Eight warps a multiprocessor, twice as many where few programs hold all of the cache so.
    `itemsize` is that of what the cache keeps, or of float32 heads. Codes, of which as many
    elements are half the bytes, want programs of two warps.
    """
    warps = 2 if itemsize == 1 else 4
    size = dim * max(itemsize, 2)  # codes become floats
    block = 16 if size > 256 else 32 if capacity <= 512 else 64  # as registers allow
    splits = max(1, min(round(8 // warps * sms / pairs), triton.cdiv(capacity, block), 32))
    if _are_few(pairs, itemsize, sms):
        wide = 32 if size > 256 or capacity <= 256 else 64
        parts = triton.cdiv(capacity, wide)
        if capacity <= _SHORT:
            block, splits = wide, min(parts, 8)
        elif parts <= 64 and pairs * parts <= 4 * sms:
            block, splits = wide, parts
    return DecodeConfig(block, warps, splits, 2 if splits > 1 and itemsize > 1 else 3)


def tuning_key(pairs: int, reach: int, group: int, dim: int, itemsize: int) -> Key:
    """Of one token's attention: `pairs` of slot and KV head, `reach` tokens that may be seen.

    `itemsize` is that of what the cache keeps.
    """
    return "decode_attention", next_power_of_2(pairs), next_power_of_2(reach), group, dim, itemsize


def _fits(key: Key, config: DecodeConfig) -> bool:
    dim, itemsize = key[4:]
    return 2 * config.stages * config.block * next_power_of_2(dim) * itemsize <= SHARED_BYTES


def _candidates(key: Key, sms: int) -> list[DecodeConfig]:
    _, pairs, reach, _, dim, itemsize = key
    default = default_config(pairs, reach, dim, itemsize, sms)
    base = next_power_of_2(default.splits)
    splits = [n for n in (base, base // 2, base * 2, base // 4) if 1 <= n <= 64]
    configs = [default]
    for n in splits:
        for block, warps in ((32, 4), (32, 2), (64, 4), (64, 2), (16, 2)):
            if n > triton.cdiv(reach, block) or block * dim > 8192:
                continue
            configs += [DecodeConfig(block, warps, n, stages) for stages in (2, 3)]
    return configs


TUNABLE = Tunable(
    op="decode_attention",
    fields=("pairs", "capacity", "group", "dim", "itemsize"),
    kinds={
        "decode": Kind(
            DecodeConfig,
            {
                **{"block": powers(16, 256), "warps": powers(1, 16)},
                **{"splits": range(1, 65), "stages": range(1, 9)},
            },
            bound_by_memory=True,
        )
    },
    fits=_fits,
    candidates=_candidates,
)


def _check(
    qkv: Any,
    keys: Any,
    values: Any,
    slots: int,
    lengths: Any,
    heads: int,
    counters: Any,
    programs: int,
    inv_freq: Any,
    two: bool,
    cross: bool,
) -> None:
    """Raise ValueError for arguments that the kernel would misread."""
    _, kv_heads, _, dim = keys.shape
    width = (heads if cross else heads + 2 * kv_heads) * dim
    if tuple(qkv.shape) != (slots, width) or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} does not fit {heads} heads and a cache {tuple(keys.shape)}: "
            f"({slots}, {width}) with a contiguous last axis is expected."
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} heads are no multiple of {kv_heads} KV heads.")
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(
            f"Keys {tuple(keys.shape)} with strides {keys.stride()} and values "
            f"{tuple(values.shape)} with strides {values.stride()}: both must be the same, with a "
            "contiguous last axis."
        )
    if tuple(lengths.shape) != (slots,) or lengths.stride(0) != 1:
        raise ValueError(f"lengths {tuple(lengths.shape)}: one for each of {slots} slots, please.")
    if counters.numel() < programs:
        raise ValueError(f"{counters.numel()} counters; {programs} are needed.")
    if inv_freq is not None and 2 * inv_freq.shape[-1] > dim:
        raise ValueError(f"{inv_freq.shape[-1]} frequencies turn more than {dim} elements.")
    if inv_freq is not None and two and (len(inv_freq.shape) != 2 or inv_freq.shape[0] != 2):
        raise ValueError(f"inv_freq is {tuple(inv_freq.shape)}; (2, R/2) is expected.")
