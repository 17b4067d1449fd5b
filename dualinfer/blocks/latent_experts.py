"""Mixtures whose experts read and give fewer elements than the stream has (Nemotron-H)."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..decoder.mixture import route, weighed
from ..decoder.run import Run
from ..model import rows as make
from ..model.spec import Experts, Mixing
from ..model.weights import Row
from ..ops.contract import Array, Epilogue, NormOf


@dataclass(frozen=True)
class LatentExperts(Mixing):
    """The chosen experts work within `width` elements.

    They read a projection of the stream, and what they give together is projected back. The router,
    and the expert that all tokens have, read the stream itself.
    """

    width: int
    sums = 1

    @property
    def axes(self) -> Mapping[str, int]:
        """See `Mixing`."""
        return {"expert_latent": self.width}

    def rows(self, hf: str) -> list[Row]:
        """The rows of both projections, of what HF calls `hf`."""
        rows = make.linear("latent_in", f"{hf}.fc1_latent_proj", "expert_latent embed", bias=False)
        back = make.linear("latent_out", f"{hf}.fc2_latent_proj", "embed expert_latent", bias=False)
        return rows + back

    def sublayer(
        self, run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        """See `Mixing`."""
        own, ops = run.layer.feeding, run.ops
        assert isinstance(own, Experts)
        x = x if norm is None else ops.norm(x, norm)
        h = run.project("latent_in", x)
        y = weighed(run, h, None, route(run, x, None), None, Epilogue(spend=True))
        y = run.project("latent_out", y)
        total = y if residual is None else ops.add(residual, y)
        h = run.project("shared.up", x, Epilogue(activation=own.activation, gated=own.gated))
        return run.project_back("shared.down", h, Epilogue(residual=total, spend=True))
