"""The origin of a fused engine's weights: whether they are unchanged, and reading them again."""

from collections.abc import Callable
from typing import Any

from ..backends.base import Runner
from ..errors import ModelError, StaleWeightsError
from ..model.live import Watch
from ..model.load_plan import LoadPlan, TensorSource, marks_of
from ..model.spec import ModelSpec
from ..parallel.spmd import Turns

Read = Callable[[], tuple[ModelSpec, LoadPlan, TensorSource]]
Save = Callable[[str, int | None], None]


class Origin:
    """A live module, which is watched, or files, which are not: an engine has copies of these.

    `read` describes the model as it is now. It raises where it is gone or not to be run. `save`
    writes it to a folder.
    """

    def __init__(
        self, spec: ModelSpec, plan: LoadPlan, read: Read, save: Save, watch: Watch | None = None
    ):
        self._spec, self._rows = spec, _rows(plan)
        self._read, self._save, self._watch = read, save, watch
        self._failed: str | None = None

    def check(self) -> None:
        """Raise StaleWeightsError if the engine's weights are not those of the model."""
        if self._failed is not None:
            raise StaleWeightsError(
                f"The last refresh() failed and left some weights old and some new: {self._failed} "
                "Call engine.refresh() again, or make a new engine."
            )
        if self._watch is not None and (change := self._watch.change()):
            raise _stale(change)

    def check_late(self) -> None:
        """Raise as `check` for what a GPU has compared since, at the end of a call."""
        if self._watch is not None and (change := self._watch.late_change()):
            raise _stale(change)

    def refresh(self, runner: Runner, turns: Turns, check: Callable[[], None]) -> None:
        """Read the weights again into `runner`, in place; `check` raises where this is no time."""
        with turns.together("The weights to read again") as work:
            check()
            spec, plan, source = self._read()
            if (spec, _rows(plan)) != (self._spec, self._rows):
                raise ModelError(
                    "The model has another shape or config than the one that this engine was made "
                    "of, and refresh() takes new values of the same weights alone. Make a new "
                    "engine with init_inference()."
                )
            work.meet(lambda: marks_of(source, plan))
        try:
            with turns.together("Reading the weights again"):
                if self._watch is not None:
                    self._watch.look()  # before they are read: what is written meanwhile is seen
                runner.refresh(plan, source)
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}".rstrip(".") + "."
            raise
        self._failed = None

    def save(self, path: str, max_shard_size: int | None, turns: Turns) -> None:
        """Write what the engine runs to a folder; one process writes."""
        with turns.together("Saving"):
            self.check()
            if turns.peers.rank == 0:
                self._save(path, max_shard_size)

    def close(self) -> None:
        """Let go of what is watched."""
        if self._watch is not None:
            self._watch.close()


def _stale(change: str) -> StaleWeightsError:
    return StaleWeightsError(
        f"The model that this engine was made of has changed since: {change}. The engine shares "
        "some of its weights and holds others in a layout of its own, so that it would run a "
        "mixture. Call engine.refresh() to take the new weights. To keep the old ones, make the "
        "engine of a copy: init_inference(copy.deepcopy(model), ...)."
    )


def _rows(plan: LoadPlan) -> dict[str, Any]:
    return {row.name: (row.axes, row.scheme, bool(row.sources)) for row, _ in plan.rows}
