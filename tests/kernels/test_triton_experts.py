"""Routers and experts by Triton's kernels: choices, products, and what else is in the batch."""

import math
from typing import Any

import numpy as np
import pytest

from . import oracles
from .cases import DTYPES, assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict, torch
from .test_norms import gain

from dualinfer.kernels.triton.experts import experts, make_order  # isort: skip
from dualinfer.kernels.triton.mixture import Mixture, Shared  # isort: skip
from dualinfer.kernels.triton.experts_choice import (  # isort: skip
    ExpertsTileConfig,
    ExpertsVectorConfig,
    is_few,
)
from dualinfer.kernels.triton.linear import NormArguments  # isort: skip
from dualinfer.kernels.triton.routing import (  # isort: skip
    RouteTileConfig,
    RouteVectorConfig,
    Routing,
    route,
)

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]

FLOAT32 = np.dtype(np.float32)
EPS = 1e-5
TILES = ExpertsTileConfig(16, 32, 32, 4, 2, 64, 4)
PLAIN = {"score": "softmax"}
GPT_OSS = {"activation": "quick_gelu", "limit": 1.5, "offset": 1.0}
ROUTERS = {
    "mixtral": {"score": "softmax", "renormalized": True},
    "olmoe": PLAIN,
    "gpt-oss": {"score": "chosen"},
    "llama4": {"score": "gates"},
    "phi-3.5": {"score": "sparse", "chosen": 2, "jitter": 0.2},
    "phi-3.5, ties alone": {"score": "sparse", "chosen": 2},
    "deepseek-v2": {"score": "softmax", "groups": 4, "groups_chosen": 2, "scale": 16.0},
    "deepseek-v3": {
        **{"score": "sigmoid", "groups": 4, "groups_chosen": 2, "group_score": "two"},
        **{"renormalized": True, "eps": 1e-20, "scale": 2.5},
    },
}


def counters() -> Any:
    return torch.zeros(4096, dtype=torch.int32, device=put(np.zeros(1)).device)


