"""Codes of 8 bits in kernels: the nearest to float32, and those of a cache's heads.

A cache in codes is its keys and values, "fp8_e4m3" as bytes or "int8", and one float32 scale for
each token and KV head, which lies at the offset of the head's codes over D. What they mean is
`reference.encode_heads`.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
from typing import Any

import triton
import triton.language as tl

from .conversions import as_floats
from .launch import INTERPRETED
from .operands import dtype_name

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_LEAST: tl.constexpr = tl.constexpr(2.0**-100)
_CODES = {"uint8": "fp8_e4m3", "int8": "int8"}


@triton.jit
def nearest_integer(a):
    """The nearest integer of float32 in [-128, 127], ties to even."""
    return (a + 12582912.0) - 12582912.0  # 1.5 * 2^23, above which float32 has integers alone


@triton.jit
def rounded_e4m3(a):
    """The nearest number of float8_e4m3fn, as float32; a is at most 448, and ties go to even."""
    bits = a.to(tl.uint32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)
    normal = (bits & 0xFFF00000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(a) < 2.0**-6, (a + 24576.0) - 24576.0, normal)  # multiples of 2^-9


@triton.jit
def nearest_e4m3(a):
    """The nearest float8_e4m3fn of float32, at most 448, ties to even."""
    if _INTERPRETED:  # its conversion rounds ties up and cuts small numbers off
        a = rounded_e4m3(a)
    return a.to(tl.float8e4nv)


@triton.jit
def nearest_bfloat16(a):
    """The nearest bfloat16 of finite float32, as float32, ties to even."""
    bits = a.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def sloped(slope, positions):
    """A slope of ALiBi times int positions, both rounded to bfloat16 (Falcon), float32."""
    return nearest_bfloat16(slope * nearest_bfloat16(positions.to(tl.float32)))


@triton.jit
def scale_of(most, CODES: tl.constexpr):
    """Scales of heads whose largest magnitudes are `most`, float32."""
    largest: tl.constexpr = 448.0 if CODES == "fp8_e4m3" else 127.0
    scale = tl.div_rn(most, tl.full(most.shape, largest, tl.float32))
    return tl.where(scale < _LEAST, 0.0, scale)


@triton.jit
def codes_by(x, scale, CODES: tl.constexpr):
    """Codes of heads x [rows, D], float32, by their scales [rows, 1], and what they mean.

    The meaning is rounded apart: ptxas of CUDA 12.8 loses registers where codes are made and read.
    """
    largest: tl.constexpr = 448.0 if CODES == "fp8_e4m3" else 127.0
    a = tl.div_rn(x, tl.broadcast_to(tl.where(scale == 0, 1.0, scale), x.shape))
    a = tl.minimum(tl.maximum(a, -largest), largest)
    if CODES == "fp8_e4m3":
        codes = nearest_e4m3(a).to(tl.uint8, bitcast=True)
        rounded = rounded_e4m3(a)
    else:
        rounded = nearest_integer(a)
        codes = rounded.to(tl.int8)
    return codes, rounded * scale


@triton.jit
def values_of(codes, dtype: tl.constexpr):
    """What codes mean before they are scaled; every dtype has these numbers."""
    if _INTERPRETED or dtype == tl.float32:
        if codes.dtype == tl.uint8:
            values = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
        else:
            values = codes.to(tl.float32).to(dtype)
    elif codes.dtype == tl.uint8:
        values = as_floats(codes, 0, "fp8_e4m3", dtype)
    else:
        values = codes.to(dtype)
    return values


def served_codes(capability: int) -> frozenset[str]:
    """Codes of a cache that kernels know on a GPU, 90 on Hopper: floats need its conversions."""
    return frozenset(_CODES.values()) if capability >= 89 else frozenset({"int8"})


def scale_arguments(cache: Any, scales: Any, dtype: Any) -> tuple[Any, Any, str | None]:
    """The scales of keys and values, and what their codes are, as kernels take them.

    `cache` are keys and values [..., D] with D contiguous, `scales` None or of the axes before, and
    `dtype` is that of the heads. Raises ValueError for what the kernels would misread.
    """
    if scales is None:
        for part in cache:
            if part.dtype != dtype:
                raise ValueError(
                    f"Heads are {dtype}, the cache {part.dtype}: without scales both are the same."
                )
        return None, None, None
    for part, scale in zip(cache, scales, strict=True):
        dim = part.shape[-1]
        if dtype_name(part.dtype) not in _CODES or part.dtype != cache[0].dtype:
            raise ValueError(f"A cache of {part.dtype} has scales; uint8 or int8 is expected.")
        if dtype_name(scale.dtype) != "float32" or tuple(scale.shape) != tuple(part.shape[:-1]):
            raise ValueError(
                f"scales are {tuple(scale.shape)} {scale.dtype}; float32 {tuple(part.shape[:-1])} "
                "is expected."
            )
        steps = zip(part.shape, part.stride()[:-1], scale.stride(), strict=False)
        if any(size > 1 and step != dim * its for size, step, its in steps):
            raise ValueError(
                f"scales have strides {scale.stride()}, and codes of heads of {dim} "
                f"{part.stride()}: expected the latter over {dim}."
            )
    return *scales, _CODES[dtype_name(cache[0].dtype)]
