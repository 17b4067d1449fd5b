"""Products with few rows, bound by reading the weights, with norm, bias, activation and residual.

One row is a matrix-vector product on the plain cores: a program holds the whole row of x in
registers and streams rows of the weights past it. More rows go to the matrix units. Sums that are
split over programs are joined in a fixed order, so that results are the same bits every time.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import triton

from .activation import KINDS
from .launch import launch, next_power_of_2
from .linear_kernels import matvec_kernel, matvec_parts_kernel, parts, tile_kernel
from .operands import dtype_name, empty
from .tunable import MOST_CANDIDATES, SHARED_BYTES, Key, Kind, Tunable, powers

_NORMS = ("rms", "rms_offset", "layer")
MOST_ROWS = 128
MOST_VECTORS = 2
MOST_TILES = 4096
_MOST_PARTS = 8
_SMALL, _SMALLEST = 5 << 20, 3 << 19  # elements of a weight matrix


class VectorConfig(NamedTuple):
    """How the matrix-vector kernel runs: weight rows a program takes at a time, and programs.

    It serves up to MOST_VECTORS rows of x, one after another past the same weights. `per_sm` 0
    gives each block of weight rows a program of its own; else so many programs an SM go through all
    blocks, each with its next block's weights on their way, where x is a single row.

    `columns` 0 reads all columns at once, in lanes up to the next power of two. Else a single row
    is read in parts of so many at most, a power of two (`linear_kernels.parts`): 2,560 columns as
    2,048 and 512, or as five times 512.
    """

    rows: int
    warps: int
    per_sm: int = 0
    columns: int = 0


class TileConfig(NamedTuple):
    """Tile of the matrix-unit kernel: `m` rows of x by `n` weight rows, `k` columns at a time.

    The columns are split over `splits` programs, the last of which adds their sums, in order.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1


LinearConfig: TypeAlias = VectorConfig | TileConfig


def serves(count: int, features: int, width: int, itemsize: int, fused: bool) -> bool:
    """True if `linear` is the one for `count` rows, or cuBLAS, which is better at many.

    `fused` says that an activation or a residual follows, which cuBLAS would leave to a launch of
    its own. Measured on an H100, where cuBLAS is slow with rows that are no multiple of 16 bytes.
    """
    if count == 1 or itemsize == 4:
        return count == 1
    small = features * width <= (_SMALL if fused else _SMALLEST)
    return count <= 64 or (count <= MOST_ROWS and (small or features % 8 > 0))


def fuses_norm(norm: Any) -> bool:
    """True if products' kernels know a `contract.NormOf`; any other is a launch in front."""
    return norm.spec.kind == "rms" or not norm.spec.unit_offset


