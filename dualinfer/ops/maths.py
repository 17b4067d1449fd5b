"""Maths: the functions of arrays that plain ops are written with; each framework has its own.

An op is written once over them (the files beside this one), and so runs on every backend, and in
NumPy. What all frameworks spell alike is no function here: operators and comparisons, slices,
`shape`, `dtype`, `reshape`, `swapaxes`, and of numbers `sum`, `mean`, `any`, `cumsum` and `clip`.

`a` is an array. Axes are counted from the front, or negative from behind. Unless a function says
otherwise, the result has a's dtype. **float32 means float32**: products of float32 are made without
TF32, and what `wide` gives stays as exact as that until `cast` rounds it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from ..model.spec import Activation
from ..model.weights import Leaf, Weight

P = ParamSpec("P")
R = TypeVar("R")


class KeyScoring(NamedTuple):
    """How attention scores the keys that a query sees.

    A score is the product of query and key times `scale`, and with `softcap` c then
    c tanh(score / c). To that float32 slopes `alibi` [H] add, with `alibi_scale` as in
    `attention.alibi_bias`, or float32 `relative` [H, 2M+1] as in `attention.relative_bias`. Float32
    `sinks` [H] join each softmax without a value. Kernels have arguments of these names.
    """

    scale: float
    softcap: float | None = None
    sinks: Any = None
    alibi: Any = None
    alibi_scale: float | None = None
    relative: Any = None


class Maths(Protocol):
    """The functions that plain ops ask of a framework."""

    name: str  # for people
    float32: Any
    bfloat16: Any
    int32: Any

    def span(self, name: str, /) -> AbstractContextManager[Any]:
        """A range by which profilers, and a compiled program, name what is within."""
        ...

    # --- dtypes

    def wide(self, a: Any) -> Any:
        """In float32."""
        ...

    def cast(self, a: Any, dtype: Any) -> Any:
        """In another dtype."""
        ...

    def rounded(self, a: Any, dtype: Any) -> Any:
        """float32 of `a`, which may be of integers, with the precision of `dtype`."""
        ...

    def nearest(self, number: float, dtype: Any) -> float:
        """The number that `dtype` has nearest to one."""
        ...

    def epsilon(self, dtype: Any) -> float:
        """The distance from 1 to the next number."""
        ...

    def sums(self, x: Any, many: bool = True) -> Any:
        """The dtype in which products by x [..., in] are held until all is added.

        That is float32 where a compiler makes them and what follows in one step, and x's own where
        each step is a launch of its own, which would have to convert it. Unless `many` rows are to
        be held so, those of more than a few are in x's own.
        """
        ...

    # --- arrays, made on the device of another one

    def arange(self, count: int, like: Any) -> Any:
        """Integers from 0, [count]."""
        ...

    def zeros(self, shape: Sequence[int], dtype: Any, like: Any) -> Any:
        """Zeros."""
        ...

    def of_numpy(self, values: Any, like: Any) -> Any:
        """A NumPy array."""
        ...

    # --- what caches hold: in place where arrays are memory, else a new array

    def put(self, a: Any, index: Any, new: Any) -> Any:
        """`a` with others at an index of it, or `...`; on JAX what lies beyond is dropped."""
        ...

    def put_some(self, a: Any, index: tuple[Any, ...], new: Any, there: Any) -> Any:
        """As `put`, of `new` [B, T, ...] where bool `there` [B, T] says.

        The index has integers [B, T], the first of them for the first axis, and whole slices.
        """
        ...

    def put_rows(self, a: Any, rows: Any, new: Any, axis: int) -> Any:
        """`a` with `new` [B, ...] in int `rows` [B], from their start on an axis; zeros behind."""
        ...

    def rows_or(self, a: Any, rows: Any, beyond: int) -> Any:
        """Rows of `a`, of integers; on JAX this number where there is none."""
        ...

    def grow(self, a: Any, more: Sequence[int]) -> Any:
        """A copy of `a` with zeros behind, so many along each of the first axes."""
        ...

    # --- shapes

    def stack(self, arrays: list[Any] | tuple[Any, ...], axis: int, /) -> Any:
        """Arrays side by side along a new axis."""
        ...

    def join(self, arrays: list[Any] | tuple[Any, ...], axis: int, /) -> Any:
        """Arrays side by side along an axis."""
        ...

    def repeat(self, a: Any, count: int, axis: int) -> Any:
        """Each element `count` times."""
        ...

    def pad(self, a: Any, axis: int, before: int, behind: int, value: float = 0) -> Any:
        """`a` with so many elements of a value before and behind it along an axis."""
        ...

    def moveaxis(self, a: Any, source: int, target: int, /) -> Any:
        """`a` with an axis elsewhere."""
        ...

    def broadcast(self, a: Any, shape: tuple[int, ...], /) -> Any:
        """`a` in a shape that it broadcasts to; a view where there are such."""
        ...

    def whole(self, a: Any) -> Any:
        """`a` in memory of its own order, as kernels take it."""
        ...

    def replace_last(self, a: Any, values: Any) -> Any:
        """`a`, which may be overwritten, with others in the place of the last axis's last ones."""
        ...

    def windows(self, a: Any, axis: int, size: int, step: int) -> Any:
        """Windows of an axis, which counts them then; their elements are a new last axis."""
        ...

    # --- elements

    def where(self, condition: Any, a: Any, b: Any, /) -> Any:
        """`a` or `b`, arrays or numbers."""
        ...

    def clip(self, a: Any, low: float, high: float, /) -> Any:
        """`a` between two numbers."""
        ...

    def exp(self, a: Any, /) -> Any:
        """e^a."""
        ...

    def expm1(self, a: Any, /) -> Any:
        """e^a - 1."""
        ...

    def log(self, a: Any, /) -> Any:
        """The natural logarithm."""
        ...

    def sqrt(self, a: Any, /) -> Any:
        """a^1/2."""
        ...

    def rsqrt(self, a: Any, /) -> Any:
        """a^-1/2."""
        ...

    def cos(self, a: Any, /) -> Any:
        """The cosine."""
        ...

    def sin(self, a: Any, /) -> Any:
        """The sine."""
        ...

    def tanh(self, a: Any, /) -> Any:
        """The hyperbolic tangent."""
        ...

    def sigmoid(self, a: Any, /) -> Any:
        """1 / (1 + e^-a)."""
        ...

    def softplus(self, a: Any, /) -> Any:
        """log(1 + e^a)."""
        ...

    def floor(self, a: Any, /) -> Any:
        """The integers below."""
        ...

    def minimum(self, a: Any, b: Any, /) -> Any:
        """The smaller of both, which are arrays; `clip` bounds by numbers."""
        ...

    def maximum(self, a: Any, b: Any, /) -> Any:
        """The larger of both, which are arrays; `clip` bounds by numbers."""
        ...

    def times(self, a: Any, number: float) -> Any:
        """`a` times a number that is not rounded to its dtype before."""
        ...

    def round(self, a: Any, /) -> Any:
        """The nearest integers, ties to even."""
        ...

    def quotient(self, a: Any, b: Any) -> Any:
        """a / b, rounded once."""
        ...

    def add_product(self, total: Any, a: Any, b: Any) -> Any:
        """total + a * b, where a framework has it in one step; in total's dtype."""
        ...

    def activation(self, a: Any, kind: Activation) -> Any:
        """An activation by our name of it, computed in float32."""
        ...

    # --- along an axis

    def most(self, a: Any) -> Any:
        """The largest along the last axis, which stays."""
        ...

    def length(self, a: Any) -> Any:
        """The root of the sum of squares along the last axis, which stays."""
        ...

    def argmax(self, a: Any) -> Any:
        """Index of the largest along the last axis: of equal ones the first, and NaN before all."""
        ...

    def softmax(self, a: Any, /) -> Any:
        """e^a over its sum along the last axis."""
        ...

    def log_softmax(self, a: Any, /) -> Any:
        """The logarithm of `softmax`."""
        ...

    def log_sum(self, a: Any) -> Any:
        """The logarithm of the sum of e^a along the last axis, which stays."""
        ...

    def glu(self, a: Any, /) -> Any:
        """The first half of the last axis times the logistic function of the second."""
        ...

    def layer_norm(self, a: Any, weight: Any, bias: Any, eps: float) -> Any:
        """The last axis with mean 0 and variance 1, times a weight, plus a bias, if there are any.

        Computed in float32.
        """
        ...

    def top(self, a: Any, count: int) -> Any:
        """So many of the largest along the last axis, the largest first."""
        ...

    def largest(self, a: Any, count: int) -> Any:
        """Indices of so many of the largest along the last axis; of equal ones the first."""
        ...

    def sort(self, a: Any, /) -> Any:
        """The last axis, ascending."""
        ...

    def ascending(self, a: Any) -> tuple[Any, Any]:
        """The last axis, ascending, and the index that makes it so."""
        ...

    def one_hot(self, a: Any, count: int) -> Any:
        """Integers [..., count] that are 1 at the number that `a` has, 0 elsewhere."""
        ...

    def among(self, a: Any, count: int) -> Any:
        """bool [..., count]: the numbers that are among those of integers `a` [..., k]."""
        ...

    def without(self, a: Any, index: Any) -> Any:
        """-inf in the place of the elements of the last axis at an index [..., 1]."""
        ...

    def running_most(self, a: Any, axis: int) -> Any:
        """The largest so far along an axis, of integers."""
        ...

    # --- by an index

    def rows(self, a: Any, ids: Any) -> Any:
        """Rows of `a` by integer ids; on JAX clipped to those that there are."""
        ...

    def along(self, a: Any, index: Any) -> Any:
        """Elements along the last axis by an index of as many axes; on JAX clipped."""
        ...

    def within(self, ids: Any, count: int) -> Any:
        """Ids for `rows` or `along` of so many, the last one in the place of higher ones."""
        ...

    def row(self, a: Any, index: Any) -> Any:
        """One row of `a`, by a number or what the framework has in its place."""
        ...

    def places(self, a: Any, index: Any) -> Any:
        """Of a [B, S, ...] for each row its places by int index [B, T]: [B, T, ...]."""
        ...

    # --- products and what each framework has its own fast way for

    def product(self, x: Any, matrix: Any, dtype: Any, bias: Any = None) -> Any:
        """x [..., in] times matrix [out, in], plus bias [out]; on JAX in `dtype`, else in x's."""
        ...

    def einsum(self, formula: str, /, *arrays: Any, dtype: Any = None) -> Any:
        """Products and sums by a formula, in the arrays' dtype, or on JAX in `dtype`."""
        ...

    def scores(self, formula: str, /, *arrays: Any) -> Any:
        """As `einsum`, in float32."""
        ...

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        scoring: KeyScoring,
        *,
        causal: bool = False,
        visible: Callable[[Any], Any] | None = None,
        bias: Callable[[Any], Any] | None = None,
        by_head: bool = False,
    ) -> Any:
        """Means of values by the softmax of scores, in q's dtype: q [B, T, H, D] to [B, T, H, D].

        Or of one query in each row, q [B, H, D], where T and R are 1 in what follows. k and v are
        [B, S, K, D], or `by_head` [B, K, S, D], and may be float32 where q is not; values may have
        another width, and then the result has it. `visible(rows)` is bool [B or 1, R or 1, S] for
        int rows [R] of queries, or None for all of them; without it all is seen, or if `causal`
        what is not ahead. `bias(rows)` [B or 1, H, R or 1, S] is what `alibi` or `relative` of
        `scoring` add to scaled and capped scores, which are float32 where it is of slopes.
        """
        ...

    def solve(self, lower: Any, right: Any) -> Any:
        """x of (1 + L) x = right [..., n, m], L what is below the diagonal of `lower` [..., n, n].

        Both float32, of as many axes.
        """
        ...

    def convolution(self, x: Any, kernel: Any, bias: Any, stride: int) -> Any:
        """x [B, T, in] with kernel [out, in, taps] over time, zeros around it, plus bias [out]."""
        ...

    def pooled(self, shares: Any, x: Any) -> Any:
        """float32 shares [B, M, T] times float32 x [B, T, E]: [B, M, E]."""
        ...

    def most_of(self, x: Any, owner: Any, count: int) -> Any:
        """The largest of x [B, T, E] of each of `count` owners, int [B, T]: [B, count, E].

        -inf where there is none; `count` as an owner is nobody.
        """
        ...

    def groups(self, chosen: Any, total: int, among: int, here: Any = None) -> Callable[..., Any]:
        """A function that makes something of each of int `chosen` [P], by groups of equal ones.

        It is called with (make, numbered, paired, width, dtype) and gives [P, width].
        `make(own, *rows)` gives [n, width] for n pairs that have chosen one number: `own` is what
        that number has of `numbered`, a tuple of Weights, arrays or None, and `rows` are what the
        pairs have of `paired`, which are pairs of an array, or None, and how many pairs one after
        another have each row of it. On JAX there are gradients of both, and so `make` reads no
        other array. About P / `among` pairs have one number. Numbers are below `total`, but where
        bool `here` [P] is not: what has these gives zeros.
        """
        ...

    def scan(
        self,
        step: Callable[..., tuple[Any, Any]],
        state: Any,
        parts: Sequence[Any],
        size: int,
    ) -> tuple[Any, Any]:
        """Results of steps over `parts` [B, T, ...], `size` tokens at a time, and the last state.

        `step(state, *pieces)` gives the next state and [B, size, ...]. The last piece may be filled
        up with zeros, or be shorter.
        """
        ...

    # --- words of 32 bits, in a dtype that has no sign

    def words(self, a: Any) -> Any:
        """Integers from 0 on as words."""
        ...

    def low(self, a: Any) -> Any:
        """The lowest 32 bits of a sum, or of a word that is shifted to the left."""
        ...

    # --- codes

    def float8(self, a: Any, dtype: str) -> Any:
        """float32 of bytes that are 8-bit floats, by NumPy's name of their dtype."""
        ...

    def nearest_e4m3(self, a: Any) -> Any:
        """float32 `a`, at most 448, as the nearest that float8_e4m3fn has."""
        ...

    def as_codes(self, a: Any, codes: str) -> Any:
        """The codes nearest to float32 `a`, "fp8_e4m3" as bytes or "int8", ties to even."""
        ...

    def power(self, a: Any, mantissa: int) -> Any:
        """The power of two not above float32 `a`, which is rounded to so many bits before."""
        ...

    def table(self, values: tuple[float, ...], codes: Any) -> Any:
        """float32 values by integer codes."""
        ...


