"""Attention whose results are gated by a product of its input (AFMoE, Kimi, Laguna)."""

from dataclasses import dataclass
from typing import Literal

from ..decoder.attention import Projected
from ..decoder.run import Run
from ..model.spec import Wiring
from ..ops.contract import Array
from ..ops.feed_forward import gate


@dataclass(frozen=True)
class GatedHeads(Wiring):
    """Results of heads are gated by a `function` of a product, for each element or each head."""

    function: Literal["sigmoid", "softplus"]

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return gate(run.ops, run.w, "attn_gate", y, made.x, made.norm, self.function)