class NormArguments(NamedTuple):
    """A norm over the rows of x: `rms`, `rms_offset` (times 1 + weight) or `layer`."""

    kind: str
    weight: Any
    bias: Any
    eps: float

    @classmethod
    def of(cls, norm: Any) -> "NormArguments | None":
        """Those of a `contract.NormOf`; None of None."""
        if norm is None:
            return None
        kind = "rms_offset" if norm.spec.unit_offset else norm.spec.kind
        return cls(kind, norm.weight, norm.bias, norm.spec.eps)


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    norm: NormArguments | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: Any = None,
    before: Any = None,
    dtype: Any = None,
    config: LinearConfig | None = None,
    counters: Any = None,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """residual + activation(norm(x) weight^T + bias): x [..., in] to [..., out] in `dtype`.

    `weight` [out, in] is contiguous; with `gated` it holds gate, then up, and the result is
    activation(gate) * up, half as wide. All sums are in float32 and rounded once. `norm` goes with
    a single row only, which may be float32 whatever the weights are. With `before` [..., in] the
    norm is that of x + before, rounded to x's dtype, and the result is a pair: the product, and
    norm(x + before). `dtype` is the weights' own if None. `sms` is the device's number of
    multiprocessors.
    """
    width = x.shape[-1]
    count = x.numel() // width
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    _check(x, weight, bias, activation, gated, residual, norm, features)
    _check_before(before, x, norm)
    y = empty(x, (*x.shape[:-1], features), dtype_name(dtype or weight.dtype))
    normed = None if before is None else x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    if config is None:
        config = default_config(count, features, width, weight.element_size(), gated, sms)
    rows = x.reshape(count, width)
    residual = None if residual is None else residual.reshape(count, features)
    strides = rows.stride(0), 0 if residual is None else residual.stride(0)
    if isinstance(config, VectorConfig):
        blocks = triton.cdiv(features, config.rows)
        programs = min(config.per_sm * sms, blocks) if count == 1 else 0
        kind, norm_weight, norm_bias, eps = norm or (None, None, None, 0.0)
        arrays = rows, weight, bias, residual, norm_weight, norm_bias, before, normed, y
        how = {"K": width, "ROWS": config.rows, "PROGRAMS": programs, "NORM": kind}
        how |= {"ACTIVATION": activation, "GATED": gated, "num_warps": config.warps}
        if config.columns:
            if count > 1:
                raise ValueError(f"x has {count} rows; {config} has columns, for a single one.")
            how |= {"COLUMNS": config.columns}
            launch(
                matvec_parts_kernel, (programs or blocks,), *arrays, features, eps, pdl=pdl, **how
            )
        else:
            how |= {"COUNT": count, "BLOCK_K": next_power_of_2(width)}
            launch(
                *(matvec_kernel, (programs or blocks,), *arrays, features, *strides, eps),
                pdl=pdl,
                **how,
            )
        return y if normed is None else (y, normed)
    if norm is not None:
        raise ValueError(f"{config} has no place for a norm; a VectorConfig has.")
    tiles = triton.cdiv(count, config.m), triton.cdiv(features, config.n)
    turns = triton.cdiv(width, config.k)
    splits = config.splits if counters is not None and math.prod(tiles) <= MOST_TILES else 1
    share = triton.cdiv(turns, min(splits, turns))
    splits = triton.cdiv(turns, share)  # none is left without work
    partial = y
    if counters is not None and splits > 1:
        area = config.m * config.n * (2 if gated else 1)
        partial = empty(counters, (math.prod(tiles) * splits * area,), "float32")
    launch(
        tile_kernel,
        (*tiles, splits),
        *(rows, weight, bias, residual, y, partial, counters, count, features, *strides),
        **{"K": width, "BLOCK_M": config.m, "BLOCK_N": config.n, "BLOCK_K": config.k},
        **{"SPLITS": splits, "SPLIT_K": share * config.k, "STAGES": config.stages},
        ACTIVATION=activation,
        GATED=gated,
        num_warps=config.warps,
        pdl=pdl,
    )
    return y


