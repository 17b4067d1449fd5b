"""A small soak: see tests/soak.py."""

import asyncio

import pytest

import dualinfer

from .soak import soak


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_every_request_ends_in_one_state_and_nothing_is_left(backend):
    model = dualinfer.embedded_model()
    with dualinfer.init_inference(model, backend=backend, dtype="float32") as engine:
        reserved = engine.reserve(16, 128)
        found = asyncio.run(soak(engine, 120, 2048, 128, seed=0, seconds=1))
        assert engine.reserve(16, 128) == reserved
    kinds = {state.split(":")[0] for state in found["states"]}
    assert len(kinds) == 9 and {"disconnect: left", "deadline: late"} <= found["states"].keys()
    assert found["states"]["abort: cancelled"] > 0 and found["differing"] == 0
