"""Attention whose gates come from the projection of its queries (Qwen3-Next, A.X-K2)."""

from dataclasses import dataclass

from ..decoder.attention import Projected, project_latent
from ..decoder.run import Run
from ..model.spec import Attention, Wiring
from ..model.weights import Row, row
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

    def project(self, run: Run, x: Array, norm: NormOf | None) -> Projected:
        """See `Wiring`."""
        both = run.project("qkv", x, Epilogue(norm=norm))
        a = run.layer.attending
        gates, qkv = parted(run.ops.maths, both, a.heads * a.head_dim)
        return Projected(qkv, x, norm, gates)

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return times_logistic(run.ops.maths, y, made.beside)


@dataclass(frozen=True)
class GatedLatent(Wiring):
    """As `GatedQueries`, of latent attention (A.X-K2).

    The projection of the latent vector of queries reads it normed and as it is, side by side. All
    of a sequence of `most` tokens are seen.
    """

    most: int
    projects = True

    def axes(self, a: Attention) -> dict[str, int]:
        """See `Wiring`."""
        assert a.latent is not None
        return {"query_ranks": 2 * a.latent.query_rank}

    def rows(self, hf: str) -> list[Row]:
        """The row of the projection, of the attention that HF calls `hf`."""
        stored = f"{hf}q_gate_proj.weight", "q+given/heads query_ranks"
        return [row("query_gate.weight", "q+given query_ranks", stored)]

    def project(self, run: Run, x: Array, norm: NormOf | None) -> Projected:
        """See `Wiring`."""
        return project_latent(run, x, norm, self._query)

    def _query(self, run: Run, x: Array, norm: NormOf | None) -> Projected:
        """Queries of their latent vectors x, and gates."""
        a, m = run.layer.attending, run.ops.maths
        assert a.latent is not None and norm is not None
        both = run.project("query_gate", m.join((run.ops.norm(x, norm), x), -1))
        size = both.shape[-1] * a.head_dim // (a.head_dim + a.latent.value_dim)
        queries, gates = parted(m, both, size)
        return Projected(queries, x, norm, gates)

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return times_logistic(run.ops.maths, y, made.beside)
