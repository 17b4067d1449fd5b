"""CUDA graphs of the decode step: captured once for a bucket, replayed for every token after."""

from collections.abc import Callable, Hashable

import torch

_MOST = 32


class StepGraphs:
    """Graphs by key. A key must name everything that fixes the launches and their addresses.

    `captures` counts those ever made. The oldest goes when there are too many.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.captures = 0

    def __contains__(self, key: Hashable) -> bool:
        """True if the key's graph can be replayed."""
        return key in self._graphs

    def capture(
        self, key: Hashable, step: Callable[[torch.Tensor], None], out: torch.Tensor
    ) -> None:
        """Record `step`, which writes its tokens to `out`, without running it.

        It must have run before, so that libraries are loaded and have their workspaces.
        """
        if len(self._graphs) >= _MOST:
            torch.cuda.synchronize()  # it may be running
            del self._graphs[next(iter(self._graphs))]
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step(out)
        self._graphs[key] = graph, out
        self.captures += 1

    def replay(self, key: Hashable) -> torch.Tensor:
        """Run the key's step once; the tokens, in a buffer that the next replay writes again."""
        graph, out = self._graphs[key]
        graph.replay()
        return out

    def clear(self) -> None:
        """Let go of every graph: the buffers that they write are about to be freed."""
        if self._graphs:
            torch.cuda.synchronize()  # one may be running
            self._graphs.clear()
