"""Which cases are quick, and which run on JAX: derived from what each one's spec says.

A fact is a field of the spec with a value of its own, a kind of block, a family. The quick cases
show every fact once; they run on both backends. JAX runs, slow, as many more as show each family
once, by a model that generates where there is one, and each two fields that one part of a layer
sets together; torch runs all.
`python -m tests.cases.covering` writes `covering.json` anew, and a test says when it is old.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ..models import BACKENDS
from . import CASES, sights
from .case import Case

FILE = Path(__file__).with_name("covering.json")
# Sizes and names, of which any value is as good as another that is no default.
_SIZES = {
    *("heads", "kv_heads", "head_dim", "vocab", "embed", "max_positions", "ffn", "eps", "inv_freq"),
    *("count", "chosen", "rank", "turning", "value_dim", "buckets", "most", "family"),
    *("architecture", "labels", "width", "end_id", "pad", "pad_id", "grid", "size", "channels"),
    *("start", "scale"),
}


def spec_of(case: Case) -> Any:
    """The spec of a case."""
    from dualinfer.model.families import describe_model

    return describe_model(case.make_config().to_dict(), [case.architecture])[0]


def _is_of_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, str) for part in value)


def _facts(own: Any) -> Iterator[str]:
    if isinstance(own, tuple):
        for part in own:
            yield from _facts(part)
    if not is_dataclass(own):
        return
    kind = type(own).__name__
    yield kind
    if kind == "Attention" and own.kv_heads != own.heads:
        yield f"Attention.{'one' if own.kv_heads == 1 else 'grouped'}"
    for one in fields(own):
        value = getattr(own, one.name)
        yield from _facts(value)
        if one.default is not MISSING and value == one.default:
            continue
        named = isinstance(value, bool | str) or (value and _is_of_names(value))
        if named and one.name not in _SIZES:
            yield f"{kind}.{one.name}={value}"
        elif one.default is not MISSING:
            yield f"{kind}.{one.name}"


def _pairs(own: Any) -> Iterator[str]:
    """Two fields of one part of a layer that have values of their own."""
    if isinstance(own, tuple):
        for part in own:
            yield from _pairs(part)
    if not is_dataclass(own):
        return
    set_here = [
        one.name
        for one in fields(own)
        if one.default is not MISSING and getattr(own, one.name) != one.default
    ]
    kind = type(own).__name__
    yield from (f"{kind}.{a} with {b}" for a, b in combinations(set_here, 2))
    for one in fields(own):
        yield from _pairs(getattr(own, one.name))


def cover(found: Mapping[str, set[str]], first: set[str], shown: Iterable[str]) -> list[str]:
    """Few cases that show all facts which `shown` ones do not; rather those of `first`."""
    left = set().union(*found.values()) - set().union(*(found[name] for name in shown))
    chosen = []
    while left:
        best = max(found, key=lambda x: (len(found[x] & left), x in first, -len(found[x])))
        chosen.append(best)
        left -= found[best]
    return sorted(chosen)


def derive() -> dict[str, list[str]]:
    """The names of quick cases, and of those that torch alone runs."""
    specs = {name: spec_of(case) for name, case in CASES.items() if case.is_there}
    speaking = {name for name, spec in specs.items() if spec.can_generate}
    speak = {specs[name].family for name in speaking}
    found = {name: {*_facts(spec)} for name, spec in specs.items()}
    quick = cover(found, speaking, ())
    for name, spec in specs.items():
        found[name] |= {*_pairs(spec.layers)}
        if name in sights.CASES:  # whose decoders have cases of their own
            continue
        if name in speaking or spec.family not in speak:
            found[name].add(f"family {spec.family}")
    on_jax = {*quick, *cover(found, speaking, quick)}
    return {"quick": quick, "torch_alone": sorted(found.keys() - on_jax)}


def _read() -> tuple[frozenset[str], frozenset[str]]:
    read = json.loads(FILE.read_text("utf-8"))
    return frozenset(read["quick"]), frozenset(read["torch_alone"])


QUICK, TORCH_ALONE = _read() if FILE.exists() else (frozenset(), frozenset())


def each(names: Iterable[str], all_quick: bool = False) -> list[Any]:
    """(case, backend) for each of these cases: JAX leaves out those that others show there.

    Those that are not quick are slow, unless `all_quick`.
    """
    return [
        pytest.param(name, backend, marks=[] if all_quick or name in QUICK else [pytest.mark.slow])
        for name in names
        for backend in BACKENDS
        if backend == "torch" or name not in TORCH_ALONE
    ]


if __name__ == "__main__":
    FILE.write_text(json.dumps(derive(), indent=1) + "\n", "utf-8")
