"""Timing a module's forward passes where it is called, whoever calls it, compiled or not."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...profiling import Profiler

_PLACE = "_compiled_call_impl"  # what nn.Module calls instead of itself, if it is there


class ModuleWatch:
    """Times the forward passes of `module` for `profiler` until `end`, or until it is dropped.

    It stands where nn.Module keeps its compiled call, which no copy or pickle of a module takes
    along; forward hooks would go with it, and torch does not call them after an interrupt. The
    profiler is held weakly: it holds the runner, which holds this. TorchScript has no such place:
    its caller goes through `run`. A pass inside of what the caller compiled around the module, as
    transformers does for a static cache, cannot be seen.
    """

    def __init__(self, module: torch.nn.Module, profiler: Profiler):
        self._profiler = weakref.ref(profiler)
        self._thread = threading.local()
        self._undo = self._stand_in(module)

    def _stand_in(self, module: torch.nn.Module) -> "weakref.finalize":
        if isinstance(module, torch.jit.ScriptModule):
            undo = weakref.finalize(self, int)
        else:
            call = vars(module).get(_PLACE)
            if not isinstance(call, _TimedCall):  # else another engine's, on the same module
                call = vars(module)[_PLACE] = _TimedCall(module)
            watch: weakref.ref[ModuleWatch] = weakref.ref(self)
            call.watches.append(watch)
            undo = weakref.finalize(self, _leave, weakref.ref(module), call, watch)
        undo.atexit = False
        return undo

    @property
    def profiler(self) -> Profiler | None:
        """The profiler; None once this has ended."""
        return self._profiler() if self._undo.alive else None

    def run(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `work`, one entry; none if it raises, or profiling ends meanwhile."""
        profiler = self.profiler
        if profiler is None or not profiler.enabled or getattr(self._thread, "muted", False):
            return work(*args, **kwargs)
        watch = profiler.start()
        result = work(*args, **kwargs)
        if self.profiler is profiler:
            profiler.book(watch, result)
        return result

    @contextmanager
    def muted(self) -> Iterator[None]:
        """This thread's passes inside are no entries."""
        self._thread.muted = True
        try:
            yield
        finally:
            self._thread.muted = False

    @contextmanager
    def also(self, module: torch.nn.Module) -> Iterator[None]:
        """The passes of `module` are entries inside as well."""
        undo = self._stand_in(module)
        try:
            yield
        finally:
            undo()

    def end(self) -> None:
        """Stop; passes under way are not booked."""
        self._undo()


class _TimedCall:
    """A module's call with the stopwatches of all who watch it; None in a copy or a pickle."""

    def __init__(self, module: torch.nn.Module):
        self.watches: list[weakref.ref[ModuleWatch]] = []
        self._module = weakref.ref(module)
        self.compiled = vars(module).get(_PLACE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        call = self.compiled or module._call_impl
        if not torch.compiler.is_compiling():
            for reference in tuple(self.watches):
                watch = reference()
                if watch is not None:
                    call = functools.partial(watch.run, call)
        return call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (None, "", None)


def _leave(
    held: "weakref.ref[torch.nn.Module]", call: _TimedCall, watch: "weakref.ref[ModuleWatch]"
) -> None:
    """End one watch; the last one puts back what stood in the module's place."""
    call.watches[:] = [w for w in call.watches if w is not watch]
    module = held()
    if module is None or call.watches or vars(module).get(_PLACE) is not call:
        return
    if call.compiled is None:
        del vars(module)[_PLACE]
    else:
        vars(module)[_PLACE] = call.compiled


def compiled_call(module: Any) -> Any:
    """The call that torch.compile put in the place of the module's own, or None."""
    call = vars(module).get(_PLACE)
    while isinstance(call, _TimedCall):
        call = call.compiled
    return call
