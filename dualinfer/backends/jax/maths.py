"""Maths of JAX; see `dualinfer.ops.maths`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...model.spec import Activation
from ...ops.maths import KeyScoring, taken
from .groups import Blocks, Way, multiply

_FEW = 64  # rows of a product
_MOST = 256  # pairs of one number in one product
_POOLED = 1024  # tokens that are pooled as one
_WHOLE = 1024  # queries whose scores are held at once


def einsum(equation: str, *operands: jax.Array, **kwargs) -> jax.Array:
    """jnp.einsum in which float32 means float32: no TF32 on a GPU."""
    exact = lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(equation, *operands, precision=exact, **kwargs)


class JaxMaths:
    """See `Maths`."""

    name = "XLA"
    float32, bfloat16, int32 = jnp.float32, jnp.bfloat16, jnp.int32
    span = staticmethod(jax.named_scope)
    stack = staticmethod(jnp.stack)
    join = staticmethod(jnp.concatenate)
    moveaxis = staticmethod(jnp.moveaxis)
    round = staticmethod(jnp.round)
    exp = staticmethod(jnp.exp)
    expm1 = staticmethod(jnp.expm1)
    log = staticmethod(jnp.log)
    sqrt = staticmethod(jnp.sqrt)
    rsqrt = staticmethod(lax.rsqrt)
    cos = staticmethod(jnp.cos)
    sin = staticmethod(jnp.sin)
    tanh = staticmethod(jnp.tanh)
    sigmoid = staticmethod(jax.nn.sigmoid)
    softplus = staticmethod(jax.nn.softplus)
    floor = staticmethod(jnp.floor)
    minimum = staticmethod(jnp.minimum)
    maximum = staticmethod(jnp.maximum)
    glu = staticmethod(jax.nn.glu)
    softmax = staticmethod(jax.nn.softmax)
    log_softmax = staticmethod(jax.nn.log_softmax)
    sort = staticmethod(jnp.sort)
    broadcast = staticmethod(jnp.broadcast_to)

    def where(self, condition: jax.Array, a: Any, b: Any, /) -> jax.Array:
        """See `Maths`."""
        return jnp.where(condition, a, b)

    def clip(self, a: jax.Array, low: float, high: float, /) -> jax.Array:
        """See `Maths`."""
        return jnp.clip(a, low, high)

    def wide(self, a: jax.Array) -> jax.Array:
        """See `Maths`."""
        return a.astype(jnp.float32)

    def cast(self, a: jax.Array, dtype: Any) -> jax.Array:
        """See `Maths`."""
        return a.astype(dtype)

    def rounded(self, a: jax.Array, dtype: Any) -> jax.Array:
        """See `Maths`."""
        a = a.astype(jnp.float32)
        if dtype == jnp.float32:
            return a
        info = jnp.finfo(dtype)  # XLA may drop a cast and its way back
        y = lax.reduce_precision(a, info.nexp, info.nmant)
        if dtype != jnp.float16:
            return y
        # What is small there is a multiple of 2^-24, and zero here.
        return jnp.where(abs(a) < 2.0**-14, jnp.round(a * 2.0**24) / 2.0**24, y)

    def words(self, a: jax.Array) -> jax.Array:
        """See `Maths`; uint32."""
        return a.astype(jnp.uint32)

    def low(self, a: jax.Array) -> jax.Array:
        """See `Maths`; sums of uint32 are."""
        return a

    def float8(self, a: jax.Array, dtype: str) -> jax.Array:
        """See `Maths`."""
        return lax.bitcast_convert_type(a, jnp.dtype(dtype)).astype(jnp.float32)

    def nearest_e4m3(self, a: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.where(abs(a) < 2.0**-6, jnp.round(a * 512) / 512, lax.reduce_precision(a, 8, 3))

    def as_codes(self, a: jax.Array, codes: str) -> jax.Array:
        """See `Maths`."""
        if codes == "int8":
            return jnp.round(a).astype(jnp.int8)
        nearest = self.nearest_e4m3(a).astype(jnp.float8_e4m3fn)
        return lax.bitcast_convert_type(nearest, jnp.uint8)

    def power(self, a: jax.Array, mantissa: int) -> jax.Array:
        """See `Maths`."""
        bits = lax.bitcast_convert_type(a, jnp.int32) + (1 << (22 - mantissa))
        return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)

    def nearest(self, number: float, dtype: Any) -> float:
        """See `Maths`."""
        return float(np.asarray(number, dtype))

    def epsilon(self, dtype: Any) -> float:
        """See `Maths`."""
        return float(jnp.finfo(dtype).eps)

    def quotient(self, a: jax.Array, b: jax.Array | float) -> jax.Array:
        """See `Maths`."""
        # XLA would multiply by the reciprocal; it does not see that nothing changes here.
        return a / jnp.where(jnp.isnan(a), 1, b)

    def table(self, values: tuple[float, ...], codes: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.take(jnp.array(values, jnp.float32), codes.astype(jnp.int32), mode="clip")

    def repeat(self, a: jax.Array, count: int, axis: int) -> jax.Array:
        """See `Maths`."""
        return jnp.repeat(a, count, axis=axis)

    def rows(self, a: jax.Array, ids: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.take(a, ids, axis=0, mode="clip")

    def within(self, ids: jax.Array, count: int) -> jax.Array:
        """See `Maths`; `rows` and `along` clip them."""
        return ids

    def row(self, a: jax.Array, index: jax.Array) -> jax.Array:
        """See `Maths`; the index is traced."""
        return lax.dynamic_index_in_dim(a, index, keepdims=False)

    def places(self, a: jax.Array, index: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.take_along_axis(a, index.reshape(*index.shape, *[1] * (a.ndim - 2)), axis=1)

    def along(self, a: jax.Array, index: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.take_along_axis(a, index, axis=-1, mode="clip")

    def most(self, a: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.max(a, axis=-1, keepdims=True)

    def argmax(self, a: jax.Array) -> jax.Array:
        """See `Maths`; int32."""
        return jnp.argmax(a, axis=-1).astype(jnp.int32)

    def log_sum(self, a: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jax.nn.logsumexp(a, axis=-1, keepdims=True)

    def pad(self, a: jax.Array, axis: int, before: int, behind: int, value: float = 0) -> jax.Array:
        """See `Maths`."""
        widths = [(0, 0)] * a.ndim
        widths[axis] = before, behind
        return jnp.pad(a, widths, constant_values=value)

    def sums(self, x: jax.Array, many: bool = True) -> Any:
        """See `Maths`; XLA would write float32 of many rows to memory first."""
        return jnp.float32 if many or math.prod(x.shape[:-1]) <= _FEW else x.dtype

    def arange(self, count: int, like: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.arange(count, dtype=jnp.int32)

    def zeros(self, shape: Sequence[int], dtype: Any, like: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.zeros(shape, dtype)

    def of_numpy(self, values: np.ndarray, like: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.asarray(values)

    def put(self, a: jax.Array, index: Any, new: jax.Array) -> jax.Array:
        """See `Maths`."""
        return new if index is ... else a.at[index].set(new, mode="drop")

    def put_some(
        self, a: jax.Array, index: tuple[Any, ...], new: jax.Array, there: jax.Array
    ) -> jax.Array:
        """See `Maths`."""
        first, *rest = index
        return self.put(a, (jnp.where(there, first, a.shape[0]), *rest), new)

    def put_rows(self, a: jax.Array, rows: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        """See `Maths`."""
        return self.put(a, rows, self.pad(new, axis, 0, a.shape[axis] - new.shape[axis]))

    def rows_or(self, a: jax.Array, rows: jax.Array, beyond: int) -> jax.Array:
        """See `Maths`."""
        return a.at[rows].get(mode="fill", fill_value=beyond)

    def grow(self, a: jax.Array, more: Sequence[int]) -> jax.Array:
        """See `Maths`."""
        return jnp.pad(a, [(0, by) for by in (*more, *[0] * (a.ndim - len(more)))])

    def add_product(self, total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """See `Maths`."""
        return total + a.astype(total.dtype) * b.astype(total.dtype)

    def activation(self, a: jax.Array, kind: Activation) -> jax.Array:
        """See `Maths`."""
        y = a.astype(jnp.float32)
        if kind == "silu":
            y = jax.nn.silu(y)
        elif kind == "gelu":
            y = jax.nn.gelu(y, approximate=False)
        elif kind == "gelu_tanh":
            y = jax.nn.gelu(y, approximate=True)
        elif kind == "quick_gelu":
            y = y * jax.nn.sigmoid(1.702 * y)
        elif kind == "relu":
            y = jax.nn.relu(y)
        elif kind == "relu2":
            y = jnp.square(jax.nn.relu(y))
        else:
            y = jnp.tanh(y)
        return y.astype(a.dtype)

    def scan(
        self,
        step: Callable[..., tuple[Any, Any]],
        state: jax.Array,
        parts: Sequence[jax.Array],
        size: int,
    ) -> tuple[jax.Array, jax.Array]:
        """See `Maths`."""
        rows, tokens = parts[0].shape[:2]
        size = min(size, tokens)

        def chunked(part: jax.Array) -> jax.Array:
            part = self.pad(part, 1, 0, -tokens % size)
            return part.reshape(rows, -1, size, *part.shape[2:]).swapaxes(0, 1)

        chunks = tuple(map(chunked, parts))
        state, y = lax.scan(lambda last, pieces: step(last, *pieces), state, chunks)
        return y.swapaxes(0, 1).reshape(rows, -1, *y.shape[3:])[:, :tokens], state

    def whole(self, a: jax.Array) -> jax.Array:
        """See `Maths`."""
        return a

    def replace_last(self, a: jax.Array, values: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.concatenate((a[..., : -values.shape[-1]], values), -1)

    def windows(self, a: jax.Array, axis: int, size: int, step: int) -> jax.Array:
        """See `Maths`."""
        starts = range(0, a.shape[axis] - size + 1, step)
        parts = [lax.slice_in_dim(a, i, i + size, axis=axis) for i in starts]
        return jnp.moveaxis(jnp.stack(parts, axis), axis + 1, -1)

    def times(self, a: jax.Array, number: float) -> jax.Array:
        """See `Maths`."""
        return (a * jnp.asarray(number, jnp.float32)).astype(a.dtype)

    def length(self, a: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.linalg.norm(a, axis=-1, keepdims=True)

    def layer_norm(
        self, a: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float
    ) -> jax.Array:
        """See `Maths`."""
        y = a.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)
        y = y if weight is None else y * weight.astype(jnp.float32)
        return (y if bias is None else y + bias.astype(jnp.float32)).astype(a.dtype)

    def top(self, a: jax.Array, count: int) -> jax.Array:
        """See `Maths`."""
        return lax.top_k(a, count)[0]

    def largest(self, a: jax.Array, count: int) -> jax.Array:
        """See `Maths`; one is found without a sort."""
        return a.argmax(-1, keepdims=True) if count == 1 else lax.top_k(a, count)[1]

    def ascending(self, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Maths`."""
        index = jnp.argsort(a, -1)
        return jnp.take_along_axis(a, index, -1), index

    def one_hot(self, a: jax.Array, count: int) -> jax.Array:
        """See `Maths`."""
        return jax.nn.one_hot(a, count, dtype=jnp.int32)

    def among(self, a: jax.Array, count: int) -> jax.Array:
        """See `Maths`."""
        return (a[..., None] == jnp.arange(count)).any(-2)

    def without(self, a: jax.Array, index: jax.Array) -> jax.Array:
        """See `Maths`."""
        return jnp.where(jnp.arange(a.shape[-1]) == index, -jnp.inf, a)

    def running_most(self, a: jax.Array, axis: int) -> jax.Array:
        """See `Maths`."""
        return lax.cummax(a, axis=axis)

    def product(
        self, x: jax.Array, matrix: jax.Array, dtype: Any, bias: jax.Array | None = None
    ) -> jax.Array:
        """See `Maths`."""
        if x.dtype == matrix.dtype:  # einsum takes as long to trace as all the rest of a layer
            exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            axes = ((x.ndim - 1,), (1,)), ((), ())
            y = lax.dot_general(x, matrix, axes, exact, dtype)
        else:
            y = einsum("...i,oi->...o", x, matrix, preferred_element_type=dtype)
        return y if bias is None else y + bias.astype(dtype)

    def einsum(self, formula: str, /, *arrays: jax.Array, dtype: Any = None) -> jax.Array:
        """See `Maths`."""
        return einsum(formula, *arrays, preferred_element_type=dtype)

    def scores(self, formula: str, /, *arrays: jax.Array) -> jax.Array:
        """See `Maths`."""
        return einsum(formula, *arrays, preferred_element_type=jnp.float32)

    def attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        scoring: KeyScoring,
        *,
        causal: bool = False,
        visible: Callable[[Any], Any] | None = None,
        bias: Callable[[Any], Any] | None = None,
        by_head: bool = False,
    ) -> jax.Array:
        """See `Maths`: a dense softmax, of so many queries at once."""
        dtype, q = q.dtype, q.astype(k.dtype)
        *lead, heads, dim = q.shape
        kv_heads, held = (k.shape[1], "bksd") if by_head else (k.shape[2], "bskd")
        t, tokens = ("t", lead[1]) if len(lead) > 1 and lead[1] > 1 else ("", 1)
        grouped = q.reshape(*lead[: 1 + len(t)], kv_heads, heads // kv_heads, dim)

        def part(rows: Any, some: jax.Array) -> jax.Array:
            """The result for `some` queries, those of int `rows`, or all."""
            scores = self.scores(f"b{t}kgd,{held}->bkg{t}s", some, k) * scoring.scale
            if (cap := scoring.softcap) is not None:
                scores = cap * jnp.tanh(scores / cap)

            def over(a: jax.Array, groups: tuple[int, ...]) -> jax.Array:
                """An array [B or 1, H or 1, R or 1, S] as scores lie."""
                own = a.shape[2:] if t else a.shape[3:]
                return a.reshape(a.shape[0], *groups, *own)

            if bias is not None:
                scores += over(bias(rows), (kv_heads, heads // kv_heads))
            seen = None
            if visible is not None:
                seen = visible(rows)[:, None]
            elif causal:
                at = jnp.arange(k.shape[2 if by_head else 1])
                seen = (at <= (at if rows is None else rows)[:, None])[None, None]
            if seen is not None:
                scores = jnp.where(over(seen, (1, 1)), scores, -jnp.inf)
            weights = _softmax(scores, scoring.sinks).astype(v.dtype)
            return einsum(f"bkg{t}s,{held}->b{t}kgd", weights, v)

        if tokens <= _WHOLE or tokens % _WHOLE:
            return part(None, grouped).reshape(*lead, heads, -1).astype(dtype)
        # Scores of all queries at once would take B * H * T * T floats.
        parts = grouped.reshape(lead[0], -1, _WHOLE, *grouped.shape[2:]).swapaxes(0, 1)
        rows = jnp.arange(tokens).reshape(-1, _WHOLE)
        out = lax.map(lambda pair: part(*pair), (rows, parts))
        return out.swapaxes(0, 1).reshape(*lead, heads, -1).astype(dtype)

    def solve(self, lower: jax.Array, right: jax.Array) -> jax.Array:
        """See `Maths`."""
        how = {"left_side": True, "lower": True, "unit_diagonal": True}
        return lax.linalg.triangular_solve(lower, right, **how)

    def convolution(
        self, x: jax.Array, kernel: jax.Array, bias: jax.Array, stride: int
    ) -> jax.Array:
        """See `Maths`."""
        aside = kernel.shape[2] // 2
        exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        how: Any = {"dimension_numbers": ("NWC", "OIW", "NWC"), "precision": exact}
        return lax.conv_general_dilated(x, kernel, (stride,), [(aside, aside)], **how) + bias

    def pooled(self, shares: jax.Array, x: jax.Array) -> jax.Array:
        """See `Maths`."""
        if shares.shape[1] == 1:
            return (shares[:, 0, :, None] * x).sum(1, keepdims=True)
        # A product of many tokens and few results leaves a GPU idle: parts of them side by side.
        parts = x.shape[1] // _POOLED if x.shape[1] % _POOLED == 0 else 1
        shares = shares.reshape(*shares.shape[:2], parts, -1)
        x = x.reshape(x.shape[0], parts, -1, x.shape[2])
        return einsum("bmnt,bnte->bnme", shares, x).sum(1)

    def most_of(self, x: jax.Array, owner: jax.Array, count: int) -> jax.Array:
        """See `Maths`."""
        found = jnp.full((x.shape[0], count, x.shape[2]), -jnp.inf)
        return found.at[jnp.arange(len(x))[:, None], owner].max(x, mode="drop")

    def groups(
        self, chosen: jax.Array, total: int, among: int, here: jax.Array | None = None
    ) -> Callable[..., jax.Array]:
        """See `Maths`.

        Pairs are sorted by number and made in blocks of one number's, one block after another, so
        that one number's matrices are taken at a time, and those alone that a pair chose. XLA's
        `ragged_dot` would multiply the others by zero.
        """
        pairs = len(chosen)
        size = min(_MOST, 1 << (-(-pairs // among) - 1).bit_length())  # about those of a number
        blocks = Blocks.of(chosen, total)

        def made(
            make: Callable[..., jax.Array], numbered: Any, paired: Any, width: int, dtype: Any
        ) -> jax.Array:
            arrays, counts = zip(*paired, strict=True)

            def take(given: Any, number: jax.Array, some: jax.Array) -> tuple[Any, ...]:
                own, arrays = given
                return taken(self, own, tuple(zip(arrays, counts, strict=True)), number, some)

            like = jax.ShapeDtypeStruct((pairs, width), dtype)
            real = tuple(count for array, count in paired if array is not None)
            return multiply(Way(make, take, like, size, real), (numbered, arrays), blocks)

        return made


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax of scores [B, K, G, ..., S] over the last axis, each head's sink [H] beside them."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    heads = scores.shape[1:3]
    beside = sinks.reshape(*heads, *(1,) * (scores.ndim - 3))
    beside = jnp.broadcast_to(beside, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate((scores, beside), axis=-1), axis=-1)[..., :-1]


MATHS = JaxMaths()
