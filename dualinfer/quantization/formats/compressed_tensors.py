"""compressed-tensors: integers of 4 and 8 bits, fp8, NVFP4, MXFP4 and MXFP8, by groups of modules.

Which group a module is of says the config, by its name, a pattern or its class; a checkpoint does
not tell classes, and what is stored in codes is a Linear, or an Embedding if it is called so.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ...errors import shortened
from ...system.patterns import Patterns
from ..scheme import Activation, BlockScheme
from .row_major import (
    E4M3,
    E8M0,
    FP8,
    POWERS,
    Codes,
    Factor,
    RowMajor,
    Scales,
    lies_as,
    matrix_shape,
)
from .stored import FLOATS, Checkpoint, Opener, Tensors, blocks, check_fields, name_list, refuse

METHOD = "compressed-tensors"
KNOWN = """
    config_groups ignore format transform_config sparsity_config moe_sparsity_config
""".split()
HARMLESS = """
    global_compression_ratio provider quantization_status run_compressed version dequantize
""".split()
GROUP_FIELDS = "targets weights input_activations output_activations format".split()
ARGS_FIELDS = """
    num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype
    zp_dtype observer observer_kwargs
""".split()
FORMATS = """
    pack-quantized int-quantized naive-quantized float-quantized nvfp4-pack-quantized
    mxfp4-pack-quantized mxfp8-quantized mixed-precision
