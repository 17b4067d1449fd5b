"""Read the request of `quant`: a scheme for each of a model's matrices, applied while it loads."""

from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, shown, warn_caller
from .quantize import SCHEMES
from .scheme import Activation, BlockScheme

_MOST_BITS = 9.0  # for a weight and its share of scales: int8 in groups of 16
HEAD = SCHEMES["int8"]  # of the head, and of an embedding that is the head


@dataclass(frozen=True)
class Recipe:
    """Matrices of layers have `scheme`, or, with `groups`, as many groups along each row.

    Those of queries, keys and values stay plain unless `qkv`.
    """

    scheme: BlockScheme
    groups: int = 0
    qkv: bool = True

    def scheme_of(self, name: str, shape: tuple[int, int]) -> BlockScheme:
        """The scheme of a layer's matrix [out, in]. Raises ConfigError where it has no groups."""
        if not self.groups:
            return self.scheme
        if shape[1] % self.groups:
            raise ConfigError(
                f"quant.weight.q_groups={self.groups}: rows of {name} have {shape[1]} elements, "
                f"which are not so many equal groups. Use a number that divides {shape[1]} and "
                "other matrices' rows, or group_size, whose last group may be shorter."
            )
        _check_use(self.scheme, shape[1] // self.groups, f"q_groups={self.groups}")
        return replace(self.scheme, columns=shape[1] // self.groups)


def make_recipe(quant: Any) -> Recipe | None:
    """The recipe that a config's block `quant` asks for; None where it asks for nothing.

    Raises ConfigError for what cannot be honoured.
    """
    if quant is None or not quant.enabled:
        return None
    weight, activation = quant.weight, quant.activation
    if weight.group_size is not None and "q_groups" in weight.model_fields_set:
        reason = "q_groups says the same by a count. Give one of them."
        raise _refused("weight.group_size", weight.group_size, reason)
    asked = "activation" in quant.model_fields_set and activation.enabled
    for name in ("quantized_initialization", "post_init_quant"):
        if getattr(weight, name):
            raise _refused(
                f"weight.{name}",
                getattr(weight, name),
                "patterns of names are not read. Use num_bits, q_type and q_groups, or scheme.",
            )
    if not weight.enabled:
        reason = "without quantized weights nothing is quantized. Set enabled to False instead."
        raise _refused("weight.enabled", False, reason)
    if quant.scheme is not None:
        if "weight" in quant.model_fields_set:
            reason = "it says what `weight` says, too. Give one of them."
            raise _refused("scheme", quant.scheme, reason)
        scheme, groups = SCHEMES[quant.scheme], 0
    else:
        zeros = weight.q_type == "asymmetric"
        codes = f"{'u' if zeros else ''}int{weight.num_bits}"
        scheme = BlockScheme(codes, columns=weight.group_size or 0, zeros=zeros)
        groups = 0 if weight.q_groups == 1 else weight.q_groups
        if scheme.columns:
            _check_use(scheme, scheme.columns, f"group_size={scheme.columns}")
    if asked:
        if scheme.code.is_float:
            reason = "inputs become integers, which goes with weights of integers."
            raise _refused("activation", {"enabled": True}, f"{reason} Use int8 or int4.")
        if activation.num_bits != 8:
            raise _refused("activation.num_bits", activation.num_bits, "inputs have 8 bits. Use 8.")
        if activation.q_groups != 1:
            reason = "an input has one scale for each token. Use 1."
            raise _refused("activation.q_groups", activation.q_groups, reason)
        zeros = activation.q_type == "asymmetric"
        scheme = replace(scheme, activation=Activation("int8", zeros=zeros))
    return Recipe(scheme, groups, quant.qkv.enabled)


def _check_use(scheme: BlockScheme, columns: int, asked: str) -> None:
    """Warn where groups are so small that a scale for each takes more than int8 would."""
    bits = scheme.code.bits + (16 + scheme.code.bits * scheme.zeros) / columns
    if bits <= _MOST_BITS:
        return
    way = "Use larger groups, or int8."
    if "q_groups" in asked:
        way = "Use fewer groups, or int8; a group's size is given by group_size."
    warn_caller(
        f"quant.weight.{asked}: groups of {columns} take about {bits:.3g} bits a weight with their "
        f"scales of 16 bits, and int8 takes 8 with a smaller error. {way}"
    )


def _refused(name: str, value: Any, reason: str) -> ConfigError:
    return ConfigError(f"quant.{name}={shown(value)}: {reason}")
