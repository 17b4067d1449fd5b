"""What a backend says of an op that `dualinfer bench ops` can measure, and what backends share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..backends.contract import NormOf
from ..model.spec import Attention, Norm
from ..model.weights import Weight

EPS = 1e-5


@dataclass(frozen=True)
class OpCase:
    """One op at one size, by one implementation.

    `bytes` and `flops` are what the op must move and compute at least. `prepare` makes fresh inputs
    on the device each time, and returns the call that runs the op on them: without host
    synchronisation, the same launches each time, so that CUDA graphs can capture it; on JAX a
    `TracedCall`, of the same function each time. `reference` names whose implementation it is, such
    as "torch SDPA", and is empty for dualinfer's own. A case and its references share name and
    description. `obstacle` says why this device cannot run it; then it is not measured.

    A backend offers its cases by `bench_cases(dtype: str) -> Iterable[OpCase]` in
    `bench/<name>/ops.py`; making a case allocates nothing.
    """

    name: str
    description: str
    bytes: int
    flops: int
    prepare: Callable[[], Callable[[], Any]]
    reference: str = ""
    obstacle: str = ""


@dataclass(frozen=True)
class TracedCall:
    """`function(state, *inputs)`, compiled by JAX, gives a result and the state after it.

    The state is a pytree of what the op writes in place. All are arrays, so that `bench/chain.py`
    can put many calls into one executable.
    """

    function: Callable[..., tuple[Any, Any]]
    state: Any
    inputs: tuple[Any, ...]

    def __call__(self) -> Any:
        """The result of one call."""
        return self.function(self.state, *self.inputs)[0]


class Shape(NamedTuple):
    """What a model's ops are as large as; Llama's blocks if `gated`, else GPT-2's."""

    name: str
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True


def make_weight(data: Any) -> Weight:
    """A matrix as the ops take it."""
    return Weight(data, ("rows", "columns"))


def make_norm(weight: Any, bias: Any = None) -> NormOf:
    """RMSNorm; LayerNorm if there is a bias."""
    if bias is None:
        return NormOf(Norm("rms", EPS), weight, None)
    return NormOf(Norm("layer", EPS), weight, bias)


def rows_of(count: int) -> str:
    """A number of rows in words."""
    return "1 row" if count == 1 else f"{count:,} rows"


def heads_of(a: Attention) -> str:
    """The heads in words."""
    return f"{a.heads} heads over {a.kv_heads} x {a.head_dim}"


def prompts_work(a: Attention, batch: int, tokens: int, itemsize: int) -> tuple[str, int, int]:
    """Description, bytes and FLOPs of the attention of whole prompts."""
    most = min(a.window or tokens, tokens)
    visible = most * (most + 1) // 2 + (tokens - most) * most if a.causal else tokens * tokens
    kind = "causal" if a.causal else "bidirectional"
    kind += f", window {a.window:,}" if a.window else ""
    kind += f", soft cap {a.softcap:g}" if a.softcap else ""
    moved = batch * tokens * 2 * (a.heads + a.kv_heads) * a.head_dim * itemsize
    flops = 4 * batch * a.heads * a.head_dim * visible
    return f"{batch} x {tokens:,} tokens, {heads_of(a)}, {kind}", moved, flops
