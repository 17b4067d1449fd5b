"""Products of mixtures of experts: each token with the weights of the experts that it chose.

Those of one or two tokens are matrix-vector products: one launch for gate and up, one for down,
with norm, bias, activation, mixture and residual fused, and an expert that all tokens share among
the others. More tokens often choose the same experts: pairs of a token and an expert are put in the
order of experts, and go to the matrix units.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import triton

from .activation import KINDS
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
from .experts_codes import codes_tile_kernel, down_codes_kernel, up_codes_kernel
from .experts_fragments import down_fragments_kernel, up_fragments_kernel
from .experts_kernels import down_vector_kernel, up_vector_kernel
from .experts_tiles import (
    between_kernel,
    gather_kernel,
    mix_kernel,
    order_pairs_kernel,
    tile_kernel,
)
from .launch import launch, next_power_of_2
from .linear import NormArguments, check_neighbours
from .operands import dtype_name, empty
from .quantized import (
    MASK,
    Packed,
    arrays_of,
    columns_of_products,
    constants_of,
    fragments_serve,
    in_order_of_nibbles,
    masks_of,
    most_registers,
    raises_inputs,
    serves,
    values,
)
from .routing import Routing
from .tunable import Key

MOST_EXPERTS = 512
_ORDER_BLOCK = 1024  # pairs that are counted at a time
_GROUP = 8  # blocks of pairs that pass the same columns of weights one after another
_VALUES_LOAD = 256  # pairs of an expert, on average, that are worth a matrix of its codes' values
_VALUES_BYTES = 512 << 20  # of such matrices at a time
_ROW_BLOCK = 1024  # columns that kernels between products have a program

Product: TypeAlias = Callable[[Any, Any, Any], Any]


class Shared(NamedTuple):
    """An expert of all tokens: `up` [out, E], gate before up, and `down` [E, F].

    Its results are multiplied by the logistic function of x times `gate` [E], if there is one.
    """

    up: Any
    down: Any
    gate: Any = None


class Mixture(NamedTuple):
    """Experts' weights: `up` [X, out, E], gate before up where `gated`, and `down` [X, E, F].

    Both are tensors, or both are `quantized.Packed`, whose arrays have a first axis X. The hidden
    values are activation(gate) * (up + `offset`). With `limit` gates are at most that, and ups at
    most as far from 0 (gpt-oss). Biases are [X, out] and [X, E]. Of more experts that tokens
    choose among, these are those from own[0] to before own[1], int32 [2] in memory of the device;
    the others add nothing here, and all are `among` (0: these alone).
    """

    up: Any
    down: Any
    up_bias: Any = None
    down_bias: Any = None
    activation: str | None = "silu"
    gated: bool = True
    limit: float | None = None
    offset: float = 0.0
    shared: Shared | None = None
    own: Any = None
    among: int = 0

    @property
    def choices(self) -> int:
        """Experts that tokens choose among."""
        return self.among or _shape(self.up)[0]

    @property
    def parts(self) -> int:
        """Products that a hidden value is made of."""
        return 2 if self.gated else 1

    @property
    def features(self) -> int:
        """Hidden values of an expert."""
        return _shape(self.up)[1] // self.parts


def _shape(weight: Any) -> tuple[int, int, int]:
    """Experts, rows and columns of a weight, quantized or not."""
    if isinstance(weight, Packed):
        return (*weight.data.shape[:2], weight.width)
    return tuple(weight.shape)  # pyright: ignore[reportReturnType]


def _first(weight: Packed) -> Packed:
    """The first expert's matrix, which the others follow."""
    data, scale, zero, outer = (None if part is None else part[0] for part in weight[:4])
    return weight._replace(data=data, scale=scale, zero=zero, outer=outer)


