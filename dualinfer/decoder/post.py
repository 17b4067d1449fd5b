"""Layers with each norm over the sum of a sub-layer and what it read."""

from ..model.spec import Experts, Layer
from ..ops.contract import Array, Epilogue, Unnormed
from .mixture import mixture_of
from .run import Block, Run, activation_of, normed


def post_parts(layer: Layer) -> list[Block]:
    """The layer's sub-layers, whose last norm is left to the product that comes next."""
    blocks: list[Block] = [_attention]
    if layer.cross:
        blocks.append(_cross)
    blocks.append(_mixture(layer.mlp) if isinstance(layer.mlp, Experts) else _feed_forward)
    return blocks


def written(run: Run, y: Array, name: str, x: Array, norm: str) -> Unnormed:
    """The end of a sub-layer that read `x`."""
    return Unnormed(run.project_back(name, y), x, run.norm(norm))


def _attention(run: Run, x: Array | Unnormed) -> Unnormed:
    qkv, x = run.read("qkv", x)
    return written(run, run.attend(qkv), "out", x, "attn_norm")


def _cross(run: Run, x: Array | Unnormed) -> Unnormed:
    q, x = run.read("cross_q", x)
    return written(run, run.attend_across(q), "cross_out", x, "cross_norm")


def _feed_forward(run: Run, x: Array | Unnormed) -> Unnormed:
    epilogue = Epilogue(activation=activation_of(run.layer), gated=run.layer.feeding.gated)
    h, x = run.read("up", x, epilogue)
    return written(run, h, "down", x, "mlp_norm")


def _mixture(experts: Experts) -> Block:
    mixture = mixture_of(experts)

    def feed(run: Run, x: Array | Unnormed) -> Unnormed:
        x = normed(run.ops, x)
        return Unnormed(mixture(run, x, None, None, True), x, run.norm("mlp_norm"))

    return feed
