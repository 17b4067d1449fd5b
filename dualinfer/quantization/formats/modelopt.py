"""NVIDIA ModelOpt: fp8 with a scale for all, for rows or for blocks, and NVFP4.

The format is told by config.json, or by hf_quant_config.json beside it.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..scheme import Activation, BlockScheme
from .row_major import E4M3, Codes, Factor, RowMajor, Scales, matrix_shape
from .stored import Checkpoint, Opener, Tensors, check_fields, name_list, refuse

METHOD = "modelopt"
FILE = "hf_quant_config.json"
KNOWN = """
    quant_algo group_size exclude_modules ignore has_zero_point pre_quant_scale quantized_layers
""".split()
# `config_groups` says again what `quant_algo` does.
HARMLESS = "config_groups producer".split()
ALGORITHMS = {
    "FP8": BlockScheme("fp8_e4m3", 0, activation=Activation("fp8_e4m3", dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": BlockScheme("fp8_e4m3", activation=Activation("fp8_e4m3")),
    "FP8_PB_WO": BlockScheme("fp8_e4m3", 128, 128),
    "NVFP4": BlockScheme(
        "fp4_e2m1", columns=16, outer=True, activation=Activation("fp4_e2m1", block=16, outer=True)
    ),
}
INSTEAD = (
    f"These are: {', '.join(ALGORITHMS)}. Pass a checkpoint in one of them, or the model that it "
    "was made from."
)


def from_file(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config that hf_quant_config.json stands for."""
    inner = fields.get("quantization")
    if not isinstance(inner, Mapping):
        raise refuse(METHOD, f"{FILE}: quantization", inner, "Expected an object.")
    return {"quant_method": METHOD, **inner}


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens the matrices of a checkpoint of ModelOpt."""
    if isinstance(config.get("quantization"), Mapping):  # some config.json hold the file's own form
        config = {**from_file(config), **{k: v for k, v in config.items() if k != "quantization"}}
    check_fields(config, METHOD, (*KNOWN, *HARMLESS))
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in ALGORITHMS:
        raise refuse(METHOD, "quant_algo", algorithm, INSTEAD)
    for field in ("has_zero_point", "pre_quant_scale", "quantized_layers"):
        if config.get(field):
            raise refuse(METHOD, field, config[field], INSTEAD)
    scheme = ALGORITHMS[algorithm.upper()]
    packed = scheme.codes == "fp4_e2m1"
    size = config.get("group_size")
    if size is not None and packed and size != scheme.columns:
        raise refuse(METHOD, "group_size", size, "NVFP4 has groups of 16.")
    patterns = name_list(config, METHOD, "exclude_modules") + name_list(config, METHOD, "ignore")
    checkpoint = Checkpoint(source, METHOD)

    def open_matrix(name: str) -> RowMajor | None:
        module = name.removesuffix(".weight")
        if name not in checkpoint.names or name == module:
            return None
        scale, second, given = (
            f"{module}.{part}" for part in ("weight_scale", "weight_scale_2", "input_scale")
        )
        stored = source.dtype(name)
        if stored not in ("uint8", E4M3):
            if scale in checkpoint.names:
                raise checkpoint.error(f"{name} is {stored}, but has {scale}.")
            return None
        if any(_excludes(pattern, module) for pattern in patterns):
            raise checkpoint.error(
                f"{name} is in codes, but quantization_config says that it is not quantized."
            )
        n, k = matrix_shape(checkpoint, name, ("uint8",) if packed else (E4M3,))
        fixed = packed or (scheme.activation is not None and not scheme.activation.dynamic)
        of_input = Factor(given) if fixed else None
        scales = Scales(scale, of_input=of_input)
        if packed:
            scales = Scales(scale, (E4M3,), Factor(second), of_input)
        return RowMajor(
            checkpoint,
            (n, 2 * k if packed else k),
            scheme,
            Codes(name, 4 if packed else 8),
            scales,
            unused=() if fixed or given not in checkpoint.names else (given,),
        )

    return Opener(open_matrix)


def _excludes(pattern: str, module: str) -> bool:
    """True if the pattern, with * for anything, names a module or one around it."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
