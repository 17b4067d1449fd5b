"""Reserved room: calls wait for slots, and prompts that begin alike are read once."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("jax")

import dualinfer
from dualinfer.backends.base import MAX_STEPS
from dualinfer.errors import (
    ArgumentError,
    DeadlineError,
    LengthError,
    OutOfMemoryError,
    StepError,
    UnsupportedError,
)
from dualinfer.serving.prefixes import GRAIN, Prefixes, Snapshots, chain, cuts, shared_by, waits

from .cases import make_model
from .models import random_ids

HOW = {"dtype": "fp32", "replace_with_kernel_inject": True, "max_out_tokens": 256}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
BACKENDS = ["torch", pytest.param("jax", marks=pytest.mark.slow)]


def prompts_of(vocab: int) -> list[list[int]]:
    """Some begin alike, one is all of another, and others share nothing."""
    base = random_ids(1, 150, seed=1, vocab=vocab)[0].tolist()
    rest = [random_ids(1, n, seed=n, vocab=vocab)[0].tolist() for n in (3, 60, 17, 80, 30)]
    alike = [base[:130] + more for more in rest[:3]]
    return [*alike, base, rest[3], base, rest[4], base[:64], base[:65]]


def texts_of(engine: Any, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    rows = [engine.generate([p], **(GREEDY | how)) for p in prompts]
    return [np.asarray(x)[0].tolist()[len(p) :] for p, x in zip(prompts, rows, strict=True)]


def together(engine: Any, prompts: list[list[int]], **how: Any) -> tuple[Any, list[int]]:
    """The texts of prompts that come at once, and how many tokens of each were there."""

    async def all_of() -> Any:
        made = [engine.generate_async(p, **(GREEDY | how)) for p in prompts]
        return [await x for x in made], [x.cached_tokens for x in made]

    return asyncio.run(all_of())


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request):
    model = make_model("llama-gqa")
    with dualinfer.init_inference(model, backend=request.param, **HOW) as engine:
        yield engine


@pytest.fixture
def prompts(engine):
    return prompts_of(engine.runner.spec.vocab)


@pytest.fixture
def alone(engine, prompts):
    """The texts without reserved room."""
    engine.unreserve()
    yield texts_of(engine, prompts)
    engine.unreserve()


def test_prompts_that_begin_alike_are_read_once(engine, prompts, alone):
    made = engine.reserve(4, 250)
    assert made == (4, 250, 1, 0)
    found, cached = together(engine, prompts)
    assert found == alone
    assert cached[:4] == [0, 128, 128, 128]  # the first is read, and the others wait for it
    assert cached[4] == cached[6] == 0
    assert cached[7:] == [0, 64]  # never all of a prompt
    counts = engine.prefix_counts()
    assert counts == (sum(map(len, prompts)), sum(cached))


def test_a_turn_of_a_chat_begins_with_the_one_before(engine, prompts, alone):
    chat, first = prompts[1], alone[1]  # 190 tokens, and 6
    expected = texts_of(engine, [chat + first + [5, 6, 7]])
    engine.reserve(4, 250)
    assert texts_of(engine, [chat]) == [first]
    found, cached = together(engine, [chat + first + [5, 6, 7]])
    assert (found, cached) == (expected, [192])  # two new ones among them


def test_several_texts_of_a_prompt_read_it_once(engine, prompts, alone):
    how = {"do_sample": True, "seed": 3, "temperature": 2.0, "num_return_sequences": 3}
    expected = np.asarray(engine.generate([prompts[0]], **(GREEDY | how))).tolist()
    engine.reserve(4, 250)
    assert np.asarray(engine.generate([prompts[0]], **(GREEDY | how))).tolist() == expected
    assert engine.prefix_counts().found == 2 * 128


def test_it_can_be_off(engine, prompts, alone):
    assert engine.reserve(4, 250, prefix_cache=False) == (4, 250, 0, 0)
    found, cached = together(engine, prompts)
    assert (found, set(cached), engine.prefix_counts()) == (alone, {0}, (0, 0))


def test_penalties_and_host_choices_have_their_texts(engine, prompts, alone):
    """A repetition penalty sees a prompt whole; tokens that the host chooses find what is there."""
    how = [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"logprobs": 1}]
    how[2]["return_dict_in_generate"] = True
    expected = [np.asarray(texts_of(engine, prompts[:3], **x)) for x in how[:2]]
    engine.reserve(4, 250)
    for own, texts in zip(how, expected, strict=False):
        found, _ = together(engine, prompts[:3], **own)
        np.testing.assert_array_equal(found, texts)


def test_a_call_for_many_slots_is_not_passed_by_one_for_few(engine, prompts, alone):
    engine.reserve(4, 250)
    found: list[list[int]] = []
    row = prompts[4][:50]
    expected = texts_of(engine, [row], max_new_tokens=30)[0]
    stream = engine.stream([row], **(GREEDY | {"max_new_tokens": 150}))
    next(stream)  # one slot is taken

    def call() -> None:
        rows = np.asarray(engine.generate([row] * 4, **(GREEDY | {"max_new_tokens": 30})))
        found.extend(rows[:, len(row) :].tolist())

    thread = threading.Thread(target=call)
    thread.start()
    while not engine._loop.queue and thread.is_alive():
        thread.join(0.001)
    (ticket,) = engine._loop.queue
    texts_of(engine, [row], max_new_tokens=20)  # for which there would be a slot
    assert ticket not in engine._loop.queue  # those who waited had their slots before
    thread.join()
    assert found == [expected] * 4
    assert len([*stream]) == 149
    assert not engine._loop.queue


def test_jobs_are_not_passed_by_calls_for_ever(engine, prompts, alone):
    engine.reserve(4, 250)
    counts, is_over = [0] * 6, threading.Event()

    def take(i: int) -> None:
        while not is_over.is_set() and counts[i] < 40:
            engine.generate([prompts[4]], **(GREEDY | {"max_new_tokens": 11 + 7 * i}))
            counts[i] += 1

    threads = [threading.Thread(target=take, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    try:
        while sum(counts) < 6:
            is_over.wait(0.01)
        before = sum(counts)
        found, _ = together(engine, prompts[:4])
        passed = sum(counts) - before
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert found == alone[:4]
    assert passed < 60, counts  # of 240
    assert not engine._loop.queue


def test_calls_wait_for_slots(engine, prompts, alone):
    engine.reserve(4, 250)
    found: dict[int, list[int]] = {}

    def call(i: int) -> None:
        found[i] = texts_of(engine, [prompts[i]])[0]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    assert together(engine, prompts)[0] == alone  # beside them
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(len(prompts))] == alone
    # Streams that nobody reads give way, and still have their tokens.
    streams = [engine.stream([p], **GREEDY) for p in prompts[:4]]
    first = [next(stream) for stream in streams]
    assert texts_of(engine, prompts[4:6]) == alone[4:6]
    assert [[a, *s] for a, s in zip(first, streams, strict=True)] == alone[:4]


@pytest.mark.parametrize("is_reserved", [True, False])
def test_calls_at_once_share_their_steps(engine, prompts, alone, is_reserved, monkeypatch):
    """Of texts of 40 tokens nine threads take not many more steps than one would."""
    if is_reserved:
        engine.reserve(9, 250)
    how = GREEDY | {"max_new_tokens": 40}
    expected, steps, begin = texts_of(engine, prompts, **how), [], threading.Barrier(len(prompts))
    decode = engine.runner.decode
    monkeypatch.setattr(engine.runner, "decode", lambda n: steps.append(n) or decode(n))

    def call(prompt: list[int]) -> list[int]:
        begin.wait()
        return texts_of(engine, [prompt], **how)[0]

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(call, prompts)) == expected
    # The first one may have made its own before the others come. One after another it would be 360.
    assert sum(steps) < 3 * 40, steps
    assert not engine._loop.is_under_way


CHOSEN: dict[str, Any] = {"no_repeat_ngram_size": 40}  # on the host, and the same tokens


@pytest.mark.parametrize(
    ("slots", "chosen"), [(1, {}), (2, {}), (2, CHOSEN)], ids=["alone", "beside one", "on the host"]
)
def test_the_driver_waits_for_no_slot(engine, prompts, alone, slots, chosen, monkeypatch):
    """Another thread takes the last one just before it: tokens of others come, and deadlines."""
    engine.reserve(slots, 250)
    loop, others, handed = engine._loop, [], []
    name = "start_each" if chosen else "start"
    start, stream = getattr(loop, name), engine.stream([prompts[2]], **GREEDY, **CHOSEN)

    async def main() -> None:
        first = engine.generate_async(prompts[4], **(GREEDY | {"max_new_tokens": 40}))
        await (first.__anext__() if slots == 2 else first)

        def late(*args: Any, **how: Any) -> Any:
            is_driver = threading.get_ident() == loop.driver
            if is_driver and not others:
                with ThreadPoolExecutor(1) as pool:
                    others.append(pool.submit(next, stream).result(30))
            started = start(*args, **how)
            if is_driver:
                handed.append(first._channel.count)
            return started

        monkeypatch.setattr(loop, name, late)
        deadline = 0.2 if slots == 1 else None
        second = engine.generate_async(prompts[3], **GREEDY, **chosen, deadline=deadline)
        if slots == 1:
            with pytest.raises(DeadlineError, match="before it had a slot"):
                await second
        else:
            assert await second == alone[3]
            assert handed == [40]

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
        assert [*others, *stream] == alone[2]
    finally:
        stream.close()


def test_sequences_whose_tokens_the_host_chooses_take_one_slot_each(engine, prompts, monkeypatch):
    engine.reserve(2, 250)
    decode, counts = engine.runner.decode_scores, []

    def spy(*args: Any) -> Any:
        counts.append(len(engine._loop._live))
        return decode(*args)

    monkeypatch.setattr(engine.runner, "decode_scores", spy)

    async def main() -> None:
        first = engine.generate_async(prompts[3], **GREEDY, **CHOSEN)
        await first.__anext__()
        await asyncio.gather(first, engine.generate_async(prompts[4], **GREEDY, **CHOSEN))

    asyncio.run(main())
    assert max(counts) == 2


def test_a_call_ends_beside_a_stream_that_is_not_read(engine, prompts, alone):
    """The stream has the only slot, and whoever reads it waits for the call."""
    engine.reserve(1, 250)
    stream = engine.stream([prompts[0]], **GREEDY)
    first = next(stream)
    assert texts_of(engine, prompts[1:3]) == alone[1:3]
    assert [first, *stream] == alone[0]


def test_stop_strings_end_texts_that_wait_for_slots_and_may_ask_the_engine(engine, prompts, alone):
    """Also where the driver's own thread decodes them, which would wait for itself."""
    engine.reserve(3, 250)

    class Asking:
        all_special_ids: tuple[int, ...] = ()

        def decode(self, ids: Any, **how: Any) -> str:
            engine.generate([[7, 8]], **(GREEDY | {"max_new_tokens": 1}))
            return " ".join(map(str, np.asarray(ids).tolist()))

    end = str(alone[4][2])
    how = GREEDY | {"stop_strings": f" {end}", "tokenizer": Asking(), "pad_token_id": 0}
    rows = np.asarray(engine.generate([prompts[4]] * 5, **how))  # more than there are slots
    assert (rows[:, len(prompts[4]) :] == alone[4][:3]).all()

    async def one() -> list[int]:
        return await engine.generate_async(prompts[4], **how)

    assert asyncio.run(one()) == alone[4][:3]


