"""A format of the tests' own: matrices of NumPy arrays, quantized plainly, in one safetensors file.

`write` makes a checkpoint of a model twice, quantized and dense, where the dense one is what the
codes mean, in float32.
"""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
import torch

from dualinfer.checkpoint.sources import TorchSource, open_module
from dualinfer.checkpoint.views.quantized import open_quantized
from dualinfer.errors import CheckpointError
from dualinfer.model.families import describe_model
from dualinfer.model.load_plan import make_load_plan
from dualinfer.quantization import Activation, BlockScheme
from dualinfer.quantization.formats import Opener

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NF = tuple(float(x) for x in np.linspace(-1, 1, 16))
TABLES = {"fp4_e2m1": np.concatenate((E2M1, -E2M1)), "table": np.array(NF, np.float32)}
FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
MOST = {"int4": 7, "int8": 127, "fp8_e4m3": 448, "fp8_e5m2": 57344, "fp4_e2m1": 6, "table": 1}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def spread(scheme, blocks, shape, group=None):
    """What blocks have, for each element."""
    rows, columns = scheme.rows or shape[0], scheme.columns or shape[1]
    wide = blocks.astype(np.float32).repeat(rows, 0)[: shape[0]]
    return wide[:, group] if scheme.groups else wide.repeat(columns, 1)[:, : shape[1]]


def decode(scheme, codes):
    if scheme.codes in TABLES:
        return TABLES[scheme.codes][codes]
    if scheme.codes in FP8:
        return codes.view(FP8[scheme.codes]).astype(np.float32)
    return codes.astype(np.float32)


