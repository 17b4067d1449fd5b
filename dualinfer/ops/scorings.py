"""Scores that routers make of logits: a row of SCORINGS each, by the `score` of a `Router`.

A new one is a row, or a file beside this one and a row; see docs/contributing/adding-a-router.md.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..model.spec import Router
from .contract import Array, Routing
from .maths import Maths


class Scoring(NamedTuple):
    """The way from logits float32 [..., X] to the weights of the experts that a token chooses.

    `scores` of all logits are what the choice is among, and the chosen ones' are their weights;
    `weights` are made of the chosen ones alone. Without either they are the logits. `whole` is all
    of a choice that is made otherwise, by (maths, logits, router).
    """

    scores: Callable[[Maths, Array], Array] | None = None
    weights: Callable[[Maths, Array], Array] | None = None
    whole: Callable[[Maths, Array, Router], Routing] | None = None


def _softmax(m: Maths, scores: Array) -> Array:
    return m.softmax(scores)


def _sigmoid(m: Maths, scores: Array) -> Array:
    return m.sigmoid(scores)


def _sparse(m: Maths, scores: Array, router: Router) -> Routing:
    """The two largest of scores [..., X]; each weighs as much as near ones leave it."""
    picks = m.largest(scores, 2)
    rest, weights = scores, []
    for pick in (picks[..., :1], picks[..., 1:]):
        best = m.along(scores, pick)
        far = (best - scores) / m.maximum(abs(scores), best) > 2 * router.jitter
        near = m.softmax(m.where(far, -float("inf"), rest))
        weights.append(m.along(near, pick))
        rest = m.without(rest, pick)
    experts, order = m.ascending(picks)
    ordered: Any = m.along(m.join(weights, -1), order)
    return Routing(m.cast(experts, m.int32), ordered * router.scale)


SCORINGS: Mapping[str, Scoring] = {
    "softmax": Scoring(scores=_softmax),
    "sigmoid": Scoring(scores=_sigmoid),
    "chosen": Scoring(weights=_softmax),
    "gates": Scoring(weights=_sigmoid),
    "sparse": Scoring(whole=_sparse),
}
