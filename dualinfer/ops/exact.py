"""Maths of NumPy in float64: plain ops over it are what the others are judged by.

Nothing is rounded on the way, whatever dtype is asked for, but for what `rounded` and `quotient`
are asked to round; and nothing is fast.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import erfc
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from ..model.spec import Activation
from .maths import KeyScoring, taken

Array: TypeAlias = Any


class ExactMaths:
    """See `Maths`. What has a float dtype may be of any, and results are float64."""

    name = "NumPy"
    float32, bfloat16, int32 = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("int32")
    exp: Any = staticmethod(np.exp)
    expm1: Any = staticmethod(np.expm1)
    sqrt: Any = staticmethod(np.sqrt)
    cos: Any = staticmethod(np.cos)
    sin: Any = staticmethod(np.sin)
    tanh: Any = staticmethod(np.tanh)
    floor: Any = staticmethod(np.floor)
    round: Any = staticmethod(np.round)
    minimum: Any = staticmethod(np.minimum)
    maximum: Any = staticmethod(np.maximum)
    where: Any = staticmethod(np.where)
    stack: Any = staticmethod(np.stack)
    join: Any = staticmethod(np.concatenate)
    moveaxis: Any = staticmethod(np.moveaxis)
    broadcast: Any = staticmethod(np.broadcast_to)
    clip: Any = staticmethod(np.clip)

    def span(self, name: str, /) -> AbstractContextManager[Any]:
        """See `Maths`."""
        return nullcontext()

    def wide(self, a: Any) -> Array:
        """See `Maths`."""
        return np.asarray(a).astype(np.float64)

    def cast(self, a: Array, dtype: Any) -> Array:
        """See `Maths`; floats stay as exact as they are."""
        return self.wide(a) if _is_float(dtype) else a.astype(dtype)

    def rounded(self, a: Array, dtype: Any) -> Array:
        """See `Maths`."""
        return self.wide(a.astype(np.float32).astype(dtype))

    def nearest(self, number: float, dtype: Any) -> float:
        """See `Maths`."""
        return float(np.asarray(number, dtype))

    def epsilon(self, dtype: Any) -> float:
        """See `Maths`."""
        return float(ml_dtypes.finfo(dtype).eps)

    def sums(self, x: Array, many: bool = True) -> Any:
        """See `Maths`."""
        return np.dtype(np.float64)

    def arange(self, count: int, like: Any) -> Array:
        """See `Maths`."""
        return np.arange(count)

    def zeros(self, shape: Sequence[int], dtype: Any, like: Any) -> Array:
        """See `Maths`."""
        return np.zeros(shape, np.float64 if _is_float(dtype) else dtype)

    def of_numpy(self, values: Array, like: Any) -> Array:
        """See `Maths`."""
        return values

    def put(self, a: Array, index: Any, new: Array) -> Array:
        """See `Maths`."""
        a = a.copy()
        a[index] = new
        return a

    def put_some(self, a: Array, index: tuple[Any, ...], new: Array, there: Array) -> Array:
        """See `Maths`."""
        own = tuple(i if isinstance(i, slice) else i[there] for i in index)
        return self.put(a, own, new[there])

    def put_rows(self, a: Array, rows: Array, new: Array, axis: int) -> Array:
        """See `Maths`."""
        return self.put(a, rows, self.pad(new, axis, 0, a.shape[axis] - new.shape[axis]))

    def rows_or(self, a: Array, rows: Array, beyond: int) -> Array:
        """See `Maths`."""
        return a[rows]

    def grow(self, a: Array, more: Sequence[int]) -> Array:
        """See `Maths`."""
        return np.pad(a, [(0, by) for by in (*more, *[0] * (a.ndim - len(more)))])

    def repeat(self, a: Array, count: int, axis: int) -> Array:
        """See `Maths`."""
        return np.repeat(a, count, axis)

    def pad(self, a: Array, axis: int, before: int, behind: int, value: float = 0) -> Array:
        """See `Maths`."""
        widths = [(0, 0)] * a.ndim
        widths[axis] = before, behind
        return np.pad(a, widths, constant_values=value)

    def whole(self, a: Array) -> Array:
        """See `Maths`."""
        return np.ascontiguousarray(a)

    def replace_last(self, a: Array, values: Array) -> Array:
        """See `Maths`."""
        return np.concatenate((a[..., : -values.shape[-1]], values), -1)

    def windows(self, a: Array, axis: int, size: int, step: int) -> Array:
        """See `Maths`."""
        found = np.lib.stride_tricks.sliding_window_view(a, size, axis)
        return np.moveaxis(np.moveaxis(found, axis, 0)[::step], 0, axis)

    def rsqrt(self, a: Array, /) -> Array:
        """See `Maths`."""
        return 1 / np.sqrt(a)

    def sigmoid(self, a: Array, /) -> Array:
        """See `Maths`."""
        return np.exp(-np.logaddexp(0, -self.wide(a)))

    def softplus(self, a: Array, /) -> Array:
        """See `Maths`."""
        return np.logaddexp(0, a)

    def log(self, a: Array, /) -> Array:
        """See `Maths`."""
        with np.errstate(divide="ignore"):
            return np.log(self.wide(a))

    def times(self, a: Array, number: float) -> Array:
        """See `Maths`."""
        return self.wide(a) * number

    def quotient(self, a: Any, b: Any) -> Array:
        """See `Maths`; in float32."""
        return self.wide(np.asarray(a, np.float32) / np.asarray(b, np.float32))

    def add_product(self, total: Array, a: Array, b: Array) -> Array:
        """See `Maths`."""
        return total + self.wide(a) * self.wide(b)

    def activation(self, a: Array, kind: Activation) -> Array:
        """See `Maths`."""
        a = self.wide(a)
        if kind in ("silu", "quick_gelu"):
            return a * self.sigmoid(a if kind == "silu" else 1.702 * a)
        if kind == "gelu":
            return a * np.vectorize(erfc, otypes=[np.float64])(-a / 2**0.5) / 2
        if kind == "gelu_tanh":
            return a * (1 + np.tanh((2 / np.pi) ** 0.5 * (a + 0.044715 * a**3))) / 2
        if kind in ("relu", "relu2"):
            return np.maximum(a, 0) ** (2 if kind == "relu2" else 1)
        return np.tanh(a)

    def most(self, a: Array) -> Array:
        """See `Maths`."""
        return a.max(-1, keepdims=True)

    def length(self, a: Array) -> Array:
        """See `Maths`."""
        return np.linalg.norm(self.wide(a), axis=-1, keepdims=True)

    def argmax(self, a: Array) -> Array:
        """See `Maths`."""
        return a.argmax(-1)

    def softmax(self, a: Array, /) -> Array:
        """See `Maths`."""
        powers = np.exp(self.wide(a) - self.wide(a).max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    def log_softmax(self, a: Array, /) -> Array:
        """See `Maths`."""
        return self.wide(a) - self.log_sum(a)

    def log_sum(self, a: Array) -> Array:
        """See `Maths`."""
        return np.logaddexp.reduce(self.wide(a), -1, keepdims=True)

    def glu(self, a: Array, /) -> Array:
        """See `Maths`."""
        first, second = np.split(self.wide(a), 2, -1)
        return first * self.sigmoid(second)

    def layer_norm(self, a: Array, weight: Any, bias: Any, eps: float) -> Array:
        """See `Maths`."""
        y = self.wide(a)
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + eps)
        y = y if weight is None else y * self.wide(weight)
        return y if bias is None else y + self.wide(bias)

    def top(self, a: Array, count: int) -> Array:
        """See `Maths`."""
        return -np.sort(-a, -1)[..., :count]

    def largest(self, a: Array, count: int) -> Array:
        """See `Maths`."""
        return np.argsort(-a, -1, kind="stable")[..., :count]

    def sort(self, a: Array, /) -> Array:
        """See `Maths`."""
        return np.sort(a, -1)

    def ascending(self, a: Array) -> tuple[Array, Array]:
        """See `Maths`."""
        return np.sort(a, -1), np.argsort(a, -1, kind="stable")

    def one_hot(self, a: Array, count: int) -> Array:
        """See `Maths`."""
        return (a[..., None] == np.arange(count)).astype(np.int64)

    def among(self, a: Array, count: int) -> Array:
        """See `Maths`."""
        return self.one_hot(a, count).any(-2)

    def without(self, a: Array, index: Array) -> Array:
        """See `Maths`."""
        return np.where(np.arange(a.shape[-1]) == index, -np.inf, a)

    def running_most(self, a: Array, axis: int) -> Array:
        """See `Maths`."""
        return np.maximum.accumulate(a, axis)

    def rows(self, a: Array, ids: Array) -> Array:
        """See `Maths`."""
        return a[ids]

    def within(self, ids: Array, count: int) -> Array:
        """See `Maths`."""
        return np.minimum(ids, count - 1)

    def row(self, a: Array, index: Any) -> Array:
        """See `Maths`."""
        return a[index]

    def places(self, a: Array, index: Array) -> Array:
        """See `Maths`."""
        return np.take_along_axis(a, index.reshape(*index.shape, *[1] * (a.ndim - 2)), 1)

    def along(self, a: Array, index: Array) -> Array:
        """See `Maths`."""
        index = np.broadcast_to(index, (*a.shape[:-1], index.shape[-1]))
        return np.take_along_axis(a, index, -1)

    def product(self, x: Array, matrix: Array, dtype: Any, bias: Any = None) -> Array:
        """See `Maths`."""
        y = self.wide(x) @ self.wide(matrix).T
        return y if bias is None else y + self.wide(bias)

    def einsum(self, formula: str, /, *arrays: Array, dtype: Any = None) -> Array:
        """See `Maths`."""
        return np.einsum(formula, *map(self.wide, arrays))

    def scores(self, formula: str, /, *arrays: Array) -> Array:
        """See `Maths`."""
        return self.einsum(formula, *arrays)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        scoring: KeyScoring,
        *,
        causal: bool = False,
        visible: Callable[[Any], Any] | None = None,
        bias: Callable[[Any], Any] | None = None,
        by_head: bool = False,
    ) -> Array:
        """See `Maths`."""
        if q.ndim == 3:
            how: Any = {"visible": visible, "bias": bias, "by_head": by_head}
            return self.attention(q[:, None], k, v, scoring, **how)[:, 0]
        if not by_head:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        k, v = (np.repeat(self.wide(x), q.shape[2] // x.shape[1], 1) for x in (k, v))
        scores = np.einsum("bthd,bhsd->bhts", self.wide(q), k) * scoring.scale
        if (cap := scoring.softcap) is not None:
            scores = cap * np.tanh(scores / cap)
        if bias is not None:
            scores = scores + self.wide(bias(None))
        seen = None if visible is None else visible(None)[:, None]
        if seen is None and causal:
            seen = np.tri(q.shape[1], dtype=bool)
        if seen is not None:
            scores = np.where(seen, scores, -np.inf)
        if scoring.sinks is not None:
            beside = np.broadcast_to(scoring.sinks[:, None, None], (*scores.shape[:-1], 1))
            scores = np.concatenate((scores, beside), -1)
        weights = self.softmax(scores)[..., : k.shape[2]]
        return np.einsum("bhts,bhsd->bthd", weights, v)

    def solve(self, lower: Array, right: Array) -> Array:
        """See `Maths`."""
        found = self.wide(right).copy()
        for i in range(1, right.shape[-2]):
            found[..., i, :] -= (lower[..., i, None, :i] @ found[..., :i, :])[..., 0, :]
        return found

    def convolution(self, x: Array, kernel: Array, bias: Array, stride: int) -> Array:
        """See `Maths`."""
        taps = kernel.shape[2]
        wide = self.pad(self.wide(x), 1, taps // 2, taps // 2)
        near = self.windows(wide, 1, taps, stride)
        return np.einsum("btik,oik->bto", near, self.wide(kernel)) + self.wide(bias)

    def pooled(self, shares: Array, x: Array) -> Array:
        """See `Maths`."""
        return self.wide(shares) @ self.wide(x)

    def most_of(self, x: Array, owner: Array, count: int) -> Array:
        """See `Maths`."""
        found = np.full((x.shape[0], count, x.shape[2]), -np.inf)
        for b, t in np.ndindex(owner.shape):
            if owner[b, t] < count:
                found[b, owner[b, t]] = np.maximum(found[b, owner[b, t]], x[b, t])
        return found

    def groups(self, chosen: Array, total: int, among: int, here: Any = None) -> Callable[..., Any]:
        """See `Maths`."""

        def made(
            make: Callable[..., Array], numbered: Any, paired: Any, width: int, dtype: Any
        ) -> Array:
            parts = np.zeros((len(chosen), width))
            for number in range(total):
                pairs = np.flatnonzero(chosen == number)
                if len(pairs):
                    parts[pairs] = make(*taken(self, numbered, paired, number, pairs))
            return parts

        return made

    def scan(
        self,
        step: Callable[..., tuple[Any, Any]],
        state: Array,
        parts: Sequence[Array],
        size: int,
    ) -> tuple[Array, Array]:
        """See `Maths`."""
        found = []
        for start in range(0, parts[0].shape[1], size):
            state, y = step(state, *(part[:, start : start + size] for part in parts))
            found.append(y)
        return np.concatenate(found, 1), state

    def words(self, a: Array) -> Array:
        """See `Maths`."""
        return a.astype(np.uint32)

    def low(self, a: Array) -> Array:
        """See `Maths`; sums of uint32 are."""
        return a

    def float8(self, a: Array, dtype: str) -> Array:
        """See `Maths`."""
        return self.wide(a.view(getattr(ml_dtypes, dtype)))

    def nearest_e4m3(self, a: Array) -> Array:
        """See `Maths`."""
        return self.rounded(a, ml_dtypes.float8_e4m3fn)

    def as_codes(self, a: Array, codes: str) -> Array:
        """See `Maths`."""
        if codes == "int8":
            return np.rint(a).astype(np.int8)
        return a.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    def power(self, a: Array, mantissa: int) -> Array:
        """See `Maths`."""
        bits = a.astype(np.float32).view(np.int32) + (1 << (22 - mantissa))
        return self.wide((bits & 0x7F800000).astype(np.int32).view(np.float32))

    def table(self, values: tuple[float, ...], codes: Array) -> Array:
        """See `Maths`."""
        return np.asarray(values, np.float64)[codes]


def _is_float(dtype: Any) -> bool:
    """True of bfloat16, too, whose kind NumPy does not know."""
    return np.dtype(dtype).kind not in "iub"


MATHS = ExactMaths()