def _codes(weight: Packed) -> tuple[tuple[Any, ...], int, dict[str, Any]]:
    """What kernels get of codes: arrays, how far the scales of experts are apart, constants."""
    first = _first(weight)
    return arrays_of(first), first.scale.numel(), constants_of(first)


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
    _check(x, mixture, routing, norm, residual, partial, count)
    y = empty(x, (*x.shape[:-1], width), dtype or dtype_name(x.dtype))
    if y.numel() == 0:
        return y
    chosen = routing.experts.shape[-1]
    key = tuning_key(count, chosen, mixture, x.element_size())
    if config is None:
        config = default_config(key, sms)
    of_fragments = isinstance(config, ExpertsFragmentConfig | ExpertsStreamConfig)
    if of_fragments and not _has_fragments(mixture):
        config = default_of_vectors(key, sms)  # a key does not tell tables from other codes
    rows = x.reshape(count, width)
    residual = None if residual is None else residual.reshape(count, width)
    added = partial, residual
    if isinstance(config, ExpertsVectorConfig):
        few = _few_codes if isinstance(mixture.up, Packed) else _few
        few(rows, mixture, routing, norm, added, y, config, pdl)
        return y
    if isinstance(config, ExpertsFragmentConfig | ExpertsStreamConfig):
        _few_fragments(rows, mixture, routing, norm, added, y, config, sms, pdl)
        return y
    if product is not None and mixture.own is not None:
        raise ValueError("A product by groups has no place for pairs of experts elsewhere.")
    if norm is not None or mixture.shared is not None:
        raise ValueError(f"{config} has no place for a norm or a shared expert.")
    total = _shape(mixture.up)[0]
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


def _few(
    x: Any,
    mixture: Mixture,
    routing: Routing,
    norm: NormArguments | None,
    added: tuple[Any, Any],
    y: Any,
    config: ExpertsVectorConfig,
    pdl: bool,
) -> None:
    """Both products as launches of matrix-vector products."""
    count, width = x.shape
    chosen, features, shared = routing.experts.shape[-1], mixture.features, mixture.shared
    h = x.new_empty((count * chosen, features))
    wide = 0 if shared is None else shared.down.shape[1]
    shared_h = None if shared is None else x.new_empty((count, wide))
    up, down, gate = shared or (None, None, None)
    kind, *norm_arrays, eps = norm or (None, None, None, 0.0)
    blocks = chosen * triton.cdiv(features, config.rows) + triton.cdiv(wide, config.rows)
    launch(
        up_vector_kernel,
        (blocks, count),
        *(x, mixture.up, mixture.up_bias, routing.experts, mixture.own, up, gate, *norm_arrays),
        *(h, shared_h, features, wide, x.stride(0), eps, mixture.limit),
        **{"K": width, "CHOSEN": chosen, "ROWS": config.rows, "BLOCK_K": next_power_of_2(width)},
        **{"NORM": kind, **_ends(mixture)},
        num_warps=config.warps,
        pdl=pdl,
    )
    launch(
        down_vector_kernel,
        (triton.cdiv(width, config.down_rows), count),
        *(h, mixture.down, mixture.down_bias, *routing, mixture.own, shared_h, down, *added, y),
        *(width, _stride(added[1])),
        **{"K": features, "SHARED_K": wide, "CHOSEN": chosen, "SLOTS": next_power_of_2(chosen)},
        **{"ROWS": config.down_rows, "BLOCK_K": config.down_columns},
        num_warps=config.down_warps,
        pdl=pdl,
    )


