"""Norms that have more to them than one before a sub-layer (A.X-K1, A.X-K2)."""

from dataclasses import dataclass

from ..decoder.residual import added
from ..decoder.run import Run, Step, SubLayer
from ..model import rows as make
from ..model.spec import Edit, Layer, Norm
from ..model.weights import Row
from ..ops.contract import Array, Epilogue
from ..ops.feed_forward import gate


@dataclass(frozen=True)
class NormBehindMlp(Edit):
    """A norm stands behind the MLP, within the residual (A.X-K1)."""

    def rows(self, hf: str, norm: Norm) -> list[Row]:
        """The norm's rows, of the layer that HF calls `hf`."""
        return make.norm(norm, "mlp_post_norm", f"{hf}mlp.post_mlp_layernorm")

    def step(
        self, step: Step, name: str, sublayer: SubLayer, norm: str | None, behind: str | None
    ) -> Step:
        """See `Edit`."""
        return added(sublayer, norm, "mlp_post_norm", 1) if name == "mlp" else step


@dataclass(frozen=True)
class GatedNorms(Edit):
    """Norms whose output is times the logistic function of two products of it (A.X-K2).

    They go by way of `width` elements. A norm without them among the weights is as others are.
    """

    width: int

    def axes(self, layer: Layer) -> dict[str, int]:
        """See `Edit`."""
        return {"gating": self.width}

    def rows(self, ours: str, theirs: str) -> list[Row]:
        """The rows of a norm's gate."""
        return [
            *make.linear(f"{ours}_down", f"{theirs}.mlp.fc1", "gating embed", bias=False),
            *make.linear(f"{ours}_up", f"{theirs}.mlp.fc2", "embed gating", bias=False),
        ]

    def step(
        self, step: Step, name: str, sublayer: SubLayer, norm: str | None, behind: str | None
    ) -> Step:
        """See `Edit`."""
        assert norm is not None

        def gated(run: Run, x: Array, spend: bool) -> Array:
            if f"{norm}_up.weight" not in run.w:
                return step(run, x, spend)
            y = run.ops.norm(x, run.norm(norm))
            h = run.project(f"{norm}_down", y, Epilogue(activation="silu"))
            return sublayer(run, gate(run.ops, run.w, f"{norm}_up", y, h), None, x, spend)

        return gated
