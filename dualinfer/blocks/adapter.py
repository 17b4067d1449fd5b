"""Layers that end with an adapter of a language (X-MOD)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..decoder.run import Block, Run
from ..model import rows as make
from ..model.spec import Activation, Edit, Layer, Norm
from ..model.weights import Row
from ..ops.contract import Array, Epilogue, Unnormed


@dataclass(frozen=True)
class Adapter(Edit):
    """Two projections behind a layer's MLP, to `width` elements and back, which add.

    They read the sum so far, through a norm if there is one among the weights; if `normed`, what
    this gives is what they add to, too. Of a `post` layer they come before its last norm.
    """

    width: int
    activation: Activation
    normed: bool

    def axes(self, layer: Layer) -> dict[str, int]:
        """See `Edit`."""
        return {"adapter": self.width}

    def rows(self, hf: str, language: str, norm: Norm, named: str | None) -> list[Row]:
        """Its rows, of the module that HF calls `hf`, whose norm, if any, is so `named`."""
        own = f"{hf}adapter_modules.{language}."
        rows = make.linear("adapter_up", f"{own}dense1", "adapter embed")
        rows += make.linear("adapter_down", f"{own}dense2", "embed adapter")
        return rows + (make.norm(norm, "adapter_norm", hf + named) if named else [])

    def parts(self, parts: Sequence[Block]) -> Sequence[Block]:
        """See `Edit`."""
        return [*parts, self._adapted]

    def _adapted(self, run: Run, x: Array | Unnormed) -> Array | Unnormed:
        if not isinstance(x, Unnormed):
            return run.ops.add(*self._parted(run, x))
        y, residual, norm = x
        return Unnormed(*self._parted(run, run.ops.add(residual, y)), norm)

    def _parted(self, run: Run, x: Array) -> tuple[Array, Array]:
        """Project x [B, T, E]; return the result, and what it is added to."""
        h = run.ops.norm(x, run.norm("adapter_norm")) if "adapter_norm.weight" in run.w else x
        y = run.project("adapter_up", h, Epilogue(activation=self.activation))
        return run.project("adapter_down", y), h if self.normed else x
