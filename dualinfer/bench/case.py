"""What a backend says of an op that `dualinfer bench ops` can measure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
