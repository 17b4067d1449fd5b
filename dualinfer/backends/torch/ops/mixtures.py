"""Routers and experts in plain torch; their meaning is `kernels/reference.py`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.nn import functional as F

from ....model.spec import Experts, Router
from ....model.weights import Weight
from ....ops.contract import Routing, Weights
from ....ops.schemes import of_each, rounds_input
from ..profiling import named
from . import primitives
from .schemes import SCHEMES

# What is multiplied with the experts' down matrices, and these, as several ranks take them.
ShareInput: TypeAlias = Callable[[torch.Tensor, Weight], tuple[torch.Tensor, Weight]]


@named("router")
def route(
    x: torch.Tensor,
    weight: Weight,
    router: Router,
    bias: torch.Tensor | None = None,
    choice_bias: torch.Tensor | None = None,
) -> Routing:
    """The experts that rows of x [..., E] choose, and their weights; see `BlockOps.route`."""
    matrix = SCHEMES.dequantize(weight).float()
    scores = F.linear(x.float(), matrix, None if bias is None else bias.float())
    if router.softcap is not None:
        scores = router.softcap * torch.tanh(scores / router.softcap)
    if router.score == "sparse":
        return _sparse(scores, router)
    if router.score == "sigmoid":
        scores = scores.sigmoid()
    elif router.score == "softmax":
        scores = scores.softmax(-1)
    choice = scores if choice_bias is None else scores + choice_bias.float()
    if router.groups > 1:
        by_group = choice.unflatten(-1, (router.groups, -1))
        best = by_group.topk(2 if router.group_score == "two" else 1, dim=-1)[0].sum(-1)
        is_open = torch.zeros_like(best, dtype=torch.bool)
        is_open = is_open.scatter(-1, _largest(best, router.groups_chosen), True)
        choice = by_group.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
    experts = _largest(choice, router.chosen).sort(dim=-1)[0]
    weights = scores.gather(-1, experts)
    if router.score == "chosen":
        weights = weights.softmax(-1)
    elif router.score == "gates":
        weights = weights.sigmoid()
    if router.renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + router.eps)
    return Routing(experts.int(), weights * router.scale)


def _sparse(scores: torch.Tensor, router: Router) -> Routing:
    """The two largest of scores [..., X]; each weighs as much as near ones leave it."""
    picks = _largest(scores, 2)
    rest, weights = scores, []
    for pick in picks.split(1, dim=-1):
        best = scores.gather(-1, pick)
        far = (best - scores) / torch.maximum(scores.abs(), best) > 2 * router.jitter
        weights.append(rest.masked_fill(far, -torch.inf).softmax(-1).gather(-1, pick))
        rest = rest.scatter(-1, pick, -torch.inf)
    experts, order = picks.sort(dim=-1)
    return Routing(experts.int(), torch.cat(weights, -1).gather(-1, order) * router.scale)


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Where the largest scores of each row are; of equal ones the first. `topk` leaves it open."""
    return scores.sort(dim=-1, descending=True, stable=True)[1][..., :count]


@named("router")
def blend(routing: Routing, sides: torch.Tensor, expert: int) -> Routing:
    """Experts and weights with `expert` behind; see `BlockOps.blend`. sides [..., 2] float32."""
    experts, weights = routing
    own = experts.new_full((*experts.shape[:-1], 1), expert)
    both = torch.cat((weights * sides[..., :1], sides[..., 1:]), -1)
    return Routing(torch.cat((experts, own), -1), both)