def test_a_job_that_is_cancelled_leaves_calls_their_long_chunks(engine, prompts, alone):
    async def leave() -> None:
        job = engine.generate_async(prompts[0], **(GREEDY | {"max_new_tokens": 90}))
        await job.__anext__()
        job.cancel()
        assert len(await job) < 90

    asyncio.run(leave())
    while engine._driver.is_busy:
        threading.Event().wait(0.01)
    assert texts_of(engine, prompts[:1]) == alone[:1]
    assert engine._loop.longest == MAX_STEPS


def test_what_fails_beside_others_fails_alone(engine, prompts, alone):
    """A call that is refused, and one whose tokenizer fails."""
    engine.reserve(4, 250)
    stream = engine.stream([prompts[4]], **(GREEDY | {"max_new_tokens": 150}))
    next(stream)  # so that calls are the driver's

    class Broken:
        def decode(self, *args: Any, **how: Any) -> str:
            raise RuntimeError("on purpose")

    with pytest.raises(LengthError, match="over max_out_tokens"):
        engine.generate([prompts[0]], **(GREEDY | {"max_new_tokens": 250}))
    with pytest.raises(ArgumentError, match="on purpose"):
        engine.generate([prompts[0]], **GREEDY, stop_strings="x", tokenizer=Broken())
    assert texts_of(engine, prompts[:3]) == alone[:3]
    stream.close()
    assert not engine._loop.is_under_way


