"""Products of many rows on the 8-bit matrix units: inputs become codes, and codes are multiplied.

`quantize` makes codes of x and of norm(x), one read and one write; `linear` multiplies them with
the codes of a weight. Sums of int8 are exact; those of fp8 go to float32 every 128 columns.
"""

from typing import Any, NamedTuple

import triton

from . import linear as plain
from .eight_bit_kernels import quantize_kernel, tile_kernel
from .launch import launch, next_power_of_2
from .linear import NormArguments
from .operands import empty
from .quantized import Packed
from .tunable import SHARED_BYTES, Key, Kind, Tunable, powers

_LEAST = 64  # rows of x, which are multiplied in 16 bits
MOST_SCALED = 512  # rows of x whose sums are scaled in parts
GROUP = 128  # columns that share a scale where not all do
WIDEST = 65536  # columns that a program quantizes
_KINDS = ("int8", "fp8_e4m3")


class Codes(NamedTuple):
    """x [..., width] quantized: codes int8 or, of fp8, uint8, and float32 scales [rows, groups].

    There is one group, of all columns, or one for each GROUP of them.
    """

    data: Any
    scale: Any


class EightBitConfig(NamedTuple):
    """Tile of the 8-bit kernel: `m` rows of x by `n` results, `k` columns at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def serves(weight: Packed, codes: str, block: int) -> bool:
    """True if the kernels know a weight, and inputs as such codes, a scale for `block` columns."""
    return (
        weight.codes == codes
        and codes in _KINDS
        and weight.zero is None
        and weight.outer is None
        and weight.columns in (0, GROUP)
        and block in (0, GROUP)
        and weight.width % 16 == 0
        and weight.width <= WIDEST
    )


def pays(count: int, itemsize: int, weight: Packed, block: int) -> bool:
    """True if so many rows of x are multiplied in 8 bits; few, and float32, are not.

    Sums that are scaled in parts run at half the rate: of many rows the 16-bit units are faster.
    """
    scaled = bool(weight.columns or block)
    return itemsize == 2 and _LEAST < count <= (MOST_SCALED if scaled else count)


def quantize(
    x: Any,
    codes: str,
    block: int = 0,
    *,
    scale: Any = None,
    norm: NormArguments | None = None,
    pdl: bool = False,
) -> Codes:
    """x [..., width] as codes, by the roundings of `BlockArithmetic.quantize_input`.

    Scales are those of the rows' largest sizes, or of each GROUP of columns with `block`; `scale`,
    one element, is that of all. With `norm` it is norm(x), rounded to x's dtype.
    """
    width = x.shape[-1]
    count = x.numel() // width
    if codes not in _KINDS or block not in (0, GROUP) or width > WIDEST:
        raise ValueError(f"x {tuple(x.shape)} as {codes} in groups of {block} is not known.")
    if x.stride(-1) != 1:
        raise ValueError(f"x has stride {x.stride(-1)} along its last axis; 1 is expected.")
    groups = triton.cdiv(width, GROUP) if block else 1
    data = empty(x, tuple(x.shape), "int8" if codes == "int8" else "uint8")
    scales = empty(x, (count, groups), "float32")
    if count == 0:
        return Codes(data, scales)
    rows = x.reshape(count, width)
    kind, *arrays, eps = norm or (None, None, None, 0.0)
    extent = max(next_power_of_2(width), GROUP)
    launch(
        quantize_kernel,
        (count,),
        *(rows, scale, *arrays, data, scales, rows.stride(0), eps),
        **{"K": width, "CODES": codes, "GROUPS": groups if block else 0, "BLOCK": extent},
        **{"GROUP": GROUP, "NORM": kind, "num_warps": min(max(extent // 1024, 1), 16), "pdl": pdl},
    )
    return Codes(data, scales)


def product(
    x: Any,
    weight: Packed,
    bias: Any = None,
    *,
    block: int = 0,
    scale: Any = None,
    norm: NormArguments | None = None,
    dtype: Any = None,
    pdl: bool = False,
    **options: Any,
) -> Any:
    """`linear` of norm(x) [..., width], which becomes codes of the weight's kind by `quantize`."""
    codes = quantize(x, weight.codes, block, scale=scale, norm=norm, pdl=pdl)
    return linear(codes, weight, bias, dtype=dtype or x.dtype, pdl=pdl, **options)


