"""A plan of tensor parallelism as people read it: a table, and notes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from .changes import Change, SurgeryPlan
from .layouts import extent
from .miniature import pattern
from .surgery import split_axis


class Line(NamedTuple):
    """A line of the table: layers alike, `layers` of them, what they are and become.

    `shapes` are those of the weight by rank, `elements` those of one layer, its bias among them.
    """

    path: str
    layers: int
    kind: str
    becomes: str
    whole: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    elements: int
    reason: str


class Described(NamedTuple):
    """A plan in figures: its lines, and the elements of the whole and of each rank's part."""

    lines: list[Line]
    whole: int
    by_rank: list[int]
    notes: list[str]


def table(module: nn.Module, plan: SurgeryPlan) -> list[Line]:
    """The plan as lines, layers alike in one."""
    lines: dict[tuple[Any, ...], list[str]] = {}
    for change in plan.changes:
        if change.becomes in ("numbers", "heads"):
            continue
        if change.becomes == "mixture":
            _add_mixture(module, plan, change, lines)
            continue
        owner, weight = weight_of(module, change)
        axis = split_axis(change, owner)
        shapes = tuple(
            (*weight.shape[:axis], extent(runs), *weight.shape[axis + 1 :])
            for runs in change.by_rank
        )
        kind = type(owner).__name__
        elements = weight.numel() if change.becomes == "by head" else _elements(owner)
        key = (pattern(change.path), kind, change.becomes, tuple(weight.shape), shapes, elements)
        lines.setdefault((*key, change.reason), []).append(change.path)
    changed = {change.path for change in plan.changes if change.becomes != "numbers"}
    changed |= {path for change in plan.changes for path in _experts_inside(module, change)}
    owners = {change.owner for change in plan.changes if change.becomes == "by head"}
    for path, part in module.named_modules():
        weights = (p for p in part._parameters.values() if p is not None and p.ndim > 1)
        weight = max(weights, key=lambda tensor: tensor.numel(), default=None)
        if path in changed | owners or weight is None:
            continue
        shape = tuple(weight.shape)
        reason = plan.kept.get(path, "")
        key = (
            pattern(path),
            type(part).__name__,
            "replicated",
            shape,
            (shape,) * plan.size,
            _elements(part),
            reason,
        )
        lines.setdefault(key, []).append(path)
    rows = [Line(path, len(paths), *facts) for (path, *facts), paths in lines.items()]
    order = {pattern(path): i for i, (path, _) in enumerate(module.named_modules())}
    return sorted(rows, key=lambda line: order.get(line.path, len(order)))


def _experts_inside(module: nn.Module, change: Change) -> list[str]:
    """Paths of the parts of a mixture's experts."""
    if change.becomes != "mixture":
        return []
    stack = f"{change.path}.experts"
    return [f"{stack}.{name}" for name, _ in module.get_submodule(stack).named_modules() if name]


def _add_mixture(
    module: nn.Module, plan: SurgeryPlan, change: Change, lines: dict[tuple[Any, ...], list[str]]
) -> None:
    """A line for the experts of a mixture that ranks have whole; those that are cut have theirs."""
    inside = {*_experts_inside(module, change)}
    if any(own.path in inside for own in plan.changes):
        return
    layer: Any = module.get_submodule(change.path)
    path = f"{change.path}.experts.deepspeed_experts"
    kind = type(layer.expert(0)).__name__
    shapes = tuple((extent(runs),) for runs in change.by_rank)
    elements = sum(p.numel() for p in module.get_submodule(path).parameters())
    key = (pattern(path), kind, "mixture", (layer.count,), shapes, elements)
    lines.setdefault((*key, change.reason), []).append(path)


def _elements(part: nn.Module) -> int:
    return sum(p.numel() for p in part._parameters.values() if p is not None)


def weight_of(module: nn.Module, change: Change) -> tuple[nn.Module, Any]:
    """The module that a change concerns, and the weight that tells its shape."""
    owner = module.get_submodule(change.owner)
    key = "down_proj" if change.becomes == "experts" else "weight"
    if change.becomes == "by head":
        key = change.path.rpartition(".")[2]
    return owner, owner._parameters[key]


def notes_on(module: nn.Module, plan: SurgeryPlan) -> list[str]:
    """The table in short form for the report."""
    lines = table(module, plan)
    split = {f"{x.path} ({x.becomes})": None for x in lines if x.becomes != "replicated"}
    replicated = [x for x in lines if x.becomes == "replicated"]
    notes = [f"tensor parallelism over {plan.size} ranks: {', '.join(split) or 'nothing is split'}"]
    if replicated:
        notes.append(f"replicated: {_by_reason(replicated)}")
    gathered = [x for x in lines if x.becomes == "gathered" and not x.reason.startswith("vocab")]
    if gathered:
        notes.append(f"split by themselves, with outputs gathered: {_by_reason(gathered)}")
    return notes


def _by_reason(lines: Sequence[Line]) -> str:
    """The paths of lines, each reason told once for all that it holds for."""
    paths: dict[str, dict[str, None]] = {}
    for line in lines:
        reason = " ".join(pattern(word) for word in line.reason.split(" "))
        paths.setdefault(reason, {})[line.path or line.kind] = None
    return "; ".join(
        ", ".join(own) + (f" ({reason})" if reason else "") for reason, own in paths.items()
    )
