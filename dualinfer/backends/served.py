"""Find which kernels read a weight when it is first seen; a launch looks it up."""

from typing import Any, NamedTuple

from ..model.weights import Weight
from ..ops.schemes import rounds_input
from ..quantization import BlockScheme


class EightBit(NamedTuple):
    """A weight whose codes are multiplied with those of its input, as kernels take both.

    `weight` is a `quantized.Packed`; `block` and `scale` are the input's, see `eight_bit.quantize`.
    """

    weight: Any
    block: int
    scale: Any


class Served(NamedTuple):
    """The form in which kernels take a weight, whatever it is multiplied with.

    It has `features` rows of `width` columns. It is `dense` where it is floats, or has `codes` as
    the kernels take them, a `quantized.Packed`, or neither: plain ops serve orders by activation,
    small blocks, and weights of several pieces. Its input is quantized if it `rounds`, and kernels
    may do that themselves as `eight` says.
    """

    features: int
    width: int
    dense: bool
    codes: Any
    rounds: bool
    eight: EightBit | None

    @property
    def known(self) -> bool:
        """True if kernels read the weight."""
        return self.dense or self.codes is not None

    def in_eight_bits(self, count: int, itemsize: int) -> EightBit | None:
        """The product in 8 bits for `count` rows of elements of so many bytes, if there is one."""
        from ..kernels.triton import eight_bit

        own = self.eight
        if own is None or not eight_bit.pays(count, itemsize, own.weight, own.block):
            return None
        return own


def served(weight: Weight) -> Served:
    """The form in which kernels take a weight, found once and kept on it."""
    return weight.made(_find)


def describe_codes(weight: Weight, how: str) -> str | None:
    """`how` kernels read a weight's codes, for people; None where they do not."""
    own = served(weight)
    if own.codes is None:
        return None
    assert isinstance(weight.scheme, BlockScheme)
    eight = own.rounds and _knows_input(weight.scheme.activation)
    return f"{how}, or Triton in 8 bits" if eight else how


def _find(weight: Weight) -> Served:
    codes, (*_, features, width) = _packed(weight), weight.shape
    eight = None if codes is None else _eight_bit(weight, codes)
    return Served(features, width, weight.scheme is None, codes, rounds_input(weight), eight)


def _packed(weight: Weight) -> Any:
    """A quantized weight as the kernels take it; None if they know no such."""
    from ..kernels.triton import quantized

    scheme = weight.scheme
    if not isinstance(scheme, BlockScheme) or scheme.groups:
        return None
    rows, columns, _ = weight.blocks
    if not quantized.serves(scheme.codes, columns, scheme.zeros):
        return None
    return quantized.Packed(
        weight.data,
        weight.beside["scale"],
        weight.beside.get("zero"),
        weight.beside.get("outer"),
        scheme.codes,
        scheme.scale_dtype,
        rows,
        columns,
        weight.shape[-1],
        scheme.table,
    )


def _eight_bit(weight: Weight, codes: Any) -> EightBit | None:
    """The product in 8 bits for many rows of x; None if they are never multiplied so."""
    from ..kernels.triton import eight_bit

    assert isinstance(weight.scheme, BlockScheme)
    how = weight.scheme.activation
    if how is None or not _knows_input(how):
        return None
    block = how.block if how.dynamic else 0
    if not eight_bit.serves(codes, how.codes, block):
        return None
    return EightBit(codes, block, None if how.dynamic else weight.beside["input"])


def _knows_input(how: Any) -> bool:
    """True if the kernels in 8 bits quantize inputs so: an `Activation`.

    Zeros, second scales, powers of two and inverse scales are plain ops'.
    """
    return not (how.zeros or how.outer or how.powers or how.inverse)
