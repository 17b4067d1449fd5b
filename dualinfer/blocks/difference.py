"""Attention of which one half of heads is subtracted from the other (arXiv:2410.05258)."""

from dataclasses import dataclass, replace

from ..decoder.attention import Projected
from ..decoder.run import Run
from ..model import rows as make
from ..model.spec import Attention, Wiring
from ..model.weights import Row, row
from ..ops.contract import Array, Weights
from ..ops.maths import Maths, cut, flat, named
from ..ops.norms import rms_norm
from ..parallel.sharding import Share

_LAMBDAS = "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"


@dataclass(frozen=True)
class Difference(Wiring):
    """Differential attention (DiffLlama).

    Query heads give means of two values each, those of the KV heads j and j + K/2 for j modulo K/2,
    side by side. Of these the second half of heads, times exp(q1 k1) - exp(q2 k2) + `start` of
    learned vectors, is taken from the first, and what is left is RMS-normed by `eps` and times
    1 - `start`.
    """

    start: float
    eps: float
    halves = 2

    def axes(self, a: Attention) -> dict[str, int]:
        """See `Wiring`."""
        sizes = zip("qkv", a.qkv_sizes, strict=True)
        return {f"{x}{half}": n // 2 for x, n in sizes for half in (1, 2)}

    def share(self, a: Attention, query: Share, key: Share) -> dict[str, Share]:
        """See `Wiring`."""
        shares = zip("qkv", (query, key, key), a.head_widths, strict=True)
        return {f"{x}{half}": own.times(n) for x, own, n in shares for half in (1, 2)}

    def rows(self, hf: str, bias: bool) -> list[Row]:
        """The rows of projections, by halves, of which devices share pairs, and of the vectors."""
        rows = []
        for part, rest in (("weight", " embed"), ("bias", ""))[: 1 + bias]:
            parts = {f"{x}1+{x}2": f"{hf}.{name}.{part}" for x, name in make.QKV.items()}
            sources = [(name, axes + rest) for axes, name in parts.items()]
            rows.append(row(f"qkv.{part}", "+".join(parts) + rest, *sources))
        return rows + [row(name, "head_dim", (f"{hf}.{name}", "head_dim")) for name in _LAMBDAS]

    def widened(self, a: Attention) -> Attention:
        """See `Wiring`: each head twice, once for each value that it reads."""
        return replace(a, wiring=None, heads=2 * a.heads, kv_heads=2 * a.kv_heads)

    def widen(self, run: Run, qkv: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return _doubled(run.ops.maths, run.layer.attending, qkv)

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return _subtracted(run.ops.maths, self, run.layer.attending, y, run.w)


@named("heads")
def _doubled(m: Maths, a: Attention, qkv: Array) -> Array:
    """Each head twice, for the two values that it reads."""
    lead = qkv.shape[:-1]
    q, k, v = cut(qkv, *a.qkv_sizes)
    q, k = (_twice(m, x.reshape(*lead, a.kv_heads, 1, -1)) for x in (q, k))
    v = v.reshape(*lead, 2, -1, a.head_dim).swapaxes(-2, -3)
    parts = q, k, m.join((v, v), -3)
    return m.join([part.reshape(*lead, -1) for part in parts], -1)


def _twice(m: Maths, x: Array) -> Array:
    return m.broadcast(x, (*x.shape[:-2], 2, x.shape[-1]))


@named("heads")
def _subtracted(m: Maths, own: Difference, a: Attention, y: Array, w: Weights) -> Array:
    """The first half of heads minus a part of the second, each of both its values."""
    q1, k1, q2, k2 = (w[name] for name in _LAMBDAS)
    more, less = (m.cast(m.exp(m.wide(q * k).sum(-1)), y.dtype) for q, k in ((q1, k1), (q2, k2)))
    lead = y.shape[:-1]
    y = y.reshape(*lead, a.kv_heads, 2, -1, a.head_dim).swapaxes(-2, -3)
    y = y.reshape(*lead, a.heads, -1)
    first, second = y[..., : a.heads // 2, :], y[..., a.heads // 2 :, :]
    left = first - (more - less + own.start) * second
    return flat((1 - own.start) * rms_norm(m, left, None, own.eps))
