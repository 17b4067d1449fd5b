"""torchao: int8, int4 and fp8 in plain layouts; what each tensor is stands in the file's header."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import shortened
from ..scheme import Activation, BlockScheme
from .stored import (
    FLOATS,
    Checkpoint,
    LeftOut,
    Opener,
    StoredMatrix,
    Tensors,
    blocks,
    check_fields,
    name_list,
    refuse,
)

METHOD = "torchao"
# The header says what each tensor is, whatever the config asked for.
KNOWN = "quant_type modules_to_not_convert".split()
HARMLESS = """
    include_input_output_embeddings untie_embedding_weights quant_type_kwargs autoquant_config
""".split()
PLAIN = (
    "Save it in a plain layout (Int8WeightOnlyConfig, Float8WeightOnlyConfig, "
    "IntxWeightOnlyConfig, or Int4WeightOnlyConfig with int4_packing_format='plain'), or pass the "
    "plain model."
)
# The fields that each class may have, beside `block_size`, and the codes that it holds.
CLASSES: dict[str, tuple[str, ...]] = {
    "Int8Tensor": ("dtype", "act_quant_kwargs", "reduce_range"),
    "Float8Tensor": ("dtype", "act_quant_kwargs", "mm_config", "kernel_preference"),
    "Int4Tensor": ("shape", "activation_dtype"),
    "IntxUnpackedToInt8Tensor": ("dtype", "target_dtype", "activation_quantization"),
}
_INT4 = {"_type": "torch.dtype", "_data": "int4"}
_FP8: dict[str, str] = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


class PlainMatrix(StoredMatrix):
    """One tensor of torchao's, in the layout of its matrix."""

    def __init__(self, checkpoint: Checkpoint, name: str, kind: str, fields: Mapping[str, Any]):
        module, _, weight = name.rpartition(".")
        self._from, self._kind = checkpoint, kind
        self._data, self._scale, self._zero_name, static, *others = (
            f"{module}._{weight}_{part}"
            for part in (
                "qdata",
                "scale",
                "zero_point",
                "act_quant_scale",
                "act_quant_zero_point",
                "act_pre_scale",
            )
        )
        for other in others:
            if other in checkpoint.names:
                instead = "Save it without: weight-only, or with dynamic activations."
                raise refuse(METHOD, other, "a tensor", instead)
        self._packed = kind == "Int4Tensor"
        self._four = self._packed or fields.get("target_dtype") == _INT4
        floats8 = kind == "Float8Tensor"
        form = tuple(_FP8) if floats8 else ("int8", "uint8") if self._packed else ("int8",)
        shape = checkpoint.check(self._data, form)
        if len(shape) != 2 or 0 in shape:
            raise checkpoint.error(f"{self._data} has the shape {shape}, expected a matrix.")
        self.shape = n, k = shape[0], shape[1] * (2 if self._packed else 1)
        self.stored = (self._data, self._scale)
        rows, columns = self._blocks(fields.get("block_size"))
        # Scales of Int4Tensor are the other way round.
        self._scales = (blocks(n, rows), blocks(k, columns))
        stored = self._scales[::-1] if self._packed else self._scales
        found = checkpoint.check(self._scale, FLOATS)
        single = self._scales == (1, 1) and found in ((), (1,))
        # torchao writes the scales of rows as one axis, too.
        flat = found == stored[:1] and stored[1] == 1
        if found != stored and not single and not flat:
            raise checkpoint.error(f"{self._scale} has the shape {found}, expected {stored}.")
        self._zero = self._read_zero()
        codes = _FP8[checkpoint.source.dtype(self._data)] if floats8 else "int8"
        if self._four:
            codes = "int4"
        elif self._zero is not None:  # zero points of 8 bits have no sign, nor have their codes
            codes, self._zero = "uint8", (self._zero.astype(np.int16) + 128).astype(np.uint8)
        activation = self._activation(fields)
        self._static = static if static in checkpoint.names else ""
        if self._static:
            self.stored += (static,)
            shape = checkpoint.check(static, FLOATS)
            if activation is None or any(size != 1 for size in shape):
                instead = "Save it with one scale for the whole input, or dynamic activations."
                raise refuse(METHOD, static, shape, instead)
            activation = Activation(activation.codes, dynamic=False)
        elif activation is not None and self._tensorwise:
            instead = (
                "One scale for the activations of a whole batch would let prompts change each "
                "other's answers: save it with PerRow."
            )
            raise refuse(METHOD, "granularity", "PerTensor", instead)
        self.scheme = BlockScheme(
            codes,
            rows=rows,
            columns=columns,
            scale_dtype=checkpoint.source.dtype(self._scale),  # type: ignore[arg-type]
            zeros=self._zero is not None,
            activation=activation,
        )

    def _blocks(self, given: Any) -> tuple[int, int]:
        """Rows and columns of a block, 0 for all."""
        if given in (None, []):
            given = self.shape  # of one scale
        whole = isinstance(given, list | tuple) and all(type(v) is int and v > 0 for v in given)
        if not whole or len(given) != 2:
            raise self._from.error(f"{self._data} has the block_size {given}, expected two sizes.")
        rows, columns = (0 if b >= size else b for b, size in zip(given, self.shape, strict=True))
        return (1 if given[0] == 1 else rows), columns

    def _read_zero(self) -> np.ndarray | None:
        """Zero points in codes; None where all of them are 0."""
        if self._zero_name not in self._from.names:
            return None
        self.stored += (self._zero_name,)
        self._from.check(self._zero_name, ("int8", *FLOATS), self._from.source.shape(self._scale))
        zero = self._from.read(self._zero_name)
        if not zero.astype(np.float32).any():
            return None
        zero = self._from.finite(self._zero_name, self._blockwise(zero)).astype(np.float32)
        if self._packed:  # there it is what is added after the scale
            scale = self.scale().astype(np.float32)
            zero = np.divide(-zero, scale, out=np.full_like(zero, np.nan), where=scale != 0)
        least, most = (-8, 7) if self._four else (-128, 127)
        codes = np.rint(np.nan_to_num(zero, nan=most + 1.0))
        if not (codes == zero).all() or codes.min() < least or codes.max() > most:
            instead = (
                "They are no codes, and only zero points that are codes are read. Save it with "
                "IntxWeightOnlyConfig(torch.int4), or symmetric, or pass the plain model."
            )
            raise refuse(METHOD, self._zero_name, "a tensor of fractions", instead)
        return codes.astype(np.int8)

    _tensorwise = False

    def _activation(self, fields: Mapping[str, Any]) -> Activation | None:
        """The quantization of inputs, of the fields that say it."""
        if fields.get("activation_quantization") == "int8_asym_per_token":
            return Activation("int8", zeros=True)
        if fields.get("activation_quantization") is not None:
            raise self._refuse(fields, "activation_quantization")
        if self._packed:
            form = fields.get("activation_dtype")
            if form in (None, {"_type": "torch.dtype", "_data": "bfloat16"}):
                return None
            if form == {"_type": "torch.dtype", "_data": "float8_e4m3fn"}:
                return Activation("fp8_e4m3")
            raise self._refuse(fields, "activation_dtype")
        asked = fields.get("act_quant_kwargs")
        if asked is None:
            return None
        kwargs = asked.get("_data") if isinstance(asked, Mapping) else None
        if not isinstance(kwargs, Mapping):
            raise self._refuse(fields, "act_quant_kwargs")
        granularity = kwargs.get("granularity")
        named = granularity.get("_type") if isinstance(granularity, Mapping) else None
        axis = granularity.get("_data") if isinstance(granularity, Mapping) else None
        if named not in ("PerRow", "PerTensor") or (axis or {}).get("dim", -1) != -1:
            raise self._refuse(kwargs, "granularity")
        self._tensorwise = named == "PerTensor"
        for field in ("hp_value_lb", "hp_value_ub", "reduce_range"):
            if kwargs.get(field):
                raise self._refuse(kwargs, field)
        if self._kind == "Float8Tensor":
            form = kwargs.get("float8_dtype", {"_data": "float8_e4m3fn"})
            if not isinstance(form, Mapping) or form.get("_data") not in _FP8:
                raise self._refuse(kwargs, "float8_dtype")
            return Activation(_FP8[form["_data"]])
        mapping = kwargs.get("mapping_type", {"_data": "SYMMETRIC"})
        if not isinstance(mapping, Mapping) or mapping.get("_data") not in _ZEROS:
            raise self._refuse(kwargs, "mapping_type")
        return Activation("int8", zeros=_ZEROS[mapping["_data"]])

    def _refuse(self, fields: Mapping[str, Any], field: str) -> Exception:
        return refuse(METHOD, f"{self._data}: {field}", fields.get(field), PLAIN)

    def _blockwise(self, values: np.ndarray) -> np.ndarray:
        """Values as stored, [blocks of rows, blocks of columns]."""
        if self._packed:
            return np.ascontiguousarray(values.T)
        return values.reshape(self._scales)

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        if not self._packed:
            codes = self._from.read(self._data, rows, columns)
            if self.scheme.codes == "uint8":
                return codes.view(np.uint8) + np.uint8(128)
            return codes if self._kind != "Float8Tensor" else codes.view(np.uint8)
        k0, k1, _ = columns.indices(self.shape[1])
        octets = self._from.read(self._data, rows, slice(k0 // 2, blocks(k1, 2))).view(np.int8)
        codes = np.empty((*octets.shape, 2), np.int8)
        codes[..., 0], codes[..., 1] = (octets << 4) >> 4, octets >> 4
        first = k0 - k0 % 2
        return np.ascontiguousarray(
            codes.reshape(len(octets), 2 * octets.shape[1])[:, k0 - first : k1 - first]
        )

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        return self._blockwise(self._from.scale(self._scale))

    def zero(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return self._zero

    def input_scale(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        if not self._static:
            return None
        return self._from.scale(self._static).astype(np.float32).reshape(())


_ZEROS = {"SYMMETRIC": False, "ASYMMETRIC": True}


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens the matrices of a torchao checkpoint."""
    check_fields(config, METHOD, (*KNOWN, *HARMLESS))
    skipped = LeftOut(name_list(config, METHOD, "modules_to_not_convert"), METHOD)
    checkpoint = Checkpoint(source, METHOD)
    metadata: Mapping[str, str] = getattr(source, "metadata", {})
    if "tensor_names" not in metadata:
        instead = (
            "Its files say nothing of torchao's tensors: it was pickled, or saved by a version "
            "before 0.15. Save it as safetensors with a newer torchao and transformers."
        )
        raise refuse(METHOD, "quant_type", config.get("quant_type"), instead)

    def open_matrix(name: str) -> PlainMatrix | None:
        kind, fields = _described(checkpoint, name, metadata.get(name))
        if kind == "Tensor":
            return None
        if kind not in CLASSES:
            raise refuse(METHOD, name, kind, PLAIN)
        check_fields(fields, f"{METHOD}, {name}", ("block_size", *CLASSES[kind]))
        if name in skipped:
            raise checkpoint.error(
                f"{name} is in codes, but modules_to_not_convert says that it is not quantized."
            )
        target = fields.get("target_dtype")
        if target is not None and target not in [
            {"_type": "torch.dtype", "_data": f"int{bits}"} for bits in (4, 8)
        ]:
            raise refuse(METHOD, f"{name}: target_dtype", target, PLAIN)
        return PlainMatrix(checkpoint, name, kind, fields)

    return Opener(open_matrix)


def _described(checkpoint: Checkpoint, name: str, text: str | None) -> tuple[str, dict[str, Any]]:
    """The class of a tensor and its fields, as the header says."""
    if text is None:
        return "Tensor", {}
    try:
        described = json.loads(text)
        kind, fields = described["_type"], described.get("_data", {})
        if not isinstance(kind, str) or not isinstance(fields, dict):
            raise TypeError("no class or no fields")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"the header describes {name} by {shortened(text)}, which is no tensor."
        raise checkpoint.error(problem) from error
    return kind, fields
