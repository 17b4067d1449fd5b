"""Splitting a module in place: it keeps one rank's part of what a plan changes."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .changes import Change
from .guards import guard
from .layers import LocalHeads, Seam, Shards, SumOutput, expert_axes, is_conv1d
from .layouts import Run, Runs, extent

_LINEAR = ("column", "row", "gathered", "partial")


def split_module(module: nn.Module, changes: Sequence[Change], rank: int, seam: Seam) -> None:
    """Make `changes` for one rank; what it does not keep is freed.

    The module then refuses what `guards` tells.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, child in part._modules.items():
            if child is not None:
                owners.setdefault(id(child), []).append((part, name))
    shards = Shards(module, rank, seam)
    for change in changes:
        old: Any = module.get_submodule(change.owner)
        runs = change.by_rank[rank] if change.by_rank else ()
        if change.by_rank and not runs:  # of an expert that other ranks have
            continue
        if change.becomes in _LINEAR:
            new: nn.Module = shards.linear(old, change.becomes, change.by_rank)
        elif change.becomes == "vocab":
            new = shards.embedding(old, change.by_rank)
        else:
            _change_inside(old, change, runs, rank, shards)
            continue
        for owner, name in owners[id(old)]:
            owner._modules[name] = new
    if changes:
        guard(module, any(change.heads for change in changes))


def split_axis(change: Change, owner: Any) -> int:
    """The axis of the owner's weight that a change splits; of experts, of their down projection."""
    if change.becomes == "experts":
        return (expert_axes(owner) or (1, 2))[1]
    if change.becomes in ("table", "by head", "vocab"):
        return int(change.becomes == "table")
    return int((change.becomes in ("row", "partial")) != is_conv1d(owner))


def experts_of(runs: Runs) -> range:
    """The experts of a mixture that a rank has."""
    first, count = runs[0]
    return range(first or 0, (first or 0) + count)


def _change_inside(part: Any, change: Change, runs: Runs, rank: int, shards: Shards) -> None:
    """Apply a change within a module that stays."""
    if change.becomes == "by head":
        key = change.path.rpartition(".")[2]
        part._parameters[key] = shards.take(part._parameters[key], runs, 0)
    elif change.becomes == "table":
        part._parameters["weight"] = shards.take(part.weight, runs, 1)
        part.embedding_dim = extent(runs)
    elif change.becomes == "heads":
        heads = list(part)
        part._modules.clear()
        for start, width in runs:
            part.extend(heads[start or 0 : (start or 0) + width])
    elif change.becomes == "mixture":
        part.keep(experts_of(runs))
        part.seam = shards.seam
    elif change.becomes == "experts":
        _split_experts(part, runs, rank, shards)
    if change.numbers:
        vars(part).update(change.numbers[rank])
    if any(change.config_numbers):
        part.config = _own_config(part.config, change.config_numbers[rank])
    if change.heads:
        own = change.heads[rank]
        names = tuple(inspect.signature(part.forward).parameters)
        hook = LocalHeads(own.heads, tuple(head or 0 for head in own.query), names)
        part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def _own_config(config: Any, numbers: Mapping[str, int]) -> Any:
    """A config with other `numbers`; in all else it is `config`, whatever is set on that later."""
    names = getattr(config, "attribute_map", {})
    kind = type(config)
    fixed = {names.get(k, k): property(lambda _, value=v: value) for k, v in numbers.items()}
    own = object.__new__(type(kind.__name__, (kind,), fixed))
    object.__setattr__(own, "__dict__", vars(config))
    return own


def _split_experts(part: Any, runs: Runs, rank: int, shards: Shards) -> None:
    """A part of each expert's width; what they give is summed once, the bias in rank 0's."""
    axes = expert_axes(part)
    assert axes is not None
    ffn = part.down_proj.shape[axes[1]]
    own = part._parameters
    if getattr(part, "is_concatenated", True):
        up = (*runs, *(Run(at if at is None else at + ffn, width) for at, width in runs))
    else:  # gate and up take turns
        up = tuple(Run(at if at is None else 2 * at, 2 * width) for at, width in runs)
    own["gate_up_proj"] = shards.take(part.gate_up_proj, up, axes[0])
    own["down_proj"] = shards.take(part.down_proj, runs, axes[1])
    if "gate_up_proj_bias" in own:
        own["gate_up_proj_bias"] = shards.take(part.gate_up_proj_bias, up, 1)
    if "down_proj_bias" in own and rank:
        bias = part.down_proj_bias
        own["down_proj_bias"] = nn.Parameter(torch.zeros_like(bias), bias.requires_grad)
    part.register_forward_hook(SumOutput(shards.seam), prepend=True)
