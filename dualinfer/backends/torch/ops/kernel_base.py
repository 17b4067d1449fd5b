"""The base of all ops by kernels on torch: device, configurations, scratch memory."""

from typing import Any, Self

import torch

from ....kernels.triton import linear
from ....kernels.triton.codes import served_codes
from ....kernels.triton.launch import has_pdl
from ....kernels.triton.tuning import Configurations
from ....ops.caches import CacheSpec, CacheView
from ...kernels import Launch, is_wide
from ..parallel import Split
from .plain import PlainOps


class KernelBase(PlainOps):
    """Ops on a CUDA device. One object serves one runner: it holds its scratch memory."""

    def __init__(
        self,
        device: torch.device,
        configurations: Configurations | None = None,
        split: Split | None = None,
    ):
        super().__init__(split)
        self.configurations = configurations or Configurations()
        self.sms, capability = 1, 90
        self.pdl = has_pdl(torch.empty(0, device=device))
        if device.type == "cuda":
            self.sms = torch.cuda.get_device_properties(device).multi_processor_count
            major, minor = torch.cuda.get_device_capability(device)
            capability = 10 * major + minor
        self.cache_codes = served_codes(capability)
        self.device = device
        self._counters: dict[int, torch.Tensor] = {}

    def _launched(self, launch: Launch, **more: Any) -> Any:
        function, arguments, options = launch
        counters = self._zeros(linear.MOST_TILES)
        return function(*arguments, **options, **more, counters=counters, sms=self.sms)

    def knows(self, cache: CacheSpec | CacheView) -> bool:
        """See `PlainOps.knows`; keys of wide heads are for plain ops."""
        return super().knows(cache) and not is_wide(cache)

    def clear(self) -> None:
        """See `PlainOps.clear`; no graph may be replayed after it."""
        self._counters.clear()

    def apart(self) -> Self:
        """See `PlainOps.apart`."""
        own = super().apart()
        own._counters = {}
        return own

    def starts_early(self, rows: int) -> bool:
        """True if kernels over so many rows start before the one in front has ended.

        Between a few rows and many it is slower, as programs that wait take room from those that
        work: see docs/contributing/measured-and-left-out.md.
        """
        return self.pdl and (rows <= 4 or rows >= 64)

    # Graphs hold the addresses of scratch memory, so that none is ever replaced.
    def _zeros(self, count: int) -> torch.Tensor:
        if count not in self._counters:
            self._counters[count] = torch.zeros(count, dtype=torch.int32, device=self.device)
        return self._counters[count]
