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
from .operands import dtype_name, empty

_BLOCK = 512


class Mailbox(NamedTuple):
    """One rank's memory for exchanges, of `capacity` values each; it polls `patience` times.

    `words` int64 [2, ranks, capacity], zeros at first, lies where every rank can write; `peers`
    int64 [ranks] holds the addresses of all ranks' words. `state` int32 [3]: exchanges done,
    programs of the present one done, whether one was given up: what was exchanged since is NaN.
    No kernel of a step writes `peers`.

    Where all ranks run one program, `rank`, `words` and `state` are None, and `peers` is a `row`;
    each exchange then changes `order`, an array, in name, which keeps them in their order.
    """

    rank: int | None
    size: int
    capacity: int
    patience: int
    peers: Any
    words: Any = None
    state: Any = None
    order: Any = None


def row(rank: int, words: Sequence[int], state: int) -> list[int]:
    """What `peers` then holds, int64 [ranks + 3]: addresses of all ranks' words and this one's."""
    return [*words, words[rank], state, rank]


@triton.jit
def _own(peers_ptr, SIZE: tl.constexpr):
    """A row's words, state and rank."""
    row_ptr = peers_ptr.to(tl.pointer_type(tl.int64)) + SIZE
    words_ptr = tl.load(row_ptr).to(tl.pointer_type(tl.int64))
    state_ptr = tl.load(row_ptr + 1).to(tl.pointer_type(tl.int32))
    return words_ptr, state_ptr, tl.load(row_ptr + 2).to(tl.int32)


@triton.jit
def _send(x, at, mask, peers_ptr, rank, number, capacity, SIZE: tl.constexpr):
    """Write values `x` float32 to every other rank's words number `at`."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = bits | (number.to(tl.int64) << 32)
    slot = ((number & 1) * SIZE + rank).to(tl.int64) * capacity
    row_ptr = peers_ptr.to(tl.pointer_type(tl.int64))
    for peer in tl.static_range(SIZE):
        if peer != rank:
            to_ptr = tl.load(row_ptr + peer).to(tl.pointer_type(tl.int64))
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
    lost = (late != 0) | (patience < 0)
    if lost:
        tl.store(state_ptr + 2, 1)
    return tl.where(lost, float("nan"), words.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _begin(state_ptr, patience):
    """The number of this exchange, and its patience: -1 where one before was given up."""
    return tl.load(state_ptr) + 1, tl.where(tl.load(state_ptr + 2) == 0, patience, -1)


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
    if RANK is None:
        words_ptr, state_ptr, rank = _own(peers_ptr, SIZE)
    else:
        rank = RANK
    wait_for_inputs(PDL)
    number, patience = _begin(state_ptr, patience)
    x = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
    _send(x, at, mask, peers_ptr, rank, number, capacity, SIZE)
    others = mask[None, :] & (ranks != rank) & (ranks < SIZE)
    found = _receive(at, others, words_ptr, state_ptr, number, capacity, patience, SIZE, RANKS)
    # In one order, so that all ranks have the same bits.
    total = tl.sum(tl.where(ranks == rank, x[None, :], tl.where(others, found, 0.0)), axis=0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % width, mask=mask, other=0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)
    _end(state_ptr, number)


@triton.jit
def _gather_kernel(
    x_ptr, y_ptr, firsts_ptr, words_ptr, peers_ptr, state_ptr, rows, stride, capacity, patience,
    RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, RANKS)[:, None]
    if RANK is None:
        words_ptr, state_ptr, rank = _own(peers_ptr, SIZE)
    else:
        rank = RANK
    total = tl.load(firsts_ptr + SIZE)
    first = tl.load(firsts_ptr + rank)
    width = tl.load(firsts_ptr + rank + 1) - first
    mask = at < rows * width
    firsts = tl.load(firsts_ptr + ranks, mask=ranks < SIZE, other=0)
    widths = tl.load(firsts_ptr + ranks + 1, mask=ranks < SIZE, other=1) - firsts
    others = (at[None, :] < rows * widths) & (ranks != rank) & (ranks < SIZE)
    wait_for_inputs(PDL)
    number, patience = _begin(state_ptr, patience)
    place = at
    if stride is not None:
        place = at // width * stride + at % width
    x = tl.load(x_ptr + place, mask=mask, other=0)
    _send(x.to(tl.float32), at, mask, peers_ptr, rank, number, capacity, SIZE)
    _place(x, y_ptr, at, mask, first, width, total)
    found = _receive(at, others, words_ptr, state_ptr, number, capacity, patience, SIZE, RANKS)
    _place(found, y_ptr, at[None, :], others, firsts, widths, total)
    _end(state_ptr, number)


@triton.jit
def _place(x, y_ptr, at, mask, first, width, total):
    """Store values number `at` of [rows, width] at the columns from `first` on of [rows, total]."""
    to = (at // width).to(tl.int64) * total + first + at % width
    tl.store(y_ptr + to, x.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _given_up_kernel(peers_ptr, flag_ptr, SIZE: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    _, state_ptr, _ = _own(peers_ptr, SIZE)
    wait_for_inputs(PDL)
    tl.store(flag_ptr, tl.load(state_ptr + 2))


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
    _check(x, mailbox)
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(
            f"residual is {tuple(residual.shape)}; a contiguous {tuple(x.shape)} is expected."
        )
    if bias is not None and (bias.shape != x.shape[-1:] or not bias.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias.shape)}; {tuple(x.shape[-1:])} is expected.")
    y = empty(x, x.shape, dtype_name(dtype or x.dtype))
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
    are in all; `widths` are their differences. Where all ranks run one program, x is as wide as
    the widest of them, padded at the end. Values go through float32.
    """
    _check(x, mailbox)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    expected = max(widths) if mailbox.rank is None else widths[mailbox.rank]
    most, stride = rows * max(widths), width if mailbox.rank is None else None
    if width != expected or min(widths) < 1 or most > mailbox.capacity:
        raise ValueError(
            f"x is {tuple(x.shape)}; {expected} columns, some of each rank, and at most "
            f"{mailbox.capacity} values a rank, are expected."
        )
    y = x.new_empty((*x.shape[:-1], sum(widths)))
    launch(
        _gather_kernel,
        (triton.cdiv(most, _BLOCK),),
        *(x, y, firsts, mailbox.words, mailbox.peers, mailbox.state),
        *(rows, stride, mailbox.capacity, mailbox.patience),
        **_meta(mailbox, pdl),
    )
    return y


def given_up(mailbox: Mailbox, *, pdl: bool = False) -> Any:
    """int32 [1], of a `row`: not 0 once this rank gave up an exchange of those before `order`."""
    flag = empty(mailbox.peers, (1,), "int32")
    size = {"SIZE": mailbox.size, "num_warps": 1}
    launch(_given_up_kernel, (1,), mailbox.peers, flag, pdl=pdl, **size)
    return flag


def _meta(mailbox: Mailbox, pdl: bool) -> dict[str, Any]:
    ranks = {"RANK": mailbox.rank, "SIZE": mailbox.size, "RANKS": next_power_of_2(mailbox.size)}
    return {**ranks, "BLOCK": _BLOCK, "num_warps": 4, "pdl": pdl}


def _check(x: Any, mailbox: Mailbox) -> None:
    if not x.is_contiguous() or not 0 < x.numel() <= mailbox.capacity:
        raise ValueError(
            f"x is {tuple(x.shape)} with strides {x.stride()}; contiguous, with 1 to "
            f"{mailbox.capacity} elements, is expected."
        )
