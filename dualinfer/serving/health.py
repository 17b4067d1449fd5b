"""When an engine counts as hung: pure, by how long it has been silent and what it does."""

from typing import NamedTuple

BEAT = 4.0  # seconds without a sign of life; a step of a GPU takes milliseconds
_COMPILING = 600.0
# Of a step, and of each token of prompts that are read: some ten times what large models take.
_GPU, _HOST = (BEAT, 0.002), (60.0, 0.05)
_OVER = 5.0  # times the patience with a step, as where kernels are compiled unseen


class Pulse(NamedTuple):
    """The work of an engine: seconds since its last turn, 0 where there is nothing to do.

    `doing` is what it says that it makes or compiles, `reading` the tokens of prompts that it may
    be at, and `on_host` whether the host's processor computes. `lost` is why it cannot go on.
    """

    silent: float = 0.0
    doing: str | None = None
    reading: int = 0
    on_host: bool = False
    lost: str | None = None

    @property
    def patience(self) -> float:
        """Seconds of silence that are nothing unusual."""
        if self.doing is not None:
            return _COMPILING
        step, token = _HOST if self.on_host else _GPU
        return step + token * self.reading

    @property
    def limit(self) -> float:
        """Seconds of silence after which it is ended."""
        return self.patience if self.doing is not None else _OVER * self.patience

    @property
    def trouble(self) -> str | None:
        """The reason why it does not serve; None while it does."""
        if self.lost is not None:
            return self.lost
        if self.silent <= self.patience:
            return None
        return f"The engine has not moved for {self.silent:.0f} s."
