"""Routers of families with mixtures: rows of `mixtures.MIXTURES` name one of these functions.

Each reads a config, and the names that its row gives to fields. What a router makes of logits is a
row of `ops.scorings`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from ...errors import ModelError, shown
from ..spec import Router
from .fields import ConfigFields

# The router, but for how many experts it chooses; `names` is the row, a `mixtures.Mixture`.
Route: TypeAlias = Callable[[ConfigFields, Any], Router]


def _if_so(fields: ConfigFields, number: float = 0.0, default: bool = False) -> float | None:
    """`Router.over_sum` where the config says that weights are renormalized."""
    return number if fields.flag("norm_topk_prob", default) else None


def by_share(fields: ConfigFields, names: Any) -> Router:
    """A softmax, renormalized where the config says so."""
    return Router(0, over_sum=_if_so(fields))


def always_renormalized(fields: ConfigFields, names: Any) -> Router:
    """As `renormalized`, which a config may say."""
    fields.require("norm_topk_prob", True)
    return renormalized(fields, names)


def renormalized(fields: ConfigFields, names: Any) -> Router:
    """A softmax over the experts, renormalized over the chosen ones."""
    return Router(0, over_sum=0.0)


def of_chosen(fields: ConfigFields, names: Any) -> Router:
    """A softmax of the chosen logits alone."""
    return Router(0, "chosen")


def gates(fields: ConfigFields, names: Any) -> Router:
    """A sigmoid of each chosen logit."""
    return Router(0, "gates")


def limited(fields: ConfigFields, names: Any) -> Router:
    """DeepSeek-V2's: a softmax, perhaps within groups of experts."""
    fields.require("norm_topk_prob", False)  # HF's router does not read it
    fields.require("scoring_func", "softmax")
    fields.require("topk_method", "greedy", "group_limited_greedy")
    is_limited = fields.take("topk_method") == "group_limited_greedy"
    groups, chosen = _groups(fields, names, 1) if is_limited else (1, 1)
    fields.ignore("n_group", "topk_group")
    scale = fields.number("routed_scaling_factor")
    return Router(0, groups=groups, groups_chosen=chosen, scale=scale)


def grouped(fields: ConfigFields, names: Any, *, score: str = "sigmoid", also: str = "") -> Router:
    """DeepSeek-V3's: the best two of a group open it; `also` is a name of the score in configs."""
    fields.require("scoring_func", "sigmoid", *((also,) if also else ()))
    fields.require("topk_method", "noaux_tc")
    groups, chosen = _groups(fields, names, 2)
    over_sum, scale = _if_so(fields, 1e-20), fields.number("routed_scaling_factor")
    return Router(0, score, groups, chosen, "two", over_sum, scale)


def grouped_softmax(fields: ConfigFields, names: Any) -> Router:
    """Mistral 4's: DeepSeek-V3's by a softmax."""
    return grouped(fields, names, score="softmax")


def grouped_dots(fields: ConfigFields, names: Any) -> Router:
    """dots1's: DeepSeek-V3's by another name."""
    return grouped(fields, names, also="noaux_tc")


def one_group(fields: ConfigFields, names: Any) -> Router:
    """A.X K2's: HF gives its closed groups scores of 0, which may be chosen."""
    fields.require("n_group", 1)
    return grouped(fields, names)


def _groups(fields: ConfigFields, names: Any, least: int) -> tuple[int, int]:
    """Groups of at least `least` experts, and how many of them are open to a token."""
    groups, chosen = fields.size("n_group", 1), fields.size("topk_group", 1)
    total, experts = fields.size(names.count), fields.size(names.chosen)
    # Of too few open experts HF takes closed ones, those that a sort of equal numbers gives first.
    fits = total % groups == 0 and total // groups >= least and chosen <= groups
    if not fits or total // groups * chosen < experts:
        raise ModelError(
            f"config.json has n_group={groups} and topk_group={chosen} for {total} experts, of "
            f"which a token has {experts}; expected groups of one size of at least {least}, no "
            "more open ones than there are, and as many experts in them as a token has."
        )
    return groups, chosen


def lfm2(fields: ConfigFields, names: Any) -> Router:
    """LFM2's: a sigmoid, renormalized unless the config says otherwise."""
    over_sum = _if_so(fields, 1e-6, default=True)
    return Router(0, "sigmoid", over_sum=over_sum, scale=fields.number("routed_scaling_factor"))


def sigmoid(fields: ConfigFields, names: Any) -> Router:
    """A renormalized sigmoid."""
    return Router(0, "sigmoid", over_sum=0.0)


def scaled_by(name: str, eps: float = 1e-20) -> Route:
    """A renormalized sigmoid, times the field `name`."""

    def route(fields: ConfigFields, names: Any) -> Router:
        return Router(0, "sigmoid", over_sum=eps, scale=fields.number(name))

    return route


def laguna(fields: ConfigFields, names: Any) -> Router:
    """Laguna's: a renormalized sigmoid of logits that may be capped."""
    fields.require("moe_apply_router_weight_on_input", False)
    softcap = fields.take("moe_router_logit_softcapping", 0.0)
    softcap = fields.number("moe_router_logit_softcapping") if softcap else None
    scale = fields.number("moe_routed_scaling_factor")
    return Router(0, "sigmoid", over_sum=0.0, scale=scale, softcap=softcap)


def cohere2(fields: ConfigFields, names: Any) -> Router:
    """Cohere 2's: a softmax or a sigmoid of the chosen logits."""
    fields.require("expert_selection_fn", "softmax", "sigmoid")
    over_sum = _if_so(fields, default=True)
    if fields.take("expert_selection_fn") == "softmax":
        return Router(0, "chosen")
    return Router(0, "gates", over_sum=over_sum)


def flint(fields: ConfigFields, names: Any) -> Router:
    """Flint's: a sigmoid of all logits."""
    return Router(0, "sigmoid", over_sum=_if_so(fields))


def kolibri(fields: ConfigFields, names: Any) -> Router:
    """Kolibri's: a sigmoid of the chosen logits."""
    return Router(0, "gates", over_sum=_if_so(fields))


def sparse(fields: ConfigFields, names: Any) -> Router:
    """Phi-3.5-MoE's two picks."""
    name = "router_jitter_noise"
    jitter = 0.0 if fields.take(name) == 0 else fields.number(name)
    return Router(2, "sparse", jitter=jitter)


def ernie(fields: ConfigFields, names: Any) -> Router:
    """ERNIE's: a renormalized softmax."""
    # HF divides by the sum, but by moe_norm_min where that is more. Sums of probabilities are.
    fields.require("moe_norm_min", 1e-12)
    return Router(0, over_sum=1e-12)


def chosen(fields: ConfigFields, names: Any, layer: int, layers: int) -> int:
    """The number of experts that a token of a layer chooses."""
    return fields.size(names.chosen)


def two(fields: ConfigFields, names: Any, layer: int, layers: int) -> int:
    """2, whatever the field says: HF's router has two picks written out (Phi-3.5-MoE)."""
    return 2


def chosen_by_layer(fields: ConfigFields, names: Any, layer: int, layers: int) -> int:
    """As `chosen`; the field may be a list by layer (HunYuan)."""
    name = names.chosen
    value = fields.take(name)
    if not isinstance(value, list):
        return fields.size(name)
    if len(value) != layers or any(type(k) is not int or k < 1 for k in value):
        raise ModelError(
            f"config.json has {name}={shown(value)}; expected a positive int, or one for each of "
            f"{layers} layers."
        )
    return value[layer]
