"""Routers of mixtures: product, scores, choice and weights in one launch, all in float32.

Few rows of x spread their product over programs, the last of which chooses. Of many rows a program
has all logits of a block on the matrix units, and chooses for them.
"""

from typing import Any, NamedTuple, TypeAlias

import triton

from .launch import launch, next_power_of_2
from .linear import NormArguments, check_epilogue
from .operands import empty
from .routing_kernels import route_tile_kernel, route_vector_kernel
from .tunable import SHARED_BYTES, Key, Kind, Tunable, powers

MOST_EXPERTS = 512
MOST_CHOSEN = 16
MOST_VECTORS = 64  # rows of x of which each has programs of its own
SCORES = ("softmax", "sigmoid", "chosen", "gates", "sparse")


class RouteVectorConfig(NamedTuple):
    """Rows of the router's weights a program, and its warps."""

    rows: int
    warps: int


class RouteTileConfig(NamedTuple):
    """Rows of x a program, and columns at a time."""

    m: int
    k: int
    warps: int
    stages: int


RouteConfig: TypeAlias = RouteVectorConfig | RouteTileConfig


class Routing(NamedTuple):
    """The experts of each row, int32 [..., k], ascending, and their weights, float32 [..., k]."""

    experts: Any
    weights: Any


def serves(router: Any, total: int) -> bool:
    """True if the kernels know a `model.spec.Router` over so many experts."""
    fits = total <= MOST_EXPERTS and router.chosen <= MOST_CHOSEN
    return fits and router.score in SCORES and router.softcap is None


def serves_all(spec: Any) -> bool:
    """True if the kernels know all routers of a `model.spec.ModelSpec`."""
    mixtures = (layer.mlp for layer in spec.all_layers if layer.experts)
    return all(serves(own.router, own.choices) for own in mixtures)


def arguments(router: Any) -> dict[str, Any]:
    """What `route` takes of a `model.spec.Router`."""
    names = "chosen", "score", "groups", "groups_chosen", "group_score", "scale", "jitter"
    own = {"renormalized": router.over_sum is not None, "eps": router.over_sum or 0.0}
    return {name: getattr(router, name) for name in names} | own


def fuses_norm(count: int) -> bool:
    """True if a router norms so many rows of x itself; else a launch in front does."""
    return count <= MOST_VECTORS


