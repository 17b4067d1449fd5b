"""Small sums and gathers over the GPUs of a host, each in one launch, by peer-to-peer writes.

Each rank writes its values into every other rank's memory as 64-bit words, a float32 and the number
of the exchange, and waits until the words written into its own carry that number: a word is written
at once, so that no barrier is needed. Two sets of buffers take turns: who is at exchange n + 2 has
seen every rank's words of n + 1, which each writes once its kernel of n has ended.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs

_BLOCK = 512


class Mailbox(NamedTuple):
    """One rank's memory for exchanges, of `capacity` values each.

    `words` int64 [2, ranks, capacity], zeros at first, lies where every rank can write; `peers`
    int64 [ranks] holds the addresses of all ranks' words. `state` int32 [3]: exchanges done,
    programs of the present one done, whether one was given up. A rank polls `patience` times.
    """

    rank: int
    size: int
    words: Any
    peers: Any
    state: Any
    patience: int

    @property
    def capacity(self) -> int:
        """Values of one rank in one exchange."""
        return self.words.shape[-1]


@triton.jit
def _send(x, at, mask, peers_ptr, number, capacity, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Write values `x` float32 to every other rank's words number `at`."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = bits | (number.to(tl.int64) << 32)
    slot = ((number & 1) * SIZE + RANK).to(tl.int64) * capacity
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            to_ptr = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
            tl.store(to_ptr + slot + at, word, mask=mask, cache_modifier=".wt")


@triton.jit
def _receive(
    at, wanted, words_ptr, state_ptr, number, capacity, patience,
    SIZE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Every rank's words number `at` as float32 [RANKS, BLOCK], once those `wanted` are there."""
    slots = ((number & 1) * SIZE + tl.arange(0, RANKS)).to(tl.int64) * capacity
    from_ptr = words_ptr + slots[:, None] + at[None, :]
    words = tl.load(from_ptr, mask=wanted, other=0, volatile=True)
    late = tl.max(tl.where(wanted & ((words >> 32).to(tl.int32) != number), 1, 0))
    tries = 0
    while (late != 0) & (tries < patience):
        words = tl.load(from_ptr, mask=wanted, other=0, volatile=True)
        late = tl.max(tl.where(wanted & ((words >> 32).to(tl.int32) != number), 1, 0))
        tries += 1
    if late != 0:
        tl.store(state_ptr + 2, 1)
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _begin(state_ptr, patience):
    """The number of this exchange, and its patience: none where one before was given up."""
    return tl.load(state_ptr) + 1, tl.where(tl.load(state_ptr + 2) == 0, patience, 0)


@triton.jit
def _end(state_ptr, number):
    """The last program of an exchange counts it as done."""
    programs = tl.num_programs(0)
    if tl.atomic_add(state_ptr + 1, 1) == programs - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, number)


@triton.jit
def _sum_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, words_ptr, peers_ptr, state_ptr, count, width, capacity,
    patience,
    RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, RANKS)[:, None]
    mask = at < count
    wait_for_inputs(PDL)
    number, patience = _begin(state_ptr, patience)
    x = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
    _send(x, at, mask, peers_ptr, number, capacity, RANK, SIZE)
    others = mask[None, :] & (ranks != RANK) & (ranks < SIZE)
    found = _receive(at, others, words_ptr, state_ptr, number, capacity, patience, SIZE, RANKS)
    # In one order, so that all ranks have the same bits.
    total = tl.sum(tl.where(ranks == RANK, x[None, :], tl.where(others, found, 0.0)), axis=0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % width, mask=mask, other=0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)
    _end(state_ptr, number)


