"""Sequences that give their slots to urgent ones have the texts that they have alone."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import dualinfer
from dualinfer.errors import ArgumentError

from . import test_recurrent
from .models import make_model, random_ids

HOW = {"dtype": "fp32", "replace_with_kernel_inject": True, "max_out_tokens": 256}
SLOTS, NEW = 3, 40
QUICK = ("llama-gqa on torch", "mamba2 on torch")
SLOW = ("llama-gqa on jax", "qwen3_next with experts on torch", "qwen3_next with experts on jax")
KINDS = [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
# Each of a request, so that every one of them is paused in one way or another.
OPTIONS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "seed": 3, "temperature": 1.5, "top_k": 20},
    {"do_sample": False, "repetition_penalty": 1.5},
    {"do_sample": True, "seed": 4, "frequency_penalty": 0.5, "logprobs": 2},
    {"do_sample": False, "logprobs": 1, "min_new_tokens": 30},
]


@pytest.fixture(scope="module", params=KINDS)
def engine(request):
    name, backend = request.param.split(" on ")
    model = make_model(name) if name == "llama-gqa" else test_recurrent.make(name)
    with dualinfer.init_inference(model, backend=backend, **HOW) as engine:
        yield engine


def rows_of(engine):
    vocab = engine.runner.spec.vocab
    return [random_ids(1, n, seed=n, vocab=vocab)[0].tolist() for n in (90, 7, 130, 64, 150)]


def start(engine, row, i, **how):
    options = {"max_new_tokens": NEW, "eos_token_id": None} | OPTIONS[i] | how
    return engine.generate_async(row, **options)


async def told(made, i):
    tokens = await made
    if "logprobs" not in OPTIONS[i]:
        return tokens, []
    return tokens, [made.logprobs_of(k) for k in range(len(tokens))]


def check(found, expected):
    for (tokens, said), (others, known) in zip(found, expected, strict=True):
        assert tokens == others
        assert [x.logprob for x in said] == pytest.approx([x.logprob for x in known], abs=1e-4)


@pytest.mark.parametrize("swap_space", [0, 1])
def test_those_that_give_way_go_on_as_if_nothing_had_been(engine, swap_space, monkeypatch):
    rows = rows_of(engine)
    saved, restored = [], []
    runner = engine.runner
    save, restore = runner.save, runner.restore
    monkeypatch.setattr(runner, "save", lambda *x: saved.append(x) or save(*x))
    monkeypatch.setattr(runner, "restore", lambda *x: restored.append(x) or restore(*x))

    async def alone():
        return [await told(start(engine, row, i), i) for i, row in enumerate(rows)]

    async def beside():
        made = [start(engine, row, i) for i, row in enumerate(rows)]
        waits = [asyncio.ensure_future(told(one, i)) for i, one in enumerate(made)]
        urgent = []
        for count in (1, 4, 9):  # a few tokens after the others have begun, and again
            while sum(len(one._channel.told) + one._channel.count for one in made) < 12 * count:
                await asyncio.sleep(0)
            urgent += [start(engine, rows[1], 0, priority="high", max_new_tokens=6)]
            urgent += [start(engine, rows[0], 1, priority="high", max_new_tokens=6)]
        firsts = [await one for one in urgent]
        return await asyncio.gather(*waits), firsts

    engine.reserve(SLOTS, 250, swap_space=swap_space)
    expected = asyncio.run(alone())
    engine.reserve(SLOTS, 250, swap_space=swap_space)
    before = engine.traffic().preemptions
    found, firsts = asyncio.run(beside())
    check(found, expected)
    assert engine.traffic().preemptions - before >= 2
    assert len(saved) == len(restored) and bool(saved) == bool(swap_space)
    short = start(engine, rows[1], 0, max_new_tokens=6), start(engine, rows[0], 1, max_new_tokens=6)

    async def both():
        return [await one for one in short]

    assert firsts == asyncio.run(both()) * 3
    assert engine.traffic().live == engine.traffic().waiting == 0
    engine.reserve(SLOTS, 250)  # nothing is under way


def test_one_that_waits_for_its_slot_again_can_be_cancelled(engine):
    rows = rows_of(engine)
    engine.reserve(1, 250)

    async def main():
        made = start(engine, rows[0], 0, max_new_tokens=100)
        async for _ in made:
            break
        urgent = start(engine, rows[1], 0, priority="high", max_new_tokens=20)
        async for _ in urgent:
            break
        assert engine.traffic().waiting == 1
        made.cancel()
        rest = [token async for token in made]
        assert made.finish_reason == "cancelled" and len(rest) < 99
        return len([token async for token in urgent])

    assert asyncio.run(main()) == 19
    assert not [x for x in engine._loop._pauses._saved if x is not None]


def test_what_is_no_space_is_refused(engine):
    with pytest.raises(ArgumentError, match="swap_space=-1"):
        engine.reserve(1, 64, swap_space=-1)


def test_a_stop_string_and_a_grammar_go_over_a_pause():
    model = dualinfer.embedded_model()
    with dualinfer.init_inference(model, backend="torch", dtype="fp32") as engine:
        how = [{"grammar": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
        how += [{"stop_strings": ["return"]}, {}]
        texts = ["{", "def add(a, b):", "class"]

        async def run(pauses):
            made = [
                engine.generate_async(text, max_new_tokens=150, do_sample=True, seed=i, **own)
                for i, (text, own) in enumerate(zip(texts, how, strict=True))
            ]
            waits = [asyncio.ensure_future(one.text()) for one in made]
            while pauses and any(one._channel.count < 2 for one in made):
                await asyncio.sleep(0)
            for i in range(6 * pauses):
                await engine.generate_async("x", max_new_tokens=1 + i % 2, priority="high")
            return await asyncio.gather(*waits)

        engine.reserve(3, 200)
        expected = asyncio.run(run(False))
        assert asyncio.run(run(True)) == expected
        assert engine.traffic().preemptions >= 1