def route(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    chosen: int,
    score: str,
    choice_bias: Any = None,
    groups: int = 1,
    groups_chosen: int = 1,
    group_score: str = "max",
    renormalized: bool = False,
    eps: float = 0.0,
    scale: float = 1.0,
    jitter: float = 0.0,
    norm: NormArguments | None = None,
    counters: Any,
    config: RouteConfig | None = None,
    sms: int = 132,
    pdl: bool = False,
) -> Routing:
    """The experts that rows of x [..., E] choose, and their weights, by `weight` [X, E].

    `score` is "softmax" or "sigmoid" over all experts, or of the logits of the chosen ones alone
    the softmax ("chosen") or the sigmoid ("gates"), or of each the softmax among those below it
    that are near by `jitter` ("sparse": see `model.spec.Router`). `choice_bias` [X] is added for
    the choice alone. Of `groups` those `groups_chosen` are open that have the greatest score
    ("max"), or sum of two ("two"). Of equal scores that of the lowest number is greater.
    `renormalized` weights are over their sum plus `eps`; `scale` comes last. `counters` int32 are
    0, and are 0 again afterwards.
    """
    width, total = x.shape[-1], weight.shape[0]
    count = x.numel() // width
    _check(x, weight, bias, choice_bias, chosen, score, groups, groups_chosen, group_score)
    shape = (*x.shape[:-1], chosen)
    experts = x.new_empty(shape, dtype=counters.dtype)
    weights = empty(x, shape, "float32")
    if count == 0:
        return Routing(experts, weights)
    if config is None:
        config = default_config(tuning_key(count, total, width, weight.element_size()), sms)
    rows = x.reshape(count, width)
    each, blocks = next_power_of_2(total // groups), next_power_of_2(groups)
    how = {"K": width, "X": total, "CHOSEN": chosen, "SCORE": score, "RENORMALIZED": renormalized}
    how |= {"GROUPS": groups, "GROUPS_CHOSEN": groups_chosen, "TWO": group_score == "two"}
    how |= {"GROUP_BLOCK": blocks, "EACH": each, "num_warps": config.warps, "pdl": pdl}
    results = experts, weights
    if isinstance(config, RouteVectorConfig):
        if count > counters.numel():
            raise ValueError(f"x has {count} rows, and there are {counters.numel()} counters.")
        kind, *norm_arrays, norm_eps = norm or (None, None, None, 0.0)
        logits = empty(x, (count, total), "float32")
        launch(
            route_vector_kernel,
            (triton.cdiv(total, config.rows), count),
            *(rows, weight, bias, choice_bias, *norm_arrays, logits, *results, counters),
            *(rows.stride(0), norm_eps, eps, scale, 2 * jitter),
            **{"ROWS": config.rows, "BLOCK_K": next_power_of_2(width), "NORM": kind, **how},
        )
        return Routing(*results)
    if norm is not None:
        raise ValueError(f"{config} has no place for a norm; a RouteVectorConfig has.")
    launch(
        route_tile_kernel,
        (triton.cdiv(count, config.m),),
        *(rows, weight, bias, choice_bias, *results, count, rows.stride(0), eps, scale, 2 * jitter),
        **{"BLOCK_M": config.m, "BLOCK_K": config.k, "STAGES": config.stages, **how},
    )
    return Routing(*results)


def default_config(key: Key, sms: int) -> RouteConfig:
    """A configuration for a shape that nobody measured."""
    _, rows, total, width, itemsize = key
    if rows <= MOST_VECTORS:
        elements = next_power_of_2(width)
        each = max(1, min(4, 8192 // elements))
        while each > 1 and rows * total // each < sms:
            each //= 2
        return RouteVectorConfig(each, 4 if elements * each <= 8192 else 8)
    m = 16 if rows < 64 * sms else 32
    wide = next_power_of_2(total)
    k = 32 if itemsize == 4 else 64 if total > 64 else 128
    while wide * k * itemsize * 3 > SHARED_BYTES and k > 16:
        k //= 2
    return RouteTileConfig(m, k, 4 if wide * m <= 4096 else 8, 3)


def tuning_key(rows: int, total: int, width: int, itemsize: int) -> Key:
    """Of a router of `total` experts over x [rows, width]."""
    return "route", next_power_of_2(rows), total, width, itemsize


def _fits(key: Key, config: RouteConfig) -> bool:
    _, rows, total, width, itemsize = key
    if isinstance(config, RouteVectorConfig):
        per_thread = next_power_of_2(width) * config.rows / (32 * config.warps)
        return rows <= MOST_VECTORS and per_thread <= 256
    wide = next_power_of_2(total)
    held = config.stages * config.k * (config.m + wide) * itemsize
    # Norms are fused into the other kernel, which all rows up to MOST_VECTORS have.
    return (
        rows > MOST_VECTORS and held <= SHARED_BYTES and config.m * wide <= 64 * 32 * config.warps
    )


def _candidates(key: Key, sms: int) -> list[RouteConfig]:
    _, rows, *_ = key
    default = default_config(key, sms)
    if rows <= MOST_VECTORS:
        return [default, *(RouteVectorConfig(r, w) for r in (1, 2, 4, 8) for w in (2, 4, 8))]
    tiles = [(16, 64, 4, 3), (16, 128, 4, 3), (32, 64, 4, 3), (32, 64, 8, 3), (64, 64, 8, 3)]
    return [default, *(RouteTileConfig(*tile) for tile in [*tiles, (16, 128, 8, 2)])]


TUNABLE = Tunable(
    op="route",
    fields=("rows", "experts", "width", "itemsize"),
    kinds={
        "route_vector": Kind(
            RouteVectorConfig,
            {"rows": powers(1, 16), "warps": powers(1, 16)},
            bound_by_memory=True,
        ),
        "route_tile": Kind(
            RouteTileConfig,
            {
                **{"m": powers(16, 64), "k": powers(16, 256)},
                **{"warps": powers(1, 16), "stages": range(1, 9)},
            },
        ),
    },
    fits=_fits,
    candidates=_candidates,
)


def _check(
    x: Any,
    weight: Any,
    bias: Any,
    choice_bias: Any,
    chosen: int,
    score: str,
    groups: int,
    groups_chosen: int,
    group_score: str,
) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    total, width = weight.shape
    if width != x.shape[-1] or not weight.is_contiguous():
        raise ValueError(
            f"The router's weight {tuple(weight.shape)} with strides {tuple(weight.stride())} does "
            f"not fit x {tuple(x.shape)}: a contiguous [X, {x.shape[-1]}] is expected."
        )
    if not 1 <= chosen <= min(total, MOST_CHOSEN) or total > MOST_EXPERTS:
        raise ValueError(
            f"{chosen} of {total} experts are chosen; up to {MOST_CHOSEN} of {MOST_EXPERTS} are "
            "expected."
        )
    if score not in SCORES or group_score not in ("max", "two"):
        raise ValueError(f"A router's score is {score!r} by groups' {group_score!r}.")
    per = total // groups
    open_ = groups_chosen * per
    if total % groups or not 1 <= groups_chosen <= groups or open_ < chosen:
        raise ValueError(
            f"{groups_chosen} of {groups} groups of {total} experts do not give {chosen} of them."
        )
    if group_score == "two" and groups > 1 and per < 2:
        raise ValueError(f"Groups of {per} expert have no sum of two.")
    check_epilogue(x, total, bias, None, False, None, None, total)
    if choice_bias is not None and (
        tuple(choice_bias.shape) != (total,) or choice_bias.stride(0) != 1
    ):
        raise ValueError(f"choice_bias is {tuple(choice_bias.shape)}; ({total},) is expected.")