""".split()
PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
AGAIN = "Quantize the plain model with another scheme, or pass it as it is."
_NUMBERS = {"float32", "float16", "bfloat16"}


@dataclass(frozen=True)
class Group:
    """The storage of the weights of a config group, and the quantization of its inputs."""

    form: str
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    rows: int
    columns: int
    act_order: bool
    activation: Activation | None

    @cached_property
    def codes(self) -> str:
        """The codes of the canonical scheme; with zeros they have no sign."""
        if self.is_float:
            return "fp8_e4m3" if self.bits == 8 else "fp4_e2m1"
        return f"{'' if self.symmetric else 'u'}int{self.bits}"


class IntegerMatrix(RowMajor):
    """Integers, in words or one in a byte, with zero points, groups by activation order, or not."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        module: str,
        group: Group,
        of_input: Factor | None,
        others: Sequence[str] = (),
    ):
        packed = group.form in PACKED
        middle = 1 << (group.bits - 1)
        self._middle, self._group = middle, None
        data, scale = f"{module}.weight_packed" if packed else f"{module}.weight", "weight_scale"
        scale, form = f"{module}.{scale}", f"{module}.weight_shape"
        zero, order = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
        unused = [*others]
        if packed:
            n, words = matrix_shape(checkpoint, data, ("int32",))
            checkpoint.check(form, ("int64", "int32"), (2,))
            given = checkpoint.read(form).tolist()
            if given[0] != n or given[1] < 1 or blocks(given[1] * group.bits, 32) != words:
                raise checkpoint.error(f"{data} is {n} x {words} words, {form} says {given}.")
            unused.append(form)
            k = int(given[1])
        else:
            n, k = matrix_shape(checkpoint, data, ("int8",))
        scheme = BlockScheme(
            group.codes,
            group.rows,
            group.columns,
            zeros=not group.symmetric,
            activation=group.activation,
        )
        if order in checkpoint.names:
            unused.append(order)
            self._group = _order(checkpoint, order, k, group.columns)
        elif group.act_order:
            raise checkpoint.error(f"{order} is missing.")
        if self._group is not None:
            count = (checkpoint.check(scale, FLOATS)[1:] or (1,))[0]
            if self._group.max() >= count:
                raise checkpoint.error(f"{order} names groups that {scale} does not have.")
            scheme = replace(scheme, groups=count)
        if not group.symmetric or zero in checkpoint.names:
            unused.append(zero)
        # Canonical codes with zeros have no sign, others have; both are stored either way.
        held = middle if packed else 0
        raised = held - (0 if group.symmetric else middle)
        codes = Codes(data, group.bits if packed else 8, raised)
        scales = Scales(scale, of_input=of_input)
        super().__init__(checkpoint, (n, k), scheme, codes, scales, unused=unused)
        self._zero = self._zeros(zero, packed and group.strategy != "tensor")
        if group.symmetric and self._zero is not None and (self._zero != middle).any():
            raise checkpoint.error(f"{zero} is not zero, but the weights are symmetric.")

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        codes = super().codes(rows, columns)
        least = -self._middle if self.scheme.code.signed else 0
        if codes.size and not (least <= codes.min() and codes.max() < least + 2 * self._middle):
            raise self._from.error(f"{self._data} holds codes of more than its bits.")
        return codes

    def _zeros(self, name: str, packed: bool) -> np.ndarray | None:
        """Zero points as codes without a sign; words of them run along the outputs."""
        if name not in self.stored:
            return None
        count, read = self._blocks, self._from
        if not packed:
            found = read.check(name, ("int8", *_NUMBERS))
            if not lies_as(found, count):
                raise read.error(f"{name} has the shape {found}, expected {count}.")
            zeros = read.read(name).astype(np.int16).reshape(count) + self._middle
            return zeros.astype(np.uint8)
        bits = 8 if self._middle == 128 else 4
        read.check(name, ("int32",), (blocks(count[0] * bits, 32), count[1]))
        octets = np.ascontiguousarray(read.read(name).T).view(np.uint8)
        if bits == 4:
            codes = np.empty((*octets.shape, 2), np.uint8)
            codes[..., 0], codes[..., 1] = octets & 15, octets >> 4
            octets = codes.reshape(len(octets), -1)
        return np.ascontiguousarray(octets[:, : count[0]].T)

    def zero(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return self._zero if self.scheme.zeros else None

    def group(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return self._group


def _order(checkpoint: Checkpoint, name: str, k: int, size: int) -> np.ndarray | None:
    """The group of each column; None where they are in order, or -1, which means the same."""
    checkpoint.check(name, ("int32", "int64"), (k,))
    group = checkpoint.read(name).astype(np.int32)
    if (group == -1).all() or np.array_equal(group, np.arange(k) // (size or k)):
        return None
    if group.min() < 0:
        raise checkpoint.error(f"{name} names the group {group.min()}.")
    return group


def _float_matrix(
    checkpoint: Checkpoint,
    module: str,
    group: Group,
    of_input: Factor | None,
    others: Sequence[str],
) -> RowMajor:
    """fp8 or fp4, with or without a second scale, or with powers of two as scales."""
    data = f"{module}.{'weight_packed' if group.bits == 4 else 'weight'}"
    shape = matrix_shape(checkpoint, data, ("uint8",) if group.bits == 4 else tuple(FP8))
    second = group.strategy == "tensor_group"
    powers = group.form.startswith("mxfp")
    codes = group.codes if group.bits == 4 else FP8[checkpoint.source.dtype(data)]
    scheme = BlockScheme(
        codes,  # type: ignore[arg-type]
        group.rows,
        group.columns,
        outer=second,
        activation=group.activation,
    )
    outer = Factor(f"{module}.weight_global_scale", inverse=True) if second else None
    dtypes = (E4M3,) if second else POWERS if powers else FLOATS
    return RowMajor(
        checkpoint,
        (shape[0], 2 * shape[1]) if group.bits == 4 else shape,
        scheme,
        Codes(data, group.bits),
        Scales(f"{module}.weight_scale", dtypes, outer, of_input),
        unused=others,
    )


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens the matrices of a compressed-tensors checkpoint."""
    check_fields(config, METHOD, (*KNOWN, *HARMLESS))
    for field in ("transform_config", "sparsity_config", "moe_sparsity_config"):
        value = config.get(field)
        # A dense one was measured, and nothing is stored otherwise because of it.
        dense = isinstance(value, Mapping) and value.get("format") in ("dense", None)
        if value and not (field == "sparsity_config" and dense):
            raise refuse(METHOD, field, value, AGAIN)
    form = _known_form(METHOD, config.get("format") or "pack-quantized")
    groups, cache = config.get("config_groups"), config.get("kv_cache_scheme")
    if not isinstance(groups, Mapping) or not groups:
        raise refuse(METHOD, "config_groups", groups, "Expected groups by name.")
    targets: dict[str, Group] = {}
    for name, fields in groups.items():
        targets |= _read_group(str(name), fields, form, cache)
    groups_of, ignored = _Targets(targets), _Targets(name_list(config, METHOD, "ignore"))
    checkpoint = Checkpoint(source, METHOD)

    def open_matrix(name: str) -> RowMajor | None:
        module = name.removesuffix(".weight")
        parts = {part: f"{module}.{part}" for part in ("weight_packed", "weight_scale")}
        found = [part for part in parts.values() if part in checkpoint.names]
        if name == module or not (name in checkpoint.names or found):
            return None
        plain = name in checkpoint.names and source.dtype(name) not in ("int8", "uint8", *FP8)
        if plain and not found:
            return None
        target = groups_of.find(module)
        if plain:
            raise checkpoint.error(
                f"{name} is {source.dtype(name)}, but has {found[0]}: it was calibrated and never "
                "compressed."
            )
        if target is None or ignored.find(module) is not None:
            raise checkpoint.error(
                f"{name} is in codes, but quantization_config says that it is not quantized."
            )
        return _matrix(checkpoint, module, targets[target])

    return Opener(open_matrix)


def _matrix(checkpoint: Checkpoint, module: str, group: Group) -> RowMajor:
    """A module's matrix, with what scales its inputs."""
    activation, unused = group.activation, []
    inputs = {part: f"{module}.input_{part}" for part in ("scale", "global_scale", "zero_point")}
    wanted = None
    if activation is not None and activation.outer:
        wanted = Factor(inputs["global_scale"], inverse=True)
    elif activation is not None and not activation.dynamic:
        wanted = Factor(inputs["scale"])
    for part, name in inputs.items():
        if name in checkpoint.names and (wanted is None or name != wanted.name):
            unused.append(name)
            static = activation is not None and not activation.dynamic
            if part == "zero_point" and static and checkpoint.read(name).astype(float).any():
                raise checkpoint.error(f"{name} is not zero, but the inputs are symmetric.")
    make = _float_matrix if group.is_float else IntegerMatrix
    return make(checkpoint, module, group, wanted, unused)


def _known_form(label: str, form: Any) -> str:
    """The format, if it is one of those that are read."""
    if form not in FORMATS:
        raise refuse(label, "format", form, f"These are: {', '.join(FORMATS)}. {AGAIN}")
    return form


def _read_group(name: str, fields: Any, form: str, cache: Any) -> dict[str, Group]:
    """The group of each target of a config group, checked; none of that of a `cache`."""
    label = f"{METHOD}, {shortened(name)}"
    if not isinstance(fields, Mapping):
        instead = "Expected its fields; write out what the name of a preset stands for."
        raise refuse(METHOD, name, fields, instead)
    check_fields(fields, label, GROUP_FIELDS)
    targets = name_list(fields, label, "targets")
    weights = fields.get("weights")
    if fields.get("output_activations") not in (None, {}, cache):
        raise refuse(label, "output_activations", fields["output_activations"], AGAIN)
    if not weights:
        if fields.get("input_activations"):
            instead = "Inputs are quantized only where weights are. " + AGAIN
            raise refuse(label, "input_activations", fields["input_activations"], instead)
        return {}
    args = _Args(label, "weights", weights)
    stored = _known_form(label, fields.get("format") or form)
    if stored == "mixed-precision":
        stored = args.usual_form(bool(fields.get("input_activations")))
    return dict.fromkeys(targets, args.group(stored, _activation(label, fields)))


class _Args:
    """A config's arguments for weights or inputs, with its defaults, checked."""

    def __init__(self, label: str, field: str, given: Any):
        self.label, self.field = label, field
        if not isinstance(given, Mapping):
            raise refuse(label, field, given, "Expected an object.")
        check_fields(given, f"{label}, {field}", ARGS_FIELDS)
        self.given = given
        kind = str(given.get("type") or "int").lower()
        if kind not in ("int", "float"):
            raise self.refuse("type", "Expected int or float.")
        self.is_float = kind == "float"
        self.bits = given.get("num_bits", 8)
        if self.bits not in (4, 8):
            raise self.refuse("num_bits", f"Those of 4 and 8 bits are. {AGAIN}")
        self.symmetric = given.get("symmetric", True)
        self.dynamic = given.get("dynamic", False)
        if self.symmetric not in (True, False) or (self.is_float and not self.symmetric):
            raise self.refuse("symmetric", f"Floats have no zero points. {AGAIN}")
        size = given.get("group_size")
        if size is not None and (type(size) is not int or (size < 1 and size != -1)):
            raise self.refuse("group_size", "Expected a number of inputs, or -1.")
        inferred = "tensor" if size is None else "channel" if size == -1 else "group"
        self.strategy = str(given.get("strategy") or inferred).lower()
        self.size = size if size is not None and size > 0 else 0
        if self.strategy in ("group", "tensor_group") and not self.size:
            raise self.refuse("group_size", f"The strategy {self.strategy} has to have one.")
        self.powers = "uint8" in str(given.get("scale_dtype")) or E8M0 in str(
            given.get("scale_dtype")
        )

    def refuse(self, field: str, instead: str) -> Exception:
        """The error of a field."""
        return refuse(self.label, f"{self.field}.{field}", self.given.get(field), instead)

    def usual_form(self, inputs: bool) -> str:
        """The format in which compressed-tensors stores such weights."""
        if self.is_float and self.bits == 4:
            return "nvfp4-pack-quantized" if self.size == 16 else "mxfp4-pack-quantized"
        if self.is_float:
            return "mxfp8-quantized" if self.size == 32 and self.powers else "float-quantized"
        return "int-quantized" if inputs else "pack-quantized"

    def group(self, form: str, activation: Activation | None) -> Group:
        """The group that these weights are of, in a format."""
        if self.dynamic:
            raise self.refuse("dynamic", f"Weights have scales of their own. {AGAIN}")
        strategies: dict[str, tuple[int, int]] = {
            "tensor": (0, 0),
            "channel": (1, 0),
            "group": (1, self.size),
            "tensor_group": (1, self.size),
        }
        block = self.given.get("block_structure")
        if self.strategy == "block":
            if isinstance(block, str):
                block = [int(b) for b in re.findall(r"\d{1,9}", block)]
            if not isinstance(block, list | tuple) or len(block) != 2:
                raise self.refuse("block_structure", "Expected two numbers.")
            if not all(type(b) is int and b > 0 for b in block):
                raise self.refuse("block_structure", "Expected two numbers.")
            strategies["block"] = (block[0], block[1])
        elif block:
            raise self.refuse("block_structure", f"The strategy is {self.strategy}.")
        if self.strategy not in strategies:
            raise self.refuse("strategy", f"These are: {', '.join(strategies)}, block. {AGAIN}")
        fitting = {
            "pack-quantized": not self.is_float,
            "int-quantized": not self.is_float,
            "naive-quantized": not self.is_float or self.bits == 8,
            "float-quantized": self.is_float and self.bits == 8,
            "nvfp4-pack-quantized": self.bits == 4 and self.is_float,
            "mxfp4-pack-quantized": self.bits == 4 and self.is_float and self.strategy == "group",
            "mxfp8-quantized": self.bits == 8 and self.is_float and self.strategy == "group",
        }
        second = form == "nvfp4-pack-quantized"
        if not fitting[form] or second != (self.strategy == "tensor_group"):
            instead = f"The format {form} does not have them so. {AGAIN}"
            raise refuse(self.label, self.field, dict(self.given), instead)
        order = self.given.get("actorder")
        named = order.lower() if isinstance(order, str) else order
        if named not in (None, False, True, "weight", "static", "group", "dynamic"):
            raise self.refuse("actorder", "Expected group, weight or none.")
        rows, columns = strategies[self.strategy]
        return Group(
            form,
            self.bits,
            self.is_float,
            self.symmetric,
            self.strategy,
            rows,
            columns,
            named in (True, "group", "dynamic"),
            activation,
        )


def _activation(label: str, fields: Mapping[str, Any]) -> Activation | None:
    """The quantization of a group's inputs."""
    given = fields.get("input_activations")
    if not given:
        return None
    args = _Args(label, "input_activations", given)
    codes: Literal["int8", "fp8_e4m3", "fp4_e2m1"]
    if args.is_float:
        codes = "fp8_e4m3" if args.bits == 8 else "fp4_e2m1"
    elif args.bits == 8:
        codes = "int8"
    else:
        raise args.refuse("num_bits", f"Integers of inputs have 8 bits. {AGAIN}")
    if given.get("actorder"):
        raise args.refuse("actorder", "Inputs have no order.")
    zeros, dynamic = not args.symmetric, args.dynamic
    if args.strategy == "tensor_group":
        if dynamic != "local" or codes != "fp4_e2m1":
            raise args.refuse("dynamic", f"NVFP4's inputs are local. {AGAIN}")
        return Activation(codes, block=args.size, outer=True)
    if not dynamic:
        if args.strategy != "tensor" or zeros:
            instead = f"Scales of inputs in the checkpoint are one, without a zero point. {AGAIN}"
            raise args.refuse("strategy" if not zeros else "symmetric", instead)
        return Activation(codes, dynamic=False)
    if args.strategy not in ("token", "group"):
        instead = f"One scale for a whole batch makes its sequences change each other. {AGAIN}"
        raise args.refuse("strategy", instead)
    powers = args.powers and args.is_float and args.size == 32
    return Activation(codes, block=args.size, zeros=zeros, powers=powers)


class _Targets:
    """Names, patterns and classes of modules, which `find` tries in this order."""

    def __init__(self, targets: Iterable[str]):
        targets = sorted(targets, key=lambda target: ("re:" in target, target))
        patterns = [target for target in targets if target.startswith("re:")]
        texts = [pattern.removeprefix("re:") for pattern in patterns]
        where = f"The model's quantization_config ({METHOD})"
        self._patterns, self._tried = patterns, Patterns(texts, where)
        self._names = {target for target in targets if not target.startswith("re:")}
        self._linear = next((t for t in targets if t.endswith(("Linear", "LinearBase"))), None)

    def find(self, module: str) -> str | None:
        """The target that a module with a matrix in codes is of; None where it is of none."""
        if module in self._names:
            return module
        found = self._tried.find(module)
        if found:
            return self._patterns[found[0]]
        if _is_embedding(module):
            return "Embedding" if "Embedding" in self._names else None
        return self._linear


def _is_embedding(module: str) -> bool:
    """True if a module with a matrix in codes is an Embedding, by what it is called."""
    own = module.rpartition(".")[2]
    return "embed" in own.lower() or own in ("wte", "wpe")
