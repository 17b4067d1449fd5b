"""Products of mixtures of experts: each token with the weights of the experts that it chose.

Those of one or two tokens are matrix-vector products: one launch for gate and up, one for down,
with norm, bias, activation, mixture and residual fused, and an expert that all tokens share among
the others. More tokens often choose the same experts: pairs of a token and an expert are put in the
order of experts, and go to the matrix units.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import triton

from .experts_choice import (
    ExpertsConfig,
    ExpertsFragmentConfig,
    ExpertsStreamConfig,
    ExpertsTileConfig,
    ExpertsVectorConfig,
    default_config,
    default_of_vectors,
    is_few,
)
from .experts_codes import codes_tile_kernel
from .experts_few import codes_of_few, fragments_of_few, has_fragments, vectors_of_few
from .experts_tiles import (
    between_kernel,
    gather_kernel,
    mix_kernel,
    order_pairs_kernel,
    tile_kernel,
)
from .launch import launch, next_power_of_2
from .linear import NormArguments
from .mixture import Mixture, check, codes_of, ends_of, shape_of, stride_of
from .operands import dtype_name, empty
from .quantized import Packed, in_order_of_nibbles, values
from .routing import Routing
from .tunable import Key

_ORDER_BLOCK = 1024  # pairs that are counted at a time
_GROUP = 8  # blocks of pairs that pass the same columns of weights one after another
_VALUES_LOAD = 256  # pairs of an expert, on average, that are worth a matrix of its codes' values
_VALUES_BYTES = 512 << 20  # of such matrices at a time
_ROW_BLOCK = 1024  # columns that kernels between products have a program

Product: TypeAlias = Callable[[Any, Any, Any], Any]


class Order(NamedTuple):
    """Pairs in the order of experts, all int32: see `experts_tiles.order_pairs_kernel`."""

    pairs: Any
    places: Any
    ends: Any
    blocks: Any
    most: int


def experts(
    x: Any,
    mixture: Mixture,
    routing: Routing,
    *,
    norm: NormArguments | None = None,
    residual: Any = None,
    partial: Any = None,
    dtype: str | None = None,
    config: ExpertsConfig | None = None,
    product: Product | None = None,
    counters: Any,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """residual + partial + what experts make of norm(x), by their weights: [..., E] in `dtype`.

    `dtype` None is x's own. Sums are float32; hidden values, and of many tokens the
    experts' results, are rounded to x's dtype. A norm goes with few tokens only, see `is_few`, and
    so does a shared expert. `product` of x [pairs, in] in the order of experts, weights [X, out,
    in] and the ends of experts' pairs int32 [X] is taken in place of our tiles, if given.
    `counters` int32 are 0, and are 0 again afterwards.
    """
    width = x.shape[-1]
    count = x.numel() // width
    check(x, mixture, routing, norm, residual, partial, count)
    y = empty(x, (*x.shape[:-1], width), dtype or dtype_name(x.dtype))
    if y.numel() == 0:
        return y
    chosen = routing.experts.shape[-1]
    key = tuning_key(count, chosen, mixture, x.element_size())
    if config is None:
        config = default_config(key, sms)
    of_fragments = isinstance(config, ExpertsFragmentConfig | ExpertsStreamConfig)
    if of_fragments and not has_fragments(mixture):
        config = default_of_vectors(key, sms)  # a key does not tell tables from other codes
    rows = x.reshape(count, width)
    residual = None if residual is None else residual.reshape(count, width)
    added = partial, residual
    if isinstance(config, ExpertsVectorConfig):
        few = codes_of_few if isinstance(mixture.up, Packed) else vectors_of_few
        few(rows, mixture, routing, norm, added, y, config, pdl)
        return y
    if isinstance(config, ExpertsFragmentConfig | ExpertsStreamConfig):
        fragments_of_few(rows, mixture, routing, norm, added, y, config, sms, pdl)
        return y
    if product is not None and mixture.own is not None:
        raise ValueError("A product by groups has no place for pairs of experts elsewhere.")
    if norm is not None or mixture.shared is not None:
        raise ValueError(f"{config} has no place for a norm or a shared expert.")
    total = shape_of(mixture.up)[0]
    order = make_order(routing.experts, total, config.m, counters, mixture.own, pdl=pdl)
    if product is None:
        by_values = _makes_values(mixture, count, chosen)
        h = _tiles(rows, mixture, order, config, True, by_values, pdl)
        results = _tiles(h, mixture, order, config, False, by_values, pdl)
    else:
        taken = _gathered(rows, order, chosen, pdl)
        h = _between(product(taken, mixture.up, order.ends), mixture, order, routing, pdl)
        results = product(h, mixture.down, order.ends)
    _mix(results, mixture, order, routing, added, y, pdl)
    return y


def make_order(
    experts: Any, total: int, m: int, counters: Any, own: Any = None, *, pdl: bool = False
) -> Order:
    """Pairs in the order of `total` experts, in blocks of `m` of one expert at most.

    With `own` pairs of experts elsewhere are left out: see `Mixture`.
    """
    pairs = experts.numel()
    most = min(pairs, (pairs + min(total, pairs) * (m - 1)) // m)
    order, places, ends, blocks = (
        empty(counters, shape, "int32") for shape in ((pairs,), (pairs,), (total,), (2, most))
    )
    block = min(next_power_of_2(pairs), _ORDER_BLOCK)
    launch(
        order_pairs_kernel,
        (total,),
        *(experts, own, order, places, ends, blocks, counters, pairs, most),
        **{"X": total, "ALL": next_power_of_2(total), "BLOCK": block, "BLOCK_M": m},
        num_warps=4,
        pdl=pdl,
    )
    return Order(order, places, ends, blocks, most)


def _tiles(
    x: Any,
    mixture: Mixture,
    order: Order,
    config: ExpertsTileConfig,
    up: bool,
    by_values: bool,
    pdl: bool,
) -> Any:
    """Products of pairs with gate and up, of x by tokens, or with down, in the order of experts."""
    pairs = order.pairs.numel()
    weight = mixture.up if up else mixture.down
    _, features, width = shape_of(weight)
    features = mixture.features if up else features
    n, warps = (config.n, config.warps) if up else (config.down_n, config.down_warps)
    y = x.new_empty((pairs, features))
    grid = (order.most * triton.cdiv(features, n),)
    ends = ends_of(mixture) if up else {"ACTIVATION": None, "GATED": False, "OFFSET": 0.0}
    about = mixture.up_bias if up else None, order.pairs, order.ends, order.blocks, y
    limit = mixture.limit if up else None
    how = {"CHOSEN": pairs // x.shape[0] if up else 0, "BLOCK_M": config.m, "BLOCK_N": n}
    how |= {"GROUP": _GROUP, "STAGES": config.stages, **ends, "num_warps": warps, "pdl": pdl}
    if not isinstance(weight, Packed):
        how |= {"K": width, "BLOCK_K": config.k}
        numbers = order.most, features, 0, shape_of(weight)[0], x.stride(0), limit
        launch(tile_kernel, grid, x, weight, *about, *numbers, **how)
        return y
    if by_values:
        how |= {"K": width, "BLOCK_K": config.k}
        for first, known, matrix in _matrices(weight, x, pdl):
            numbers = order.most, features, first, known, x.stride(0), limit
            launch(tile_kernel, grid, x, matrix, *about, *numbers, **how)
        return y
    (_, *beside), apart, meant = codes_of(weight)
    quads = max(1, config.k * weight.bits // 128)
    if weight.bits == 4:
        x = in_order_of_nibbles(x, weight, quads, pdl)
    numbers = order.most, features, apart, x.stride(0), limit
    how |= {**meant, "QUADS": quads}
    launch(codes_tile_kernel, grid, x, weight.data, *beside, *about, *numbers, **how)
    return y


def _matrices(weight: Packed, x: Any, pdl: bool) -> Iterator[tuple[int, int, Any]]:
    """The values of some experts after others, in x's dtype and in one memory.

    Each time the number of the first, how many they are, and their matrices [rows, width].
    """
    total, rows, width = shape_of(weight)
    at_once = max(1, min(total, _VALUES_BYTES // (rows * width * x.element_size())))
    memory = x.new_empty((at_once * rows, width))
    for first in range(0, total, at_once):
        known = min(at_once, total - first)
        data, scale, zero, outer = (
            None if part is None else part.narrow(0, first, known).reshape(-1, *part.shape[2:])
            for part in weight[:4]
        )
        own = weight._replace(
            data=data, scale=scale, zero=zero, outer=outer, rows=_block_rows(weight)
        )
        yield first, known, values(own, x, pdl=pdl, out=memory.narrow(0, 0, known * rows))


def _block_rows(weight: Packed) -> int:
    """Rows of an expert that share a scale."""
    rows = weight.data.shape[1]
    return min(weight.rows or rows, rows)


def _makes_values(mixture: Mixture, tokens: int, chosen: int) -> bool:
    """True if tiles take matrices that codes were made into before, as they have many rows of x."""
    weights = mixture.up, mixture.down
    if not all(isinstance(w, Packed) and w.data.shape[1] % _block_rows(w) == 0 for w in weights):
        return False
    return next_power_of_2(tokens) * chosen >= _VALUES_LOAD * mixture.choices


def _gathered(x: Any, order: Order, chosen: int, pdl: bool) -> Any:
    """Rows of x [T, E] for all pairs, in the order of experts."""
    pairs, width = order.pairs.numel(), x.shape[1]
    y = x.new_empty((pairs, width))
    block = min(next_power_of_2(width), _ROW_BLOCK)
    launch(
        gather_kernel,
        (pairs, triton.cdiv(width, block)),
        *(x, order.pairs, y, x.stride(0), width),
        **{"CHOSEN": chosen, "BLOCK": block, "num_warps": 4, "pdl": pdl},
    )
    return y


def _between(x: Any, mixture: Mixture, order: Order, routing: Routing, pdl: bool) -> Any:
    """Hidden values of products with gate and up [pairs, out], in the order of experts."""
    pairs, features = x.shape[0], mixture.features
    y = x.new_empty((pairs, features))
    block = min(next_power_of_2(features), _ROW_BLOCK)
    launch(
        between_kernel,
        (pairs, triton.cdiv(features, block)),
        *(x, mixture.up_bias, order.pairs, routing.experts, y, features, mixture.limit),
        **{"BLOCK": block, **ends_of(mixture), "num_warps": 4, "pdl": pdl},
    )
    return y


def _mix(
    x: Any,
    mixture: Mixture,
    order: Order,
    routing: Routing,
    added: tuple[Any, Any],
    y: Any,
    pdl: bool,
) -> None:
    """Sums of a token's products [pairs, E], which are in the order of experts, in y [..., E]."""
    width, chosen = x.shape[1], routing.experts.shape[-1]
    slots = next_power_of_2(chosen)
    block = min(next_power_of_2(width), _ROW_BLOCK)
    launch(
        mix_kernel,
        (x.shape[0] // chosen, triton.cdiv(width, block)),
        *(x, order.places, *routing, mixture.own, mixture.down_bias, *added, y, width),
        stride_of(added[1]),
        **{"CHOSEN": chosen, "SLOTS": slots, "BLOCK": block, "num_warps": 4, "pdl": pdl},
    )


def tuning_key(tokens: int, chosen: int, mixture: Mixture, itemsize: int) -> Key:
    """Of so many tokens, each of which has `chosen` experts of a mixture.

    Of many tokens those of their experts count that are here: a share of a mixture, whose tokens
    have fewer of fewer experts, is a smaller mixture.
    """
    total, _, width = shape_of(mixture.up)
    here = chosen if is_few(tokens) else -(-chosen * total // mixture.choices)
    shape = next_power_of_2(tokens), here, total, mixture.features, width
    bits, columns = 8 * itemsize, width
    if isinstance(mixture.up, Packed) and not _makes_values(mixture, tokens, chosen):
        bits, columns = mixture.up.bits, mixture.up.columns or width
    return "experts", *shape, itemsize, bits, columns, mixture.gated
