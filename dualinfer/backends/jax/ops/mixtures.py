"""Routers and experts in plain XLA; their meaning is `kernels/reference.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ....model.spec import Experts, Router
from ....model.weights import Weight
from ...contract import Routing, Weights
from . import primitives

# What is multiplied with an expert's down matrix, and that matrix, as several devices take them.
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
    matrix = primitives.dequantize(weight).astype(jnp.float32)
    scores = primitives.einsum("...i,oi->...o", x.astype(jnp.float32), matrix)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
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


@jax.named_scope("experts")
def experts(
    x: jax.Array,
    mixture: Experts,
    w: Weights,
    routing: Routing,
    share_input: ShareInput = lambda h, weight: (h, weight),
) -> jax.Array:
    """The sum of what the chosen experts make of x [..., E], without down's bias: float32.

    Pairs of a row and an expert are sorted by expert, and multiplied in blocks of one expert's, one
    block after another, so that one expert's matrices are taken at a time, and those alone that a
    row chose. XLA's `ragged_dot` would multiply the others by zero.
    """
    rows, chosen = x.reshape(-1, x.shape[-1]), routing.experts.reshape(-1)
    count, pairs = routing.experts.shape[-1], routing.experts.size
    width = _block(pairs, mixture.count)
    order = jnp.argsort(chosen, stable=True)
    ends = jnp.cumsum(jnp.bincount(chosen, length=mixture.count))
    starts = jnp.concatenate((jnp.zeros_like(ends[:1]), ends[:-1]))
    last = jnp.cumsum(-(-(ends - starts) // width))  # block of each expert, and one more

    def block(i: jax.Array, parts: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
        before = jnp.where(expert > 0, last[expert - 1], 0)
        at = starts[expert] + (i - before) * width + jnp.arange(width)
        own = order[jnp.minimum(at, pairs - 1)]
        up = one_expert(w["experts.up.weight"], expert)
        read = rows[own // count]
        if mixture.weighs_input:
            read = (read * routing.weights.reshape(-1)[own, None]).astype(x.dtype)
        h = primitives.matmul(read, up, _row(w.get("experts.up.bias"), expert))
        h, down = share_input(hidden(h, mixture), one_expert(w["experts.down.weight"], expert))
        y = primitives.SCHEMES.product(h, down, jnp.float32)
        return parts.at[jnp.where(at < ends[expert], own, pairs)].set(y, mode="drop")

    parts = jnp.zeros((pairs, w["experts.down.weight"].shape[1]), jnp.float32)
    parts = lax.fori_loop(0, last[-1], block, parts)
    weights = jnp.ones_like(routing.weights) if mixture.weighs_input else routing.weights
    return _weighted(parts.reshape(*routing.experts.shape, -1), weights)


def _block(pairs: int, experts: int) -> int:
    """Pairs in a product: about those that an expert has, a power of two."""
    return min(_MOST, 1 << (-(-pairs // experts) - 1).bit_length())


def one_expert(weight: Weight, expert: jax.Array) -> Weight:
    """The matrix of one of the experts [X, out, in], by its number."""
    beside = {part: _row(array, expert) for part, array in weight.beside.items()}
    return replace(weight, data=_row(weight.data, expert), axes=weight.axes[1:], beside=beside)


def _row(array: jax.Array | None, expert: jax.Array) -> jax.Array | None:
    return None if array is None else lax.dynamic_index_in_dim(array, expert, keepdims=False)


def hidden(h: jax.Array, mixture: Experts) -> jax.Array:
    """An expert's hidden values, of its first product h [..., 2F] with gate, then up."""
    if not mixture.gated:
        return primitives.activation(h, mixture.activation)
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
