"""Attention whose gates come from the projection of its queries (Qwen3-Next)."""

from dataclasses import dataclass, replace

from ..decoder.attention import Projected
from ..decoder.run import Run
from ..model.spec import Attention, Wiring
from ..ops.contract import Array, Epilogue, NormOf
from ..ops.feed_forward import times_logistic
from ..ops.streams import parted


@dataclass(frozen=True)
class GatedQueries(Wiring):
    """The results of heads are times the logistic function of gates, one for each element.

    They stand before queries, keys and values in the one projection, axis `given`; in files those
    of a head are behind its query.
    """

    projects = True

    def widened(self, a: Attention) -> Attention:
        """See `Wiring`: its heads are like others."""
        return replace(a, wiring=None)

    def project(self, run: Run, x: Array, norm: NormOf | None) -> Projected:
        """See `Wiring`."""
        both = run.project("qkv", x, Epilogue(norm=norm))
        a = run.layer.attention
        gates, qkv = parted(run.ops.maths, both, a.heads * a.head_dim)
        return Projected(qkv, x, norm, gates)

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return times_logistic(run.ops.maths, y, made.beside)
