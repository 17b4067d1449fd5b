"""What the ops of `dualinfer bench ops` share: ours, their inputs, and how a case is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...backends.contract import NormOf
from ...backends.jax.ops.kernels import KernelOps, runs_kernels
from ...backends.jax.ops.plain import PlainOps
from ...model.spec import Norm
from ...model.weights import Weight
from ..case import OpCase, TracedCall

EPS = 1e-5
_PAIRS = 1024  # of slots and KV heads that the cases have at most


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


class Bench:
    """One dtype on one device, and the engine's ops there: by kernels, and by XLA alone.

    `obstacle` says why the device does not run the kernels; `interpret` runs them anywhere.
    """

    def __init__(self, dtype: Any, device: jax.Device, interpret: bool = False) -> None:
        self.kernels = KernelOps(getattr(device, "core_count", 132), interpret)
        self.plain, self.dtype, self.device = PlainOps(), jnp.dtype(dtype), device
        self.interpret, self.obstacle = interpret, ""
        if not interpret and not runs_kernels(device):
            kind = "a CPU" if device.platform == "cpu" else device.device_kind
            self.obstacle = f"it runs on NVIDIA's data-centre GPUs, and this is {kind}"

    def draws(self) -> Callable[..., jax.Array]:
        """A function that makes normal numbers of a shape: the same ones, every time."""
        keys = iter(range(1000))

        def draw(*shape: int, scale: float = 1.0) -> jax.Array:
            with jax.default_device(self.device):
                return _normal(next(keys), shape, scale, self.dtype)

        return draw


@jax.jit(static_argnums=(1, 3))
def _normal(seed: int, shape: tuple[int, ...], scale: float, dtype: Any) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


@dataclass(frozen=True)
class Op:
    """One op at one size, and what makes its inputs, alike for all who implement it.

    `inputs` makes what is written in place, None if nothing is, and all the rest as a tuple.
    """

    bench: Bench
    name: str
    description: str
    bytes: int
    flops: int
    inputs: Callable[[], tuple[Any, tuple[Any, ...]]]

    def by_kernels(self, reference: str, function: Callable[..., tuple[Any, Any]]) -> OpCase:
        """The case of `function(ops, state, *inputs)` by the kernels; `reference` as in OpCase."""
        return self._case(reference, self.bench.kernels, function, self.bench.obstacle)

    def by_plain(self, function: Callable[..., tuple[Any, Any]]) -> OpCase:
        """The same by XLA alone."""
        return self._case("XLA", self.bench.plain, function, "")

    def by_gpu(self, reference: str, function: Callable[..., tuple[Any, Any]]) -> OpCase:
        """The case of a library's kernel, for which `ops` is None."""
        return self._case(reference, None, function, self.bench.obstacle)

    def _case(
        self,
        reference: str,
        ops: PlainOps | None,
        function: Callable[..., tuple[Any, Any]],
        obstacle: str,
    ) -> OpCase:
        @jax.jit
        def call(state: Any, *inputs: Any) -> tuple[Any, Any]:
            scratch, state = state
            using = ops and ops.using(scratch)
            result, state = function(using, state, *inputs)
            return result, (using and using.scratch, state)

        def prepare() -> TracedCall:
            state, inputs = self.inputs()
            return TracedCall(call, (ops and ops.make_scratch(_PAIRS), state), inputs)

        described = self.name, self.description, self.bytes, self.flops
        return OpCase(*described, prepare, reference, obstacle)


def make_weight(data: jax.Array) -> Weight:
    """A matrix as the ops take it."""
    return Weight(data, ("rows", "columns"))


def make_norm(weight: jax.Array, bias: jax.Array | None = None) -> NormOf:
    """RMSNorm; LayerNorm if there is a bias."""
    if bias is None:
        return NormOf(Norm("rms", EPS), weight, None)
    return NormOf(Norm("layer", EPS), weight, bias)


def rows_of(count: int) -> str:
    """A number of rows in words."""
    return "1 row" if count == 1 else f"{count:,} rows"
