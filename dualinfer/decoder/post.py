"""Layers with each norm over the sum of a sub-layer and what it read."""

from ..model.spec import Experts, Layer
from ..ops.contract import Array, Epilogue, NormOf, Unnormed
from ..ops.convolutions import convolve, convolve_each, mix_spans
from .mixture import mixture_of
from .residual import adapter
from .run import Block, Run, activation_of, in_turn, normed


def post_block(layer: Layer) -> Block:
    """The layer, whose last norm is left to the product that comes next."""
    blocks: list[Block] = [_attention if layer.spans is None else _attention_and_spans]
    if layer.cross:
        blocks.append(_cross)
    blocks.append(_mixture(layer.mlp) if isinstance(layer.mlp, Experts) else _feed_forward)
    if layer.adapter is not None:
        blocks.append(_adapted)
    block = in_turn(*blocks)
    return block if layer.convolution is None else _convolved(block)


def _written(run: Run, y: Array, name: str, x: Array, norm: str) -> Unnormed:
    """The end of a sub-layer that read `x`."""
    return Unnormed(run.project_back(name, y), x, run.norm(norm))


def _attention(run: Run, x: Array | Unnormed) -> Unnormed:
    qkv, x = run.read("qkv", x)
    return _written(run, run.attend(qkv), "out", x, "attn_norm")


def _attention_and_spans(run: Run, x: Array | Unnormed) -> Unnormed:
    """Heads of attention, and heads that mix the tokens around (ConvBERT)."""
    qkv, x = run.read("qkv", x)
    y = run.ops.maths.join((run.attend(qkv), _spans(run, x)), -1)
    return _written(run, y, "out", x, "attn_norm")


def _spans(run: Run, x: Array) -> Array:
    """What the heads beside those of attention give of x [B, T, E]."""
    m, segments, spans = run.ops.maths, run.given.seen.segments, run.layer.spans
    assert spans is not None
    key = run.project("span_key", convolve_each(m, x, run.w["span_depth"], segments))
    scores = run.project("span_mixture", key * run.project("span_query", x))
    return mix_spans(m, run.project("span_value", x), scores, spans.taps, segments)


def _cross(run: Run, x: Array | Unnormed) -> Unnormed:
    q, x = run.read("cross_q", x)
    return _written(run, run.attend_across(q), "cross_out", x, "cross_norm")


def _feed_forward(run: Run, x: Array | Unnormed) -> Unnormed:
    epilogue = Epilogue(activation=activation_of(run.layer), gated=run.layer.mlp.gated)
    h, x = run.read("up", x, epilogue)
    return _written(run, h, "down", x, "mlp_norm")


def _mixture(experts: Experts) -> Block:
    mixture = mixture_of(experts)

    def feed(run: Run, x: Array | Unnormed) -> Unnormed:
        x = normed(run.ops, x)
        return Unnormed(mixture(run, x, None, None, True), x, run.norm("mlp_norm"))

    return feed


def _adapted(run: Run, x: Unnormed) -> Unnormed:
    """An adapter before the last norm (X-MOD)."""
    y, residual, norm = x
    return Unnormed(*adapter(run, run.ops.add(residual, y)), norm)


def _convolved(block: Block) -> Block:
    """A layer, and behind it a convolution of what it read (DeBERTa-v2)."""

    def with_convolution(run: Run, x: Array | Unnormed) -> Unnormed:
        own, x = run.layer.convolution, normed(run.ops, x)
        assert own is not None
        kernel = run.w["conv.kernel"], run.w["conv.bias"]
        y = convolve(run.ops.maths, x, *kernel, 1, own.activation, run.given.seen.segments)
        x = normed(run.ops, block(run, x))
        return Unnormed(y, x, NormOf.named(run.layer.norm, run.w, "conv_norm"))

    return with_convolution
