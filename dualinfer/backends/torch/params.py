"""Parameters on a torch device: assembled row by row from a source of named tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from ...arrays import from_numpy
from ...checkpoint.reader import RowReader
from ...model.load_plan import LoadPlan, TensorSource
from ...model.spec import Rope
from ...model.weights import (
    Leaf,
    Row,
    Weight,
    encoder_weights,
    get_leaf,
    make_leaf,
    parts_of,
    put_leaf,
    with_parts,
)
from ...parallel.shard import Found, Shard, fit_blocks
from ...quantization.scheme import padding
from ..streaming import Streaming
from .streaming import pack

Weights = dict[str, Leaf]


class Params(NamedTuple):
    """The weights outside the layers, those of each layer, and constants of the spec, float32.

    `frequencies` [R/2] of each rotary embedding, `slopes` [H] of each ALiBi. `notes` are for
    people: how much was read, and how fast. `lent` names the rows that lie in memory of the source,
    which is never written. `blocks` hold the matrices of the layers that lie in host memory.
    """

    outer: Weights
    layers: Sequence[Weights]
    frequencies: dict[Rope, torch.Tensor]
    slopes: dict[tuple[float, ...], torch.Tensor]
    notes: tuple[str, ...] = ()
    lent: frozenset[str] = frozenset()
    blocks: Mapping[int, torch.Tensor] = MappingProxyType({})

    def group(self, row: Row) -> Weights:
        """The weights of the row's layer, or those outside the layers."""
        return self.outer if row.layer is None else self.layers[row.layer]

    def of_encoder(self, decoder: int) -> "Params":
        """The weights of the encoder, whose layers follow those of a `decoder` of so many."""
        outer = encoder_weights(self.outer)
        return self._replace(outer=outer, layers=self.layers[decoder:])

    def leaves(self) -> list[Leaf]:
        """Every leaf."""
        return [leaf for group in (self.outer, *self.layers) for leaf in group.values()]


def load_params(
    shard: Shard,
    plan: LoadPlan,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    streaming: Streaming | None = None,
) -> Params:
    """The shard's part of the plan's rows, on `device` in `dtype`; the rest is not read.

    A tensor of a live module is shared where layout, dtype and device agree, and copied where they
    do not or where several are fused; the module itself is never changed. What `streaming` moves
    stays in host memory.
    """

    def constant(values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    attention = {own.attention for own in shard.spec.all_layers if own.attention}
    frequencies = {a.rope: constant(a.rope.tables) for a in attention if a.rope}
    slopes = {a.alibi: constant(a.alibi) for a in attention if a.alibi}
    params = Params({}, [{} for _ in shard.spec.all_layers], frequencies, slopes)
    lent, plan = set(), fit_blocks(plan, [shard])
    blocks: dict[int, torch.Tensor] = {}
    moves = streaming.moves if streaming else lambda row: False
    left = Counter(row.layer for row, _ in plan.rows if moves(row))
    with RowReader([shard], plan, source, _name(dtype), shown=shard.rank == 0) as reader:
        for row, (found,) in reader:
            memory = _memory(found)
            place = torch.device("cpu") if moves(row) else device
            parts = _assemble(shard, row, found, dtype, place)
            if memory & {part.untyped_storage().data_ptr() for part in parts.values()}:
                lent.add(row.name)
            width = shard.width(row)
            put_leaf(params.group(row), row, make_leaf(row, parts, dtype, width))
            if moves(row):
                lent.discard(row.name)
                left[row.layer] -= 1
                if row.layer is not None and not left[row.layer]:
                    blocks[row.layer] = pack(params.layers[row.layer], device)
    return params._replace(notes=reader.notes(), lent=frozenset(lent), blocks=blocks)


def refresh_params(params: Params, shard: Shard, plan: LoadPlan, source: TensorSource) -> Params:
    """`params` with the plan's rows read again, written where they lie.

    What was lent and is still the source's memory stays; what was lent and is it no more is copied
    into memory of its own: the old tensors may be in use elsewhere. Then `lent` has fewer rows.
    """
    lent, plan = set(params.lent), fit_blocks(plan, [shard])
    some = next(leaf for leaf in params.leaves() if isinstance(leaf, Weight))
    with RowReader([shard], plan, source, _name(some.dtype), shown=False) as reader:
        for row, (found,) in reader:
            group = params.group(row)
            leaf = get_leaf(group, row)
            old = parts_of(leaf)
            new = _assemble(shard, row, found, leaf.dtype, old["data"].device)
            if row.name not in lent:
                for part, tensor in new.items():
                    old[part].copy_(tensor)
            elif any(_place(old[part]) != _place(tensor) for part, tensor in new.items()):
                with torch.inference_mode(False):  # else no later call outside of it may write it
                    own = {part: torch.empty_like(tensor) for part, tensor in old.items()}
                copies = {part: tensor.copy_(new[part]) for part, tensor in own.items()}
                put_leaf(group, row, with_parts(leaf, copies))
                lent.discard(row.name)
    return params._replace(lent=frozenset(lent))


def _name(dtype: torch.dtype) -> str:
    """NumPy's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _memory(found: list[Found]) -> set[int]:
    """Addresses of the torch tensors among what was read."""
    arrays = (part.array for part in found)
    return {a.untyped_storage().data_ptr() for a in arrays if isinstance(a, torch.Tensor)}


def _assemble(
    shard: Shard, row: Row, found: list[Found], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The row's arrays on the device: in `dtype`, or as they are stored if they are quantized."""
    if not row.sources:
        own = torch.float32 if row.wide else dtype
        if callable(row.constant):
            return {"data": from_numpy(shard.made(row), "torch").to(device=device, dtype=own)}
        return {"data": torch.full(shard.shape(row), row.constant, dtype=own, device=device)}
    target = None if row.scheme else torch.float32 if row.wide else dtype

    def place(array: np.ndarray | torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        tensor = from_numpy(array, "torch") if isinstance(array, np.ndarray) else array
        return tensor.permute(order).to(device=device, dtype=target)

    by_part: dict[str, list[Found]] = {}
    while found:
        one = found.pop(0)
        by_part.setdefault(one.read.source.part, []).append(one)
    parts = {}
    for part, own in by_part.items():
        pad = padding(row.scheme, part, _padded)
        array = shard.assemble(row, own, place, pad, torch.cat)
        parts[part] = (array[..., list(row.picks)] if row.picks else array).contiguous()
    return parts


def _padded(block: torch.Tensor, shape: tuple[int, ...], value: int) -> torch.Tensor:
    """`block` with `value` behind its elements, up to `shape`."""
    missing = [n - m for n, m in zip(shape, block.shape, strict=True)]
    if not any(missing):
        return block
    return torch.nn.functional.pad(
        block, [n for m in reversed(missing) for n in (0, m)], value=value
    )
