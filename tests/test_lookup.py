"""Tokens that are read before they are chosen: the text is that without them."""

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dualinfer
from dualinfer.engine import lookup
from dualinfer.engine.lookup import draft

from .cases import make_model
from .models import BACKENDS, random_ids, slow_but

NEW = 24
WORDS = list(range(5, 15))
# Of the first the text repeats what stands in it; the other one goes its own way.
ROWS = [WORDS * 3 + WORDS[:4], WORDS[::-1] * 2]
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
QUICK = ("llama-gqa", "mamba2", "qwen3_next with experts", "youtu", "bloom")
MORE = ("gemma2", "lfm2", "qwen2_moe", "falcon_h1", "jamba", "minimax with experts")
LOOKED_UP = {"prompt_lookup_num_tokens": 4}
FUSED = {"dtype": "fp32", "replace_with_kernel_inject": True}


@pytest.fixture(scope="module")
def engine(engine_of, request):
    return engine_of("llama-gqa", request.param)


both = pytest.mark.parametrize("engine", BACKENDS, indirect=True)


def watched(engine, monkeypatch):
    """The runner's calls, by name."""
    calls = []
    for name in ("decode_several", "decode_scores", "keep"):
        run = getattr(engine.runner, name)
        monkeypatch.setattr(
            engine.runner,
            name,
            lambda slots, tokens, run=run, name=name: (
                calls.append((name, len(slots))) or run(slots, tokens)
            ),
        )
    return calls


def new_of(engine, rows, **how):
    return np.asarray(engine.generate(rows, **(GREEDY | how)))[:, -NEW:]


# What is looked up


def test_what_followed_the_longest_end_the_last_time_is_the_draft():
    assert draft([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 3, 2) == [4, 8, 1]
    assert draft([1, 2, 3, 9, 2], 10, 2) == [3, 9, 2]  # by one token, where two are not there
    assert draft([1, 2, 3, 9, 2], 2, 2) == [3, 9]
    assert draft([7, 7, 7], 4, 2) == [7]
    assert draft([1, 2, 3], 4, 2) == draft([1], 4, 2) == draft([], 4, 2) == []


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 6), st.integers(1, 4))
def test_a_draft_is_what_a_search_by_hand_finds(text, most, longest):
    expected = []
    for size in range(min(longest, len(text) - 1), 0, -1):
        places = [i for i in range(len(text) - size) if text[i : i + size] == text[-size:]]
        if places:
            expected = text[places[-1] + size :][:most]
            break
    assert draft(text, most, longest) == expected


# Texts


@pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))
def test_a_text_that_repeats_itself_takes_fewer_passes(backend, monkeypatch):
    text = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"
    with dualinfer.init_inference(dualinfer.embedded_model(), backend=backend, **FUSED) as engine:
        how = {"max_new_tokens": 30, "do_sample": False}
        expected = engine.generate_text(text, **how)
        calls = watched(engine, monkeypatch)
        assert engine.generate_text(text, prompt_lookup_num_tokens=8, **how) == expected
    assert len([name for name, _ in calls if name != "keep"]) <= 20


@both
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "seed": 3, "temperature": 0.6, "top_k": 20},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.3},
        {"no_repeat_ngram_size": 9, "num_return_sequences": 2, "do_sample": True, "seed": [5]},
        {"logits_processor": [lambda ids, scores: scores * 0.5]},
    ],
    ids=["sampled", "penalties", "processors", "functions"],
)
def test_options_have_their_texts(engine, how):
    expected = new_of(engine, ROWS[:1], **how)
    np.testing.assert_array_equal(new_of(engine, ROWS[:1], **how, **LOOKED_UP), expected)


