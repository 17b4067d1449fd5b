"""Find units to split together: attention, MLPs and experts, by transformers' plan or by names.

A unit begins with column-parallel layers and ends with a row-parallel one, whose sum over ranks is
its only collective. What is not understood in full is no unit, and says why.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .....errors import ConfigError, a_type
from .....parallel.sharding import Place, make_places, split_evenly
from ..fill import is_hf
from ..mixtures import MixtureLayer, mixture_layers
from .attention import fill_attention, find_attention, head_count, is_attention
from .changes import (
    Change,
    NotUnderstoodError,
    Unit,
    altered_inside,
    is_altered,
    is_linear,
    join_path,
    opaque_parts,
    sizes,
)
from .layers import EXPERT_WEIGHTS, expert_axes
from .layouts import Run, extent
from .miniature import pattern

_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("w1",), "w2"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("lin1",), "lin2"),
    (("ffn",), "ffn_output"),
    (("intermediate.dense",), "output.dense"),
)
_ALIGNED = 8  # elements
_FFN = ("intermediate_size", "intermediate_dim", "ffn_dim", "inner_dim", "hidden_dim")


def hf_styles(module: nn.Module) -> dict[str, str]:
    """How transformers' own plan splits a module's parts, by pattern of the path."""
    found: dict[str, str] = {}
    for path, part in module.named_modules():
        plan: Any = getattr(part, "_tp_plan", None) if is_hf(part) else None
        inner = {join_path(pattern(path), own): style for own, style in (plan or {}).items()}
        found = inner | found  # the outermost model has the last word
    return found


def find_units(
    module: nn.Module, size: int, grain: int, styles: Mapping[str, str] | None = None
) -> list[Unit]:
    """The attention blocks, MLPs and experts of a module, split over `size` ranks.

    By `styles` (see `hf_styles`) where these name layers that fit each other, else by names.
    """
    units: list[Unit] = []
    taken: set[str] = set()
    inside = [f"{path}." if path else "" for path, _ in mixture_layers(module)]
    owners = Counter(id(child) for part in module.modules() for child in part._modules.values())
    opaque = opaque_parts(module)
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) or f"{path}.".startswith(tuple(opaque)):
            continue
        if isinstance(part, MixtureLayer):
            units.append(_mixture(path, part, size, grain))
            taken.update(units[-1].layers)
        if f"{path}.".startswith(tuple(inside)):
            continue
        for found in (
            _planned(module, path, part, size, grain, styles or {}),
            find_attention(module, path, part, size),
            _experts(path, part, size, grain),
            _mlps(path, part, size, grain),
        ):
            for unit in found:
                if taken & set(unit.layers):
                    continue
                shared = [p for p in unit.layers if owners[id(module.get_submodule(p))] > 1]
                if shared and not unit.problem:
                    unit.problem = f"{shared[0]} is a layer of other parts, too"
                unit.problem = unit.problem or altered_inside(module, unit)
                units.append(unit)
                taken.update(unit.layers)
    return units


def _planned(
    root: nn.Module, path: str, part: nn.Module, size: int, grain: int, styles: Mapping[str, str]
) -> Iterator[Unit]:
    """The unit of a part whose own layers `styles` names: columns, and one row.

    Layers whose outputs are to be gathered are no unit there, and may be one by their names.
    """
    own = {
        name: styles.get(pattern(join_path(path, name)), "") for name, _ in part.named_children()
    }
    columns = [name for name, style in own.items() if style in ("colwise", "packed_colwise")]
    rows = [name for name, style in own.items() if style in ("rowwise", "packed_rowwise")]
    if not columns or len(rows) != 1:
        return
    layers = [join_path(path, name) for name in (*columns, *rows)]
    kind = "attention" if is_attention(part, columns) else "mlp"
    unit = Unit(path, kind, layers, source="plan")
    try:
        own_layers = [root.get_submodule(own) for own in layers]
        if kind == "attention":
            fill_attention(unit, part, own_layers, size)
        else:
            _fill_pair(unit, part, own_layers, size, grain)
    except NotUnderstoodError:  # names may tell more
        return
    yield unit


def _mlps(path: str, part: nn.Module, size: int, grain: int) -> Iterator[Unit]:
    for columns, row in _MLPS:
        try:
            layers: list[Any] = [part.get_submodule(name) for name in (*columns, row)]
        except AttributeError:
            continue
        if not all(hasattr(layer, "weight") for layer in layers):
            continue
        unit = Unit(path, "mlp", [join_path(path, name) for name in (*columns, row)])
        try:
            _fill_pair(unit, part, layers, size, grain)
        except NotUnderstoodError as problem:
            unit.problem = str(problem)
        yield unit
        return


def _fill_pair(unit: Unit, part: nn.Module, layers: Sequence[Any], size: int, grain: int) -> None:
    """Give a unit of column-parallel layers and a row-parallel one, the last, its changes."""
    odd = [path for path, layer in zip(unit.layers, layers, strict=True) if not is_linear(layer)]
    if odd:
        raise NotUnderstoodError(f"{odd[0]} is no plain linear layer")
    ffn = sizes(layers[-1])[0]
    widths = {sizes(layer)[1] for layer in layers[:-1]}
    is_packed = widths == {2 * ffn} and len(layers) == 2
    if widths != {ffn} and not is_packed:
        raise NotUnderstoodError(f"its widths {sorted(widths)} do not fit {ffn} inputs")
    if ffn < size:
        raise NotUnderstoodError(f"it is {ffn} wide, for {size} ranks")
    shares = split_evenly(ffn, size, grain)
    rows = tuple((Run(s.start, s.real),) for s in shares)
    packed = tuple((Run(s.start, s.real), Run(ffn + s.start, s.real)) for s in shares)
    reason = f"MLP of width {ffn}" + (", gate and up in blocks" if is_packed else "")
    unit.changes = [
        Change(path, "column", packed if is_packed else rows, unit.path, reason)
        for path in unit.layers[:-1]
    ]
    unit.changes.append(Change(unit.layers[-1], "row", rows, unit.path, reason))
    numbers = tuple({name: s.real for name in _FFN if vars(part).get(name) == ffn} for s in shares)
    if any(numbers):
        unit.changes.append(Change(unit.path, "numbers", (), unit.path, reason, numbers))


def _experts(path: str, part: nn.Module, size: int, grain: int) -> Iterator[Unit]:
    """HF's fused experts; see `layers.expert_axes`."""
    own: dict[str, Any] = {name: p for name, p in part._parameters.items() if p is not None}
    if "down_proj" not in own or own["down_proj"].ndim != 3:
        return
    unit = Unit(path, "experts")
    try:
        if not {"gate_up_proj", "down_proj"} <= set(own) <= EXPERT_WEIGHTS:
            raise NotUnderstoodError(f"its parameters {', '.join(sorted(own))} are not known")
        axes = expert_axes(part)
        if axes is None:
            raise NotUnderstoodError("its gate and up projections do not fit its down projection")
        ffn = own["down_proj"].shape[axes[1]]
        if is_altered(part) or ffn < size:
            raise NotUnderstoodError(f"it has hooks of its own, or {ffn} columns for {size} ranks")
        shares = split_evenly(ffn, size, grain)
        # Grouped products need rows of 16 bytes, which zeros fill up.
        filled = ((Run(s.start, s.real), Run(None, -s.real % _ALIGNED)) for s in shares)
        rows = tuple(tuple(run for run in runs if run.width) for runs in filled)
        embed = own["down_proj"].shape[3 - axes[1]]
        numbers = tuple(
            {name: extent(r) for name in _FFN if vars(part).get(name) == ffn != embed} for r in rows
        )
        reason = f"{own['down_proj'].shape[0]} experts of width {ffn}"
        unit.changes = [Change(path, "experts", rows, path, reason, numbers)]
    except NotUnderstoodError as problem:
        unit.problem = str(problem)
    yield unit


