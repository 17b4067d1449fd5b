"""The runners' slots and cache: growth on demand, with sequences live."""

import contextlib
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import dualinfer
from dualinfer.backends import base
from dualinfer.backends.base import LiveSlots, Request, Sampling, sampling_rows

from .models import BACKENDS, make_model, random_ids, relative_rms


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


def test_seeds_are_split_into_words_of_32_bits():
    seeds = (5 << 32) + 7, 2**64 - 1, 3
    requests = [Request(np.zeros(1, np.int32), 1, sampling=Sampling(seed=s)) for s in seeds]
    rows = sampling_rows(requests, 1)
    assert rows["seed_low"].tolist() == [7, 2**32 - 1, 3]
    assert rows["seed_high"].tolist() == [5, 2**32 - 1, 0]


def test_graphs_of_steps_are_bounded_and_the_least_used_goes_first(monkeypatch):
    from dualinfer.backends.torch import graphs

    alive, waits = weakref.WeakSet(), []

    class Graph:
        def __init__(self):
            alive.add(self)

        def replay(self):
            pass

    cuda = SimpleNamespace(
        CUDAGraph=Graph,
        graph_pool_handle=lambda: 1,
        graph=lambda graph, **how: contextlib.nullcontext(),
        synchronize=lambda: waits.append(1),
    )
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda))
    steps = graphs.StepGraphs(most=3)
    for key in (1, 2, 3):
        steps.capture(key, lambda: None)
    assert waits == []
    steps.replay(1)
    steps.capture(4, lambda: None)
    assert waits == [1]  # the one that goes may be running
    assert [key in steps for key in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(alive) == len(steps) == 3
    steps.capture(2, lambda: None)
    assert graphs.graph_facts(steps, None) == {
        "compilations": 5,
        "executables": 3,
        "evictions": 2,
        "executable_bytes": 0,
    }


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


@pytest.mark.parametrize("name", ["llama-gqa", "bert-masked"])
def test_jax_gives_the_same_in_blocks_and_parts_as_on_a_gpu(name, monkeypatch):
    """Nine layers in two parts; and text that ends within a block of eight steps."""
    pytest.importorskip("jax")
    from dualinfer.backends.jax import runner
    from dualinfer.backends.jax.steps import Steps

    model = make_model(name, num_hidden_layers=9)
    ids, mask = random_ids(2, 7), np.ones((2, 7), int)
    mask[1, 4:] = 0

    def results() -> tuple[list, list, list]:
        with dualinfer.init_inference(model, backend="jax", dtype="fp32") as engine:
            parts = engine.runner.steps.parts
            outputs = engine(ids), engine(ids, attention_mask=mask)
            kept = engine(ids, output_hidden_states=True).hidden_states
            assert len(kept) == 10
            text = []
            if engine.can_generate():
                for new in (5, 21):
                    text.append(engine.generate(ids, max_new_tokens=new, do_sample=False))
                end = int(text[-1][0, 7 + 10])
                how = {"max_new_tokens": 21, "do_sample": False, "pad_token_id": 0}
                text.append(engine.generate(ids, eos_token_id=end, **how))
            return parts, [*(o.logits for o in outputs), *kept], text

    parts, whole, text = results()
    assert parts == [range(9)]
    monkeypatch.setattr(runner, "Steps", lambda spec, ops, _: Steps(spec, ops, on_gpu=True))
    parts, cut, text_in_blocks = results()
    assert [len(part) for part in parts] == [4, 5]
    for one, other in zip(whole, cut, strict=True):
        assert relative_rms(other, one) < 1e-6
    for one, other in zip(text, text_in_blocks, strict=True):
        np.testing.assert_array_equal(one, other)


def test_jax_step_of_a_state_that_marks_tokens_is_one_of_its_own(hf_model):
    """A penalised sequence leaves the marks behind, for which no earlier step was compiled."""
    pytest.importorskip("jax")
    options = {"max_new_tokens": 12, "do_sample": False}
    ids = random_ids(2, 5)
    how = {"backend": "jax", "dtype": "fp32", "kernel_inject": True}
    with dualinfer.init_inference(hf_model("llama-mqa"), **how) as engine:
        expected = np.asarray(engine.generate(ids, **options))
        plain = engine.stream(ids[:1], **options)
        found = [next(plain)]
        penalised = engine.stream(ids[1:], repetition_penalty=1.3, **options)
        found += [next(penalised) and next(plain)]
        penalised.close()
        assert [*found, *plain] == expected[0, 5:].tolist()
