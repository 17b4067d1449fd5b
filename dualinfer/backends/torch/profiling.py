"""Show the torch backend to profilers: named ranges, and stopwatches on the device."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from ..profiling import Stopwatch

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


@contextmanager
def module_spans(module: torch.nn.Module, parts: bool) -> Iterator[None]:
    """Ranges of a pass of the user's module: `dualinfer::forward`, with `parts` one for each part.

    Parts carry their names in the module, such as `dualinfer::encoder.layer.0.attention`. Nothing
    is done where no profiler records.
    """
    if not _watched():
        yield
        return
    open_spans: list[record_function] = []
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            open_spans.append(record_function(f"dualinfer::{name}"))
            open_spans[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        open_spans.pop().__exit__(None, None, None)

    if parts:
        for name, part in module.named_modules():
            if name and not isinstance(part, torch.jit.ScriptModule):
                handles.append(part.register_forward_pre_hook(enter(name)))
                handles.append(part.register_forward_hook(leave))
    try:
        with record_function("dualinfer::forward"):
            yield
    finally:
        for handle in handles:
            handle.remove()
        while open_spans:  # of parts that raised
            leave()


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
