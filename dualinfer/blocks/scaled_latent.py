"""Latent attention whose normed latent vectors have a factor (LongCat)."""

from dataclasses import dataclass

import numpy as np

from ..decoder.attention import Projected
from ..decoder.run import Run
from ..model.spec import Attention, Wiring
from ..ops.contract import Array, LatentQkv
from ..ops.maths import Maths, flat, heads


@dataclass(frozen=True)
class ScaledLatent(Wiring):
    """A normed latent vector is times `scale`: so the queries that meet it are, and the values."""

    scale: float

    def widen(self, run: Run, qkv: LatentQkv, made: Projected) -> LatentQkv:
        """See `Wiring`."""
        return qkv._replace(queries=self._scaled(run.ops.maths, run.layer.attending, qkv.queries))

    def _scaled(self, m: Maths, a: Attention, queries: Array) -> Array:
        """Queries [B, T, H D] with a factor of all that does not turn."""
        assert a.latent is not None
        factors = np.ones(a.head_dim, np.float32)
        factors[: a.head_dim - a.latent.turning] = self.scale
        return flat(
            heads(queries, width=a.head_dim) * m.cast(m.of_numpy(factors, queries), queries.dtype)
        )

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return y * self.scale
