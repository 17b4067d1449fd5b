"""Prompts of calls that begin together: one pass reads them, and each has what it has alone."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from .models import BACKENDS, random_ids

CASE, COUNT = "llama-gqa", 6
HOW: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 5}
CHOSEN: dict[str, Any] = HOW | {"no_repeat_ngram_size": 2}  # on the host
SAMPLED = {"do_sample": True, "temperature": 0.8}
POOLS: dict[str, dict[str, Any]] = {
    "slots": {"slots": 9, "tokens": 64, "prefix_cache": False},
    "shared": {"slots": 9, "tokens": 64},
    "blocks": {"slots": 9, "tokens": 64, "cache_tokens": 10 * 64},
    "few slots": {"slots": 4, "tokens": 64},
    "few blocks": {"slots": 9, "tokens": 64, "cache_tokens": 4 * 64},
}
# Of sequences [1 or 2, T], every third one sampled.
ASKED = [random_ids(1 + i % 2, 3 + i, seed=i) for i in range(COUNT)]
MORE = [SAMPLED | {"seed": i} if i % 3 == 2 else {} for i in range(COUNT)]


@pytest.fixture(scope="module")
def engine(engine_of, request):
    return engine_of(CASE, request.param)


@pytest.fixture
def pooled(engine, request):
    """An engine with the pool that a test asks for, which has nothing under way in the end."""
    if request.param is not None:
        engine.reserve(**POOLS[request.param])
    yield engine
    assert not engine._loop.is_under_way
    assert not engine._loop.queue
    book = engine._loop.blocks
    assert book is None or book.free + book.kept == book.count
    engine.unreserve()


def on(*pools: str | None) -> pytest.MarkDecorator:
    """On both backends with these pools; JAX compiles a few seconds for each."""
    pairs = [
        pytest.param(
            *(backend, pool),
            id=f"{backend}, {pool or 'no pool'}",
            marks=[pytest.mark.slow] * (backend == "jax" and pool is not None),
        )
        for backend in BACKENDS
        for pool in pools
    ]
    return pytest.mark.parametrize(("engine", "pooled"), pairs, indirect=True)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def passes_of(engine, patch, name: str, until: Callable[[], bool]) -> list[int]:
    """How many calls, or prompts, each pass reads; the first one waits for the others to come."""
    run, passes = getattr(engine.runner, name), []

    def spy(read, *rest):
        passes.append(len(read))
        if len(passes) == 1:
            wait_for(until)
        return run(read, *rest)

    patch.setattr(engine.runner, name, spy)
    return passes


def together(call: Callable[[int], Any], count: int = COUNT) -> list[Future[Any]]:
    """What threads have of a call each, which have ended."""
    with ThreadPoolExecutor(count) as threads:
        return [threads.submit(call, i) for i in range(count)]


def texts(engine, i: int, how: dict[str, Any]) -> list[list[int]]:
    return np.asarray(engine.generate(ASKED[i], **(how | MORE[i]))).tolist()


def alone(engine, how: dict[str, Any]) -> list[Any]:
    return [texts(engine, i, how) for i in range(COUNT)]


@on(None, "slots", "shared", "blocks")
def test_prompts_of_threads_that_choose_on_the_host_are_read_together(pooled, monkeypatch):
    expected, queue = alone(pooled, CHOSEN), pooled._loop.queue
    with monkeypatch.context() as patch:
        passes = passes_of(pooled, patch, "prefill_scores", lambda: len(queue) == COUNT - 1)
        calls = together(lambda i: texts(pooled, i, CHOSEN))
    assert [one.result() for one in calls] == expected
    assert passes == [1, COUNT - 1]


@on(None, "slots", "blocks")
def test_prompts_of_jobs_that_choose_on_the_host_are_read_together(pooled, monkeypatch):
    asked = [ids[:1] for ids in ASKED]
    rows = [np.asarray(pooled.generate(x, **(CHOSEN | MORE[i]))) for i, x in enumerate(asked)]
    expected = [row[0, x.shape[1] :].tolist() for row, x in zip(rows, asked, strict=True)]

    async def main() -> list[list[int]]:
        made = [pooled.generate_async(x, **(CHOSEN | MORE[i])) for i, x in enumerate(asked)]
        return [await one for one in made]

    with monkeypatch.context() as patch:
        passes: list[int] = passes_of(
            pooled,
            patch,
            "prefill_scores",
            lambda: pooled.traffic().waiting == COUNT - passes[0],
        )
        assert asyncio.run(main()) == expected
    assert len(passes) <= 2 and sum(passes) == COUNT


@on(None, "slots")
def test_prompts_of_streams_are_read_together(pooled, monkeypatch):
    expected, queue = alone(pooled, HOW), pooled._loop.queue

    def call(i: int) -> list[list[int]]:
        steps = pooled.stream(ASKED[i], **(HOW | MORE[i]))
        new = np.array(list(steps)).reshape(HOW["max_new_tokens"], -1).T
        return np.column_stack((ASKED[i], new)).tolist()

    with monkeypatch.context() as patch:
        passes = passes_of(pooled, patch, "extend", lambda: len(queue) == COUNT - 1)
        calls = together(call)
    assert [one.result() for one in calls] == expected
    assert len(passes) == 2 and sum(passes) == sum(map(len, ASKED))


@on("few slots", "few blocks")
def test_those_for_whom_there_is_no_room_come_later(pooled, monkeypatch):
    expected, queue = alone(pooled, CHOSEN), pooled._loop.queue
    with monkeypatch.context() as patch:
        passes = passes_of(pooled, patch, "prefill_scores", lambda: len(queue) == COUNT - 1)
        calls = together(lambda i: texts(pooled, i, CHOSEN))
    assert [one.result() for one in calls] == expected
    assert 3 <= len(passes) <= COUNT and sum(passes) == COUNT


@on(None, "shared")
def test_each_is_read_alone_where_a_pass_for_all_fails(pooled, monkeypatch):
    """The one whose prompt fails alone gets the error, as does none beside it."""
    expected, queue = alone(pooled, CHOSEN), pooled._loop.queue
    run, passes, bad = pooled.runner.prefill_scores, [], len(ASKED[3][0])

    def fail(requests, slots):
        passes.append(len(requests))
        if len(passes) == 1:
            wait_for(lambda: len(queue) == COUNT - 1)
        if any(len(request.tokens) == bad for own in requests for request in own):
            raise RuntimeError("of this prompt")
        return run(requests, slots)

    with monkeypatch.context() as patch:
        patch.setattr(pooled.runner, "prefill_scores", fail)
        calls = together(lambda i: texts(pooled, i, CHOSEN))
    assert "of this prompt" in str(calls[3].exception())
    del calls[3], expected[3]
    assert [one.result() for one in calls] == expected
    assert passes.count(1) >= COUNT - 1 and len(passes) <= COUNT + 1


@on(None)
def test_each_job_is_read_alone_where_a_pass_for_all_fails(pooled, monkeypatch):
    rows = [np.asarray(pooled.generate(ids[:1], **CHOSEN))[0] for ids in ASKED]
    run, passes = pooled.runner.prefill_scores, []

    def fail(requests, slots):
        passes.append(len(requests))
        if len(passes) == 1:
            wait_for(lambda: pooled.traffic().waiting == COUNT - passes[0])
        if any(len(own[0].tokens) == len(ASKED[3][0]) for own in requests):
            raise RuntimeError("of this prompt")
        return run(requests, slots)

    async def main() -> list[Any]:
        made = [pooled.generate_async(ids[0], **CHOSEN) for ids in ASKED]
        return await asyncio.gather(*made, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(pooled.runner, "prefill_scores", fail)
        found = asyncio.run(main())
    assert "of this prompt" in str(found[3])
    for i in set(range(COUNT)) - {3}:
        assert found[i] == rows[i][len(ASKED[i][0]) :].tolist()
    assert passes.count(1) >= COUNT - 1


@on(None, "blocks")
def test_a_thread_that_is_interrupted_leaves_what_another_one_began_for_it(pooled, monkeypatch):
    expected, queue = alone(pooled, CHOSEN), pooled._loop.queue
    began = threading.Event()

    def interrupted_ones(i: int) -> Any:
        if i:
            began.wait(60)
        return texts(pooled, i, CHOSEN)

    run, passes = pooled.runner.prefill_scores, []

    def spy(requests, slots):
        passes.append(len(requests))
        if len(passes) == 1:
            began.set()
            wait_for(lambda: len(queue) == COUNT - 1)
        elif len(passes) == 2:  # for the last of those that wait
            owner = ctypes.c_ulong(queue[-1].owner)
            kind = ctypes.py_object(KeyboardInterrupt)
            assert ctypes.pythonapi.PyThreadState_SetAsyncExc(owner, kind) == 1
        return run(requests, slots)

    with monkeypatch.context() as patch:
        patch.setattr(pooled.runner, "prefill_scores", spy)
        calls = together(interrupted_ones)
    errors = [one.exception() for one in calls]
    assert [type(error) for error in errors if error] == [KeyboardInterrupt]
    assert passes == [1, COUNT - 1]
    for one, error, own in zip(calls, errors, expected, strict=True):
        assert error or one.result() == own
