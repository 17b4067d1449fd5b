"""Choose once how each layer of a spec computes, so that a pass only has to run it."""

from ..model.spec import Attention, Layer, ModelSpec
from ..ops.contract import Array
from .attention import attention_of, beside_recurrence, cross, recurrence
from .feed_forward import feed_forward_of
from .layer import sequential, within
from .post import post_parts
from .residual import added, bare, parallel, with_late
from .run import Block, Run, Step, SubLayer, in_turn, normed


def blocks_of(spec: ModelSpec) -> tuple[Block, ...]:
    """The function that runs each layer, by its number; alike layers have the same."""
    known: dict[tuple[Layer, bool, bool], Block] = {}
    found, after_late = [], False
    for i, layer in enumerate(spec.layers):
        key = layer, i in spec.lenders, after_late and not layer.is_late
        if key not in known:
            known[key] = _block(*key)
        found.append(known[key])
        after_late = layer.is_late
    return tuple(found)


def _block(layer: Layer, lends: bool, after_late: bool) -> Block:
    if layer.block is not None:
        return _whole(layer.block.runs(layer, lends))
    parts = post_parts(layer) if layer.placement == "post" else [_sublayers(layer, lends)]
    for edit in layer.edits:
        parts = edit.parts(parts)
    return in_turn(*parts, *[with_late] * after_late)


def _whole(block: Block) -> Block:
    """A block of a stream whose norm, if one is still to be made, is made first."""

    def run_whole(run: Run, x: Array) -> Array:
        return block(run, normed(run.ops, x))

    return run_whole


def _sublayers(layer: Layer, lends: bool) -> Block:
    """A layer's sub-layers between their norms."""
    if layer.is_parallel:
        norm = "attn_norm" if layer.placement == "shared" else "mlp_norm"
        mixing = _attention(layer, layer.attending, lends)
        return parallel(mixing, feed_forward_of(layer, layer.feeding), norm)
    steps = []
    if layer.attention is not None or layer.recurrence is not None:
        steps.append(_step(layer, "attn", _mixing(layer, lends)))
    if layer.cross:
        steps.append(_step(layer, "cross", cross))
    if layer.mlp is not None:
        steps.append(_step(layer, "mlp", feed_forward_of(layer, layer.mlp)))
    return sequential(*steps)


def _mixing(layer: Layer, lends: bool) -> SubLayer:
    """The sub-layer that mixes tokens: attention, a recurrence or both."""
    if layer.attention is None:
        return recurrence
    own = _attention(layer, layer.attention, lends)
    return own if layer.recurrence is None else beside_recurrence(own)


def _attention(layer: Layer, a: Attention, lends: bool) -> SubLayer:
    own = attention_of(a, lends)
    for edit in layer.edits:
        own = edit.attention(own)
    return own


def _step(layer: Layer, name: str, sublayer: SubLayer) -> Step:
    """A sub-layer between the norms of its placement, added to the stream as the layer does."""
    before, behind = _norms(layer, name)
    if behind is not None:
        step = added(sublayer, before, behind, 1)
    else:
        step = bare(sublayer) if before is None else within(sublayer, before)
    for edit in layer.edits:
        step = edit.step(step, name, sublayer, before, behind)
    return step


def _norms(layer: Layer, name: str) -> tuple[str | None, str | None]:
    """The norms before a sub-layer and behind it, within the residual."""
    if layer.placement == "behind":
        return None, f"{name}_norm"
    return f"{name}_norm", f"{name}_post_norm" if layer.placement == "around" else None
