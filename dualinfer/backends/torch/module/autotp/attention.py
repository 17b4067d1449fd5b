"""Attention blocks that are split by heads, found by names and checked by shapes."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from .changes import Change, NotUnderstoodError, Unit, is_linear, join_path, method_sources, sizes
from .layers import is_conv1d
from .layouts import (
    Heads,
    Layout,
    Run,
    blocks,
    codegen,
    interleaved,
    join_runs,
    key_rows,
    key_value_blocks,
    layout_of,
    local_heads,
    pad_for_codegen,
    query_rows,
)

_TRIOS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
)
_FUSED = ("query_key_value", "qkv_proj", "Wqkv", "c_attn", "W_pack", "qkv")
_MORE = ("pos_key_proj", "pos_query_proj")  # DeBERTa's, of as many heads as the query
_OUT = ("o_proj", "out_proj", "dense", "c_proj", "o", "out_lin", "wo")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_head_kv", "kv_n_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_per_head")
_GROUPS = ("num_key_value_groups",)
_WIDTHS = (
    "all_head_size",
    "inner_dim",
    "embed_dim",
    "n_embd",
    "hidden_size",
    "split_size",
    "dim",
    "d_model",
)
_KV_WIDTHS = ("kv_dim",)


def head_count(part: nn.Module) -> int | None:
    """The number of heads that a module says it has, if it does."""
    return _number(part, _HEADS)


def _number(owner: Any, names: Sequence[str]) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def find_attention(
    root: nn.Module, path: str, part: nn.Module, size: int, grain: int
) -> Iterator[Unit]:
    """The unit of `part`, at `path` in `root`, if it is an attention block."""
    names = {name for name, _ in part.named_children()}
    trio = next((t for t in _TRIOS if names.issuperset(t)), None)
    fused = next((name for name in _FUSED if name in names), None)
    if trio is None and fused is None:
        return
    unit = Unit(path, "attention")
    projections = list(trio or ((fused,) if fused else ()))
    if fused == "c_attn" and "q_attn" in names:
        projections.append("q_attn")
    projections += [name for name in _MORE if name in names]
    out, row = _output(root, path, part)
    unit.layers = [join_path(path, name) for name in projections] + ([row] if row else [])
    try:
        if out is None or row is None:
            raise NotUnderstoodError("its output projection was not found")
        odd = [name for name in projections if not is_linear(part.get_submodule(name))]
        if odd or not is_linear(out):
            raise NotUnderstoodError(f"{odd[0] if odd else row} is no plain linear layer")
        heads, ranks = _local(part, out, projections, trio is not None, size)
        layouts = _layouts(unit, part, projections, heads)
        if codegen in layouts:
            ranks = [pad_for_codegen(h) for h in ranks]
        unit.changes = attention_changes(unit, part, layouts, heads, ranks, row)
        if layouts == [interleaved] and unit.guess:
            unit.others = attention_changes(unit, part, [blocks], heads, ranks, row)
    except NotUnderstoodError as problem:
        unit.problem = str(problem)
    yield unit


def _output(root: nn.Module, path: str, part: nn.Module) -> tuple[Any, str | None]:
    """The output projection and its path: a child, or BERT's `output.dense` beside `self`."""
    children = dict(part.named_children())
    for name in _OUT:
        if name in children:
            return children[name], join_path(path, name)
    parent, _, own = path.rpartition(".")
    row = join_path(parent, "output.dense")
    try:
        layer = root.get_submodule(row)
    except AttributeError:
        return None, None
    return (layer, row) if own in ("self", "attention") else (None, None)


def _layouts(unit: Unit, part: nn.Module, names: Sequence[str], heads: Heads) -> list[Layout]:
    """The layout of each projection; one that is guessed is noted in the unit."""
    if len(names) > 2:
        return [query_rows, key_rows, key_rows] + [query_rows] * (len(names) - 3)
    if len(names) > 1:
        return [key_value_blocks, query_rows]
    layout = layout_of(part)
    if layout is None:
        unit.guess = f"how {type(part).__name__} fuses q, k and v is not known"
        layout = interleaved if heads.heads == heads.kv_heads else blocks
    return [layout]


