"""Counts of the server in Prometheus's text format: by our names, and by vLLM's."""

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

PREFIXES = ("dualinfer:", "vllm:")  # boards, routers and autoscalers read vLLM's
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """A count of the values below each bound, of all values, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Its lines of the text format."""
        bounds = [*map(str, self._bounds), "+Inf"]
        sums = list(accumulate(self._counts))
        for bound, count in zip(bounds, sums, strict=True):
            yield f'{name}_bucket{{{labels},le="{bound}"}} {count}'
        yield f"{name}_sum{{{labels}}} {self._sum}"
        yield f"{name}_count{{{labels}}} {sums[-1]}"


class Metrics:
    """The counts of one server, which one thread keeps."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.first_token = Histogram(_LONG)
        self.inter_token = Histogram(_SHORT)
        self.whole = Histogram(_LONG)

    def text(self, model: str, gauges: Mapping[str, float], totals: Mapping[str, int]) -> str:
        """All metrics; `gauges` are the values of this moment, `totals` counts of the engine."""
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'model_name="{escaped}"'
        lines: list[str] = []
        for prefix in PREFIXES:
            lines.extend(self._lines(prefix, labels, gauges, totals))
        return "\n".join([*lines, ""])

    def _lines(
        self, prefix: str, labels: str, gauges: Mapping[str, float], counted: Mapping[str, int]
    ) -> Iterator[str]:
        for name, value in gauges.items():
            yield f"# TYPE {prefix}{name} gauge"
            yield f"{prefix}{name}{{{labels}}} {value}"
        totals = {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            **counted,
        }
        for name, value in totals.items():
            yield f"# TYPE {prefix}{name} counter"
            yield f"{prefix}{name}{{{labels}}} {value}"
        yield f"# TYPE {prefix}request_success_total counter"
        for reason in sorted({"stop", "length", *self.finished}):
            said = f'{labels},finished_reason="{reason}"'
            yield f"{prefix}request_success_total{{{said}}} {self.finished[reason]}"
        histograms = {
            "time_to_first_token_seconds": self.first_token,
            "inter_token_latency_seconds": self.inter_token,
            "e2e_request_latency_seconds": self.whole,
        }
        for name, histogram in histograms.items():
            yield f"# TYPE {prefix}{name} histogram"
            yield from histogram.lines(prefix + name, labels)
