"""Routers and experts in plain XLA; their meaning is `kernels/reference.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ....model.spec import Experts, Router
from ....model.weights import Weight
from ....ops.contract import Routing, Weights
from ....ops.schemes import of_each, rounds_input
from . import primitives
from .expert_blocks import Blocks, Given, Matrices, multiply
from .schemes import SCHEMES, einsum

# What is multiplied with the experts' down matrices, and these, as several devices take them.
ShareInput: TypeAlias = Callable[[jax.Array, Weight], tuple[jax.Array, Weight]]
_MOST = 256  # pairs of one expert in one product


@jax.named_scope("router")
def route(
    x: jax.Array,
    weight: Weight,
    router: Router,
    bias: jax.Array | None = None,
    choice_bias: jax.Array | None = None,
) -> Routing:
    """The experts that rows of x [..., E] choose, and their weights; see `BlockOps.route`."""
    matrix = SCHEMES.dequantize(weight).astype(jnp.float32)
    scores = einsum("...i,oi->...o", x.astype(jnp.float32), matrix)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if router.softcap is not None:
        scores = router.softcap * jnp.tanh(scores / router.softcap)
    if router.score == "sparse":
        return _sparse(scores, router)
    if router.score == "sigmoid":
        scores = jax.nn.sigmoid(scores)
    elif router.score == "softmax":
        scores = jax.nn.softmax(scores, -1)
    choice = scores if choice_bias is None else scores + choice_bias.astype(jnp.float32)
    if router.groups > 1:
        by_group = choice.reshape(*choice.shape[:-1], router.groups, -1)
        best = lax.top_k(by_group, 2 if router.group_score == "two" else 1)[0].sum(-1)
        chosen = lax.top_k(best, router.groups_chosen)[1]  # of equal ones the first
        is_open = (chosen[..., None] == jnp.arange(router.groups)).any(-2)
        choice = jnp.where(is_open[..., None], by_group, -jnp.inf).reshape(choice.shape)
    experts = jnp.sort(lax.top_k(choice, router.chosen)[1], -1)
    weights = jnp.take_along_axis(scores, experts, -1)
    if router.score == "chosen":
        weights = jax.nn.softmax(weights, -1)
    elif router.score == "gates":
        weights = jax.nn.sigmoid(weights)
    if router.renormalized:
        weights = weights / (weights.sum(-1, keepdims=True) + router.eps)
    return Routing(experts.astype(jnp.int32), weights * router.scale)


def _sparse(scores: jax.Array, router: Router) -> Routing:
    """The two largest of scores [..., X]; each weighs as much as near ones leave it."""
    picks = lax.top_k(scores, 2)[1]  # of equal ones the first
    rest, weights = scores, []
    for pick in jnp.split(picks, 2, -1):
        best = jnp.take_along_axis(scores, pick, -1)
        far = (best - scores) / jnp.maximum(jnp.abs(scores), best) > 2 * router.jitter
        near = jax.nn.softmax(jnp.where(far, -jnp.inf, rest), -1)
        weights.append(jnp.take_along_axis(near, pick, -1))
        rest = jnp.where(jnp.arange(scores.shape[-1]) == pick, -jnp.inf, rest)
    order = jnp.argsort(picks, -1)
    experts, ordered = (
        jnp.take_along_axis(a, order, -1) for a in (picks, jnp.concatenate(weights, -1))
    )
    return Routing(experts.astype(jnp.int32), ordered * router.scale)


@jax.named_scope("router")
def blend(routing: Routing, sides: jax.Array, expert: int) -> Routing:
    """Experts and weights with `expert` behind; see `BlockOps.blend`. sides [..., 2] float32."""
    experts, weights = routing
    own = jnp.full_like(experts[..., :1], expert)
    both = jnp.concatenate((weights * sides[..., :1], sides[..., 1:]), -1)
    return Routing(jnp.concatenate((experts, own), -1), both)


@jax.named_scope("router")
def fill(
    routing: Routing,
    count: int,
    capacity: int,
    mask: jax.Array | None,
    segments: jax.Array | None,
) -> Routing:
    """The routing with weight 0 where an expert is full; see `BlockOps.fill`."""
    experts, weights = routing
    chosen = jax.nn.one_hot(experts, count, dtype=jnp.int32).sum(-2)
    if mask is not None:
        chosen = chosen * mask[..., None]
    before = chosen.cumsum(1) - chosen
    if segments is not None:  # less those before the first token of each
        places = jnp.arange(chosen.shape[1])
        changes = segments[:, 1:] != segments[:, :-1]
        is_first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
        first = lax.cummax(jnp.where(is_first, places, 0), axis=1)
        before = before - jnp.take_along_axis(before, first[..., None], 1)
    before = jnp.take_along_axis(before, experts, -1)
    return Routing(experts, jnp.where(before < capacity, weights, 0))


@jax.named_scope("experts")
def experts(
    x: jax.Array,
    mixture: Experts,
    w: Weights,
    routing: Routing,
    share_input: ShareInput = lambda h, weight: (h, weight),
    own: jax.Array | None = None,
) -> jax.Array:
    """The sum of what the chosen experts make of x [..., E], without down's bias: float32.

    Pairs of a row and an expert are sorted by expert, and multiplied in blocks of one expert's, one
    block after another, so that one expert's matrices are taken at a time, and those alone that a
    row chose. XLA's `ragged_dot` would multiply the others by zero. With int32 `own` [2] the
    weights are those of experts `own[0]` to `own[1]`, zeros behind, and others give nothing.
    """
    rows, chosen = x.reshape(-1, x.shape[-1]), routing.experts.reshape(-1)
    count, pairs = routing.experts.shape[-1], routing.experts.size
    total, features, _ = w["experts.down.weight"].shape
    if own is not None:
        chosen = jnp.where((chosen >= own[0]) & (chosen < own[1]), chosen - own[0], total)
    blocks, width = Blocks.of(chosen, total), _block(pairs, mixture.count)
    up, down = w["experts.up.weight"], w["experts.down.weight"]
    factors = routing.weights.reshape(-1) if mixture.weighs_input else None
    given = Given((up, w.get("experts.up.bias"), down), rows, factors)

    def first(own: Matrices, x: jax.Array, factors: jax.Array | None) -> jax.Array:
        if factors is not None:
            x = (x * factors[:, None]).astype(x.dtype)
        return hidden(primitives.matmul(x, own[0], own[1]), mixture)

    def both(own: Matrices, x: jax.Array, factors: jax.Array | None) -> jax.Array:
        return SCHEMES.product(first(own, x, factors), own[2], jnp.float32)

    def second(own: Matrices, h: jax.Array, _: jax.Array | None) -> jax.Array:
        return SCHEMES.product(h, own[2], jnp.float32)

    like = jax.ShapeDtypeStruct((pairs, features), jnp.float32)
    if rounds_input(down):  # by scales that devices may make together, of all pairs at once
        inner = jax.ShapeDtypeStruct((pairs, down.shape[2]), x.dtype)
        h = multiply(first, inner, width, count, given, blocks)
        h, shared = share_input(h, of_each(down, jnp.minimum(chosen, total - 1)))
        given = Given((up, None, replace(down, scheme=shared.scheme)), h, None)
        parts = multiply(second, like, width, 1, given, blocks)
    else:
        parts = multiply(both, like, width, count, given, blocks)
    weights = jnp.ones_like(routing.weights) if mixture.weighs_input else routing.weights
    return _weighted(parts.reshape(*routing.experts.shape, -1), weights)


def _block(pairs: int, experts: int) -> int:
    """Pairs in a product: about those that an expert has, a power of two."""
    return min(_MOST, 1 << (-(-pairs // experts) - 1).bit_length())


def hidden(h: jax.Array, mixture: Experts) -> jax.Array:
    """An expert's hidden values, of its first product h [..., 2F] with gate, then up."""
    if not mixture.gated:
        return primitives.activation(h, mixture.activation)
    if mixture.limits_given and mixture.limit is not None:
        return primitives.gate_within(h, mixture.activation, mixture.limit)
    gate, up = jnp.split(h, 2, axis=-1)
    if mixture.limit is not None:
        gate, up = jnp.minimum(gate, mixture.limit), jnp.clip(up, -mixture.limit, mixture.limit)
    return primitives.activation(gate, mixture.activation) * (up + mixture.offset)


