"""Parameters on a torch device: assembled row by row from a source of named tensors."""

from dataclasses import replace
from typing import NamedTuple

import torch

from ...arrays import to_kind
from ...checkpoint.reader import Found, RowReader
from ...model.spec import Rope
from ...model.weights import LoadPlan, Row, TensorSource, Weight
from ...parallel.sharding import Shard

Weights = dict[str, Weight]


class Params(NamedTuple):
    """The weights outside the layers, those of each layer, and constants of the spec, float32.

    `frequencies` [R/2] of each rotary embedding, `slopes` [H] of each ALiBi. `notes` are for
    people: how much was read, and how fast. `lent` names the rows that lie in memory of the source,
    which is never written.
    """

    outer: Weights
    layers: list[Weights]
    frequencies: dict[Rope, torch.Tensor]
    slopes: dict[tuple[float, ...], torch.Tensor]
    notes: tuple[str, ...] = ()
    lent: frozenset[str] = frozenset()

    def group(self, row: Row) -> Weights:
        """The weights of the row's layer, or those outside the layers."""
        return self.outer if row.layer is None else self.layers[row.layer]

    def weights(self) -> list[Weight]:
        """Every leaf."""
        return [w for group in (self.outer, *self.layers) for w in group.values()]


def load_params(
    shard: Shard, plan: LoadPlan, source: TensorSource, dtype: torch.dtype, device: torch.device
) -> Params:
    """The shard's part of the plan's rows, on `device` in `dtype`; the rest is not read.

    A tensor of a live module is shared where layout, dtype and device agree, and copied where they
    do not or where several are fused; the module itself is never changed.
    """

    def constant(values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    attention = {layer.attention for layer in shard.spec.layers}
    frequencies = {a.rope: constant(a.rope.inv_freq) for a in attention if a.rope}
    slopes = {a.alibi: constant(a.alibi) for a in attention if a.alibi}
    params = Params({}, [{} for _ in shard.spec.layers], frequencies, slopes)
    lent = set()
    with RowReader([shard], plan, source, shown=shard.rank == 0) as reader:
        for row, (found,) in reader:
            memory = _memory(found)
            data = _assemble(shard, row, found, dtype, device)
            if data.untyped_storage().data_ptr() in memory:
                lent.add(row.name)
            params.group(row)[row.local_name] = Weight(data, row.axes)
    return params._replace(notes=reader.notes(), lent=frozenset(lent))


def refresh_params(params: Params, shard: Shard, plan: LoadPlan, source: TensorSource) -> Params:
    """`params` with the plan's rows read again, written where they lie.

    What was lent and is still the source's memory stays; what was lent and is it no more is copied
    into memory of its own: the old tensors may be in use elsewhere. Then `lent` has fewer rows.
    """
    lent = set(params.lent)
    with RowReader([shard], plan, source, shown=False) as reader:
        for row, (found,) in reader:
            group, name = params.group(row), row.local_name
            old = group[name].data
            data = _assemble(shard, row, found, old.dtype, old.device)
            if row.name not in lent:
                old.copy_(data)
            elif (data.data_ptr(), data.shape) != (old.data_ptr(), old.shape):
                with torch.inference_mode(False):  # else no later call outside of it may write it
                    own = torch.empty_like(old)
                group[name] = replace(group[name], data=own.copy_(data))
                lent.discard(row.name)
    return params._replace(lent=frozenset(lent))


def _memory(found: list[Found]) -> set[int]:
    """Where the torch tensors among what was read lie."""
    arrays = (part.array for part in found)
    return {a.untyped_storage().data_ptr() for a in arrays if isinstance(a, torch.Tensor)}


def _assemble(
    shard: Shard, row: Row, found: list[Found], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if not row.sources:
        return torch.full(shard.shape(row), row.constant, dtype=dtype, device=device)
    blocks = []
    while found:
        read, array = found.pop(0)  # a tensor on the device needs no twin on the host
        tensor = to_kind(array, "torch").permute(read.order).to(device=device, dtype=dtype)
        shapes = shard.block_shapes(row, read)
        for block, shape in zip(shard.blocks(row, read, tensor), shapes, strict=True):
            blocks.append(_padded(block, shape))
    joined = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=row.join_axis)
    return joined.contiguous()


def _padded(block: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`block` with zeros behind its elements, up to `shape`."""
    missing = [n - m for n, m in zip(shape, block.shape, strict=True)]
    if not any(missing):
        return block
    return torch.nn.functional.pad(block, [n for m in reversed(missing) for n in (0, m)])