def test_what_never_fits_is_refused(engine, prompts, alone):
    engine.reserve(3, 100)
    with pytest.raises(LengthError, match="no room in the 3 slots"):
        next(engine.stream([[5]] * 4, **GREEDY))
    assert np.asarray(engine.generate([[5]] * 4, **GREEDY)).shape == (4, 7)  # three, then one
    for call in (engine.generate, engine.generate_async):
        with pytest.raises(LengthError, match="longer than the 100 that there is room for"):
            call([prompts[0]], **GREEDY)
    assert engine.max_tokens == engine.report().max_tokens == 100
    held = [engine.stream([[5]], no_repeat_ngram_size=2, **GREEDY) for _ in range(3)]
    for stream in held:
        next(stream)
    with pytest.raises(LengthError, match="this thread holds itself"):
        engine.generate([[5]], **GREEDY)
    with pytest.raises(UnsupportedError, match="under way"):
        engine.reserve(2)
    with pytest.raises(UnsupportedError, match="under way"):
        engine.unreserve()
    for stream in held:
        stream.close()
    with pytest.raises(ArgumentError, match=r"reserve\(slots=0\)"):
        engine.reserve(0)
    with pytest.raises(ArgumentError, match="at most 256"):
        engine.reserve(2, 257)
    with pytest.raises(OutOfMemoryError):
        engine.reserve(1 << 40)
    assert engine.max_tokens == 100  # what was reserved before is reserved again
    engine.unreserve()
    assert engine.max_tokens == 256
    assert texts_of(engine, prompts[:1]) == alone[:1]


