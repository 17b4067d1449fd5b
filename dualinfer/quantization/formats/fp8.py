"""Transformers' fp8: codes of 8 bits with a scale for each block, 128 x 128, or for all of them.

`activation_scheme` "dynamic" means that inputs are quantized by token, in groups as wide as the
blocks of the weights, as transformers does on a GPU (on a CPU it dequantizes the weights).
"""

from collections.abc import Mapping
from typing import Any

from ..scheme import Activation, BlockScheme
from .row_major import E8M0, FP8, Codes, Factor, RowMajor, Scales, matrix_shape
from .stored import FLOATS, Checkpoint, LeftOut, Opener, Tensors, check_fields, name_list, refuse

METHOD = "fp8"
KNOWN = """
    activation_scheme weight_block_size modules_to_not_convert ignored_layers scale_fmt expert_dtype
    fmt
""".split()
# `modules_to_convert` among them: what is stored in codes is taken so.
HARMLESS = "dequantize modules_to_convert".split()
# As transformers, Mistral, DeepSeek and AutoFP8 call a weight's and an input's scale, a factor.
SCALES = ("weight_scale_inv", "weight_scale", "qscale_weight", "scale")
INPUT_SCALES = ("activation_scale", "input_scale", "qscale_act")


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens the matrices of a checkpoint of `quant_method` fp8."""
    check_fields(config, METHOD, (*KNOWN, *HARMLESS))
    activations = str(config.get("activation_scheme", "dynamic")).lower()
    if activations not in ("dynamic", "static"):
        raise refuse(METHOD, "activation_scheme", activations, "Expected dynamic or static.")
    expected = {
        "scale_fmt": (None, "float", "ue8m0"),
        "expert_dtype": (None, "fp8"),
        "fmt": (None, "e4m3", "float8_e4m3fn"),
    }
    for field, values in expected.items():
        if config.get(field) not in values:
            instead = "Pass a checkpoint in which all weights are float8_e4m3fn."
            raise refuse(METHOD, field, config[field], instead)
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(b) is int and b > 0 for b in block)
    ):
        raise refuse(METHOD, "weight_block_size", block, "Expected two numbers, or null.")
    whole = "weight_block_size" in config and block is None
    names = name_list(config, METHOD, "modules_to_not_convert")
    skipped = LeftOut(names or name_list(config, METHOD, "ignored_layers"), METHOD)
    checkpoint = Checkpoint(source, METHOD)

    def open_matrix(name: str) -> RowMajor | None:
        module = name.removesuffix(".weight")
        if name not in checkpoint.names or name == module:
            return None
        scales = [f"{module}.{scale}" for scale in SCALES]
        scale = next((s for s in scales if s in checkpoint.names), scales[0])
        if source.dtype(name) not in FP8:
            if scale in checkpoint.names:
                raise checkpoint.error(f"{name} is {source.dtype(name)}, but has {scale}.")
            return None
        if module in skipped:
            raise checkpoint.error(
                f"{name} is in 8 bits, but quantization_config says that it is not quantized."
            )
        shape = matrix_shape(checkpoint, name, tuple(FP8))
        found = checkpoint.check(scale, (*FLOATS, E8M0))
        # A scale of two axes has one element for each block, even where that is one.
        is_single = all(s == 1 for s in found) and (len(found) < 2 or whole)
        rows, columns = (0, 0) if is_single else (block or (128, 128))
        inputs = [f"{module}.{scale}" for scale in INPUT_SCALES]
        given = next((i for i in inputs if i in checkpoint.names), inputs[0])
        static = activations == "static"
        width = block[1] if block else columns
        scheme = BlockScheme(
            FP8[source.dtype(name)],  # type: ignore[arg-type]
            rows,
            columns,
            activation=Activation("fp8_e4m3", not static, 0 if static else width),
        )
        of_input = Factor(given) if static else None
        return RowMajor(
            checkpoint,
            shape,
            scheme,
            Codes(name),
            Scales(scale, (*FLOATS, E8M0), of_input=of_input),
            unused=() if static or given not in checkpoint.names else (given,),
        )

    return Opener(open_matrix)
