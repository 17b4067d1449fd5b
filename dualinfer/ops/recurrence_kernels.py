"""The contract of recurrences with kernels: those that bring their own, and those of one step.

Their plain functions say what the kernels compute; a backend's ops launch these for them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from .caches import StateView
from .contract import Array, BlockOps, StateRows, Unnormed, Weights


class Launch(NamedTuple):
    """A function of `kernels/triton` and what it takes, but for what a backend adds.

    That is `counters`, and the device's number of multiprocessors.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


class StateStep(NamedTuple):
    """One token of N sequences, as it goes into the states of their heads; float32.

    `queries` and `keys` are [N, G, K], `values` [N, G, R, V] for R heads of each of G groups, and
    `decays` [N, G, R, 1 or K] the logarithms of what states are times: see `recurrences.take_in`.
    """

    queries: Array
    keys: Array
    values: Array
    steps: Array | None  # [N, G, R] by the delta rule
    decays: Array


@runtime_checkable
class SteppedRecurrence(Protocol):
    """A `spec.Recurrence` whose last array is a state that a token goes into by a `StateStep`."""

    def stepped(
        self, ops: BlockOps, w: Weights, x: Array, rest: tuple[Array, ...]
    ) -> tuple[StateStep, Callable[[Array], Array], tuple[Array, ...]]:
        """The step of projected tokens x [N, 1, ...], behind the arrays before the state.

        Then a function from what heads give, [N, G * R, V], to the result [N, 1, width], and these
        arrays as they are behind the tokens.
        """
        ...


class LaunchingOps(BlockOps, Protocol):
    """The ops of a backend by kernels, which launch those of a recurrence for it."""

    split: Any  # the backend's `Split`; None: one device has the whole model

    def starts_early(self, rows: int) -> bool:
        """True if kernels over so many rows start before the one in front has ended."""
        ...

    def launch(
        self, launch: Launch, written: Sequence[Array] = (), counts: bool = False
    ) -> tuple[Any, Sequence[Array]]:
        """What a launch gives, and those of its arrays that it writes, as they are then.

        With `counts` it has the counters of programs, too.
        """
        ...


@runtime_checkable
class FusedRecurrence(Protocol):
    """A `spec.Recurrence` with kernels of its own, which do what its plain functions say."""

    @property
    def is_fused(self) -> bool:
        """True if the kernels know its sizes."""
        ...

    @property
    def fuses_sequences(self) -> bool:
        """True if there are kernels for sequences, and not for tokens alone."""
        ...

    def fused_token(
        self, ops: LaunchingOps, w: Weights, x: Array, cache: StateView, moves: Array
    ) -> tuple[Array | Unnormed, StateView] | None:
        """See `Ops.recur_token`, of x [N, W] to [N, width]; None for plain operations.

        The kernels' launches go through `ops.launch`. A norm that the product behind makes with its
        own launch may be left to it.
        """
        ...

    def fused_sequence(
        self, ops: LaunchingOps, w: Weights, x: Array, mask: Array | None, rows: StateRows
    ) -> tuple[Array, StateView | None] | None:
        """See `Ops.recur`, where no sequences are packed; None for plain operations.

        `rows` has the numbers and the cache that are given there.
        """
        ...
