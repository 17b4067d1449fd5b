"""Gumbel noise inside a kernel: threefry2x32 on 32-bit words, and a logarithm exact near 1."""

# Pyright knows device code as Python.
# pyright: reportArgumentType=false

import triton
import triton.language as tl

_LN2_HIGH = tl.constexpr(2839 / 4096)  # 12 bits: times an exponent it stays exact
_LN2_LOW = tl.constexpr(3.1946184945309417e-05)


@triton.jit
def _rounds(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0 = x0 + x1
    x1 = ((x1 << A) | (x1 >> (32 - A))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << B) | (x1 >> (32 - B))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << C) | (x1 >> (32 - C))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << D) | (x1 >> (32 - D))) ^ x0
    return x0, x1


@triton.jit
def threefry2x32(key0, key1, x0, x1):
    """Two random words from a key and a counter of two words each, all uint32.

    Threefry-2x32-20 of Salmon et al., 2011; see `ops/sampling.py`.
    """
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0, x1 = _rounds(x0 + key0, x1 + key1, 13, 15, 26, 6)
    x0, x1 = _rounds(x0 + key1, x1 + key2 + 1, 17, 29, 16, 24)
    x0, x1 = _rounds(x0 + key2, x1 + key0 + 2, 13, 15, 26, 6)
    x0, x1 = _rounds(x0 + key0, x1 + key1 + 3, 17, 29, 16, 24)
    x0, x1 = _rounds(x0 + key1, x1 + key2 + 4, 13, 15, 26, 6)
    return x0 + key2, x1 + key0 + 5


@triton.jit
def log(x):
    """The natural logarithm of float32, within about one unit; x positive and normal.

    The GPU's own `log` has only an absolute bound near 1, where the noise takes a logarithm of it.
    x = 2**e * (1 + f) with 1 + f in [0.707, 1.414); with s = f / (2 + f), log(1 + f) is
    2 (s + s**3/3 + s**5/5 + ...), of which 2s = f - s f.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = tl.fma(z, tl.fma(z, tl.fma(z, 2.0 / 9, 2.0 / 7), 2.0 / 5), 2.0 / 3)
    e = exponent.to(tl.float32)
    small = tl.fma(e, _LN2_LOW, -s * tl.fma(-z, series, f))
    return e * _LN2_HIGH + (f + small)


@triton.jit
def gumbel(seed_low, seed_high, return_index, position, ids):
    """Standard Gumbel noise float32 of the vocabulary `ids`; the rest are scalars."""
    key0, key1 = threefry2x32(
        seed_low.to(tl.uint32),
        seed_high.to(tl.uint32),
        return_index.to(tl.uint32),
        position.to(tl.uint32),
    )
    counter = ids.to(tl.uint32)
    bits, _ = threefry2x32(key0, key1, counter, counter ^ counter)
    # 23 bits and a half, so that neither 0 nor 1 occurs in float32.
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
    return -log(-log(uniform))