def test_a_failed_step_forgets_what_slots_hold(engine, prompts, alone, monkeypatch):
    engine.reserve(4, 250)
    together(engine, prompts[:1])

    def fails(*args: Any) -> Any:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", fails)
        with pytest.raises(StepError):
            together(engine, prompts[:1])
    found, cached = together(engine, prompts[:1])
    assert (found, cached) == (alone[:1], [0])
    with monkeypatch.context() as patch:  # what cannot be copied is read
        patch.setattr(engine.runner, "copy", fails)
        assert together(engine, prompts[1:2]) == (alone[1:2], [0])
    assert together(engine, prompts[1:2]) == (alone[1:2], [0])
    assert together(engine, prompts[1:2]) == (alone[1:2], [128])


def test_what_a_failed_reading_has_lost_is_not_used(engine, prompts, alone, monkeypatch):
    engine.reserve(4, 250)
    together(engine, prompts[:1])

    def fails(pieces: Any) -> Any:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "extend", fails)
        with pytest.raises(StepError, match="on purpose"):
            together(engine, prompts[4:5])
    # On JAX the cache may have gone with the failed step.
    assert together(engine, prompts[1:2]) == (alone[1:2], [0])


def test_a_stream_that_is_collected_meanwhile_ends_behind(engine, prompts, alone, monkeypatch):
    """What it leaves would take the place of what was just found."""
    engine.reserve(2, 250)  # one spare slot
    together(engine, prompts[:1])
    held = engine.stream([prompts[4]], **GREEDY)
    next(held)
    longest, calls = Prefixes.longest, []

    def collects(self: Any, ids: Any) -> Any:
        found = longest(self, ids)
        calls.append(found)
        if len(calls) == 2:  # the first one asks whether to wait
            held.close()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Prefixes, "longest", collects)
        assert texts_of(engine, prompts[1:2]) == alone[1:2]
    assert calls[1] == (2, 128)
    assert engine.traffic().live == 0 and texts_of(engine, prompts[4:6]) == alone[4:6]


def test_an_interrupt_while_prompts_are_read_leaves_nothing(engine, prompts, alone, monkeypatch):
    engine.reserve(4, 250)

    def interrupts(pieces: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "extend", interrupts)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([*prompts[:2]], pad_token_id=0, **GREEDY)
    engine.reserve(4, 250)  # nothing is under way


