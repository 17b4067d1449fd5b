"""Make the first layer's input: rows of tables, patches of images, sounds, positions."""

from typing import Any, TypeAlias

from ..model.spec import ModelSpec
from ..model.weights import Weight
from .contract import Array, BlockOps, NormOf, Weights
from .convolutions import by_taps
from .maths import Maths, heads, named
from .norms import plain_norm
from .projection import project

# Where tokens stand: their positions and types [B, T], or types and boxes [B, T, 5].
Where: TypeAlias = tuple[Array, Array | None]


def embed(
    ops: BlockOps,
    spec: ModelSpec,
    w: Weights,
    ids: Array,
    positions: Array,
    token_types: Array | None,
) -> Array:
    """Embedded tokens [B, T, E]; see `contract.BlockOps.embed`."""
    table = w["embed.weight"]
    x = ops.tokens(ids, table) if shares_rows(table) else ops.schemes.embed(ids, table)
    return with_positions(ops, spec, w, _scaled(ops.maths, spec, x), positions, token_types)


def embed_given(
    ops: BlockOps,
    spec: ModelSpec,
    w: Weights,
    embeds: Array,
    positions: Array,
    token_types: Array | None,
    blend: Array | None = None,
) -> Array:
    """As `embed`, with a caller's embeddings [B, T, W] in the place of the tokens' own.

    W is the width of the embedding. Of images it is that of a patch; what is
    given in the place of learned tokens is not read. Of `sounds` it is as they say, as are the
    embeddings. With float32 `blend` [B or 1, T, P] a token's position is
    the sum of the table's P rows times these, in the place of `positions`.
    """
    m = ops.maths
    if spec.patches is not None:
        embeds = patches(m, embeds, w["patches.kernel"], w.get("patches.bias"))
        if learned := spec.patches.learned:
            first = m.broadcast(w["class_token"], (len(embeds), learned, embeds.shape[-1]))
            embeds = m.join((first, embeds[:, learned:]), 1)
    if spec.sounds is not None:
        embeds = spec.sounds.embed(ops, w, embeds)
    if spec.embedding.scaled == "all":
        embeds = _scaled(m, spec, embeds)
    return with_positions(ops, spec, w, embeds, positions, token_types, blend)


def shares_rows(table: Weight) -> bool:
    """True if devices share out the rows of a table of tokens; that of another vocabulary is whole.

    FSMT's encoder has one.
    """
    return table.axes[0] == "vocab"


def read_by_layers(ops: BlockOps, spec: ModelSpec, w: Weights, ids: Array, x: Array) -> Array:
    """Embeddings that each layer reads of int ids [B, T] and their own x [B, T, E]: [L, B, T, P].

    It is (norm(E^-1/2 projection of x) + P^1/2 row of a table) 2^-1/2, of P elements for each
    layer, summed over devices.
    """
    m, each = ops.maths, spec.layers[0].reads
    own = ops.tokens(ids, w["layers_embed.weight"])
    own = own * m.nearest(each**0.5, own.dtype)
    y = project(ops, w, "layers_project", x) * spec.embed**-0.5
    y, own = (heads(part, width=each) for part in (y, own))
    y = ops.norm(y, NormOf.named(spec.layers[0].norm, w, "layers_norm"))
    return m.whole(m.moveaxis((y + own) * 2**-0.5, -2, 0))


def scale_of(m: Maths, spec: ModelSpec, dtype: Any) -> float:
    """The factor of embedded tokens, rounded to their `dtype` where HF rounds it."""
    own = spec.embedding
    return m.nearest(own.scale, dtype) if own.scaled == "rounded" else own.scale


def _scaled(m: Maths, spec: ModelSpec, x: Array) -> Array:
    if spec.embedding.scale == 1:
        return x
    scale = scale_of(m, spec, x.dtype)
    return x * scale if spec.embedding.scaled == "rounded" else m.times(x, scale)


def with_positions(
    ops: BlockOps,
    spec: ModelSpec,
    w: Weights,
    x: Array,
    positions: Array,
    token_types: Array | None,
    blend: Array | None = None,
) -> Array:
    """Embedded tokens in the layers' width, plus their types and positions."""
    m, rows_of, own = ops.maths, ops.schemes.embed, spec.embedding
    if own.norm is not None and own.norms_tokens:
        x = plain_norm(m, x, NormOf.named(own.norm, w, "embed_norm"))
    if spec.projects:
        x = ops.schemes.matmul(x, w["project_in.weight"])
    if token_types is not None:
        if own.entry is not None:
            x, token_types = own.entry.add(ops, w, x, token_types)
        if own.types == "vocab":
            x = x + ops.tokens(token_types, w["embed.weight"])
        else:
            x = x + rows_of(token_types, w["token_types.weight"])
    if blend is not None:
        rows = m.wide(rows_of(m.arange(blend.shape[-1], blend), w["positions.weight"]))
        return x + m.cast(m.einsum("...p,pe->...e", blend, rows), x.dtype)
    if spec.positions.rows:
        x = x + rows_of(places_of(m, spec, positions), w["positions.weight"])
    return x


def after_tables(ops: BlockOps, spec: ModelSpec, w: Weights, x: Array) -> Array:
    """What comes behind the tables' rows: a norm, and a projection from the tables' width."""
    own = spec.embedding
    for step in own.order[own.order.index("tables") + 1 :]:
        if step == "project" and own.width is not None:
            x = project(ops, w, "project_in", x)
        elif step == "norm" and own.norm is not None:
            x = ops.norm(x, NormOf.named(own.norm, w, "embed_norm"))
    return x


def places_of(m: Maths, spec: ModelSpec, positions: Array) -> Array:
    """The row of each position [B, T] in the table of positions.

    Ended slots stay where they are, free ones at 0.
    """
    return m.within(positions, spec.positions.rows) + spec.positions.offset


@named("patches")
def patches(m: Maths, x: Array, kernel: Array, bias: Array | None) -> Array:
    """Patches [B, T, C h w] of images times kernel [E, C, h, w], plus bias [E]: [B, T, E]."""
    return by_taps(m, x, kernel, bias)