def named(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: profilers see calls by this name. The first argument is Maths, or has them."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            with getattr(first, "maths", first).span(name):
                return function(*args, **kwargs)

        return call

    return decorate


def taken(m: Maths, numbered: Any, paired: Any, number: Any, pairs: Any) -> tuple[Any, ...]:
    """The arguments of `make` of `Maths.groups` for int `pairs` [n] that have chosen a number."""
    own = tuple(one_of(m, leaf, number) for leaf in numbered)
    rows = (None if a is None else a[pairs if n == 1 else pairs // n] for a, n in paired)
    return own, *rows


def one_of(m: Maths, leaf: Leaf | None, number: Any) -> Leaf | None:
    """The Weight, or the array, that one number has of those of all, the number as in `row`."""
    if not isinstance(leaf, Weight):
        return None if leaf is None else m.row(leaf, number)
    beside = {part: m.row(array, number) for part, array in leaf.beside.items()}
    return replace(leaf, data=m.row(leaf.data, number), axes=leaf.axes[1:], beside=beside)


def cut(a: Any, *sizes: int) -> list[Any]:
    """Parts of these sizes along the last axis."""
    return [a[..., end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def halves(a: Any) -> list[Any]:
    """The two halves of the last axis."""
    return cut(a, *[a.shape[-1] // 2] * 2)


def heads(a: Any, count: int = -1, width: int = -1) -> Any:
    """The last axis as two: so many heads of so many elements, of which one may be left out."""
    return a.reshape(*a.shape[:-1], count, width)


def flat(a: Any, axes: int = 2) -> Any:
    """The last axes as one."""
    return a.reshape(*a.shape[:-axes], -1)
