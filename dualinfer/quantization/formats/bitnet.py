"""BitNet's weights of -1, 0 and 1, with one scale for a matrix, whose inputs are of 8 bits.

HF source: integrations/bitnet.py. `linear_class` says which of its two layers a model has, and
`quantization_mode` whether files hold such weights ("offline") or ones to be rounded ("online").
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..scheme import Activation, BlockScheme
from .stored import (
    FLOATS,
    Checkpoint,
    LeftOut,
    Opener,
    StoredMatrix,
    Tensors,
    check_fields,
    name_list,
    refuse,
)

METHOD = "bitnet"
KNOWN = "linear_class modules_to_not_convert quantization_mode use_rms_norm".split()
HARMLESS = ["rms_norm_eps"]  # of a norm that is refused
_EACH = 4  # weights of two bits in a byte
_LEAST = 1e-5  # of the mean of a matrix' absolute values
_HEAD = ("lm_head",)
_LAYER = re.compile(r"(^|\.)layers\.\d+\.")  # a base model's names begin with it
_LINEAR = re.compile(
    r"(^|\.)layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight$"
)
_SCHEME = BlockScheme("int4", rows=0, columns=0)
_PLAIN = "Pass a model in which all linear layers of each block, and nothing else, are quantized."


class TernaryMatrix(StoredMatrix):
    """One matrix whose files hold -1, 0 and 1: packed, row n beside row n + N/4, or as floats."""

    def __init__(self, checkpoint: Checkpoint, name: str, scheme: BlockScheme, divides: bool):
        self._from, self._name, self._divides = checkpoint, name, divides
        n, k = _shape_of(checkpoint, name, ("uint8", *FLOATS))
        self._packed = checkpoint.source.dtype(name) == "uint8"
        self.shape = (_EACH * n, k) if self._packed else (n, k)
        self._scale = name.removesuffix("weight") + "weight_scale"
        checkpoint.check(self._scale, FLOATS, (1,))
        self.scheme, self.stored = scheme, (name, self._scale)

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        if not self._packed:
            values = self._from.read(self._name, rows, columns).astype(np.float32)
            if not np.isin(values, (-1, 0, 1)).all():
                raise self._from.error(f"{self._name} holds others than -1, 0 and 1.")
            return values.astype(np.int8)
        start, stop, _ = rows.indices(self.shape[0])
        count, parts = self.shape[0] // _EACH, []
        for i in range(_EACH):
            first, last = max(start - i * count, 0), min(stop - i * count, count)
            if first < last:
                octets = self._from.read(self._name, slice(first, last), columns)
                parts.append((octets >> 2 * i & 3).astype(np.int8) - np.int8(1))
        if not parts:
            return self._from.read(self._name, slice(0, 0), columns).astype(np.int8)
        return np.concatenate(parts)

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        scale = self._from.scale(self._scale).astype(np.float32).reshape(1, 1)
        return np.float32(1) / scale if self._divides else scale


class RoundedMatrix(StoredMatrix):
    """One matrix of floats, to be rounded by the mean of their absolute values."""

    def __init__(self, checkpoint: Checkpoint, name: str, scheme: BlockScheme):
        self._from, self._name = checkpoint, name
        self.shape = _shape_of(checkpoint, name, FLOATS)
        self.scheme, self.stored = scheme, (name,)
        self._mean: np.float32 | None = None

    def _factor(self) -> np.float32:
        """The factor of values before they are rounded: 1 over their mean, in float32."""
        if self._mean is None:
            values = np.abs(self._from.read(self._name).astype(np.float32))
            self._mean = np.float32(max(float(values.mean(dtype=np.float64)), _LEAST))
        return np.float32(1) / self._mean

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        values = self._from.read(self._name, rows, columns).astype(np.float32)
        return np.rint(values * self._factor()).clip(-1, 1).astype(np.int8)

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        return np.float32(1) / self._from.finite(self._name, self._factor().reshape(1, 1))


def _shape_of(checkpoint: Checkpoint, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    shape = checkpoint.check(name, dtypes)
    if len(shape) != 2 or 0 in shape:
        raise checkpoint.error(f"{name} has the shape {shape}, expected a matrix.")
    return shape[0], shape[1]


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens the matrices of a BitNet checkpoint."""
    check_fields(config, METHOD, (*KNOWN, *HARMLESS))
    kind = config.get("linear_class", "bitlinear")
    mode = config.get("quantization_mode", "offline")
    if kind not in ("bitlinear", "autobitlinear"):
        raise refuse(METHOD, "linear_class", kind, "Expected bitlinear or autobitlinear.")
    if mode not in ("offline", "online"):
        raise refuse(METHOD, "quantization_mode", mode, "Expected offline or online.")
    if config.get("use_rms_norm"):
        instead = "Its linear layers norm their inputs by weights of their own: pass one without."
        raise refuse(METHOD, "use_rms_norm", config["use_rms_norm"], instead)
    is_auto = kind == "autobitlinear"
    names = name_list(config, METHOD, "modules_to_not_convert")
    names = _HEAD if config.get("modules_to_not_convert") is None else names
    skipped = LeftOut(names, METHOD)
    if "lm_head" not in skipped:
        raise refuse(METHOD, "modules_to_not_convert", list(names), _PLAIN)
    checkpoint = Checkpoint(source, METHOD)
    # BitLinear, which is never online, computes in the dtype of its input.
    how = Activation("int8", inverse="wide" if is_auto else "rounded")
    scheme = replace(_SCHEME, activation=how)

    def open_matrix(name: str) -> TernaryMatrix | RoundedMatrix | None:
        module = name.removesuffix(".weight")
        if name not in checkpoint.names or _LAYER.search(name) is None:
            return None
        if _LINEAR.search(name) is None or module in skipped:
            raise refuse(METHOD, "modules_to_not_convert", list(names), _PLAIN)
        if is_auto and mode == "online":
            return RoundedMatrix(checkpoint, name, scheme)
        if is_auto and f"{module}.bias" in checkpoint.names:
            instead = (
                f"There is {module}.bias, which transformers multiplies with the scale of the "
                "weights. Pass a model without biases."
            )
            raise refuse(METHOD, "linear_class", kind, instead)
        return TernaryMatrix(checkpoint, name, scheme, divides=not is_auto)

    return Opener(open_matrix)
