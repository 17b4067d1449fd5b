"""Forward as a pure function: inputs that may be traced, and vmap as more rows of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ...ops.contract import Tokens


def transformable(
    forward: Callable[[Any, Tokens], Any],
    derived: Callable[[], Callable[[Any, Tokens], Any]],
    has_tangents: bool = True,
) -> Callable[[Any, Tokens], Any]:
    """`forward(weights, inputs)` as JAX's transformations see it.

    Sequences that vmap adds are more rows of its batch, see `_batch_by_rows`. Its derivatives are
    those of `derived()`, which gives the same, and raises where there are none. Unless it
    `has_tangents` they are taken in reverse alone.
    """
    if has_tangents:
        run = jax.custom_jvp(_batch_by_rows(forward))
        run.defjvp(lambda primals, tangents: jax.jvp(derived(), primals, tangents))
        return run
    # Reverse rules of its own parts do not meet vmap within the rule above.
    run = jax.custom_vjp(_batch_by_rows(forward))
    run.defvjp(lambda *given: jax.vjp(derived(), *given), lambda back, found: back(found))
    return run


def _batch_by_rows(forward: Callable[[Any, Tokens], Any]) -> Callable[[Any, Tokens], Any]:
    """`forward(weights, inputs)`, with the sequences that vmap adds as more rows of its batch.

    So kernels need no batching rules, and the weights are read once for all rows. Where the weights
    themselves are mapped over, forward runs once for each.
    """
    run = custom_vmap(forward)

    def rule(size: int, mapped: Any, weights: Any, inputs: Tokens) -> tuple[Any, Any]:
        if any(jax.tree.leaves(mapped[0])):

            def one(i: jax.Array) -> Any:
                own = jax.tree.map(
                    lambda x, m: jnp.asarray(x)[i] if m else x, (weights, inputs), tuple(mapped)
                )
                return run(*own)

            results = jax.lax.map(one, jnp.arange(size))
        else:

            def merge(x: jax.Array, is_mapped: bool) -> jax.Array:
                rows = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
                return rows.reshape(-1, *rows.shape[2:])

            results = run(weights, jax.tree.map(merge, inputs, mapped[1]))
            results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    run.def_vmap(rule)
    return run
