"""Keys whose scores have a bias of the token's values, and a stream that is kept in part (Doge)."""

from dataclasses import dataclass, replace

from ..decoder.attention import Projected
from ..decoder.run import Run, Step, SubLayer
from ..model import rows as make
from ..model.spec import Attention, Edit, Wiring
from ..model.weights import Row, row
from ..ops.contract import Array, NormOf, Weights
from ..ops.maths import Maths, cut, flat, heads, named
from ..ops.norms import rms_norm


@dataclass(frozen=True)
class BiasedKeys(Wiring):
    """The scaled scores of a key have a bias added.

    It is e^(f softplus(b)), of numbers f of the KV head and b of the token, which are a product of
    all its values. Of more than `most` tokens HF's layers see those of the largest biases.
    """

    most: int
    projects = True
    fine_key = "the bias of its scores"
    most_by = "keep_window_size"

    def axes(self, a: Attention) -> dict[str, int]:
        """See `Wiring`: each device makes all values."""
        return {"all_v": a.qkv_sizes[2]}

    def rows(self, hf: str, bias: bool) -> list[Row]:
        """The rows of the biases, of the attention that HF calls `hf`."""
        return [
            *make.linear("all_values", f"{hf}v_proj", "all_v embed", bias),
            *make.linear("key_bias", f"{hf}dt_proj", "kv_heads all_v", bias),
            replace(row("key_factor", "kv_heads", (f"{hf}A", "kv_heads")), wide=True),
        ]

    def widened(self, a: Attention) -> Attention:
        """See `Wiring`: a key's bias is an element of it."""
        return replace(a, wiring=None, head_dim=a.head_dim + 1, qk_norm=None)

    def project(self, run: Run, x: Array, norm: NormOf | None) -> Projected:
        """See `Wiring`."""
        x = run.ops.norm(x, norm) if norm else x
        qkv = run.project("qkv", x)
        return Projected(qkv, x, None, run.project("key_bias", run.project("all_values", x)))

    def widen(self, run: Run, qkv: Array, made: Projected) -> Array:
        """See `Wiring`."""
        assert made.beside is not None
        return _with_biases(run.ops.maths, run.layer.attending, qkv, made.beside, run.w)

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        a = run.layer.attending
        return flat(heads(y, a.heads)[..., : a.head_dim])


@dataclass(frozen=True)
class KeptStream(Edit):
    """A learned vector that multiplies what a sub-layer adds to."""

    def rows(self, name: str, hf: str) -> list[Row]:
        """The vector's row, of the sub-layer `name` and HF's name of the module."""
        return [row(f"{name}_kept", "embed", (f"{hf}_residual", "embed"))]

    def step(
        self, step: Step, name: str, sublayer: SubLayer, norm: str | None, behind: str | None
    ) -> Step:
        """See `Edit`."""
        assert norm is not None

        def kept(run: Run, x: Array, spend: bool) -> Array:
            x_kept = x * run.w[f"{name}_kept"]
            return run.ops.add(x_kept, sublayer(run, x, run.norm(norm), None, False))

        return kept


@named("heads")
def _with_biases(m: Maths, a: Attention, qkv: Array, numbers: Array, w: Weights) -> Array:
    """Packed qkv [B, T, ...] of `a` with biases of `numbers` [B, T, K] and the factors [K].

    Queries and keys are normed. Behind the elements of a key is its bias, behind those of a query
    the inverse of the scale, and behind those of a value 0. HF's `DogeAttention`.
    """
    assert a.qk_norm is not None
    q, k, v = (heads(part, width=a.head_dim) for part in cut(qkv, *a.qkv_sizes))
    q = rms_norm(m, q, w["q_norm.weight"], a.qk_norm.eps)
    k = rms_norm(m, k, w["k_norm.weight"], a.qk_norm.eps)
    bias = m.cast(m.exp(w["key_factor"] * m.softplus(m.wide(numbers))), qkv.dtype)
    q, v = m.pad(q, -1, 0, 1, 1 / a.scale), m.pad(v, -1, 0, 1)
    k = m.join((k, bias[..., None]), -1)
    return m.join([flat(part) for part in (q, k, v)], -1)
