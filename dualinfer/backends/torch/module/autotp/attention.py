"""Attention blocks that are split by heads, found by names and checked by shapes."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def find_attention(root: nn.Module, path: str, part: nn.Module, size: int) -> Iterator[Unit]:
    """The unit of `part`, at `path` in `root`, if it is an attention block of known names."""
    names = {name for name, _ in part.named_children()}
    trio = next((t for t in _TRIOS if names.issuperset(t)), None)
    fused = next((name for name in _FUSED if name in names), None)
    if trio is None and fused is None:
        return
    columns = list(trio or ((fused,) if fused else ()))
    if fused == "c_attn" and "q_attn" in names:
        columns.append("q_attn")
    columns += [name for name in _MORE if name in names]
    row = _output(root, path, part)
    unit = Unit(path, "attention", [join_path(path, name) for name in columns])
    unit.layers += [row] if row else []
    try:
        if row is None:
            raise NotUnderstoodError("its output projection was not found")
        layers = [root.get_submodule(own) for own in unit.layers]
        fill_attention(unit, part, layers, size)
    except NotUnderstoodError as problem:
        unit.problem = str(problem)
    yield unit


def is_attention(part: nn.Module, columns: Iterable[str]) -> bool:
    """True for a block that says something of heads, or whose layers have attention's names."""
    known = {*_FUSED, *(name for trio in _TRIOS for name in trio)}
    return _number(part, (*_HEADS, *_HEAD_DIM)) is not None or not known.isdisjoint(columns)


def _output(root: nn.Module, path: str, part: nn.Module) -> str | None:
    """The path of the output projection: a child, or BERT's `output.dense` beside `self`."""
    children = dict(part.named_children())
    name = next((name for name in _OUT if name in children), None)
    if name is not None:
        return join_path(path, name)
    parent, _, own = path.rpartition(".")
    row = join_path(parent, "output.dense")
    try:
        root.get_submodule(row)
    except AttributeError:
        return None
    return row if own in ("self", "attention") else None


def fill_attention(unit: Unit, part: nn.Module, layers: Sequence[Any], size: int) -> None:
    """Give a unit, whose last layer is the output projection, its changes.

    A projection has rows for query heads, for keys or values, or for all of them; its name or,
    in a unit by the policy, its width tells. Raises NotUnderstoodError.
    """
    odd = [path for path, m in zip(unit.layers, layers, strict=True) if not is_linear(m)]
    if odd:
        raise NotUnderstoodError(f"{odd[0]} is no plain linear layer")
    *widths, inner = [sizes(m)[1] for m in layers[:-1]] + [sizes(layers[-1])[0]]
    names = [path.rpartition(".")[2] for path in unit.layers[:-1]]
    roles = [_role(name, len(names)) for name in names]
    if unit.source == "policy":
        roles = ["query" if width == inner else "key" for width in widths]
    heads = _heads(part, inner, list(zip(roles, widths, strict=True)), unit.source != "plan")
    if heads.heads == 1:
        raise NotUnderstoodError(f"it has {heads.heads} heads for {size} ranks")
    ranks = local_heads(heads.heads, heads.kv_heads, heads.head_dim, size)
    layouts = [_LAYOUTS[role] for role in roles]
    if roles == ["all"]:
        known = layout_of(part)
        if known is None:
            unit.guess = f"how {type(part).__name__} fuses q, k and v is not known"
            known = interleaved if heads.heads == heads.kv_heads else blocks
        layouts = [known]
    if codegen in layouts:
        ranks = [pad_for_codegen(h) for h in ranks]
    dims = [heads.head_dim] * len(widths)
    for i, (role, width) in enumerate(zip(roles, widths, strict=True)):
        if role in ("query", "key"):
            dims[i] = width // (heads.heads if role == "query" else heads.kv_heads)
    columns = list(zip(layouts, dims, strict=True))
    unit.changes = attention_changes(unit, part, columns, heads, ranks)
    if layouts == [interleaved] and unit.guess:
        columns = [(blocks, heads.head_dim)]
        unit.others = attention_changes(unit, part, columns, heads, ranks)


_LAYOUTS: dict[str, Layout] = {
    "query": query_rows,
    "key": key_rows,
    "keys and values": key_value_blocks,
    "all": blocks,
}


