"""Executables compiled ahead of time, one a bucket or signature, and the clock around them."""

import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from ...errors import UnsupportedError, shown
from ...kernels.xla.grouping import grouped
from ...system.patience import told_if_slow
from ...system.progress import track
from .compilation_cache import keep_all

TRACED = (
    "An engine does not run inside of jax.jit, jax.vmap or jax.grad: it runs executables of its "
    "own, on arrays whose values are known. Call it outside; in fused mode engine.apply, and in "
    "module mode engine.module may be called inside."
)
_EAGER = (
    "An engine runs compiled steps, and jax.disable_jit (or JAX_DISABLE_JIT) is on. Turn it off "
    "around the engine; to follow a pass op by op, call engine.apply within it."
)
# What varied calls of a server need: batches of 1 to 16, prompts of 16 to 512 tokens, caches of 64
# to 2048, greedy and sampled, are 5 * (6 + 6) * 2 = 120. Each takes some 9 MB of host memory.
_MOST = 128
_MOST_BYTES = 1 << 30  # of their code, which takes the device's memory from weights and cache
_MOST_HELPERS = 32  # of one kind; quickly compiled again
# Linux gives a process 65,530 memory maps, and XLA ends a process that wants more. The code of an
# executable for a CPU takes about 250, however many layers a model has.
_MAPS, _MOST_MAPS = "/proc/self/maps", "/proc/sys/vm/max_map_count"
_FEW = 32  # executables of a process that are not worth counting maps for
_THREADS = min(8, os.cpu_count() or 1)
_SLOWLY = "XLA compiles a step for sizes that are new"
_LOWERING = threading.RLock()  # of the process: one step is traced and lowered at a time


with ThreadPoolExecutor(1) as _elsewhere:  # where no trace is under way, whatever there is here
    _UNTRACED = _elsewhere.submit(get_opaque_trace_state).result()


def check_untraced(arrays: Iterable[Any] = ()) -> None:
    """Raise UnsupportedError where one of `arrays`, or all that is put on a device, is traced."""
    if get_opaque_trace_state() != _UNTRACED and any(
        isinstance(x, Tracer) for x in (*arrays, jax.device_put(0))
    ):
        raise UnsupportedError(TRACED)


_CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"  # XLA's own


def compiler_options(
    enable_cuda_graph: bool | None, device: jax.Device, kernels: bool = False
) -> dict[str, str | bool] | None:
    """Options for the compiler; None is XLA's own choice, which captures CUDA graphs on a GPU.

    That choice captures the bodies of while loops and not the loops themselves. With `kernels`,
    which are ours, loops are captured as well, which is best where a step is a few calls of them:
    the host then has no part between two tokens. XLA's products are cuBLAS' then, which adds a bias
    before it rounds; Triton's products of XLA round it twice wherever they are taken as faster,
    and to find that out takes most of a compilation. The figures are in
    docs/contributing/measured-and-left-out.md and benchmarks/README.md.
    """
    if device.platform != "gpu":
        return None
    options: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False} if kernels else {}
    if enable_cuda_graph is False:
        options["xla_gpu_enable_command_buffer"] = ""  # the empty list of commands to capture
    elif kernels:
        # One call is worth a graph of its own: it is the kernels of many layers.
        options["xla_gpu_graph_min_graph_size"] = "1"
        options["xla_gpu_enable_command_buffer"] = f"{_CAPTURED},WHILE"
    return options or None


class Job(NamedTuple):
    """A function to compile ahead of time; arguments may be ShapeDtypeStructs with a sharding.

    `shardings` are those of the arguments, one for all arrays of each or a tree of them, for where
    these are abstract and have none; `results` is that of all results, None for the compiler's own
    choice.
    """

    key: Hashable
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    shardings: tuple[Any, ...] | None = None
    results: jax.sharding.Sharding | None = None


class Lowered(NamedTuple):
    """A job that was traced and lowered, and the numbers of the `programs` of kernels in it."""

    step: jax.stages.Lowered
    programs: Sequence[int] = ()


