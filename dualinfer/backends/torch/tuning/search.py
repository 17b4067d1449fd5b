"""The search for the kernels' best configurations on the device."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ....errors import warn_caller
from ....kernels.triton.tuning import Measured, Table
from ....model.spec import ModelSpec
from ....system.progress import track
from ..ops.kernels import KernelOps
from ..ops.plain import PlainOps
from ..params import Params
from .cases import TuningCase, tuning_cases
from .store import HERE, Machine, save_cache

MOST_SECONDS = 300.0
_FINALISTS = 3
_REPEATS, _FINAL_REPEATS = 5, 21
_CLEARLY = 0.99  # of the default's time: less of a gain is noise
_ERRORS = {torch.float32: 1e-5}  # relative RMS; half precision rounds once
_ERROR = 4e-3

_log = logging.getLogger(__name__)

Clock: TypeAlias = Callable[[Callable[[], Any], int], float]


def autotune(
    spec: ModelSpec, params: Params, ops: PlainOps, cache_codes: str | None = None
) -> None:
    """Give `ops` the best configurations for the model: those of the cache, else measured now.

    `cache_codes` are the config's `kv_cache_dtype`.

    What is measured is added to the cache. It takes a minute or two, five at the most, of which
    nearly all is Triton's compiler; where that was not enough, the next call goes on.
    """
    if not isinstance(ops, KernelOps):
        return
    known = ops.configurations.table(HERE)
    cases = [
        _with_shipped(case, ops)
        for case in tuning_cases(spec, params, ops, cache_codes=cache_codes)
        if case.key not in known
    ]
    if not cases:
        return
    table: Table = {}
    try:
        ended = search(cases, table, graph_seconds(ops.device), MOST_SECONDS)
    finally:  # what an interrupt leaves is worth keeping
        torch.cuda.empty_cache()
        if table:
            save_cache(Machine.of(ops.device), table)
    if not ended:
        warn_caller(
            f"triton_autotune measured {len(table)} of {len(cases)} shapes, as it takes "
            f"{MOST_SECONDS:.0f} seconds at most. The others run as without it; the next start "
            "with triton_autotune=True goes on."
        )
    ops.configurations = ops.configurations.having(HERE, table)


def _with_shipped(case: TuningCase, ops: KernelOps) -> TuningCase:
    """The case, with what runs without a search among its candidates."""
    _, config = ops.configurations.look_up(case.key)
    if config is None or config in case.candidates:
        return case
    return case._replace(candidates=[*case.candidates, config])


@torch.inference_mode()
def search(
    cases: Sequence[TuningCase], found: Table, seconds: Clock, limit: float | None = None
) -> bool:
    """Add each case's best configuration to `found`; none is begun after `limit` seconds.

    False if that left some out.
    """
    started = time.monotonic()
    for case in track(cases, "Tuning kernels"):
        if limit is not None and time.monotonic() - started > limit:
            return False
        best = _best(case, seconds)
        if best is not None:
            found[case.key] = best
    return True


def _best(case: TuningCase, seconds: Clock) -> Measured | None:
    """The fastest candidate that gives what the default gives; None if the default itself fails."""
    default = case.candidates[0]
    try:
        run, calls = case.prepare()
        expected = run(default)
    except Exception as error:  # of the compiler, the driver, the allocator
        _log.warning("%s cannot run as %s: %s", case.key, default, error)
        return None
    runs = {default: lambda: run(default)}
    for config in case.candidates[1:]:
        try:
            same = _agree(run(config), expected)
        except Exception as error:  # of the compiler, the driver: this one cannot run here
            _log.debug("%s cannot run as %s: %s", case.key, config, error)
            continue
        if same:
            runs[config] = lambda config=config: run(config)
        else:
            _log.warning("%s gives a wrong result as %s", case.key, config)
    times = {config: seconds(call, _REPEATS) for config, call in runs.items()}
    finalists = [default, *sorted(times, key=lambda config: times[config])[:_FINALISTS]]
    times = {config: seconds(runs[config], _FINAL_REPEATS) for config in dict.fromkeys(finalists)}
    best = min(times, key=lambda config: times[config])
    if times[best] > _CLEARLY * times[default]:
        best = default
    return Measured(best, times[best] / calls * 1e6)


def _agree(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if two results are the same but for rounding; never if one has a NaN."""
    error = (y.float() - expected.float()).square().mean().sqrt()
    most = _ERRORS.get(y.dtype, _ERROR)
    return bool(error <= most * expected.float().square().mean().sqrt())


def graph_seconds(device: torch.device) -> Clock:
    """A clock: the median seconds of a call's launches, captured in a CUDA graph and replayed."""
    side = torch.cuda.Stream(device)

    def seconds(call: Callable[[], Any], repeats: int) -> float:
        torch.cuda.synchronize(device)
        graph, times = torch.cuda.CUDAGraph(), []
        # Not `torch.cuda.graph`, which collects garbage each time: that takes longer than this.
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            finally:
                graph.capture_end()
            for _ in range(repeats + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                times.append((start, end))
        side.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in times[1:]) / 1e3

    return seconds
