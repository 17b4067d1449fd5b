"""Parameters on a torch device: assembled row by row from a source of named tensors."""

from typing import NamedTuple

import torch

from ...arrays import to_kind
from ...progress import track
from ...spec import ModelSpec, Rope
from ...weights import LoadPlan, Row, TensorSource, Weight

Weights = dict[str, Weight]


class Params(NamedTuple):
    """The weights outside the layers, those of each layer, and constants of the spec, float32.

    `frequencies` [R/2] of each rotary embedding, `slopes` [H] of each ALiBi.
    """

    outer: Weights
    layers: list[Weights]
    frequencies: dict[Rope, torch.Tensor]
    slopes: dict[tuple[float, ...], torch.Tensor]

    def weights(self) -> list[Weight]:
        """Every leaf."""
        return [w for group in (self.outer, *self.layers) for w in group.values()]


def load_params(
    spec: ModelSpec, plan: LoadPlan, source: TensorSource, dtype: torch.dtype, device: torch.device
) -> Params:
    """The plan's rows on `device` in `dtype`.

    A tensor of a live module is shared where layout, dtype and device agree, and copied where they
    do not or where several are fused; the module itself is never changed.
    """

    def constant(values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    attention = {layer.attention for layer in spec.layers}
    frequencies = {a.rope: constant(a.rope.inv_freq) for a in attention if a.rope}
    slopes = {a.alibi: constant(a.alibi) for a in attention if a.alibi}
    params = Params({}, [{} for _ in spec.layers], frequencies, slopes)
    for row, names in track(plan.rows, f"Loading {source.description}"):
        weight = Weight(_assemble(plan, row, names, source, dtype, device), row.axes)
        group, name = params.outer, row.name
        if name.startswith("layers."):
            _, index, name = name.split(".", 2)
            group = params.layers[int(index)]
        group[name] = weight
    return params


def _assemble(
    plan: LoadPlan,
    row: Row,
    names: tuple[str, ...],
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    if not row.sources:
        return torch.full(plan.shape(row), row.constant, dtype=dtype, device=device)
    blocks = []
    for part, name in zip(row.sources, names, strict=True):
        tensor = to_kind(source.read(name), "torch").permute(row.permutation(part))
        blocks += plan.blocks(row, part, tensor.to(device=device, dtype=dtype))
    whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=row.join_axis)
    return whole.contiguous()