class Executables:
    """Compiled functions by key; the one unused for longest goes when there are too many.

    That is more than `most`, or `most_bytes` of code; those that were prepared neither count nor
    go. Where the process comes near its limit on memory maps, any of any engine may go. A key must
    name everything that fixes the trace and the shapes. `compilations` counts the executables ever
    made, `evictions` those that went, `seconds` how long callers waited for compilers, by the
    clock. `launching` are the devices on which functions launch kernels, which then come in as few
    calls as possible if they are `joined`. Threads that ask for one key wait for one compilation.
    """

    def __init__(
        self,
        options: Mapping[str, str | bool] | None = None,
        most: int = _MOST,
        most_bytes: int = _MOST_BYTES,
        launching: Sequence[jax.Device] = (),
        joined: bool = True,
    ) -> None:
        self._options: Any = dict(options) if options else None
        self._most, self._most_bytes = most, most_bytes
        self._launching = [d.local_hardware_id for d in launching if d.platform == "gpu"]
        self._launches = bool(launching) and joined
        self._made: dict[Hashable, Any] = {}  # the last used one is last
        self._used: dict[Hashable, int] = {}  # when, by the count of uses in the process
        self._bytes: dict[Hashable, int] = {}
        self._asked: set[Hashable] = set()  # by `prepare`
        self._given_up: set[Hashable] = set()  # by `begin`
        self._closed = False
        self._coming: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()
        self.compilations = self.evictions = 0
        self.seconds = 0.0
        with _EVERYONE_LOCK:
            _EVERYONE.add(self)

    def __len__(self) -> int:
        """Number of executables held."""
        return len(self._made)

    @property
    def facts(self) -> dict[str, int]:
        """Counts for a report; of code that XLA does not tell the size of, as on CPUs, 0 bytes."""
        with self._lock:
            return {
                "compilations": self.compilations,
                "executables": len(self._made),
                "evictions": self.evictions,
                "executable_bytes": sum(self._bytes.values()),
            }

    def run(
        self,
        key: Hashable,
        function: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        results: jax.sharding.Sharding | None = None,
        beside: Callable[[], None] | None = None,
    ) -> Any:
        """Run `function(*args)`, compiled at the key's first use; `donate` as in jax.jit.

        `function` itself is taken from the first call only. `results` as in Job. `beside` is called
        where this compiles, once it is traced: to `begin` what comes after it.
        """
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            raise UnsupportedError(_EAGER)
        executable = self._ready(Job(key, function, args, donate, results=results), beside)
        if self._launching:
            from ...kernels.xla.handler import load  # which imports Triton

            load(self._launching)
        return executable(*args)

    def _ready(self, job: Job, beside: Callable[[], None] | None = None) -> Any:
        """The job's executable, compiled now unless it is there or under way."""
        while True:
            executable, is_new = self._find(job.key)
            if not isinstance(executable, Future):
                return executable
            with told_if_slow(_SLOWLY), self._timed():
                if is_new:
                    with self._book({job.key: executable}):
                        lowered = self.lower(job)
                        if beside:
                            beside()
                        self._compile(lowered, executable)
                with suppress(CancelledError):  # `begin` has left it to us
                    return executable.result()

    def begin(self, key: Hashable, lower: Callable[[], Lowered]) -> None:
        """Compile what `lower()` gives in a thread of its own, where a later `run` finds it.

        `lower` runs in that thread too, outside of every context of the caller. Whatever fails
        there, a `run` with the key does again. The thread ends early once this is cleared or the
        main thread has ended; an interpreter that exits waits for a compilation under way.
        """
        with self._lock:
            if self._closed or key in self._given_up or key in self._made or key in self._coming:
                return
            coming = self._coming[key] = Future()
        run = threading.Thread(
            target=self._compile_early, args=(key, lower, coming), name="dualinfer-compile-ahead"
        )
        try:
            run.start()
        except RuntimeError:  # the process can have no more threads
            self._compile_early(key, None, coming)

    def _compile_early(
        self, key: Hashable, lower: Callable[[], Lowered] | None, coming: "Future[Any]"
    ) -> None:
        """Compile in the thread that `begin` started; without `lower` it gives up."""
        with suppress(CancelledError), self._book({key: coming}):
            try:
                lowered = lower() if lower else None
                if lowered is None or self._closed or not threading.main_thread().is_alive():
                    raise CancelledError
                self._compile(lowered, coming)
            except BaseException:
                self._given_up.add(key)
                raise CancelledError from None

    def prepare(self, jobs: Sequence[Job], description: str) -> None:
        """Compile what is not there yet, several at a time; a later `run` with the key uses it.

        They are traced one after another, in this thread. A progress bar shows `description`.
        """
        self._asked.update(job.key for job in jobs)  # what was asked for is not thrown away
        entries = [(job, *self._find(job.key)) for job in jobs]
        new = [(job, coming) for job, coming, is_new in entries if is_new]
        if new:
            self._compile_all(new, description)
        for job in jobs:
            self._ready(job)  # of `begin`, perhaps

    def _compile_all(self, new: Sequence[tuple[Job, "Future[Any]"]], description: str) -> None:
        pool = ThreadPoolExecutor(min(len(new), _THREADS), "dualinfer-compile")
        with self._timed(), self._book({job.key: coming for job, coming in new}):
            try:
                under_way = []
                for i in track(range(2 * len(new)), description):
                    if i < len(new):
                        job, coming = new[i]
                        under_way.append(pool.submit(self._compile, self.lower(job), coming))
                    else:
                        under_way[i - len(new)].result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _find(self, key: Hashable) -> tuple[Any, bool]:
        """The key's executable, or the Future of it; True if it is for the caller to make."""
        with self._lock:
            executable = self._made.pop(key, None)
            if executable is not None:
                self._made[key] = executable
                self._used[key] = next(_USES)
                return executable, False
            is_new = key not in self._coming
            return self._coming.setdefault(key, Future()), is_new

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time within as waited for compilers."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - start

    @contextmanager
    def _book(self, coming: Mapping[Hashable, "Future[Any]"]) -> Iterator[None]:
        """Hold what is made within; whoever waits for what is not gets the error."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            with self._lock:
                for key, future in coming.items():
                    del self._coming[key]
                    if not future.done():
                        future.set_exception(failure)
                    elif not self._closed:
                        self.compilations += 1
                        self._made[key] = future.result()
                        self._used[key] = next(_USES)
                        self._bytes[key] = _code_bytes(self._made[key])
                self._evict()
            _keep_few_maps()

    def _evict(self) -> None:
        """Drop what was unused for longest until the rest is within bounds, but not the last used.

        A call that runs one holds it itself.
        """
        others = [key for key in self._made if key not in self._asked]
        size = sum(self._bytes[key] for key in others)
        for count, key in zip(range(len(others), 1, -1), others, strict=False):
            if count <= self._most and size <= self._most_bytes:
                return
            size -= self._drop(key)

    def _drop(self, key: Hashable) -> int:
        """Let go of one, which another thread may have done before; the bytes of its code."""
        if self._made.pop(key, None) is None:
            return 0
        del self._used[key]
        self.evictions += 1
        return self._bytes.pop(key)

    def uses(self) -> list[tuple[int, Hashable]]:
        """When each executable held was last used, and its key."""
        with self._lock:
            return [(used, key) for key, used in self._used.items()]

    def drop(self, key: Hashable) -> None:
        """Let go of one, as where there are too many."""
        with self._lock:
            self._drop(key)

    def lower(self, job: Job) -> Lowered:
        """The job traced and lowered, in this thread; others begin to compile its kernels."""
        with _LOWERING, _uncollected():
            function = grouped(job.function) if self._launches else job.function
            jitted = jax.jit(function, donate_argnums=job.donate, out_shardings=job.results)
            if not self._launching:
                return Lowered(jitted.lower(*job.args))
            from ...kernels.xla.handler import noted  # which imports Triton

            with noted() as programs:
                return Lowered(jitted.lower(*job.args), programs)

    def _compile(self, lowered: Lowered, coming: "Future[Any]") -> None:
        with keep_all():
            compiled = lowered.step.compile(compiler_options=self._options)
        if lowered.programs:
            from ...kernels.xla.handler import finish

            finish(lowered.programs)
        coming.set_result(compiled)

    def clear(self) -> None:
        """Let go of every executable, for good; nothing waits for what is under way."""
        with self._lock:
            self._closed = True
            self._made.clear()
            self._used.clear()
            self._bytes.clear()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's collector of cycles away, which takes a fourth of the time of a trace.

    It looks at all that a process holds each time that a trace has made some 1 % more.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


_EVERYONE: "weakref.WeakSet[Executables]" = weakref.WeakSet()
_EVERYONE_LOCK = threading.Lock()
_USES = itertools.count()


def _keep_few_maps() -> None:
    """Drop a quarter of the process's executables where it has two thirds of the maps it may have.

    Those unused for longest go, whichever engine holds them; a call that runs one holds it itself.
    Executables for GPUs have no such code, and processes that share one may not compile it alone.
    """
    if jax.default_backend() != "cpu":
        return
    with _EVERYONE_LOCK:
        everyone = list(_EVERYONE)
    if sum(len(held) for held in everyone) < _FEW:
        return
    try:
        with open(_MOST_MAPS) as limit, open(_MAPS, "rb") as maps:
            if maps.read().count(b"\n") * 3 < int(limit.read()) * 2:
                return
    except (OSError, ValueError):  # not Linux, or a sandbox that does not tell
        return
    held = [(*use, owner) for owner in everyone for use in owner.uses()]
    held.sort(key=lambda entry: entry[0])
    for _, key, owner in held[: len(held) // 4]:
        owner.drop(key)


def _code_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of its code on a device; 0 where XLA does not tell."""
    executable: Any = compiled.runtime_executable()
    try:
        return max(0, executable.size_of_generated_code_in_bytes())
    except Exception:  # a platform that has no answer
        return 0


def jit_few(make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """`make(*sizes)`, jitted; those last used are kept, where jax.jit of static sizes keeps all."""

    @lru_cache(_MOST_HELPERS)
    @wraps(make)
    def made(*sizes: Any) -> Callable[..., Any]:
        return jax.jit(make(*sizes))

    return made


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
            f"compile(backend={shown(backend)}, compile_kwargs={shown(compile_kwargs)}): on JAX "
            "every step is compiled by XLA as it is. Call compile() without arguments, or not at "
            "all."
        )
