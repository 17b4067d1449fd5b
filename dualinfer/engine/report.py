"""The report on an engine's parts, for people and tests: nothing falls back silently."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """Facts of one engine. `mode` is `fused` where dualinfer's own decoder runs, else `module`.

    `ops` names the implementation of each op, `weights` says how many are held in which dtype or
    scheme, and which of these the head has; bytes are those held now; `compilations`
    counts CUDA graphs captured, or XLA executables compiled, so far, `executables` those that are
    held now, `evictions` those that went to keep them few, and `executable_bytes` is the size of
    their code, 0 where that is unknown: of CUDA graphs and on CPUs. `streamed_bytes` are those of
    weights, among `parameter_bytes`, that lie in host memory and that each pass copies to the
    device. `cache` names the kinds of the layers' caches, as "full in fp8_e4m3". `max_tokens` is 0
    where there is no limit; `notes` say what was decided for the user.
    """

    mode: str
    backend: str
    family: str
    architecture: str
    layers: int
    dtype: str
    device: str
    device_name: str
    ops: dict[str, str]
    parameters: int
    parameter_bytes: int
    cache_bytes: int
    compilations: int
    executables: int
    evictions: int
    executable_bytes: int
    source: str
    max_tokens: int
    notes: tuple[str, ...]
    weights: dict[str, str] = field(default_factory=dict)
    streamed_bytes: int = 0
    cache: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)

    def __str__(self) -> str:
        """A short text for a terminal."""
        what = f" ({self.family}, {self.layers} layers)" if self.family else ""
        most = f"at most {self.max_tokens:,} tokens" if self.max_tokens else "no limit on tokens"
        code = f" ({self.executable_bytes / 2**20:,.1f} MiB)" if self.executable_bytes else ""
        kept = f" ({self.cache})" if self.cache else ""
        of = f" ({self.streamed_bytes / 2**20:,.1f} streamed)" if self.streamed_bytes else ""
        lines = [
            f"{self.architecture}{what} from {self.source}",
            f"  {self.mode} on {self.backend}, {self.device} ({self.device_name}), {self.dtype}",
            f"  {self.parameters:,} parameters in {self.parameter_bytes / 2**20:,.1f} MiB{of}, "
            f"cache {self.cache_bytes / 2**20:,.1f} MiB{kept}, {most}",
            f"  {self.compilations} captured or compiled so far, {self.executables} held{code}, "
            f"{self.evictions} evicted",
            *(f"  weights, {kind}: {held}" for kind, held in self.weights.items()),
            *(f"  {op}: {by}" for op, by in self.ops.items()),
            *(f"  note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)
