"""Configurations of kernels by shape: keys, tables of what was measured, and what is worth it.

A key is an op's name and the numbers that decide how fast a configuration is; counts that vary
from call to call are rounded up to powers of two.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import triton

from . import attention_choice, decode_attention, linear
from .decode_attention import DecodeConfig
from .launch import next_power_of_2
from .linear import TileConfig, VectorConfig

AttentionConfig = attention_choice.Config
Config: TypeAlias = VectorConfig | TileConfig | DecodeConfig | AttentionConfig
Key: TypeAlias = tuple[Any, ...]

DEFAULTS = "defaults"
_SHARED_BYTES = 220 << 10  # of shared memory that a program's stages may take on an H100
_MOST_CANDIDATES = 14


class Measured(NamedTuple):
    """The best configuration for a key, and its microseconds a call."""

    config: Config
    us: float


Table: TypeAlias = dict[Key, Measured]

# What follows the op's name in a key.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("rows", "features", "width", "itemsize", "gated"),
    "decode_attention": ("pairs", "capacity", "group", "dim", "itemsize"),
    "attention": ("itemsize", "dim", "tokens", "pairs", "causal"),
}
_KINDS: Mapping[str, type[Any]] = {
    "vector": VectorConfig,
    "tile": TileConfig,
    "decode": DecodeConfig,
    "attention": AttentionConfig,
}
_KINDS_OF: Mapping[str, tuple[str, ...]] = {
    "linear": ("vector", "tile"),
    "decode_attention": ("decode",),
    "attention": ("attention",),
}


def linear_key(rows: int, features: int, width: int, itemsize: int, gated: bool) -> Key:
    """Of a product of x [rows, width] with `features` results a row; gate and up count once."""
    return "linear", next_power_of_2(rows), features, width, itemsize, gated


def decode_key(pairs: int, reach: int, group: int, dim: int, itemsize: int) -> Key:
    """Of one token's attention: `pairs` of slot and KV head, `reach` tokens that may be seen."""
    return "decode_attention", next_power_of_2(pairs), next_power_of_2(reach), group, dim, itemsize


def attention_key(itemsize: int, dim: int, tokens: int, pairs: int, causal: bool) -> Key:
    """Of whole sequences' attention: `pairs` of sequence and query head."""
    return "attention", itemsize, dim, next_power_of_2(tokens), next_power_of_2(pairs), causal


class Configurations:
    """Tables by where they come from, asked in their order; then the kernel's own default, None.

    Asked at every launch: an answer is kept, and costs a look into a dict from then on.
    """

    def __init__(self, tables: Sequence[tuple[str, Table]] = ()):
        self._tables = tuple((origin, table) for origin, table in tables if table)
        self._found: dict[Key, Config | None] = {}
        self._uses: Counter[str] = Counter()

    def linear(
        self, rows: int, features: int, width: int, itemsize: int, gated: bool
    ) -> VectorConfig | TileConfig | None:
        """See `linear_key`."""
        return self._find(linear_key(rows, features, width, itemsize, gated))

    def decode_attention(
        self, pairs: int, reach: int, group: int, dim: int, itemsize: int
    ) -> DecodeConfig | None:
        """See `decode_key`."""
        return self._find(decode_key(pairs, reach, group, dim, itemsize))

    def attention(
        self, itemsize: int, dim: int, tokens: int, pairs: int, causal: bool
    ) -> AttentionConfig | None:
        """See `attention_key`."""
        return self._find(attention_key(itemsize, dim, tokens, pairs, causal))

    def table(self, origin: str) -> Table:
        """What comes from `origin`."""
        return dict(self._tables).get(origin, {})

    def having(self, origin: str, table: Table) -> "Configurations":
        """These, and before all others those of `table`, beside what `origin` gave already."""
        others = [item for item in self._tables if item[0] != origin]
        return Configurations([(origin, self.table(origin) | table), *others])

    def _find(self, key: Key) -> Any:
        try:
            return self._found[key]
        except KeyError:
            origin, self._found[key] = self.look_up(key)
            self._uses[origin] += 1
            return self._found[key]

    def look_up(self, key: Key) -> tuple[str, Config | None]:
        """Where a key's configuration comes from, and the configuration."""
        for origin, table in self._tables:
            if key in table:
                return origin, table[key].config
        return DEFAULTS, None

    def __str__(self) -> str:
        """What is there, and what calls have used so far, for a report."""
        held = [f"{len(table):,} {origin}" for origin, table in self._tables]
        used = [f"{count:,} {origin}" for origin, count in self._uses.items()]
        return f"{', '.join([*held, DEFAULTS])}; in use: {', '.join(used) or 'none yet'}"


