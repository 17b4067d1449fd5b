"""Quantized weights: what codes and scales mean, and which of a checkpoint's weights have which.

A format is read into one of few schemes; how a backend computes with those stands in
`backends/schemes.py`.
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
    "read_quantization",
]


def read_quantization(config: Mapping[str, Any]) -> Callable[[Any], Opener] | None:
    """What opens the quantized weights of a HF config's TensorSource; None where there are none.

    Raises UnsupportedError for a quantization that is not known.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        quantization = {"quant_method": None}
    return partial(METHODS[find_method(quantization)], quantization)