def quantize(scheme, matrix, seed=0):
    """The canonical arrays of float32 [N, K]."""
    rng = np.random.default_rng(seed)
    shape = n, k = matrix.shape
    r, c = scheme.rows or n, scheme.columns or k
    arrays = {}
    if scheme.groups:
        group = rng.permutation(np.arange(k) * scheme.groups // k).astype(np.int32)
        arrays["group"] = group
        parts = [matrix[:, group == g] for g in range(scheme.groups)]
        low = np.stack([p.min(1) for p in parts], 1)
        high = np.stack([p.max(1) for p in parts], 1)
    else:
        group = None
        edges = [np.arange(0, n, r), np.arange(0, k, c)]
        low, high = (
            f.reduceat(f.reduceat(matrix, edges[0], axis=0), edges[1], axis=1)
            for f in (np.minimum, np.maximum)
        )
    if scheme.zeros:
        most = 255 if scheme.codes.endswith("8") else 15
        scale = (np.maximum(high, 0) - np.minimum(low, 0)) / most
    else:
        scale = np.maximum(abs(low), abs(high)) / MOST[scheme.codes]
    if scheme.outer:
        arrays["outer"] = rng.uniform(0.5, 1, n).astype(np.float32) / 64
        scale = scale * 64
    if scheme.scale_dtype == "float8_e8m0fnu":
        scale = 2 ** np.ceil(np.log2(scale))
    arrays["scale"] = scale.astype(dtype_of(scheme.scale_dtype))
    whole = spread(scheme, arrays["scale"], shape, group)
    if scheme.outer:
        whole = whole * arrays["outer"][:, None]
    scaled = matrix / whole
    if scheme.zeros:
        held = arrays["scale"].astype(np.float32)
        zero = np.rint(-np.minimum(low, 0) / held)
        signed = scheme.codes.startswith("int")
        bottom = {"int4": -8, "int8": -128}.get(scheme.codes, 0)
        arrays["zero"] = (zero + bottom).astype(np.int8 if signed else np.uint8)
        codes = np.rint(scaled + spread(scheme, arrays["zero"], shape, group))
        codes = codes.clip(bottom, bottom + most).astype(arrays["zero"].dtype)
    elif scheme.codes in TABLES:
        codes = abs(scaled[..., None] - TABLES[scheme.codes]).argmin(-1).astype(np.uint8)
    elif scheme.codes in FP8:
        codes = scaled.astype(FP8[scheme.codes]).view(np.uint8)
    else:
        codes = np.rint(scaled).astype(np.int8)
    arrays["codes"] = codes
    if scheme.activation is not None and (not scheme.activation.dynamic or scheme.activation.outer):
        arrays["input"] = np.float32(0.03 + 0.01 * (seed % 2))
    return arrays


def dequantize(scheme, arrays):
    """What canonical arrays mean, in float32."""
    codes, group = arrays["codes"], arrays.get("group")
    values = decode(scheme, codes)
    if "zero" in arrays:
        values = values - spread(scheme, arrays["zero"], codes.shape, group)
    values = values * spread(scheme, arrays["scale"], codes.shape, group)
    return values * arrays["outer"][:, None] if "outer" in arrays else values


class StoredMatrix:
    """A `QuantizedMatrix` of tensors beside one another; scales of 8 bits lie as their bytes."""

    inputs_first = False

    def __init__(self, source, name, scheme, parts):
        self.source, self.name, self.scheme = source, name, scheme
        self.stored = tuple(f"{name}.{part}" for part in parts)
        self.parts = parts
        if f"{name}.codes" not in set(source.names()):
            raise CheckpointError(f"{source.description} lacks {name}.codes.")
        self.shape = tuple(source.shape(f"{name}.codes"))

    def _part(self, part):
        if part not in self.parts:
            return None
        return np.asarray(self.source.read(f"{self.name}.{part}"))

    def codes(self, rows, columns):
        return self.source.read(f"{self.name}.codes", (rows, columns))

    def scale(self):
        scale = self._part("scale")
        eight = self.scheme.scale_dtype.startswith("float8")
        return scale.view(dtype_of(self.scheme.scale_dtype)) if eight else scale

    def zero(self):
        return self._part("zero")

    def group(self):
        return self._part("group")

    def outer(self):
        return self._part("outer")

    def input_scale(self):
        return self._part("input")


class HeldMatrix:
    """A `QuantizedMatrix` of canonical arrays in memory, which stands for a tensor of its name."""

    inputs_first = False

    def __init__(self, name, scheme, arrays):
        self.scheme, self.stored, self._arrays = scheme, (name,), arrays
        self.shape = arrays["codes"].shape
        self.scale, self.zero, self.group, self.outer, self.input_scale = (
            partial(arrays.get, part) for part in ("scale", "zero", "group", "outer", "input")
        )

    def codes(self, rows, columns):
        return self._arrays["codes"][rows, columns]


def random_shares(table, choose, harm=lambda name, arrays: None):
    """Sources of random tensors that `table` asks for, with its rows: quantized, and what it means.

    `choose` gives the scheme of a row's source, or None; `harm` may change its arrays.
    """
    rng, dense, matrices = np.random.default_rng(0), {}, {}
    for row in table.rows:
        for part in row.sources:
            shape = table.shape(row, part.axes)
            array = rng.standard_normal(shape, np.float32)
            scheme = choose(row, part) if row.is_weight and not row.dense else None
            if scheme is not None:
                order = row.permutation(part)
                arrays = quantize(scheme, array.transpose(order))
                harm(part.name, arrays)
                array = dequantize(scheme, arrays).transpose(np.argsort(order))
                matrices[part.name] = HeldMatrix(part.name, scheme, arrays)
            dense[part.name] = torch.from_numpy(np.ascontiguousarray(array))
    source = TorchSource(dense, "a test")
    codes, own = open_quantized(source, table, Opener(matrices.get))
    return (codes, make_load_plan(own, codes)), (source, make_load_plan(table, source))


def open_matrices(config, source):
    """The opener of `quant_method` "arrays"."""
    schemes = {}
    for name, (said, parts) in config["weights"].items():
        how = said.pop("activation") if "activation" in said else None
        activation = Activation(**how) if how else None
        said["table"] = tuple(said.get("table", ()))
        schemes[name] = BlockScheme(**said, activation=activation), parts
    config["weights"].update(
        {
            name: ({**asdict(s), "activation": s.activation and asdict(s.activation)}, parts)
            for name, (s, parts) in schemes.items()
        }
    )
    return Opener(
        lambda name: StoredMatrix(source, name, *schemes[name]) if name in schemes else None
    )


def write(folder: Path, model, choose):
    """`model` quantized and dense; `choose` gives the scheme of HF's weight, or None."""
    config = model.config.to_dict()
    architectures = [type(model).__name__]
    _, table = describe_model(config, architectures)
    source = open_module(model)
    quantized, dense, said = {}, {}, {}
    for row, names in make_load_plan(table, source).rows:
        for part, name in zip(row.sources, names, strict=True):
            array = source.read(name).numpy()
            scheme = choose(part.name) if row.is_weight else None
            if scheme is None:
                quantized[part.name] = dense[part.name] = array
                continue
            order = row.permutation(part)
            arrays = quantize(scheme, array.transpose(order), seed=len(said))
            dense[part.name] = dequantize(scheme, arrays).transpose(np.argsort(order))
            said[part.name] = asdict(scheme), sorted(arrays)
            for kind, own in arrays.items():
                eight = own.dtype.name.startswith("float8")
                quantized[f"{part.name}.{kind}"] = own.view(np.uint8) if eight else own
    how = {"quantization_config": {"quant_method": "arrays", "weights": said}}
    for kind, tensors, more in (("quantized", quantized, how), ("dense", dense, {})):
        (folder / kind).mkdir(parents=True)
        tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        safetensors.numpy.save_file(tensors, folder / kind / "model.safetensors")
        written = json.dumps({**config, "architectures": architectures, **more})
        (folder / kind / "config.json").write_text(written)


INT8 = BlockScheme("int8")
ZEROS = BlockScheme("uint4", columns=32, scale_dtype="float16", zeros=True)
INT4 = BlockScheme("int4", columns=16, scale_dtype="bfloat16")
BLOCKS = BlockScheme("fp8_e4m3", rows=24, columns=32)
ORDER = BlockScheme("uint4", groups=5, zeros=True)
NVFP4 = BlockScheme("fp4_e2m1", columns=16, scale_dtype="float8_e4m3fn", outer=True)
MXFP4 = BlockScheme("fp4_e2m1", columns=32, scale_dtype="float8_e8m0fnu")
TABLE = BlockScheme("table", columns=64, table=NF)
TENSOR = BlockScheme("fp8_e4m3", rows=0)
SIGNED = BlockScheme("int4", columns=32, zeros=True)
DYNAMIC = replace(INT8, activation=Activation("int8"))
STATIC = replace(TENSOR, activation=Activation("fp8_e4m3", dynamic=False))
ROWS = BlockScheme("uint4", scale_dtype="float16", zeros=True)
OF_TABLE = BlockScheme("table", rows=0, table=NF)
INVERSE = replace(INT8, activation=Activation("int8", inverse="wide"))
# In which a code of zero bits is no zero by itself: by rows, for all, in blocks, in other orders.
UNEVEN = (
    *(ROWS, OF_TABLE, TABLE, ORDER, BlockScheme("uint8", rows=0, zeros=True)),
    *(BlockScheme("table", groups=3, table=NF), BlockScheme("table", table=NF)),
    BlockScheme("uint8", rows=24, columns=32, zeros=True),
)
SCHEMES = {
    **{"int8": INT8, "uint4 zeros": ZEROS, "int4": INT4, "fp8 blocks": BLOCKS, "act-order": ORDER},
    **{"nvfp4": NVFP4, "mxfp4": MXFP4, "table": TABLE, "fp8 tensor": TENSOR, "int4 zeros": SIGNED},
    **{"dynamic": DYNAMIC, "static": STATIC},
}


def mixed(name):
    """Schemes that differ within fused rows, between layers, and of head and embedding."""
    for pattern, scheme in (
        *(("q_proj", INT4), ("k_proj", ZEROS), ("v_proj", None), ("gate_proj", NVFP4)),
        *(("up_proj", BLOCKS), ("down_proj", ORDER), ("o_proj", SIGNED), ("lm_head", TABLE)),
    ):
        if pattern in name:
            return scheme
    return INT8
