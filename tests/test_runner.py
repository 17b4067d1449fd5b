"""The runners' slots and cache: growth on demand, with sequences live."""

import numpy as np
import pytest

import dualinfer
from dualinfer.backends import base
from dualinfer.backends.base import LiveSlots, Request

from .models import BACKENDS, random_ids


def request(tokens, new):
    return Request(np.zeros(tokens, np.int32), new)


def test_live_slots_reserve_little_and_reach_what_was_asked():
    live = LiveSlots()
    live.add([0, 2], [request(10, 100_000), request(3, 5)])
    assert (live.width, live.reach, live.reserved) == (4, 10, base.RESERVED)
    live.advance(32)
    assert live.reach == 42
    live.remove([0, 1])
    assert (len(live), live.width, live.reach, live.reserved) == (1, 4, 7, 7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_grows_under_live_sequences_without_changing_text(
    backend, hf_model, engine_of, monkeypatch
):
    expected = [
        engine_of("llama-gqa", backend).generate(p, max_new_tokens=n, do_sample=False)
        for p, n in ((random_ids(1, 5), 60), (random_ids(2, 20, seed=1), 30))
    ]
    monkeypatch.setattr(base, "RESERVED", 8)
    for module in ("torch", "jax"):
        monkeypatch.setattr(f"dualinfer.backends.{module}.runner.SMALLEST_CACHE", 16)
    options = {"backend": backend, "dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(hf_model("llama-gqa"), **options) as engine:
        stream = engine.stream(random_ids(1, 5), max_new_tokens=60, do_sample=False)
        first = [next(stream) for _ in range(3)]
        small = engine.report().cache_bytes
        second = engine.generate(random_ids(2, 20, seed=1), max_new_tokens=30, do_sample=False)
        first += list(stream)
        assert engine.report().cache_bytes > small
        np.testing.assert_array_equal(second, expected[1])
        assert first == expected[0][0, 5:].tolist()
