"""Routers and experts in plain ops, on both backends and exactly, against the reference."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dualinfer.blocks.clamped import Clamped
from dualinfer.model.spec import Experts, Mixing, Mlp, Router
from dualinfer.model.weights import Weight
from dualinfer.ops import exact, mixtures
from dualinfer.ops.contract import Routing
from dualinfer.ops.schemes import BlockArithmetic

from ..models import BACKENDS, relative_rms
from . import oracles

EVERYWHERE = (*BACKENDS, "exact")

ROUTERS = {
    "softmax": Router(3, over_sum=0.0),
    "softmax as it is": Router(2, scale=0.5),
    "sigmoid, biased": Router(3, "sigmoid", over_sum=1e-20, scale=2.5),
    "chosen": Router(4, "chosen"),
    "gates": Router(2, "gates"),
    "sparse": Router(2, "sparse", jitter=0.2),
    "sparse, ties alone": Router(2, "sparse"),
    "best of a group": Router(3, groups=4, groups_chosen=2),
    "two best of a group": Router(4, "sigmoid", 3, 2, "two", 1e-20),
}


def backend(name):
    """NumPy to arrays, and Maths and schemes of a framework."""
    if name == "exact":
        return SimpleNamespace(
            put=np.asarray, jit=lambda f: f, maths=exact.MATHS, schemes=BlockArithmetic(exact.MATHS)
        )
    maths = importlib.import_module(f"dualinfer.backends.{name}.maths").MATHS
    schemes = importlib.import_module(f"dualinfer.backends.{name}.ops.schemes").SCHEMES
    if name == "torch":
        import torch

        return SimpleNamespace(put=torch.tensor, jit=lambda f: f, maths=maths, schemes=schemes)
    import jax

    return SimpleNamespace(put=jax.numpy.asarray, jit=jax.jit, maths=maths, schemes=schemes)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("case", ROUTERS)
def test_a_router_chooses_as_the_reference_does(case, name):
    router, own = ROUTERS[case], backend(name)
    biased = "biased" in case
    x, weight = normal(1, 2, 9, 13), normal(2, 12, 13)
    weight[5] = weight[3]  # ties, of which the first goes before the second
    bias, choice_bias = (normal(3, 12), normal(4, 12)) if biased else (None, None)
    rule = dict(vars(router))
    over = rule.pop("over_sum")
    rule |= {"renormalized": over is not None, "eps": over or 0.0}
    experts, weights = oracles.route(x, weight, bias, choice_bias, **rule)
    put = [None if a is None else own.put(a) for a in (bias, choice_bias)]
    held = Weight(own.put(weight), ("experts", "embed"))
    found = own.jit(lambda x: mixtures.route(own.schemes, x, held, router, *put))(own.put(x))
    np.testing.assert_array_equal(np.asarray(found.experts), experts)
    assert found.experts.dtype == own.put(np.zeros(1, np.int32)).dtype
    assert relative_rms(found.weights, weights) < 1e-6
    assert (np.diff(experts, axis=-1) > 0).all()


@pytest.mark.parametrize("name", EVERYWHERE)
def test_an_expert_of_all_tokens_is_blended_with_those_chosen(name):
    own, (experts, weights) = backend(name), (np.array([[0, 3], [2, 4]], np.int32), normal(1, 2, 2))
    sides = normal(2, 2, 2)
    found = mixtures.blend(
        own.maths, Routing(own.put(experts), own.put(weights)), Routing(None, own.put(sides)), 5
    )
    numbers, factors = oracles.blend(experts, weights, sides, 5)
    np.testing.assert_array_equal(np.asarray(found.experts), numbers)
    assert relative_rms(found.weights, factors) < 1e-6 and numbers[0].tolist() == [0, 3, 5]


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_an_expert_that_is_full_gives_nothing(name, masked, packed):
    own, rng = backend(name), np.random.default_rng(3)
    experts = rng.permuted(np.tile(np.arange(4), (2, 21, 1)), axis=-1)[..., :2].astype(np.int32)
    experts, weights = np.sort(experts), abs(normal(1, 2, 21, 2))
    mask = rng.random((2, 21)) < 0.8 if masked else None
    segments = np.repeat([[0, 1, 2]], [1, 13, 7], axis=1).repeat(2, 0) if packed else None
    where = [None if x is None else own.put(x) for x in (mask, segments)]
    found = mixtures.fill(own.maths, Routing(own.put(experts), own.put(weights)), 4, 3, *where)
    expected = oracles.fill(experts, weights, 3, mask, segments)
    np.testing.assert_array_equal(np.asarray(found.experts), experts)
    np.testing.assert_array_equal(np.asarray(found.weights), expected)
    assert 0 < (expected == 0).mean() < 0.9


GATED = Experts(7, Mlp(11, "silu", True), Router(3))
MIXTURES = {
    "gated": GATED,
    "not gated": replace(GATED, each=Mlp(11, "relu2", False)),
    "clamped": replace(GATED, each=Mlp(11, "quick_gelu", True), mixing=Clamped(0.9, 1.0)),
}


def experts_case(mixture, rows):
    wide = (2 if mixture.gated else 1) * mixture.ffn
    w = {"up": normal(5, 7, wide, 13), "down": normal(6, 7, 13, mixture.ffn)}
    biases = {"up": normal(7, 7, wide), "down": normal(8, 7, 13)} if mixture.mixing else {}
    x, weights = normal(9, rows, 13), abs(normal(10, rows, 3))
    rng = np.random.default_rng(11)
    # Expert 6 gets no row, and expert 2 every one.
    pairs = [sorted([2, *rng.choice([0, 1, 3, 4, 5], 2, replace=False)]) for _ in range(rows)]
    return w, biases, x, Routing(np.array(pairs, np.int32), weights)


def run(own, mixture, w, biases, x, routing):
    held = {
        **{f"experts.{k}.weight": Weight(own.put(a), ("experts", "", "")) for k, a in w.items()},
        **{f"experts.{k}.bias": own.put(a) for k, a in biases.items()},
    }
    routing = Routing(*map(own.put, routing))

    def call(x, routing):
        y = mixtures.experts(own.schemes, x, mixture, held, routing)
        if not biases:
            return y
        return y + mixtures.biases(own.maths, held["experts.down.bias"], routing)

    return np.asarray(own.jit(call)(own.put(x), routing))


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize(("case", "rows"), [("gated", 1), ("not gated", 5), ("clamped", 40)])
def test_experts_give_what_the_reference_gives_and_no_unchosen_one_is_read(case, rows, name):
    """NaN in whatever a row did not choose changes no bit of it."""
    own, mixture = backend(name), MIXTURES[case]
    w, biases, x, routing = experts_case(mixture, rows)
    how = {"activation": mixture.activation, "gated": mixture.gated}
    mixing = mixture.mixing or Mixing()
    how |= {"limit": mixing.clamp, "offset": mixing.offset}
    parts = [w["up"], w["down"], biases.get("up"), biases.get("down")]
    found = run(own, mixture, w, biases, x, routing)
    assert relative_rms(found, oracles.experts(x, *parts, *routing, **how)) < 1e-6
    for held in (w, biases):
        for array in held.values():
            array[6] = np.nan
    np.testing.assert_array_equal(run(own, mixture, w, biases, x, routing), found)
    alone = Routing(routing.experts[:1], routing.weights[:1])
    first = run(own, mixture, w, biases, x[:1], alone)
    for held in (w, biases):
        for array in held.values():
            array[[e for e in range(7) if e not in routing.experts[0]]] = np.nan
    np.testing.assert_array_equal(run(own, mixture, w, biases, x[:1], alone), first)


def test_pairs_take_copies_of_their_experts_while_a_graph_is_captured(monkeypatch):
    """The form without questions to the host, which a CPU takes only here."""
    import torch

    own = backend("torch")
    w, biases, x, routing = experts_case(GATED, 5)
    found = run(own, GATED, w, biases, x, routing)

    def one_by_one(chosen, total):
        here = chosen.clamp(max=total - 1)
        yield from zip(here.split(1), torch.arange(len(chosen)).split(1), strict=True)

    part = in_parts(own, w, x, routing, [(0, 4), (4, 7)])
    from dualinfer.backends.torch import maths

    monkeypatch.setattr(maths, "_groups", one_by_one)
    assert relative_rms(run(own, GATED, w, biases, x, routing), found) < 1e-6
    again = in_parts(own, w, x, routing, [(0, 4), (4, 7)])
    assert relative_rms(again, part) < 1e-6


def in_parts(own, w, x, routing, parts):
    """What each of the devices gives that have experts from the first to before the second."""
    found = []
    for part in parts:
        held = {
            f"experts.{k}.weight": Weight(own.put(a[slice(*part)]), ("experts", "", ""))
            for k, a in w.items()
        }
        placed = Routing(*map(own.put, routing))
        found.append(
            np.asarray(mixtures.experts(own.schemes, own.put(x), GATED, held, placed, own=part))
        )
    return np.stack(found)


@pytest.mark.parametrize("case", EVERYWHERE)
def test_devices_that_share_experts_out_add_up_to_all(case):
    """No device reads an expert that its tokens did not choose, and one may have none of them."""
    own = backend(case)
    w, _, x, routing = experts_case(GATED, 5)
    chosen = np.asarray(routing.experts)
    routing = Routing(np.minimum(chosen, 5) + (chosen >= 5), routing.weights)  # never the fifth
    routing = Routing(np.sort(routing.experts, -1).astype(np.int32), routing.weights)
    whole = run(own, GATED, w, {}, x, routing)
    parts = in_parts(own, w, x, routing, [(0, 3), (3, 5), (5, 7), (5, 6)])
    assert relative_rms(parts[:3].sum(0), whole) < 1e-6
    assert not parts[3].any()
    for array in w.values():
        array[5] = np.nan
    again = in_parts(own, w, x, routing, [(0, 3), (3, 5), (5, 7)])
    np.testing.assert_array_equal(again, parts[:3])
