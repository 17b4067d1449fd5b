"""The arithmetic of quantized weights on both backends, over few functions of each.

Values are made in float32 and rounded once. Inputs are quantized and made values again as
`compressed_tensors.quantization.lifecycle.forward` does: by steps in the input's dtype.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ..model.weights import Leaf, Weight, leaves_of
from ..quantization import BlockScheme
from ..quantization.codes import TABLE, code_of
from .maths import Maths, named

_LEAST_E4M3 = 0.125  # in the place of a scale of 0
Top = Callable[[Any], Any]  # the largest of what all devices have


class BlockArithmetic:
    """The arithmetic of quantized weights in a framework."""

    def __init__(self, maths: Maths) -> None:
        self.maths = maths

    @named("matmul")
    def matmul(self, x: Any, weight: Weight, bias: Any = None) -> Any:
        """x [..., in] times a weight [out, in], plus bias [out], in x's dtype."""
        m = self.maths
        dtype = m.sums(x, many=bias is not None)
        if weight.scheme is None and not weight.pieces:
            return m.cast(m.product(x, weight.data, dtype, bias), x.dtype)
        y = self.product(x, weight, dtype)
        return m.cast(y if bias is None else y + m.cast(bias, y.dtype), x.dtype)

    def dequantize(self, weight: Weight) -> Any:
        """The matrix that a weight stands for, in its dtype."""
        if weight.pieces:
            return self.maths.join([self.dequantize(piece) for piece in weight.pieces], -2)
        if weight.scheme is None:
            return weight.data
        return self.maths.cast(self._values(weight), weight.dtype)

    def product(self, x: Any, weight: Weight, dtype: Any) -> Any:
        """x [..., in] times a weight [out, in], in `dtype`."""
        m = self.maths
        if weight.pieces:
            return m.join([self.product(x, piece, dtype) for piece in weight.pieces], -1)
        if weight.scheme is None:
            return m.product(x, weight.data, dtype)
        x = self.quantize_input(x, weight)
        if not _scales_rows(weight):
            return m.product(x, self.dequantize(weight), dtype)
        codes, scale = self._codes(weight, weight.data), self._scale(weight)
        if "zero" in weight.beside:
            codes = codes - self._lie(weight, m.wide(weight.beside["zero"]), codes.shape)
        scale = self._lie(weight, scale, (*codes.shape[:-1], 1))[..., 0]
        if "outer" in weight.beside:
            scale = scale * weight.beside["outer"]
        return m.cast(
            m.wide(m.product(x, m.cast(codes, x.dtype), _wide_dtype(m, x))) * scale, dtype
        )

    @named("embed")
    def embed(self, ids: Any, weight: Weight) -> Any:
        """Rows of a weight [V, E] for ids [...]: [..., E]; on JAX ids outside are clipped."""
        if weight.scheme is None:
            return self.maths.rows(weight.data, ids)
        return self.maths.cast(self._values(weight, ids), weight.dtype)

    def share_input(self, x: Any, weight: Weight, top: Top) -> tuple[Any, Weight]:
        """A device's columns of an input, quantized by scales of all of them, and the weight.

        The weight leaves its input as it is.
        """
        scheme = weight.scheme
        if not isinstance(scheme, BlockScheme) or scheme.activation is None:
            return x, weight
        return self.quantize_input(x, weight, top), weight.made(_leaving_input)

    def quantize_input(self, x: Any, weight: Weight, top: Top = lambda a: a) -> Any:
        """x as its codes mean it, by the activation of the weight's scheme."""
        assert isinstance(weight.scheme, BlockScheme)
        how = weight.scheme.activation
        if how is None:
            return x
        m, dtype, shape = self.maths, x.dtype, tuple(x.shape)
        code = code_of(how.codes)
        low, high = code.low, code.high
        given = weight.beside.get("input")
        wide = m.wide(x)
        if how.dynamic and how.block:
            groups = -(-shape[-1] // how.block)
            wide = m.pad(wide, -1, 0, groups * how.block - shape[-1])
            wide, top = wide.reshape(*shape[:-1], groups, how.block), lambda a: a

        def rounded(a: Any) -> Any:
            return a if how.outer or how.inverse == "wide" else m.rounded(a, dtype)

        if how.inverse:
            most = m.clip(top(m.most(abs(wide))), 1e-5, float("inf"))
            scale = rounded(rounded(m.quotient(1.0, most)) * 127)  # as torch divides a number
            codes = m.clip(m.round(rounded(wide * scale)), low, high)
            return m.cast(m.quotient(codes, scale), dtype)

        zero: Any = 0.0
        if not how.dynamic:
            scale = rounded(m.wide(given))
        elif how.zeros:
            most, least = (m.clip(top(m.most(a)), 0, float("inf")) for a in (wide, -wide))
            scale = rounded(m.quotient(rounded(most + least), high - low))
            scale = m.where(scale == 0, m.epsilon(dtype), scale)
            zero = m.round(m.clip(rounded(low + rounded(m.quotient(least, scale))), low, high))
        else:
            most = top(m.most(abs(wide)))
            if how.powers:
                scale = m.clip(m.power(most, 1) / code.power, 2.0**-126, 2.0**127)
            else:
                scale = m.rounded(m.quotient(most, (high - low) / 2), dtype)
            if how.outer:
                factor = 1.0 if given is None else m.wide(given)
                scale = m.nearest_e4m3(m.clip(m.quotient(scale, factor), -448, 448))
                scale = m.where(scale == 0, _LEAST_E4M3, scale) * factor
            else:
                scale = m.where(scale == 0, m.epsilon(dtype), scale)
        codes = rounded(rounded(m.quotient(wide, scale)) + zero)
        codes = code.nearest(m, m.clip(codes, low, high))
        values = rounded((codes - zero) * scale)
        if how.dynamic and how.block:
            values = values.reshape(*shape[:-1], -1)[..., : shape[-1]]
        return m.cast(values, dtype)

    def _values(self, weight: Weight, ids: Any = None) -> Any:
        """float32 of a weight, or of its rows by ids."""
        m = self.maths
        data = weight.data if ids is None else m.rows(weight.data, ids)
        values = self._codes(weight, data)
        if "zero" in weight.beside:
            zero = m.wide(weight.beside["zero"])
            values = values - self._lie(weight, zero, values.shape, ids)
        values = values * self._lie(weight, self._scale(weight), values.shape, ids)
        if "outer" not in weight.beside:
            return values
        outer = weight.beside["outer"]
        return values * (outer if ids is None else m.rows(outer, ids))[..., None]

    def _codes(self, weight: Weight, data: Any) -> Any:
        """float32 values of codes, before zeros and scales."""
        m, scheme = self.maths, weight.scheme
        assert isinstance(scheme, BlockScheme)
        code, width = scheme.code, weight.blocks.width
        if code.bits < 8:
            *lead, size = data.shape
            own = code.packing.width(width)
            shares = size // own
            codes = code.packing.unpack(data.reshape(*lead, shares, own), m.stack)
            data = codes[..., :width].reshape(*lead, shares * width)
        return code.values(m, data, scheme.zeros)

    def _scale(self, weight: Weight) -> Any:
        """Scales in float32."""
        assert isinstance(weight.scheme, BlockScheme)
        scale, dtype = weight.beside["scale"], weight.scheme.scale_dtype
        return (
            self.maths.float8(scale, dtype)
            if dtype.startswith("float8")
            else self.maths.wide(scale)
        )

    def _lie(self, weight: Weight, a: Any, shape: tuple[int, ...], ids: Any = None) -> Any:
        """Spread blocks over the elements of a matrix of `shape`, or of its rows by ids."""
        m, (rows, columns, _) = self.maths, weight.blocks
        if ids is not None:
            a = m.rows(a, ids // rows if rows else ids * 0)
        elif rows > 1:
            a = m.repeat(a, rows, -2)[..., : shape[-2], :]
        group = weight.beside.get("group")
        if group is not None:
            ones = (1,) * (len(a.shape) - len(group.shape))
            group = m.within(group, a.shape[-1])  # padding is of none
            return m.along(a, group.reshape(*group.shape[:-1], *ones, group.shape[-1]))
        return m.repeat(a, columns, -1)[..., : shape[-1]] if columns > 1 else a

    def implementations(
        self, leaves: Iterable[Leaf], kernels: Callable[[Weight], str | None] = lambda _: None
    ) -> dict[str, str]:
        """The implementation of each scheme's products among a model's leaves, for people.

        `kernels` says how those read a weight's codes, None where they do not.
        """
        ways: dict[str, str] = {}
        for leaf in (own for whole in leaves for own in leaves_of(whole)):
            if isinstance(leaf, Weight) and isinstance(leaf.scheme, BlockScheme):
                how = "made values within the product"
                if _scales_rows(leaf):
                    how = "codes multiplied, results scaled"
                how = kernels(leaf) or f"plain {self.maths.name}, {how}"
                ways[f"matmul, {leaf.scheme.name}"] = how
        return ways


def _scales_rows(weight: Weight) -> bool:
    """True if the product is made with codes, and each of its rows scaled.

    Sums of codes would pass the largest float16.
    """
    scheme = weight.scheme
    assert isinstance(scheme, BlockScheme)
    alike = not weight.blocks.columns and not scheme.groups and scheme.codes != TABLE
    return alike and str(weight.dtype) not in ("torch.float16", "float16")


def _leaving_input(weight: Weight) -> Weight:
    """The weight, of products whose input is quantized already."""
    assert isinstance(weight.scheme, BlockScheme)
    return replace(weight, scheme=replace(weight.scheme, activation=None))


def _wide_dtype(maths: Maths, x: Any) -> Any:
    """The backend's float32."""
    return maths.wide(x[..., :0]).dtype


def of_each(weight: Weight, chosen: Any) -> Weight:
    """A weight of experts with what is known of its input as each of `chosen` [pairs] has it."""
    given = weight.beside.get("input")
    if given is None:
        return weight
    assert isinstance(weight.scheme, BlockScheme) and weight.scheme.activation is not None
    how = weight.scheme.activation
    ones = (1, 1) if how.dynamic and how.block else (1,)
    return replace(weight, beside={**weight.beside, "input": given[chosen].reshape(-1, *ones)})


def rounds_input(weight: Weight) -> bool:
    """True if the input of a weight's products is quantized."""
    return isinstance(weight.scheme, BlockScheme) and weight.scheme.activation is not None
