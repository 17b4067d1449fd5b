"""The choice of layers that have a mixture: rows of `mixtures.MIXTURES` name these functions.

Each gives a flag for each of so many layers.
"""

from collections.abc import Callable
from typing import TypeAlias

from ...errors import ModelError, shown
from .fields import ConfigFields

Mixed: TypeAlias = Callable[[ConfigFields, int], list[bool]]


def every(fields: ConfigFields, layers: int) -> list[bool]:
    """All layers."""
    return [True] * layers


def every_by_one(fields: ConfigFields, layers: int) -> list[bool]:
    """All layers; HF does not read the field of HunYuan's shared experts."""
    fields.require("num_shared_expert", 1, [1] * layers)
    return every(fields, layers)


def numbered(fields: ConfigFields, layers: int) -> list[bool]:
    """The layers that `moe_layers` lists have one (Llama 4)."""
    fields.ignore("interleave_moe_layer_step")  # HF folds it into moe_layers
    mixed = fields.take("moe_layers")
    if not isinstance(mixed, list | tuple) or any(type(i) is not int for i in mixed):
        raise ModelError(f"config.json has moe_layers={shown(mixed)}; expected a list of layers.")
    return [i in mixed for i in range(layers)]


def listed(fields: ConfigFields, layers: int) -> list[bool]:
    """The layers that `mlp_layer_types` calls sparse have one."""
    kinds = fields.kinds("mlp_layer_types", layers, ("dense", "sparse"))
    return [kind == "sparse" for kind in kinds]


def listed_behind(fields: ConfigFields, layers: int) -> list[bool]:
    """As `listed`; HF does not read how many come first (GLM-4 MoE Lite)."""
    mixed = listed(fields, layers)
    fields.require("first_k_dense_replace", mixed.count(False))
    return mixed


def behind_dense(fields: ConfigFields, layers: int) -> list[bool]:
    """All layers behind so many dense ones have one."""
    dense = fields.size("num_dense_layers") if fields.take("num_dense_layers") else 0
    return [i >= dense for i in range(layers)]


def behind_first(fields: ConfigFields, layers: int) -> list[bool]:
    """All layers behind the first so many have one (DeepSeek)."""
    fields.require("moe_layer_freq", 1)
    dense = fields.take("first_k_dense_replace", 0)
    if type(dense) is not int or dense < 0:
        raise ModelError(
            f"config.json has first_k_dense_replace={shown(dense)}; expected a number of layers."
        )
    return [i >= dense for i in range(layers)]


def behind_none(fields: ConfigFields, layers: int) -> list[bool]:
    """As `behind_first`, where HF honours no other number than 0 (Solar Open)."""
    fields.require("first_k_dense_replace", 0)
    return behind_first(fields, layers)


def between(fields: ConfigFields, layers: int) -> list[bool]:
    """Each so manieth from one layer to another (ERNIE 4.5)."""
    start, end = fields.take("moe_layer_start_index", 1), fields.take("moe_layer_end_index", -1)
    step = fields.size("moe_layer_interval", 1)
    if not all(type(n) is int for n in (start, end)):
        raise ModelError(
            f"config.json has moe_layer_start_index={shown(start)} and moe_layer_end_index="
            f"{shown(end)}; expected numbers of layers."
        )
    end = layers - 1 if end == -1 else end
    return [start <= i <= end and (i + 1) % step == 0 for i in range(layers)]


def periodic(fields: ConfigFields, layers: int) -> list[bool]:
    """One of each period of layers (Jamba)."""
    step, first = fields.size("expert_layer_period"), fields.take("expert_layer_offset", 0)
    return [i % step == first for i in range(layers)]


def stepped(fields: ConfigFields, layers: int) -> list[bool]:
    """Each so manieth layer that is not listed as dense (Qwen)."""
    dense, step = fields.take("mlp_only_layers", []), fields.size("decoder_sparse_step", 1)
    if not isinstance(dense, list | tuple) or any(type(i) is not int for i in dense):
        raise ModelError(
            f"config.json has mlp_only_layers={shown(dense)}; expected a list of layers."
        )
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]