def _role(name: str, count: int) -> str:
    """The heads that a projection of this name, one of `count`, has rows for."""
    if name in _FUSED:
        return "all" if count == 1 else "keys and values"
    return "key" if any(name in trio[1:] for trio in _TRIOS) else "query"


def _heads(part: nn.Module, inner: int, columns: Sequence[tuple[str, int]], strict: bool) -> Heads:
    """All heads of a block, by its numbers, and by the roles and widths of its columns.

    `strict`: a query projection has no more than the queries, and all heads are equally wide.
    """
    config = getattr(part, "config", None)
    own_heads, own_kv_heads = _number(part, _HEADS), _number(part, _KV_HEADS)
    count = own_heads or _number(config, _HEADS)
    dim = _number(part, _HEAD_DIM)
    if (own_heads and not inner % own_heads) or not dim or inner % dim:
        dim = inner // count if count else dim
    if not dim:
        raise NotUnderstoodError("it does not say how many heads it has")
    heads = inner // dim
    of_keys = [width for role, width in columns if role == "key"]
    kv_heads = heads
    if columns[0][0] == "all":
        kv_heads = (columns[0][1] // dim - heads) // 2
    elif of_keys:
        kv_heads = of_keys[0] // dim
        if {*of_keys} != {kv_heads * dim}:  # keys and values of other widths
            kv_heads = own_kv_heads or _number(config, _KV_HEADS) or heads
    whole = {
        "query": heads,
        "key": kv_heads,
        "keys and values": 2 * heads,
        "all": heads + 2 * kv_heads,
    }
    fits = all(
        width == whole[role] * dim or (not strict and width % whole[role] == 0)
        for role, width in columns
        if kv_heads
    )
    if (
        inner != heads * dim
        or not fits
        or not kv_heads
        or heads % kv_heads
        or (own_heads is not None and own_heads != heads)
        or (own_kv_heads is not None and own_kv_heads != kv_heads and own_kv_heads != heads)
    ):
        raise NotUnderstoodError(
            f"its heads do not fit its shapes (head_dim {dim}, inner width {inner})"
        )
    return Heads(heads, kv_heads, dim, (), ())


def attention_changes(
    unit: Unit,
    part: nn.Module,
    columns: Sequence[tuple[Layout, int]],
    heads: Heads,
    ranks: Sequence[Heads],
) -> list[Change]:
    """Changes of a block: its layers, what has a part a head, and numbers that its forward reads.

    `columns` are layouts of the unit's layers but the last, with their widths of a head. Raises
    NotUnderstoodError.
    """
    reason = f"{heads.heads} heads" + (
        f", {heads.kv_heads} KV heads" if heads.kv_heads != heads.heads else ""
    )
    *paths, row = unit.layers
    changes = [
        Change(
            path,
            "column",
            tuple(layout(h._replace(head_dim=dim)) for h in ranks),
            unit.path,
            reason,
        )
        for path, (layout, dim) in zip(paths, columns, strict=True)
    ]
    parts = tuple(query_rows(h) for h in ranks)
    changes.append(Change(row, "row", parts, unit.path, reason, heads=tuple(ranks)))
    changes += _by_head(unit, part, heads, ranks)
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


def _by_head(unit: Unit, part: nn.Module, heads: Heads, ranks: Sequence[Heads]) -> list[Change]:
    """Changes of what else of an attention block has a part a head.

    Raises NotUnderstoodError for what might have; transformers' plan names all that has.
    """
    is_planned = unit.source == "plan"
    changes: list[Change] = []
    module_lists: list[str] = []
    for name, child in part.named_modules():
        path = join_path(unit.path, name)
        if path in unit.layers or any(name.startswith(f"{outer}.") for outer in module_lists):
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
            if is_planned:
                continue
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
            elif is_planned or (tensor.ndim == 1 and tensor.numel() == heads.head_dim):
                continue  # of each head, and the same for all
            elif re.match(r"(q|k|v|sub|inner|attn)", name) or not name:
                full = f"{name}.{key}".lstrip(".")
                raise NotUnderstoodError(f"{full} {tuple(tensor.shape)} spans its heads")
    return changes
