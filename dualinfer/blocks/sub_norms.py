"""Norms before the products back (BitNet).

Each is over all of what its product reads, of which devices have shares.
"""

from dataclasses import dataclass

from ..decoder.attention import Projected
from ..decoder.run import Run, SubLayer, activation_of
from ..model import rows as make
from ..model.spec import Edit, Norm, Wiring
from ..model.weights import Row
from ..ops.contract import Array, Epilogue, NormOf
from ..ops.norms import norm_shared


@dataclass(frozen=True)
class NormedHeads(Wiring):
    """The `width` elements that heads give are normed as one."""

    width: int
    reads_all = True

    @property
    def norm_width(self) -> int:
        """See `Wiring`."""
        return self.width

    def rows(self, norm: Norm, hf: str) -> list[Row]:
        """The norm's rows, of the layer that HF calls `hf`."""
        return make.norm(norm, "out_norm", f"{hf}self_attn.attn_sub_norm", "q")

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return norm_shared(run.ops, y, run.norm("out_norm"), self.width)


@dataclass(frozen=True)
class NormedHidden(Edit):
    """The `width` hidden values of the MLP are normed."""

    width: int

    @property
    def norm_width(self) -> int:
        """See `Edit`."""
        return self.width

    def rows(self, norm: Norm, hf: str) -> list[Row]:
        """The norm's rows, of the layer that HF calls `hf`."""
        return make.norm(norm, "down_norm", f"{hf}mlp.ffn_sub_norm", "up")

    def feeding(self, sublayer: SubLayer) -> SubLayer:
        """See `Edit`."""
        return self._normed

    def _normed(
        self, run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        activation, gated = activation_of(run.layer), run.layer.feeding.gated
        h = run.project("up", x, Epilogue(None, norm, activation, gated))
        h = norm_shared(run.ops, h, run.norm("down_norm"), self.width)
        return run.project_back("down", h, Epilogue(residual=residual, spend=spend))