def _few_codes(
    x: Any,
    mixture: Mixture,
    routing: Routing,
    norm: NormArguments | None,
    added: tuple[Any, Any],
    y: Any,
    config: ExpertsVectorConfig,
    pdl: bool,
) -> None:
    """`_few` of quantized weights."""
    if mixture.shared is not None:
        raise ValueError("An expert of all tokens has launches of its own beside quantized ones.")
    count, width = x.shape
    chosen, features = routing.experts.shape[-1], mixture.features
    h = x.new_empty((count * chosen, features))
    kind, *norm_arrays, eps = norm or (None, None, None, 0.0)
    arrays, apart, meant = _codes(mixture.up)
    per = 128 // mixture.up.bits
    launch(
        up_codes_kernel,
        (chosen * triton.cdiv(features, config.rows), count),
        *(x, *arrays, mixture.up_bias, routing.experts, mixture.own, *norm_arrays, h, features),
        *(apart, x.stride(0), eps, mixture.limit, MASK),
        **{**meant, "CHOSEN": chosen, "ROWS": config.rows, "NORM": kind, **_ends(mixture)},
        **{"QUADS": next_power_of_2(triton.cdiv(width, per)), "RAISE": False},
        num_warps=config.warps,
        pdl=pdl,
    )
    arrays, apart, meant = _codes(mixture.down)
    per = 128 // mixture.down.bits
    quads = max(1, config.down_columns // per)
    launch(
        down_codes_kernel,
        (triton.cdiv(width, config.down_rows), count),
        *(h, *arrays, mixture.down_bias, *routing, mixture.own, *added, y, width, apart),
        *(_stride(added[1]), MASK),
        **{**meant, "CHOSEN": chosen, "SLOTS": next_power_of_2(chosen), "QUADS": quads},
        **{"ROWS": config.down_rows, "TURNS": triton.cdiv(features, quads * per)},
        num_warps=config.down_warps,
        pdl=pdl,
    )


def _few_fragments(
    x: Any,
    mixture: Mixture,
    routing: Routing,
    norm: NormArguments | None,
    added: tuple[Any, Any],
    y: Any,
    config: ExpertsFragmentConfig | ExpertsStreamConfig,
    sms: int,
    pdl: bool,
) -> None:
    """`_few_codes` on the matrix units, which take inputs of 16 bits; of a stream down alone."""
    count, width = x.shape
    whole = True
    if isinstance(config, ExpertsFragmentConfig):
        whole = config.warps * config.chunks * 512 >= width * mixture.up.bits
    if x.element_size() != 2 or not whole:
        raise ValueError(f"{config} does not serve {x.dtype} of {width} columns.")
    chosen, features = routing.experts.shape[-1], mixture.features
    h = x.new_empty((count * chosen, features))
    kind, *norm_arrays, eps = norm or (None, None, None, 0.0)
    arrays, apart, meant = _codes(mixture.up)
    given = x, *arrays, mixture.up_bias, routing.experts, mixture.own, *norm_arrays, h, features
    meant |= {"CHOSEN": chosen, "RAISE": raises_inputs(mixture.down, x), "NORM": kind}
    if isinstance(config, ExpertsStreamConfig):
        quads = next_power_of_2(triton.cdiv(width, 128 // mixture.up.bits))
        kernel, rows, masks = up_codes_kernel, config.rows, MASK
        meant |= {"ROWS": rows, "QUADS": quads}
    else:
        kernel, rows = up_fragments_kernel, 16 // mixture.parts
        masks = masks_of(mixture.up, x, norm is not None)
        meant |= {**_columns(mixture.up, config.chunks), "B": config.warps, "T": config.chunks}
        meant |= most_registers(config.warps, config.programs)
    blocks = chosen * triton.cdiv(features, rows)
    launch(
        kernel,
        (min(blocks, sms * config.programs), count),
        *(*given, apart, x.stride(0), eps, mixture.limit, masks),
        **{**meant, **_ends(mixture)},
        num_warps=config.warps,
        pdl=pdl,
    )
    arrays, apart, meant = _codes(mixture.down)
    blocks = triton.cdiv(width, 16 * config.down_tiles) * count
    launch(
        down_fragments_kernel,
        (triton.cdiv(width, 16 * config.down_tiles), count),
        *(h, *arrays, mixture.down_bias, *routing, mixture.own, *added, y, width, apart),
        *(_stride(added[1]), masks_of(mixture.down, x)),
        **{**meant, "CHOSEN": chosen, "ALL": next_power_of_2(chosen)},
        **{**_columns(mixture.down, config.down_chunks), "B": config.down_warps},
        **{"M": config.down_tiles, "T": config.down_chunks, "num_warps": config.down_warps},
        **most_registers(config.down_warps, min(triton.cdiv(blocks, sms), 16 // config.down_warps)),
        pdl=pdl,
    )


def _has_fragments(mixture: Mixture) -> bool:
    """Whether the kernels of fragments know these experts' weights."""
    weights = mixture.up, mixture.down
    return mixture.shared is None and all(
        isinstance(w, Packed)
        and w.codes != "table"
        and fragments_serve(w.bits, w.columns or w.width, w.width)
        for w in weights
    )


def _columns(weight: Packed, chunks: int) -> dict[str, int]:
    """The kernels' constants that say what the columns of a fragment's products are."""
    columns, groups, slots = columns_of_products(1, weight.bits, weight.columns, chunks)
    return {"N": columns, "PARTS": groups, "SLOTS": slots}


def _stride(residual: Any) -> int:
    return 0 if residual is None else residual.stride(0)


def _ends(mixture: Mixture) -> dict[str, Any]:
    """The kernels' constants that say how products become hidden values."""
    how = {"ACTIVATION": mixture.activation, "GATED": mixture.gated}
    return {**how, "OFFSET": float(mixture.offset)}


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
    _, features, width = _shape(weight)
    features = mixture.features if up else features
    n, warps = (config.n, config.warps) if up else (config.down_n, config.down_warps)
    y = x.new_empty((pairs, features))
    grid = (order.most * triton.cdiv(features, n),)
    ends = _ends(mixture) if up else {"ACTIVATION": None, "GATED": False, "OFFSET": 0.0}
    about = mixture.up_bias if up else None, order.pairs, order.ends, order.blocks, y
    limit = mixture.limit if up else None
    how = {"CHOSEN": pairs // x.shape[0] if up else 0, "BLOCK_M": config.m, "BLOCK_N": n}
    how |= {"GROUP": _GROUP, "STAGES": config.stages, **ends, "num_warps": warps, "pdl": pdl}
    if not isinstance(weight, Packed):
        how |= {"K": width, "BLOCK_K": config.k}
        numbers = order.most, features, 0, _shape(weight)[0], x.stride(0), limit
        launch(tile_kernel, grid, x, weight, *about, *numbers, **how)
        return y
    if by_values:
        how |= {"K": width, "BLOCK_K": config.k}
        for first, known, matrix in _matrices(weight, x, pdl):
            numbers = order.most, features, first, known, x.stride(0), limit
            launch(tile_kernel, grid, x, matrix, *about, *numbers, **how)
        return y
    (_, *beside), apart, meant = _codes(weight)
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
    total, rows, width = _shape(weight)
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
    """Whether tiles take matrices that codes were made into before, as they have many rows of x."""
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
        **{"BLOCK": block, **_ends(mixture), "num_warps": 4, "pdl": pdl},
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
        _stride(added[1]),
        **{"CHOSEN": chosen, "SLOTS": slots, "BLOCK": block, "num_warps": 4, "pdl": pdl},
    )


def tuning_key(tokens: int, chosen: int, mixture: Mixture, itemsize: int) -> Key:
    """Of so many tokens, each of which has `chosen` experts of a mixture.

    Of many tokens those of their experts count that are here: a share of a mixture, whose tokens
    have fewer of fewer experts, is a smaller mixture.
    """
    total, _, width = _shape(mixture.up)
    here = chosen if is_few(tokens) else -(-chosen * total // mixture.choices)
    shape = next_power_of_2(tokens), here, total, mixture.features, width
    bits, columns = 8 * itemsize, width
    if isinstance(mixture.up, Packed) and not _makes_values(mixture, tokens, chosen):
        bits, columns = mixture.up.bits, mixture.up.columns or width
    return "experts", *shape, itemsize, bits, columns, mixture.gated


def _check(
    x: Any,
    mixture: Mixture,
    routing: Routing,
    norm: NormArguments | None,
    residual: Any,
    partial: Any,
    count: int,
) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    width, (total, out, _) = x.shape[-1], _shape(mixture.up)
    if mixture.gated and (out % 2 or mixture.activation is None):
        raise ValueError(f"Gated experts have {out} rows and {mixture.activation!r}.")
    if mixture.activation is not None and mixture.activation not in KINDS:
        raise ValueError(
            f"The activation is {mixture.activation!r}; one of {', '.join(KINDS)} is known."
        )
    features = mixture.features
    weights = {
        "up": (mixture.up, (total, out, width)),
        "down": (mixture.down, (total, width, features)),
    }
    if isinstance(mixture.up, Packed) or isinstance(mixture.down, Packed):
        for name, (part, shape) in weights.items():
            _check_codes(name, part, shape)
        weights = {}
    expected = weights | {
        "up_bias": (mixture.up_bias, (total, out)),
        "down_bias": (mixture.down_bias, (total, width)),
    }
    if mixture.shared is not None:
        wide = mixture.shared.down.shape[-1]
        expected |= {
            "shared up": (mixture.shared.up, (wide * mixture.parts, width)),
            "shared down": (mixture.shared.down, (width, wide)),
            "shared gate": (mixture.shared.gate, (width,)),
        }
    for name, (part, shape) in expected.items():
        if part is not None and (tuple(part.shape) != shape or not part.is_contiguous()):
            raise ValueError(
                f"The experts' {name} is {tuple(part.shape)} with strides {part.stride()}; "
                f"contiguous {shape} is expected."
            )
        if part is not None and part.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype} and the experts' {name} {part.dtype}; one is wanted.")
    if total > MOST_EXPERTS:
        raise ValueError(f"There are {total} experts; up to {MOST_EXPERTS} are expected.")
    chosen = tuple(routing.experts.shape)
    types = dtype_name(routing.experts.dtype), dtype_name(routing.weights.dtype)
    if chosen[:-1] != tuple(x.shape[:-1]) or tuple(routing.weights.shape) != chosen:
        raise ValueError(
            f"x is {tuple(x.shape)}, its experts {chosen} with weights "
            f"{tuple(routing.weights.shape)}; [..., k] for x [..., E] are expected."
        )
    if types != ("int32", "float32"):
        raise ValueError(f"A routing is {types}; int32 experts and float32 weights are expected.")
    if not (routing.experts.is_contiguous() and routing.weights.is_contiguous()):
        raise ValueError("A routing is contiguous; this one has other strides.")
    if partial is not None and (partial.shape != x.shape or not partial.is_contiguous()):
        raise ValueError(
            f"partial is {tuple(partial.shape)}; contiguous {tuple(x.shape)} is wanted."
        )
    check_neighbours(x, width, None, None, False, residual, None, width)
    if norm is not None and tuple(norm.weight.shape) != (width,):
        raise ValueError(f"The norm's weight is {tuple(norm.weight.shape)}; ({width},) is wanted.")


def _check_codes(name: str, weight: Any, shape: tuple[int, int, int]) -> None:
    """Raise ValueError for a quantized weight of experts that the kernels would misread."""
    if not isinstance(weight, Packed):
        raise ValueError(f"The experts' {name} is not quantized, and others are; all or none are.")
    total, rows, width = shape
    held = triton.cdiv(width, 32) * 16 if weight.bits == 4 else width
    if tuple(weight.data.shape) != (total, rows, held) or weight.width != width:
        raise ValueError(
            f"The experts' {name} are codes {tuple(weight.data.shape)} of {weight.width} columns; "
            f"{(total, rows, held)} of {width} are expected."
        )
    for part in (weight.data, weight.scale, weight.zero, weight.outer):
        if part is not None and (part.shape[0] != total or not part.is_contiguous()):
            raise ValueError(
                f"The experts' {name} has {tuple(part.shape)} with strides {part.stride()} beside "
                f"its codes; contiguous memory of {total} experts is expected."
            )
    if not serves(weight.codes, weight.columns, weight.zero is not None):
        raise ValueError(f"No kernel reads {weight.codes} in blocks of {weight.columns} columns.")