def default_config(
    count: int, features: int, width: int, itemsize: int, gated: bool, sms: int
) -> LinearConfig:
    """A configuration for a shape that nobody measured, after those that were, on an H100."""
    if count <= MOST_VECTORS:
        elements = _elements(width, gated)
        rows = max(1, min(8, (16384 if count == 1 else 8192) // elements))
        while rows > 1 and features // rows < 2 * sms:
            rows //= 2
        warps = 4 if rows * elements <= 8192 else 8
        # Programs that go through several blocks norm their x once.
        several = count == 1 and not gated and warps == 8 and features >= 4 * sms * rows
        return VectorConfig(rows, warps, 2 if several else 0)
    if itemsize == 4:
        return TileConfig(32, 32, 32, 4, 2)
    if count > 64:
        if features >= 128 * sms:
            return TileConfig(128, 64, 64, 4, 3)
        if features >= 24 * sms:
            return TileConfig(64, 32, 128, 4, 3)
        if width <= 2048:
            return TileConfig(64, 16, 128, 4, 4)
        return TileConfig(128, 32, 64, 4, 4, 4)
    m = 16 if count <= 16 else 32 if count <= 32 else 64
    if features >= 96 * sms:
        return TileConfig(16, 32, 256, 4, 3) if m == 16 else TileConfig(m, 64, 128, 4, 4)
    tiles = triton.cdiv(count, m) * triton.cdiv(features, 32)
    splits = max(1, min(round(1.5 * sms / tiles), width // 1024, 4))
    return TileConfig(m, 32, 128, 4, 4, splits)


def tuning_key(rows: int, features: int, width: int, itemsize: int, gated: bool) -> Key:
    """Of a product of x [rows, width] with `features` results a row; gate and up count once."""
    return "linear", next_power_of_2(rows), features, width, itemsize, gated


def _elements(width: int, gated: bool) -> int:
    """Weights that one result of the matrix-vector kernel is made of, as it holds them."""
    return next_power_of_2(width) * (2 if gated else 1)


def _fits(key: Key, config: LinearConfig) -> bool:
    _, rows, _, width, itemsize, gated = key
    if isinstance(config, VectorConfig):
        elements, most = _elements(width, gated), MOST_VECTORS
        if config.columns:
            sizes = [size for _, size in parts(width, config.columns)]
            elements, most = sum(sizes) * (2 if gated else 1), 1
            if len(sizes) > _MOST_PARTS:
                return False
        per_thread = elements * config.rows / (32 * config.warps)
        return rows <= most and per_thread <= 256
    held = config.stages * config.k * (config.m + config.n * (2 if gated else 1)) * itemsize
    # A norm is fused into the product of one row, which only the other kernel does.
    return rows > 1 and held <= SHARED_BYTES


def _candidates(key: Key, sms: int) -> list[LinearConfig]:
    _, rows, features, width, itemsize, gated = key
    default = default_config(rows, features, width, itemsize, gated, sms)
    vectors: list[VectorConfig] = []
    if rows <= MOST_VECTORS:
        vectors = _vector_candidates(rows, features, _elements(width, gated), sms)
    if _is_uneven(key):
        return [default, *vectors[:13], *_uneven_candidates(features, width, itemsize, gated)]
    if rows == 1 or itemsize == 4:
        return [default, *vectors]
    return [default, *vectors[:5], *_tile_candidates(rows, features, width, gated, sms)]


def _vector_candidates(rows: int, features: int, elements: int, sms: int) -> list[VectorConfig]:
    """Those with 32 to 64 weights a thread first: the rule that measurements have shown."""
    candidates = []
    for block in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8, 16):
            per_thread = block * elements / (32 * warps)
            distance = max(per_thread / 64, 32 / per_thread)
            if distance > 2 or features < block * sms // 2:
                continue
            candidates.append((distance, VectorConfig(block, warps)))
            if rows == 1 and per_thread <= 64:  # the next block's weights take registers, too
                candidates += [(distance + 0.1 * n, VectorConfig(block, warps, n)) for n in (2, 3)]
    return [config for _, config in sorted(candidates, key=lambda item: item[0])]


def _is_uneven(key: Key) -> bool:
    """True if a single row's width is no power of two."""
    return key[1] == 1 and next_power_of_2(key[3]) > key[3]


def _uneven_candidates(features: int, width: int, itemsize: int, gated: bool) -> list[VectorConfig]:
    """Programs that norm their x once for several blocks, and widths in parts.

    Parts are as wide as can be, or narrow and alike. Where a part is as wide as all of a program's
    loads of 16 bytes, x lies in its registers as the weights do, and no part of it is moved.
    """
    wide, elements = width > features, _elements(width, gated)
    several = 5 if wide else 6  # programs an SM, beside 4
    narrow = max(width & -width, next_power_of_2(triton.cdiv(width, _MOST_PARTS)))
    widest = 1 << (width.bit_length() - 1)
    # Weight rows and warps, by the weights that a thread has.
    lanes = [(1, 64), (1, 32), (2, 64)] if wide else [(2, 64), (4, 64), (4, 32)]
    blocks = [(rows, rows * elements // (32 * each)) for rows, each in lanes]
    fill = max(1, narrow * itemsize // 512)
    filled, most = [(1, fill), (2, fill)], several if fill > 2 else 8
    ways = [
        *((0, per_sm, blocks) for per_sm in (4, several)),
        *((narrow, per_sm, filled) for per_sm in (0, 4, most)),
        *((widest, per_sm, blocks) for per_sm in (0, 4)),
    ]
    return [
        VectorConfig(rows, warps, per_sm, columns)
        for columns, per_sm, pairs in ways
        for rows, warps in pairs
        if 1 <= warps <= 16 and per_sm * warps <= 64
    ]


# Weight rows, columns and stages of a tile by its rows of x.
_TILES = {
    16: [(32, 256, 3), (16, 256, 3), (32, 128, 4), (64, 128, 4), (16, 128, 5)],
    32: [(32, 128, 4), (64, 128, 4), (32, 256, 3), (16, 256, 3)],
    64: [(32, 128, 4), (64, 128, 3), (64, 64, 4), (128, 64, 4)],
    128: [(32, 64, 4), (64, 64, 4), (128, 64, 3)],
}


def _tile_candidates(
    rows: int, features: int, width: int, gated: bool, sms: int
) -> list[TileConfig]:
    m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    sizes = [(m, *size) for size in _TILES[m]]
    if rows > 64:
        sizes += [(128, *size) for size in _TILES[128]]
    whole, split = [], []
    for m, n, k, stages in sizes:
        stages = max(2, stages - 1) if gated and n * k >= 8192 else stages
        warps = 8 if m * n >= 8192 else 4
        whole.append(TileConfig(m, n, k, warps, stages))
        tiles = triton.cdiv(rows, m) * triton.cdiv(features, n)
        for wave in (1, 2):
            parts = min(round(wave * sms / tiles), width // max(k, 512), 8)
            if parts > 1:
                split.append(TileConfig(m, n, k, warps, stages, parts))
    return [*split[:5], *whole, *split[5:]]


TUNABLE = Tunable(
    op="linear",
    fields=("rows", "features", "width", "itemsize", "gated"),
    flags=("gated",),
    kinds={
        "vector": Kind(
            VectorConfig,
            {"rows": powers(1, 32), "warps": powers(1, 16), "per_sm": range(9)}
            | {"columns": [0, *powers(1, 1 << 17)]},
            bound_by_memory=True,
        ),
        "tile": Kind(
            TileConfig,
            {
                **{"m": powers(16, 128), "n": powers(16, 256), "k": powers(16, 512)},
                **{"warps": powers(1, 16), "stages": range(1, 9), "splits": range(1, 17)},
            },
        ),
    },
    fits=_fits,
    candidates=_candidates,
    most=lambda key: 32 if _is_uneven(key) else MOST_CANDIDATES,
)


def _check(
    x: Any,
    weight: Any,
    bias: Any,
    activation: str | None,
    gated: bool,
    residual: Any,
    norm: NormArguments | None,
    features: int,
) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    width = x.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != width or not weight.is_contiguous():
        raise ValueError(
            f"weight {tuple(weight.shape)} with strides {tuple(weight.stride())} does not fit x "
            f"{tuple(x.shape)}: a contiguous [out, {width}] is expected."
        )
    wide = norm is not None and dtype_name(x.dtype) == "float32"
    if weight.dtype != x.dtype and not wide:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; one dtype is expected.")
    check_epilogue(x, weight.shape[0], bias, activation, gated, residual, norm, features)


def check_epilogue(
    x: Any,
    rows: int,
    bias: Any,
    activation: str | None,
    gated: bool,
    residual: Any,
    norm: NormArguments | None,
    features: int,
) -> None:
    """Raise ValueError for what does not fit a product of x with a matrix of so many rows."""
    if gated and (rows % 2 or activation is None):
        raise ValueError(
            f"A gated product needs an activation and an even number of rows, gate and up; it has "
            f"{activation!r} and {rows}."
        )
    if activation is not None and activation not in KINDS:
        raise ValueError(f"The activation is {activation!r}; one of {', '.join(KINDS)} is known.")
    if x.stride(-1) != 1:
        raise ValueError(f"x has stride {x.stride(-1)} along its last axis; 1 is expected.")
    if bias is not None and (tuple(bias.shape) != (rows,) or bias.stride(0) != 1):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight of {rows} rows.")
    if residual is not None:
        expected = (*x.shape[:-1], features)
        if tuple(residual.shape) != expected or residual.stride(-1) != 1:
            raise ValueError(f"residual is {tuple(residual.shape)}; {expected} is expected.")
    if norm is not None:
        _check_norm(norm, x.numel() // x.shape[-1], x.shape[-1])


def _check_before(before: Any, x: Any, norm: NormArguments | None) -> None:
    if before is None:
        return
    if norm is None:
        raise ValueError("before is given without a norm, which would read the sum. Pass both.")
    if before.shape != x.shape or before.dtype != x.dtype or before.stride(-1) != 1:
        raise ValueError(
            f"before is {tuple(before.shape)} {before.dtype}; {tuple(x.shape)} {x.dtype}, as x is, "
            "was expected."
        )


def _check_norm(norm: NormArguments, count: int, width: int) -> None:
    if count != 1:
        raise ValueError(f"x has {count} rows; a norm is fused into the product of a single one.")
    if norm.kind not in _NORMS:
        raise ValueError(f"The norm is {norm.kind!r}; one of {', '.join(_NORMS)} is known.")
    if (norm.bias is not None) != (norm.kind == "layer"):
        raise ValueError("A norm of kind 'layer' has a bias, and no other has.")
    for part in (norm.weight, norm.bias):
        if part is not None and (tuple(part.shape) != (width,) or part.stride(0) != 1):
            raise ValueError(f"The norm's weights are {tuple(part.shape)}; ({width},) is expected.")
