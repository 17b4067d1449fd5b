"""Tensor parallelism of a caller's own module: what each layer becomes, tried before it is made.

Units that are understood (`units`) are split in the column-row form. Transformers' own plan tells
them, else names of layers, and before both the user's policy where there is one. Any other linear
layer of a stack can be split by itself, its outputs gathered. A unit is trusted if a rehearsal has
shown that it gives the same, or a policy vouches for it. What is left is replicated, and said.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from .....errors import ConfigError, ModelError, a_type
from .....parallel.sharding import split_evenly
from ..fill import is_hf, on_meta
from ..mixtures import MixtureLayer
from .changes import (
    Change,
    SurgeryPlan,
    Unit,
    is_altered,
    is_linear,
    opaque_parts,
    read_layers,
    sizes,
)
from .layers import Part, Seam
from .layouts import Run, Runs, extent
from .miniature import pattern, stacks
from .policy import check_policy, policy_units
from .rehearsal import Rehearsal
from .surgery import experts_of, split_axis, split_module
from .table import Described, notes_on, table, weight_of
from .units import find_units, hf_styles

_LEAST_ROWS = 8  # of an embedding, a rank
_ATTEMPTS = (
    ("attention", "mlp", "experts"),
    ("attention", "mlp"),
    ("attention", "experts"),
    ("mlp", "experts"),
    (),
)


def describe(
    module: nn.Module, size: int, grain: int = 64, policy: Mapping[Any, Any] | None = None
) -> Described:
    """Tell how each layer of `module` splits over `size` ranks; nothing is changed.

    A module on the meta device will do; it cannot be tried out, and loading may tell otherwise.
    Raises what `make_plan` does.
    """
    check_policy(module, policy or {}, size)
    plan, _ = make_plan(module, size, grain, policy or {})
    weights = list(module.parameters())
    by_rank = []
    for rank in range(size):
        kept = kept_sizes(module, plan, rank)
        by_rank.append(sum(kept.get(id(w), w.numel()) for w in weights))
    names: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    notes = [f"{' and '.join(own)} are one (tied)" for own in names.values() if len(own) > 1]
    return Described(table(module, plan), sum(w.numel() for w in weights), by_rank, notes)


def make_plan(
    module: nn.Module, size: int, grain: int, policy: Mapping[Any, Any]
) -> tuple[SurgeryPlan, list[str]]:
    """A plan that was seen to give the same as the whole module, and notes for the report.

    Raises ModelError for a module that is split already, ConfigError for a policy by which it would
    give other values.
    """
    check_whole(module)
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        problem = "TorchScript has no layers that could be exchanged"
        return SurgeryPlan(size, (), {}), [
            f"tensor parallelism: the {kind} is replicated: {problem}"
        ]
    units = find_units(module, size, grain)
    styles = hf_styles(module)
    planned = find_units(module, size, grain, styles) if styles else []
    vouched = policy_units(module, policy, units, size, grain)
    if on_meta(module):
        everything = {pattern(path) for path, _ in module.named_modules()}
        for unit in planned or units:
            unit.problem = unit.problem or unit.guess
        plan = _choose(module, planned or units, vouched, everything, everything, size, grain)
        return plan, [f"tensor parallelism: the {kind} holds no values and was not tried out"]
    rehearsal = Rehearsal(module)
    notes = []
    if rehearsal.obstacle:
        problem = f"could not be tried out before it was split ({rehearsal.obstacle})"
        notes.append(f"tensor parallelism: the {kind} {problem}")
    sure = [pattern(path) for unit in vouched for path in unit.layers]
    for path, doubt in rehearsal.doubts.items():
        if any(own.startswith(f"{path}.") for own in sure):
            continue
        problem = f"{path} may be called in other ways than could be tried out ({doubt})"
        notes.append(f"tensor parallelism: {problem}; an injection_policy can vouch for its layers")
    problem = ""
    failures: dict[str, str] = {}  # what was tried, by what was wrong with it
    tried: list[SurgeryPlan] = []
    for what, trusted, careful in _attempts(units, planned):
        seen = rehearsal.ran, rehearsal.called
        plan = _choose(module, trusted, vouched, *seen, size, grain, careful)
        if plan in tried:
            continue
        tried.append(plan)
        problem = rehearsal.check(size, partial(_split_copy, plan))
        if not problem:
            source = _sources(plan, trusted)
            return plan, [*notes, *failures.values(), *source, *notes_on(module, plan)]
        failures.setdefault(problem, f"tensor parallelism: {what} gave other values ({problem})")
    if vouched:
        raise ConfigError(
            f"injection_policy: split as it says, the {kind} gives other values ({problem}). "
            "Name every linear layer whose outputs are summed, and no other. Those whose outputs "
            "are split are found before it, in the order in which its block registers them."
        )
    layers = [path for path, part in module.named_modules() if is_linear(part)]
    kept = dict.fromkeys(layers, "split, the module gave other values")
    shared = [c for unit in units if unit.kind == "mixture" for c in unit.others or unit.changes]
    plan = SurgeryPlan(size, tuple(shared), kept)
    return plan, [*notes, *failures.values(), *notes_on(module, plan)]


def _attempts(
    units: Sequence[Unit], planned: Sequence[Unit]
) -> Iterator[tuple[str, list[Unit], bool]]:
    """Plans to try in turn, with their units, until one gives what the whole module does.

    First all units that transformers' plan tells, then those by names, fewer and fewer kinds of
    them, each also carefully. Where a layout was guessed, both guesses are tried.
    """
    if any(unit.source == "plan" for unit in planned):
        yield "layers split as transformers' own tp_plan says", list(planned), False
    others = [replace(u, changes=u.others) if u.others else u for u in units]
    has_others = any(unit.others for unit in units)
    for kinds in _ATTEMPTS:
        what = f"{', '.join(kinds)} split as units" if kinds else "layers split alone"
        ways = (units, others) if has_others and "attention" in kinds else (units,)
        for some in ways if "experts" in kinds else (others,):
            own = [unit for unit in some if unit.kind in (*kinds, "mixture")]
            yield from ((what, own, careful) for careful in (False, True))


def _sources(plan: SurgeryPlan, units: Sequence[Unit]) -> list[str]:
    """A note on the units of a plan that transformers' own tells."""
    made = {change.unit for change in plan.changes}
    paths = {pattern(u.path): None for u in units if u.source == "plan" and u.path in made}
    return [f"split as transformers' own tp_plan says: {', '.join(paths)}"] if paths else []


