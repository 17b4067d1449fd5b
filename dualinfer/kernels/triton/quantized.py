"""Products with quantized weights, which read their codes as they lie, and matrices made of them.

What `linear.py` does with weights of 16 bits: one row of x is a matrix-vector product on the plain
cores, more rows go to the matrix units, and norm, bias, activation, gate and residual are fused.
Codes become values in registers. Prompts' products take the matrix that `values` makes.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import triton

from . import linear as plain
from .fragment_kernel import fragment_kernel
from .launch import launch, next_power_of_2
from .linear import MOST_TILES, NormArguments
from .operands import as_words, dtype_name, empty
from .quantized_kernels import matvec_kernel, stream_kernel, values_kernel
from .quantized_tiles import order_kernel, tile_kernel, unit_bytes
from .tunable import Key, Kind, Tunable, powers

MOST_ROWS = 128  # of x; more are multiplied with a matrix that `values` makes
_HALF = 16  # columns of half a quad of 4-bit codes: the smallest groups, NVFP4's
MASK = 0xF000  # of a nibble; see `quantized_kernels._nibble`
_MASKS = 0x000F000F  # of two
_VALUE_MASKS = 0x01C001C0  # of the bits of two bfloat16s that have those of a float of 4 bits
_MANY_REGISTERS = 200  # of a thread; above, ptxas would put some into local memory
_WIDEST_PRODUCTS = 32  # columns of products of one fragment of codes
MOST_QUADS = 512  # quads of a row of x that the default keeps in registers
_ORDERED = 2048  # columns of a row of x that a program puts in order
_WIDE = 8192  # columns of a row that make tiles of twice as many results worth it
_VALUES = 4096  # codes that a program of `values` reads


class Packed(NamedTuple):
    """A quantized matrix [out, width] as a backend holds it: see `model.weights.Weight`.

    `data` are codes, a byte each or packed, uint8 or int8 [out, bytes]; `scale` and `zero` [blocks,
    blocks] and `outer` [out] lie beside it. `rows` and `columns` are those of a block, 0 for all.
    """

    data: Any
    scale: Any
    zero: Any
    outer: Any
    codes: str
    scale_dtype: str
    rows: int
    columns: int
    width: int
    table: tuple[float, ...] = ()

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return bits_of(self.codes)


def bits_of(codes: str) -> int:
    """Bits of a code of a kind."""
    return 8 if codes.startswith(("int8", "uint8", "fp8")) else 4


def serves(codes: str, columns: int, zeros: bool) -> bool:
    """True if the kernels know such codes, in blocks of so many columns, 0 for all."""
    quad = 128 // bits_of(codes)
    return codes in _CODES and (columns % quad == 0 or (columns == _HALF and not zeros))


class QuantizedStreamConfig(NamedTuple):
    """How the kernel runs that keeps one row of x in registers: `rows` results at a time.

    `programs` on each multiprocessor go through all of them, the whole width at once.
    """

    rows: int
    warps: int
    programs: int


class QuantizedVectorConfig(NamedTuple):
    """How the matrix-vector kernel runs: `rows` results a program, `quads` of 16 bytes at a time.

    `splits` programs share the sums of the same results.
    """

    rows: int
    quads: int
    warps: int
    splits: int = 1


class QuantizedTileConfig(NamedTuple):
    """Tile of the matrix-unit kernel: `m` rows of x by `n` results, `quads` at a time."""

    m: int
    n: int
    quads: int
    warps: int
    stages: int
    splits: int = 1


class QuantizedFragmentConfig(NamedTuple):
    """How the kernel runs that takes few rows of x to the matrix units: `tiles` of 16 results.

    Each of the `warps` of a program sums `chunks` of 64 bytes of each row of codes at a time;
    `programs` on each multiprocessor go through all results.
    """

    warps: int
    tiles: int
    chunks: int
    programs: int


QuantizedConfig: TypeAlias = (
    QuantizedStreamConfig | QuantizedVectorConfig | QuantizedTileConfig | QuantizedFragmentConfig
)


def linear(
    x: Any,
    weight: Packed,
    bias: Any = None,
    *,
    norm: NormArguments | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: Any = None,
    dtype: Any = None,
    config: QuantizedConfig | None = None,
    counters: Any = None,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """`linear.linear` of the matrix that `weight` stands for; its rows may be up to MOST_ROWS.

    Values are exact in float32 where x is. Else each product errs by less than x's own rounding,
    or, where tiles go to the matrix units, by that of values times scales of groups to x's dtype.
    """
    width = x.shape[-1]
    count = x.numel() // width
    stored = weight.data.shape[0]
    features = stored // 2 if gated else stored
    _check(x, weight, count)
    plain.check_epilogue(x, stored, bias, activation, gated, residual, norm, features)
    y = empty(x, (*x.shape[:-1], features), dtype_name(dtype or x.dtype))
    if y.numel() == 0:
        return y
    if config is None:
        key = tuning_key(count, features, weight, x.element_size(), gated, norm is not None)
        config = default_config(key, sms)
    rows = x.reshape(count, width)
    residual = None if residual is None else residual.reshape(count, features)
    arrays, ends = (rows, *arrays_of(weight)), (bias, residual)
    meant = constants_of(weight)
    how = {"ACTIVATION": activation, "GATED": gated, "num_warps": config.warps, "pdl": pdl}
    kind, *norm_arrays, eps = norm or (None, None, None, 0.0)
    quads = triton.cdiv(width, 128 // weight.bits)
    if isinstance(config, QuantizedStreamConfig):
        launch(
            stream_kernel,
            (min(triton.cdiv(features, config.rows), sms * config.programs),),
            *(*arrays, *ends, *norm_arrays, y, features, eps, MASK),
            **{**meant, "ROWS": config.rows, "QUADS": next_power_of_2(quads), "NORM": kind, **how},
        )
        return y
    strides = rows.stride(0), 0 if residual is None else residual.stride(0)
    if isinstance(config, QuantizedFragmentConfig):
        key = tuning_key(count, features, weight, x.element_size(), gated, norm is not None)
        if not _fits(key, config):
            raise ValueError(f"{config} does not serve {x.dtype} and {key}.")
        columns, groups, slots = columns_of_products(
            count, weight.bits, weight.columns, config.chunks
        )
        turns = triton.cdiv(quads, 4 * config.warps * config.chunks)
        # Codes of two turns are held where that was measured, and faster, and with x of two.
        one = count == 1 and (weight.bits == 4 or (norm is None and turns > 2))
        two = one and (weight.columns != _HALF or turns > 2)
        two = two or (norm is not None and turns == 2)
        kept = _kept_turns(key, config) if two else int(turns == 1)
        blocks = triton.cdiv(features, config.tiles * (8 if gated else 16))
        meant |= {"N": columns, "PARTS": groups, "SLOTS": slots, "TURNS": turns, "KEPT": kept}
        how |= most_registers(config.warps, config.programs) if one else {}
        launch(
            fragment_kernel,
            (min(blocks, sms * config.programs),),
            *(*arrays, *ends, *norm_arrays, y, count, features, *strides, eps),
            masks_of(weight, x, norm is not None),
            **{**meant, "B": config.warps, "M": config.tiles, "T": config.chunks},
            **{"TWO": two, "NORM": kind, **how},
        )
        return y
    parts, at_once = 2 if gated else 1, config.quads
    turns = triton.cdiv(quads, at_once)
    if isinstance(config, QuantizedVectorConfig):
        tiles, area = (triton.cdiv(features, config.rows),), config.rows * parts
    else:
        tiles = triton.cdiv(count, config.m), triton.cdiv(features, config.n)
        area = config.m * config.n * parts
    alone = counters is None or norm is not None or math.prod(tiles) > MOST_TILES
    share = triton.cdiv(turns, 1 if alone else min(config.splits, turns))
    splits = triton.cdiv(turns, share)  # none is left without work
    partial = empty(counters, (math.prod(tiles) * splits * area,), "float32") if splits > 1 else y
    meant |= {"QUADS": at_once, "TURNS": share, "SPLITS": splits}
    if isinstance(config, QuantizedVectorConfig):
        launch(
            matvec_kernel,
            (*tiles, splits),
            *(*arrays, *ends, *norm_arrays, y, partial, counters, features, eps, MASK),
            **{**meant, "ROWS": config.rows, "NORM": kind, **how},
        )
        return y
    if norm is not None:
        raise ValueError(f"{config} has no place for a norm; those of one row have.")
    if weight.bits == 4:
        rows = in_order_of_nibbles(rows, weight, at_once, pdl)
        strides = rows.stride(0), strides[1]
    launch(
        tile_kernel,
        (*tiles, splits),
        *(rows, weight.data, *arrays[2:], *ends, y, partial, counters, count, features, *strides),
        **{**meant, "BLOCK_M": config.m, "BLOCK_N": config.n, "STAGES": config.stages, **how},
        # Small programs that start early gather, two by two, where the kernel in front has ended.
        early=config.warps > 4 or math.prod(tiles) * splits >= 2 * sms,
    )
    return y


def values(weight: Packed, like: Any, dtype: Any = None, pdl: bool = False, out: Any = None) -> Any:
    """The matrix [out, width] that a weight stands for, in `dtype`, by default that of `like`.

    It is written to `out`, contiguous, if that is given.
    """
    features = weight.data.shape[0]
    y = like.new_empty((features, weight.width), dtype=dtype or like.dtype) if out is None else out
    per = 128 // weight.bits
    quads = min(next_power_of_2(triton.cdiv(weight.width, per)), 64)
    rows = max(1, _VALUES // (quads * per))
    grid = triton.cdiv(features, rows), triton.cdiv(weight.width, quads * per)
    launch(
        values_kernel,
        grid,
        *(*arrays_of(weight), y, features),
        **{**constants_of(weight), "ROWS": rows, "QUADS": quads, "num_warps": 4, "pdl": pdl},
    )
    return y


def in_order_of_nibbles(x: Any, weight: Packed, quads: int, pdl: bool) -> Any:
    """Rows of x [rows, K] as tiles that read so many quads of 4-bit codes at once want them."""
    count, width = x.shape
    wide, each = unit_bytes(4, weight.columns), 32 * quads
    blocks = triton.cdiv(width, each)
    y = x.new_empty((count, blocks * each))
    at_once = max(1, min(next_power_of_2(blocks), _ORDERED // each))
    grid = count, triton.cdiv(blocks, at_once)
    meant = {"K": width, "WIDE": wide, "UNITS": 16 * quads // wide, "BLOCKS": at_once}
    launch(order_kernel, grid, x, y, x.stride(0), **{**meant, "num_warps": 4, "pdl": pdl})
    return y


def arrays_of(weight: Packed) -> tuple[Any, ...]:
    """What the kernels get of a weight: its codes as words, where rows begin at a word."""
    data = weight.data
    if weight.bits == 4 or weight.width % 16 == 0:
        data = as_words(data)
    return data, weight.scale, weight.zero, weight.outer


def masks_of(weight: Packed, x: Any, normed: bool = False) -> int:
    """What kernels of fragments keep in a register to make codes values: see their `_pair`."""
    half = normed or dtype_name(x.dtype) == "float16"
    return _VALUE_MASKS if weight.codes == "fp4_e2m1" and not half else _MASKS


def raises_inputs(weight: Packed, x: Any) -> bool:
    """True if kernels of fragments want x times a power of two: see `fragment_kernel._raises`."""
    return dtype_name(x.dtype) == "bfloat16" and weight.codes.startswith("fp")


def constants_of(weight: Packed) -> dict[str, Any]:
    """The kernels' constants that say what the codes mean."""
    rows = weight.rows if weight.scale.shape[0] > 1 else 0
    # Signed codes of 4 bits are held as code + 8, and so are their zeros.
    unsigned = weight.codes == "int4" and weight.zero is not None
    return {
        "K": weight.width,
        "CODES": "uint4" if unsigned else weight.codes,
        "BITS": weight.bits,
        "TABLE": weight.table,
        "SCALES": weight.scale_dtype,
        "BLOCK": (rows, weight.columns),
    }


