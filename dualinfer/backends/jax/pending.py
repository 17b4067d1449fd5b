"""The results that a dispatched step is computing, until the host asks for them."""

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .exchange import Exchange


class PendingTokens:
    """Tokens that a dispatched step is computing, int32 [R, N], or a pair with what it tells."""

    def __init__(
        self,
        tokens: Any,
        steps: int,
        columns: int,
        exchange: Exchange | None = None,
        flags: jax.Array | None = None,
    ) -> None:
        tokens, self._told = tokens if isinstance(tokens, tuple) else (tokens, None)
        for array in (tokens, *(() if self._told is None else (self._told,))):
            array.copy_to_host_async()
        if flags is not None:
            flags.copy_to_host_async()
        self._tokens, self._steps, self._columns = tokens, steps, columns
        self._exchange, self._flags = exchange, flags

    def fetch(self) -> np.ndarray:
        """int32 [steps, columns]. Raises DistributedError where an exchange was given up."""
        with jax.transfer_guard("allow"):
            if self._exchange is not None:
                self._exchange.check(self._flags)
            return np.asarray(self._tokens)[: self._steps, : self._columns]

    def told(self) -> np.ndarray | None:
        """See `base.PendingTokens`."""
        if self._told is None:
            return None
        with jax.transfer_guard("allow"):
            return np.asarray(self._told)[: self._steps, : self._columns]

    def block_until_ready(self) -> "PendingTokens":
        """Itself, once the step has run: what jax.block_until_ready asks of a leaf."""
        self._tokens.block_until_ready()
        return self


class PendingSteps:
    """Tokens of steps that were dispatched one by one, each an own PendingTokens of one row."""

    def __init__(self, steps: Sequence[PendingTokens], columns: int) -> None:
        self._steps, self._columns = steps, columns
        self._lock = threading.Lock()
        self._fetched: np.ndarray | None = None

    def fetch(self) -> np.ndarray:
        """int32 [steps taken, columns], as `PendingTokens.fetch`.

        Each caller that waits for its sequence waits here: one of them asks for the arrays.
        """
        with self._lock:
            if self._fetched is None:
                none = np.empty((0, self._columns), np.int32)
                self._fetched = np.concatenate([none, *(step.fetch() for step in self._steps)])
            return self._fetched

    def told(self) -> np.ndarray | None:
        """See `base.PendingTokens`."""
        told = [one for step in self._steps if (one := step.told()) is not None]
        return np.concatenate(told) if told else None

    def block_until_ready(self) -> "PendingSteps":
        """See `PendingTokens.block_until_ready`."""
        for step in self._steps:
            step.block_until_ready()
        return self


class PendingPanels:
    """First tokens of prompts that went in several passes; `panels` numbers those of each.

    A column that is none of a prompt's first token has the number -1.
    """

    def __init__(self, passes: Sequence[PendingTokens], panels: Sequence[Sequence[int]]) -> None:
        self._passes, self._panels = passes, panels

    def fetch(self) -> np.ndarray:
        """int32 [1, columns], a column a prompt, as `PendingTokens.fetch`."""
        return np.concatenate([p.fetch() for p in self._passes], axis=1)[:, self._order]

    def told(self) -> np.ndarray | None:
        """See `base.PendingTokens`."""
        told = [p.told() for p in self._passes]
        whole = [one for one in told if one is not None]
        if not whole:
            return None
        width = whole[0].shape[-1]  # a pass without a request that tells has none
        columns = [
            np.zeros((1, len(panel), width), np.float32) if one is None else one
            for one, panel in zip(told, self._panels, strict=True)
        ]
        return np.concatenate(columns, axis=1)[:, self._order]

    @property
    def _order(self) -> np.ndarray:
        order = np.concatenate(self._panels)
        return np.argsort(order)[(order < 0).sum() :]

    def block_until_ready(self) -> "PendingPanels":
        """See `PendingTokens.block_until_ready`."""
        self._passes[-1].block_until_ready()
        return self
