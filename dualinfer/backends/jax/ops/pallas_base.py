"""The base of all ops by Pallas' kernels for TPUs: the caches that they read, norms for them."""

from dataclasses import replace
from typing import Any, cast

import jax

from ....kernels.pallas.launch import LANES
from ....ops.cache_kinds import BlockCache, CrossCache, FullCache, LatentBlockCache, LatentCache
from ....ops.caches import CacheSpec
from ....ops.contract import NormOf
from ....ops.norms import layer_norm, rms_norm
from ..maths import MATHS
from ..parallel import Split
from .fused import FusedOps


class PallasBase(FusedOps):
    """Ops on a TPU; with `interpret`, for tests, on any device."""

    grain = LANES  # of the rows of caches
    cache_kinds = frozenset(
        own.kind for own in (FullCache, BlockCache, CrossCache, LatentCache, LatentBlockCache)
    )
    cache_codes = frozenset({"int8", "fp8_e4m3"})

    def __init__(self, split: Split | None = None, *, interpret: bool = False) -> None:
        super().__init__(split)
        self.interpret = interpret

    def lies(self, cache: CacheSpec) -> CacheSpec:
        """See `PlainOps.lies`: a TPU turns arrays whose rows fill no tiles, and kernels read rows.

        Each call would turn all of such a cache, and turn it back.
        """
        if cache.kind not in self.cache_kinds:
            return cache
        key, value = (-(-n // self.grain) * self.grain for n in (cache.key_dim, cache.value_dim))
        return replace(cache, key_dim=key, value_dim=value)


def norm_of(norm: NormOf) -> tuple[Any, list[jax.Array]] | None:
    """A norm as kernels take it: a function of rows and weights, and these; None if it is none."""
    spec, weights = norm.spec, [norm.weight, norm.bias]
    if spec.kind == "affine" or any(x is not None and x.ndim != 1 for x in weights):
        return None
    if spec.kind == "layer" and norm.weight is None:
        return None

    def made(x: jax.Array, *given: jax.Array) -> jax.Array:
        rest = list(given)
        weight, bias = (None if own is None else rest.pop(0) for own in weights)
        if spec.kind == "rms":
            return rms_norm(MATHS, x, weight, spec.eps, spec.unit_offset)
        return layer_norm(MATHS, x, cast(Any, weight), bias, spec.eps, spec.unit_offset)

    return made, [x for x in weights if x is not None]