def _local(
    part: nn.Module, out: nn.Module, names: Sequence[str], separate: bool, size: int
) -> tuple[Heads, list[Heads]]:
    """All heads, and those of each rank; checked against the shapes."""
    config = getattr(part, "config", None)
    widths = [sizes(part.get_submodule(name))[1] for name in names]
    inner = sizes(out)[0]
    own_heads = _number(part, _HEADS)
    count = own_heads or _number(config, _HEADS)
    dim = _number(part, _HEAD_DIM) or (inner // count if count else None)
    if not dim:
        raise NotUnderstoodError("it does not say how many heads it has")
    heads = inner // dim
    if separate:
        kv_heads = widths[1] // dim
        expected = [heads, kv_heads, kv_heads, *[heads] * (len(names) - 3)]
    elif len(names) > 1:
        kv_heads, expected = heads, [2 * heads, heads]
    else:
        kv_heads = (widths[0] // dim - heads) // 2
        expected = [heads + 2 * kv_heads]
    own_kv_heads = _number(part, _KV_HEADS)
    if (
        inner != heads * dim
        or widths != [n * dim for n in expected]
        or not kv_heads
        or heads % kv_heads
        or (own_heads is not None and own_heads != heads)
        or (own_kv_heads is not None and own_kv_heads != kv_heads and own_kv_heads != heads)
    ):
        raise NotUnderstoodError(
            f"its heads do not fit its shapes (head_dim {dim}, inner width {inner})"
        )
    if heads == 1:
        raise NotUnderstoodError(f"it has {heads} heads for {size} ranks")
    ranks = local_heads(heads, kv_heads, dim, size)
    return Heads(heads, kv_heads, dim, (), ()), ranks


def attention_changes(
    unit: Unit,
    part: nn.Module,
    layouts: Sequence[Layout],
    heads: Heads,
    ranks: Sequence[Heads],
    row: str,
) -> list[Change]:
    """Changes of a block: its layers, what has a part a head, and numbers that its forward reads.

    `layouts` are those of the unit's layers but `row`. Raises NotUnderstoodError.
    """
    reason = f"{heads.heads} heads" + (
        f", {heads.kv_heads} KV heads" if heads.kv_heads != heads.heads else ""
    )
    columns = [path for path in unit.layers if path != row]
    changes = [
        Change(path, "column", tuple(layout(h) for h in ranks), unit.path, reason)
        for path, layout in zip(columns, layouts, strict=True)
    ]
    parts = tuple(query_rows(h) for h in ranks)
    changes.append(Change(row, "row", parts, unit.path, reason, heads=tuple(ranks)))
    changes += _by_head(unit, part, heads, ranks, set(columns) | {row})
    numbers = tuple(_local_numbers(vars(part), heads, h) for h in ranks)
    config = getattr(part, "config", None)
    names = _read_of_config(part) if config is not None else ()
    config_numbers = tuple(
        _local_numbers({n: getattr(config, n, None) for n in names}, heads, h) for h in ranks
    )
    biased = {"alibi", "position_bias"} & {*inspect.signature(type(part).forward).parameters}
    if any(numbers) or any(config_numbers) or biased:
        changes.append(
            Change(
                unit.path,
                "numbers",
                (),
                unit.path,
                reason,
                numbers,
                config_numbers,
                tuple(ranks) if biased else (),
            )
        )
    return changes


def _local_numbers(values: Mapping[str, Any], heads: Heads, own: Heads) -> dict[str, int]:
    """The values of numbers of heads and widths on a rank, by name."""
    queries, keys, dim = len(own.query), len(own.key), heads.head_dim
    group = heads.heads // heads.kv_heads
    roles = (
        (_HEADS, heads.heads, queries),
        (_KV_HEADS, heads.kv_heads, keys),
        (_GROUPS, group, queries // keys),
        (_WIDTHS, heads.width, queries * dim),
        (_KV_WIDTHS, heads.kv_heads * dim, keys * dim),
    )
    return {
        name: local
        for names, whole, local in roles
        for name in names
        if isinstance(values.get(name), int) and values[name] == whole
    }


def _read_of_config(part: nn.Module) -> set[str]:
    """Names of head counts that the methods of an attention block read from its config."""
    names: set[str] = set()
    try:
        for source in method_sources(type(part)):
            names |= set(re.findall(r"self\.config\.(\w+)", source))
    except OSError as error:
        raise NotUnderstoodError("what it reads of its config is not known") from error
    return names & {*_HEADS, *_KV_HEADS}


def _by_head(
    unit: Unit, part: nn.Module, heads: Heads, ranks: Sequence[Heads], layers: set[str]
) -> list[Change]:
    """Changes of what else of an attention block has a part a head.

    Raises NotUnderstoodError for what might have.
    """
    changes: list[Change] = []
    module_lists: list[str] = []
    for name, child in part.named_modules():
        path = join_path(unit.path, name)
        if path in layers or any(name.startswith(f"{outer}.") for outer in module_lists):
            continue
        is_key = name.startswith("k")
        count = heads.kv_heads if is_key else heads.heads
        picks = tuple(join_runs(Run(h, 1) for h in (r.key if is_key else r.query)) for r in ranks)
        if isinstance(child, nn.ModuleList) and len(child) in (heads.heads, heads.kv_heads):
            module_lists.append(name)
            changes.append(Change(path, "heads", picks, unit.path, "a module a head"))
            continue
        if isinstance(child, nn.Embedding):
            if child.embedding_dim == heads.heads:
                changes.append(Change(path, "table", picks, unit.path, "a column a head"))
            continue
        if isinstance(child, nn.Linear) or is_conv1d(child):
            raise NotUnderstoodError(f"the place of {name} in it is not known")
        for key, tensor in child._parameters.items():
            if tensor is None or tensor.numel() == 1:
                continue
            own = None
            if tensor.shape[0] == count and (tensor.ndim > 1 or not name):
                own = picks
            elif not name and tensor.shape[0] == heads.width:
                own = tuple(query_rows(h) for h in ranks)
            if own is not None:
                changes.append(
                    Change(join_path(path, key), "by head", own, unit.path, "a part a head")
                )
            elif tensor.ndim == 1 and tensor.numel() == heads.head_dim:
                continue  # of each head, and the same for all
            elif re.match(r"(q|k|v|sub|inner|attn)", name) or not name:
                full = f"{name}.{key}".lstrip(".")
                raise NotUnderstoodError(f"{full} {tuple(tensor.shape)} spans its heads")
    return changes
