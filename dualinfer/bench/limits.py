"""The device under test, on either framework: its limits, its clock, its memory.

Figures of a CPU come from small arrays and show only that bench runs.
"""

import gc
import importlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from .case import TracedCall
from .chain import chain_seconds

Call = Callable[[], Any]

_STREAM_BYTES = {"cpu": 2**26, "gpu": 2**32}
_COPY_BYTES = {"cpu": 2**24, "gpu": 2**30}
_SIDE = {"cpu": 512, "gpu": 8192}
_REPEATS = 8
_CPU_CALLS = 20  # of an op whose time is taken
_MOST_SETS = 64
# More than any device reaches: how long an op takes at least, so that enough of them are chained.
_FASTEST_READ, _FASTEST_PRODUCT, _SHORTEST = 4e12, 1e15, 2e-6


@dataclass(frozen=True)
class Limits:
    """Rates that the device reaches in this process: bytes read and FLOPs in `dtype`, a second."""

    backend: str
    device: str
    dtype: str
    read_bandwidth: float
    matrix_rate: float


class Device(Protocol):
    """One device through one framework. Times are in seconds."""

    backend: str
    kind: str  # cpu or gpu
    name: str

    def limits(self, dtype: str) -> Limits:
        """The limits, measured once a process and dtype."""
        ...

    def host_rate(self) -> float:
        """Bytes per second of a copy from pinned host memory, measured once a process."""
        ...

    def op_seconds(self, prepare: Callable[[], Call], nbytes: int) -> float:
        """Median time of one call; `nbytes` is what one call reads and writes.

        `prepare` makes fresh inputs and returns the call on them. Sets of inputs take turns, as
        many as no cache of the device holds.
        """
        ...

    def start_peak(self) -> None:
        """Begin to watch the memory held."""
        ...

    def peak_bytes(self) -> int | None:
        """Most bytes held since `start_peak`, None where nothing tells."""
        ...

    def settle(self) -> None:
        """Free what nobody holds, and wait; raises if the device does not answer any more."""
        ...


