"""Parts that the ops of `dualinfer bench ops` share: ours, their inputs, and how a case is made."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...backends.jax.device import NO_TRITON, has_triton, runs_kernels
from ...backends.jax.ops.plain import PlainOps
from ..case import Filling, OpCase, TracedCall

_PAIRS = 1024  # of slots and KV heads that the cases have at most


class Bench:
    """One dtype on one device, and the engine's ops there: by kernels, and by XLA alone.

    `obstacle` says why the device does not run the kernels.
    """

    def __init__(self, dtype: Any, device: jax.Device) -> None:
        self.plain, self.dtype, self.device = PlainOps(), jnp.dtype(dtype), device
        self.obstacle = "" if has_triton() else NO_TRITON
        if not runs_kernels(device):
            kind = "a CPU" if device.platform == "cpu" else device.device_kind
            self.obstacle = f"it runs on NVIDIA's data-centre GPUs, and this is {kind}"

    @cached_property
    def kernels(self) -> Any:
        """The ops by kernels, `KernelOps`."""
        from ...backends.jax.ops.kernels import KernelOps

        return KernelOps(self.device)

    def launch(self, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Run a function of kernels/triton on these arrays, as an engine launches it."""
        from ...kernels.xla.launches import call

        return call(function, *args, capability=self.kernels.capability, **how)[0]

    def fill(self, part: Filling) -> jax.Array:
        """An array of a quantized matrix: the same one, every time."""
        with jax.default_device(self.device):
            if not part.mask:
                return jnp.full(part.shape, part.value, part.dtype)
            return _bits(part.shape, part.mask, part.dtype)

    def put(self, array: np.ndarray) -> jax.Array:
        """An array of the host's, on the device."""
        return jax.device_put(array, self.device)

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


@jax.jit(static_argnums=(0, 1, 2))
def _bits(shape: tuple[int, ...], mask: int, dtype: str) -> jax.Array:
    bits = jax.random.bits(jax.random.key(0), shape, jnp.uint8) & mask
    return jax.lax.bitcast_convert_type(bits, dtype)


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
        ops = None if self.bench.obstacle else self.bench.kernels
        return self._case(reference, ops, function, self.bench.obstacle)

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
