"""Forward as a pure function: inputs that may be traced, and vmap as more rows of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ...arrays import kind_of, to_numpy
from ...errors import ArgumentError, LengthError, a_type
from ...model.spec import ModelSpec

Inputs = tuple[jax.Array | None, ...]


def traced_inputs(spec: ModelSpec, tokens: Any, mask: Any, positions: Any, types: Any) -> Inputs:
    """ids, positions, mask, token types, segments, embeddings and weights as `Steps.forward` has.

    The weights are those with which a head pools tokens; segments and embeddings are None.

    As `inputs.make_forward_inputs`, but for what needs values. Raises ArgumentError for shapes and
    dtypes that do not fit the model, and LengthError for more tokens than it has positions.
    """
    ids = _integers(tokens, "tokens")
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not ids.size:
        raise ArgumentError(f"tokens has shape {ids.shape}; expected [batch, tokens].")
    shape = batch, length = ids.shape
    if spec.tokens and length > spec.tokens:
        raise LengthError(f"tokens has {length} tokens, but {spec.why_most}.")
    visible = None
    if mask is not None:
        visible = _array(mask, "attention_mask") != 0
        if visible.shape != shape and not (batch == 1 and visible.shape == (length,)):
            raise ArgumentError(
                f"attention_mask has shape {visible.shape}; expected {shape}, that of tokens."
            )
        visible = visible.reshape(shape)
    elif spec.hides is not None:
        visible = ids != spec.hides
    if positions is not None:
        if spec.alibi:
            raise ArgumentError(
                f"The {spec.family} family takes no position_ids: attention counts the tokens of "
                "attention_mask itself. Leave them out."
            )
        at = _broadcast(positions, "position_ids", shape)
    elif spec.pad is not None:
        real = ids != spec.pad
        at = (real.cumsum(axis=1) * real + spec.pad).astype(jnp.int32)
    elif spec.positions_from_mask and visible is not None:
        at = jnp.maximum(visible.cumsum(axis=1) - 1, 0).astype(jnp.int32) * visible
    else:
        at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), shape)
    if types is not None:
        if not spec.token_types:
            raise ArgumentError(
                f"The {spec.family} family has no token types; leave token_type_ids out."
            )
        types = _broadcast(types, "token_type_ids", shape)
    elif spec.token_types and not spec.token_types_from_vocab:
        types = jnp.zeros(shape, jnp.int32)
    return ids, at, visible, types, None, None, _pooling_weights(spec, ids, visible)


def _pooling_weights(
    spec: ModelSpec, ids: jax.Array, visible: jax.Array | None
) -> jax.Array | None:
    """float32 [B, T]: what a head sums a sequence's tokens with; None if it pools none."""
    pooling = spec.head.pooling if spec.head else spec.pooled and spec.pooled.pooling
    if pooling is None:
        return None
    real = jnp.ones(ids.shape, bool) if visible is None else visible
    if pooling == "mean":
        return (real / jnp.maximum(real.sum(1, keepdims=True), 1)).astype(jnp.float32)
    count = jnp.arange(ids.shape[1])
    at = jnp.zeros(ids.shape[0], jnp.int32)
    if pooling == "real":
        at = real.argmax(1)
    elif pooling == "last":
        is_real = True if spec.pad_id is None else ids != spec.pad_id
        at = (is_real * count + jnp.zeros_like(ids)).argmax(1)
    elif pooling == "final":
        at += ids.shape[1] - 1
    elif pooling == "end":
        assert spec.pooled is not None
        end = spec.pooled.end_id
        at = (ids if end is None else ids == end).argmax(1)
    return (count == at[:, None]).astype(jnp.float32)


def _array(value: Any, name: str) -> jax.Array:
    if kind_of(value) is None:
        raise ArgumentError(f"{name} is {a_type(value)}; expected an array.")
    if kind_of(value) == "jax":
        return value
    return jnp.asarray(to_numpy(value))  # on no device yet: it goes where the weights are


def _integers(value: Any, name: str) -> jax.Array:
    array = _array(value, name)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ArgumentError(f"{name} has dtype {array.dtype}; expected integers.")
    return array.astype(jnp.int32)


def _broadcast(value: Any, name: str, shape: tuple[int, ...]) -> jax.Array:
    array = _integers(value, name)
    if array.shape not in (shape, (1, shape[1]), shape[1:]):
        raise ArgumentError(f"{name} has shape {array.shape}; expected {shape}.")
    return jnp.broadcast_to(array, shape)


def transformable(
    forward: Callable[[Any, Inputs], Any],
    derived: Callable[[], Callable[[Any, Inputs], Any]],
    has_tangents: bool = True,
) -> Callable[[Any, Inputs], Any]:
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


def _batch_by_rows(forward: Callable[[Any, Inputs], Any]) -> Callable[[Any, Inputs], Any]:
    """`forward(weights, inputs)`, with the sequences that vmap adds as more rows of its batch.

    So kernels need no batching rules, and the weights are read once for all rows. Where the weights
    themselves are mapped over, forward runs once for each.
    """
    run = custom_vmap(forward)

    def rule(size: int, mapped: Any, weights: Any, inputs: Inputs) -> tuple[Any, Any]:
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
                return rows.reshape(-1, x.shape[-1])

            results = run(weights, jax.tree.map(merge, inputs, mapped[1]))
            results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    run.def_vmap(rule)
    return run
