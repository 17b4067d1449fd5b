"""Attention that reads the stream itself (ModernBERT's first layer)."""

from dataclasses import dataclass

from ..decoder.residual import bare
from ..decoder.run import Step, SubLayer
from ..model.spec import Edit


@dataclass(frozen=True)
class BareAttention(Edit):
    """No norm stands before attention."""

    def step(
        self, step: Step, name: str, sublayer: SubLayer, norm: str | None, behind: str | None
    ) -> Step:
        """See `Edit`."""
        return bare(sublayer) if name == "attn" else step
