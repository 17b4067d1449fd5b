"""Codes become floats by the PTX that kernels have on a GPU, run here by a simulator of it."""

import re

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl

from dualinfer.kernels.triton.conversions import _code
from dualinfer.kernels.triton.quantized_tiles import _product, _raised

from ..quantized import FP8, TABLES

HALF, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
dtypes = pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)


def run(code: str, dtype: np.dtype, outs: int, *inputs: np.ndarray) -> np.ndarray:
    """What `outs` registers hold, halves of them in order, [n, 2 * outs] of `dtype`.

    Inputs are words, uint32 [n], in the registers that follow.
    """
    known = {f"${outs + i}": word for i, word in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        return known[name] if name in known else np.full_like(inputs[0], int(name, 0))

    def halves(name: str) -> np.ndarray:
        return value(name).view(np.uint16).view(dtype).astype(np.float64)

    for step in re.sub(r"\.reg[^;]*;", "", code.strip("{} ")).split(";")[:-1]:
        name, _, rest = step.strip().partition(" ")
        to, *names = (part.strip() for part in rest.split(","))
        if name.startswith(("fma.rn", "mul.rn")):
            a, b, *added = map(halves, names)
            sums = (a * b + sum(added)).astype(dtype)
            known[to] = sums.view(np.uint16).view(np.uint32)
            continue
        a, *others = map(value, names)
        if name == "mov.b32":
            known[to] = a
        elif name == "and.b32":
            known[to] = a & others[0]
        elif name in ("shl.b32", "shr.u32"):
            known[to] = a << others[0] if name == "shl.b32" else a >> others[0]
        elif name == "prmt.b32":  # bytes of two registers, each by a digit
            lying = np.stack((a, others[0]), 1).view(np.uint8)
            digits = [int(names[2], 0) >> 4 * i & 15 for i in range(4)]
            known[to] = np.ascontiguousarray(lying[:, digits]).view(np.uint32)[:, 0]
        elif name == "lop3.b32":  # any function of three bits, by its table
            a, b, c = (np.unpackbits(word.view(np.uint8)) for word in (a, *others[:2]))
            known[to] = np.packbits(int(names[3], 0) >> (4 * a + 2 * b + c) & 1).view(np.uint32)
        else:
            raise ValueError(f"{name} is not simulated.")
    return np.stack([known[f"${i}"] for i in range(outs)], 1).view(np.uint16).view(dtype)


def meaning(codes: str, held: np.ndarray) -> np.ndarray:
    """What codes mean, as devices hold them, NaN where they are no number."""
    if codes in FP8:
        return held.view(FP8[codes]).astype(np.float32)
    if codes == "fp4_e2m1":
        return TABLES[codes][held]
    held = held.view(np.int8) if codes == "int8" else held
    return held.astype(np.float32) - (8 if codes == "int4" else 0)


@dtypes
@pytest.mark.parametrize("codes", ["int4", "uint4", "fp4_e2m1", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_every_code_becomes_what_it_means(codes, dtype):
    words = np.arange(1 << 16, dtype=np.uint32) * 0x10001 ^ np.uint32(0x9C530000)
    four = codes.endswith(("int4", "e2m1"))
    for wide in (False, True) if four else (False,):
        units = words.view(np.uint16 if wide else np.uint8)
        outs = 1 if wide else 2
        for part in range((4 if wide else 2) if four else 1):
            held = (units >> 4 * part & 15 if four else units).astype(np.uint8)
            expected = meaning(codes, held).reshape(len(words), 2 * outs)
            found = run(_code(codes, part, dtype == HALF, wide), dtype, outs, words)
            known = np.isfinite(expected)
            np.testing.assert_array_equal(found.astype(np.float32)[known], expected[known])


@dtypes
@pytest.mark.parametrize("scales", ["bfloat16", "float16", "float32", "float8_e8m0fnu"])
def test_values_times_a_scale_err_by_their_rounding(scales, dtype):
    """Small scales in float16, too, which has few bits of numbers below 2**-14."""
    about = scales, tl.float16 if dtype == HALF else tl.bfloat16
    s = 2.0 ** -np.linspace(1, 18, 4096, dtype=np.float32)
    if scales == "float8_e8m0fnu":
        s = 2.0 ** np.round(np.log2(s))
    else:
        s = s.astype(scales if scales != "bfloat16" else BFLOAT16).astype(np.float32)
    raised = s * np.float32(_raised(*about))
    high = raised.astype(dtype)
    low = (raised - high.astype(np.float32)).astype(dtype)
    high, low = (part.view(np.uint16) * np.uint32(0x10001) for part in (high, low))
    values = np.resize(np.arange(1, 256), (4096, 2)).astype(dtype)
    found = run(_product(*about), dtype, 1, values.view(np.uint32)[:, 0], high, high, low, low)
    expected = values.astype(np.float64) * s[:, None]
    error = np.abs(found.astype(np.float64) - expected)
    half = np.maximum(expected * float(ml_dtypes.finfo(dtype).eps) / 2, 2.0**-25)
    assert (error <= 1.1 * half + 2.0**-25).all()
