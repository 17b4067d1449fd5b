"""Many sequences at once from asyncio: each has what it has alone, on both backends."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dualinfer
from dualinfer import ArgumentError, ClosedError, DeadlineError, StepError
from dualinfer.engine import meeting

from .models import BACKENDS, random_ids

CASE = "llama-gqa"


@pytest.fixture(scope="module", params=BACKENDS)
def engine(engine_of, request):
    return engine_of(CASE, request.param)


def alone(engine, ids, **arguments):
    return np.asarray(engine.generate(ids, **arguments))[0, ids.shape[1] :].tolist()


def test_many_callers_have_the_tokens_that_each_has_alone(engine):
    asked = []
    for i in range(32):
        how = {"max_new_tokens": 3 + i % 9, "do_sample": i % 3 == 0, "seed": i}
        asked.append((random_ids(1, 3 + i % 11, seed=i), how))
    expected = [alone(engine, ids, **how) for ids, how in asked]

    async def main():
        handles = [engine.generate_async(ids, **how) for ids, how in asked]
        beside = asyncio.to_thread(alone, engine, asked[1][0], **asked[1][1])
        *found, other = await asyncio.gather(*handles, beside)
        assert other == expected[1]
        assert {handle.finish_reason for handle in handles} <= {"length", "stop"}
        return found

    assert asyncio.run(main()) == expected


def test_no_prompt_is_read_once_all_have_their_only_token(engine):
    async def main():
        await engine.generate_async(random_ids(1, 5), max_new_tokens=1)

    asyncio.run(main())
    time.sleep(0.1)  # the driver's turn ends behind the token
    assert engine.traffic().reading == 0


def test_one_ends_by_itself_and_others_go_on(engine):
    ids, how = random_ids(1, 5), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = alone(engine, ids, **how)

    def fail(ids, scores):
        raise ValueError("of the caller")

    async def main():
        good = engine.generate_async(ids[0], **how)
        bad = engine.generate_async(ids, **how, logits_processor=[fail])
        late = engine.generate_async(ids, **how | {"max_new_tokens": 40}, deadline=1e-4)
        left = engine.generate_async(ids, **how | {"max_new_tokens": 40}, priority="high")
        chosen = engine.generate_async(ids, **how, no_repeat_ngram_size=2)
        async for token in left:
            assert token == expected[0]
            left.cancel()
            break
        with pytest.raises(ValueError, match="of the caller"):
            await bad
        with pytest.raises(DeadlineError, match="deadline"):
            await late
        rest = await left
        assert left.finish_reason == "cancelled"
        assert len(rest) < 39
        assert await good == expected
        assert await chosen == alone(engine, ids, **how, no_repeat_ngram_size=2)
        for more in ({}, {"no_repeat_ngram_size": 2}):
            teller = engine.generate_async(ids, **how, **more, logprobs=2)
            told = [teller.logprobs_of(i) for i in range(len(await teller))]
            tells = {"logprobs": 2, "return_dict_in_generate": True}
            whole = engine.generate(ids, **how, **more, **tells)
            assert np.allclose([x.logprob for x in told], np.asarray(whole.logprobs)[0], atol=1e-5)
            top = [[x for x, _ in each.top] for each in told]
            assert top == np.asarray(whole.top_ids)[0].tolist()
        several = engine.generate_async(
            ids, max_new_tokens=4, do_sample=True, seed=3, num_return_sequences=2
        )
        rows = engine.generate(
            ids, max_new_tokens=4, do_sample=True, seed=3, num_return_sequences=2
        )
        new = [row[5:].tolist() for row in np.asarray(rows)]
        assert [(await one) == row[:4] for one, row in zip(several, new, strict=True)]
        with pytest.raises(ArgumentError, match="one prompt"):
            engine.generate_async([[1], [2]])
        with pytest.raises(ArgumentError, match="priority"):
            engine.generate_async(ids, priority=3)

    asyncio.run(main())
    deadline = threading.Event()
    for _ in range(200):
        if not engine._loop.tokens_beside(()):
            break
        deadline.wait(0.02)
    assert not engine._loop.tokens_beside(())


def test_sequences_whose_tokens_the_host_chooses_share_steps(engine, monkeypatch):
    how = {"do_sample": False, "eos_token_id": None, "no_repeat_ngram_size": 2}
    asked = [
        (random_ids(1, 3 + i, seed=i), how | {"max_new_tokens": n}) for i, n in enumerate((24, 9))
    ]
    asked.append(
        (random_ids(1, 4, seed=5), how | {"max_new_tokens": 12, "do_sample": True, "seed": 3})
    )
    looks_up = {"max_new_tokens": 20, "prompt_lookup_num_tokens": 2}  # and seldom finds anything
    asked.append((random_ids(1, 4, seed=7), how | looks_up))
    joins = random_ids(1, 9, seed=6), how | {"max_new_tokens": 4}
    expected = [alone(engine, ids, **more) for ids, more in (*asked, joins)]
    decode, steps = engine.runner.decode_scores, []

    def spy(slots, tokens):
        steps.append(len(slots))
        return decode(slots, tokens)

    def fail(ids, scores):
        if ids.shape[1] > asked[0][0].shape[1] + 2:
            raise ValueError("of the caller")
        return scores

    async def main():
        handles = [engine.generate_async(ids, **more) for ids, more in asked]
        bad = engine.generate_async(asked[0][0], **asked[0][1], logits_processor=[fail])
        left = engine.generate_async(asked[1][0], **how, max_new_tokens=40)
        late = engine.generate_async(asked[1][0], **how, max_new_tokens=40, deadline=1e-4)
        tokens = []
        async for token in left:
            tokens.append(token)
            handles.append(engine.generate_async(joins[0], **joins[1]))
            left.cancel()
            break
        with pytest.raises(ValueError, match="of the caller"):
            await bad
        with pytest.raises(DeadlineError):
            await late
        tokens += await left
        assert tokens[:9] == expected[1][: len(tokens)]
        return [await handle for handle in handles]

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode_scores", spy)
        assert asyncio.run(main()) == expected
    assert len(steps) < 23 + 8  # of the longest one; each alone would make 64, and more
    assert max(steps) >= 3


def test_threads_whose_tokens_the_host_chooses_share_steps(engine, monkeypatch):
    how = {"do_sample": False, "eos_token_id": None, "no_repeat_ngram_size": 2}
    asked = [
        (random_ids(1, 3, seed=0), how | {"max_new_tokens": 24}),
        (random_ids(2, 5, seed=1), how | {"max_new_tokens": 9}),
        (random_ids(1, 4, seed=2), how | {"max_new_tokens": 12, "do_sample": True, "seed": 3}),
        (random_ids(1, 4, seed=3), how | {"max_new_tokens": 24}),
    ]
    expected = [np.asarray(engine.generate(ids, **more)).tolist() for ids, more in asked]
    decode, steps, all_have_begun = engine.runner.decode_scores, [], threading.Barrier(6)

    def spy(slots, tokens):
        steps.append(len(slots))
        return decode(slots, tokens)

    def call(ids, more, fails=None):
        seen = []

        def waits(ids, scores):
            if not seen:
                all_have_begun.wait(30)
            seen.append(ids.shape[1])
            if len(seen) == 4 and fails is not None:
                raise fails
            return scores

        return np.asarray(engine.generate(ids, logits_processor=[waits], **more)).tolist()

    with monkeypatch.context() as patch, ThreadPoolExecutor(6) as threads:
        patch.setattr(engine.runner, "decode_scores", spy)
        for name in ("_LEAST", "_MOST"):  # a busy machine may be late
            patch.setattr(meeting, name, 2.0)
        calls = [threads.submit(call, *one) for one in asked]
        for error in (ValueError("of the caller"), KeyboardInterrupt()):
            calls.append(threads.submit(call, *asked[3], fails=error))
        assert [one.result(60) for one in calls[:4]] == expected
        for one, kind in zip(calls[4:], (ValueError, KeyboardInterrupt), strict=True):
            assert isinstance(one.exception(60), kind)
    assert len(steps) < 23 + 11, steps  # of the longest ones; each alone would make 71
    assert max(steps) >= 4
    assert not engine._loop.is_under_way


def test_a_step_that_fails_ends_the_threads_that_share_it(engine, monkeypatch):
    how = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
    all_have_begun, decode = threading.Barrier(3), engine.runner.decode_scores

    def fail(slots, tokens):
        if len(slots) > 1:
            raise RuntimeError("of the device")
        return decode(slots, tokens)

    def call(i):
        seen = []

        def waits(ids, scores):
            if not seen:
                all_have_begun.wait(30)
            seen.append(ids)
            return scores

        return engine.generate(random_ids(1, 3 + i, seed=i), logits_processor=[waits], **how)

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as threads:
        patch.setattr(engine.runner, "decode_scores", fail)
        failed = [one.exception(60) for one in [threads.submit(call, i) for i in range(3)]]
    assert sorted((type(error) for error in failed), key=str) == [
        RuntimeError,
        StepError,
        StepError,
    ]
    assert all("of the device" in str(error) for error in failed)
    assert not engine._loop.is_under_way
    assert alone(engine, random_ids(1, 3), **how)  # it goes on


def test_text_is_that_of_generate_text_and_closing_ends_what_is_open():
    with dualinfer.init_inference(
        dualinfer.embedded_model(), backend="torch", dtype="fp32"
    ) as engine:
        prompt = "def copy_file(source"
        expected = engine.generate_text(prompt, max_new_tokens=9)

        async def main():
            text = engine.generate_async(prompt, max_new_tokens=9).text()
            engine.generate_async(prompt, max_new_tokens=900)  # nobody reads it
            gc.collect()
            assert await text == expected
            open_one = engine.generate_async(prompt, max_new_tokens=900)
            await anext(open_one)
            await asyncio.to_thread(engine.close)
            with pytest.raises(ClosedError):
                await open_one
            with pytest.raises(ClosedError):
                engine.generate_async(prompt)

        asyncio.run(main())


def test_a_program_ends_while_a_sequence_is_open():
    code = (
        "import asyncio, dualinfer\n"
        "e = dualinfer.init_inference(dualinfer.embedded_model(), backend='torch')\n"
        "async def main():\n"
        "    h = e.generate_async('def f(', max_new_tokens=900)\n"
        "    await anext(h)\n"
        "    return h\n"
        "kept = asyncio.run(main())\n"
        "print('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