class TorchDevice:
    """The current CUDA device, else the CPU."""

    backend = "torch"

    def __init__(self) -> None:
        import torch

        self.kind = "gpu" if torch.cuda.is_available() else "cpu"
        self.place = "cuda" if self.kind == "gpu" else "cpu"
        self.name = torch.cuda.get_device_name() if self.kind == "gpu" else "CPU"
        self._limits: dict[str, Limits] = {}

    @cached_property
    def _read_bandwidth(self) -> float:
        import torch

        x = torch.rand(_STREAM_BYTES[self.kind] // 4, device=self.place)
        return x.nbytes / min(self._times(x.sum))

    def host_rate(self) -> float:
        """See `Device`."""
        return self._host_rate

    @cached_property
    def _host_rate(self) -> float:
        """One large block, by torch; on a CPU from memory to memory."""
        import torch

        size = _COPY_BYTES[self.kind]
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self.kind == "gpu")
        there = torch.empty(size, dtype=torch.uint8, device=self.place)
        return size / min(self._times(lambda: there.copy_(host, non_blocking=True)))

    def limits(self, dtype: str) -> Limits:
        """The read-only stream of a float32 sum, and the rate of a square product."""
        import torch

        if dtype not in self._limits:
            bandwidth, side = self._read_bandwidth, _SIDE[self.kind]
            self.settle()
            a, b = (
                torch.randn(side, side, device=self.place).to(getattr(torch, dtype))
                for _ in range(2)
            )
            rate = 2 * side**3 / min(self._times(lambda: a @ b))
            self._limits[dtype] = Limits(self.backend, self.name, dtype, bandwidth, rate)
            del a, b
            self.settle()
        return self._limits[dtype]

    def _times(self, call: Call) -> list[float]:
        """Times of single calls, after two to warm up."""
        import torch

        times = []
        for _ in range(_REPEATS + 2):
            if self.kind == "cpu":
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return times[2:]

    def op_seconds(self, prepare: Callable[[], Call], nbytes: int) -> float:
        """On CUDA the calls are captured in one graph, so that no launch from Python counts."""
        import torch

        with torch.inference_mode():
            if self.kind == "cpu":
                return statistics.median(_cpu_times(prepare, 2))
            l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            calls = [prepare() for _ in range(_sets(nbytes, l2))]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for call in calls:  # compiles, tunes, and allocates what stays
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            rounds = math.ceil(_CPU_CALLS / len(calls))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls * rounds:
                    call()
            times = self._times(graph.replay)
            return statistics.median(times) / (rounds * len(calls))

    def start_peak(self) -> None:
        """Begin to watch the memory held by torch."""
        import torch

        if self.kind == "gpu":
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Most bytes allocated by torch since `start_peak`; None on a CPU."""
        import torch

        return torch.cuda.max_memory_allocated() if self.kind == "gpu" else None

    def settle(self) -> None:
        """Free what nobody holds, and wait."""
        import torch

        gc.collect()
        if self.kind == "gpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class JaxDevice:
    """JAX's first device."""

    backend = "jax"

    def __init__(self) -> None:
        import jax

        self._device = jax.local_devices()[0]
        self.kind = "cpu" if self._device.platform == "cpu" else "gpu"
        self.name = "CPU" if self.kind == "cpu" else self._device.device_kind
        self._limits: dict[str, Limits] = {}
        self._peak_before = 0

    @cached_property
    def _read_bandwidth(self) -> float:
        streams = importlib.import_module(f"{__package__}.{self.backend}.ops")
        nbytes, best = _STREAM_BYTES[self.kind], 0.0
        for prepare in streams.read_streams(nbytes, self._device).values():
            best = max(best, nbytes / min(self._times(prepare, 1, nbytes / _FASTEST_READ)))
            self.settle()
        return best

    def host_rate(self) -> float:
        """See `Device`."""
        return self._host_rate

    @cached_property
    def _host_rate(self) -> float:
        """One large block, by JAX's runtime; on a CPU from memory to memory."""
        import jax
        from jax.sharding import SingleDeviceSharding

        kinds = "pinned_host", self._device.default_memory().kind
        host, there = (SingleDeviceSharding(self._device, memory_kind=kind) for kind in kinds)
        block = jax.device_put(np.zeros(_COPY_BYTES[self.kind], np.uint8), host)
        times = _cpu_times(lambda: lambda: jax.device_put(block, there), 1)  # by the clock
        return block.nbytes / min(times)

    def limits(self, dtype: str) -> Limits:
        """The best of several read-only streams, and the rate of a square product.

        One stream is not the limit: XLA's sum alone leaves some of it. They are the backend's own
        choice, `read_streams` of its ops: sums, a maximum, and a kernel's product.
        """
        import jax
        import jax.numpy as jnp

        if dtype not in self._limits:
            bandwidth, side = self._read_bandwidth, _SIDE[self.kind]
            precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None

            @jax.jit
            def product(state: None, a: jax.Array, b: jax.Array) -> tuple[jax.Array, None]:
                return jnp.matmul(a, b, precision=precision), state

            def prepare() -> TracedCall:
                keys = jax.random.split(jax.random.key(0))
                a, b = (jax.random.normal(key, (side, side), jnp.dtype(dtype)) for key in keys)
                return TracedCall(product, None, (a, b))

            flops = 2 * side**3
            rate = flops / min(self._times(prepare, 1, flops / _FASTEST_PRODUCT))
            self._limits[dtype] = Limits(self.backend, self.name, dtype, bandwidth, rate)
            self.settle()
        return self._limits[dtype]

    def _times(self, prepare: Callable[[], Call], sets: int, least: float) -> list[float]:
        """Times of one call with `sets` sets of inputs; `least` is what it takes at least."""
        if self.kind == "cpu":
            return _cpu_times(prepare, min(sets, 2))
        return chain_seconds(prepare, sets, least)

    def op_seconds(self, prepare: Callable[[], Call], nbytes: int) -> float:
        """On a GPU many calls are one executable, so that no dispatch from Python counts."""
        least = max(_SHORTEST, nbytes / _FASTEST_READ)
        return statistics.median(self._times(prepare, _sets(nbytes, 64 * 2**20), least))

    def start_peak(self) -> None:
        """Begin to watch the memory held by JAX."""
        self._peak_before = self._peak()

    def peak_bytes(self) -> int | None:
        """Most bytes held by JAX; None on a CPU, and where an earlier row has held more.

        JAX tells the peak of the whole process only.
        """
        peak = self._peak()
        return peak if peak > self._peak_before else None

    def _peak(self) -> int:
        return (self._device.memory_stats() or {}).get("peak_bytes_in_use", 0)

    def settle(self) -> None:
        """Free what nobody holds, and wait; raises if the device does not answer any more."""
        import jax

        gc.collect()
        jax.block_until_ready(jax.device_put(0.0, self._device) + 1)


def open_device(backend: str) -> TorchDevice | JaxDevice:
    """The device that engines of `backend` run on."""
    return TorchDevice() if backend == "torch" else JaxDevice()


def _sets(nbytes: int, cache_bytes: int) -> int:
    """Sets of inputs that together are four times the cache, at least 2."""
    return min(_MOST_SETS, max(2, math.ceil(4 * cache_bytes / max(nbytes, 1))))


def _cpu_times(prepare: Callable[[], Call], sets: int) -> list[float]:
    calls = [prepare() for _ in range(sets)]
    times = []
    for i in range((_CPU_CALLS if sets > 1 else _REPEATS) + 2):
        start = time.perf_counter()
        _wait(calls[i % len(calls)]())
        times.append(time.perf_counter() - start)
    return times[2:]


def _wait(result: Any) -> None:
    for leaf in result if isinstance(result, tuple | list) else (result,):
        if hasattr(leaf, "block_until_ready"):
            leaf.block_until_ready()
