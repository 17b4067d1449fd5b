"""The pass through a model's layers."""

from ..backends.contract import Array, BlockOps, Neighbours, NormOf, Params
from ..model.spec import ModelSpec
from .blocks import Attend, block


def hidden_states(
    spec: ModelSpec,
    params: Params,
    ops: BlockOps,
    ids: Array | None,
    positions: Array,
    token_types: Array | None,
    attend: Attend,
    keep: bool = False,
    layers: range | None = None,
    x: Array | None = None,
    embeds: Array | None = None,
    across: Attend | None = None,
    blend: Array | None = None,
) -> list[Array]:
    """The last layer's output [B, T, E] for ids and positions [B, T], before the final norm.

    With `embeds` [B, T, W] these are in the place of the embedded ids, which are not read; `blend`
    [T, P] says then what a token's position is, as in `contract.BlockOps.embed_given`.

    With `keep`, all L+1: the embedding and each layer's output. `attend` takes a layer's number and
    its packed queries, keys and values, `across` its queries alone. With `layers` the output of the
    last one of these, `x` being what the ones before them gave, None at the first.
    """
    if x is None:
        where = positions, token_types
        if embeds is None:
            x = ops.embed(spec, params.outer, ids, *where)
        else:
            x = ops.embed_given(spec, params.outer, embeds, *where, blend)
        if spec.embed_norm:
            x = ops.norm(x, NormOf.named(spec.embed_norm, params.outer, "embed_norm"))
        if spec.factored:
            w = params.outer
            x = ops.linear(x, w["project_in.weight"], Neighbours(w["project_in.bias"]))
    kept, own = [x], None
    if spec.reads:
        assert ids is not None
        own = ops.read_by_layers(spec, params.outer, ids, x)
    lent: dict[int, Array] | None = dict.fromkeys(spec.lenders) or None
    # One after another, not a scan over stacked weights: see docs/measured-and-left-out.md.
    for i in range(len(spec.layers)) if layers is None else layers:
        with ops.span(f"layer.{i}"):
            reads = None if own is None else own[i]
            more = across, lent, reads
            x = block(spec.layers[i], params.layers[i], ops, x, i, attend, not keep, *more)
        kept = [*kept, x] if keep else [x]
    return kept
