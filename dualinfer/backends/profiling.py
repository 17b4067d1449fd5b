"""Model times: one entry in ms for every forward pass of the model, while profiling is on."""

from collections.abc import Callable
from typing import Any, Protocol

from ..errors import ProfilingError


class Stopwatch(Protocol):
    """Measures one piece of work on a device; running from the moment it is made."""

    def stop(self, result: Any) -> Callable[[], float]:
        """End with the work that gave `result`: a function that gives its ms, waiting if need be.

        It must not keep `result` alive.
        """
        ...


class Profiler:
    """The times of one engine. `start` makes a backend's Stopwatch; its flag asks for events."""

    def __init__(self, start: Callable[[bool], Stopwatch]):
        self._start = start
        self._use_events = True
        self._times: list[Callable[[], float]] = []
        self.enabled = False

    def switch(self, enabled: bool, use_events: bool = True) -> None:
        """On or off; times taken so far are dropped when it goes off."""
        self.enabled, self._use_events = enabled, use_events
        if not enabled:
            self._times.clear()

    def start(self) -> Stopwatch:
        """A running stopwatch, for a caller that hands it to `book`."""
        return self._start(self._use_events)

    def book(self, watch: Stopwatch, result: Any) -> None:
        """Stop `watch` and keep its time."""
        self._times.append(watch.stop(result))

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work(*args)`, timed if profiling is on, and return its result."""
        if not self.enabled:
            return work(*args)
        watch = self.start()
        result = work(*args)
        self.book(watch, result)
        return result

    def take(self) -> list[float]:
        """The times in ms since the last call, oldest first. Raises ProfilingError when off."""
        if not self.enabled:
            raise ProfilingError(
                "Model profiling is off. Call profile_model_time() first, then run the model."
            )
        times, self._times = self._times, []
        return [time() for time in times]
