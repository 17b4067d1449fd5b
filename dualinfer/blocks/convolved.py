"""Layers beside which a convolution reads what they read (DeBERTa-v2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..decoder.run import Block, Run, in_turn, normed
from ..model import rows as make
from ..model.spec import Activation, Edit, Layer, Norm
from ..model.weights import Row, row
from ..ops.contract import Array, NormOf, Unnormed
from ..ops.convolutions import convolve


@dataclass(frozen=True)
class Convolved(Edit):
    """A term of a layer's own input that is added to its output, with a norm over the sum.

    It is the `activation` of a convolution over `taps` tokens, the one in the middle the token
    itself.
    """

    taps: int
    activation: Activation
    blanks = True

    def axes(self, layer: Layer) -> dict[str, int]:
        """See `Edit`."""
        return {"taps": self.taps}

    def rows(self, hf: str, norm: Norm) -> list[Row]:
        """Its rows, of the module that HF calls `hf`."""
        axes = "embed embed_in taps"
        return [
            row("conv.kernel", axes, (f"{hf}conv.weight", axes)),
            row("conv.bias", "embed", (f"{hf}conv.bias", "embed")),
            *make.norm(norm, "conv_norm", f"{hf}LayerNorm"),
        ]

    def parts(self, parts: Sequence[Block]) -> Sequence[Block]:
        """See `Edit`."""
        layer = in_turn(*parts)

        def convolved(run: Run, x: Array | Unnormed) -> Unnormed:
            x, segments = normed(run.ops, x), run.given.seen.segments
            kernel = run.w["conv.kernel"], run.w["conv.bias"]
            y = convolve(run.ops.maths, x, *kernel, 1, self.activation, segments)
            x = normed(run.ops, layer(run, x))
            return Unnormed(y, x, NormOf.named(run.layer.norm, run.w, "conv_norm"))

        return [convolved]
