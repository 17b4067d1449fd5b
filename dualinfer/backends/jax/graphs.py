"""Executables compiled ahead of time, one a bucket or signature, and the clock around them."""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
from jax.core import Tracer

from ...errors import UnsupportedError

TRACED = (
    "An engine does not run inside of jax.jit, jax.vmap or jax.grad: it runs executables of its "
    "own, on arrays whose values are known. Call it outside; in module mode, engine.module may be "
    "called inside."
)
_MOST = 64


def check_concrete(arrays: Iterable[Any]) -> None:
    """Raise UnsupportedError if one of `arrays` is traced."""
    if any(isinstance(x, Tracer) for x in arrays):
        raise UnsupportedError(TRACED)


def compiler_options(
    enable_cuda_graph: bool | None, device: jax.Device
) -> dict[str, str | bool] | None:
    """Options for the compiler; None is XLA's own choice, which captures CUDA graphs on a GPU."""
    if enable_cuda_graph is False and device.platform != "cpu":
        return {"xla_gpu_enable_command_buffer": ""}  # the empty list of commands to capture
    return None


class Executables:
    """Compiled functions by key; the one unused for longest goes when there are too many.

    A key must name everything that fixes the trace and the shapes. `compilations` counts the
    executables ever made, `seconds` what it took.
    """

    def __init__(self, options: Mapping[str, str | bool] | None = None, most: int = _MOST) -> None:
        self._options = dict(options) if options else None
        self._most = most
        self._made: dict[Hashable, Any] = {}  # the last used one is last
        self._lock = threading.Lock()
        self.compilations = 0
        self.seconds = 0.0

    def __len__(self) -> int:
        """Number of executables held."""
        return len(self._made)

    def run(
        self,
        key: Hashable,
        function: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """What `function(*args)` gives, compiled at the key's first use; `donate` as in jax.jit.

        `function` itself is taken from the first call only.
        """
        with self._lock:
            made = self._made.pop(key, None)
            if made is None:
                start = time.perf_counter()
                lowered = jax.jit(function, donate_argnums=donate).lower(*args)
                made = lowered.compile(compiler_options=self._options)
                self.seconds += time.perf_counter() - start
                self.compilations += 1
                if len(self._made) >= self._most:
                    del self._made[next(iter(self._made))]
            self._made[key] = made
        return made(*args)

    def clear(self) -> None:
        """Let go of every executable."""
        self._made.clear()


class Clock:
    """A running stopwatch: wall time until the result is there, without that of compiling."""

    def __init__(self, executables: Executables) -> None:
        self._executables = executables
        self._start = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._executables.seconds

    def stop(self, result: Any) -> Callable[[], float]:
        """Wait for `result`, a pytree of arrays or tokens under way; a function that gives ms."""
        jax.block_until_ready(result)
        elapsed = (self._now() - self._start) * 1e3
        return lambda: elapsed


def check_compile(backend: Any, compile_kwargs: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedError if `compile()` asks for a compiler other than XLA."""
    if backend is not None or compile_kwargs:
        raise UnsupportedError(
            f"compile(backend={backend!r}, compile_kwargs={dict(compile_kwargs or {})!r}): on JAX "
            "every step is compiled by XLA as it is. Call compile() without arguments, or not at "
            "all."
        )
