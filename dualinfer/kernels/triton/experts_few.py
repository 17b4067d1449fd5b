"""Experts of one or two tokens, by pairs: one launch for gate and up, one for down."""

from typing import Any

import triton

from .experts_choice import ExpertsFragmentConfig, ExpertsStreamConfig, ExpertsVectorConfig
from .experts_codes import down_codes_kernel, up_codes_kernel
from .experts_fragments import down_fragments_kernel, up_fragments_kernel
from .experts_kernels import down_vector_kernel, up_vector_kernel
from .launch import launch, next_power_of_2
from .linear import NormArguments
from .mixture import Mixture, codes_of, ends_of, stride_of
from .quantized import (
    MASK,
    Packed,
    columns_of_products,
    fragments_serve,
    masks_of,
    most_registers,
    raises_inputs,
)
from .routing import Routing


def vectors_of_few(
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
        **{"NORM": kind, **ends_of(mixture)},
        num_warps=config.warps,
        pdl=pdl,
    )
    launch(
        down_vector_kernel,
        (triton.cdiv(width, config.down_rows), count),
        *(h, mixture.down, mixture.down_bias, *routing, mixture.own, shared_h, down, *added, y),
        *(width, stride_of(added[1])),
        **{"K": features, "SHARED_K": wide, "CHOSEN": chosen, "SLOTS": next_power_of_2(chosen)},
        **{"ROWS": config.down_rows, "BLOCK_K": config.down_columns},
        num_warps=config.down_warps,
        pdl=pdl,
    )


def codes_of_few(
    x: Any,
    mixture: Mixture,
    routing: Routing,
    norm: NormArguments | None,
    added: tuple[Any, Any],
    y: Any,
    config: ExpertsVectorConfig,
    pdl: bool,
) -> None:
    """`vectors_of_few` of quantized weights."""
    if mixture.shared is not None:
        raise ValueError("An expert of all tokens has launches of its own beside quantized ones.")
    count, width = x.shape
    chosen, features = routing.experts.shape[-1], mixture.features
    h = x.new_empty((count * chosen, features))
    kind, *norm_arrays, eps = norm or (None, None, None, 0.0)
    arrays, apart, meant = codes_of(mixture.up)
    per = 128 // mixture.up.bits
    launch(
        up_codes_kernel,
        (chosen * triton.cdiv(features, config.rows), count),
        *(x, *arrays, mixture.up_bias, routing.experts, mixture.own, *norm_arrays, h, features),
        *(apart, x.stride(0), eps, mixture.limit, MASK),
        **{**meant, "CHOSEN": chosen, "ROWS": config.rows, "NORM": kind, **ends_of(mixture)},
        **{"QUADS": next_power_of_2(triton.cdiv(width, per)), "RAISE": False},
        num_warps=config.warps,
        pdl=pdl,
    )
    arrays, apart, meant = codes_of(mixture.down)
    per = 128 // mixture.down.bits
    quads = max(1, config.down_columns // per)
    launch(
        down_codes_kernel,
        (triton.cdiv(width, config.down_rows), count),
        *(h, *arrays, mixture.down_bias, *routing, mixture.own, *added, y, width, apart),
        *(stride_of(added[1]), MASK),
        **{**meant, "CHOSEN": chosen, "SLOTS": next_power_of_2(chosen), "QUADS": quads},
        **{"ROWS": config.down_rows, "TURNS": triton.cdiv(features, quads * per)},
        num_warps=config.down_warps,
        pdl=pdl,
    )


def fragments_of_few(
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
    """`codes_of_few` on the matrix units, which take inputs of 16 bits; of a stream down alone."""
    count, width = x.shape
    whole = True
    if isinstance(config, ExpertsFragmentConfig):
        whole = config.warps * config.chunks * 512 >= width * mixture.up.bits
    if x.element_size() != 2 or not whole:
        raise ValueError(f"{config} does not serve {x.dtype} of {width} columns.")
    chosen, features = routing.experts.shape[-1], mixture.features
    h = x.new_empty((count * chosen, features))
    kind, *norm_arrays, eps = norm or (None, None, None, 0.0)
    arrays, apart, meant = codes_of(mixture.up)
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
        **{**meant, **ends_of(mixture)},
        num_warps=config.warps,
        pdl=pdl,
    )
    arrays, apart, meant = codes_of(mixture.down)
    blocks = triton.cdiv(width, 16 * config.down_tiles) * count
    launch(
        down_fragments_kernel,
        (triton.cdiv(width, 16 * config.down_tiles), count),
        *(h, *arrays, mixture.down_bias, *routing, mixture.own, *added, y, width, apart),
        *(stride_of(added[1]), masks_of(mixture.down, x)),
        **{**meant, "CHOSEN": chosen, "ALL": next_power_of_2(chosen)},
        **{**_columns(mixture.down, config.down_chunks), "B": config.down_warps},
        **{"M": config.down_tiles, "T": config.down_chunks, "num_warps": config.down_warps},
        **most_registers(config.down_warps, min(triton.cdiv(blocks, sms), 16 // config.down_warps)),
        pdl=pdl,
    )


def has_fragments(mixture: Mixture) -> bool:
    """True if the kernels of fragments know these experts' weights."""
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