@pytest.mark.parametrize(
    ("name", "backend", "pool"),
    [
        *slow_but(QUICK, (*QUICK, *MORE), "torch", False),
        *slow_but((), (*QUICK, *MORE), "torch", True),
        *slow_but(("llama-gqa",), ("llama-gqa",), "jax", False),
        *slow_but((), ("mamba2",), "jax", True),
    ],
)
def test_drafts_that_are_right_wrong_and_in_part_right_change_no_text(
    name, backend, pool, monkeypatch
):
    """Of each kind of cache and state; drafts are of the text itself, with mistakes in it."""
    with dualinfer.init_inference(make_model(name), backend=backend, **FUSED) as engine:
        if pool:
            engine.reserve(3, 96)
        rows = [(random_ids(1, n, seed=n)[0] % 90 + 5).tolist() for n in (9, 5)]
        texts = [new_of(engine, [row])[0].tolist() for row in rows]
        random, lengths = np.random.default_rng(0), []

        def some(tokens, most, longest):
            which = next(i for i, row in enumerate(rows) if tokens[: len(row)] == row)
            done = len(tokens) - len(rows[which])
            found = np.array(texts[which][done : done + most])
            if len(found) and random.random() < 0.7:
                found[random.integers(len(found)) :] = 3
            lengths.append(len(found))
            return found.tolist()

        monkeypatch.setattr(lookup, "draft", some)
        for i, row in enumerate(rows):
            assert new_of(engine, [row], prompt_lookup_num_tokens=5)[0].tolist() == texts[i]
        assert max(lengths) == 5 and len(lengths) < 1.6 * NEW
        found = new_of(engine, rows, prompt_lookup_num_tokens=5)
        assert found.tolist() == texts
        streams = [engine.stream([rows[0]], **GREEDY, prompt_lookup_num_tokens=5)]
        streams.append(engine.stream([rows[1]], **GREEDY))  # whose steps lie between
        pairs = zip(*streams, strict=True)
        assert [list(text) for text in zip(*pairs, strict=True)] == texts


@pytest.mark.parametrize(
    ("name", "backend", "pool"),
    [
        ("llama-gqa", "torch", {}),
        ("llama-gqa", "torch", {"cache_tokens": 1024}),
        ("llama-gqa", "jax", {}),
        *slow_but((), ("mamba2", "gemma2"), "torch", {}),
        *slow_but((), ("mamba2",), "jax", {}),
        *slow_but((), ("gemma2",), "jax", {"cache_tokens": 1024}),
    ],
)
def test_drafts_of_calls_at_once_are_read_together(name, backend, pool, monkeypatch):
    """With one that has none, and one whose tokens the device chooses, beside them."""
    with dualinfer.init_inference(make_model(name), backend=backend, **FUSED) as engine:
        engine.reserve(8, 96, **pool)
        lengths = (9, 5, 12, 30, 7, 21)
        rows = [(random_ids(1, n, seed=n)[0] % 90 + 5).tolist() for n in lengths]
        texts = [new_of(engine, [row])[0].tolist() for row in rows]

        def some(tokens, most, longest):
            which = next(i for i, row in enumerate(rows) if tokens[: len(row)] == row)
            done = len(tokens) - len(rows[which])
            found = np.array(texts[which][done : done + most])
            if len(found) and (done + which) % 3 == 0:
                found[done % len(found) :] = 3
            return found[: 1 + (done + which) % 5].tolist()

        monkeypatch.setattr(lookup, "draft", some)
        calls, begin, count = watched(engine, monkeypatch), engine.runner.prefill_scores, [0]

        def begun(*given):
            while (now := engine.traffic()).live + now.waiting < count[0]:
                time.sleep(0.001)  # until all have come
            count[0] = 0
            return begin(*given)

        monkeypatch.setattr(engine.runner, "prefill_scores", begun)

        async def asked(first, last, **more):
            count[0] = last - first + len(more)
            how = GREEDY | {"prompt_lookup_num_tokens": 5}
            asks = [engine.generate_async(row, **how) for row in rows[first:last]]
            asks += [engine.generate_async(rows[0], **GREEDY, **x) for x in more.values()]
            found = [await ask for ask in asks]
            passes = [n for kind, n in calls if kind != "keep"]
            calls.clear()
            return found, passes

        alone = [asyncio.run(asked(i, i + 1)) for i in range(len(rows))]
        assert [text for (text,), _ in alone] == texts
        more = {"steps": {"no_repeat_ngram_size": 60}, "device": {}}
        found, passes = asyncio.run(asked(0, len(rows), **more))
        assert found == [*texts, texts[0], texts[0]]
        counts = [len(own) for _, own in alone]
        assert max(passes) >= len(rows)  # of calls that share one
        assert len(passes) <= NEW + max(counts) + 4 < sum(counts)
        assert engine.traffic().live == 0


