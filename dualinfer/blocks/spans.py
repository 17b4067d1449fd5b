"""Heads beside those of attention that mix the tokens around (ConvBERT, arXiv:2008.02496)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..decoder.post import written
from ..decoder.run import Block, Run
from ..model import rows as make
from ..model.spec import Edit, Layer
from ..model.weights import Row, row
from ..ops.contract import Array, Unnormed
from ..ops.convolutions import convolve_each, mix_spans


@dataclass(frozen=True)
class Spans(Edit):
    """Heads beside those of attention that mix `taps` tokens each.

    There are as many, of the same size, behind them. A head's mixture around a token, whose middle
    is the token itself, is the softmax of a product of its query, of all heads, times what a
    convolution over as many tokens makes of the layer's input.
    """

    taps: int
    reads_near = True

    def axes(self, layer: Layer) -> dict[str, int]:
        """See `Edit`."""
        q, mixtures = layer.attending.qkv_sizes[0], layer.attending.heads * self.taps
        return {"spans": q, "all_q": q, "span_taps": self.taps, "mixtures": mixtures}

    def share(self, layer: Layer, heads: Any) -> Mapping[str, Any]:
        """See `Edit`."""
        width = layer.attending.head_widths[0]
        return {"spans": heads.times(width), "mixtures": heads.times(self.taps)}

    def rows(self, hf: str) -> list[Row]:
        """Its rows, of HF's attention; a device makes the queries of all heads for its own."""
        key = f"{hf}key_conv_attn_layer."
        depth, point = f"{key}depthwise.weight", f"{key}pointwise.weight"
        return [
            row("span_depth", "embed span_taps", (depth, "embed one span_taps")),
            row("span_key.weight", "all_q embed", (point, "all_q embed one")),
            row("span_key.bias", "all_q", (f"{key}bias", "all_q one")),
            *make.linear("span_query", f"{hf}query", "all_q embed"),
            *make.linear("span_mixture", f"{hf}conv_kernel_layer", "mixtures all_q"),
            *make.linear("span_value", f"{hf}conv_out_layer", "spans embed"),
        ]

    def parts(self, parts: Sequence[Block]) -> Sequence[Block]:
        """See `Edit`; the first part is attention."""
        return [self._attention, *parts[1:]]

    def _attention(self, run: Run, x: Array | Unnormed) -> Unnormed:
        qkv, x = run.read("qkv", x)
        y = run.ops.maths.join((run.attend(qkv), self._mixed(run, x)), -1)
        return written(run, y, "out", x, "attn_norm")

    def _mixed(self, run: Run, x: Array) -> Array:
        """The output of the heads for x [B, T, E]."""
        m, segments = run.ops.maths, run.given.seen.segments
        key = run.project("span_key", convolve_each(m, x, run.w["span_depth"], segments))
        scores = run.project("span_mixture", key * run.project("span_query", x))
        return mix_spans(m, run.project("span_value", x), scores, self.taps, segments)
