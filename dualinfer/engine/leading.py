"""Engines of several processes that share a model, of which one drives: the others follow it."""

from collections.abc import Callable
from typing import Any

from ..backends.leading import ALONE, Leading, follow
from ..errors import UnsupportedError
from ..parallel.agreement import Peers
from ..parallel.lines import open_lines
from .base import InferenceEngine
from .loop import Loop


class LeadingCalls(InferenceEngine):
    """The calls of a fused engine by which one of several processes drives all of them."""

    _loop: Loop

    def lead(self, tell_lost: Callable[[str], None] = lambda why: None) -> None:
        """Drive the other processes that share this model, whose engines `follow` this one.

        Examples:
            >>> if os.environ["RANK"] == "0":
            ...     engine.lead()  # and then any calls: generate_async, reserve, batch, embed
            ... else:
            ...     engine.follow()  # until rank 0 closes its engine

        Rank 0 calls it while nothing is under way. Its engine is then as that of one process: any
        calls, from any threads. Where another process is gone, or fails alone, calls raise
        DistributedError from then on, and `tell_lost` is called with the reason, from a thread.
        Alone it does nothing. UnsupportedError where the processes are of several hosts.
        """
        peers = self._turns.peers
        if peers.size == 1:
            return
        self._check_rank(peers, "lead()", leads=True)
        with self._turns:
            self._loop.check_idle()
            runner: Any = Leading(self.runner, peers, open_lines(peers), tell_lost)
            self._runner, self._turns.peers = runner, Peers()
            self._loop.run_by(runner)

    def follow(self) -> None:
        """Make the calls of rank 0's engine, which leads, until that one is closed.

        What fails in this process alone is raised, and ends rank 0's engine; DistributedError where
        rank 0 is gone.
        """
        peers = self._turns.peers
        self._check_rank(peers, "follow()", leads=False)
        with self._turns:
            self._loop.check_idle()
            (line,) = open_lines(peers)
            try:
                follow(self.runner, line)
            finally:
                line.close()

    def _check_leads_none(self, call: str) -> None:
        """Raise UnsupportedError for a call that others would have to make as well."""
        if isinstance(self._runner, Leading):
            raise UnsupportedError(f"{call}: {ALONE}")

    def _check_rank(self, peers: Peers, call: str, leads: bool) -> None:
        if self.inference_config.backend != "torch":
            raise UnsupportedError(
                f"{call} is for engines on torch. On JAX one process drives all devices of a host."
            )
        if (peers.rank == 0) != leads or peers.size == 1:
            raise UnsupportedError(
                f"{call} in rank {peers.rank} of {peers.size}: rank 0 of the processes that share "
                "a model calls lead(), each of the others follow()."
            )
