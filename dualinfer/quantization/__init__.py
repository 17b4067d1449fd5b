"""Quantized weights: what codes and scales mean, and which of a checkpoint's weights have which.

A format is read into one of few schemes; how a backend computes with those stands in
`ops/schemes.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .formats import METHODS, Opener, find_method
from .formats.stored import CACHE, KEPT_CACHE, is_of_cache, quantizes_cache
from .scheme import Activation, Blocks, BlockScheme, Matrices, QuantizedMatrix

__all__ = [
    "KEPT_CACHE",
    "METHODS",
    "Activation",
    "BlockScheme",
    "Blocks",
    "Matrices",
    "QuantizedMatrix",
    "find_method",
    "is_of_cache",
    "quantization_of",
    "read_quantization",
    "without_caches",
]


def read_quantization(config: Mapping[str, Any]) -> Callable[[Any], Opener] | None:
    """Find the opener of a HF config's quantized TensorSource; None where nothing is quantized.

    Raises UnsupportedError for a quantization that is not known.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return None
    opener = METHODS[find_method(quantization)]
    inner = quantization.get("quantization")  # ModelOpt's own form
    caches = [own for own in (quantization, inner) if isinstance(own, Mapping)]

    def read(source: Any) -> Opener:
        found = opener(quantization, source)
        if not any(map(quantizes_cache, caches)):
            return found
        return replace(found, notes=(*found.notes, KEPT_CACHE))

    return read


def without_caches(config: Mapping[str, Any]) -> dict[str, Any]:
    """A HF config without a quantization_config of a key-value cache alone, as weights are plain.

    A multimodal model's may stand in its text_config.
    """
    inner = {k: dict(v) if isinstance(v, Mapping) else v for k, v in config.items()}
    for own in (inner, *inner.values()):
        if isinstance(own, dict) and _caches_alone(own.get("quantization_config")):
            del own["quantization_config"]
    return inner


def _caches_alone(quantization: Any) -> bool:
    if not isinstance(quantization, Mapping):
        return False
    own = {**(quantization.get("quantization") or {}), **quantization}
    cache = next((own[field] for field in CACHE if own.get(field)), None)
    if cache is None or own.get("quant_algo"):
        return False
    groups = own.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        return False
    others = ("transform_config", "sparsity_config", "moe_sparsity_config")
    what = [group.get(f) for group in groups.values() for f in ("weights", "input_activations")]
    what += [own.get(field) for field in others]
    outputs = [group.get("output_activations") or cache for group in groups.values()]
    known = own.get("quant_method") in ("modelopt", "compressed-tensors")
    return known and not any(what) and all(given == cache for given in outputs)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A HF config's quantization_config; a multimodal model's may stand in its text_config."""
    configs = [config]
    for own in configs:
        found = own.get("quantization_config")
        if found:
            return found if isinstance(found, Mapping) else {"quant_method": None}
        configs += [inner for inner in own.values() if isinstance(inner, Mapping)]
    return None
