"""Products with few rows, bound by reading the weights, with norm, bias, activation and residual.

One row is a matrix-vector product on the plain cores: a program holds the whole row of x, and some
rows of the weights, in registers. More rows go to the matrix units. Sums that are split over
programs are joined in a fixed order, so that results are the same bits every time.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .activation import KINDS
from .launch import cdiv, launch, next_power_of_2
from .linear_kernels import matvec_kernel, tile_kernel

_NORMS = ("rms", "rms_offset", "layer")
MOST_ROWS = 128
MOST_VECTORS = 2
MOST_TILES = 4096
_LARGE, _SMALL, _SMALLEST = 8 << 20, 5 << 20, 3 << 19  # elements of a weight matrix
_MOST_ELEMENTS = 1 << 31  # that a kernel can address in one array
_WIDEST_IN_TURN = 14336  # elements of a row that is held beside the next one
_WIDEST = 1 << 16  # bytes of the power of two above a row of weights: what registers can hold


class VectorConfig(NamedTuple):
    """How the matrix-vector kernel runs: weight rows a program takes a turn, its warps, its turns.

    It serves up to MOST_VECTORS rows of x, one after another past the same weights.
    """

    rows: int
    warps: int
    turns: int = 1


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


def serves(count: int, features: int, width: int, itemsize: int, fused: bool) -> bool:
    """Whether `linear` is the one for `count` rows, or XLA's product, which is better at many.

    `fused`: a bias, an activation or a residual follows, which XLA would leave to a launch of its
    own. Measured on an H100, where cuBLAS is slow with rows that are no multiple of 16 bytes.
    """
    if count <= MOST_VECTORS and next_power_of_2(width) * itemsize > _WIDEST:
        return False
    if features * width >= _MOST_ELEMENTS:
        return False
    if count == 1 or itemsize == 4:
        return count == 1
    small = features * width <= (_SMALL if fused else _SMALLEST)
    return count <= 64 or (count <= MOST_ROWS and (small or features % 8 > 0))


class NormArguments(NamedTuple):
    """A norm over the rows of x: `rms`, `rms_offset` (times 1 + weight) or `layer`."""

    kind: str
    weight: Any
    bias: Any
    eps: float


def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    norm: NormArguments | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: jax.Array | None = None,
    dtype: Any = None,
    config: VectorConfig | TileConfig | None = None,
    counters: jax.Array | None = None,
    sms: int = 132,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """residual + activation(norm(x) weight^T + bias), x [..., in] to [..., out]; and `counters`.

    `weight` is [out, in]; with `gated` it holds gate, then up, and the result is activation(gate) *
    up, half as wide. All sums are in float32 and rounded once, to `dtype`, x's own if None. `norm`
    goes with up to MOST_VECTORS rows. `counters`, zeros int32 [MOST_TILES], lets sums be split over
    programs; those that come back are the same memory, again zeros, and belong to the next call.
    `sms` is the device's number of multiprocessors.
    """
    width = x.shape[-1]
    count = math.prod(x.shape[:-1])
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    _check(x, weight, bias, activation, gated, residual, norm, counters, count, features)
    y = jax.ShapeDtypeStruct((count, features), dtype or x.dtype)
    shape = (*x.shape[:-1], features)
    if not count * features:
        return jnp.zeros(shape, y.dtype), counters
    if config is None:
        config = default_config(count, features, width, x.dtype.itemsize, gated, sms)
    rows = x.reshape(count, width)
    residual = None if residual is None else residual.reshape(count, features)
    if isinstance(config, VectorConfig):
        kind, norm_weight, norm_bias, eps = norm or (None, None, None, 0.0)
        kernel = matvec_kernel(
            *(count, features, width),
            rows=config.rows,
            turns=config.turns,
            norm=kind,
            eps=eps,
            activation=activation,
            gated=gated,
        )
        (result,) = launch(
            kernel,
            (cdiv(features, config.rows * config.turns),),
            *(rows, weight, bias, residual, norm_weight, norm_bias),
            out=[y],
            warps=config.warps,
            interpret=interpret,
        )
        return result.reshape(shape), counters
    if norm is not None:
        raise ValueError(f"{config} has no place for a norm; a VectorConfig has.")
    tiles = cdiv(count, config.m), cdiv(features, config.n)
    turns = cdiv(width, config.k)
    split = counters is not None and math.prod(tiles) <= counters.size
    share = cdiv(turns, min(config.splits if split else 1, turns))
    splits = cdiv(turns, share)  # none is left without work
    kernel = tile_kernel(
        *(count, features, width),
        m=config.m,
        n=config.n,
        k=config.k,
        splits=splits,
        share=share,
        activation=activation,
        gated=gated,
        interpret=interpret,
    )
    args, out, aliases = [rows, weight, bias, residual], [y], {}
    if counters is not None and splits > 1:
        parts = math.prod(tiles) * splits * (2 if gated else 1)
        out += [
            jax.ShapeDtypeStruct((parts, config.m, config.n), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
        ]
        args, aliases = [*args, counters], {len(args): 2}
    result, *more = launch(
        kernel,
        (*tiles, splits),
        *args,
        out=out,
        warps=config.warps,
        stages=config.stages,
        aliases=aliases,
        interpret=interpret,
    )
    return result.reshape(shape), more[1] if more else counters


def default_config(
    count: int, features: int, width: int, itemsize: int, gated: bool, sms: int
) -> VectorConfig | TileConfig:
    """A configuration for a shape that nobody measured, after those that were, on an H100."""
    if count <= MOST_VECTORS:
        wide = next_power_of_2(width)
        large = features * wide * (2 if gated else 1) >= _LARGE
        if count == 1 and itemsize == 2 and large and wide >= 2048 and width <= _WIDEST_IN_TURN:
            return _in_turn(features, width, gated, sms)
        if itemsize == 2 and ((gated and wide == 4096) or (features >= 256 * sms and wide >= 2048)):
            return VectorConfig(max(1, min(2, 8192 // wide)), 8)
        elements = wide * (2 if gated else 1)
        most = 16384 // itemsize  # elements of a program of 4 warps
        rows = max(1, min(8, most // elements))
        # Small programs, and many of them, until each reads next to nothing.
        while rows > 1 and features // rows < (8 if 2 * rows * elements <= most else 32) * sms:
            rows //= 2
        return VectorConfig(rows, max(4, min(16, 4 * rows * elements // most)))
    if itemsize == 4:
        return TileConfig(32, 32, 32, 4, 2)
    if count > 64:
        if features >= 128 * sms:
            return TileConfig(128, 64, 64, 4, 3)
        if features >= 24 * sms:
            return TileConfig(64, 32, 128, 4, 3)
        if width <= 2048:
            return TileConfig(64, 16 if features <= 16 * sms else 32, 128, 4, 4)
        return TileConfig(64, 32, 128, 4, 4, 4)
    m = 16 if count <= 16 else 32 if count <= 32 else 64
    if features >= 96 * sms:
        return TileConfig(16, 32, 256, 4, 3) if m == 16 else TileConfig(m, 64, 128, 4, 4)
    tiles = cdiv(count, m) * cdiv(features, 32)
    splits = max(1, min(round(1.5 * sms / tiles), width // 1024, 4))
    return TileConfig(m, 32, 128, 4, 4, splits)


def _in_turn(features: int, width: int, gated: bool, sms: int) -> VectorConfig:
    """A configuration for one row of two-byte x and a large matrix, after H100s and H200s."""
    wide = next_power_of_2(width)
    if gated:
        return VectorConfig(1, 8, 2)
    if features >= 40 * sms:
        return VectorConfig(max(1, min(4, 16384 // wide)), 8, 2)
    # Few rows: four programs an SM, which all run at once; of wide rows eight, of twice the warps.
    rows, warps = max(1, 4096 // wide), 16 if width > 12288 else 8
    turns = 2 * features / (rows * warps * sms)
    return VectorConfig(rows, warps, 1 << min(3, max(0, round(math.log2(turns)))))


def _check(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: str | None,
    gated: bool,
    residual: jax.Array | None,
    norm: NormArguments | None,
    counters: jax.Array | None,
    count: int,
    features: int,
) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    width = x.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != width:
        raise ValueError(f"weight {weight.shape} does not fit x {x.shape}: [out, {width}] would.")
    if max(x.size, weight.size, count * features) >= _MOST_ELEMENTS:
        raise ValueError(
            f"x {x.shape} and weight {weight.shape}: an array of 2**31 elements or more was met, "
            "which the kernels cannot address."
        )
    if gated and (weight.shape[0] % 2 or activation is None):
        raise ValueError(
            f"A gated product needs an activation and an even number of rows, gate and up; it has "
            f"{activation!r} and {weight.shape[0]}."
        )
    if activation is not None and activation not in KINDS:
        raise ValueError(f"The activation is {activation!r}; one of {', '.join(KINDS)} is known.")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias {bias.shape} does not fit weight {weight.shape}.")
    if residual is not None and residual.shape != (*x.shape[:-1], features):
        expected = (*x.shape[:-1], features)
        raise ValueError(f"residual is {residual.shape}; {expected} is expected.")
    if weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; one dtype is expected.")
    if counters is not None and (counters.ndim != 1 or counters.dtype != jnp.int32):
        raise ValueError(
            f"counters are {counters.dtype} {counters.shape}; int32 ({MOST_TILES},) is expected."
        )
    if norm is not None:
        _check_norm(norm, count, width)


def _check_norm(norm: NormArguments, count: int, width: int) -> None:
    if count > MOST_VECTORS:
        raise ValueError(
            f"x has {count} rows; a norm is fused into the product of at most {MOST_VECTORS}."
        )
    if norm.kind not in _NORMS:
        raise ValueError(f"The norm is {norm.kind!r}; one of {', '.join(_NORMS)} is known.")
    if (norm.bias is not None) != (norm.kind == "layer"):
        raise ValueError("A norm of kind 'layer' has a bias, and no other has.")
    for part in (norm.weight, norm.bias):
        if part is not None and part.shape != (width,):
            raise ValueError(f"The norm's weights are {part.shape}; ({width},) is expected.")
