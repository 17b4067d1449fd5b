"""Layers of two streams, of tokens and of where they lie on a page (LiLT, arXiv:2202.13669)."""

from collections.abc import Callable
from dataclasses import dataclass

from ..decoder.run import Run, activation_of
from ..model import rows as make
from ..model.spec import Block, Layer, ModelSpec, Norm
from ..model.weights import Row
from ..ops.contract import Array, BlockOps, Epilogue, NormOf, Weights
from ..ops.embedding import Where, places_of
from ..ops.streams import parted, unweave, weave
from ..parallel.sharding import Share
from .boxes import Boxes

_QKV = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True)
class Page(Block):
    """A second stream of each token.

    It has `width` elements behind the token's own, an MLP of `ffn`, and the last `head_dim`
    elements of every query, key and value, so that both streams are attended to by the sum of their
    scores. Norms are over the sums of sub-layers and what they read, of each stream for itself. It
    begins with a projection of the rows of a token's box, and a row of its position.
    """

    width: int
    ffn: int
    head_dim: int

    @property
    def sums(self) -> int:
        """See `Block`."""
        return 3

    @property
    def apart(self) -> int:
        """See `Block`."""
        return self.head_dim

    def _heads(self, layer: Layer) -> dict[str, int]:
        """Elements of a head in each stream."""
        return {"text": layer.attending.head_dim - self.head_dim, "page": self.head_dim}

    def axes(self, layer: Layer) -> dict[str, int]:
        """See `Block`."""
        heads = layer.attending.heads
        own = self._heads(layer).items()
        return {f"{stream}_{x}": heads * dim for stream, dim in own for x in "qkv"}

    def outer_axes(self, spec: ModelSpec) -> dict[str, int]:
        """See `Block`."""
        return {"page": self.width, "page_ffn": self.ffn, "sixth": spec.embed // 6}

    def share(self, layer: Layer, heads: Share) -> dict[str, Share]:
        """See `Block`."""
        own = self._heads(layer).items()
        return {f"{stream}_{x}": heads.times(dim) for stream, dim in own for x in "qkv"}

    def rows(self, hf: str, norm: Norm) -> list[Row]:
        """Both streams' rows of a layer that HF calls `hf`; its second begins with `layout_`."""
        rows, own = [], f"{hf}attention.self."
        for ours, theirs, stream, width, ffn in (
            ("", "", "text", "embed", "ffn"),
            ("page_", "layout_", "page", "page", "page_ffn"),
        ):
            parts = {f"{stream}_{x}": theirs + name for x, name in _QKV.items()}
            rows += make.joined(f"{ours}qkv", own + "{p}", parts, bias=True, width=width)
            out = f"{hf}attention.{theirs}output"
            rows += make.linear(f"{ours}out", f"{out}.dense", f"{width} {stream}_q")
            rows += make.norm(norm, f"{ours}attn_norm", f"{out}.LayerNorm", width)
            up, down = f"{hf}{theirs}intermediate.dense", f"{hf}{theirs}output"
            rows += make.linear(f"{ours}up", up, f"{ffn} {width}")
            rows += make.linear(f"{ours}down", f"{down}.dense", f"{width} {ffn}")
            rows += make.norm(norm, f"{ours}mlp_norm", f"{down}.LayerNorm", width)
        return rows

    def outer_rows(self, boxes: Boxes, hf: str, norm: Norm) -> list[Row]:
        """The rows of what the second stream begins with, which HF calls `hf`."""
        place = "page_positions", "positions page", f"{hf}box_position_embeddings"
        rows = make.tables([place]) + boxes.rows(hf, "sixth")
        rows += make.linear("page_project", f"{hf}box_linear_embeddings", "page embed")
        return rows + make.norm(norm, "page_norm", f"{hf}LayerNorm", "page")

    def enter(self, ops: BlockOps, spec: ModelSpec, w: Weights, x: Array, where: Where) -> Array:
        """See `Block`: the second stream, normed, is joined to the token's own."""
        m, (positions, token_types) = ops.maths, where
        entry = spec.embedding.entry
        assert isinstance(entry, Boxes)
        boxes = m.join(entry.rows_of(ops, w, token_types), -1)
        page = ops.schemes.matmul(boxes, w["page_project.weight"], w["page_project.bias"])
        page = page + ops.schemes.embed(places_of(m, spec, positions), w["page_positions.weight"])
        norm = spec.embedding.norm or spec.layers[0].norm
        return m.join((x, ops.norm(page, NormOf.named(norm, w, "page_norm"))), -1)

    def tokens(self, ops: BlockOps, spec: ModelSpec, x: Array) -> Array:
        """See `Block`."""
        return parted(ops.maths, x, spec.embed)[0]

    def runs(self, layer: Layer, lends: bool) -> Callable[[Run, Array], Array]:
        """See `Block`."""
        return self._run

    def _run(self, run: Run, x: Array) -> Array:
        m, count = run.ops.maths, run.layer.attending.heads

        def written(y: Array, name: str, norm: str, residual: Array) -> Array:
            return run.ops.norm(run.project_back(name, y), run.norm(norm), residual=residual)

        epilogue = Epilogue(activation=activation_of(run.layer))
        text, place = parted(m, x, x.shape[-1] - self.width)
        qkv = weave(m, count, run.project("qkv", text), run.project("page_qkv", place))
        y, z = unweave(m, count, run.attend(qkv), self.head_dim)
        text = written(y, "out", "attn_norm", text)
        place = written(z, "page_out", "page_attn_norm", place)
        text = written(run.project("up", text, epilogue), "down", "mlp_norm", text)
        # Narrow enough to be whole on every device.
        z = run.project("page_down", run.project("page_up", place, epilogue))
        place = run.ops.norm(z, run.norm("page_mlp_norm"), residual=place)
        return m.join((text, place), -1)
