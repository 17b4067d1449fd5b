"""mxfp4: the experts of gpt-oss, three-dimensional, as fp4 in groups of 32 inputs."""

import re
from collections.abc import Mapping
from typing import Any

from ..scheme import BlockScheme
from .row_major import POWERS, Codes, RowMajor, Scales
from .stored import Checkpoint, LeftOut, Opener, Tensors, check_fields, name_list

METHOD = "mxfp4"
GROUP = 32
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_up_proj|down_proj)\.weight")


def expert_matrix(checkpoint: Checkpoint, name: str, expert: int) -> RowMajor:
    """One expert's matrix [out, in] of the tensors `name`_blocks and `name`_scales.

    The rows of gate_up_proj are a gate's and an up's by turns.
    """
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    shape = checkpoint.check(blocks, ("uint8",))
    if len(shape) != 4 or shape[3] != GROUP // 2 or 0 in shape:
        raise checkpoint.error(
            f"{blocks} has the shape {shape}, expected [experts, out, groups, {GROUP // 2}]."
        )
    if expert >= shape[0]:
        raise checkpoint.error(f"{blocks} has {shape[0]} experts, and no number {expert}.")
    checkpoint.check(scales, POWERS, shape[:3])
    scheme = BlockScheme("fp4_e2m1", columns=GROUP)
    matrix = (shape[1], shape[2] * GROUP)
    stored = Codes(blocks, 4), Scales(scales, POWERS)
    return RowMajor(checkpoint, matrix, scheme, *stored, place=expert)


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens experts' matrices, by names such as `model.layers.0.mlp.experts.3.down_proj.weight`."""
    check_fields(config, METHOD, ("modules_to_not_convert", "dequantize"))
    skipped = LeftOut(name_list(config, METHOD, "modules_to_not_convert"), METHOD)
    checkpoint = Checkpoint(source, METHOD)

    def open_matrix(name: str) -> RowMajor | None:
        found = _EXPERT.fullmatch(name)
        if not found:
            return None
        whole = f"{found[1]}.{found[3]}"
        parts = {f"{whole}_blocks", f"{whole}_scales"}
        if whole in checkpoint.names or checkpoint.names.isdisjoint(parts):
            return None
        if found[1] in skipped:
            raise checkpoint.error(
                f"{whole} is in 4 bits, but modules_to_not_convert says that it is not quantized."
            )
        return expert_matrix(checkpoint, whole, int(found[2]))

    return Opener(open_matrix)
