"""Layers within fewer elements than the stream has (MobileBERT, arXiv:2004.02984)."""

from collections.abc import Callable
from dataclasses import dataclass

from ..decoder.run import Run, activation_of
from ..model import rows as make
from ..model.spec import Block, Layer, ModelSpec, Norm
from ..model.weights import Row
from ..ops.contract import Array, BlockOps, Epilogue, Weights
from ..ops.convolutions import trigrams
from ..ops.embedding import Where, with_positions


@dataclass(frozen=True)
class Bottleneck(Block):
    """A layer within `width` elements.

    Its input is projected to so many, and norms are over the sums of sub-layers and what they read:
    attention, whose queries and keys are of another such projection, and values of the input, and
    `feeds` MLPs. What they give is projected back and added to the input, and normed. A token's
    embedding is a projection of the table's rows of the next token, of its own and of the one
    before.
    """

    width: int
    feeds: int
    reads_near = embeds = True

    @property
    def sums(self) -> int:
        """See `Block`."""
        return 1 + self.feeds

    def axes(self, layer: Layer) -> dict[str, int]:
        """See `Block`."""
        return {"narrow": self.width}

    def outer_axes(self, spec: ModelSpec) -> dict[str, int]:
        """See `Block`."""
        return {"trigram": 3 * (spec.embedding.width or 0)}

    def rows(self, hf: str, norm: Norm) -> list[Row]:
        """A layer's rows, of what HF calls `hf`."""
        rows = []
        for ours, theirs in (("narrow", "input"), ("narrow_qk", "attention")):
            rows += make.linear(ours, f"{hf}bottleneck.{theirs}.dense", "narrow embed")
            rows += make.norm(norm, f"{ours}_norm", f"{hf}bottleneck.{theirs}.LayerNorm", "narrow")
        own, parts = hf + "attention.self.{p}", {"q": "query", "k": "key"}
        rows += make.joined("query_key", own, parts, bias=True, width="narrow")
        rows += make.linear("value", f"{hf}attention.self.value", "v embed")
        rows += make.linear("out", f"{hf}attention.output.dense", "narrow q")
        rows += make.norm(norm, "attn_norm", f"{hf}attention.output.LayerNorm", "narrow")
        for i in range(self.feeds):  # the last one has no number
            mlp = hf if i == self.feeds - 1 else f"{hf}ffn.{i}."
            rows += make.linear(f"up.{i}", f"{mlp}intermediate.dense", "ffn narrow")
            rows += make.linear(f"down.{i}", f"{mlp}output.dense", "narrow ffn")
            rows += make.norm(norm, f"mlp.{i}_norm", f"{mlp}output.LayerNorm", "narrow")
        rows += make.linear("wide", f"{hf}output.bottleneck.dense", "embed narrow")
        return rows + make.norm(norm, "wide_norm", f"{hf}output.bottleneck.LayerNorm")

    def embed(
        self,
        ops: BlockOps,
        spec: ModelSpec,
        w: Weights,
        x: Array,
        where: Where,
        segments: Array | None,
    ) -> Array:
        """See `Block`; what lies beyond a row, or in another segment, counts as zeros."""
        if x.ndim == 2:
            x = ops.tokens(x, w["embed.weight"])
        x = trigrams(ops.maths, x, segments)
        x = ops.schemes.matmul(x, w["project_in.weight"], w["project_in.bias"])
        return with_positions(ops, spec, w, x, *where)

    def runs(self, layer: Layer, lends: bool) -> Callable[[Run, Array], Array]:
        """See `Block`."""
        return self._run

    def _run(self, run: Run, x: Array) -> Array:
        ops = run.ops
        h = ops.norm(run.project("narrow", x), run.norm("narrow_norm"))
        read = ops.norm(run.project("narrow_qk", x), run.norm("narrow_qk_norm"))
        qkv = ops.maths.join((run.project("query_key", read), run.project("value", x)), -1)
        y = run.project_back("out", run.attend(qkv))
        h = ops.norm(y, run.norm("attn_norm"), residual=h)
        for i in range(self.feeds):
            y = run.project(f"up.{i}", h, Epilogue(activation=activation_of(run.layer)))
            y = run.project_back(f"down.{i}", y)
            h = ops.norm(y, run.norm(f"mlp.{i}_norm"), residual=h)
        return ops.norm(run.project("wide", h), run.norm("wide_norm"), residual=x)
