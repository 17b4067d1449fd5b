"""The row of `dualinfer bench serve`: latencies and throughput by vLLM's definitions.

docs/serving.md says what each figure means. Beside them stands what the same work takes without a
server: a step of as many sequences, and their prompts, by `generate` in the same process.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .counts import Counts
from .drive import Record, Run
from .limits import Limits
from .load import Ask, Load
from .systems import System

Row = dict[str, Any]

SLOS = ("ttft", "tpot", "e2el")
_PERCENTILES = 50, 90, 95, 99
_BARE_STEPS = 32
_MOST_ROWS = 256  # more gain nothing: a step is bound by arithmetic


def figures(run: Run, goals: Mapping[str, float] | None = None) -> Row:
    """The figures of a run, under the names of vLLM's JSON. Times are in milliseconds.

    `goals` are the most milliseconds of `SLOS` that a good request takes.
    """
    good = [one for one in run.records if one.error is None]
    failed = _alike(one.error for one in run.records if one.error is not None)
    if not good:
        said = "; ".join(f"{count} x {what}" for what, count in failed.most_common(3))
        raise ArgumentError(f"None of {len(run.records)} requests was answered: {said}")
    read, made = sum(one.input for one in good), sum(one.output for one in good)
    seconds = run.seconds
    row: Row = {
        "duration": seconds,
        "completed": len(good),
        "failed": failed.total(),
        "errors": dict(failed.most_common()),
        "short": sum(one.output < one.asked for one in good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(good) / seconds,
        "output_throughput": made / seconds,
        "total_token_throughput": (read + made) / seconds,
        "chunk_tokens": made / sum(len(one.stamps) for one in good),
        "live": _live(good),
        "late_ms": max(one.late for one in run.records) * 1e3,
    }
    of_each = {name: np.array(values) * 1e3 for name, values in _times(good).items()}
    for name, values in of_each.items():
        if len(values):
            row |= _spread(name, values)
    row["curves"] = {
        name: np.percentile(values, range(101)).round(4).tolist()
        for name, values in of_each.items()
        if len(values)
    }
    if goals:
        row["request_goodput"] = _in_time(good, goals) / seconds
        row["goals_ms"] = dict(goals)
    return row


def _alike(errors: Iterable[str]) -> "Counter[str]":
    """Count each error; those that differ in numbers alone count under the first."""
    found: Counter[str] = Counter()
    names: dict[str, str] = {}
    for error in errors:
        found[names.setdefault(re.sub(r"[0-9,.]+", "0", error), error)] += 1
    return found


def _times(good: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds until the first token, between events, of each token after the first, of all."""
    return {
        "ttft": [one.stamps[0] - one.begun for one in good],
        "tpot": [_tpot(one) for one in good if one.output > 1],
        "itl": [gap for one in good for gap in np.diff(one.stamps).tolist()],
        "e2el": [one.ended - one.begun for one in good],
    }


def _tpot(one: Record) -> float:
    return (one.ended - one.stamps[0]) / max(1, one.output - 1)


def _spread(name: str, values: np.ndarray) -> Row:
    row = {
        f"mean_{name}_ms": values.mean(),
        f"median_{name}_ms": np.median(values),
        f"std_{name}_ms": values.std(),
    }
    row |= {f"p{p}_{name}_ms": np.percentile(values, p) for p in _PERCENTILES}
    return {key: float(value) for key, value in row.items()}


def _in_time(good: Sequence[Record], goals: Mapping[str, float]) -> int:
    """The number of requests that met every goal."""

    def meets(one: Record) -> bool:
        took = {"ttft": one.stamps[0] - one.begun, "e2el": one.ended - one.begun}
        took["tpot"] = _tpot(one)
        return all(took[name] * 1e3 <= most for name, most in goals.items())

    return sum(map(meets, good))


