"""Parameters on a torch device: assembled row by row from a source of named tensors."""

from typing import NamedTuple

import torch

from ...arrays import to_kind
from ...progress import track
from ...spec import ModelSpec, Rope
from ...weights import LoadPlan, Row, TensorSource, Weight

Weights = dict[str, Weight]


class Params(NamedTuple):
    """The weights outside the layers, those of each layer, and the rotary frequencies [D/2]."""

    outer: Weights
    layers: list[Weights]
    frequencies: dict[Rope, torch.Tensor]

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
    ropes = {layer.attention.rope for layer in spec.layers}
    frequencies = {
        r: torch.tensor(r.inv_freq, dtype=torch.float32, device=device) for r in ropes if r
    }
    params = Params({}, [{} for _ in spec.layers], frequencies)
    for row, names in track(plan.rows, f"Loading {source.description}"):
        weight = Weight(_assemble(row, names, source, dtype, device), row.axes)
        group, name = params.outer, row.name
        if name.startswith("layers."):
            _, index, name = name.split(".", 2)
            group = params.layers[int(index)]
        group[name] = weight
    return params


def _assemble(
    row: Row,
    names: tuple[str, ...],
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    parts = []
    for part, name in zip(row.sources, names, strict=True):
        tensor = to_kind(source.read(name), "torch")
        parts.append(tensor.permute(row.permutation(part)).to(device=device, dtype=dtype))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=row.join_axis)
    return whole.contiguous()