@pytest.mark.parametrize("name", ["gemma2", "latent", "qwen3_next with experts", "mamba2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_every_kind_of_cache(name, backend):
    """Windows, latent vectors and codes are copied, and states where they stand."""
    makes = {
        "gemma2": lambda: make_model("gemma2"),
        "latent": lambda: make_model("youtu"),
    }
    model = makes.get(name, lambda: make_model(name))()
    more = {"kv_cache_dtype": "int8"} if name == "gemma2" else {}
    with dualinfer.init_inference(model, backend=backend, **HOW, **more) as engine:
        prompts = prompts_of(engine.runner.spec.vocab)[:4]
        alone = texts_of(engine, prompts)
        engine.reserve(2, 250)
        assert together(engine, prompts) == (alone, [0, 128, 128, 128])
        again = together(engine, prompts[1:2])  # to the last whole grain that something has
        assert again == (alone[1:2], [128])
        longer = [[*prompts[1], *alone[1], 5]]  # as the next turn of a chat
        expected, cached = together(engine, longer)
        assert cached == [192] if engine.runner.spec.keeps_places else cached == [128]
        assert engine.reserve(2, 250, prefix_cache=False).spare == 0
        assert together(engine, [*longer, prompts[0]]) == ([*expected, alone[0]], [0, 0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_what_is_found_was_put_there(data):
    """Against a dictionary of slots, over any order of beginnings and ends."""
    slots, spare = 3, 2
    prefixes, held = Prefixes(slots, spare), {}
    words = [np.full(n, w, np.int32) for w, n in ((1, 64), (2, 64), (1, 30), (2, 70))]
    for _ in range(data.draw(st.integers(1, 25))):
        parts = data.draw(st.lists(st.sampled_from(range(4)), min_size=1, max_size=4))
        ids = np.concatenate([words[i] for i in parts])
        slot = data.draw(st.integers(0, slots - 1))
        if data.draw(st.booleans()):
            source, count = prefixes.longest(ids)
            best = max((shared_by(x, ids) for x in held.values()), default=0)
            assert count == best and count < len(ids) and count % GRAIN == 0
            if count:
                assert (held[source][:count] == ids[:count]).all()
            prefixes.use(source, count, len(ids))
            prefixes.fill(slot, ids)
            held[slot] = ids
        elif slot in held:
            ids = held.pop(slot)
            prefixes.drop(slot)
            target = prefixes.keep(ids)
            if target is None:
                near = [x for s, x in held.items() if s >= slots and len(x) >= len(ids)]
                assert len(ids) < GRAIN or any((x[: len(ids)] == ids).all() for x in near)
            else:
                assert slots <= target < slots + spare
                held[target] = ids
        for kept in held.values():
            assert prefixes.longest(np.append(kept, np.int32(9)))[1] >= len(kept) // GRAIN * GRAIN


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_state_serves_what_begins_with_all_that_it_has_read(data):
    """Against a dictionary of slots and the ids that each has read."""
    book, held = Snapshots(3, 2), {}
    words = [np.full(GRAIN, w, np.int32) for w in (1, 2)]
    for _ in range(data.draw(st.integers(1, 25))):
        parts = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=4))
        ids = np.concatenate(parts)
        prompt = np.append(ids, np.int32(9)) if data.draw(st.booleans()) else ids
        serve = [x for x in held.values() if len(x) < len(prompt) and (x == ids[: len(x)]).all()]
        slot, count = book.longest(prompt)
        assert count == max(map(len, serve), default=0)
        assert not count or len(held[slot]) == count
        book.use(slot, count, len(prompt))
        target = book.keep(ids)
        there = [s for s, x in held.items() if len(x) == len(ids) and (x == ids).all()]
        assert (target is None) == bool(there)
        if target is not None:
            assert target in (3, 4)
            held[target] = ids
        keys = [*chain(ids)]
        begins = sum(len(x) >= len(ids) and (x[: len(ids)] == ids).all() for x in held.values())
        assert book.beginning_with(keys[-1]) == begins


def test_states_are_kept_where_prompts_part_and_at_their_ends():
    rows = [np.repeat(np.array(x, np.int32), GRAIN) for x in ([1, 2, 3, 4], [1, 2, 5], [1, 6])]
    chains = [[*chain(row)] for row in rows]
    known = Counter(key for one in chains[1:] for key in one)
    assert cuts(chains[0], known) == [64, 128, 256]
    assert cuts(chains[0], {}) == [256] and cuts([], known) == []
    assert cuts(chains[2], Counter(chains[0])) == [64, 128]


def test_a_prompt_waits_for_another_that_gives_more():
    a, b = np.arange(200, dtype=np.int32), np.arange(150, dtype=np.int32)
    assert waits(a, 0, [b]) and waits(a, 64, [b]) and not waits(a, 128, [b])
    assert not waits(a, 0, [b[1:]]) and not waits(a[:64], 0, [b])
