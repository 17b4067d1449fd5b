"""The launches that find a row's top-k and top-p, and the scratch that sampling works in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from .launch import launch, let_next_start, next_power_of_2, wait_for_inputs
from .thresholds import (
    BINS,
    COPIES,
    LOWEST,
    MOST_TOKENS,
    ROW_INTS,
    ROW_MASSES,
    count_digit,
    is_last,
    load_goal,
    may_count,
    no_thresholds,
    ordered,
    scales,
    scores,
    start_thresholds,
    take_digit,
    unordered,
)

_SMALLEST_BLOCK, _MOST_CHUNKS = 512, 128


@triton.jit
def _best_kernel(
    logits_ptr, logits_stride, seen_ptr, seen_stride, penalty_ptr,
    eos_ptr, eos_stride, new_ptr, minimum_ptr, active_ptr, noise_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, counters_ptr, chunk_best_ptr, row_best_ptr, ints_ptr,
    vocab,
    EOS_WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk's best logit; then the row's, and what its filters look for."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits = (logits_ptr, logits_stride)
    seen = (seen_ptr, seen_stride, penalty_ptr)
    eos = (eos_ptr, eos_stride, new_ptr, minimum_ptr)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    real = ids < vocab
    wait_for_inputs(PDL)
    let_next_start(PDL)
    drawn = tl.load(noise_ptr + row) != 0
    if STEP:
        drawn &= tl.load(active_ptr + row) != 0
    if drawn:
        x = scores(row, ids, real, logits, seen, eos, EOS_WIDTH)
        best = unordered(tl.max(tl.where(real, ordered(x), LOWEST)))
        tl.store(chunk_best_ptr + row * CHUNKS + chunk, best)
        if is_last(counters_ptr + row):
            bests = (chunk_best_ptr, row_best_ptr)
            temperature = tl.load(temperature_ptr + row)
            top_k = tl.minimum(tl.load(top_k_ptr + row), vocab).to(tl.int32)
            top_p = tl.load(top_p_ptr + row)
            start_thresholds(row, bests, ints_ptr, temperature, top_k, top_p, vocab, CHUNKS)
    elif chunk == 0:
        no_thresholds(row, ints_ptr)


@triton.jit
def _narrow_kernel(
    logits_ptr, logits_stride, seen_ptr, seen_stride, penalty_ptr,
    eos_ptr, eos_stride, new_ptr, minimum_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, counters_ptr, chunk_best_ptr, row_best_ptr, ints_ptr,
    masses_ptr, coarse_ptr, fine_ptr, scales_ptr, vocab,
    EOS_WIDTH: tl.constexpr, DIGIT: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One more digit of the threshold that each row looks for, if any."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits = (logits_ptr, logits_stride)
    seen = (seen_ptr, seen_stride, penalty_ptr)
    eos = (eos_ptr, eos_stride, new_ptr, minimum_ptr)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    real = ids < vocab
    wait_for_inputs(PDL)
    let_next_start(PDL)
    goal, prefix, worst = load_goal(row, ints_ptr, DIGIT)
    of_chunk = tl.load(chunk_best_ptr + row * CHUNKS + chunk)
    best = tl.load(row_best_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    if goal != 0:
        if may_count(of_chunk, best, temperature, prefix, DIGIT):
            x = scores(row, ids, real, logits, seen, eos, EOS_WIDTH)
            histogram_ptr = coarse_ptr if DIGIT == 0 else fine_ptr
            count_digit(row, x, real, best, temperature, prefix, worst, histogram_ptr, ids, DIGIT)
        if is_last(counters_ptr + row):
            tables = (coarse_ptr, fine_ptr, scales_ptr, ints_ptr, masses_ptr)
            top_k = tl.minimum(tl.load(top_k_ptr + row), vocab).to(tl.int32)
            want = (top_k, tl.load(top_p_ptr + row), vocab)
            take_digit(row, goal, prefix, tables, want, DIGIT)


@dataclass(frozen=True)
class Workspace:
    """Scratch of `sample` for up to `rows` slots, at fixed addresses; its counters end at 0.

    Launches that share one must follow each other on one stream.
    """

    rows: int
    vocab: int
    block: int
    chunks: int
    counters: Any
    keys: Any
    ids: Any
    chunk_best: Any
    row_best: Any
    ints: Any
    masses: Any
    coarse: Any
    fine: Any
    scales: Any


def make_workspace(rows: int, vocab: int, device: Any) -> Workspace:
    """Scratch for rows of `vocab` logits on a torch device; about 32 KiB a row."""
    import torch

    def zeros(dtype: str, *shape: int) -> torch.Tensor:
        return torch.zeros(rows, *shape, dtype=getattr(torch, dtype), device=device)

    edges = torch.tensor(scales(), dtype=torch.float64, device=device)
    return workspace_of(rows, vocab, zeros, edges)


def workspace_of(rows: int, vocab: int, zeros: Callable[..., Any], edges: Any) -> Workspace:
    """The same of `zeros(dtype, *shape)`, memory [rows, *shape]; `edges` float64 are `scales()`.

    What must be zero are counters, coarse and fine, and they are again when a launch has ended.
    """
    if not 1 <= vocab <= MOST_TOKENS:
        raise ValueError(
            f"The sampling kernel takes 1 to {MOST_TOKENS:,} tokens, and the vocabulary has "
            f"{vocab:,}. Use the plain sampler."
        )
    block = max(_SMALLEST_BLOCK, next_power_of_2(-(-vocab // _MOST_CHUNKS)))
    chunks = next_power_of_2(-(-vocab // block))
    return Workspace(
        rows=rows,
        vocab=vocab,
        block=block,
        chunks=chunks,
        counters=zeros("int32"),
        keys=zeros("int32", chunks),
        ids=zeros("int32", chunks),
        chunk_best=zeros("float32", chunks),
        row_best=zeros("float32"),
        ints=zeros("int32", ROW_INTS.value),
        masses=zeros("float64", ROW_MASSES.value),
        coarse=zeros("int64", COPIES.value, BINS.value),
        fine=zeros("int64", COPIES.value, BINS.value),
        scales=edges,
    )


def find_thresholds(
    source: tuple, state: Any, flags: tuple, work: Workspace, meta: dict[str, Any], step: bool
) -> None:
    """Leave in `work` what top-k and top-p keep of each row; six launches.

    `source` are the arguments of `scores`, `flags` the columns active and noise as bytes; with
    `step` only active slots are looked at.
    """
    grid = (-(-work.vocab // work.block), source[0].shape[0])
    want = state.temperature, state.top_k, state.top_p
    buffers = work.counters, work.chunk_best, work.row_best, work.ints
    launch(_best_kernel, grid, *source, *flags, *want, *buffers, work.vocab, STEP=step, **meta)
    tables = work.masses, work.coarse, work.fine, work.scales
    for digit in (0, 1, 2, 1, 2):  # the first one serves top-k and top-p
        launch(
            _narrow_kernel,
            grid,
            *(*source, *want, *buffers, *tables, work.vocab),
            DIGIT=digit,
            **meta,
        )