def _live(good: Sequence[Record]) -> float:
    """Sequences that make tokens at a time: the mean over the time in which some do."""
    spans = [(one.stamps[0], one.ended) for one in good]
    total = sum(end - begin for begin, end in spans)
    reached, busy = 0.0, 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total / busy if busy else 1.0


def measure_serving(
    load: Load,
    goals: Mapping[str, float],
    over_http: bool,
    warm_ups: int,
    is_bare: bool,
    most: int | None,
    vocab: int,
    counts: Counts,
    system: System,
    limits: Limits,
) -> Row:
    """The row of one load; the model takes `most` tokens.

    As many requests as `warm_ups` with other ids come first, all at once.
    """
    load = load.filled(most)
    asks = load.asks(vocab, most)
    loads = [*([load.warm_up(warm_ups)] if warm_ups else []), load]
    begun = time.perf_counter()
    run = system.answer(loads, vocab, most, over_http)[-1]
    row: Row = {"load": load.to_dict(), "what": load.describe(), "over_http": over_http}
    row |= figures(run, goals) | {"all_seconds": time.perf_counter() - begun}
    most_rows = min(load.concurrency or load.requests, load.requests, _MOST_ROWS)
    least = limit_seconds(asks, most_rows, counts, limits)
    row["limit_tokens_per_s"] = sum(ask.new_tokens for ask in asks) / least
    row["of_limit"] = row["output_throughput"] / row["limit_tokens_per_s"]
    if is_bare:
        try:
            row |= _bare(asks, row, most, vocab, system)
        except Exception as error:
            row["bare_error"] = f"{type(error).__name__}: {error}"
    return row


def limit_seconds(asks: Sequence[Ask], rows: int, counts: Counts, limits: Limits) -> float:
    """The least seconds that the device needs: prompts at its matrix rate, and then the steps.

    Each step of so many rows reads all weights, or multiplies as long, and reads what its
    sequences have cached.
    """
    prompts = sum(counts.flops(1, len(ask.ids), head_tokens=1) for ask in asks)
    flops = counts.flops(rows, 1, head_tokens=1) / limits.matrix_rate
    step = max(counts.read_bytes(rows) / limits.read_bandwidth, flops) / rows
    seconds = prompts / limits.matrix_rate
    for ask in asks:
        if (steps := ask.new_tokens - 1) > 0:
            cached = counts.kv_bytes(limits.dtype, 1, len(ask.ids), ask.new_tokens)
            seconds += steps * (step + cached / limits.read_bandwidth)
    return seconds


def _bare(asks: Sequence[Ask], row: Row, most: int | None, vocab: int, system: System) -> Row:
    """The figures of the work by `generate` alone, of as many sequences as were live.

    All have the mean length that a sequence has halfway.
    """
    rows = min(max(1, round(row["live"])), len(asks))
    read = float(np.mean([len(ask.ids) for ask in asks]))
    made = float(np.mean([ask.new_tokens for ask in asks]))
    steps = _BARE_STEPS
    length = max(1, round(read + max(0.0, made - steps) / 2))
    if most:
        steps = max(1, min(steps, most - 2))
        length = min(length, most - steps - 1)
    ids = np.random.default_rng(1).integers(0, vocab, (rows, length))

    def seconds(new_tokens: int) -> float:
        begun = time.perf_counter()
        system.generate(ids, new_tokens)
        return time.perf_counter() - begun

    seconds(1 + steps)  # what is made at first
    first = min(seconds(1), seconds(1))
    step = (min(seconds(1 + steps), seconds(1 + steps)) - first) / steps
    prompt = first / (rows * length)  # a token's
    total = prompt * sum(len(ask.ids) for ask in asks)
    total += step / rows * sum(ask.new_tokens - 1 for ask in asks)
    bare = sum(ask.new_tokens for ask in asks) / total
    return {
        "bare_rows": rows,
        "bare_length": length,
        "bare_step_ms": step * 1e3,
        "bare_prompt_ms": prompt * read * 1e3,
        "bare_tokens_per_s": bare,
        "of_bare": row["output_throughput"] / bare,
    }
