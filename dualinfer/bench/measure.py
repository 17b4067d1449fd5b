"""The rows of decode, prefill, forward, embed and serve: times, and the fraction of the limit."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .counts import Counts
from .limits import Device, Limits
from .load import Load
from .serving import measure_serving
from .shapes import Model
from .systems import System
from .task import Task

_DECODE_WARM_UPS = 2  # JAX's first token took five times as long in the second of all calls
_EMBED_WARM_UPS = 2
_FORWARD_WARM_UPS = 6  # HF compiled records its graphs in the first ones


def measure(
    task: Task, model: Model, counts: Counts, system: System, device: Device, limits: Limits
) -> dict[str, Any]:
    """The row of one task; the system has the model loaded."""
    random, more = np.random.default_rng(0), {}
    ids = random.integers(0, model.vocab, (task.batch, task.tokens))
    encoder = None if counts.once is None else model.describe()[0].encoder
    if encoder is not None and task.kind == "forward":
        raise ArgumentError(
            f"{task.model} has an encoder and a decoder, and forward would take ids of both. "
            "Measure decode or prefill."
        )
    if encoder is not None and encoder.sounds and encoder.frames:  # every one is as long
        shape = task.batch, encoder.sounds.frame_width, encoder.frames
        ids = random.standard_normal(shape, np.float32)
        task = replace(task, tokens=encoder.positions.rows)
        more = {"tokens": task.tokens}
    rules: dict[str, Callable[..., dict[str, Any]]] = {
        "decode": _decode,
        "prefill": _prefill,
        "forward": _forward,
        "embed": _embed,
    }
    device.start_peak()
    if task.serve is not None:
        return _serve(task, model, counts, system, limits) | {"peak_bytes": device.peak_bytes()}
    row = rules[task.kind](task, ids, counts, system, limits)
    row |= {"peak_bytes": device.peak_bytes(), "system_facts": system.facts()} | more
    if task.resident is not None:
        row |= streaming_figures(row, row["system_facts"]["streamed_bytes"], device.host_rate())
    return row


def streaming_figures(row: dict[str, Any], nbytes: int, rate: float) -> dict[str, Any]:
    """The figures that change in a row of decode where each token copies `nbytes` to the device.

    `rate` is in bytes per second. The copies run beside everything else.
    """
    least = max(row["limit_ms"], nbytes / rate * 1e3)
    return {
        "streamed_bytes": nbytes,
        "host_rate": rate,
        "limit_ms": least,
        "of_limit": least / row["ms_per_token"],
    }


def _decode(
    task: Task, ids: np.ndarray, counts: Counts, system: System, limits: Limits
) -> dict[str, Any]:
    """Each repeat: a generate of one token, then one of all; the difference is decoding alone."""
    begins = task.tokens if counts.once is None else 1  # columns

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        columns = system.generate(ids, new_tokens)
        elapsed = time.perf_counter() - start
        if columns != begins + new_tokens:
            raise AssertionError(
                f"{task.system} gave {columns - begins} tokens, {new_tokens} asked for"
            )
        return elapsed

    first_call = seconds(task.new_tokens)
    for _ in range(_DECODE_WARM_UPS):
        seconds(1)
        seconds(task.new_tokens)
    runs = [(seconds(1), seconds(task.new_tokens)) for _ in range(task.repeats)]
    return decode_row(task, counts, limits, runs) | {"first_call_ms": first_call * 1e3}


def decode_row(
    task: Task, counts: Counts, limits: Limits, runs: list[tuple[float, float]]
) -> dict[str, Any]:
    """The figures of decode from the seconds of (one token, all tokens) in each repeat.

    Where all tokens took no longer than one, since decoding takes less than what the machine does
    beside, a token's time is the whole call's share, and the row says `at_most`.
    """
    steps = task.new_tokens - 1
    per_token = [(whole - first) * 1e3 / steps for first, whole in runs]
    ms = statistics.median(per_token)
    hidden = ms <= 0
    if hidden:
        ms = statistics.median(whole for _, whole in runs) * 1e3 / task.new_tokens
    weights = counts.read_bytes(task.batch)
    kv = counts.kv_bytes(limits.dtype, task.batch, task.tokens, task.new_tokens)
    limit_ms = (weights + kv) / (limits.read_bandwidth * task.tp) * 1e3
    return {
        "ms_per_token": ms,
        "tokens_per_s": task.batch * 1e3 / ms,
        "first_token_ms": statistics.median(first for first, _ in runs) * 1e3,
        "weight_bytes": weights,
        "kv_bytes": kv,
        "limit_ms": limit_ms,
        "of_limit": limit_ms / ms,
        "runs_ms": {
            "first_token": [first * 1e3 for first, _ in runs],
            "whole": [whole * 1e3 for _, whole in runs],
            "per_token": per_token,
        },
        **({"at_most": True} if hidden else {}),
    }


def _prefill(
    task: Task, ids: np.ndarray, counts: Counts, system: System, limits: Limits
) -> dict[str, Any]:
    first, times = _times(lambda: system.prefill(ids), 2, task.repeats)
    flops = counts.flops(task.batch, task.tokens, head_tokens=1)
    nbytes = counts.read_bytes(task.batch * task.tokens)
    row = _compute_row(task, flops, limits, times, nbytes)
    return row | {"first_call_ms": first * 1e3}


def _forward(
    task: Task, ids: np.ndarray, counts: Counts, system: System, limits: Limits
) -> dict[str, Any]:
    first, times = _times(system.forward(ids), _FORWARD_WARM_UPS, task.repeats)
    flops = counts.flops(task.batch, task.tokens, head_tokens=task.tokens)
    nbytes = counts.read_bytes(task.batch * task.tokens)
    row = _compute_row(task, flops, limits, times, nbytes)
    return row | {"first_call_ms": first * 1e3}


def _serve(
    task: Task, model: Model, counts: Counts, system: System, limits: Limits
) -> dict[str, Any]:
    asked = task.serve or {}
    load, rest = Load(**asked["load"]), {k: v for k, v in asked.items() if k != "load"}
    most = model.describe()[0].max_positions or None
    about = {"most": most, "vocab": model.vocab, "counts": counts}
    row = measure_serving(load, **rest, **about, system=system, limits=limits)
    return row | {"system_facts": system.facts()}


def text_lengths(texts: int, longest: int) -> np.ndarray:
    """Tokens of so many texts, the same in every process: most short, some as long as may be.

    A lognormal distribution, whose mean is 120 where the longest has 512 tokens.
    """
    drawn = np.random.default_rng(1).lognormal(np.log(longest * 0.17), 0.8, texts)
    return np.clip(np.rint(drawn), 1, longest).astype(int)


def _embed(
    task: Task, ids: np.ndarray, counts: Counts, system: System, limits: Limits
) -> dict[str, Any]:
    """Vectors of `batch` texts of up to `tokens` tokens; the limit counts no padding."""
    lengths = text_lengths(task.batch, task.tokens)
    texts = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    first, times = _times(system.embed(texts), _EMBED_WARM_UPS, task.repeats)
    flops = sum(counts.flops(1, int(length), head_tokens=0) for length in lengths)
    row = _compute_row(task, flops, limits, times, counts.weight_bytes)
    seconds, total = row["ms"] / 1e3, int(lengths.sum())
    speeds = {"tokens_per_s": total / seconds, "texts_per_s": task.batch / seconds}
    return row | speeds | {"text_tokens": total, "first_call_ms": first * 1e3}


def _times(call: Callable[[], Any], warm_ups: int, repeats: int) -> tuple[float, list[float]]:
    """Seconds of the first call, and of `repeats` after all warm-ups."""
    times = []
    for _ in range(warm_ups + repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times[0], times[warm_ups:]


def _compute_row(
    task: Task, flops: int, limits: Limits, times: list[float], nbytes: int
) -> dict[str, Any]:
    """Figures of one pass. The limit is the slower of multiplying and of reading `nbytes`."""
    seconds = statistics.median(times)
    least = max(flops / limits.matrix_rate, nbytes / limits.read_bandwidth) / task.tp
    return {
        "ms": seconds * 1e3,
        "tokens_per_s": task.batch * task.tokens / seconds,
        "flops": flops,
        "weight_bytes": nbytes,
        "tflops": flops / seconds / 1e12,
        "limit_ms": least * 1e3,
        "of_limit": least / seconds,
        "runs_ms": {"pass": [t * 1e3 for t in times]},
    }
