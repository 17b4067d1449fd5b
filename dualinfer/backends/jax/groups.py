"""Products by groups: what pairs make that have chosen one number, in blocks; and gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Of what one number has and what some pairs have, what these make.
Make: TypeAlias = Callable[..., jax.Array]
# Of what numbers have and what pairs have, one number's and some pairs' as `make` takes them.
Take: TypeAlias = Callable[[Any, jax.Array, jax.Array], tuple[Any, ...]]


class Blocks(NamedTuple):
    """Pairs that have chosen numbers, sorted by number, to be taken in blocks of one number's.

    `order` [P] are the pairs; of each number `starts` and `ends` [X] are its own among them.
    """

    order: jax.Array
    starts: jax.Array
    ends: jax.Array

    @classmethod
    def of(cls, chosen: jax.Array, count: int) -> Self:
        """The pairs, whose numbers are `chosen` [P]; those of number `count` are in no block."""
        ends = jnp.cumsum(jnp.bincount(chosen, length=count))
        starts = jnp.concatenate((jnp.zeros_like(ends[:1]), ends[:-1]))
        return cls(jnp.argsort(chosen, stable=True), starts, ends)

    def each(self, width: int, block: Callable[..., Any], x: Any) -> Any:
        """x after `x = block(x, number, pairs, is_real)` for one block after another.

        A block has `width` pairs; those that fill it up are not real.
        """
        last = jnp.cumsum(-(-(self.ends - self.starts) // width))  # block of each, and one more

        def body(i: jax.Array, x: Any) -> Any:
            number = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
            before = jnp.where(number > 0, last[number - 1], 0)
            at = self.starts[number] + (i - before) * width + jnp.arange(width)
            pairs = self.order[jnp.minimum(at, len(self.order) - 1)]
            return block(x, number, pairs, at < self.ends[number])

        return lax.fori_loop(0, last[-1], body, x)


class Way(NamedTuple):
    """A way to make pairs: what `make` gives of what `take` takes, as `like` [P, F].

    A block has `width` pairs. What pairs have is told by rows, of each array for so many pairs one
    after another: `counts`.
    """

    make: Make
    take: Take
    like: jax.ShapeDtypeStruct
    width: int
    counts: tuple[int, ...]


def multiply(way: Way, given: Any, pairs: Blocks) -> jax.Array:
    """The products of all pairs, [P, F]; zeros for those that are in no block.

    `given` are what numbers have and what pairs have, arrays of both in a tree.
    """
    return _multiply(way, given, pairs)


def _forward(way: Way, given: Any, pairs: Blocks) -> jax.Array:
    def block(y: jax.Array, number: jax.Array, some: jax.Array, is_real: jax.Array) -> jax.Array:
        own = way.make(*way.take(given, number, some))
        return y.at[jnp.where(is_real, some, len(y))].set(own, mode="drop")

    return pairs.each(way.width, block, jnp.zeros(way.like.shape, way.like.dtype))


def _forward_to_be_reversed(way: Way, given: Any, pairs: Blocks) -> tuple[jax.Array, Any]:
    return _forward(way, given, pairs), (given, pairs)


def _backward(way: Way, kept: tuple[Any, Blocks], y: jax.Array) -> tuple[Any, None]:
    """Gradients of what is given by that of the result, summed in float32.

    They are made in the same blocks: JAX has none of a loop whose length depends on values.
    """
    given, pairs = kept
    leaves, tree = jax.tree.flatten(given)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    inner = len(leaves) - len(way.counts)

    def block(
        sums: list[jax.Array], number: jax.Array, some: jax.Array, is_real: jax.Array
    ) -> list[jax.Array]:
        _, back = jax.vjp(way.make, *way.take(given, number, some))
        found = jax.tree.leaves(back(jnp.where(is_real[:, None], y[some], 0)))
        at = [*[number] * inner, *(some // count for count in way.counts)]
        return [
            total.at[at[i]].add(found[i].astype(jnp.float32))
            for i, total in zip(floats, sums, strict=True)
        ]

    zeros = [jnp.zeros(leaves[i].shape, jnp.float32) for i in floats]
    sums = dict(zip(floats, pairs.each(way.width, block, zeros), strict=True))
    gradients = [
        sums[i].astype(x.dtype) if i in sums else np.zeros(x.shape, jax.dtypes.float0)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, gradients), None


_multiply: Any = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_multiply.defvjp(_forward_to_be_reversed, _backward)
