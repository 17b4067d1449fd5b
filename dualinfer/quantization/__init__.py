"""Quantized weights: what codes and scales mean, and which of a checkpoint's weights have which.

A format is read into one of few schemes; how a backend computes with those stands in
`ops/schemes.py`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .formats import METHODS, Opener, find_method
from .scheme import Activation, Blocks, BlockScheme, Matrices, QuantizedMatrix

__all__ = [
    "METHODS",
    "Activation",
    "BlockScheme",
    "Blocks",
    "Matrices",
    "QuantizedMatrix",
    "find_method",
    "quantization_of",
    "read_quantization",
]


def read_quantization(config: Mapping[str, Any]) -> Callable[[Any], Opener] | None:
    """What opens the quantized weights of a HF config's TensorSource; None where there are none.

    Raises UnsupportedError for a quantization that is not known.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return None
    return partial(METHODS[find_method(quantization)], quantization)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A HF config's quantization_config; a multimodal model's may stand in its text_config."""
    configs = [config]
    for own in configs:
        found = own.get("quantization_config")
        if found:
            return found if isinstance(found, Mapping) else {"quant_method": None}
        configs += [inner for inner in own.values() if isinstance(inner, Mapping)]
    return None
