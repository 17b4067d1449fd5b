"""What a mixture of experts is to the kernels: its weights, and what they are told of them."""

from typing import Any, NamedTuple

import triton

from .activation import KINDS
from .linear import NormArguments, check_epilogue
from .operands import dtype_name
from .quantized import Packed, arrays_of, constants_of, serves
from .routing import Routing

MOST_EXPERTS = 512


class Shared(NamedTuple):
    """An expert of all tokens: `up` [out, E], gate before up, and `down` [E, F].

    Its results are multiplied by the logistic function of x times `gate` [E], if there is one.
    """

    up: Any
    down: Any
    gate: Any = None


class Mixture(NamedTuple):
    """Experts' weights: `up` [X, out, E], gate before up where `gated`, and `down` [X, E, F].

    Both are tensors, or both are `quantized.Packed`, whose arrays have a first axis X. The hidden
    values are activation(gate) * (up + `offset`). With `limit` gates are at most that, and ups at
    most as far from 0 (gpt-oss). Biases are [X, out] and [X, E]. Of more experts that tokens
    choose among, these are those from own[0] to before own[1], int32 [2] in memory of the device;
    the others add nothing here, and all are `among` (0: these alone).
    """

    up: Any
    down: Any
    up_bias: Any = None
    down_bias: Any = None
    activation: str | None = "silu"
    gated: bool = True
    limit: float | None = None
    offset: float = 0.0
    shared: Shared | None = None
    own: Any = None
    among: int = 0

    @property
    def choices(self) -> int:
        """Experts that tokens choose among."""
        return self.among or shape_of(self.up)[0]

    @property
    def parts(self) -> int:
        """Products that a hidden value is made of."""
        return 2 if self.gated else 1

    @property
    def features(self) -> int:
        """Hidden values of an expert."""
        return shape_of(self.up)[1] // self.parts


def shape_of(weight: Any) -> tuple[int, int, int]:
    """Experts, rows and columns of a weight, quantized or not."""
    if isinstance(weight, Packed):
        return (*weight.data.shape[:2], weight.width)
    return tuple(weight.shape)  # pyright: ignore[reportReturnType]


def _first(weight: Packed) -> Packed:
    """The first expert's matrix, which the others follow."""
    data, scale, zero, outer = (None if part is None else part[0] for part in weight[:4])
    return weight._replace(data=data, scale=scale, zero=zero, outer=outer)


def codes_of(weight: Packed) -> tuple[tuple[Any, ...], int, dict[str, Any]]:
    """What kernels get of codes: arrays, how far the scales of experts are apart, constants."""
    first = _first(weight)
    return arrays_of(first), first.scale.numel(), constants_of(first)


def stride_of(residual: Any) -> int:
    """How far rows of a residual are apart, 0 if there is none."""
    return 0 if residual is None else residual.stride(0)


def ends_of(mixture: Mixture) -> dict[str, Any]:
    """The kernels' constants that say how products become hidden values."""
    how = {"ACTIVATION": mixture.activation, "GATED": mixture.gated}
    return {**how, "OFFSET": float(mixture.offset)}


def check(
    x: Any,
    mixture: Mixture,
    routing: Routing,
    norm: NormArguments | None,
    residual: Any,
    partial: Any,
    count: int,
) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    width, (total, out, _) = x.shape[-1], shape_of(mixture.up)
    if mixture.gated and (out % 2 or mixture.activation is None):
        raise ValueError(f"Gated experts have {out} rows and {mixture.activation!r}.")
    if mixture.activation is not None and mixture.activation not in KINDS:
        raise ValueError(
            f"The activation is {mixture.activation!r}; one of {', '.join(KINDS)} is known."
        )
    features = mixture.features
    weights = {
        "up": (mixture.up, (total, out, width)),
        "down": (mixture.down, (total, width, features)),
    }
    if isinstance(mixture.up, Packed) or isinstance(mixture.down, Packed):
        for name, (part, shape) in weights.items():
            _check_codes(name, part, shape)
        weights = {}
    expected = weights | {
        "up_bias": (mixture.up_bias, (total, out)),
        "down_bias": (mixture.down_bias, (total, width)),
    }
    if mixture.shared is not None:
        wide = mixture.shared.down.shape[-1]
        expected |= {
            "shared up": (mixture.shared.up, (wide * mixture.parts, width)),
            "shared down": (mixture.shared.down, (width, wide)),
            "shared gate": (mixture.shared.gate, (width,)),
        }
    for name, (part, shape) in expected.items():
        if part is not None and (tuple(part.shape) != shape or not part.is_contiguous()):
            raise ValueError(
                f"The experts' {name} is {tuple(part.shape)} with strides {part.stride()}; "
                f"contiguous {shape} is expected."
            )
        if part is not None and part.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype} and the experts' {name} {part.dtype}; one is wanted.")
    if total > MOST_EXPERTS:
        raise ValueError(f"There are {total} experts; up to {MOST_EXPERTS} are expected.")
    chosen = tuple(routing.experts.shape)
    types = dtype_name(routing.experts.dtype), dtype_name(routing.weights.dtype)
    if chosen[:-1] != tuple(x.shape[:-1]) or tuple(routing.weights.shape) != chosen:
        raise ValueError(
            f"x is {tuple(x.shape)}, its experts {chosen} with weights "
            f"{tuple(routing.weights.shape)}; [..., k] for x [..., E] are expected."
        )
    if types != ("int32", "float32"):
        raise ValueError(f"A routing is {types}; int32 experts and float32 weights are expected.")
    if not (routing.experts.is_contiguous() and routing.weights.is_contiguous()):
        raise ValueError("A routing is contiguous; this one has other strides.")
    if partial is not None and (partial.shape != x.shape or not partial.is_contiguous()):
        raise ValueError(
            f"partial is {tuple(partial.shape)}; contiguous {tuple(x.shape)} is wanted."
        )
    check_epilogue(x, width, None, None, False, residual, None, width)
    if norm is not None and tuple(norm.weight.shape) != (width,):
        raise ValueError(f"The norm's weight is {tuple(norm.weight.shape)}; ({width},) is wanted.")


def _check_codes(name: str, weight: Any, shape: tuple[int, int, int]) -> None:
    """Raise ValueError for a quantized weight of experts that the kernels would misread."""
    if not isinstance(weight, Packed):
        raise ValueError(f"The experts' {name} is not quantized, and others are; all or none are.")
    total, rows, width = shape
    held = triton.cdiv(width, 32) * 16 if weight.bits == 4 else width
    if tuple(weight.data.shape) != (total, rows, held) or weight.width != width:
        raise ValueError(
            f"The experts' {name} are codes {tuple(weight.data.shape)} of {weight.width} columns; "
            f"{(total, rows, held)} of {width} are expected."
        )
    for part in (weight.data, weight.scale, weight.zero, weight.outer):
        if part is not None and (part.shape[0] != total or not part.is_contiguous()):
            raise ValueError(
                f"The experts' {name} has {tuple(part.shape)} with strides {part.stride()} beside "
                f"its codes; contiguous memory of {total} experts is expected."
            )
    if not serves(weight.codes, weight.columns, weight.zero is not None):
        raise ValueError(f"No kernel reads {weight.codes} in blocks of {weight.columns} columns.")
