"""Schemes of quantized weights: what a checkpoint holds in a weight's place, and what it means.

A scheme is neutral; how a backend computes with it stands in that backend's `ops/primitives.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UnsupportedError
from .scheme import Choose, Scheme, Stored

__all__ = ["METHODS", "Choose", "Scheme", "Stored", "read_quantization"]

# By `quant_method`: what reads a quantization_config, or refuses it, and gives the choice.
METHODS: dict[str, Callable[[Mapping[str, Any]], Choose]] = {}


def read_quantization(config: Mapping[str, Any]) -> Choose | None:
    """The schemes of a HF config's weights; None where nothing is quantized.

    Raises UnsupportedError for a quantization that is not known.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if isinstance(method, str) and method in METHODS:
        return METHODS[method](quantization)
    named = f" ({method[:80]})" if isinstance(method, str) and method else ""
    raise UnsupportedError(
        f"config.json has a quantization_config{named}, and quantized weights are not in this "
        "version, in no mode. Pass the model that they were made from."
    )
