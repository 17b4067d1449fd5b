"""Weights made to fit a model: shards merged, names without the prefixes of what wrapped it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ...errors import CheckpointError, DualinferError, blamed_on, counted
from ...model.families import describe_model
from ...model.load_plan import TensorSource
from ...model.weights import WeightTable
from .merged import RenamedSource

_WRAPPERS = ("module.", "_orig_mod.", "model.", "_forward_module.", "_fsdp_wrapped_module.")
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_INSIDE = re.compile(rf"(?<=\.)(?:{'|'.join(map(re.escape, _INNER))})+")
_FIRST_EXPERT = re.compile(r"(.*)\.experts\.deepspeed_experts\.0\.(.*)")
_MOST_WRAPPERS = 3


@dataclass(frozen=True)
class Wanted:
    """The needs of a model: the shape of each tensor, by any name that a checkpoint may have.

    `blocks` are the tensors in which several lie one after another, with the axis and the length of
    each; those that hold them head by head are not among them. `config` is HF's, as a dict.
    `is_known` is False where nobody knows which tensors are several in one.
    """

    shapes: Mapping[str, tuple[int, ...]]
    blocks: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True

    def find(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor by its name; None if the model has none of it."""
        return self.shapes.get(name)


@runtime_checkable
class Unfitted(Protocol):
    """Weights of which a model must be known before they can be read: shards, or foreign names."""

    def fit(self, wanted: Wanted) -> TensorSource:
        """The weights by HF's names. Raises CheckpointError for what does not fit."""
        ...


def wanted_by_table(table: WeightTable, config: Mapping[str, Any]) -> Wanted:
    """The tensors that a weight table asks for."""
    shapes: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, tuple[int, tuple[int, ...]]] = {}
    rows = [(row, source) for row in table.rows for source in row.sources]
    rows += [(row, source) for row, _ in table.tied for source in row.sources]
    for row, source in rows:
        if source.part != "data":
            continue
        shape = table.shape(row, source.axes)
        joined = [i for i, axis in enumerate(source.axes) if "+" in axis and "/" not in axis]
        for name in table.candidates(source.name):
            shapes[name] = shape
            for axis in joined:
                parts = source.axes[axis].split("+")
                blocks[name] = axis, tuple(table.shape(row, parts))
    return Wanted(shapes, blocks, config)


def wanted_by_module(module: Any) -> Wanted:
    """The tensors that a torch module asks for, on the meta device or not; HF's with its prefix."""
    config = getattr(module, "config", None)
    fields = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    shapes = {}
    prefix = getattr(module, "base_model_prefix", "")
    for name, tensor in module.state_dict().items():
        if not hasattr(tensor, "shape"):  # what a module keeps beside its tensors
            continue
        shapes[name] = tuple(tensor.shape)
        if prefix:
            start = f"{prefix}."
            other = name[len(start) :] if name.startswith(start) else start + name
            shapes.setdefault(other, tuple(tensor.shape))
    _add_experts(shapes)
    try:
        _, table = describe_model(fields, [c.__name__ for c in type(module).__mro__])
    except DualinferError:
        return Wanted(shapes, {}, fields, is_known=False)
    by_table = wanted_by_table(table, fields)
    return Wanted({**by_table.shapes, **shapes}, by_table.blocks, fields)


def _add_experts(shapes: dict[str, tuple[int, ...]]) -> None:
    """Add the experts that a MoE layer of DeepSpeed's has a router for and other ranks hold."""
    for name, shape in list(shapes.items()):
        match = _FIRST_EXPERT.match(name)
        if match:
            for i in range(shapes.get(f"{match[1]}.gate.wg.weight", (0,))[0]):
                shapes.setdefault(f"{match[1]}.experts.deepspeed_experts.{i}.{match[2]}", shape)


def fit(source: TensorSource | Unfitted, wanted: Wanted) -> TensorSource:
    """The weights by the model's names, where a prefix or the merging of shards makes them fit."""
    with blamed_on(getattr(source, "description", "The checkpoint")):
        if isinstance(source, Unfitted):
            return source.fit(wanted)
        stored = list(source.names())
        names, note = strip(stored, wanted, source.description)
        if not note:
            return source
        return RenamedSource(source, dict(zip(names, stored, strict=True)), [note])


def strip(
    stored: Sequence[str], wanted: Wanted, label: str, parents: Iterable[str] = ()
) -> tuple[list[str], str]:
    """The stored names without the prefix that wrappers gave them, and a note on it.

    The prefix is taken off with which most of the model's names are there; a note of "" says that
    they are as they were. `parents` are starts of names that count as the model's, too. Raises
    CheckpointError where two names become one.
    """
    known = tuple(parents)
    best, most, prefix = list(stored), _count(stored, wanted, known), ""
    if most == len(stored):
        return best, ""
    bare = [_without_inner(name) for name in stored]
    for start in _prefixes(bare):
        names = [name.removeprefix(start) for name in bare]
        count = _count(names, wanted, known)
        if count > most:
            best, most, prefix = names, count, start
    if best == list(stored):
        return best, ""
    twice = sorted(name for name, count in Counter(best).items() if count > 1)
    if twice:
        raise CheckpointError(
            f"{label}: without what wrapped the model ({prefix or ', '.join(_INNER)}) two tensors "
            f"have one name, {counted(twice)}. Save the state dict of the model alone."
        )
    inner = [w for w in _INNER if any(w in name[len(prefix) :] for name in stored)]
    taken = " and ".join(repr(w) for w in dict.fromkeys([*([prefix] if prefix else []), *inner]))
    return best, f"the names of {label} were read without {taken}"


def _without_inner(name: str) -> str:
    return _INSIDE.sub("", name)


def _prefixes(names: Sequence[str]) -> list[str]:
    """The prefixes of wrappers that names begin with, the shortest first; "" for none."""
    found, last = [""], [""]
    for _ in range(_MOST_WRAPPERS):
        longer = [start + wrapper for start in last for wrapper in _WRAPPERS]
        last = [start for start in longer if any(name.startswith(start) for name in names)]
        found += last
    return found


def _count(names: Sequence[str], wanted: Wanted, parents: tuple[str, ...]) -> int:
    return sum(1 for n in names if n in wanted.shapes or (parents and n.startswith(parents)))
