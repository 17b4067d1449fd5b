"""Quantized weights: what codes and scales mean, and which of a checkpoint's weights have which.

A format is read into one of few schemes; how a backend computes with those stands in
`backends/schemes.py`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import UnsupportedError
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

# By `quant_method`: what reads a quantization_config, or refuses it, and gives the matrices of a
# TensorSource.
METHODS: dict[str, Callable[[Mapping[str, Any], Any], Matrices]] = {}


def read_quantization(config: Mapping[str, Any]) -> Callable[[Any], Matrices] | None:
    """What opens the quantized weights of a HF config's TensorSource; None where there are none.

    Raises UnsupportedError for a quantization that is not known.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if isinstance(method, str) and method in METHODS:
        return partial(METHODS[method], quantization)
    named = f" ({method[:80]})" if isinstance(method, str) and method else ""
    raise UnsupportedError(
        f"config.json has a quantization_config{named}, and quantized weights of that kind are not "
        "in this version, in no mode. Pass the model that they were made from."
    )
