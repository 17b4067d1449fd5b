"""A plan of tensor parallelism tried before it is made: all ranks in one process, a few layers.

A miniature of the module runs whole, and then as the ranks would, in threads. Its random weights
show what real ones may hide: biases of zero, layers that hardly differ.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ...precision import own_precision
from ..fill import is_hf
from .miniature import Call, make_calls, make_miniature, pattern, sharing_copy

_PATIENCE = 60.0  # seconds that a thread waits for the others
_TOLERANCE = 3e-5  # relative RMS in float32: rounding gives 1e-6, a wrong split about 1


class Rehearsal:
    """A miniature of a module and what it gives; `ran` are the patterns of the parts that ran.

    Where nothing could be called, `obstacle` says why. `doubts` says it of parts, by pattern, that
    the module may call in another way than was tried, which are not among `ran`; `called` has all
    that ran in any way.
    """

    def __init__(self, module: nn.Module) -> None:
        self.ran: set[str] = set()
        self.called: set[str] = set()
        self.obstacle = ""
        self.doubts: dict[str, str] = {}
        self._calls: list[Call] = []
        self._expected: list[list[torch.Tensor]] = []
        has_models = any(map(is_hf, module.modules()))
        for whole in (False, True) if has_models else (False,):
            if self._find_calls(module, whole):
                return

    def _find_calls(self, module: nn.Module, whole: bool) -> bool:
        """Make a miniature and see which calls work; True if some do.

        Others are tried until one works that is no guess.
        """
        self._reference: Any = None
        for eager, rows in ((False, 2), (False, 1), (True, 2), (True, 1)):
            try:
                if self._reference is None:
                    self._reference = make_miniature(module, whole)
                if eager:  # kernels may need a GPU
                    parts = [self._reference] if is_hf(module) else self._reference.modules()
                    for model in filter(is_hf, parts):
                        model.set_attn_implementation("eager")
                        model.set_experts_implementation("eager")
                calls = make_calls(self._reference, rows)  # some heads take one row only
            except Exception as error:  # what a user's module raises is not ours to foresee
                self.obstacle = self.obstacle or _told(error)
                break
            self._calls, self._expected = [], []
            for call in calls:
                if not (call.whole and pattern(call.path) in self.ran):
                    self._try(call)
            if self.ran:
                starts = tuple(f"{path}." for path in self.doubts)
                self.ran = {path for path in self.ran if not path.startswith(starts)}
                self.obstacle = ""
                return True
            self.doubts.clear()
        return bool(self._calls)

    def _try(self, call: Call) -> None:
        """Note what a call gives and what runs in it; if it fails and is no guess, why."""
        ran: set[str] = set()
        hooks = [
            part.register_forward_hook(lambda *_, path=path: ran.add(pattern(path)))
            for path, part in self._reference.named_modules()
        ]
        try:
            outputs = _run(self._reference, call)
            if not outputs or not all(bool(tensor.isfinite().all()) for tensor in outputs):
                raise ValueError("it returns no finite numbers")
            if call.guess and _difference(_run(self._reference, call), outputs):
                raise ValueError("it does not give the same twice")
        except Exception as error:
            if not call.guess:
                self.obstacle = self.obstacle or _told(error)
                if not call.whole:
                    self.doubts[pattern(call.path)] = _told(error)
            return
        finally:
            for hook in hooks:
                hook.remove()
        self._calls.append(call)
        self._expected.append(outputs)
        self.called |= ran
        if not call.guess:
            self.ran |= ran
            if call.doubt:
                self.doubts[pattern(call.path)] = call.doubt

    def check(self, size: int, split: Callable[[nn.Module, int, Any], None]) -> str:
        """Say what goes wrong once `split(module, rank, seam)` is applied; "" if nothing does."""
        if not self._calls:
            return ""
        ranks = _Threads(size)
        copies = [sharing_copy(self._reference) for _ in range(size)]
        try:
            for rank, part in enumerate(copies):
                split(part, rank, _ThreadSeam(ranks, rank))
        except ValueError as error:
            return _told(error)
        for call, expected in zip(self._calls, self._expected, strict=True):
            problem = ranks.run([partial(_run, part, call) for part in copies], expected)
            if problem:
                return f"{call.path or type(self._reference).__name__}: {problem}"
        return ""


class _Threads:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self.given: list[Any] = [None] * size

    def run(self, works: list[Callable[[], Any]], expected: list[torch.Tensor]) -> str:
        """Say what is wrong with the works' outputs, or ""."""
        problems: dict[int, str] = {}

        def work(rank: int) -> None:
            try:
                problem = _difference(works[rank](), expected)
            except threading.BrokenBarrierError:
                return  # another one's problem, which it tells
            except Exception as error:
                problem = _told(error)
                self.barrier.abort()
            if problem:
                problems[rank] = f"rank {rank}: {problem}"

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.barrier.broken and not problems:
            return f"a rank did not come to a sum or gather within {_PATIENCE:.0f} s"
        return problems[min(problems)] if problems else ""


class _ThreadSeam:
    """The seam of one thread; see `layers.Seam`."""

    def __init__(self, threads: _Threads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        threads = self._threads
        threads.given[self._rank] = x
        threads.barrier.wait()
        tensors = list(threads.given)
        threads.barrier.wait()
        return tensors

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def join_last(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        return torch.cat(self._exchange(x), -1)

    def most(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).amax(0)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    if [t.shape for t in found] != [t.shape for t in expected]:
        shapes = [[tuple(t.shape) for t in ts] for ts in (found, expected)]
        return f"shapes {shapes[0]}, expected {shapes[1]}"
    for own, right in zip(found, expected, strict=True):
        scale = right.double().square().mean().sqrt()
        error = (own.double() - right.double()).square().mean().sqrt()
        if not error <= _TOLERANCE * scale:
            return f"values differ by {float(error):.2e}, their RMS being {float(scale):.2e}"
    return ""


@contextmanager
def _settings() -> Iterator[None]:
    """Set what a comparison needs, in the caller's thread or another one."""
    cpu = torch.device("cpu")
    # A device as a context turns off fused operations, which the real calls would take.
    place = nullcontext() if torch.get_default_device() == cpu else cpu
    with torch.no_grad(), place, own_precision(torch.float32, cpu):
        yield


def _run(module: nn.Module, call: Call) -> list[torch.Tensor]:
    """The floating tensors that a call returns."""
    with _settings():
        return _tensors(module.get_submodule(call.path)(*call.args, **call.kwargs))


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in _tensors(item)]
    return []