def to_entries(table: Table) -> list[dict[str, Any]]:
    """The table as JSON's values, in the order of its keys."""
    entries = []
    for (op, *values), (config, us) in sorted(table.items(), key=lambda item: item[0]):
        kind = next(name for name, class_ in _KINDS.items() if isinstance(config, class_))
        fields = dict(zip(FIELDS[op], values, strict=True))
        made = {"kind": kind, **config._asdict()}
        entries.append({"op": op, **fields, "config": made, "us": round(us, 2)})
    return entries


def to_table(entries: Any) -> Table:
    """What `to_entries` made of a table.

    Raises ValueError, with the reason, for anything that no search of ours can have written: a
    configuration that cannot run must never get to a kernel.
    """
    _check(isinstance(entries, list), "its entries are no list")
    return dict(_item(entry) for entry in entries)


def _check(fine: bool, reason: str) -> None:
    if not fine:
        raise ValueError(reason)


def _is_count(value: Any, most: int = 1 << 31) -> bool:
    return type(value) is int and 0 < value <= most


def _item(entry: Any) -> tuple[Key, Measured]:
    _check(isinstance(entry, dict), f"an entry is {entry!r}")
    op, stored, us = entry.get("op"), entry.get("config"), entry.get("us")
    _check(isinstance(op, str) and op in FIELDS, f"it has an op {op!r}")
    names = FIELDS[op]
    _check(set(entry) == {"op", "config", "us", *names}, f"an entry of {op} has {sorted(entry)}")
    for name in names:
        value, flag = entry[name], name in ("gated", "causal")
        _check(type(value) is bool if flag else _is_count(value), f"{op} has {name}={value!r}")
    _check(type(us) in (int, float) and 0 <= us < 1e9, f"{op} took {us!r} us")
    _check(isinstance(stored, dict), f"{op} has a configuration {stored!r}")
    kind = stored.get("kind")
    _check(kind in _KINDS_OF[op], f"{op} has a configuration of kind {kind!r}")
    values = {name: value for name, value in stored.items() if name != "kind"}
    class_, key = _KINDS[kind], (op, *(entry[name] for name in names))
    missing = set(class_._fields) - set(values) - set(class_._field_defaults)
    _check(set(values) <= set(class_._fields) and not missing, f"{kind} has {sorted(values)}")
    config = class_(**values)
    for name, value in config._asdict().items():
        allowed = _ALLOWED[kind][name]
        fine = type(value) is type(allowed[0]) and value in allowed
        _check(fine, f"{kind} has {name}={value!r}; one of {allowed} is expected")
    _check(_fits(key, config), f"{tuple(config)} does not fit {key}")
    return key, Measured(config, float(us))


def _powers(least: int, most: int) -> list[int]:
    return [1 << i for i in range(least.bit_length() - 1, most.bit_length())]


_ALLOWED: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "vector": {"rows": _powers(1, 32), "warps": _powers(1, 16), "per_sm": range(9)},
    "tile": {
        **{"m": _powers(16, 128), "n": _powers(16, 256), "k": _powers(16, 512)},
        **{"warps": _powers(1, 16), "stages": range(1, 9), "splits": range(1, 17)},
    },
    "decode": {
        **{"block": _powers(16, 256), "warps": _powers(1, 16), "splits": range(1, 65)},
        "stages": range(1, 9),
    },
    "attention": {
        **{"block_m": _powers(16, 256), "block_n": _powers(16, 256), "warps": _powers(1, 16)},
        "stages": range(1, 9),
    },
}


def _fits(key: Key, config: Config) -> bool:
    """Whether the kernel can run a key's calls so: its registers, its shared memory, its rows."""
    if isinstance(config, VectorConfig):
        _, rows, _, width, _, gated = key
        per_thread = _elements(width, gated) * config.rows / (32 * config.warps)
        return rows <= linear.MOST_VECTORS and per_thread <= 256
    if isinstance(config, TileConfig):
        _, rows, _, _, itemsize, gated = key
        held = config.stages * config.k * (config.m + config.n * (2 if gated else 1)) * itemsize
        # A norm is fused into the product of one row, which only the other kernel does.
        return rows > 1 and held <= _SHARED_BYTES
    if isinstance(config, DecodeConfig):
        dim, itemsize = key[4:]
        return 2 * config.stages * config.block * next_power_of_2(dim) * itemsize <= _SHARED_BYTES
    itemsize, dim = key[1:3]
    held = config.block_m + 2 * config.block_n * config.stages
    return held * next_power_of_2(dim) * itemsize <= _SHARED_BYTES


def _elements(width: int, gated: bool) -> int:
    """Weights that one result of the matrix-vector kernel is made of, as it holds them."""
    return next_power_of_2(width) * (2 if gated else 1)


def candidates(key: Key, sms: int) -> list[Config]:
    """Configurations worth measuring for a key, the default first."""
    make = {
        "linear": _linear_candidates,
        "decode_attention": _decode_candidates,
        "attention": _attention_candidates,
    }
    default, *others = make[key[0]](*key[1:], sms)
    fitting = [config for config in dict.fromkeys(others) if _fits(key, config)]
    return [default, *(config for config in fitting if config != default)][:_MOST_CANDIDATES]


