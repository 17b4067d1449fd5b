"""How each layer of a spec computes, chosen once: what a pass then asks of a layer is to run."""

from ..model.spec import Layer, ModelSpec
from ..ops.contract import Array
from .attention import attention_of, beside_recurrence, cross, recurrence
from .feed_forward import feed_forward_of
from .layer import sequential, within
from .post import post_block
from .residual import (
    adapted,
    added,
    bare,
    gated,
    kept,
    multiplied,
    parallel,
    read_own,
    with_late,
)
from .run import Block, Run, Step, SubLayer, in_turn, normed


def blocks_of(spec: ModelSpec) -> tuple[Block, ...]:
    """What runs each layer, by its number; alike layers have the same."""
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
    if layer.placement == "post":
        return post_block(layer)
    blocks = [_sublayers(layer, lends)]
    blocks += [adapted] * (layer.adapter is not None) + [read_own] * bool(layer.reads)
    blocks += [multiplied] * layer.multiplied + [with_late] * after_late
    return in_turn(*blocks)


def _whole(block: Block) -> Block:
    """A block of a stream whose norm, if one is still to be made, is made first."""

    def run_whole(run: Run, x: Array) -> Array:
        return block(run, normed(run.ops, x))

    return run_whole


def _sublayers(layer: Layer, lends: bool) -> Block:
    """A layer's sub-layers between their norms."""
    feed = feed_forward_of(layer)
    if layer.parallel:
        norm = "attn_norm" if layer.shared_norm else "mlp_norm"
        return parallel(attention_of(layer, lends), feed, norm)
    steps = []
    if layer.attends or layer.recurrence is not None:
        steps.append(_step(layer, "attn", _mixing(layer, lends)))
    if layer.cross:
        steps.append(_step(layer, "cross", cross))
    if layer.feeds:
        steps.append(_step(layer, "mlp", feed))
    return sequential(*steps)


def _mixing(layer: Layer, lends: bool) -> SubLayer:
    """What mixes tokens: attention, a recurrence or both."""
    if not layer.attends:
        return recurrence
    own = attention_of(layer, lends)
    return own if layer.recurrence is None else beside_recurrence(own)


def _step(layer: Layer, name: str, sublayer: SubLayer) -> Step:
    """A sub-layer between the norms of its placement, added to the stream as the layer does."""
    before, behind = _norms(layer, name)
    if layer.keeps:
        step = kept(sublayer, name)
    elif behind is not None or layer.scaled or layer.residual_scale != 1:
        scale = f"{name}_scale" if layer.scaled else layer.residual_scale
        step = added(sublayer, before, behind, scale)
    else:
        step = bare(sublayer) if before is None else within(sublayer, before)
    return gated(sublayer, before, step) if layer.gated_norms and before else step


def _norms(layer: Layer, name: str) -> tuple[str | None, str | None]:
    """The norms before a sub-layer and behind it, within the residual."""
    if layer.placement == "behind":
        return None, f"{name}_norm"
    is_bare = layer.bare and name == "attn"
    is_normed = layer.placement == "around" or (layer.mlp_normed and name == "mlp")
    return None if is_bare else f"{name}_norm", f"{name}_post_norm" if is_normed else None
