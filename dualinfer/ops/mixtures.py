"""Routers and experts: which of a layer's experts a token chooses, and what these make of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from ..model.spec import Experts, Mixing, Router
from ..model.weights import Weight
from .contract import Array, Routing, Weights
from .feed_forward import activation
from .maths import Maths, flat, halves, heads, named
from .schemes import BlockArithmetic, of_each, rounds_input
from .scorings import SCORINGS

# What is multiplied with the experts' down matrices, and these, as several devices take them.
ShareInput: TypeAlias = Callable[[Array, Weight], tuple[Array, Weight]]


@named("router")
def route(
    s: BlockArithmetic,
    x: Array,
    weight: Weight,
    router: Router,
    bias: Array | None = None,
    choice_bias: Array | None = None,
) -> Routing:
    """The experts that rows of x [..., E] choose, and their weights; see `BlockOps.route`."""
    m = s.maths
    bias = None if bias is None else m.wide(bias)
    scores = m.product(m.wide(x), m.wide(s.dequantize(weight)), m.float32, bias)
    return routed(m, scores, router, choice_bias)


def routed(m: Maths, scores: Array, router: Router, choice_bias: Array | None = None) -> Routing:
    """Choose experts by a router's product, float32 [..., X]."""
    if router.softcap is not None:
        scores = router.softcap * m.tanh(scores / router.softcap)
    scoring = SCORINGS[router.score]
    if scoring.whole is not None:
        return scoring.whole(m, scores, router)
    if scoring.scores is not None:
        scores = scoring.scores(m, scores)
    choice = scores if choice_bias is None else scores + m.wide(choice_bias)
    if router.groups > 1:
        by_group = heads(choice, router.groups)
        best = m.top(by_group, 2 if router.group_score == "two" else 1).sum(-1)
        is_open = m.among(m.largest(best, router.groups_chosen), router.groups)
        choice = flat(m.where(is_open[..., None], by_group, -float("inf")))
    experts = m.sort(m.largest(choice, router.chosen))
    weights = m.along(scores, experts)
    if scoring.weights is not None:
        weights = scoring.weights(m, weights)
    if router.over_sum is not None:
        weights = weights / (weights.sum(-1, keepdims=True) + router.over_sum)
    return Routing(m.cast(experts, m.int32), weights * router.scale)


@named("router")
def blend(m: Maths, routing: Routing, sides: Routing, expert: int) -> Routing:
    """`routing` with one more expert of each token, which has a higher number.

    The weights of the others are times `sides.weights[..., 0]`, its own is [..., 1] of them.
    """
    experts, weights, shares = *routing, sides.weights
    both = m.join((weights * shares[..., :1], shares[..., 1:]), -1)
    return Routing(m.pad(experts, -1, 0, 1, expert), both)


@named("router")
def fill(
    m: Maths,
    routing: Routing,
    count: int,
    capacity: int,
    mask: Array | None = None,
    segments: Array | None = None,
) -> Routing:
    """`routing` [B, T, k] with weight 0 for an expert whose places in a row are taken.

    Each of `count` experts has `capacity` places in a row, or in each of its int `segments` [B, T];
    the first tokens that choose it take them, but for those that bool `mask` [B, T] hides.
    """
    experts, weights = routing
    chosen = m.one_hot(experts, count).sum(-2)
    if mask is not None:
        chosen = chosen * mask[..., None]
    before = chosen.cumsum(1) - chosen
    if segments is not None:  # less those before the first token of each
        is_first = m.pad(segments[:, 1:] != segments[:, :-1], 1, 1, 0, True)
        first = m.running_most(m.where(is_first, m.arange(chosen.shape[1], chosen), 0), 1)
        before = before - m.places(before, first)
    return Routing(experts, m.where(m.along(before, experts) < capacity, weights, 0))


@named("experts")
def experts(
    s: BlockArithmetic,
    x: Array,
    mixture: Experts,
    w: Weights,
    routing: Routing,
    share_input: ShareInput = lambda h, weight: (h, weight),
    own: Any = None,
) -> Array:
    """The sum of what the chosen experts make of x [..., E], without down's bias: float32.

    A matrix is read only for the rows that chose its expert. With int `own` [2] the weights are
    those of experts `own[0]` to `own[1]`, perhaps with zeros behind, and others give nothing.
    """
    m, chosen = s.maths, routing.experts.reshape(-1)
    rows, count = x.reshape(-1, x.shape[-1]), routing.experts.shape[-1]
    up, down = (w[f"experts.{name}.weight"] for name in ("up", "down"))
    bias, (total, width, features) = w.get("experts.up.bias"), down.shape
    here = None
    if own is not None:
        here = (chosen >= own[0]) & (chosen < own[1])
        chosen = m.where(here, chosen - own[0], total)
    groups = m.groups(chosen, total, mixture.count, here)
    read, sums = ((rows, count),), m.sums(x)

    def first(own: Any, read: Array) -> Array:
        return hidden(m, s.matmul(read, *own[:2]), mixture)

    def second(own: Any, h: Array) -> Array:
        return s.product(h, own[-1], sums)

    def both(own: Any, read: Array) -> Array:
        return second(own, first(own, read))

    if rounds_input(down):  # by scales that devices may make together, of all pairs at once
        h = groups(first, (up, bias), read, features, x.dtype)
        h, shared = share_input(h, of_each(down, chosen.clip(max=total - 1)))
        down = replace(down, scheme=shared.scheme)
        parts = groups(second, (down,), ((h, 1),), width, sums)
    else:
        parts = groups(both, (up, bias, down), read, width, sums)
    return weighted(m, parts.reshape(*routing.experts.shape, -1), routing.weights)


def hidden(m: Maths, h: Array, mixture: Experts) -> Array:
    """An expert's hidden values, of its first product h [..., 2F] with gate, then up."""
    if not mixture.gated:
        return activation(m, h, mixture.activation)
    own = mixture.mixing or Mixing()
    if own.hidden is not None:
        return own.hidden(m, h, mixture.activation)
    gate, up = halves(h)
    if own.clamp is not None:
        gate, up = gate.clip(max=own.clamp), up.clip(-own.clamp, own.clamp)
    return activation(m, gate, mixture.activation) * (up + own.offset)


def biases(m: Maths, bias: Array, routing: Routing) -> Array:
    """The share of down's bias [X, E] in the sum over experts: float32 [..., E]."""
    return weighted(m, bias[routing.experts], routing.weights)


def weighted(m: Maths, parts: Array, weights: Array) -> Array:
    """The sum of parts [..., k, E] by float32 weights [..., k], one after another."""
    total = m.wide(parts[..., 0, :]) * weights[..., 0, None]
    for i in range(1, parts.shape[-2]):
        total = m.add_product(total, m.wide(parts[..., i, :]), weights[..., i, None])
    return total
