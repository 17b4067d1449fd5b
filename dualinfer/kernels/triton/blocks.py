"""Caches of blocks: where a token lies whose sequence has its blocks by a table.

The pools of keys and values are [blocks, K, size, D]. Token s of a sequence lies in the block that
entry s // size of the sequence's row names, at place s % size. A negative entry names none: nothing
is read or written there.
"""

from typing import Any

import triton
import triton.language as tl

from .launch import next_power_of_2
from .operands import dtype_name

_MOST_ENTRIES = 32  # of a table: what a warp holds


@triton.jit
def places(table_ptr, tokens, there, block_stride, token_stride, SIZE: tl.constexpr):
    """Where `tokens` of a table's row lie, and which of those that are `there` have a block."""
    block = tl.load(table_ptr + tokens // SIZE, mask=there, other=-1).to(tl.int64)
    at = block * block_stride + (tokens % SIZE).to(tl.int64) * token_stride
    return at, there & (block >= 0)


@triton.jit
def entries_of(table_ptr, first, last, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """The COUNT entries of a table's row from that of token `first` on, -1 behind `last`."""
    index = first // SIZE + tl.arange(0, COUNT)
    return tl.load(table_ptr + index, mask=index * SIZE < last, other=-1)


@triton.jit
def block_of(entries, first, token, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """The block of a token, by the entries from that of token `first` on; -1 beyond them."""
    here = tl.arange(0, COUNT) == token // SIZE - first // SIZE
    return tl.sum(tl.where(here, entries + 1, 0), 0).to(tl.int64) - 1


@triton.jit
def places_in(block, start, there, block_stride, token_stride, SIZE: tl.constexpr):
    """As `places`, of tokens from `start` on, as many as `there` tells, that lie in one block.

    What differs from turn to turn of a loop is one number, and not one a token.
    """
    base = block * block_stride + start % SIZE * token_stride
    own = tl.arange(0, there.shape[0]).to(tl.int64) * token_stride
    return base + own, there & (block + tl.zeros_like(own) >= 0)


@triton.jit
def places_across(
    entries, first, last, start, block_stride, token_stride, SIZE: tl.constexpr,
    COUNT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """As `places`, of N tokens from `start` on, at most SIZE: those before `last` are there.

    They begin at any place, so that they lie in two blocks; without one of these none is there.
    `entries` are those from that of token `first` on.
    """
    block = block_of(entries, first, start, SIZE, COUNT)
    second = block_of(entries, first, tl.minimum(start + N, last) - 1, SIZE, COUNT)
    base = block * block_stride + start % SIZE * token_stride
    further = (second - block) * block_stride - SIZE * token_stride
    i = tl.arange(0, N)
    # A choice of two places would hide from the compiler that both are multiples of 16 bytes.
    beyond = (i >= SIZE - start % SIZE).to(tl.int64)
    at = base + i.to(tl.int64) * token_stride + beyond * further
    return at, start + i < tl.where(tl.minimum(block, second) >= 0, last, 0)


@triton.jit
def places_of(
    table_ptr, entries, first, start, last, tokens, block_stride, token_stride,
    SIZE: tl.constexpr, COUNT: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Where consecutive `tokens` from `start` on lie, with or without a table; those before `last`.

    With COUNT by the table's `entries` from that of token `first` on, and ACROSS where `start` may
    be any token of a block; else each token is looked up.
    """
    if table_ptr is None:
        to, known = tokens.to(tl.int64) * token_stride, tokens < last
    elif COUNT > 0 and ACROSS:
        to, known = places_across(
            entries, first, last, start, block_stride, token_stride, SIZE, COUNT, tokens.shape[0]
        )
    elif COUNT > 0:
        block = block_of(entries, first, start, SIZE, COUNT)
        to, known = places_in(block, start, tokens < last, block_stride, token_stride, SIZE)
    else:
        to, known = places(table_ptr, tokens, tokens < last, block_stride, token_stride, SIZE)
    return to, known


def count_of_entries(table: Any, size: int, reach: int, block: int, splits: int) -> int:
    """ENTRIES, those that each of `splits` programs loads once; 0 where it looks tokens up.

    Of `reach` tokens each reads its part, `block` at a time, which must lie in one block of `size`,
    or in two where the first of them may be any token, as a window's is.
    """
    if table is None or size % block:
        return 0
    turns = -(-reach // block)
    share = -(-turns // splits) * block
    entries = next_power_of_2(-(-share // size) + 1)
    return entries if entries <= _MOST_ENTRIES else 0


def table_arguments(table: Any, pool: Any, axis: int = 2) -> tuple[Any, Any, int]:
    """The table, its rows' stride and the tokens of a block, an `axis` of `pool`, for kernels.

    Without a table they are constants, and the code has nothing of it.
    """
    if table is None:
        return None, None, 0
    if table.dim() != 2 or dtype_name(table.dtype) != "int32" or table.stride(1) != 1:
        raise ValueError(
            f"table is {tuple(table.shape)} {table.dtype}; int32 [N, blocks] with a contiguous "
            "last axis is expected."
        )
    return table, table.stride(0), pool.shape[axis]


def slots_and_room(keys: Any, table: Any, axis: int = 2) -> tuple[int, int]:
    """Sequences, and the tokens that each has room for, of keys [N, K, S, D] or by a table.

    `axis` is that of the tokens.
    """
    if table is None:
        return keys.shape[0], keys.shape[axis]
    return table.shape[0], table.shape[1] * keys.shape[axis]
