"""The sequences of one call of generate."""

from collections.abc import Generator, Sequence
from contextlib import suppress

import numpy as np

from ..backends.base import Request
from ..errors import ClosedError
from .loop import Loop
from .stops import StopStrings


class Generation:
    """The sequences of one call, step by step. Close it, or exhaust it, to free its slots."""

    def __init__(
        self, loop: Loop, requests: Sequence[Request], chunk: int, stop: StopStrings | None = None
    ):
        self._loop = loop
        self._chunk = chunk
        self._watches = [stop.watch(r.tokens.tolist()) for r in requests] if stop else []
        self._lives = loop.start(requests)

    def __iter__(self) -> Generator[list[int | None], None, None]:
        """For every step, each sequence's new token; None once it has ended."""
        step = 0
        try:
            while True:
                self._loop.fill(self._lives, step + 1, self._chunk)
                for live in self._lives:
                    if live.error and len(live.tokens) <= step:
                        raise live.error
                tokens = [x.tokens[step] if len(x.tokens) > step else None for x in self._lives]
                if all(token is None for token in tokens):
                    return
                step += 1
                self._stop_at(step)
                yield tokens
        finally:
            self.close()

    @property
    def told(self) -> list[list[np.ndarray]]:
        """Arrays of `sampling.tell` for each sequence's tokens, in order; none where none tells."""
        return [live.told[: len(live.tokens)] for live in self._lives]

    def _stop_at(self, count: int) -> None:
        """End the sequences of which a stop string ends within token number `count`.

        Here and not where tokens are booked: that may happen on behalf of another call, which a
        tokenizer's error does not concern.
        """
        for live, watch in zip(self._lives, self._watches, strict=False):
            if len(live.tokens) < count or not watch.is_completed(live.tokens[count - 1]):
                continue
            if live.may_stop_at(count - 1):
                self._loop.finish([live])
                del live.tokens[count:]

    def close(self) -> None:
        """End what is unfinished and free the slots."""
        with suppress(ClosedError):  # in a forked process, which has nothing to free
            self._loop.leave(self._lives)