def linear(
    x: Codes,
    weight: Packed,
    bias: Any = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    residual: Any = None,
    dtype: Any,
    config: EightBitConfig | None = None,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """`linear.linear` of what the codes of `x` mean with the matrix that `weight` stands for."""
    data, scale = x
    width = data.shape[-1]
    count = data.numel() // width
    stored = weight.data.shape[0]
    features = stored // 2 if gated else stored
    _check(x, weight, count)
    plain.check_epilogue(data, stored, bias, activation, gated, residual, None, features)
    y = data.new_empty((*data.shape[:-1], features), dtype=dtype)
    if y.numel() == 0:
        return y
    scaled = scale.shape[1] > 1 or weight.columns > 0
    config = config or default_config(count, features, gated, scaled, sms)
    if scaled and config.k != GROUP:
        raise ValueError(f"{config} does not scale sums of {GROUP} columns.")
    residual = None if residual is None else residual.reshape(count, features)
    launch(
        tile_kernel,
        (triton.cdiv(count, config.m), triton.cdiv(features, config.n)),
        *(data, scale, weight.data, weight.scale, bias, residual, y, count, features),
        0 if residual is None else residual.stride(0),
        **{"K": width, "CODES": weight.codes, "SCALES": weight.scale_dtype},
        BLOCK=(weight.rows if weight.scale.shape[0] > 1 else 0, weight.columns),
        GROUPS=scale.shape[1] if scaled else 0,
        **{"BLOCK_M": config.m, "BLOCK_N": config.n, "BLOCK_K": config.k, "STAGES": config.stages},
        **{"ACTIVATION": activation, "GATED": gated, "num_warps": config.warps, "pdl": pdl},
    )
    return y


# By whether a product is gated, its sums are scaled in parts, and its tiles are few.
_DEFAULTS = {
    (False, False, False): EightBitConfig(128, 128, 128, 8, 4),
    (False, False, True): EightBitConfig(64, 128, 128, 4, 4),
    (False, True, False): EightBitConfig(128, 128, 128, 8, 4),
    (False, True, True): EightBitConfig(64, 128, 128, 4, 4),
    (True, False, False): EightBitConfig(128, 128, 128, 8, 3),
    (True, False, True): EightBitConfig(64, 64, 128, 4, 4),
    (True, True, False): EightBitConfig(128, 64, 128, 8, 4),
    (True, True, True): EightBitConfig(64, 64, 128, 4, 4),
}


def default_config(
    count: int, features: int, gated: bool, scaled: bool, sms: int
) -> EightBitConfig:
    """A configuration for a shape that nobody measured; `scaled` of sums that are so in parts."""
    whole = _DEFAULTS[gated, scaled, False]
    tiles = triton.cdiv(count, whole.m) * triton.cdiv(features, whole.n)
    return _DEFAULTS[gated, scaled, tiles < sms]


def tuning_key(count: int, features: int, weight: Packed, block: int, gated: bool) -> Key:
    """Of a product of `count` rows of codes; `block` as in `quantize`."""
    number = _KINDS.index(weight.codes)
    shape = next_power_of_2(count), features, weight.width
    return "eight_bit_linear", *shape, number, weight.columns, block, gated


def _fits(key: Key, config: EightBitConfig) -> bool:
    *_, columns, block, gated = key
    parts, scaled = 2 if gated else 1, bool(columns or block)
    held = config.stages * config.k * (config.m + config.n * parts)
    sums = config.m * config.n * parts // (32 * config.warps)  # of a thread
    if scaled:
        return held <= SHARED_BYTES and sums <= 64 and config.k == GROUP
    return held <= SHARED_BYTES and sums <= 128


def _candidates(key: Key, sms: int) -> list[EightBitConfig]:
    _, rows, features, _, _, columns, block, gated = key
    return [
        default_config(rows, features, bool(gated), bool(columns or block), sms),
        EightBitConfig(128, 128, 128, 8, 3),
        EightBitConfig(128, 128, 128, 4, 4),
        EightBitConfig(64, 128, 128, 4, 4),
        EightBitConfig(128, 64, 128, 4, 4),
        EightBitConfig(64, 64, 128, 4, 5),
        EightBitConfig(64, 256, 128, 8, 3),
        EightBitConfig(128, 64, 128, 8, 4),
    ]


TUNABLE = Tunable(
    op="eight_bit_linear",
    fields=("rows", "features", "width", "codes", "columns", "block", "gated"),
    flags=("gated",),
    kinds={
        "eight_bit_tile": Kind(
            EightBitConfig,
            {
                **{"m": powers(64, 256), "n": powers(16, 256), "k": powers(64, 256)},
                **{"warps": powers(4, 16), "stages": range(1, 9)},
            },
        ),
    },
    fits=_fits,
    candidates=_candidates,
)


def _check(x: Codes, weight: Packed, count: int) -> None:
    """Raise ValueError for codes that the kernel would misread."""
    width, groups = x.data.shape[-1], x.scale.shape[1]
    block = GROUP if groups > 1 else 0
    if not serves(weight, weight.codes, block) or weight.width != width:
        raise ValueError(
            f"No kernel multiplies codes {tuple(x.data.shape)} with {weight.codes} of "
            f"{weight.width} columns in blocks of {weight.columns}."
        )
    if tuple(x.scale.shape) not in ((count, 1), (count, triton.cdiv(width, GROUP))):
        raise ValueError(f"{tuple(x.scale.shape)} scales do not fit codes {tuple(x.data.shape)}.")
    for codes in (x.data, weight.data):
        if not codes.is_contiguous() or codes.shape[-1] != width:
            raise ValueError(f"Codes {tuple(codes.shape)} are expected contiguous, {width} wide.")
