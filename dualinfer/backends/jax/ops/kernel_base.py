"""The base of all ops by kernels on JAX: device, configurations, counters."""

import copy
from typing import Any, Self

import jax
import jax.numpy as jnp

from ....kernels.triton import linear
from ....kernels.triton.codes import served_codes
from ....kernels.triton.launch import INTERPRETED
from ....kernels.triton.tuning import Configurations, device_kinds, shipped
from ....kernels.xla.launches import call, capability_of
from ....ops.caches import CacheSpec, CacheView
from ...kernels import Launch, is_wide
from ..parallel import Split
from .fused import FusedOps

_HOPPER = 90


class KernelBase(FusedOps):
    """Ops on a GPU; where Triton is interpreted, for tests, on any device."""

    def __init__(self, device: jax.Device, split: Split | None = None) -> None:
        super().__init__(split)
        self.sms = getattr(device, "core_count", None) or 132
        self.capability = capability_of(device)
        self.cache_codes = served_codes(self.capability)
        self._on_gpu = device.platform == "gpu"
        major, minor = divmod(self.capability, 10)
        kinds = device_kinds(device.device_kind, (major, minor), self.sms) if self._on_gpu else ()
        self.configurations = Configurations(shipped(kinds) if kinds else ())
        self._counters: jax.Array | None = None

    def knows(self, cache: CacheSpec | CacheView) -> bool:
        """See `PlainOps.knows`; keys of wide heads are for plain ops."""
        return super().knows(cache) and not is_wide(cache)

    def make_scratch(self, pairs: int, mailboxes: jax.Array | None = None) -> Any:
        """Zeros by which programs that share a sum count one another."""
        return jnp.zeros(max(linear.MOST_TILES, pairs), jnp.int32)

    def using(self, scratch: Any) -> Self:
        """See `PlainOps.using`."""
        ops = copy.copy(self)
        ops._counters = scratch
        return ops

    @property
    def scratch(self) -> Any:
        """The counters, which every launch leaves at zero: in order, each takes the last one's."""
        return self._counters

    def starts_early(self, rows: int) -> bool:
        """True if kernels over so many rows start before the one in front has ended.

        Between a few rows and many it is slower, as programs that wait take room from those that
        work: see docs/contributing/measured-and-left-out.md.
        """
        early = self._on_gpu and not INTERPRETED and self.capability >= _HOPPER
        return early and (rows <= 4 or rows >= 64)

    def _launched(self, name: str, launch: Launch) -> Any:
        function, arguments, options = launch
        with jax.named_scope(name):
            result, (self._counters,) = call(
                function,
                *arguments,
                **options,
                counters=self._counters,
                sms=self.sms,
                capability=self.capability,
                written=(self._counters,),
            )
        return result
