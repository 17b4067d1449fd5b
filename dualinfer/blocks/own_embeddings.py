"""Layers that read an embedding of their own of each token (Gemma 3n, Gemma 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..decoder.run import Block, Run, activation_of
from ..model import rows as make
from ..model.spec import Edit, Norm
from ..model.weights import Row, row
from ..ops.contract import Array, Epilogue


@dataclass(frozen=True)
class OwnEmbeddings(Edit):
    """A third sub-layer, normed behind.

    It is the MLP's activation of a projection to `reads` elements, times what each token's
    embedding gives this layer alone, projected back.
    """

    reads: int

    def parts(self, parts: Sequence[Block]) -> Sequence[Block]:
        """See `Edit`."""
        return [*parts, read_own]


def own_rows(hf: str, norm: Norm) -> list[Row]:
    """A layer's rows, of what HF calls `hf`."""
    return [
        *make.linear("read", f"{hf}per_layer_input_gate", "read embed", bias=False),
        *make.linear("read_out", f"{hf}per_layer_projection", "embed read", bias=False),
        *make.norm(norm, "read_norm", f"{hf}post_per_layer_input_norm"),
    ]


def outer_rows(hf: str, norm: Norm) -> list[Row]:
    """The rows by which tokens give layers what they read, of what HF calls `hf`."""
    name, axes = f"{hf}embed_tokens_per_layer.weight", "vocab reads"
    project = f"{hf}per_layer_model_projection"
    return [
        row("layers_embed.weight", axes, (name, axes)),
        *make.linear("layers_project", project, "reads embed", bias=False),
        *make.norm(norm, "layers_norm", f"{hf}per_layer_projection_norm", "read"),
    ]


def own_part(run: Run, x: Array) -> Array:
    """Return the product of x and the layer's own embedding of each token, before its norm."""
    h = run.project("read", x, Epilogue(activation=activation_of(run.layer)))
    return run.project("read_out", h * run.own)


def read_own(run: Run, x: Array) -> Array:
    """x and what the layer makes of its own embedding of each token."""
    return run.ops.add(x, own_part(run, x), run.norm("read_norm"))
