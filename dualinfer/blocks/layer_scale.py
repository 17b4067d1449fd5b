"""Layers whose sub-layers are scaled by learned vectors (DINOv2): LayerScale, arXiv:2103.17239."""

from dataclasses import dataclass

from ..decoder.residual import added
from ..decoder.run import Step, SubLayer
from ..model.spec import Edit
from ..model.weights import Row, row


@dataclass(frozen=True)
class LayerScale(Edit):
    """A learned vector that multiplies what a sub-layer adds."""

    def rows(self, hf: str) -> list[Row]:
        """The vectors' rows, of the layer that HF calls `hf`."""
        names = ("attn", "layer_scale1"), ("mlp", "layer_scale2")
        return [
            row(f"{ours}_scale", "embed", (f"{hf}{theirs}.lambda1", "embed"))
            for ours, theirs in names
        ]

    def step(
        self, step: Step, name: str, sublayer: SubLayer, norm: str | None, behind: str | None
    ) -> Step:
        """See `Edit`."""
        return added(sublayer, norm, None, f"{name}_scale")
