"""How the kernels of experts run: configurations, and which serve a shape nobody measured."""

from typing import NamedTuple, TypeAlias

import triton

from .launch import next_power_of_2
from .quantized import MOST_QUADS, chunks_of_warps, columns_of_products, fragments_serve
from .tunable import SHARED_BYTES, Key, Kind, Tunable, powers

_MOST_ROWS = 32  # hidden values at a time, as a file of configurations may have them
MOST_VECTORS = 2  # tokens whose products are of matrices and vectors


class ExpertsVectorConfig(NamedTuple):
    """Hidden values a program, results a program, and columns of every expert at a time."""

    rows: int
    warps: int
    down_rows: int
    down_columns: int
    down_warps: int


class ExpertsFragmentConfig(NamedTuple):
    """How the kernels run that take codes of few tokens to the matrix units in registers.

    `programs` on each multiprocessor go through all tiles of gate and up; each of the `warps` of a
    program sums `chunks` of 64 bytes of a row. A program of down has `down_tiles` of 16 results,
    and its warps sum `down_chunks` at a time.
    """

    warps: int
    chunks: int
    programs: int
    down_warps: int
    down_tiles: int
    down_chunks: int


class ExpertsStreamConfig(NamedTuple):
    """`ExpertsFragmentConfig` whose gate and up are summed as they come, codes of 8 bits.

    `programs` on each multiprocessor go through blocks of `rows` hidden values.
    """

    rows: int
    warps: int
    programs: int
    down_warps: int
    down_tiles: int
    down_chunks: int


