"""Configurations of kernels by shape: tables of what was measured, and what is worth measuring."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from . import (
    attention_choice,
    decode_attention,
    eight_bit,
    experts_choice,
    latent,
    linear,
    quantized,
    routing,
)
from .tunable import Key, Kind, Tunable

Config: TypeAlias = Any  # one of the kinds of the op
DEFAULTS = "defaults"

_OPS: Mapping[str, Tunable] = {
    tunable.op: tunable
    for tunable in (
        op.TUNABLE
        for op in (
            linear,
            quantized,
            eight_bit,
            decode_attention,
            latent,
            attention_choice,
            routing,
            experts_choice,
        )
    )
}


class Measured(NamedTuple):
    """The best configuration for a key, and its microseconds a call."""

    config: Config
    us: float


Table: TypeAlias = dict[Key, Measured]


class Configurations:
    """Tables by where they come from, asked in their order; then the kernel's own default, None.

    Asked at every launch: an answer is kept, and costs a look into a dict from then on.
    """

    def __init__(self, tables: Sequence[tuple[str, Table]] = ()):
        self._tables = tuple((origin, table) for origin, table in tables if table)
        self._found: dict[Key, Config | None] = {}
        self._uses: Counter[str] = Counter()

    def find(self, key: Key) -> Any:
        """A key's configuration; None for the kernel's own default."""
        try:
            return self._found[key]
        except KeyError:
            origin, self._found[key] = self.look_up(key)
            self._uses[origin] += 1
            return self._found[key]

    def table(self, origin: str) -> Table:
        """What comes from `origin`."""
        return dict(self._tables).get(origin, {})

    def having(self, origin: str, table: Table) -> "Configurations":
        """These, and before all others those of `table`, beside what `origin` gave already."""
        others = [item for item in self._tables if item[0] != origin]
        return Configurations([(origin, self.table(origin) | table), *others])

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
        kinds = _OPS[op].kinds.items()
        kind = next(name for name, kind in kinds if isinstance(config, kind.config))
        fields = dict(zip(_OPS[op].fields, values, strict=True))
        settings = {"kind": kind, **config._asdict()}
        entries.append({"op": op, **fields, "config": settings, "us": round(us, 2)})
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
    _check(isinstance(op, str) and op in _OPS, f"it has an op {op!r}")
    tunable, names = _OPS[op], _OPS[op].fields
    _check(set(entry) == {"op", "config", "us", *names}, f"an entry of {op} has {sorted(entry)}")
    for name in names:
        value, flag = entry[name], name in tunable.flags
        _check(type(value) is bool if flag else _is_count(value), f"{op} has {name}={value!r}")
    _check(type(us) in (int, float) and 0 <= us < 1e9, f"{op} took {us!r} us")
    _check(isinstance(stored, dict), f"{op} has a configuration {stored!r}")
    kind = stored.get("kind")  # of any type
    _check(kind in list(tunable.kinds), f"{op} has a configuration of kind {kind!r}")
    config = _config(kind, tunable.kinds[kind], {k: v for k, v in stored.items() if k != "kind"})
    key = op, *(entry[field] for field in names)
    _check(tunable.fits(key, config), f"{tuple(config)} does not fit {key}")
    return key, Measured(config, float(us))


def _config(name: str, kind: Kind, values: dict[str, Any]) -> Config:
    known = kind.config
    missing = set(known._fields) - set(values) - set(known._field_defaults)
    _check(set(values) <= set(known._fields) and not missing, f"{name} has {sorted(values)}")
    config = known(**values)
    for field, value in config._asdict().items():
        allowed = kind.allowed[field]
        fine = type(value) is type(allowed[0]) and value in allowed
        _check(fine, f"{name} has {field}={value!r}; one of {allowed} is expected")
    return config


def candidates(key: Key, sms: int) -> list[Config]:
    """Configurations worth measuring for a key, the default first."""
    tunable = _OPS[key[0]]
    default, *others = tunable.candidates(key, sms)
    fitting = [config for config in dict.fromkeys(others) if tunable.fits(key, config)]
    return [default, *(config for config in fitting if config != default)][: tunable.most(key)]


def shipped(kinds: Sequence[str]) -> list[tuple[str, Table]]:
    """The package's tables by kind of device, for the one whose `kinds` these are, nearest first.

    Those of other kinds are without what memory bounds, products of a single row and attention of a
    token, where the defaults serve better: see docs/contributing/measured-and-left-out.md.
    """
    text = Path(__file__).with_name("tuned.json").read_text(encoding="utf-8")
    devices = json.loads(text)
    kinds_of_all = [kind for tunable in _OPS.values() for kind in tunable.kinds.values()]
    of_memory = tuple(kind.config for kind in kinds_of_all if kind.bound_by_memory)
    tables = []
    for kind in kinds:
        table = to_table(devices[kind]["entries"]) if kind in devices else {}
        if kind != kinds[0]:
            table = {k: v for k, v in table.items() if not isinstance(v.config, of_memory)}
        tables.append((kind, table))
    return [(kind, table) for kind, table in tables if table]


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