def _split_copy(plan: SurgeryPlan, copy: nn.Module, rank: int, seam: Seam) -> None:
    """Split a miniature, which lacks some layers of each stack.

    Raises ValueError if it lacks all of the layers that are alike.
    """
    present = {path for path, _ in copy.named_modules()}
    absent = {pattern(c.owner) for c in plan.changes} - {pattern(path) for path in present}
    if absent:
        raise ValueError(f"the copy that was tried out has no {', '.join(sorted(absent))}")
    split_module(copy, [c for c in plan.changes if c.owner in present], rank, seam)


def check_whole(module: nn.Module) -> None:
    """Raise ModelError for a module that is split already."""
    parts = [
        path
        for path, part in module.named_modules()
        if isinstance(part, Part) or (isinstance(part, MixtureLayer) and part.seam is not None)
    ]
    if parts:
        raise ModelError(
            f"This {type(module).__name__} is split over ranks already, by another engine "
            f"({parts[0]} and {len(parts) - 1} more layers). It stays split when that engine is "
            "closed: load the module again for a new one."
        )


def kept_sizes(module: nn.Module, plan: SurgeryPlan, rank: int) -> dict[int, int]:
    """Elements that a rank keeps of each parameter that is split, by the parameter's id."""
    counts: dict[int, int] = {}
    for change in plan.changes:
        if not change.by_rank:
            continue
        runs = change.by_rank[rank]
        if change.becomes == "mixture":
            layer: Any = module.get_submodule(change.owner)
            held = experts_of(runs)
            absent = [i for i in range(layer.period) if not layer.is_partial and i not in held]
            counts |= {id(p): 0 for i in absent for p in layer.expert(i).parameters()}
            continue
        if change.becomes == "heads":
            heads: Any = module.get_submodule(change.owner)
            kept = {(start or 0) + i for start, width in runs for i in range(width)}
            others = [p for i, head in enumerate(heads) if i not in kept for p in head.parameters()]
            counts |= {id(p): 0 for p in others}
            continue
        owner, weight = weight_of(module, change)
        own = [weight]
        if change.becomes == "experts":
            own += [owner.gate_up_proj, owner._parameters.get("gate_up_proj_bias")]
        elif change.becomes == "column":
            own.append(owner.bias)
        whole = weight.shape[split_axis(change, owner)]
        counts |= {id(p): p.numel() * extent(runs) // whole for p in own if p is not None}
    return counts


def _choose(
    module: nn.Module,
    units: Sequence[Unit],
    vouched: Sequence[Unit],
    ran: set[str],
    called: set[str],
    size: int,
    grain: int,
    careful: bool = False,
) -> SurgeryPlan:
    """The plan with units whose layers are among the patterns that `ran`, or are vouched for.

    Other layers are split by themselves, freely if they are among those that were `called`; if
    `careful`, none whose weight may be read past their forward.
    """
    changes: list[Change] = []
    why: dict[str, str] = {}
    taken: set[str] = set()
    for unit in [*vouched, *units]:
        layers = unit.layers or [unit.path]
        if taken & set(layers):
            continue
        problem = unit.problem
        has_run = {pattern(path) for path in layers} <= ran
        if unit.kind == "mixture":  # what is whole is right without a trial
            changes += unit.changes if has_run or not unit.others else unit.others
            taken.update(layers)
            continue
        if unit.guess and not has_run:
            problem = problem or unit.guess
        if not any(unit is own for own in vouched) and not has_run:
            problem = problem or "it did not run, or not in all ways, when it was tried out"
        if problem:
            why |= dict.fromkeys(layers, f"{unit.kind}: {problem}")
        else:
            changes += unit.changes
            taken.update(layers)
    changes += _alone(module, taken, why, called, size, grain, careful)
    return _without_torn_ties(module, SurgeryPlan(size, tuple(changes), why))


def _alone(
    module: nn.Module,
    taken: set[str],
    why: dict[str, str],
    called: set[str],
    size: int,
    grain: int,
    careful: bool,
) -> Iterator[Change]:
    """Layers split by themselves: embeddings by rows, linear layers with their outputs gathered.

    Of what is left whole, `why` is told.
    """
    vocab = _vocab_sizes(module, size)
    weights_read = cache(lambda: read_layers(module))
    inside = [f"{path}." if path else "" for path, _ in stacks(module)]
    opaque = opaque_parts(module)

    tried = {  # by the weight, which other layers, never called, may share
        id(part._parameters.get("weight"))
        for path, part in module.named_modules()
        if pattern(path) in called
    }

    def use_elsewhere(path: str, part: nn.Module) -> str | None:
        if id(part.weight) in tried and (not careful or path.startswith(tuple(inside))):
            return None
        names = weights_read()
        own = [name for name in path.split(".") if not name.isdigit()]
        if names is not None and own and own[-1] not in names:
            return None
        return "its weight is read elsewhere, or that is not known"

    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            if part.num_embeddings not in vocab:
                continue
            problem = _own_lookup(part) or use_elsewhere(path, part)
            if problem:
                why[path] = problem
            else:
                runs = _even(part.num_embeddings, size, grain)
                yield Change(path, "vocab", runs, path, f"vocabulary of {part.num_embeddings}")
        elif path in taken:
            continue
        elif whole := next((opaque[start] for start in opaque if path.startswith(start)), ""):
            why[path] = whole
        elif is_linear(part) and path not in taken:
            inputs, outputs = sizes(part)
            is_head = outputs in vocab
            in_stack = any(path.startswith(prefix) for prefix in inside)
            reason = f"vocabulary of {outputs}" if is_head else why.get(path, "by itself")
            if not is_head and (not in_stack or outputs * 8 < inputs or outputs < 2 * size):
                why.setdefault(path, "small, or in no stack of layers")
            elif problem := use_elsewhere(path, part):
                why[path] = problem
            else:
                why.pop(path, None)
                yield Change(path, "gathered", _even(outputs, size, grain), path, reason)


def _own_lookup(part: nn.Embedding) -> str | None:
    """The work of an embedding beside looking up; None for none, or for a known scale."""
    scaled = hasattr(part, "embed_scale")
    if type(part).forward is not nn.Embedding.forward and not scaled:
        return f"{a_type(part)} has a forward of its own"
    if part.max_norm is not None or is_altered(part):
        return "it has max_norm, hooks or a forward of its own"
    return None


def _even(count: int, size: int, grain: int) -> tuple[Runs, ...]:
    return tuple((Run(s.start, s.real),) for s in split_evenly(count, size, grain))


def _vocab_sizes(module: nn.Module, size: int) -> set[int]:
    """Rows of the embeddings of tokens."""
    counts: set[int] = set()
    for part in module.modules():
        if is_hf(part):
            hf: Any = part
            with suppress(AttributeError, NotImplementedError):
                counts.add(hf.get_input_embeddings().num_embeddings)
            counts.add(getattr(hf.config, "vocab_size", None) or 0)
    if not counts:
        tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
        counts = {max(tables, default=0)}
    return {count for count in counts if count >= _LEAST_ROWS * size}


def _without_torn_ties(module: nn.Module, plan: SurgeryPlan) -> SurgeryPlan:
    """The plan less what would split one of two tied weights, or each in another way."""
    users: dict[int, list[tuple[str, str]]] = {}
    for path, part in module.named_modules():
        for key, tensor in part._parameters.items():
            if tensor is not None:
                users.setdefault(id(tensor), []).append((path, key))
    ties = [names for names in users.values() if len(names) > 1]
    kept = dict(plan.kept)
    changes = list(plan.changes)
    while True:
        ways = {c.path: (c.becomes == "row", c.by_rank) for c in changes if c.by_rank}
        torn = set()
        for names in ties:
            splits = {ways.get(path) if key == "weight" else None for path, key in names}
            if len(splits) > 1:
                torn |= {path for path, _ in names}
        units = {c.unit for c in changes if c.path in torn}
        if not units:
            return replace(plan, changes=tuple(changes), kept=kept)
        paths = [c.path for c in changes if c.unit in units]
        kept |= dict.fromkeys(paths, "tied to a weight that is not split alike")
        changes = [c for c in changes if c.unit not in units]