class ExpertsTileConfig(NamedTuple):
    """Tiles of `m` pairs of one expert by `n` hidden values, and by `down_n` results.

    `k` columns at a time are summed, in `stages`.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    down_n: int
    down_warps: int


ExpertsConfig: TypeAlias = (
    ExpertsVectorConfig | ExpertsFragmentConfig | ExpertsStreamConfig | ExpertsTileConfig
)


def is_few(tokens: int) -> bool:
    """True if the products of so many tokens are of matrices and vectors."""
    return tokens <= MOST_VECTORS


def default_config(key: Key, sms: int) -> ExpertsConfig:
    """A configuration for a shape that nobody measured, after those that were, on an H100."""
    _, tokens, chosen, total, features, width, itemsize, bits, _, gated = key
    parts = 2 if gated else 1
    load = tokens * chosen / total  # pairs of an expert, on average
    if bits <= 8:
        return _default_of_codes(key, load, sms)
    if is_few(tokens):
        at_once = features & -features if features % 256 == 0 else 512
        at_once = min(at_once, 1024, next_power_of_2(features))
        rows = 2 if features >= 1024 else 1
        elements = rows * next_power_of_2(chosen) * at_once
        warps = 8 if width * parts * itemsize >= 16384 else 4
        return ExpertsVectorConfig(1, warps, rows, at_once, min(max(elements // 1024, 2), 8))
    if itemsize == 4:
        return ExpertsTileConfig(16 if load < 16 else 32, 32, 32, 4, 2, 32, 4)
    if load <= 12:
        return ExpertsTileConfig(16, 64, 128, 4, 3, 64, 4)
    if load <= 48:
        return ExpertsTileConfig(32, 64, 128, 4, 3, 64, 4)
    if load <= 128:
        return ExpertsTileConfig(64, 64, 64, 4, 4, 128, 4)
    return ExpertsTileConfig(128, 128, 64, 8, 4, 128, 8)


def _default_of_codes(key: Key, load: float, sms: int) -> ExpertsConfig:
    """A configuration for quantized experts."""
    _, tokens, _, _, _, _, itemsize, bits, columns, gated = key
    parts = 2 if gated else 1
    per = 128 // bits
    if is_few(tokens):
        if itemsize == 2 and tokens == 1:
            fragments = (_default_stream if bits == 8 else _default_fragments)(key)
            if fragments is not None:
                return fragments
        return default_of_vectors(key, sms)
    # Found when groups had sums of their own, which took registers; not searched since.
    m = 16 if load <= 24 else 32 if load <= 48 else 64
    if itemsize == 4:
        return ExpertsTileConfig(min(m, 32), 64 // parts, 4 * per, 4, 2, 64, 4)
    n = 64 if columns <= 32 else 128
    return ExpertsTileConfig(m, n // parts, 4 * per, 4, 3, n, 4)


def default_of_vectors(key: Key, sms: int) -> ExpertsVectorConfig:
    """A configuration of few tokens for codes and inputs of every kind."""
    _, tokens, chosen, _, features, width, _, bits, _, gated = key
    parts = 2 if gated else 1
    per = 128 // bits
    quads = next_power_of_2(triton.cdiv(width, per)) * parts
    rows = max(1, min(4, 1024 // quads))
    while rows > 1 and tokens * chosen * (features // rows) < 8 * sms:
        rows //= 2
    down_quads = min(next_power_of_2(triton.cdiv(features, per)), 64)
    down = max(1, min(8, 512 // down_quads))
    while down > 1 and width // down < 2 * sms:
        down //= 2
    warps = max(1, min(4, down * down_quads // 64))
    return ExpertsVectorConfig(rows, 8, down, down_quads * per, warps)


def _default_stream(key: Key) -> ExpertsStreamConfig | None:
    """Of one token's codes of 8 bits; None where x would not stay in registers.

    Words of codes, and warps, as for one row of a dense matrix; down as it was measured.
    """
    width, gated = key[5], key[-1]
    quads = next_power_of_2(triton.cdiv(width, 16))
    if not _has_fragments(key) or quads > MOST_QUADS:
        return None
    rows = min(max(1, 512 // (quads * (2 if gated else 1))), _MOST_ROWS)
    return ExpertsStreamConfig(rows, 4, 4, 8, 1, 4)


def _default_fragments(key: Key) -> ExpertsFragmentConfig | None:
    """Of one token's codes of 4 bits; None where x would not stay in registers.

    Four warps a program were best, and eight for down.
    """
    _, _, chosen, _, features, width, _, bits, columns, _ = key
    if not _has_fragments(key):
        return None
    wide, deep = (triton.cdiv(n * bits, 512) for n in (width, features))
    _, _, slots = columns_of_products(1, bits, columns, 8)
    warps = min(4, next_power_of_2(wide))
    chunks = chunks_of_warps(wide, warps, slots)
    while _registers(key, chunks) > 200 and warps < 16:  # else they spill
        warps *= 2
        chunks = chunks_of_warps(wide, warps, slots)
    registers = _registers(key, chunks)
    if registers * warps > 2048:
        return None
    programs = min(3 if registers <= 128 else 2, 2048 // (registers * warps))
    even = deep + deep % 2
    down_chunks = even if even <= 6 and chosen >= 8 else 2
    return ExpertsFragmentConfig(warps, chunks, programs, 8, 1, down_chunks)


def _has_fragments(key: Key) -> bool:
    """True if products of both kinds go to the matrix units by fragments of codes."""
    _, _, _, _, features, width, itemsize, bits, columns, _ = key
    # Of one group a row the columns are those of x, and down has its own.
    return (
        itemsize == 2
        and bits <= 8
        and all(
            fragments_serve(bits, n if columns >= width else columns, n) for n in (width, features)
        )
    )


def _registers(key: Key, chunks: int) -> int:
    """About how many a thread needs that keeps x and holds so many chunks twice."""
    bits, columns = key[7], key[8]
    products, _, slots = columns_of_products(1, bits, columns, chunks)
    return 16 * chunks + chunks // slots * (512 // bits) * products // 64 + products // 2 + 30


def _down_fits(config: ExpertsFragmentConfig | ExpertsStreamConfig) -> bool:
    return 16 * config.down_tiles * config.down_chunks * config.down_warps <= 768


def _fits(key: Key, config: ExpertsConfig) -> bool:
    _, tokens, chosen, _, _, width, itemsize, bits, _, gated = key
    parts, few = 2 if gated else 1, is_few(tokens)
    if isinstance(config, ExpertsFragmentConfig):
        whole = config.warps * config.chunks * 512 >= width * bits
        registers = _registers(key, config.chunks)
        room = registers <= 255 and registers * config.warps * config.programs <= 2048
        return few and _has_fragments(key) and whole and room and _down_fits(config)
    if isinstance(config, ExpertsStreamConfig):
        quads, most = next_power_of_2(triton.cdiv(width * bits, 128)), 32 * config.warps
        room = quads * 4 * config.rows * parts <= 32 * most and quads * 16 <= 64 * most
        room = room and config.rows <= _MOST_ROWS
        return few and bits == 8 and _has_fragments(key) and room and _down_fits(config)
    if isinstance(config, ExpertsVectorConfig):
        if not few:
            return False
        if bits <= 8:
            per = 128 // bits
            up = next_power_of_2(triton.cdiv(width, per)) * 4 * config.rows * parts
            down = config.down_columns // per * 4 * config.down_rows
            fine = up <= 1024 * config.warps and down <= 1024 * config.down_warps
            return config.down_columns >= per and fine
        up = next_power_of_2(width) * parts * config.rows / (32 * config.warps)
        down = next_power_of_2(chosen) * config.down_columns * config.down_rows
        return up <= 256 and down / (32 * config.down_warps) <= 128
    if few:
        return False
    if bits <= 8:
        sums = max(config.m * config.n * parts, config.m * config.down_n)
        return config.k >= 512 // bits and sums <= 8192
    n = max(config.n * parts, config.down_n)
    held = config.stages * config.k * (config.m + n) * itemsize
    sums = max(
        config.m * config.n * parts / config.warps, config.m * config.down_n / config.down_warps
    )
    return held <= SHARED_BYTES and sums <= 128 * 32


def _candidates(key: Key, sms: int) -> list[ExpertsConfig]:
    """Those of gate and up, then those of down, which do not depend on one another."""
    _, _, chosen, _, _, width, itemsize, bits, _, gated = key
    default, parts = default_config(key, sms), 2 if gated else 1
    if isinstance(default, ExpertsFragmentConfig | ExpertsStreamConfig):
        downs = [(8, 1, 2), (8, 1, 4), (4, 1, 6), (8, 1, 6), (4, 1, 4), (8, 2, 2)]
        down = [default._replace(down_warps=w, down_tiles=t, down_chunks=c) for w, t, c in downs]
        if isinstance(default, ExpertsStreamConfig):
            # As many words of codes a thread, twice as many, and other warps.
            rows, most = default.rows, max(1, default.rows // 2)
            sizes = [(rows, 8, 2), (rows, 8, 3), (2 * rows, 8, 2), (2 * rows, 4, 4), (most, 4, 4)]
            sizes += [(rows, 4, 3), (4 * rows, 16, 1), (most, 2, 8)]
            ups = [default._replace(rows=r, warps=w, programs=p) for r, w, p in sizes]
            return [default, *ups, *down]
        sizes = [(4, 6, 2), (8, 3, 1), (4, 4, 3), (4, 4, 2), (8, 8, 1), (8, 4, 1), (4, 8, 2)]
        ups = [default._replace(warps=w, chunks=c, programs=p) for w, c, p in sizes]
        return [default, *ups, *down]
    if isinstance(default, ExpertsVectorConfig):
        if bits <= 8:
            per = 128 // bits
            ups = [(4, 8), (2, 8), (2, 4), (4, 4), (1, 4), (1, 1)]
            downs = [(8, 64, 4), (2, 32, 2), (4, 32, 1), (4, 64, 4), (2, 128, 4), (1, 128, 2)]
            downs = [(r, q * per, w) for r, q, w in downs]
        else:
            elements, slots = next_power_of_2(width) * parts, next_power_of_2(chosen)
            ups = [(r, w) for r in (1, 2, 4) for w in (2, 4, 8)]
            ups = [(r, w) for r, w in ups if 16 <= r * elements / (32 * w) <= 128][:6]
            downs = [(r, c, w) for r in (1, 2) for c in (256, 512, 1024) for w in (2, 4, 8)]
            downs = [(r, c, w) for r, c, w in downs if 16 <= r * slots * c / (32 * w) <= 64]
        return [
            default,
            *(default._replace(rows=r, warps=w) for r, w in ups),
            *(default._replace(down_rows=r, down_columns=c, down_warps=w) for r, c, w in downs),
        ]
    if itemsize == 4:
        return [default]
    m = default.m
    if bits <= 8:
        quad, sizes = 128 // bits, [(64, 4, 4, 3), (128, 4, 4, 3), (64, 8, 4, 3), (128, 4, 8, 4)]
        sized = [ExpertsTileConfig(m, n // parts, q * quad, w, s, n, w) for n, q, w, s in sizes]
        return [default, *sized, *(default._replace(m=other) for other in (16, 32, 64))]
    sizes = {
        16: [(64, 128, 4, 4), (128, 64, 4, 4), (32, 128, 4, 5), (128, 128, 4, 3), (32, 128, 4, 4)],
        32: [(64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 4), (32, 128, 4, 4)],
        64: [(64, 64, 4, 4), (128, 64, 8, 3), (64, 128, 4, 3), (64, 64, 8, 4)],
        128: [(128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 8, 4), (64, 64, 8, 3), (256, 64, 8, 3)],
    }
    sized = [ExpertsTileConfig(m, n, k, w, s, n, w) for n, k, w, s in sizes[m]]
    others = {16: (32,), 32: (16, 64), 64: (32, 128), 128: (64,)}[m]
    return [default, *sized, *(default._replace(m=other) for other in others)]


TUNABLE = Tunable(
    op="experts",
    fields=(
        *("tokens", "chosen", "experts", "features", "width", "itemsize", "bits", "columns"),
        "gated",
    ),
    flags=("gated",),
    kinds={
        "experts_vector": Kind(
            ExpertsVectorConfig,
            {
                **{"rows": powers(1, 32), "warps": powers(1, 16), "down_rows": powers(1, 32)},
                **{"down_columns": powers(16, 4096), "down_warps": powers(1, 16)},
            },
            bound_by_memory=True,
        ),
        "experts_fragment": Kind(
            ExpertsFragmentConfig,
            {
                **{"warps": powers(1, 16), "chunks": range(1, 17), "programs": range(1, 9)},
                **{"down_warps": powers(1, 16), "down_tiles": powers(1, 2)},
                "down_chunks": range(1, 17),
            },
            bound_by_memory=True,
        ),
        "experts_stream": Kind(
            ExpertsStreamConfig,
            {
                **{"rows": powers(1, _MOST_ROWS), "warps": powers(1, 16)},
                "programs": range(1, 17),
                **{"down_warps": powers(1, 16), "down_tiles": powers(1, 2)},
                "down_chunks": range(1, 17),
            },
            bound_by_memory=True,
        ),
        "experts_tile": Kind(
            ExpertsTileConfig,
            {
                **{"m": powers(16, 128), "n": powers(16, 256), "k": powers(16, 256)},
                **{"warps": powers(1, 16), "stages": range(1, 9)},
                **{"down_n": powers(16, 256), "down_warps": powers(1, 16)},
            },
        ),
    },
    fits=_fits,
    candidates=_candidates,
)
