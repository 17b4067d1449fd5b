"""A small soak: see tests/soak.py."""

import asyncio
import itertools

import pytest

import dualinfer

from .soak import asks_of, embedded_apart, soak

BACKENDS = ["torch", pytest.param("jax", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_request_ends_in_one_state_and_nothing_is_left(backend):
    model = dualinfer.embedded_model()
    asks = asks_of(120, 2048, 128, seed=0, seconds=1)
    with dualinfer.init_inference(model, backend=backend, dtype="float32") as engine:
        reserved = engine.reserve(16, 128)
        found, *again = [asyncio.run(soak(engine, own)) for own in (asks, *[asks[:16]] * 4)]
        assert engine.reserve(16, 128) == reserved
    kinds = {state.split(":")[0] for state in found["states"]}
    assert len(kinds) == 9 and {"disconnect: left", "deadline: late"} <= found["states"].keys()
    assert found["states"]["abort: cancelled"] > 0 and found["differing"] == 0
    for name in ("mib", "objects"):  # what is met for the first time grows once, a leak each round
        values = [round_[name] for round_ in again]
        grown = min(later - earlier for earlier, later in itertools.pairwise(values))
        assert grown <= 8, f"{name}: {values}"  # an object for two requests, 8 MiB


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_request_is_lost_where_the_engine_is_killed(backend):
    async def run():
        async with embedded_apart(backend, 8, 128) as engine:
            return await engine.soak(asks_of(64, 2048, 128, seed=1, seconds=0.5), 1)

    found = asyncio.run(run())
    assert found["states"]["whole: done"] > 12 and found["differing"] == 0
    assert found["kills"] == 1
