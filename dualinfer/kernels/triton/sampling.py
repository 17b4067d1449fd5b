"""The next token of each slot, and the book of it, without a sort: one launch, seven with filters.

A row of logits is cut into chunks, a program each. Every program finds its chunk's best token; the
last one of a row to arrive takes the best of those and writes everything down. Chunks depend on
the vocabulary alone, so that a row's token does not depend on the rest of the batch.
"""

# Pyright knows device code as Python.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from typing import Any

import triton
import triton.language as tl

from .filters import Workspace, find_thresholds, make_workspace
from .launch import launch, let_next_start, wait_for_inputs
from .operands import as_bytes
from .threefry import gumbel, log
from .thresholds import (
    LOWEST,
    ROW_INTS,
    WORST,
    distance,
    from_best,
    is_last,
    ordered,
    scores,
    unordered,
)

__all__ = ["Workspace", "make_workspace", "sample", "sample_step"]


@triton.jit
def _best_of(key, ids, nobody):
    """The greatest key and the lowest of its ids; `nobody` is above every id."""
    top = tl.max(key)
    return top, tl.min(tl.where(key == top, ids, nobody))


@triton.jit
def _or_zero(best):
    """The logit from which others are counted down: 0 where the best is no finite one, or NaN.

    Where it is NaN the others do not matter, as NaN is the greatest key.
    """
    return tl.where(best > float("-inf"), best, 0.0)


@triton.jit(do_not_specialize=["out_stride", "out_rows"])
def _choose_kernel(
    logits_ptr, logits_stride, seen_ptr, seen_stride, penalty_ptr,
    eos_ptr, eos_stride, new_ptr, minimum_ptr, active_ptr, last_ptr, length_ptr, remaining_ptr,
    noise_ptr, temperature_ptr, min_p_ptr, seed_low_ptr, seed_high_ptr, return_index_ptr,
    position_ptr,
    out_ptr, out_stride, out_rows, step_ptr, counters_ptr,
    keys_ptr, ids_ptr, chunk_best_ptr, row_best_ptr, ints_ptr, vocab,
    EOS_WIDTH: tl.constexpr, FILTERS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of each row; with STEP also everything that a decode step books of it."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits = (logits_ptr, logits_stride)
    seen = (seen_ptr, seen_stride, penalty_ptr)
    eos = (eos_ptr, eos_stride, new_ptr, minimum_ptr)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    real = ids < vocab
    wait_for_inputs(PDL)
    let_next_start(PDL)
    active = True
    if STEP:
        active = tl.load(active_ptr + row) != 0
    if active:
        x = scores(row, ids, real, logits, seen, eos, EOS_WIDTH)
        key = tl.where(real, ordered(x), LOWEST)
        drawn = tl.load(noise_ptr + row) != 0
        temperature = tl.load(temperature_ptr + row)
        seed_low, seed_high = tl.load(seed_low_ptr + row), tl.load(seed_high_ptr + row)
        return_index = tl.load(return_index_ptr + row)
        position = tl.load(position_ptr + row) + (1 if STEP else 0)
        if drawn:
            if FILTERS:
                below = from_best(x, _or_zero(tl.load(row_best_ptr + row)), temperature)
                far = distance(below)
                min_p = tl.load(min_p_ptr + row)
                least = tl.where(min_p > 0, log(min_p), float("-inf"))
                worst = tl.load(ints_ptr + row * ROW_INTS + WORST)
                kept = real & (far <= worst) & ((below >= least) | (below != below))
                key = tl.full((BLOCK,), LOWEST, tl.int32)
                if tl.max(kept.to(tl.int32)) != 0:
                    noise = gumbel(seed_low, seed_high, return_index, position, ids)
                    key = tl.where(kept, ordered(below + noise), LOWEST)
            else:
                # From the chunk's best one down: the row's is not known yet. A tiny
                # temperature gives -inf and no NaN.
                best = unordered(tl.max(key))
                tl.store(chunk_best_ptr + row * CHUNKS + chunk, best)
                best = _or_zero(best)
                noise = gumbel(seed_low, seed_high, return_index, position, ids)
                key = ordered(from_best(x, best, temperature) + noise)
                key = tl.where(real, key, LOWEST)
        top, found = _best_of(key, ids, vocab)
        tl.store(keys_ptr + row * CHUNKS + chunk, top)
        tl.store(ids_ptr + row * CHUNKS + chunk, found)
        if is_last(counters_ptr + row):
            chunks = tl.arange(0, CHUNKS)
            arrived = chunks < tl.num_programs(0)
            at = row * CHUNKS + chunks
            keys = tl.load(keys_ptr + at, mask=arrived, other=LOWEST)
            candidates = tl.load(ids_ptr + at, mask=arrived, other=0)
            if not FILTERS:  # noqa: SIM102
                if drawn:  # the chunks' candidates on the row's one scale
                    of_chunk = tl.load(chunk_best_ptr + at, mask=arrived, other=0.0)
                    best = unordered(tl.max(tl.where(arrived, ordered(of_chunk), LOWEST)))
                    best = _or_zero(best)
                    score = scores(row, candidates, arrived, logits, seen, eos, EOS_WIDTH)
                    more = gumbel(seed_low, seed_high, return_index, position, candidates)
                    keys = ordered(from_best(score, best, temperature) + more)
                    keys = tl.where(arrived, keys, LOWEST)
            _, found = _best_of(keys, candidates, vocab)
            token = found.to(tl.int64)
            if STEP:
                is_eos = token != token
                for i in tl.static_range(EOS_WIDTH):
                    is_eos |= token == tl.load(eos_ptr + row * eos_stride + i)
                remaining = tl.load(remaining_ptr + row) - 1
                tl.store(last_ptr + row, token)
                tl.store(length_ptr + row, tl.load(length_ptr + row) + 1)
                tl.store(new_ptr + row, tl.load(new_ptr + row) + 1)
                tl.store(remaining_ptr + row, remaining)
                goes_on = (remaining > 0) & (is_eos == 0)
                tl.store(active_ptr + row, goes_on.to(tl.uint8))
                tl.store(seen_ptr + row * seen_stride + token, tl.full((), 1, tl.uint8))
                step = tl.load(step_ptr + row).to(tl.int64)
                tl.store(out_ptr + step * out_stride + row, token, mask=step < out_rows)
                tl.store(step_ptr + row, step + 1)
            else:
                tl.store(out_ptr + row, token)
    elif STEP and chunk == 0:
        step = tl.load(step_ptr + row).to(tl.int64)
        tl.store(out_ptr + step * out_stride + row, -1, mask=step < out_rows)
        tl.store(step_ptr + row, step + 1)


def sample(
    logits: Any,
    state: Any,
    position: Any,
    features: Any,
    *,
    workspace: Workspace | None = None,
    pdl: bool = False,
) -> Any:
    """The next token int64 [N] from logits [N, V]; `position` [N] is the new token's own.

    As `sample` of the plain sampler, whose slot state and features it takes; nothing is booked.
    """
    if workspace is None:
        workspace = make_workspace(logits.shape[0], logits.shape[1], logits.device)
    _check_rows("position", position, logits.shape[0])
    out = state.eos.new_empty(logits.shape[0])
    _run(logits, state, features, workspace, pdl, position=position, out=out[None])
    return out


def sample_step(
    logits: Any,
    state: Any,
    features: Any,
    out: Any,
    step: Any,
    *,
    workspace: Workspace,
    pdl: bool = False,
) -> None:
    """One decode step after the logits [N, V]: choose each active slot's token and book it.

    Row `step[n]` of `out` int64 [R, any] gets slot n's token, or NO_TOKEN for one that is not
    active, and `step` [N] grows by one; rows from R on are not written. In place in `state`: last,
    length, new, remaining, seen, and active, which ends at an EOS or the last allowed token. The
    token's position is length + 1.
    """
    count = logits.shape[0]
    _check_rows("step", step, count)
    if out.dim() != 2 or out.shape[1] < count or out.stride(1) != 1:
        raise ValueError(
            f"out has shape {tuple(out.shape)} and strides {out.stride()}; expected [steps, at "
            f"least {count}] with a contiguous last axis."
        )
    _run(logits, state, features, workspace, pdl, out=out, step=step)


def _check_rows(name: str, column: Any, count: int) -> None:
    if tuple(column.shape) != (count,) or column.stride(0) != 1 or column.is_floating_point():
        raise ValueError(
            f"{name} is {column.dtype} of shape {tuple(column.shape)} with strides "
            f"{column.stride()}; expected contiguous integers [{count}], one a row of logits."
        )


def _check(logits: Any, state: Any, workspace: Workspace) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} of shape {tuple(logits.shape)} with strides "
            f"{logits.stride()}; expected floats [rows, vocab] with a contiguous last axis."
        )
    count, vocab = logits.shape
    if vocab != workspace.vocab or count > workspace.rows:
        raise ValueError(
            f"logits have shape {(count, vocab)}, and the workspace was made for up to "
            f"{workspace.rows} rows of {workspace.vocab}. Make one of this size."
        )
    for name in ("active", "last", "length", "new", "remaining", "noise", "temperature"):
        column = getattr(state, name)
        if tuple(column.shape) != (count,) or column.stride(0) != 1:
            raise ValueError(
                f"state.{name} has shape {tuple(column.shape)} and strides {column.stride()}; "
                f"expected contiguous [{count}], one a row of logits."
            )
    for name in ("seen", "eos"):
        table = getattr(state, name)
        if table.shape[0] != count or table.stride(1) != 1:
            raise ValueError(
                f"state.{name} has shape {tuple(table.shape)} and strides {table.stride()}; "
                f"expected [{count}, any] with a contiguous last axis."
            )


