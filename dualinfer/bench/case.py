"""What a backend says of an op that `dualinfer bench ops` can measure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OpCase:
    """One op at one size, by one implementation.

    `bytes` and `flops` are what the op must move and compute at least. `prepare` makes fresh inputs
    on the device each time, and returns the call that runs the op on them: without host
    synchronisation, the same launches each time, so that CUDA graphs can capture it. `reference`
    names whose implementation it is, such as "torch SDPA", and is empty for dualinfer's own. A case
    and its references share name and description.

    A backend offers its cases by `bench_cases(dtype: str) -> Iterable[OpCase]` in
    `backends/<name>/bench_ops.py`; making a case allocates nothing.
    """

    name: str
    description: str
    bytes: int
    flops: int
    prepare: Callable[[], Callable[[], Any]]
    reference: str = ""