def _linear_candidates(
    rows: int, features: int, width: int, itemsize: int, gated: bool, sms: int
) -> list[Any]:
    default = linear.default_config(rows, features, width, itemsize, gated, sms)
    vectors: list[Any] = []
    if rows <= linear.MOST_VECTORS:
        vectors = _vector_candidates(rows, features, _elements(width, gated), sms)
    if rows == 1 or itemsize == 4:
        return [default, *vectors]
    return [default, *vectors[:5], *_tile_candidates(rows, features, width, gated, sms)]


def _vector_candidates(rows: int, features: int, elements: int, sms: int) -> list[Any]:
    """Those with 32 to 64 weights a thread first: the rule that measurements have shown."""
    found = []
    for block in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8, 16):
            per_thread = block * elements / (32 * warps)
            distance = max(per_thread / 64, 32 / per_thread)
            if distance > 2 or features < block * sms // 2:
                continue
            found.append((distance, VectorConfig(block, warps)))
            if rows == 1 and per_thread <= 64:  # the next block's weights take registers, too
                found += [(distance + 0.1 * n, VectorConfig(block, warps, n)) for n in (2, 3)]
    return [config for _, config in sorted(found, key=lambda item: item[0])]


# Weight rows, columns and stages of a tile by its rows of x.
_TILES = {
    16: [(32, 256, 3), (16, 256, 3), (32, 128, 4), (64, 128, 4), (16, 128, 5)],
    32: [(32, 128, 4), (64, 128, 4), (32, 256, 3), (16, 256, 3)],
    64: [(32, 128, 4), (64, 128, 3), (64, 64, 4), (128, 64, 4)],
    128: [(32, 64, 4), (64, 64, 4), (128, 64, 3)],
}


def _tile_candidates(rows: int, features: int, width: int, gated: bool, sms: int) -> list[Any]:
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


def _decode_candidates(
    pairs: int, reach: int, group: int, dim: int, itemsize: int, sms: int
) -> list[Any]:
    default = decode_attention.default_config(pairs, reach, dim, itemsize, sms)
    base = next_power_of_2(default.splits)
    splits = [n for n in (base, base // 2, base * 2, base // 4) if 1 <= n <= 64]
    found = [default]
    for n in splits:
        for block, warps in ((32, 4), (32, 2), (64, 4), (16, 2)):
            if n > triton.cdiv(reach, block) or block * dim > 8192:
                continue
            found += [DecodeConfig(block, warps, n, stages) for stages in (2, 3)]
    return found


def _attention_candidates(
    itemsize: int, dim: int, tokens: int, pairs: int, causal: bool, sms: int
) -> list[Any]:
    shape: dict[str, int] = {"itemsize": itemsize, "head_dim": dim, "pairs": pairs}
    few, default, many = (
        attention_choice.attention_configs(**shape, tokens=tokens, processors=n)
        for n in (1 << 31, sms, 0)
    )
    return [*default, *many, *few]


def shipped(kinds: Sequence[str]) -> list[tuple[str, Table]]:
    """The package's tables by kind of device, for the one whose `kinds` these are, nearest first.

    Those of other kinds are without what memory bounds, products of a single row and attention of a
    token: decode of a 7B model had 88.4 % of one H200's bandwidth with an H100's configurations,
    and 89.5 % of another's with the defaults.
    """
    text = Path(__file__).with_name("tuned.json").read_text(encoding="utf-8")
    devices = json.loads(text)
    of_memory, found = (VectorConfig, DecodeConfig), []
    for kind in kinds:
        table = to_table(devices[kind]["entries"]) if kind in devices else {}
        if kind != kinds[0]:
            table = {k: v for k, v in table.items() if not isinstance(v.config, of_memory)}
        found.append((kind, table))
    return [(kind, table) for kind, table in found if table]


def device_kinds(name: str, capability: tuple[int, int], sms: int) -> tuple[str, ...]:
    """The kinds of device whose measurements serve this one, the nearest first.

    What is told apart is the kind of multiprocessor and how fast memory feeds them: parts of a
    device (MIG) and smaller relatives are of no kind.
    """
    if sms < 100:
        return ()
    if capability == (9, 0):
        return ("H200", "H100") if "H200" in name else ("H100", "H200")
    return ("A100",) if capability == (8, 0) else ()


def to_json(devices: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of a file of tables, an entry a line so that differences can be read."""
    parts = []
    for kind, facts in devices.items():
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in facts["entries"])
        head = {name: value for name, value in facts.items() if name != "entries"}
        text = json.dumps({**head, "entries": []})
        parts.append(f"{json.dumps(kind)}: {text[:-2]}\n{lines}\n]}}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