def biases(bias: jax.Array, routing: Routing) -> jax.Array:
    """What down's bias [X, E] adds to the sum over experts: float32 [..., E]."""
    return _weighted(bias[routing.experts], routing.weights)


def _weighted(parts: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of parts [..., k, E] by float32 weights [..., k], one after another."""
    total = parts[..., 0, :].astype(jnp.float32) * weights[..., 0, None]
    for i in range(1, parts.shape[-2]):
        total = total + parts[..., i, :].astype(jnp.float32) * weights[..., i, None]
    return total


@jax.named_scope("chosen_queries")
def chosen_queries(x: jax.Array, weight: jax.Array, routing: Routing, head_dim: int) -> jax.Array:
    """Of x [..., E] the products by chosen ones of weights [X, K D, E]: [..., K k D]."""
    own, wide = routing.experts, {"preferred_element_type": jnp.float32}
    if own.size <= len(weight):  # fewer are read than there are
        y = einsum("...koi,...i->...ko", weight[own], x, **wide)
    else:
        every = einsum("...i,xoi->...xo", x, weight, **wide)
        y = jnp.take_along_axis(every, own[..., None], -2)
    y = y.astype(x.dtype).reshape(*y.shape[:-1], -1, head_dim)
    return jnp.swapaxes(y, -3, -2).reshape(*x.shape[:-1], -1)


@jax.named_scope("chosen_outputs")
def chosen_outputs(y: jax.Array, weight: jax.Array, routing: Routing, head_dim: int) -> jax.Array:
    """Of heads y [..., K k D] the sum by the routing's weights of products by the chosen ones.

    It is float32.
    """
    own, wide = routing.experts, {"preferred_element_type": jnp.float32}
    rows, count = y.shape[:-1], own.shape[-1]
    y = jnp.swapaxes(y.reshape(*rows, -1, count, head_dim), -3, -2).reshape(*rows, count, -1)
    if own.size <= len(weight):
        parts = einsum("...koi,...ki->...ko", weight[own], y, **wide)
        return (parts * routing.weights[..., None]).sum(-2)
    share = (own[..., None] == jnp.arange(len(weight))) * routing.weights[..., None]
    spread = einsum("...kx,...ki->...xi", share, y.astype(jnp.float32))
    return einsum("...xi,xoi->...o", spread.astype(y.dtype), weight, **wide)
