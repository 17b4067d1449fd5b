"""A row that `dualinfer bench` measures: a workload, and the system that runs it."""

from dataclasses import asdict, dataclass
from typing import Any

from ..ops.caches import KeptIn


@dataclass(frozen=True)
class Task:
    """One row to measure. `tokens` is the prompt's length; `dtype` None is resolved on the device.

    For ops `model` is the part of a name to look for, and `batch`, `tokens` and `repeats` are 0.
    `tp` devices share the model, and the limit is that of all of them. `quant` is the config's.
    `resident` layers lie on the device and the others are streamed; None: all lie there.
    `kv_cache` is the config's `kv_cache_dtype`, `ep` its `moe.ep_size`, and `by` its `kernels`,
    None for the engine's own choice. `states` is its `state_dtype`. `serve` is what is asked of a
    server: arguments of `measure_serving` by name.
    """

    kind: str
    system: str
    model: str
    dtype: str | None
    batch: int
    tokens: int
    new_tokens: int
    repeats: int
    kernels: bool
    tp: int = 1
    quant: str | None = None
    resident: int | None = None
    kv_cache: str | None = None
    ep: int = 1
    by: str | None = None
    states: str | None = None
    serve: dict[str, Any] | None = None

    @property
    def kept(self) -> KeptIn:
        """The codes and the dtype that caches keep."""
        return KeptIn(self.kv_cache, self.states)

    def to_dict(self) -> dict[str, Any]:
        """The row's first columns."""
        fields = asdict(self)
        if self.serve is None:
            del fields["serve"]
        return fields