def _mixture(path: str, part: MixtureLayer, size: int, grain: int) -> Unit:
    """DeepSpeed's experts: cut within where they are plain MLPs, or else shared out whole.

    What they give is summed once, so that an expert's second layer makes no sum of its own.
    """
    unit = Unit(path, "mixture")
    stack = join_path(path, "experts.deepspeed_experts")
    own: Any = part.experts.deepspeed_experts
    unit.layers = [
        join_path(stack, name) for name, layer in own.named_modules() if is_linear(layer)
    ]
    width = size // part.parts
    whole = _shared_out(unit, part, size, make_places(size, size))
    if part.parts == size or (part.parts == 1 and not part.may_cut) or part.is_partial:
        unit.changes = whole
        return unit
    places = make_places(size, part.parts)
    try:
        cut = [c for i in range(part.count) for c in _cut(unit, stack, part, i, places, grain)]
    except NotUnderstoodError as problem:
        if part.parts > 1:
            raise ConfigError(
                f"moe.ep_size={part.parts} over {size} processes: {width} would share the width of "
                f"each expert of {path}, and how is not known ({problem}). Use {size}, or 1."
            ) from problem
        unit.changes = whole
        return unit
    unit.changes = [*cut, *_shared_out(unit, part, size, places)]
    unit.others = whole if part.parts == 1 else []
    return unit