def _run(
    logits: Any,
    state: Any,
    features: Any,
    work: Workspace,
    pdl: bool,
    *,
    out: Any,
    position: Any = None,
    step: Any = None,
) -> None:
    _check(logits, state, work)
    count, vocab = logits.shape
    source = (
        *(logits, logits.stride(0)),
        *(as_bytes(state.seen), state.seen.stride(0), state.penalty),
        *(state.eos, state.eos.stride(0), state.new, state.minimum),
    )
    grid = (-(-vocab // work.block), count)
    meta = dict(
        EOS_WIDTH=state.eos.shape[1],
        BLOCK=work.block,
        CHUNKS=work.chunks,
        pdl=pdl,
        num_warps=max(4, work.block // 256),
        enable_fp_fusion=False,  # a product is rounded before it is compared with itself
    )
    active, noise = as_bytes(state.active), as_bytes(state.noise)
    filters = features.noise and features.filters
    if filters:
        find_thresholds(source, state, (active, noise), work, meta, step is not None)
    launch(
        _choose_kernel,
        grid,
        *(*source, active, state.last, state.length, state.remaining, noise),
        *(state.temperature, state.min_p, state.seed_low, state.seed_high, state.return_index),
        *(state.length if position is None else position, out, out.stride(0), out.shape[0]),
        *(work.counters if step is None else step, work.counters),
        *(work.keys, work.ids, work.chunk_best, work.row_best, work.ints, vocab),
        FILTERS=filters,
        STEP=step is not None,
        **meta,
    )
