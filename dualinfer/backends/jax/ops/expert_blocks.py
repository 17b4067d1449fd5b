"""Products of rows with the experts that they chose, in blocks of one expert's; and gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....model.weights import Weight

Matrices: TypeAlias = tuple[Weight, jax.Array | None, Weight]  # up, its bias, down
# Of one expert's matrices, some rows and what they are times, if anything.
Product: TypeAlias = Callable[[Matrices, jax.Array, jax.Array | None], jax.Array]


class Blocks(NamedTuple):
    """Pairs of a row and an expert, sorted by expert, to be taken in blocks of one expert's.

    `order` [P] are the pairs; of each expert `starts` and `ends` [X] are its own among them.
    """

    order: jax.Array
    starts: jax.Array
    ends: jax.Array

    @classmethod
    def of(cls, chosen: jax.Array, count: int) -> Self:
        """The pairs, whose experts are `chosen` [P]; those of number `count` are in no block."""
        ends = jnp.cumsum(jnp.bincount(chosen, length=count))
        starts = jnp.concatenate((jnp.zeros_like(ends[:1]), ends[:-1]))
        return cls(jnp.argsort(chosen, stable=True), starts, ends)

    def each(self, width: int, block: Callable[..., Any], x: Any) -> Any:
        """x after `x = block(x, expert, pairs, is_real)` for one block after another.

        A block has `width` pairs; those that fill it up are not real.
        """
        last = jnp.cumsum(-(-(self.ends - self.starts) // width))  # block of each, and one more

        def body(i: jax.Array, x: Any) -> Any:
            expert = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
            before = jnp.where(expert > 0, last[expert - 1], 0)
            at = self.starts[expert] + (i - before) * width + jnp.arange(width)
            pairs = self.order[jnp.minimum(at, len(self.order) - 1)]
            return block(x, expert, pairs, at < self.ends[expert])

        return lax.fori_loop(0, last[-1], body, x)


class Given(NamedTuple):
    """What products are made of: all experts' matrices, rows, and what each pair's row is times."""

    matrices: Matrices
    rows: jax.Array
    factors: jax.Array | None

    def of(self, expert: jax.Array, pairs: jax.Array, each: int) -> Self:
        """An expert's matrices, and the rows and factors of `pairs`; a row has `each` of them."""
        up, bias, down = self.matrices
        own = _of_one(up, expert), _row(bias, expert), _of_one(down, expert)
        factors = None if self.factors is None else self.factors[pairs]
        return type(self)(own, self.rows[pairs // each], factors)


def multiply(
    product: Product, like: jax.ShapeDtypeStruct, width: int, each: int, given: Given, pairs: Blocks
) -> jax.Array:
    """What `product` makes of all pairs, as `like` [P, F]; zeros for those that are in no block.

    A row has `each` pairs, which follow one another; a block has `width`.
    """
    return _multiply(product, like, width, each, given, pairs)


def _forward(
    product: Product, like: jax.ShapeDtypeStruct, width: int, each: int, given: Given, pairs: Blocks
) -> jax.Array:

    def block(y: jax.Array, expert: jax.Array, some: jax.Array, is_real: jax.Array) -> jax.Array:
        own = product(*given.of(expert, some, each))
        return y.at[jnp.where(is_real, some, len(y))].set(own, mode="drop")

    return pairs.each(width, block, jnp.zeros(like.shape, like.dtype))


def _forward_to_be_reversed(*arguments: Any) -> tuple[jax.Array, Any]:
    return _forward(*arguments), arguments[-2:]


def _backward(
    product: Product,
    like: jax.ShapeDtypeStruct,
    width: int,
    each: int,
    kept: tuple[Given, Blocks],
    y: jax.Array,
) -> tuple[Given, None]:
    """Gradients of what is given by that of the result, summed in float32.

    They are made in the same blocks: JAX has none of a loop whose length depends on values.
    """
    given, pairs = kept
    leaves, tree = jax.tree.flatten(given)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    inner = len(jax.tree.leaves(given.matrices))

    def block(
        sums: list[jax.Array], expert: jax.Array, some: jax.Array, is_real: jax.Array
    ) -> list[jax.Array]:
        _, back = jax.vjp(product, *given.of(expert, some, each))
        found = jax.tree.leaves(back(jnp.where(is_real[:, None], y[some], 0)))
        at = [*[expert] * inner, some // each, some]
        return [
            total.at[at[i]].add(found[i].astype(jnp.float32))
            for i, total in zip(floats, sums, strict=True)
        ]

    zeros = [jnp.zeros(leaves[i].shape, jnp.float32) for i in floats]
    sums = dict(zip(floats, pairs.each(width, block, zeros), strict=True))
    gradients = [
        sums[i].astype(x.dtype) if i in sums else np.zeros(x.shape, jax.dtypes.float0)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, gradients), None


_multiply: Any = jax.custom_vjp(_forward, nondiff_argnums=(0, 1, 2, 3))
_multiply.defvjp(_forward_to_be_reversed, _backward)


def _of_one(weight: Weight, expert: jax.Array) -> Weight:
    """The matrix of one of the experts [X, out, in], by its number."""
    beside = {part: _row(array, expert) for part, array in weight.beside.items()}
    return replace(weight, data=_row(weight.data, expert), axes=weight.axes[1:], beside=beside)


def _row(array: jax.Array | None, expert: jax.Array) -> jax.Array | None:
    return None if array is None else lax.dynamic_index_in_dim(array, expert, keepdims=False)