def default_config(key: Key, sms: int) -> QuantizedConfig:
    """A configuration for a shape that nobody measured."""
    _, rows, features, width, number, _, itemsize, gated, _ = key
    bits, parts = bits_of(_CODES[number - 1]), 2 if gated else 1
    fragments = _default_fragments(key, sms)
    if fragments is not None:
        return fragments
    quads = next_power_of_2(triton.cdiv(width, 128 // bits))
    if rows == 1:
        if quads > MOST_QUADS:
            results, quads, warps = (8, 64, 4) if bits == 4 else (2, 128, 2)
            return QuantizedVectorConfig(results // parts, quads, warps)
        # Words of codes a thread, and warps a program, of which 16 fill a multiprocessor.
        words, warps = (8, 8) if bits == 4 else (16, 4)
        results = _stream_rows(words, warps, quads * parts)
        while results > 1 and features < 2 * sms * results:
            results //= 2
        return QuantizedStreamConfig(results, warps, 16 // warps)
    return _default_tile(rows, features, width, bits, parts, itemsize, sms)


def _default_tile(
    rows: int, features: int, width: int, bits: int, parts: int, itemsize: int, sms: int
) -> QuantizedTileConfig:
    """As the fastest of a search at the 8B shape on an H100 were; `waves` of programs fill it."""
    m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    n, quads, warps, stages, waves = 128, 4, 8, 3, 1.0
    ahead = 2 if bits == 4 else 3  # stages of 8 quads: of 4 bits they have twice as much of x
    if itemsize == 4:
        m, n, warps, stages = min(m, 32), 64, 4, 2
    elif m <= 32:
        n, quads, warps, stages, waves = 64, 8, 4, ahead, 4.0
    elif parts == 2:
        if bits == 8 and m == 128:
            n, warps = 64, 4
        if bits == 8 or m == 64:
            quads, stages = 8, ahead
    elif width <= _WIDE and (bits == 8 or features < 128 * sms):
        n, quads, warps, stages = 64, 8, 4, ahead
        waves = 2.0 if m == 64 else 1.0
    elif bits == 8 or (m == 128 and features < 128 * sms):
        quads, stages = 8, ahead
    elif m == 64:
        waves = 2.0
    n //= parts
    tiles = triton.cdiv(rows, m) * triton.cdiv(features, n)
    turns = triton.cdiv(width * bits, 128 * quads)
    splits = max(1, min(round(waves * sms / tiles), turns // 2, 8))
    return QuantizedTileConfig(m, n, quads, warps, stages, splits)


def _default_fragments(key: Key, sms: int) -> QuantizedFragmentConfig | None:
    """Of few rows; None where the other kernels are faster."""
    _, rows, features, width, number, columns, _, gated, normed = key
    if not _serves_fragments(key):
        return None
    bits = bits_of(_CODES[number - 1])
    all_chunks = triton.cdiv(width, 512 // bits)
    many = features * (2 if gated else 1) >= 32 * sms  # two tiles for every multiprocessor
    if rows == 1 and bits == 4 and all_chunks <= 32 and columns != _HALF:
        return _default_of_a_row(key, all_chunks)
    if rows == 1 and normed:  # x is normed once, so that a program keeps all of it
        if columns == _HALF or all_chunks > 64:
            return None
        config = 8, 1, next_power_of_2(triton.cdiv(all_chunks, 8)), 1
        if bits == 8:  # two turns, of which a program holds both
            slots = columns_of_products(1, 8, columns, 8)[2]
            config = 4, 1, chunks_of_warps(triton.cdiv(all_chunks, 2), 4, slots), 2
    elif rows == 1 and bits == 4:
        config = 8, 1, 2, 2
    elif rows == 1:
        if width <= MOST_QUADS * 16:
            return None
        config = 8, 1, 4, 2
    elif rows <= 8:
        short = bits == 4 or width <= 4096
        config = (4, 2, 2, 3) if bits == 4 and many else (4, 1, 4, 3) if short else (8, 1, 4, 2)
    else:
        config = (4, 2, 1, 2) if many else (4, 1, 2, 3)
    warps, tiles, chunks, programs = config
    most = min(255, 2048 // warps)  # registers of a thread
    while rows > 1 and chunks > 1 and _registers(key, warps, tiles, chunks) > most:
        chunks //= 2
    programs = min(programs, 2048 // (_registers(key, warps, tiles, chunks) * warps))
    return QuantizedFragmentConfig(warps, tiles, chunks, programs) if programs else None


def _default_of_a_row(key: Key, all_chunks: int) -> QuantizedFragmentConfig:
    """Of one row of 4-bit codes that four warps can keep: by one turn, else by two."""
    slots = columns_of_products(1, 4, key[5], 8)[2]
    warps = min(4, next_power_of_2(all_chunks))
    chunks = chunks_of_warps(all_chunks, warps, slots)
    if _registers(key, warps, 1, chunks) > _MANY_REGISTERS and chunks % (2 * slots) == 0:
        chunks //= 2
    return QuantizedFragmentConfig(warps, 1, chunks, 2)


def chunks_of_warps(count: int, warps: int, slots: int) -> int:
    """Chunks of each warp that are all of them, so that the columns of products are in use."""
    chunks = triton.cdiv(count, warps)
    slots = min(slots, next_power_of_2(chunks))
    return triton.cdiv(chunks, slots) * slots


def most_registers(warps: int, programs: int) -> dict[str, int]:
    """An option for Triton: what a thread may have where so many programs are to run beside."""
    most = (1 << 16) // (32 * warps * programs) // 8 * 8
    return {"maxnreg": most} if most < 255 else {}


def _kept_turns(key: Key, config: QuantizedFragmentConfig) -> int:
    """Turns of one row of which a program keeps x in registers: all, up to two, or none."""
    warps, tiles, chunks, programs = config
    turns = _turns(key, warps, chunks)
    held = _registers(key, warps, tiles, chunks, kept=2)
    room = held <= 224 and held * warps * programs <= 2048
    return turns if turns == 1 or (turns == 2 and (room or key[8])) else 0


def _turns(key: Key, warps: int, chunks: int) -> int:
    bits = bits_of(_CODES[key[4] - 1])
    return triton.cdiv(key[3] * bits, 512 * warps * chunks)


def _serves_fragments(key: Key) -> bool:
    """True if the kernel of fragments knows a product."""
    _, rows, _, width, number, columns, itemsize, _, normed = key
    codes, bits = _CODES[number - 1], bits_of(_CODES[number - 1])
    return (
        itemsize == 2
        and codes != "table"
        and rows <= (1 if normed else 16)
        and columns_of_products(rows, bits, columns, 1)[0] <= _WIDEST_PRODUCTS
        and fragments_serve(bits, columns, width)
    )


def fragments_serve(bits: int, columns: int, width: int) -> bool:
    """True if kernels of fragments know rows of codes whose blocks have so many columns."""
    chunk = 512 // bits
    blocks = columns >= width or columns % chunk == 0 or chunk % columns == 0
    return blocks and (bits == 4 or width % 16 == 0)


def _registers(key: Key, warps: int, tiles: int, chunks: int, kept: int = 1) -> int:
    """About how many a thread of the kernel of fragments needs, with x of `kept` turns."""
    _, rows, _, _, number, columns, *_ = key
    bits = bits_of(_CODES[number - 1])
    products, _, slots = columns_of_products(rows, bits, columns, chunks)
    held = chunks // slots * kept if _turns(key, warps, chunks) <= kept else 1
    of_x = held * (512 // bits) * products // 64
    return 16 * chunks * tiles + of_x + products * tiles // 2 + 30


def _stream_rows(words: int, warps: int, quads: int) -> int:
    """Results at a time, each of so many quads, that give every thread `words` words of codes."""
    return min(max(1, words * 8 * warps // quads), 64)


def tuning_key(
    rows: int, features: int, weight: Packed, itemsize: int, gated: bool, normed: bool
) -> Key:
    """Of a product of x [rows, width] with `features` results a row; gate and up count once."""
    number = _CODES.index(weight.codes) + 1
    shape = next_power_of_2(rows), features, weight.width
    columns = weight.columns or weight.width
    return "quantized_linear", *shape, number, columns, itemsize, gated, normed


_CODES = ("int4", "uint4", "int8", "uint8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "table")


def _fits(key: Key, config: QuantizedConfig) -> bool:
    _, rows, _, width, number, _, _, gated, normed = key
    bits = bits_of(_CODES[number - 1])
    if isinstance(config, QuantizedFragmentConfig):
        warps, tiles, chunks, programs = config
        turns = _turns(key, warps, chunks)
        kept = 2 if normed and turns == 2 else 1
        registers = _registers(key, warps, tiles, chunks, kept)
        room = registers <= 255 and registers * warps * programs <= 2048
        return _serves_fragments(key) and (turns <= 2 or not normed) and room
    if not isinstance(config, QuantizedTileConfig):
        stream = isinstance(config, QuantizedStreamConfig)
        quads = next_power_of_2(triton.cdiv(width, 128 // bits)) if stream else config.quads
        words = config.rows * (2 if gated else 1) * quads * 4
        inputs = quads * 128 // bits if stream else 0
        most = 32 * config.warps  # threads
        return rows == 1 and words <= 32 * most and inputs <= 64 * most
    if bits == 4 and config.quads < 4:
        return False
    return rows > 1 and config.m * config.n * (2 if gated else 1) <= 16384


def _candidates(key: Key, sms: int) -> list[QuantizedConfig]:
    _, rows, features, width, number, _, _, gated, _ = key
    bits = bits_of(_CODES[number - 1])
    fragments = [
        QuantizedFragmentConfig(*config)
        for config in (
            (8, 1, 2, 2), (4, 1, 8, 2), (4, 1, 4, 2), (8, 1, 4, 1), (4, 1, 6, 2), (8, 1, 4, 2),
            (4, 1, 4, 3), (4, 2, 2, 3), (8, 2, 4, 1), (8, 1, 8, 1), (4, 2, 1, 2), (4, 1, 2, 3),
            (8, 2, 1, 1),
        )
    ]  # fmt: skip
    first = [default_config(key, sms), *(c for c in fragments if _fits(key, c))]
    if rows == 1:
        quads, parts = next_power_of_2(triton.cdiv(width, 128 // bits)), 2 if gated else 1
        streams = [
            QuantizedStreamConfig(_stream_rows(words, warps, quads * parts), warps, programs)
            for words, warps, programs in (
                (8, 8, 2), (8, 4, 4), (8, 2, 8), (16, 4, 4), (16, 8, 2), (16, 16, 1), (16, 8, 3),
            )
        ]  # fmt: skip
        vectors = [
            QuantizedVectorConfig(r // parts, q, warps, splits)
            for r, q, warps, splits in (
                (2, 128, 2, 1), (4, 64, 1, 1), (2, 128, 1, 1), (8, 64, 4, 1), (2, 256, 4, 1),
                (4, 128, 4, 1), (4, 64, 1, 2), (8, 64, 4, 2),
            )
            if splits == 1 or features < 16 * sms
        ]  # fmt: skip
        return [*first, *streams, *vectors]
    m = next(size for size in (16, 32, 64, 128) if size >= min(rows, 128))
    tiles, ahead = [], 2 if bits == 4 else 3
    for n, quads, warps, stages in (
        (64, 4, 4, 3), (64, 8, 4, ahead), (128, 4, 4, 3), (128, 4, 8, 3), (128, 8, 8, ahead),
    ):  # fmt: skip
        n = n // 2 if gated else n
        programs = triton.cdiv(rows, m) * triton.cdiv(features, n)
        for wave in (0, 1, 2, 4):
            splits = max(1, min(round(wave * sms / programs), 8))
            tiles.append(QuantizedTileConfig(m, n, quads, warps, stages, splits))
    return [*first, *tiles]


TUNABLE = Tunable(
    op="quantized_linear",
    fields=("rows", "features", "width", "codes", "columns", "itemsize", "gated", "normed"),
    flags=("gated", "normed"),
    kinds={
        "quantized_fragment": Kind(
            QuantizedFragmentConfig,
            {
                **{"warps": powers(1, 16), "tiles": powers(1, 4), "chunks": range(1, 17)},
                "programs": range(1, 33),
            },
            bound_by_memory=True,
        ),
        "quantized_stream": Kind(
            QuantizedStreamConfig,
            {"rows": powers(1, 64), "warps": powers(1, 16), "programs": range(1, 33)},
            bound_by_memory=True,
        ),
        "quantized_vector": Kind(
            QuantizedVectorConfig,
            {
                **{"rows": powers(1, 32), "quads": powers(1, 512), "warps": powers(1, 16)},
                "splits": range(1, 17),
            },
            bound_by_memory=True,
        ),
        "quantized_tile": Kind(
            QuantizedTileConfig,
            {
                **{"m": powers(16, 128), "n": powers(16, 256), "quads": powers(1, 32)},
                **{"warps": powers(1, 16), "stages": range(1, 9), "splits": range(1, 17)},
            },
        ),
    },
    fits=_fits,
    candidates=_candidates,
)


def columns_of_products(count: int, bits: int, block: int, chunks: int) -> tuple[int, int, int]:
    """Columns of the products of a fragment, and the groups and the chunks that have their own."""
    chunk = 512 // bits
    groups = chunk // block if 0 < block < chunk else 1
    rows = next_power_of_2(count)
    slots = math.gcd(chunks, max(1, 8 // (rows * groups)))
    return max(8, rows * groups), groups, slots


def _check(x: Any, weight: Packed, count: int) -> None:
    """Raise ValueError for a weight that the kernels would misread."""
    rows, bits, width = weight.data.shape[0], weight.bits, weight.width
    held = triton.cdiv(width, 32) * 16 if bits == 4 else width
    if tuple(weight.data.shape) != (rows, held) or not weight.data.is_contiguous():
        raise ValueError(
            f"codes {tuple(weight.data.shape)} with strides {tuple(weight.data.stride())} do not "
            f"fit x {tuple(x.shape)}: contiguous ones [out, {held}] are expected."
        )
    if width != x.shape[-1] or count > MOST_ROWS:
        raise ValueError(
            f"x is {tuple(x.shape)}; up to {MOST_ROWS} rows of {width} values are expected."
        )
    if not serves(weight.codes, weight.columns, weight.zero is not None):
        raise ValueError(f"No kernel reads {weight.codes} in blocks of {weight.columns} columns.")
