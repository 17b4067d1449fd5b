"""bitsandbytes: codes of 4 bits with a table (nf4, fp4) in blocks of the flat matrix, and int8.

Blocks run over the ends of rows. Where a row is no whole number of them, the matrix has narrower
blocks of the largest common divisor, whose scales repeat: exact, and still in codes.
"""

import json
from collections.abc import Mapping
from math import gcd, prod
from typing import Any

import numpy as np

from ..scheme import BlockScheme
from .stored import (
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

METHOD = "bitsandbytes"
KNOWN = "load_in_4bit _load_in_4bit load_in_8bit _load_in_8bit llm_int8_skip_modules".split()
# Stored beside each matrix as well, or of how products are run.
HARMLESS = """
    bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant
    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold
""".split()
STATE = ".quant_state.bitsandbytes__"
OUTLIERS = (
    "bitsandbytes int8: only the weights are in 8 bits here; bitsandbytes also rounds activations "
    "to 8 bits, but for columns with values beyond llm_int8_threshold"
)
PLAIN = (
    "bitsandbytes: the files hold plain weights, which transformers would quantize while it loads "
    "them; here they stay plain"
)


class TableMatrix(StoredMatrix):
    """nf4 or fp4, with or without double quantization of its scales."""

    def __init__(self, checkpoint: Checkpoint, name: str, state: str):
        self._from, self._name = checkpoint, name
        fields = self._fields = self._state(state)
        self.shape = fields["shape"]
        n, k = self.shape
        form = checkpoint.source.dtype(name)
        stored = checkpoint.check(name, ("uint8", "int8", *_WIDTHS))
        self._width = _WIDTHS.get(form, 1)
        if prod(stored) * self._width != (n * k + 1) // 2:
            raise checkpoint.error(f"{name} has the shape {stored}, expected {n} x {k} codes.")
        self._tables = [f"{name}.quant_map", f"{name}.absmax"]
        if fields["nested"]:
            self._tables += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        self.stored = (name, *self._tables, state)
        table = checkpoint.scale(self._tables[0], ("float32",), (16,))
        count = blocks(n * k, fields["blocksize"])
        absmax = self._tables[1]
        expected = "uint8" if fields["nested"] else "float32"
        if absmax in checkpoint.names and (
            (checkpoint.source.dtype(absmax), checkpoint.source.shape(absmax))
            != (expected, (count,))
        ):
            raise checkpoint.error(
                f"{absmax} is {checkpoint.source.dtype(absmax)} {checkpoint.source.shape(absmax)}, "
                f"expected {expected} {(count,)}. bitsandbytes changes its layout in the first "
                "forward pass on a CPU: save the model before any."
            )
        checkpoint.check(absmax, (expected,), (count,))
        if fields["nested"]:
            checkpoint.check(
                self._tables[2], ("float32",), (blocks(count, fields["nested_blocksize"]),)
            )
            checkpoint.check(self._tables[3], ("float32",), (256,))
        columns = gcd(k, fields["blocksize"])
        self._columns = columns
        self.scheme = BlockScheme(
            "table", columns=columns % k, table=tuple(float(value) for value in table)
        )

    def _state(self, name: str) -> dict[str, Any]:
        """Read the tensor of JSON, and check it."""
        self._from.check(name, ("uint8",))
        try:
            fields = json.loads(self._from.read(name).tobytes().decode())
            shape, block = tuple(fields["shape"]), fields["blocksize"]
            nested = "nested_blocksize" in fields
            inner = (fields["nested_blocksize"], fields["nested_offset"]) if nested else (256, 0.0)
            whole = (*shape, block, inner[0])
            if len(shape) != 2 or any(type(v) is not int or v < 1 for v in whole):
                raise ValueError("its shape or a block size is no number of elements")
            offset = float(inner[1])
            if not np.isfinite(offset):
                raise ValueError("nested_offset is no number")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._from.error(f"{name} holds no state of a matrix ({error}).") from error
        return {
            "shape": shape,
            "blocksize": block,
            "nested": nested,
            "nested_blocksize": inner[0],
            "offset": offset,
        }

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix: the higher half of a byte comes first."""
        k = self.shape[1]
        n0, n1, _ = rows.indices(self.shape[0])
        first = n0 * k // 2
        count = max(n1 - n0, 0) * k
        octets = self._octets(first, (n0 * k + count + 1) // 2)
        codes = np.empty((len(octets), 2), np.uint8)
        codes[:, 0], codes[:, 1] = octets >> 4, octets & 15
        start = n0 * k - 2 * first
        taken = codes.reshape(-1)[start : start + count].reshape(-1, k)[:, columns]
        return np.ascontiguousarray(taken)

    def _octets(self, first: int, stop: int) -> np.ndarray:
        """Bytes of the flat matrix; the tensor may be of a wider dtype, and be flat or a column."""
        width = self._width
        shape = self._from.source.shape(self._name)
        span = slice(first // width, blocks(stop, width))
        index = [span if size == prod(shape) else slice(None) for size in shape]
        if shape.count(prod(shape)) != 1:  # neither a column nor a row
            index, span = [slice(None)] * len(shape), slice(0, None)
        octets = np.ascontiguousarray(self._from.read(self._name, *index)).reshape(-1)
        start = span.start * width
        return octets.view(np.uint8)[first - start : stop - start]

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        read, fields = self._from, self._fields
        absmax = read.read(self._tables[1])
        if fields["nested"]:
            block = fields["nested_blocksize"]
            factors = read.scale(self._tables[2], ("float32",)).repeat(block)[: len(absmax)]
            table = read.scale(self._tables[3], ("float32",), (256,))
            absmax = table[absmax] * factors + np.float32(fields["offset"])
        read.finite(self._tables[1], absmax)
        n, k = self.shape
        starts = np.arange(0, n * k, self._columns)
        scale = absmax.astype(np.float32)[starts // fields["blocksize"]]
        return scale.reshape(n, k // self._columns)


_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class RowMatrix(StoredMatrix):
    """int8, with the largest value of each row."""

    scheme = BlockScheme("int8")

    def __init__(self, checkpoint: Checkpoint, name: str):
        module = name.removesuffix(".weight")
        self._from, self._absmax, layout = checkpoint, f"{module}.SCB", f"{module}.weight_format"
        shape = checkpoint.check(name, ("int8",))
        if len(shape) != 2:
            raise checkpoint.error(f"{name} has the shape {shape}, expected a matrix.")
        self.shape = (shape[0], shape[1])
        self.stored = (name, self._absmax)
        checkpoint.check(self._absmax, ("float32",), shape[:1])
        if layout in checkpoint.names:
            self.stored += (layout,)
            found = checkpoint.read(layout).reshape(-1).tolist()
            if found != [0]:
                instead = "Save it with bitsandbytes 0.45 or later, which has rows alone."
                raise refuse(METHOD, layout, found, instead)

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        return self._from.read(self.stored[0], rows, columns)

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        return self._from.scale(self._absmax)[:, None] / np.float32(127)


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens the matrices of a bitsandbytes checkpoint."""
    check_fields(config, METHOD, (*KNOWN, *HARMLESS))
    four, eight = (
        bool(config.get(f"load_in_{n}bit") or config.get(f"_load_in_{n}bit")) for n in (4, 8)
    )
    if four == eight:
        instead = "Exactly one of load_in_4bit and load_in_8bit says what is stored."
        raise refuse(METHOD, "load_in_4bit", four, instead)
    kind = config.get("bnb_4bit_quant_type", "nf4")
    if four and kind not in ("nf4", "fp4"):
        raise refuse(METHOD, "bnb_4bit_quant_type", kind, "It is nf4 or fp4.")
    skipped = LeftOut(name_list(config, METHOD, "llm_int8_skip_modules"), METHOD)
    checkpoint = Checkpoint(source, METHOD)
    states = {name.partition(STATE)[0]: name for name in checkpoint.names if STATE in name}

    def open_matrix(name: str) -> TableMatrix | RowMatrix | None:
        if name not in checkpoint.names:
            return None
        state = states.get(name)
        packed = checkpoint.source.dtype(name) in ("uint8", "int8")
        if state is None and not packed:
            return None
        if name.removesuffix(".weight") in skipped:
            raise checkpoint.error(
                f"{name} is in codes, but llm_int8_skip_modules says that it is not quantized."
            )
        if four:
            if state is None:
                raise checkpoint.error(f"{name} is in codes, and {name}{STATE}nf4 is missing.")
            return TableMatrix(checkpoint, name, state)
        return RowMatrix(checkpoint, name)

    weights = (name for name in checkpoint.names if name.endswith(".weight"))
    if not states and not any(source.dtype(name) in ("uint8", "int8") for name in weights):
        return Opener(open_matrix, (PLAIN,))
    return Opener(open_matrix, () if four else (OUTLIERS,))
