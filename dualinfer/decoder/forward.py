"""The pass through a model's layers."""

from ..model.spec import ModelSpec
from ..ops.contract import Array, BlockOps, Params, Tokens
from ..ops.embedding import after_tables, embed_given, read_by_layers
from .choice import blocks_of
from .run import Mixers, Pass, Run, normed


def hidden_states(
    spec: ModelSpec,
    params: Params,
    ops: BlockOps,
    tokens: Tokens,
    mixers: Mixers,
    keep: bool = False,
    layers: range | None = None,
    x: Array | None = None,
) -> list[Array]:
    """The last layer's output [B, T, E] for `tokens`, which have positions, before the final norm.

    Their mask and segments are here for a model that drops tokens or blanks them, and for layers as
    in `Seen`: what sees what is said by `mixers`.

    With `keep`, all L+1: the embedding and each layer's output, or what a `Block` makes of them.
    With `layers` the output of the last one of these, `x` being what the ones before them gave,
    None at the first.
    """
    ids, embeds, positions = tokens.ids, tokens.embeds, tokens.positions
    entry, token_types = spec.embedding.entry, tokens.token_types
    assert positions is not None
    if begins := x is None:
        if token_types is None and spec.embedding.own_types:
            token_types = positions * 0
        if embeds is None:
            positions = spec.positions.of_rows(positions, ids, spec.pad_id)
        where = positions, token_types
        if spec.block is not None and spec.block.embeds:
            read = ids if embeds is None else embeds
            x = spec.block.embed(ops, spec, params.outer, read, where, tokens.segments)
        elif embeds is None:
            if entry is None:
                x = ops.embed(spec, params.outer, ids, *where)
            else:
                x = entry.embed(ops, spec, params.outer, ids, where, tokens.seen)
        else:
            x = embed_given(ops, spec, params.outer, embeds, *where, tokens.blend)
        x = after_tables(ops, spec, params.outer, x)
        if spec.blanks and tokens.mask is not None:
            x = ops.maths.where(tokens.mask[..., None], x, 0)
    own: Array | list[None] = [None] * len(spec.layers)
    if spec.reads:
        assert ids is not None
        known = ids if entry is None else entry.known(ids)
        own = read_by_layers(ops, spec, params.outer, known, x)
    if begins and spec.block is not None:
        x = spec.block.enter(ops, spec, params.outer, x, (positions, token_types))
    kept: list[Array] = [x]
    blocks = spec.made(blocks_of)
    given = Pass(mixers, tokens.seen, not keep, {}, [])
    # One after another, not a scan over stacked weights: see
    # docs/contributing/measured-and-left-out.md.
    for i in range(len(spec.layers)) if layers is None else layers:
        with ops.span(f"layer.{i}"):
            x = blocks[i](Run(spec.layers[i], params.layers[i], i, ops, given, own[i]), x)
            x = normed(ops, x) if keep else x
        if not keep:
            kept = [x]
        elif not spec.layers[i].is_late:
            kept = [*kept, x]
    kept = [*kept[:-1], normed(ops, kept[-1])]
    ends = layers is None or layers.stop == len(spec.layers)
    if not ends or spec.block is None:
        return kept
    return spec.block.leave(ops, params.outer, kept, keep)