@triton.jit
def _gather_kernel(
    x_ptr, y_ptr, firsts_ptr, words_ptr, peers_ptr, state_ptr, rows, capacity, patience,
    RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, RANKS)[:, None]
    total = tl.load(firsts_ptr + SIZE)
    first = tl.load(firsts_ptr + RANK)
    width = tl.load(firsts_ptr + RANK + 1) - first
    mask = at < rows * width
    firsts = tl.load(firsts_ptr + ranks, mask=ranks < SIZE, other=0)
    widths = tl.load(firsts_ptr + ranks + 1, mask=ranks < SIZE, other=1) - firsts
    others = (at[None, :] < rows * widths) & (ranks != RANK) & (ranks < SIZE)
    wait_for_inputs(PDL)
    number, patience = _begin(state_ptr, patience)
    x = tl.load(x_ptr + at, mask=mask, other=0)
    _send(x.to(tl.float32), at, mask, peers_ptr, number, capacity, RANK, SIZE)
    _place(x, y_ptr, at, mask, first, width, total)
    found = _receive(at, others, words_ptr, state_ptr, number, capacity, patience, SIZE, RANKS)
    _place(found, y_ptr, at[None, :], others, firsts, widths, total)
    _end(state_ptr, number)


@triton.jit
def _place(x, y_ptr, at, mask, first, width, total):
    """Store values number `at` of [rows, width] at the columns from `first` on of [rows, total]."""
    to = (at // width).to(tl.int64) * total + first + at % width
    tl.store(y_ptr + to, x.to(y_ptr.dtype.element_ty), mask=mask)


def sum_ranks(
    x: Any,
    mailbox: Mailbox,
    bias: Any = None,
    residual: Any = None,
    dtype: Any = None,
    *,
    pdl: bool = False,
) -> Any:
    """residual + the sum of every rank's x [..., width] + bias [width], in `dtype`, x's by default.

    Added in float32, in one order: every rank gets the same bits. All ranks call it with
    tensors of one shape, contiguous, of at most `mailbox.capacity` elements. `pdl` as in `launch`.
    """
    import torch

    _check(x, mailbox)
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(
            f"residual is {tuple(residual.shape)}; a contiguous {tuple(x.shape)} is expected."
        )
    if bias is not None and (bias.shape != x.shape[-1:] or not bias.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias.shape)}; {tuple(x.shape[-1:])} is expected.")
    y = torch.empty_like(x, dtype=dtype or x.dtype)
    launch(
        _sum_kernel,
        (triton.cdiv(x.numel(), _BLOCK),),
        *(x, bias, residual, y, mailbox.words, mailbox.peers, mailbox.state),
        *(x.numel(), x.shape[-1], mailbox.capacity, mailbox.patience),
        **_meta(mailbox, pdl),
    )
    return y


def gather_ranks(
    x: Any, mailbox: Mailbox, firsts: Any, widths: Sequence[int], *, pdl: bool = False
) -> Any:
    """Every rank's x [..., width] side by side: [..., sum of widths], in x's dtype.

    `firsts` int32 [ranks + 1] on the device: where each rank's columns begin, and how many there
    are in all; `widths` are their differences. Values go through float32.
    """
    _check(x, mailbox)
    rows = x.numel() // x.shape[-1]
    most = rows * max(widths)
    if x.shape[-1] != widths[mailbox.rank] or most > mailbox.capacity:
        raise ValueError(
            f"x is {tuple(x.shape)}; {widths[mailbox.rank]} columns, and at most "
            f"{mailbox.capacity} values a rank, are expected."
        )
    y = x.new_empty((*x.shape[:-1], sum(widths)))
    launch(
        _gather_kernel,
        (triton.cdiv(most, _BLOCK),),
        *(x, y, firsts, mailbox.words, mailbox.peers, mailbox.state),
        *(rows, mailbox.capacity, mailbox.patience),
        **_meta(mailbox, pdl),
    )
    return y


def _meta(mailbox: Mailbox, pdl: bool) -> dict[str, Any]:
    ranks = {"RANK": mailbox.rank, "SIZE": mailbox.size, "RANKS": next_power_of_2(mailbox.size)}
    return {**ranks, "BLOCK": _BLOCK, "num_warps": 4, "pdl": pdl}


def _check(x: Any, mailbox: Mailbox) -> None:
    if not x.is_contiguous() or not 0 < x.numel() <= mailbox.capacity:
        raise ValueError(
            f"x is {tuple(x.shape)} with strides {x.stride()}; contiguous, with 1 to "
            f"{mailbox.capacity} elements, is expected."
        )
