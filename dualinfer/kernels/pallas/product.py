"""Products of few rows with a matrix of floats or codes, and all that goes with them.

The matrix is read once, in blocks of its rows, by a kernel that holds all rows of x. Codes are
multiplied as they are, block by block of a scale; sums take scales and zeros.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import LANES, Block, dot, held_bytes, rounded_up, run, sublanes

MOST_ROWS = 256  # of x
_BLOCK = 2 << 20  # bytes of the matrix that a program reads
_WIDEST = 1024  # results of a program
_MOST_SCALES = 32  # of a row in a block: each has a product of its own
_KNOWN = ("int8", "uint8", "int4", "uint4", "fp4_e2m1", "table", "fp8_e4m3", "fp8_e5m2")
PACKED_KINDS = ("int4", "uint4", "fp4_e2m1", "table")  # two codes a byte
_PACKED = 32  # columns of 4-bit codes that lie together, see `quantization.packing`
_LEAST = 16  # of a scale


class Codes(NamedTuple):
    """A matrix [out, width] of codes: see `model.weights.Weight`.

    `data` uint8 or int8 [out, bytes]; `scale` float [out, G] and `zero` [out, G] of each row's
    blocks of `columns` columns, 0 for all, and `outer` [out] lie beside it. Codes are `raised` by
    so much; those of kind "table" are places in `table`. With `shared` that many rows have one
    scale, [out / shared, G], as `shares` says that they may.
    """

    data: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    outer: jax.Array | None
    kind: str
    columns: int
    width: int
    raised: int = 0
    table: tuple[float, ...] = ()
    shared: int = 1


class Blocks(NamedTuple):
    """The block of the matrix that a program reads: so many rows and columns."""

    rows: int
    columns: int


def blocks_of(features: int, width: int, itemsize: int, parts: int, least: int = LANES) -> Blocks:
    """Blocks of a matrix of `parts` times `features` rows of `width` elements.

    Columns are cut into multiples of `least` where a row is too long.
    """
    rows = min(_WIDEST, rounded_up(features, LANES))
    while rows > LANES and parts * rows * width * itemsize > _BLOCK:
        rows = max(LANES, rounded_up(rows // 2, LANES))
    columns = width
    if parts * rows * width * itemsize > 2 * _BLOCK:
        fit = [n for n in range(least, width, least) if width % n == 0]
        fit = [n for n in fit if parts * rows * n * itemsize <= _BLOCK]
        columns = max(fit, default=width)
    return Blocks(min(rows, features), columns)


def product(
    x: jax.Array,
    matrix: jax.Array | Codes,
    *,
    dtype: Any,
    bias: jax.Array | None = None,
    norm: Callable[..., jax.Array] | None = None,
    norm_weights: Sequence[jax.Array] = (),
    activation: Callable[[jax.Array], jax.Array] | None = None,
    gated: bool = False,
    residual: jax.Array | None = None,
    interpret: bool,
) -> jax.Array:
    """residual + activation(norm(x) matrix^T + bias): [M, out] in `dtype`, of x [M, width].

    All in float32 until the result is rounded. With `gated` the matrix holds gate, then up, and the
    result is activation(gate) * up. `norm` takes rows and `norm_weights` as `norm.norm` has them,
    and x is as wide as one block of the matrix then: see `norms`.
    """
    count, width = x.shape
    codes = matrix if isinstance(matrix, Codes) else None
    data: Any = codes.data if codes else matrix
    parts = 2 if gated else 1
    features = data.shape[0] // parts
    rows, columns = blocks_at(x, matrix, parts)
    planes, groups = (1, 1) if codes is None else planes_and_groups(codes, columns)
    steps = width // columns
    held = data.shape[1] // steps  # elements of a row of data in a block
    m = rounded_up(count, sublanes(x.dtype))
    x = jnp.pad(x, ((0, m - count), (0, 0)))
    if residual is not None:
        residual = jnp.pad(residual, ((0, m - count), (0, 0)))

    x4 = as_planes(x, columns, planes)
    inputs = [Block(x4, x4.shape, lambda i, j: (0, 0, 0, 0))]
    shaped = data.reshape(parts, features, data.shape[1])
    inputs.append(Block(shaped, (parts, rows, held), lambda i, j: (0, i, j)))

    def of_rows(array: jax.Array, steps: int = 1, shared: int = 1) -> Block:
        """Scales of rows, for each block of columns or one for all: float [out, any]."""
        array = array.reshape(parts, features // shared, -1)
        array, shape, number = scales(array, rows, steps, shared)
        return Block(array, (parts, *shape), lambda i, j: (0, *number(i, j)))

    names = ["x", "data"]
    if codes is not None:
        own = steps if codes.columns else 1
        for name, array in (("scale", codes.scale), ("zero", codes.zero)):
            if array is not None:
                inputs.append(of_rows(array, own, codes.shared))
                names.append(name)
        if codes.outer is not None:
            inputs.append(of_rows(codes.outer))
            names.append("outer")
    if bias is not None:
        inputs.append(Block(bias.reshape(parts, 1, features), (parts, 1, rows), _results))
        names.append("bias")
    for i, weight in enumerate(norm_weights):
        inputs.append(Block(weight.reshape(1, width), (1, width), lambda i, j: (0, 0)))
        names.append(f"norm{i}")
    if residual is not None:
        inputs.append(Block(residual, (m, rows), lambda i, j: (0, i)))
        names.append("residual")
    assert norm is None or (steps == 1 and planes == 1)

    transposed = codes is not None
    shape = (parts, rows, m) if transposed else (parts, m, rows)
    scratch: list[tuple[tuple[int, ...], Any]] = [(shape, jnp.float32)]
    if norm is not None:
        scratch.append(((m, width), x.dtype))

    def body(*refs: Any) -> None:
        ref = dict(zip([*names, "out", "sums", "normed"], refs, strict=False))
        i, j = pl.program_id(0), pl.program_id(1)
        sums = ref["sums"]

        @pl.when(j == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        if norm is not None:

            @pl.when(i == 0)
            def _() -> None:
                gains = [ref[f"norm{n}"][...].astype(jnp.float32) for n in range(len(norm_weights))]
                assert norm is not None
                y = norm(ref["x"][0, 0].astype(jnp.float32), *gains)
                ref["normed"][...] = y.astype(x.dtype)

        for part in range(parts):
            if codes is None:
                own = ref["normed"][...] if norm is not None else ref["x"][j, 0]
                sums[part] += dot(own, ref["data"][part])
            else:
                sums[part] += of_codes(codes, ref, part, j, groups, x.dtype)

        @pl.when(j == steps - 1)
        def _() -> None:
            found = []
            for part in range(parts):
                y = sums[part]
                if codes is not None and codes.outer is not None:
                    y = y * _of_rows(ref["outer"][part], codes.outer, 1)
                y = y.T if transposed else y
                if "bias" in ref:
                    y = y + ref["bias"][part].astype(jnp.float32)
                found.append(y)
            y = found[0] if activation is None else activation(found[0])
            if gated:
                y = y * found[1]
            if "residual" in ref:
                y = ref["residual"][...].astype(jnp.float32) + y
            ref["out"][...] = y.astype(dtype)

    out = jax.ShapeDtypeStruct((m, features), dtype)
    (y,) = run(
        body,
        "product",
        (pl.cdiv(features, rows), steps),
        inputs,
        [Block(out, (m, rows), lambda i, j: (0, i))],
        scratch=scratch,
        parallel=[norm is None, False],
        between=0 if codes is None else between(codes, parts * rows, columns),
        flops=2 * count * parts * features * width,
        interpret=interpret,
    )
    return y[:count]


def scales(
    array: jax.Array, rows: int, steps: int, shared: int
) -> tuple[jax.Array, tuple[int | None, ...], Callable[..., tuple[Any, ...]]]:
    """Scales or zeros [N, out / shared, G] as kernels load them, of `steps` blocks of columns.

    Beside them the block of `rows` rows and one step, without N, and its number by those of both.
    They lie with rows of the matrix side by side: so a chip holds an array of few columns, and it
    would fill each row's up to 128.
    """
    count, features, _ = (array := loadable(array)).shape
    if shared > 1:
        array = array.reshape(count, features, steps, 1, -1).swapaxes(1, 2)
        shape = (None, rows // shared, 1, array.shape[-1])
        return array, shape, lambda i, j: (j if steps > 1 else 0, i, 0, 0)
    array = array.swapaxes(1, 2).reshape(count, steps, -1, features)
    return array, (None, array.shape[2], rows), lambda i, j: (j if steps > 1 else 0, 0, i)


def shares(rows: int, features: int) -> bool:
    """True if `Codes` of a part of so many features may have one scale for `rows` rows each."""
    return rows == LANES and features % rows == 0


def as_planes(x: jax.Array, columns: int, planes: int) -> jax.Array:
    """x [M, width] as [steps, planes, M, columns of a plane], as blocks of codes lie.

    Steps are blocks of `columns` columns. Of two planes one is multiplied with the low 4 bits of
    each byte, and the other with the high ones.
    """
    m, width = x.shape
    steps = width // columns
    if planes == 1:
        return x.reshape(m, steps, 1, columns).transpose(1, 2, 0, 3)
    quads = x.reshape(m, width // _PACKED, 4, 2, 4)  # column 8 i + 4 half + c of 32
    halves = quads.transpose(3, 0, 1, 4, 2).reshape(2, m, steps, columns // 2)
    return halves.transpose(2, 0, 1, 3)


def planes_of(codes: Codes) -> int:
    """Planes of x, see `as_planes`."""
    return 2 if _is_packed(codes) else 1


def planes_and_groups(codes: Codes, columns: int) -> tuple[int, int]:
    """Planes of x, and scales of a row in a block of so many columns."""
    return planes_of(codes), columns // codes.columns if codes.columns else 1


def norms(x: jax.Array, matrix: jax.Array | Codes, gated: bool) -> bool:
    """True if a product can norm rows of x itself."""
    if isinstance(matrix, Codes) or held_bytes(x.shape, x.dtype) > 2 * _BLOCK:
        return False
    return blocks_at(x, matrix, 2 if gated else 1).columns == x.shape[1]


def serves(count: int, matrix: jax.Array | Codes, gated: bool, itemsize: int) -> bool:
    """True if the kernel multiplies so many rows with a matrix, and has room for them."""
    codes = matrix if isinstance(matrix, Codes) else None
    features = (codes.data if codes else _floats(matrix)).shape[0] // (2 if gated else 1)
    if features < 2:  # Mosaic has no product with a single row in 16 bits
        return False
    if count > MOST_ROWS or (codes and (codes.kind not in _KNOWN or _is_ragged(codes))):
        return False
    dtype = jnp.bfloat16 if itemsize == 2 else jnp.float32
    width = codes.width if codes else _floats(matrix).shape[1]
    x = jax.ShapeDtypeStruct((rounded_up(count, sublanes(dtype)), width), dtype)
    at = blocks_at(x, matrix, 2 if gated else 1)
    block = 2 * at.rows * at.columns * (1 if codes else itemsize)
    return held_bytes(x.shape, dtype) <= 4 * _BLOCK and block <= 4 * _BLOCK


def blocks_at(x: Any, matrix: jax.Array | Codes, parts: int) -> Blocks:
    """Blocks of a matrix for a product with all of x, whose shape alone is read."""
    width = x.shape[1]
    if not isinstance(matrix, Codes):
        return blocks_of(matrix.shape[0] // parts, width, matrix.dtype.itemsize, parts)
    features = matrix.data.shape[0] // parts
    least = LANES * (2 if _is_packed(matrix) else 1)
    if not matrix.columns:
        return blocks_of(features, width, 1, parts, least)
    unit = math.lcm(least, matrix.columns)
    most = _MOST_SCALES * max(matrix.columns, _PACKED)
    fit = [n for n in range(unit, width, unit) if width % n == 0 and n <= most]
    columns = width if width <= most else max(fit, default=width)
    return Blocks(blocks_of(features, columns, 1, parts, columns).rows, columns)


def _floats(matrix: Any) -> jax.Array:
    return matrix


def _results(i: Any, j: Any) -> tuple[Any, ...]:
    return 0, 0, i


def _is_packed(codes: Codes) -> bool:
    return codes.kind in PACKED_KINDS


def _is_ragged(codes: Codes) -> bool:
    """True if codes lie otherwise than the kernel takes them: blocks or rows with padding."""
    own = codes.columns or codes.width
    if _is_packed(codes) and (own % _LEAST or codes.width % _PACKED):
        return True
    return bool(codes.width % own)


def of_codes(
    codes: Codes, ref: dict[str, Any], part: int, j: Any, groups: int, dtype: Any
) -> jax.Array:
    """Sums [rows, m] of a block of codes times x, with scales and zeros.

    Of few columns a scale meets the codes, and of more the sums of these.
    """
    data = ref["data"][part]
    planes = _planes(codes, data)
    own = planes[0].shape[1] // groups
    scale, zero = _of_rows(ref["scale"][part], codes.scale, codes.shared), None
    if codes.zero is not None:
        zero = _of_rows(ref["zero"][part], codes.zero, codes.shared)
    total = jnp.zeros((data.shape[0], ref["x"].shape[2]), jnp.float32)
    if _is_packed(codes) and 0 < codes.columns < _PACKED:
        for plane, values in enumerate(planes):
            if zero is not None:
                values = values - _spread(zero)
            total = total + dot((values * _spread(scale)).astype(dtype), ref["x"][j, plane])
        return total
    for g in range(groups):
        cut = slice(g * own, (g + 1) * own)
        y: Any = None
        for plane, values in enumerate(planes):
            rows = ref["x"][j, plane][:, cut]
            part_of_sum = dot(values[:, cut].astype(dtype), rows)
            if zero is not None:
                ones = jnp.ones((1, own), dtype)
                part_of_sum = part_of_sum - zero[:, g : g + 1] * dot(ones, rows)
            y = part_of_sum if y is None else y + part_of_sum
        total = total + y * scale[:, g : g + 1]
    return total


def _of_rows(x: jax.Array, array: jax.Array, shared: int) -> jax.Array:
    """Scales of each row, float32 [rows, G], of what was loaded of `scales` of an array."""
    x = widened(x, array)
    if shared == 1:
        return x.T
    count, _, groups = x.shape
    return jnp.broadcast_to(x, (count, shared, groups)).reshape(count * shared, groups)


def _spread(x: jax.Array) -> jax.Array:
    """Numbers [rows, G] of 16 columns each, for the codes of a plane: float32 [rows, 8 G].

    Of 32 columns a plane has 16, by turns two of the first half and two of the other. By a product,
    since no chip repeats.
    """
    shape = x.shape[1] * 8, x.shape[1]
    at, own = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    number = 2 * jax.lax.div(at, jnp.int32(16)) + jax.lax.div(at & 3, jnp.int32(2))
    return dot(x, (number == own).astype(jnp.float32))


def between(codes: Codes, rows: int, columns: int) -> int:
    """Bytes of the float32 that a program makes of codes and scales, as Mosaic's compiler holds it.

    Those of a block of so many rows, of all parts, and columns.
    """
    groups = columns // codes.columns if codes.columns else 1
    made = 2 * held_bytes((rows, groups), jnp.float32) * (2 if codes.zero is not None else 1)
    return made + rows * columns * (12 if codes.kind in ("fp4_e2m1", "table") else 6)


def _planes(codes: Codes, data: jax.Array) -> list[jax.Array]:
    """Codes as float32, of 4 bits the low and the high ones of each byte."""
    if codes.kind.startswith("fp8"):
        return [float8(data, codes.kind)]
    wide = data.astype(jnp.int32)
    if not _is_packed(codes):
        return [wide.astype(jnp.float32)]
    wide = wide & 0xFF
    if codes.kind == "fp4_e2m1":
        return [_float4(x) for x in (wide & 15, wide >> 4)]
    if codes.kind == "table":
        return [_looked_up(x, codes.table) for x in (wide & 15, wide >> 4)]
    return [(x - codes.raised).astype(jnp.float32) for x in (wide & 15, wide >> 4)]


def _float4(codes: jax.Array) -> jax.Array:
    """float32 of int32 that are floats of 4 bits, e2m1."""
    size = (codes & 7).astype(jnp.float32)
    values = jnp.where(size < 4, size / 2, jnp.where(size < 6, size - 2, 2 * size - 8))
    return jnp.where(codes >= 8, -values, values)


def _looked_up(codes: jax.Array, table: Sequence[float]) -> jax.Array:
    """float32 of int32 that are places in a table."""
    values = jnp.full(codes.shape, table[0], jnp.float32)
    for place, value in enumerate(table[1:], 1):
        values = jnp.where(codes == place, value, values)
    return values


def float8(data: jax.Array, kind: str) -> jax.Array:
    """float32 of bytes that are floats of 8 bits, by integers alone: every chip has these."""
    mantissa, bias = (3, 7) if kind == "fp8_e4m3" else (2, 15)
    return _by_integers(data.astype(jnp.int32) & 0xFF, 8, mantissa, bias, kind != "fp8_e4m3")


def loadable(array: jax.Array) -> jax.Array:
    """An array as kernels load it: no chip loads float16, whose bits are int16 then."""
    if array.dtype != jnp.float16:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.int16)


def widened(values: jax.Array, array: jax.Array) -> jax.Array:
    """float32 of what a kernel loaded of `loadable(array)`."""
    if array.dtype != jnp.float16:
        return values.astype(jnp.float32)
    return _by_integers(values.astype(jnp.int32) & 0xFFFF, 16, 10, 15, True)


def _by_integers(bits: jax.Array, width: int, mantissa: int, bias: int, has_inf: bool) -> jax.Array:
    """float32 of int32 whose low `width` bits are a float, with infinity or, above all, NaN."""
    sign, most = 1 << (width - 1), (1 << mantissa) - 1
    size = bits & (sign - 1)
    normal = (size << (23 - mantissa)) + ((127 - bias) << 23)
    values = jax.lax.bitcast_convert_type(normal, jnp.float32)
    small = size.astype(jnp.float32) * 2.0 ** (1 - bias - mantissa)
    values = jnp.where(size <= most, small, values)
    if has_inf:
        top = (sign - 1) & ~most
        values = jnp.where(size == top, jnp.inf, jnp.where(size > top, jnp.nan, values))
    else:
        values = jnp.where(size == sign - 1, jnp.nan, values)
    return jnp.where(bits >= sign, -values, values)