@named("router")
def fill(
    routing: Routing,
    count: int,
    capacity: int,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> Routing:
    """The routing with weight 0 where an expert is full; see `BlockOps.fill`."""
    experts, weights = routing
    chosen = F.one_hot(experts.long(), count).sum(-2)
    if mask is not None:
        chosen = chosen * mask[..., None]
    before = chosen.cumsum(1) - chosen
    if segments is not None:  # less those before the first token of each
        places = torch.arange(chosen.shape[1], device=chosen.device).expand_as(segments)
        is_first = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        first = torch.where(is_first, places, 0).cummax(1)[0]
        before = before - before.gather(1, first[..., None].expand_as(before))
    before = before.gather(-1, experts.long())
    return Routing(experts, torch.where(before < capacity, weights, 0))


@named("experts")
def experts(
    x: torch.Tensor,
    mixture: Experts,
    w: Weights,
    routing: Routing,
    share_input: ShareInput = lambda h, weight: (h, weight),
    own: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The sum of what the chosen experts make of x [..., E], without down's bias: float32.

    A matrix is read only for the rows that chose its expert. Rows go by expert, which the host asks
    for; while a CUDA graph is captured it may not ask, and each pair takes a copy of its expert.
    With `own` the weights are those of experts `own[0]` to `own[1]`, and others give nothing.
    """
    rows, chosen = x.flatten(0, -2), routing.experts.flatten()
    count = routing.experts.shape[-1]
    here = None
    if own is not None:
        first, stop = own
        here = (chosen >= first) & (chosen < stop)
        chosen = torch.where(here, chosen - first, stop - first)
    weights = [w[f"experts.{name}.weight"] for name in ("up", "down")]
    total, width = weights[1].shape[:2]
    by_expert, bias = _by_expert(chosen, total), w.get("experts.up.bias")

    def of_pairs(pairs: torch.Tensor, expert: int | torch.Tensor) -> torch.Tensor:
        up = one_expert(weights[0], expert)
        read = rows[pairs // count]
        if mixture.weighs_input:
            read = (read * routing.weights.flatten()[pairs, None]).to(x.dtype)
        return hidden(primitives.matmul(read, up, _row(bias, expert)), mixture)

    parts = x.new_empty((len(chosen), width))
    if rounds_input(weights[1]):  # by scales that devices may make together, of all pairs at once
        by_expert = list(by_expert)
        h = x.new_zeros((len(chosen), weights[1].shape[2]))
        for expert, pairs in by_expert:
            h[pairs] = of_pairs(pairs, expert)
        h, down = share_input(h, of_each(weights[1], chosen.clamp(max=total - 1)))
        down = replace(weights[1], scheme=down.scheme)
        for expert, pairs in by_expert:
            parts[pairs] = primitives.matmul(h[pairs], one_expert(down, expert))
    else:
        for expert, pairs in by_expert:
            parts[pairs] = primitives.matmul(
                of_pairs(pairs, expert), one_expert(weights[1], expert)
            )
    if here is not None:
        parts = torch.where(here[:, None], parts, 0)
    factors = torch.ones_like(routing.weights) if mixture.weighs_input else routing.weights
    return _weighted(parts.view(*routing.experts.shape, -1), factors)


def _by_expert(
    chosen: torch.Tensor, total: int
) -> Iterator[tuple[int | torch.Tensor, torch.Tensor]]:
    """Experts, `total` of them, with the pairs of a row and an expert that are theirs.

    Higher numbers have no expert here. While a graph is captured their pairs go with the last one.
    """
    pairs = torch.arange(len(chosen), device=chosen.device)
    if chosen.is_cuda and torch.cuda.is_current_stream_capturing():
        yield from zip(chosen.clamp(max=total - 1).split(1), pairs.split(1), strict=True)
        return
    in_order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=total + 1).tolist()
    for expert, own in enumerate(in_order.split(counts)[:total]):
        if len(own):
            yield expert, own


def one_expert(weight: Weight, expert: int | torch.Tensor) -> Weight:
    """The matrix of one of the experts [X, out, in], by its number or an int tensor [1] with it."""
    beside = {part: _row(array, expert) for part, array in weight.beside.items()}
    return replace(weight, data=_row(weight.data, expert), axes=weight.axes[1:], beside=beside)


def _row(array: torch.Tensor | None, expert: int | torch.Tensor) -> torch.Tensor | None:
    if array is None:
        return None
    return array[expert] if isinstance(expert, int) else array.index_select(0, expert)[0]


def hidden(h: torch.Tensor, mixture: Experts) -> torch.Tensor:
    """An expert's hidden values, of its first product h [..., 2F] with gate, then up."""
    if not mixture.gated:
        return primitives.activation(h, mixture.activation)
    if mixture.limits_given and mixture.limit is not None:
        return primitives.gate_within(h, mixture.activation, mixture.limit)
    gate, up = h.chunk(2, dim=-1)
    if mixture.limit is not None:
        gate, up = gate.clamp(max=mixture.limit), up.clamp(-mixture.limit, mixture.limit)
    return primitives.activation(gate, mixture.activation) * (up + mixture.offset)


def biases(bias: torch.Tensor, routing: Routing) -> torch.Tensor:
    """What down's bias [X, E] adds to the sum over experts: float32 [..., E]."""
    return _weighted(bias[routing.experts], routing.weights)


def _weighted(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of parts [..., k, E] by float32 weights [..., k], one after another."""
    total = parts[..., 0, :].float() * weights[..., 0, None]
    for i in range(1, parts.shape[-2]):
        total = torch.addcmul(total, parts[..., i, :].float(), weights[..., i, None])
    return total


@named("chosen_queries")
def chosen_queries(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, head_dim: int
) -> torch.Tensor:
    """Of x [..., E] the products by chosen ones of weights [X, K D, E]: [..., K k D]."""
    own = routing.experts
    if own.numel() <= len(weight):  # fewer are read than there are
        y = (weight[own] @ x[..., None, :, None])[..., 0]
    else:
        every = F.linear(x, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
        y = every.gather(-2, own[..., None].long().expand(*own.shape, weight.shape[1]))
    return y.unflatten(-1, (-1, head_dim)).transpose(-3, -2).flatten(-3)


@named("chosen_outputs")
def chosen_outputs(
    y: torch.Tensor, weight: torch.Tensor, routing: Routing, head_dim: int
) -> torch.Tensor:
    """Of heads y [..., K k D] the sum by the routing's weights of products by the chosen ones."""
    own, count = routing.experts, routing.experts.shape[-1]
    y = y.unflatten(-1, (-1, count, head_dim)).transpose(-3, -2).flatten(-2)
    if own.numel() <= len(weight):
        parts = (weight[own] @ y[..., None])[..., 0]
        return (parts.float() * routing.weights[..., None]).sum(-2).to(y.dtype)
    number = torch.arange(len(weight), device=y.device)
    share = (own[..., None] == number) * routing.weights[..., None]
    spread = (share.mT @ y.float()).to(y.dtype)  # of each expert's input its share
    return F.linear(spread.flatten(-2), weight.transpose(0, 1).flatten(1))
