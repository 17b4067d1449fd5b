"""The description of an op that `dualinfer bench ops` can measure, and what backends share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..arrays import numpy_dtype
from ..config import make_config
from ..model.spec import Attention, Norm
from ..model.weights import Weight
from ..ops.contract import NormOf
from ..quantization import Blocks, BlockScheme
from ..quantization.recipe import HEAD, Recipe, make_recipe
from .random_weights import OUTER, code_size

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

    A backend offers its cases by `bench_cases(dtype: str, quant: str | None) -> Iterable[OpCase]`
    in `bench/<name>/ops.py`; making a case allocates nothing.
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
    """The sizes of a model's ops; Llama's blocks if `gated`, else GPT-2's."""

    name: str
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True


def make_weight(data: Any) -> Weight:
    """A matrix, or one of each expert, as the ops take it."""
    return Weight(data, ("experts", "rows", "columns")[-data.ndim :])


QUANTIZED_ROWS = (8, 16, 32, 64, 128, 2048)
"""Of products with quantized weights, beside one row."""


def recipe_of(quant: str | None) -> Recipe | None:
    """The recipe that a config's field `quant` asks for."""
    return make_recipe(make_config({"quant": quant}, {}).quant)


def scheme_of(recipe: Recipe | None, part: str, shape: tuple[int, int]) -> BlockScheme | None:
    """The scheme of a part of a model, as engines have it; None where it is plain."""
    if recipe is None:
        return None
    return HEAD if part == "head" else recipe.scheme_of(part, shape)


class Filling(NamedTuple):
    """An array of a quantized matrix: random bits under a `mask`, or else `value` everywhere."""

    shape: tuple[int, ...]
    dtype: str
    value: Any
    mask: int = 0


def fillings(scheme: BlockScheme, *shape: int) -> dict[str, Filling]:
    """The fillings of a matrix [rows, width] of random codes, or of several, by its parts' names.

    Codes mean values of the size that random weights have.
    """
    assert scheme.rows == 1 and not (scheme.zeros or scheme.groups)
    *rows, width = shape
    mask = 0xFE if scheme.codes == "fp8_e4m3" else 0xFF  # 0x7F and 0xFF are no numbers
    size = np.array(OUTER if scheme.outer else code_size(scheme), numpy_dtype(scheme.scale_dtype))
    is_bytes = scheme.scale_dtype.startswith("float8")
    scales = (*rows, -(-width // scheme.columns) if scheme.columns else 1)
    scale = size.view(np.uint8).item() if is_bytes else size.astype(np.float32).item()
    found = {
        "data": Filling((*rows, scheme.code.packing.width(width)), scheme.code.stored, 0, mask),
        "scale": Filling(scales, "uint8" if is_bytes else scheme.scale_dtype, scale),
    }
    if scheme.outer:
        found["outer"] = Filling((*rows,), "float32", code_size(scheme) / OUTER)
    return found


def quantized_weight(scheme: BlockScheme, width: int, arrays: Any, dtype: Any) -> Weight:
    """The matrix of arrays that `fillings` describes, in a model that computes in `dtype`."""
    beside = {name: array for name, array in arrays.items() if name != "data"}
    blocks = Blocks(scheme.rows, scheme.columns, width)
    codes = make_weight(arrays["data"])
    return replace(codes, scheme=scheme, beside=beside, stands_for=dtype, blocks=blocks)


def bytes_of(parts: dict[str, Filling]) -> int:
    """Bytes of all arrays."""
    return sum(prod(own.shape) * numpy_dtype(own.dtype).itemsize for own in parts.values())


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
    visible = most * (most + 1) // 2 + (tokens - most) * most
    visible = visible if a.causal else 2 * visible - tokens  # of each pair on either side
    kind = "causal" if a.causal else "bidirectional"
    kind += f", window {a.window:,}" if a.window else ""
    kind += f", soft cap {a.softcap:g}" if a.softcap else ""
    moved = batch * tokens * 2 * (a.heads + a.kv_heads) * a.head_dim * itemsize
    flops = 4 * batch * a.heads * a.head_dim * visible
    return f"{batch} x {tokens:,} tokens, {heads_of(a)}, {kind}", moved, flops
