"""The runners' slots and cache: growth on demand, with sequences live."""

import contextlib
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import dualinfer
from dualinfer.backends import slots
from dualinfer.backends.base import (
    NO_TOKEN,
    Piece,
    Request,
    Sampling,
    SamplingFeatures,
)
from dualinfer.backends.slots import LiveSlots, bucket, sampling_rows
from dualinfer.model.families import describe_model
from dualinfer.ops.caches import Room, cache_bytes, cache_specs

from .cases import make_model
from .models import BACKENDS, random_ids, relative_rms, slow_but


def request(tokens, new):
    return Request(np.zeros(tokens, np.int32), new)


def test_live_slots_reserve_little_and_reach_what_was_asked():
    live = LiveSlots()
    live.read([Piece.whole(request(10, 100_000), 0), Piece.whole(request(3, 5), 2)])
    assert (live.width, live.reach, live.reserved) == (4, 10, slots.RESERVED)
    live.advance(32)
    assert live.reach == 42
    live.remove([0, 1])
    assert (len(live), live.width, live.reach, live.reserved) == (1, 4, 7, 7)


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
    steps.drop(5)
    steps.drop(2)
    assert 2 not in steps and len(alive) == len(steps) == 2 and len(waits) == 3


def test_buckets_are_the_next_powers_of_two():
    counts = (0, 1, 2, 3, 4, 5, 63, 64, 65, 1000, 1024, 1025)
    assert [bucket(n) for n in counts] == [1, 1, 2, 4, 4, 8, 64, 64, 128, 1024, 1024, 2048]
    assert [bucket(n, 16) for n in (0, 1, 16, 17)] == [16, 16, 16, 32]


def test_requests_become_columns():
    tokens = np.array([4, 5], np.int32)
    drawn = Sampling(True, 0.5, 2**40, 0.9, 0.1, 1.5, seed=(5 << 32) + 2**31 + 7, return_index=2)
    unused = Sampling(False, 0.5, 3, 0.9, 0.1, 0.8, seed=2**64 - 1)
    tiny = Sampling(True, 1e-300, seed=2**32 - 1, return_index=1)
    rows = sampling_rows(
        [
            Request(tokens, 9, 2**40, (3, 8), drawn),
            Request(tokens, 1, 0, (), unused),
            Request(tokens, 20, 1, (6,), tiny),
        ],
        eos_width=3,
    )
    most, none = 2**31 - 1, NO_TOKEN
    smallest = float(np.finfo(np.float32).tiny)
    expected = {
        "noise": [True, False, True],
        "temperature": [0.5, 1.0, smallest],
        "top_k": [most, 0, 0],
        "top_p": [0.9, 1.0, 1.0],
        "min_p": [0.1, 0.0, 0.0],
        "penalty": [1.5, 0.8, 1.0],
        "seed_low": [2**31 + 7, 2**32 - 1, 2**32 - 1],
        "seed_high": [5, 2**32 - 1, 0],
        "return_index": [2, 0, 1],
        "minimum": [most, 0, 1],
        "remaining": [9, 1, 20],
        "eos": [[3, 8, none], [none] * 3, [6, none, none]],
    }
    assert rows.keys() == expected.keys()
    for name, column in expected.items():
        np.testing.assert_array_equal(rows[name], np.array(column, rows[name].dtype), name)


def test_a_step_has_what_some_request_needs():
    def needs(*samplings, minimum=0, eos_ids=(2,)):
        token = np.zeros(1, np.int32)
        requests = [Request(token, 5, minimum, eos_ids, s) for s in samplings]
        return SamplingFeatures.of(requests)

    greedy = Sampling(top_k=4, top_p=0.5, min_p=0.5)  # which shape nothing
    assert needs(greedy) == SamplingFeatures()
    assert needs(greedy, Sampling(True)) == SamplingFeatures(noise=True)
    for filters in ({"top_k": 1}, {"top_p": 0.999}, {"min_p": 0.001}):
        assert needs(Sampling(True, **filters), greedy) == SamplingFeatures(True, filters=True)
    for penalty in (0.9, 1.1):
        penalised = Sampling(repetition_penalty=penalty)
        assert needs(greedy, penalised) == SamplingFeatures(penalty=True)
    assert needs(greedy, minimum=1) == SamplingFeatures(hold_eos=True)
    assert needs(greedy, minimum=1, eos_ids=()) == SamplingFeatures()


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "qwen3"])
def test_cache_bytes_are_those_of_hfs_cache(name, hf_model):
    torch = pytest.importorskip("torch")
    model = hf_model(name)
    spec, _ = describe_model(model.config.to_dict(), [type(model).__name__])
    with torch.no_grad():
        layers = model(torch.from_numpy(random_ids(3, 5)), use_cache=True).past_key_values.layers
    theirs = sum(x.numel() * 4 for layer in layers for x in (layer.keys, layer.values))
    assert cache_bytes(cache_specs(spec), Room(3, 5), itemsize=4) == theirs


@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_grows_under_live_sequences_without_changing_text(
    backend, hf_model, engine_of, monkeypatch
):
    expected = [
        engine_of("llama-gqa", backend).generate(p, max_new_tokens=n, do_sample=False)
        for p, n in ((random_ids(1, 5), 60), (random_ids(2, 20, seed=1), 30))
    ]
    monkeypatch.setattr(slots, "RESERVED", 8)
    monkeypatch.setattr(slots, "SMALLEST_CACHE", 16)
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


@pytest.mark.parametrize("name", slow_but(["bert-masked"], ["llama-gqa", "bert-masked"]))
def test_jax_gives_the_same_in_blocks_and_parts_as_on_a_gpu(name, monkeypatch):
    """Nine layers in two parts; and text that ends within a block of eight steps."""
    pytest.importorskip("jax")
    from dualinfer.backends.jax import whole
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

    parts, full, text = results()
    assert parts == [range(9)]
    monkeypatch.setattr(whole, "Steps", lambda spec, ops, _: Steps(spec, ops, on_gpu=True))
    parts, cut, text_in_blocks = results()
    assert [len(part) for part in parts] == [4, 5]
    for one, other in zip(full, cut, strict=True):
        assert relative_rms(other, one) < 1e-6
    for one, other in zip(text, text_in_blocks, strict=True):
        np.testing.assert_array_equal(one, other)


def test_jax_has_one_program_for_however_many_calls_share_a_step(engine_of, caplog):
    import jax

    runner = engine_of("llama-gqa", "jax").runner
    tokens = random_ids(1, 6)[0].astype(np.int32)
    slots = list(range(8))
    runner.prefill_scores([[Request(tokens, 9)] * len(slots)], [slots])
    try:
        runner.decode_scores([[5], [2, 0]], [[7], [8, 9]])
        with jax.log_compiles():
            for groups in ([[0], [1], [2]], [[7], [3, 4]], [[slot] for slot in slots]):
                own = [[10 + slot for slot in group] for group in groups]
                found = runner.decode_scores(groups, own)
                assert [x.shape[0] for x in found] == [len(group) for group in groups]
    finally:
        runner.release(slots)
    assert not [x.getMessage() for x in caplog.records if "ompil" in x.getMessage()]


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
