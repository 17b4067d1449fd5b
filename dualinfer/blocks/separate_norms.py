"""Mixtures whose parts read through norms of their own (Gemma 4)."""

from dataclasses import dataclass, replace

from ..decoder.run import Run
from ..model import rows as make
from ..model.spec import Experts, Mixing, Norm
from ..model.weights import Row, row
from ..ops.contract import Array, Epilogue, NormOf, Routing


@dataclass(frozen=True)
class SeparateNorms(Mixing):
    """The expert that all tokens have, the others and the router each read through its own norm.

    Both results are normed before they are added, and the weight of a chosen expert is times a
    learned number.
    """

    sums = 1

    def rows(self, hf: str, norm: Norm) -> list[Row]:
        """The rows of the norms, and of the numbers, of what HF calls `hf`."""
        numbers = row("router.scale", "choices", (f"{hf}router.per_expert_scale", "choices"))
        return [
            row("router_norm.weight", "embed", (f"{hf}router.scale", "embed")),
            replace(numbers, wide=True),
            *make.norm(norm, "shared_post_norm", f"{hf}post_feedforward_layernorm_1"),
            *make.norm(norm, "experts_norm", f"{hf}pre_feedforward_layernorm_2"),
            *make.norm(norm, "experts_post_norm", f"{hf}post_feedforward_layernorm_2"),
        ]

    def sublayer(
        self, run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        """See `Mixing`."""
        own, ops, w = run.layer.feeding, run.ops, run.w
        assert isinstance(own, Experts) and residual is None
        h = run.project("shared.up", x, Epilogue(None, norm, own.activation, own.gated))
        y = ops.norm(run.project_back("shared.down", h), run.norm("shared_post_norm"))
        # The router's learned scale, over the root of the width as HF has it.
        scale = w["router_norm.weight"] * x.shape[-1] ** -0.5
        scaled = NormOf(run.layer.norm, scale, None, made=True)
        chosen, weights = ops.route(x, w["router.weight"], own.router, norm=scaled)
        routing = Routing(chosen, weights * w["router.scale"][chosen])
        z = ops.experts(x, own, w, routing, Epilogue(norm=run.norm("experts_norm")))
        return ops.add(y, z, run.norm("experts_post_norm"))
