"""What profilers see of the torch backend: named ranges, and stopwatches on the device."""

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from ...profiling import Stopwatch

P = ParamSpec("P")
R = TypeVar("R")


def _watched() -> bool:
    """True while a profiler records this thread; a range that nobody sees costs microseconds."""
    if torch.compiler.is_compiling():
        return False
    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def span(name: str) -> AbstractContextManager[Any]:
    """A range `dualinfer::name` in a profiler's view."""
    return record_function(f"dualinfer::{name}") if _watched() else nullcontext()


def named(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: each call is a range `dualinfer::name` in a profiler's view."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _watched():
                return function(*args, **kwargs)
            with record_function(f"dualinfer::{name}"):
                return function(*args, **kwargs)

        return call

    return decorate


class EventWatch:
    """Times the current CUDA stream's work between two events."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record(self._stream)

    def stop(self, result: Any) -> Callable[[], float]:
        """A function that waits for the work and gives its ms."""
        start, end = self._start, torch.cuda.Event(enable_timing=True)
        end.record(self._stream)

        def elapsed() -> float:
            end.synchronize()
            return start.elapsed_time(end)

        return elapsed


class ClockWatch:
    """Times completed work by the host's clock; on CUDA the device is waited for at both ends."""

    def __init__(self, device: torch.device):
        self._device = device
        self._wait()
        self._start = time.perf_counter()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def stop(self, result: Any) -> Callable[[], float]:
        """A function that gives the ms until now."""
        self._wait()
        elapsed = (time.perf_counter() - self._start) * 1e3
        return lambda: elapsed


def make_stopwatch(device: torch.device, use_cuda_events: bool) -> Stopwatch:
    """A running stopwatch: CUDA events where asked for and there is CUDA, else the clock."""
    if use_cuda_events and device.type == "cuda":
        return EventWatch(device)
    return ClockWatch(device)
