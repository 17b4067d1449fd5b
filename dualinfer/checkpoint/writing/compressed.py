"""Quantized weights as compressed-tensors stores them, in a folder that transformers loads."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...arrays import numpy_dtype
from ...errors import UnsupportedError
from ...quantization import Activation, BlockScheme, QuantizedMatrix
from ...quantization.codes import code_of

_WAY = "Keep the checkpoint that it was loaded from, or quantize the plain model by `quant`."
_E4M3, _E8M0 = "float8_e4m3fn", "float8_e8m0fnu"
_TYPES = {_E4M3: "torch.float8_e4m3fn", _E8M0: "torch.uint8"}  # of scales that are no floats
Spec = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of stored tensors, by name


class Stored(NamedTuple):
    """The stored form of a matrix: `form` is compressed-tensors' word, `group` its config entry.

    `make()` gives the tensors that `spec` describes.
    """

    form: str
    group: dict[str, Any]
    spec: Spec
    make: Callable[[], dict[str, np.ndarray]]


def store(name: str, matrix: QuantizedMatrix) -> Stored:
    """A matrix called `name` as compressed-tensors stores it.

    Raises UnsupportedError for what that format has no words for.
    """
    scheme, (n, k) = matrix.scheme, matrix.shape
    is_mx = scheme.codes == "fp4_e2m1" or (scheme.rows, scheme.columns) == (1, 32)
    if scheme.scale_dtype == _E8M0 and not is_mx:
        scheme = replace(scheme, scale_dtype="float32")  # which has all powers of two
    module = name.removesuffix(".weight")
    form = _form(name, scheme, k)
    weights = _weights(name, scheme, n, k)
    inputs = None if scheme.activation is None else _inputs(name, scheme.activation, k)
    blocks = _count(n, scheme.rows), _count(k, scheme.columns)
    spec: Spec = {}
    if form == "pack-quantized":
        per_word = 32 // scheme.code.bits
        spec["weight_packed"] = "int32", (n, -(-k // per_word))
        spec["weight_shape"] = "int64", (2,)
        if scheme.zeros:
            spec["weight_zero_point"] = "int32", (-(-n // per_word), blocks[1])
    elif form == "int-quantized":
        spec["weight"] = "int8", (n, k)
    elif form in ("float-quantized", "mxfp8-quantized"):
        spec["weight"] = _E4M3, (n, k)
    else:
        spec["weight_packed"] = "uint8", (n, k // 2)
    is_power = scheme.scale_dtype == _E8M0
    scale = (1,) if weights["strategy"] == "tensor" else blocks
    spec["weight_scale"] = "uint8" if is_power else scheme.scale_dtype, scale
    if scheme.outer:
        spec["weight_global_scale"] = "float32", (1,)
    given = matrix.input_scale()
    if given is not None:
        is_outer = scheme.activation is not None and scheme.activation.outer
        spec["input_global_scale" if is_outer else "input_scale"] = "float32", (1,)

    def make() -> dict[str, np.ndarray]:
        codes, zero, outer = matrix.codes(slice(0, n), slice(0, k)), matrix.zero(), matrix.outer()
        made: dict[str, np.ndarray] = {"weight_scale": matrix.scale().reshape(scale)}
        if is_power:
            made["weight_scale"] = made["weight_scale"].view(np.uint8)
        if form == "pack-quantized":
            bits = scheme.code.bits
            middle = 1 << (bits - 1) if scheme.code.signed else 0
            made["weight_packed"] = _words((codes + np.int16(middle)).astype(np.uint8), bits)
            made["weight_shape"] = np.array([n, k], np.int64)
            if zero is not None:
                zeros = (zero + np.int16(middle)).astype(np.uint8)
                made["weight_zero_point"] = _words(zeros.T, bits).T
        elif form == "int-quantized":
            made["weight"] = codes.astype(np.int8)
        elif form in ("float-quantized", "mxfp8-quantized"):
            made["weight"] = np.ascontiguousarray(codes).view(numpy_dtype(_E4M3))
        else:
            made["weight_packed"] = codes[:, ::2] | (codes[:, 1::2] << 4)
        if outer is not None:
            if (outer != outer[0]).any():
                raise _unsayable(name, "a second scale for each row")
            made["weight_global_scale"] = _inverse(outer[:1])
        for part in ("input_scale", "input_global_scale"):
            if part in spec and given is not None:
                number = np.asarray(given, np.float32).reshape(1)
                made[part] = number if part == "input_scale" else _inverse(number)
        return {f"{module}.{part}": made[part] for part in spec}

    return Stored(
        form,
        {"weights": weights, "input_activations": inputs, "output_activations": None},
        {f"{module}.{part}": own for part, own in spec.items()},
        make,
    )


def describe(stored: Mapping[str, Stored], plain: list[str]) -> dict[str, Any]:
    """The `quantization_config` of matrices by name, and of those that are plain.

    Modules that are alike are a group. One group is every Linear; several go by patterns in which
    numbers are left open, and by name where that says too much.
    """
    alike: dict[str, list[str]] = {}
    for name, own in stored.items():
        alike.setdefault(repr((own.form, own.group)), []).append(name.removesuffix(".weight"))
    kinds: dict[str, set[str]] = {}  # by pattern: the groups that it is in
    for kind, names in alike.items():
        for name in names:
            kinds.setdefault(_pattern(name), set()).add(kind)
    groups = {}
    for i, (_, names) in enumerate(alike.items()):
        own = stored[f"{names[0]}.weight"]
        patterns = (_pattern(name) if len(kinds[_pattern(name)]) == 1 else name for name in names)
        targets = [*dict.fromkeys(patterns)] if len(alike) > 1 else ["Linear"]
        groups[f"group_{i}"] = {**own.group, "targets": targets, "format": own.form}
    forms = {own.form for own in stored.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [name.removesuffix(".weight") for name in plain],
        "kv_cache_scheme": None,
    }


def _pattern(name: str) -> str:
    """The pattern that compressed-tensors takes for a name in which numbers are open."""
    return "re:^" + re.sub(r"\d+", r"\\d+", re.escape(name)) + "$"


def arrays_of(stored: Stored) -> Iterator[np.ndarray]:
    """The tensors of a matrix, in the order of its spec."""
    made = stored.make()
    for name, (dtype, _) in stored.spec.items():
        yield np.ascontiguousarray(made[name]).astype(numpy_dtype(dtype), copy=False)


def _form(name: str, scheme: BlockScheme, k: int) -> str:
    codes, rounds_inputs = scheme.codes, scheme.activation is not None
    if scheme.groups:
        raise UnsupportedError(
            f"{name} has groups by activation order, which compressed-tensors no longer reads: "
            f"whoever loaded the folder would get wrong values. {_WAY}"
        )
    if scheme.activation is not None and scheme.activation.inverse:
        raise _unsayable(name, "inputs that are rounded as BitNet's")
    if not (scheme.zeros or scheme.code.signed or scheme.code.is_float or scheme.table):
        raise _unsayable(name, "codes without a sign or zero points")
    if codes in ("int4", "uint4", "int8", "uint8") and scheme.rows <= 1:
        return "int-quantized" if codes == "int8" and rounds_inputs else "pack-quantized"
    if codes == "fp8_e4m3":
        return "mxfp8-quantized" if scheme.scale_dtype == _E8M0 else "float-quantized"
    if codes == "fp4_e2m1" and scheme.rows == 1 and not _whole(name, k, scheme.columns or k) % 2:
        return "nvfp4-pack-quantized" if scheme.outer else "mxfp4-pack-quantized"
    raise _unsayable(name, scheme.name)


def _weights(name: str, scheme: BlockScheme, n: int, k: int) -> dict[str, Any]:
    said: dict[str, Any] = {
        "num_bits": scheme.code.bits,
        "type": "float" if scheme.code.is_float else "int",
        "symmetric": not scheme.zeros,
        "dynamic": False,
    }
    if scheme.scale_dtype in _TYPES:
        said["scale_dtype"] = _TYPES[scheme.scale_dtype]
    if scheme.codes == "fp4_e2m1":
        said |= {"strategy": "tensor_group" if scheme.outer else "group"}
        return said | {"group_size": scheme.columns or k}
    if scheme.rows == 1 and not scheme.columns:
        return said | {"strategy": "channel"}
    if scheme.rows == 1:
        return said | {"strategy": "group", "group_size": _whole(name, k, scheme.columns)}
    if not scheme.rows and not scheme.columns:
        return said | {"strategy": "tensor"}
    return said | {"strategy": "block", "block_structure": [scheme.rows or n, scheme.columns or k]}


def _inputs(name: str, how: Activation, k: int) -> dict[str, Any]:
    code = code_of(how.codes)
    said: dict[str, Any] = {
        "num_bits": code.bits,
        "type": "float" if code.is_float else "int",
        "symmetric": not how.zeros,
        "dynamic": how.dynamic,
    }
    if how.outer:
        said |= {"strategy": "tensor_group", "dynamic": "local", "scale_dtype": _TYPES[_E4M3]}
        return said | {"group_size": how.block}
    if how.powers:
        said |= {"scale_dtype": _TYPES[_E8M0]}
    if not how.dynamic:
        return said | {"strategy": "tensor"}
    if not how.block or (how.block >= k and not how.powers):
        return said | {"strategy": "token"}
    return said | {"strategy": "group", "group_size": _whole(name, k, how.block)}


def _whole(name: str, k: int, size: int) -> int:
    """The size of groups that divide a row of `k` elements; UnsupportedError for any other."""
    if k % size:
        raise UnsupportedError(
            f"{name} has rows of {k} elements, and compressed-tensors has whole groups alone, not "
            f"of {size} there. Use groups that divide {k}, or keep the checkpoint as it is."
        )
    return size


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [rows, columns] in words of 32 bits along the columns, the first lowest."""
    missing = -codes.shape[1] % (32 // bits)
    codes = np.pad(codes, ((0, 0), (0, missing)))
    octets = codes if bits == 8 else codes[:, ::2] | (codes[:, 1::2] << 4)
    return np.ascontiguousarray(octets).view("<i4")


def _inverse(number: np.ndarray) -> np.ndarray:
    """The float32 whose own inverse is `number`, if there is one."""
    near = np.float32(1) / number
    for tried in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
        if np.float32(1) / tried == number:
            return tried
    return near


def _count(size: int, block: int) -> int:
    return -(-size // block) if block else 1


def _unsayable(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(f"{name} has {what}, for which compressed-tensors has no words. {_WAY}")
