"""Formats of quantized checkpoints, each from its own layout to the canonical parts of a matrix."""

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UnsupportedError, shortened
from . import (
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
    torchao,
)
from .stored import Opener, Tensors

__all__ = ["BESIDE", "METHODS", "Opener", "Tensors", "find_method", "read_beside"]

# By `quant_method`: what reads a quantization_config, or refuses it, and opens matrices by name.
METHODS: dict[str, Callable[[Mapping[str, Any], Tensors], Opener]] = {
    "awq": awq.opener,
    "bitnet": bitnet.opener,
    "bitsandbytes": bitsandbytes.opener,
    "compressed-tensors": compressed_tensors.opener,
    "fp8": fp8.opener,
    "gptq": gptq.opener,
    "modelopt": modelopt.opener,
    "mxfp4": mxfp4.opener,
    "torchao": torchao.opener,
}

# Files that say what config.json does not, in the order in which they are looked for.
BESIDE = (modelopt.FILE, *gptq.FILES)


def read_beside(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config that the fields of one of BESIDE stand for."""
    if name == modelopt.FILE:
        return modelopt.from_file(fields)
    method = awq.METHOD if awq.is_own(fields) else gptq.METHOD
    return {"quant_method": method, **{k: v for k, v in fields.items() if v is not None}}


_GPTQ = "Export it in GPTQ's format (auto-round: format='auto_gptq'), which is read."
_PLAIN = (
    "Pass the model that it was made from; quantize it here if it should be small (quant='int4')."
)
_FP4 = "Quantize the plain model with llm-compressor, whose NVFP4 and MXFP4 are read."
# Those that are known and not read: what to do.
REFUSED = {
    "aqlm": _PLAIN,
    "auto-round": _GPTQ,
    "auto_round": _GPTQ,
    "eetq": _PLAIN,
    "exl2": _PLAIN,
    "exl3": _PLAIN,
    "fbgemm_fp8": "Quantize the plain model with llm-compressor, whose FP8_DYNAMIC is the same.",
    "fouroversix": _FP4,
    "fp_quant": _FP4,
    "gemma": _PLAIN,
    "gguf": "Pass the path of the .gguf file itself.",
    "higgs": _PLAIN,
    "hqq": _PLAIN,
    "intel/auto-round": _GPTQ,
    "metal": _PLAIN,
    "mxfp8": _PLAIN,
    "nvfp4": _FP4,
    "paroquant": _PLAIN,
    "qqq": _PLAIN,
    "quanto": _PLAIN,
    "quark": _PLAIN,
    "sinq": _PLAIN,
    "spqr": _PLAIN,
    "vptq": _PLAIN,
}


def find_method(config: Mapping[str, Any]) -> str:
    """The method of a quantization_config, one of METHODS; UnsupportedError for any other."""
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return "bitsandbytes"  # which older versions of transformers left out
    if isinstance(method, str) and method.lower() in METHODS:
        return method.lower()
    named = f" ({shortened(method, 80)})" if isinstance(method, str) and method else ""
    instead = REFUSED.get(str(method).lower(), _PLAIN)
    raise UnsupportedError(
        f"The model's quantization_config{named} is not read here; these are: "
        f"{', '.join(sorted(METHODS))}. {instead}"
    )