def routed(x: Any, weight: Any, bias: Any = None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """`route` of arrays; its counters end at 0."""
    work = counters()
    options = {n: put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    bias = None if bias is None else put(bias)
    found = route(put(x), put(weight), bias, counters=work, **options)
    assert not work.any()
    return get(found.experts), get(found.weights)


@pytest.mark.parametrize("how", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize(
    ("count", "width", "total", "config"),
    [
        (1, 96, 8, RouteVectorConfig(4, 4)),
        (7, 100, 20, RouteVectorConfig(1, 2)),
        (63, 96, 20, RouteTileConfig(16, 32, 4, 2)),
        (200, 100, 12, RouteTileConfig(32, 64, 4, 2)),
    ],
    ids=str,
)
def test_routers_are_the_reference(count, width, total, config, how):
    x, weight = normal(1, count, width, dtype=FLOAT32), normal(2, total, width, dtype=FLOAT32)
    weight *= np.float32(width**-0.5)
    bias, choice = normal(3, total, dtype=FLOAT32), normal(4, total, dtype=FLOAT32, scale=0.1)
    weight[5], bias[5] = weight[3], bias[3]  # ties, of which the first goes before the second
    how = {"chosen": 3, **how, "choice_bias": choice if how["score"] == "sigmoid" else None}
    found = routed(x, weight, bias, config=config, **how)
    wanted = oracles.route(x, weight, bias, **how)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert_close(found[1], wanted[1].astype(np.float32), FLOAT32, length=width)


@pytest.mark.parametrize("config", [RouteVectorConfig(2, 4), RouteTileConfig(16, 32, 4, 2)])
def test_equal_scores_choose_the_lowest_numbers(config):
    x, weight = np.ones((2, 96), np.float32), np.zeros((5, 96), np.float32)
    weight[4] = 1
    found, _ = routed(x, weight, chosen=3, config=config, **PLAIN)
    np.testing.assert_array_equal(found, [[0, 1, 4]] * 2)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter's NumPy
@pytest.mark.parametrize("config", [RouteVectorConfig(2, 4), RouteTileConfig(16, 32, 4, 2)])
def test_rows_of_nan_choose_experts_that_there_are(config):
    x = normal(1, 3, 96, dtype=FLOAT32)
    weight = normal(2, 5, 96, dtype=FLOAT32)
    alone = routed(x, weight, chosen=3, config=config, **PLAIN)
    x[1] = math.nan
    found = routed(x, weight, chosen=3, config=config, **PLAIN)
    np.testing.assert_array_equal(found[0][1], [0, 1, 2])
    for mine, its in zip(found, alone, strict=True):
        np.testing.assert_array_equal(mine[[0, 2]], its[[0, 2]])


def test_a_router_norms_its_rows(dtype):
    x, weight = 2 * normal(1, 3, 100, dtype=dtype), normal(2, 20, 100, dtype=dtype, scale=0.1)
    g = gain(dtype, 100)
    norm = NormArguments("rms", put(g), None, EPS)
    found = routed(x, weight, chosen=3, norm=norm, **PLAIN)
    wanted = oracles.route(meaning.rms_norm(x, g, EPS), weight, chosen=3, **PLAIN)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert_close(found[1], wanted[1].astype(np.float32), FLOAT32, length=100)


def make(dtype: np.dtype, total: int, width: int, features: int, gated: bool = True) -> dict:
    """Weights and biases of experts."""
    out = 2 * features if gated else features
    return {
        "up": normal(2, total, out, width, dtype=dtype, scale=width**-0.5),
        "down": normal(3, total, width, features, dtype=dtype, scale=features**-0.5),
        "up_bias": normal(4, total, out, dtype=dtype),
        "down_bias": normal(5, total, width, dtype=dtype),
    }


def make_routing(count: int, total: int, k: int, seed: int = 6) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    experts = np.sort(np.argsort(random.random((count, total)), -1)[:, :k], -1)
    return experts.astype(np.int32), random.random((count, k), np.float32)


def hidden(
    x: np.ndarray,
    up: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    gated: bool,
    limit: float | None,
    offset: float,
) -> np.ndarray:
    """Hidden values of rows of x, float32."""
    y = meaning.matmul(x, up, bias)
    gate, u = np.split(y, 2, -1) if gated else (y, None)
    if limit is not None:
        gate, u = np.minimum(gate, limit), None if u is None else np.clip(u, -limit, limit)
    gate = meaning.activation(gate, activation)
    return gate if u is None else gate * (u + np.float32(offset))


def wanted_of(
    x: np.ndarray,
    w: dict,
    routing: tuple[np.ndarray, np.ndarray],
    residual: np.ndarray | None = None,
    shared: tuple | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
    limit: float | None = None,
    offset: float = 0.0,
) -> np.ndarray:
    """What the experts make of x, one after another."""
    how = (activation, gated, limit, offset)
    y = np.zeros((len(x), w["down"].shape[1]), np.float32)
    for t, (chosen, weights) in enumerate(zip(*routing, strict=True)):
        for e, weight in zip(chosen, weights, strict=True):
            bias = None if w.get("up_bias") is None else w["up_bias"][e]
            h = hidden(x[t : t + 1], w["up"][e], bias, *how).astype(x.dtype)
            bias = None if w.get("down_bias") is None else w["down_bias"][e]
            y[t] += weight * meaning.matmul(h, w["down"][e], bias)[0]
    if shared is not None:
        up, down, gate = shared
        h = hidden(x, up, None, *how)
        if gate is not None:
            h = h / (1 + np.exp(-meaning.matmul(x, gate[None])))
        y += meaning.matmul(h.astype(x.dtype), down)
    return y if residual is None else y + residual.astype(np.float32)


def run(
    x: np.ndarray, w: dict, routing: tuple, shared: tuple | None = None, **options: Any
) -> np.ndarray:
    """`experts` of arrays; its counters end at 0."""
    names = ("activation", "gated", "limit", "offset")
    how = {name: options.pop(name) for name in names if name in options}
    work = counters()
    parts = None if shared is None else Shared(*(None if p is None else put(p) for p in shared))
    placed = {name: None if part is None else put(part) for name, part in w.items()}
    options = {n: put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    y = experts(
        put(x),
        Mixture(**placed, **how, shared=parts),
        Routing(*map(put, routing)),
        counters=work,
        **options,
    )
    assert not work.any()
    return get(y)


SHAPES = "count", "width", "features", "total", "k", "config"
FEW = [
    (1, 96, 40, 5, 3, ExpertsVectorConfig(16, 4, 32, 64, 4)),
    (2, 100, 40, 5, 2, ExpertsVectorConfig(8, 4, 16, 16, 4)),
    (7, 96, 63, 9, 1, ExpertsVectorConfig(16, 2, 32, 32, 2)),
]
MANY = [
    (7, 96, 40, 5, 3, TILES),
    (63, 100, 40, 5, 3, TILES._replace(m=32, k=64)),
    (200, 96, 63, 9, 2, TILES._replace(m=64, n=64, down_n=32)),
]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(SHAPES, FEW + MANY, ids=str)
def test_experts_are_the_reference(dtype, count, width, features, total, k, config):
    x, w = normal(1, count, width, dtype=dtype), make(dtype, total, width, features)
    routing = make_routing(count, total, k)
    residual = normal(7, count, width, dtype=dtype)
    partial = normal(8, count, width, dtype=FLOAT32)
    found = run(x, w, routing, residual=residual, partial=partial, config=config)
    # Many pairs' results are rounded before they are summed, hidden values always.
    expected = wanted_of(x, w, routing, residual) + partial
    assert_close(found, expected, dtype, length=width + features, roundings=3)


KINDS = {
    "gpt-oss": GPT_OSS,
    "no gate": {"activation": "relu2", "gated": False},
    "no bias": {"activation": "gelu"},
}


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("config", [FEW[0][-1], TILES], ids=["few", "many"])
def test_hidden_values_are_the_reference(how, config):
    x = 2 * normal(1, 4, 96, dtype=FLOAT32)
    w = make(FLOAT32, 5, 96, 40, how.get("gated", True))
    if how["activation"] == "gelu":
        w |= {"up_bias": None, "down_bias": None}
    routing = make_routing(4, 5, 3)
    found = run(x, w, routing, config=config, **how)
    assert_close(found, wanted_of(x, w, routing, **how), FLOAT32, length=136)


@pytest.mark.parametrize(("wide", "gate"), [(40, False), (100, True), (17, True)], ids=str)
def test_an_expert_of_all_tokens_is_added(wide, gate):
    x, w = normal(1, 2, 96, dtype=FLOAT32), make(FLOAT32, 5, 96, 40)
    routing = make_routing(2, 5, 3)
    shared = (
        normal(8, 2 * wide, 96, dtype=FLOAT32, scale=0.1),
        normal(9, 96, wide, dtype=FLOAT32, scale=0.1),
        normal(10, 96, dtype=FLOAT32, scale=0.1) if gate else None,
    )
    g = gain(FLOAT32, 96)
    norm = NormArguments("rms", put(g), None, EPS)
    config = ExpertsVectorConfig(4, 4, 4, 16, 4)
    found = run(x, w, routing, shared, norm=norm, config=config)
    normed = meaning.rms_norm(x, g, EPS)
    assert_close(found, wanted_of(normed, w, routing, shared=shared), FLOAT32, length=256)


@pytest.mark.parametrize("count", [2, 7, 63])
def test_no_bit_depends_on_experts_that_are_not_chosen(count):
    x, w = normal(1, count, 96, dtype=FLOAT32), make(FLOAT32, 9, 96, 40)
    chosen, weights = make_routing(count, 6, 3)
    chosen += (chosen >= 2).astype(np.int32) + (chosen >= 4)  # 2 and 5 are chosen by none
    assert not {2, 5} & set(chosen.ravel())
    config = FEW[0][-1] if is_few(count) else TILES
    found = run(x, w, (chosen, weights), config=config)
    for part in w.values():
        part[[2, 5]] = math.nan
    np.testing.assert_array_equal(run(x, w, (chosen, weights), config=config), found)


@pytest.mark.parametrize("config", [FEW[0][-1], TILES], ids=["few", "many"])
def test_devices_that_share_experts_out_add_up_to_all(config):
    """Experts elsewhere are not read: the last device's own, beside one of all tokens, is NaN."""
    x, w = normal(1, 4, 96, dtype=FLOAT32), make(FLOAT32, 6, 96, 40)
    routing = make_routing(4, 5, 3)
    wide = (normal(8, 34, 96, dtype=FLOAT32, scale=0.1), normal(9, 96, 17, dtype=FLOAT32), None)
    shared = wide if isinstance(config, ExpertsVectorConfig) else None
    w["up"][5] = math.nan

    def part(first: int, stop: int, shared: tuple | None = None) -> np.ndarray:
        own = {name: array[first:stop] for name, array in w.items()}
        own["own"] = np.array([first, stop], np.int32)
        return run(x, own, routing, shared, config=config)

    found = part(0, 2, shared) + part(2, 5) + part(5, 6)
    assert_close(found, wanted_of(x, w, routing, shared=shared), FLOAT32, length=136)
    assert not part(5, 6).any()


@pytest.mark.parametrize("config", [FEW[0][-1], TILES], ids=["few", "many"])
def test_no_bit_depends_on_other_tokens(config):
    x, w = normal(1, 7, 96, dtype=FLOAT32), make(FLOAT32, 5, 96, 40)
    routing = make_routing(7, 5, 3)
    found = run(x, w, routing, config=config)
    other, others = normal(11, 7, 96, dtype=FLOAT32), make_routing(7, 5, 3, seed=12)
    other[3] = x[3]
    for mine, its in zip(others, routing, strict=True):
        mine[3] = its[3]
    other[5] = math.nan
    np.testing.assert_array_equal(run(other, w, others, config=config)[3], found[3])


@pytest.mark.parametrize("config", [FEW[0][-1], TILES], ids=["few", "many"])
def test_one_expert_may_have_all_tokens(config):
    x, w = normal(1, 20, 96, dtype=FLOAT32), make(FLOAT32, 5, 96, 40)
    routing = np.full((20, 1), 3, np.int32), np.ones((20, 1), np.float32)
    found = run(x, w, routing, config=config)
    assert_close(found, wanted_of(x, w, routing), FLOAT32, length=136)


def test_products_of_others_give_what_tiles_give():
    """As torch's grouped_mm takes part."""

    def product(x: Any, weight: Any, ends: Any) -> Any:
        parts = np.split(get(x), get(ends)[:-1])
        rows = [meaning.matmul(p, m) for p, m in zip(parts, get(weight), strict=True)]
        return put(np.concatenate(rows).astype(np.float32))

    x, w = 2 * normal(1, 30, 96, dtype=FLOAT32), make(FLOAT32, 5, 96, 40)
    routing = make_routing(30, 5, 3)
    residual = normal(7, 30, 96, dtype=FLOAT32)
    found = run(x, w, routing, residual=residual, config=TILES, product=product, **GPT_OSS)
    expected = wanted_of(x, w, routing, residual, **GPT_OSS)
    assert_close(found, expected, FLOAT32, length=136)


def test_pairs_in_the_order_of_experts_keep_their_own():
    chosen = np.array([[1, 4], [0, 4], [1, 4], [1, 2], [4, 5]], np.int32)
    order = make_order(put(chosen), 6, 2, counters())
    flat = chosen.ravel()
    expected = np.argsort(flat, kind="stable")
    np.testing.assert_array_equal(get(order.pairs), expected)
    np.testing.assert_array_equal(get(order.places)[expected], np.arange(10))
    np.testing.assert_array_equal(get(order.ends), np.cumsum(np.bincount(flat, minlength=6)))
    blocks = [(0, 0), (1, 1), (1, 3), (2, 4), (4, 5), (4, 7), (5, 9)]
    experts, firsts = get(order.blocks)
    assert list(zip(experts[:7], firsts[:7], strict=True)) == blocks
    assert (experts[7:] == -1).all()
    here = make_order(put(chosen), 3, 2, counters(), put(np.array([2, 5], np.int32)))
    np.testing.assert_array_equal(get(here.pairs)[:5], [7, 1, 3, 5, 8])
    np.testing.assert_array_equal(get(here.ends), [1, 1, 5])
    assert list(get(here.blocks)[0][:4]) == [0, 2, 2, -1]


def test_what_cannot_be_run_is_refused():
    x, w = normal(1, 3, 96, dtype=FLOAT32), make(FLOAT32, 5, 96, 40)
    chosen, weights = make_routing(3, 5, 3)
    with pytest.raises(ValueError, match="is expected"):
        run(x[:, :90], w, (chosen, weights))
    with pytest.raises(ValueError, match="int32 experts"):
        run(x, w, (chosen.astype(np.int64), weights))
    with pytest.raises(ValueError, match="for x"):
        run(x[:2], w, (chosen, weights))
    norm = NormArguments("rms", put(gain(FLOAT32, 96)), None, EPS)
    with pytest.raises(ValueError, match="no place for a norm"):
        run(x, w, (chosen, weights), config=TILES, norm=norm)
    with pytest.raises(ValueError, match="chosen"):
        routed(x, w["up"][0], chosen=17, **PLAIN)
    with pytest.raises(ValueError, match="groups"):
        routed(x, w["up"][0][:10], chosen=6, groups=2, groups_chosen=1, **PLAIN)