@both
def test_a_text_ends_where_it_ends_without(engine):
    """By an EOS, a stop string of one row before the other, and the last place of a slot."""
    expected = new_of(engine, ROWS)
    ends = {"eos_token_id": int(expected[0, 13]), "pad_token_id": 1}
    for how in (ends, ends | {"min_new_tokens": 20}, {"max_new_tokens": 1}, {"max_new_tokens": 2}):
        found = [np.asarray(engine.generate(ROWS, **(GREEDY | how | x))) for x in ({}, LOOKED_UP)]
        np.testing.assert_array_equal(*found)


def test_scores_of_what_has_ended_are_those_without(engine_of):
    engine = engine_of("llama-gqa", "torch")
    expected = new_of(engine, ROWS)
    how = {"eos_token_id": int(expected[0, 6]), "pad_token_id": 1, "output_scores": True}
    how |= {"return_dict_in_generate": True, "max_new_tokens": NEW, "do_sample": False}
    plain, found = (engine.generate(ROWS, **how, **more) for more in ({}, LOOKED_UP))
    for one, other in zip(plain.scores, found.scores, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@both
def test_streams_and_callers_of_asyncio_have_it_beside_others(engine):
    expected = new_of(engine, ROWS[:1])[0].tolist()
    stream = engine.stream(ROWS[:1], **GREEDY, **LOOKED_UP)
    first = [next(stream) for _ in range(5)]
    assert new_of(engine, ROWS[1:]).shape == (1, NEW)  # another call's steps lie between
    assert [*first, *stream] == expected

    async def main():
        calls = [engine.generate_async(ROWS[0], **GREEDY, **how) for how in (LOOKED_UP, {})]
        return [[token async for token in call] for call in calls]

    assert asyncio.run(main()) == [expected, expected]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(5, 9), min_size=2, max_size=40), st.integers(1, 12), st.booleans())
def test_any_text_is_the_same(engine_of, text, most, sampled):
    engine = engine_of("llama-gqa", "torch")
    how = {"do_sample": sampled, "seed": 1, "temperature": 0.3} if sampled else {}
    expected = new_of(engine, [text], **how)
    found = new_of(engine, [text], prompt_lookup_num_tokens=most, **how)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_two_devices_give_what_one_gives(hf_model):
    how = FUSED | {"tensor_parallel": {"tp_size": 2}}
    with dualinfer.init_inference(hf_model("llama-gqa"), backend="jax", **how) as engine:
        expected = new_of(engine, ROWS)
        np.testing.assert_array_equal(new_of(engine, ROWS, **LOOKED_UP), expected)


@pytest.mark.parametrize("name", ["phi3, long", "t5"])
def test_models_that_read_a_token_by_its_neighbours_refuse_it(name):
    model = make_model(name)
    with dualinfer.init_inference(model, **FUSED) as engine:
        with pytest.raises(dualinfer.UnsupportedError, match="Leave it out; the tokens are the"):
            engine.generate([WORDS[:3]], max_new_tokens=2, **LOOKED_UP)
        assert (
            engine.generate([WORDS[:3]], max_new_tokens=2, prompt_lookup_num_tokens=0) is not None
        )