def _shared_out(unit: Unit, part: MixtureLayer, size: int, places: list[Place]) -> list[Change]:
    """The change that gives each rank its experts."""
    parts = max(place.part for place in places) + 1
    shares = split_evenly(part.count, parts, 1)
    own = [shares[place.part] for place in places]
    runs = tuple((Run(share.start, share.real),) for share in own)
    how = f"{part.count} experts" + (f" in {parts} parts" if parts > 1 else "")
    return [Change(unit.path, "mixture", runs, unit.path, how)]


def _cut(
    unit: Unit, stack: str, part: MixtureLayer, i: int, places: list[Place], grain: int
) -> Iterator[Change]:
    """Changes within one expert, for the ranks that have it; () for others."""
    width, parts = max(p.width for p in places) + 1, max(p.part for p in places) + 1
    expert = part.expert(i)
    found = [
        mlp for name, inner in expert.named_modules() for mlp in _mlps(name, inner, width, grain)
    ]
    linears = {name for name, layer in expert.named_modules() if is_linear(layer)}
    if len(found) != 1 or set(found[0].layers) != linears:
        raise NotUnderstoodError(f"{a_type(expert)} is no MLP of known names")
    problem = found[0].problem or altered_inside(expert, found[0])
    if problem:
        raise NotUnderstoodError(problem)
    share = next(
        n for n, own in enumerate(split_evenly(part.count, parts, 1)) if own.start <= i < own.stop
    )
    for change in found[0].changes:
        by_rank = tuple(
            change.by_rank[p.width] if p.part == share else () for p in places if change.by_rank
        )
        numbers: Any = tuple(
            change.numbers[p.width] if p.part == share else {} for p in places if change.numbers
        )
        yield replace(
            change,
            path=join_path(f"{stack}.{i}", change.path),
            becomes="partial" if change.becomes == "row" else change.becomes,
            by_rank=by_rank,
            numbers=numbers,
            unit=unit.path,
            reason=f"expert, {change.reason}",
        )


def unit_of(root: nn.Module, layer: str, row: str, taken: set[str], size: int, grain: int) -> Unit:
    """The unit that ends with `row`, which a policy names, in the layer at path `layer`.

    Its columns are the linear layers before it in its own parent whose widths fit: those of an MLP,
    or, where the parent says how many heads it has, of attention.
    """
    unit = Unit(row, "named by the policy", [row], source="policy")
    if row != layer:
        unit.path = row.rpartition(".")[0]
        try:
            _fill_named(root, unit, root.get_submodule(row), taken, size, grain)
        except NotUnderstoodError as problem:
            unit.problem = str(problem)
    unit.problem = unit.problem or altered_inside(root, unit)
    opaque = opaque_parts(root)
    inside = next((prefix for prefix in opaque if row.startswith(prefix)), None)
    if inside is not None:
        unit.problem = opaque[inside]
    return unit


def _fill_named(
    root: nn.Module, unit: Unit, last: Any, taken: set[str], size: int, grain: int
) -> None:
    """Give a policy's unit its column-parallel layers and its changes."""
    part, row, inner = root.get_submodule(unit.path), unit.layers[-1], sizes(last)[0]
    before: list[tuple[str, int]] = []
    for name, child in part.named_modules():
        path = join_path(unit.path, name)
        if path == row:
            break
        if is_linear(child) and path not in taken:
            before.append((path, sizes(child)[1]))
    count = head_count(part) or 0
    dim = inner // count if count and inner % count == 0 else 0
    fits = {path: n for path, n in before if n == inner or (dim and n % dim == 0)}
    unit.layers = [*fits, row]
    if not fits:
        raise NotUnderstoodError("no linear layer before it has its width")
    layers = [root.get_submodule(path) for path in unit.layers]
    if not dim:
        _fill_pair(unit, part, layers, size, grain)
    elif len(fits) < 3 or len({*fits.values()}) > 2:
        raise NotUnderstoodError(f"how its {count} heads lie in {', '.join(fits)}")
    else:
        fill_attention(unit, part, layers, size)
