"""Times of JAX's ops without the host's: many calls, one after another, in one executable.

A dispatch from Python takes longer than most ops do, and than a step's ops take inside of a step.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from .case import TracedCall

_REPEATS, _FEW_REPEATS = 8, 3
_LONG_SECONDS = 0.1  # of an executable that few repeats are enough for
_EXECUTABLE_SECONDS = 2e-3  # that one should run for at least, so that its start hides
_SAMPLE_SECONDS = 2e-2  # of executables enqueued at once: the wait for the last is little
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 64
_MOST_ENQUEUED = 16


class Chain:
    """Calls of one function that take turns, `rounds` times, as one executable.

    They cannot be computed once for all, nor joined, nor dropped: every call takes its inputs from
    behind a barrier that its predecessor's result passes as well, all of them go round a loop, and
    the results leave it. None of that is an instruction on the device.
    """

    def __init__(self, calls: Sequence[TracedCall], rounds: int) -> None:
        import jax

        function = calls[0].function
        assert all(call.function is function for call in calls)
        self.count = len(calls) * rounds
        self._states = [call.state for call in calls]
        self._inputs = [call.inputs for call in calls]

        def turn(states: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
            after, kept, results = [], [], []
            for state, args in zip(states, inputs, strict=True):
                behind = jax.lax.optimization_barrier((state, args, results[-1:]))
                state, args, results[-1:] = behind
                result, state = function(state, *args)
                after.append(state)
                kept.append(args)
                results.append(result)
            return after, kept, results

        def run(states: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
            carry = turn(states, inputs)
            carry = jax.lax.fori_loop(1, rounds, lambda _, last: turn(*last[:2]), carry)
            return carry[0], carry[2]

        self.run = jax.jit(run, donate_argnums=0)

    def __call__(self) -> list[Any]:
        """The calls' last results; the states go on from where they were."""
        self._states, results = self.run(self._states, self._inputs)
        return results

    def seconds(self) -> list[float]:
        """Times of one call: means over executables that are enqueued at once."""
        import jax

        def sample(enqueued: int) -> float:
            start = time.perf_counter()
            last: list[Any] = []
            for _ in range(enqueued):
                last = self()
            jax.block_until_ready(last)
            return time.perf_counter() - start

        sample(1)  # compiles
        once = sample(1)
        enqueued = max(1, min(_MOST_ENQUEUED, math.ceil(_SAMPLE_SECONDS / once)))
        repeats = _REPEATS if once < _LONG_SECONDS else _FEW_REPEATS
        return [sample(enqueued) / (enqueued * self.count) for _ in range(repeats)]


def chain_seconds(prepare: Callable[[], Any], sets: int, least: float) -> list[float]:
    """Times of one call over `sets` sets of inputs; `least` is what one takes at least."""
    calls = [prepare() for _ in range(sets)]
    rounds = math.ceil(_EXECUTABLE_SECONDS / (sets * least))
    return Chain(calls, max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, rounds))).seconds()
