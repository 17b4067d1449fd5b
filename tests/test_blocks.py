"""A pool that counts its cache in blocks: any requests have the texts that they have alone."""

import asyncio
import json
import urllib.request
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("jax")

import jax
import torch

import dualinfer
from dualinfer.backends.base import GRAIN, Piece, Pool, Request
from dualinfer.backends.blocks import AHEAD, PANEL, Blocks, NearBlocks, lying, rest_of
from dualinfer.backends.slots import LiveSlots
from dualinfer.errors import (
    ArgumentError,
    LengthError,
    OutOfMemoryError,
    StepError,
    UnsupportedError,
)

from .cases import make_model
from .models import random_ids

HOW = {"dtype": "fp32", "replace_with_kernel_inject": True, "max_out_tokens": 512}
ON = ["torch", pytest.param("jax", marks=pytest.mark.slow)]
# Of who waits for whom, which is one text over both runners.
on_torch = pytest.mark.parametrize("engine", ["torch"], indirect=True)
SERVING, SPARE, TOKENS, COUNT = 3, 2, 5 * GRAIN, 11


def check_book(book: Blocks) -> None:
    """Every block is free or somebody's, the counts are right, and the rest of a row is empty."""
    users: Counter[int] = Counter()
    kept: set[int] = set()
    for slot, row in enumerate(book.table):
        own = row[: book.held(slot)].tolist()
        assert len(set(own)) == len(own)
        assert (row[len(own) :] == book.count).all()
        users.update(own)
        kept |= set(own) if slot >= SERVING else set()
    for slot in range(SERVING):
        kept -= set(book.table[slot, : book.held(slot)].tolist())
    assert sorted([*users, *book._free]) == list(range(book.count))
    assert book.free == book.count - len(users) and book.kept == len(kept)
    assert book.usage == pytest.approx((len(users) - len(kept)) / book.count)
    for slot in range(SERVING + SPARE):
        own = book.table[slot, : book.held(slot)].tolist()
        assert book.alone(slot) == sum(users[block] == 1 for block in own)
        assert book.served(slot, TOKENS) == len(set(own) - kept)


slots_of = st.integers(0, SERVING + SPARE - 1)
serving = st.integers(0, SERVING - 1)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("cover"), st.dictionaries(serving, st.integers(1, TOKENS))),
        st.tuples(st.just("share"), st.tuples(slots_of, slots_of, st.integers(0, 5))),
        st.tuples(st.just("drop"), slots_of),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_every_block_is_accounted_for(events):
    books = [Blocks(COUNT, SERVING, SPARE, TOKENS) for _ in range(2)]
    for name, value in events:
        for book in books:
            before = book.table.copy()
            if name == "cover":
                more = sum(max(0, -(-n // GRAIN) - book.held(s)) for s, n in value.items())
                assert book.more(value) == more
                if more > book.free:
                    with pytest.raises(OutOfMemoryError, match="blocks"):
                        book.cover(value)
                    assert (book.table == before).all()
                else:
                    book.cover(value)
                    for slot, tokens in value.items():
                        assert book.held(slot) * GRAIN >= tokens
                        new = set(book.table[slot].tolist()) - set(before[slot].tolist())
                        others = np.delete(book.table, slot, 0)
                        assert not new & set(others.flat) - {COUNT}  # nobody else writes there
            elif name == "share":
                source, target, blocks = value
                if blocks > book.held(source):
                    with pytest.raises(StepError, match="shared"):
                        book.share(source, target, blocks * GRAIN)
                elif source != target:
                    book.share(source, target, blocks * GRAIN)
                    assert book.held(target) == blocks
                    assert (book.table[target, :blocks] == before[source, :blocks]).all()
            else:
                book.drop(value)
                assert book.held(value) == 0
            check_book(book)
    assert (books[0].table == books[1].table).all()  # processes that do alike have alike
    for slot in range(SERVING + SPARE):
        books[0].drop(slot)
    assert books[0].free == COUNT


WINDOW = 100
PASSES = st.lists(
    st.tuples(slots_of, st.sampled_from(("pass", "share", "drop")), st.integers(1, 2 * GRAIN)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(PASSES)
def test_blocks_behind_a_window_serve_others(events):
    """Slots have what their queries see, and room for their passes, which nobody else has."""
    count = (SERVING + SPARE) * rest_of(WINDOW)
    book = NearBlocks(count, SERVING + SPARE, 40 * GRAIN, WINDOW)
    lengths = [0] * (SERVING + SPARE)
    for slot, name, number in events:
        length = lengths[slot]
        if name == "pass":
            book.cover({slot: (length, length + number)})
            lengths[slot] = length = length + number
            seen = max(0, length - number + 1 - WINDOW) // GRAIN
            last = -(-length // GRAIN)
            own = book.table[slot, seen:last]
            assert ((own >= 0) & (own < count)).all() and len(set(own)) == len(own)
            assert (book.table[slot, last:] == count).all() and last - seen <= rest_of(WINDOW)
            new = set(book.table[slot, (length - number) // GRAIN + 1 : last].tolist())
            assert not new & set(np.delete(book.table, slot, 0).flat)
        elif name == "drop":
            book.drop(slot)
            lengths[slot] = 0
        elif (whole := length // GRAIN * GRAIN) == length:
            target = number % len(lengths)
            book.share(slot, target, whole)
            lengths[target] = whole
        else:
            with pytest.raises(StepError, match="shared"):
                book.share(slot, number % len(lengths), length)
        held = Counter(x for row in book.table for x in row.tolist() if 0 <= x < count)
        assert sorted([*held, *book._free]) == list(range(count))
        assert [held[x] for x in range(count)] == book._users.tolist()
    for slot in range(SERVING + SPARE):
        book.drop(slot)
    assert book.free == count and (book.table == count).all()


def test_who_is_read_again_has_the_blocks_that_it_had_behind_its_window():
    """Two at a time have room for a pass, or neither changes: a third has what the second needs."""
    book = NearBlocks(8, 3, 40 * GRAIN, GRAIN)
    book.cover({0: (512, 512)})  # what was saved of it was not put back
    assert book.held(0) == (6, 8)
    book.cover({0: (0, 256), 1: (512, 512)})
    assert book.held(0) == (0, 4) and len(set(book.table[0, :4].tolist()) - {-1, 8}) == 4
    before, held = book.table.copy(), [book.held(slot) for slot in range(3)]
    with pytest.raises(OutOfMemoryError, match=r"5 more blocks .* 4 of 8 are free"):
        book.cover({0: (256, 448), 1: (512, 576), 2: (0, 64)})
    assert (book.table == before).all() and held == [book.held(slot) for slot in range(3)]
    book.cover({0: (256, 448), 1: (512, 576)})  # of which the first gives two back before
    assert book.free == 0 and book.held(0) == (2, 7)


def test_both_books_of_a_pool_change_or_none_does():
    """Where steps lack near blocks, and a copy has near ones alone, or nothing that is counted."""
    request = Request(np.zeros(2 * GRAIN, np.int32), 100)
    for count, most, name in ((4, 0, "step"), (4, 0, "copy"), (2, 2, "copy")):
        near = NearBlocks(3 if name == "copy" else 2, 3, TOKENS, 4 * GRAIN)
        book = Blocks(count, 2, 1, TOKENS, near, most)
        live = LiveSlots(blocks=book)
        live.read([Piece.whole(request, 0)])
        near.cover({0: (0, near.count * GRAIN)})
        before = book.table.copy(), near.table.copy()
        with pytest.raises((OutOfMemoryError, StepError), match="blocks of"):
            live.advance(1) if name == "step" else book.share(0, 1, near.count * GRAIN)
        assert (book.table == before[0]).all() and (near.table == before[1]).all()


@pytest.mark.parametrize("window", [1, 64, 1000])
def test_nobody_waits_for_blocks_of_a_window(window):
    """All spare slots are full, a prompt's largest panel is read, and others read drafts."""
    pool = Pool(32, 16384, spare=4, blocks=10**4)
    spec: Any = SimpleNamespace(attentions=(), sights=(window, None), reads_pieces=True)
    book = NearBlocks(lying(pool, spec).near, pool.slots + pool.spare, pool.tokens, window)
    whole, last = 8192, pool.slots - 1
    for spare in range(pool.slots, pool.slots + pool.spare):
        book.cover({last: (whole, whole)})
        book.share(last, spare, whole)
        book.drop(last)
    for start in range(9000, 9000 + GRAIN):
        book.cover(dict.fromkeys(range(last), (start, start + AHEAD)))
        book.cover({last: (whole, whole + PANEL)})
        book.cover({last: (whole, whole)})


def texts(runner: Any, requests: list[Request]) -> list[list[int]]:
    """Of requests that come one after another, while those before take steps."""
    found: list[list[int]] = []
    for slot, request in enumerate(requests):
        found.append(runner.extend([Piece.whole(request, slot)]).fetch()[0].tolist())
        for row in runner.decode(3).fetch():
            for other, text in enumerate(found):
                text += [int(row[other])] if row[other] >= 0 else []
    while any(len(x) < r.max_new_tokens for x, r in zip(found, requests, strict=True)):
        for row in runner.decode(8).fetch():
            for other, text in enumerate(found):
                text += [int(row[other])] if row[other] >= 0 else []
    runner.release(range(len(requests)))
    return found


@pytest.mark.parametrize(
    ("backend", "name", "codes"),
    [
        *(("torch", *what) for what in (("llama-gqa", None), ("llama-gqa", "int8"))),
        ("torch", "youtu", None),
        *(pytest.param("jax", "llama-gqa", x, marks=pytest.mark.slow) for x in (None, "int8")),
    ],
)
def test_a_runner_takes_blocks_as_it_needs_them(backend, name, codes, monkeypatch):
    model = make_model(name)
    with dualinfer.init_inference(model, backend=backend, kv_cache_dtype=codes, **HOW) as engine:
        runner = engine.runner
        vocab = runner.spec.vocab
        rows = [random_ids(1, n, seed=n, vocab=vocab)[0].astype(np.int32) for n in (100, 7, 64)]
        requests = [Request(row, new) for row, new in zip(rows, (40, 70, 10), strict=True)]
        runner.open(Pool(3, 256))
        expected = texts(runner, requests)
        plain = engine.report().cache_bytes
        runner.open(Pool(3, 256, spare=1, blocks=7, hides=True))
        assert engine.report().cache_bytes < plain and "blocks" in engine.report().cache
        book = runner.blocks
        assert texts(runner, requests) == expected
        check_free(book)
        if backend == "jax":  # a step's own call brings along all that is new, slots that ended too
            with monkeypatch.context() as barred:
                barred.setattr(jax, "device_put", None)
                barred.setattr("dualinfer.backends.jax.sampler.hidden_words", None)
                assert texts(runner, requests) == expected
        # What one has read serves another, and is put back where it was saved.
        runner.extend([Piece.whole(requests[0], 0)])
        runner.copy(0, 3, 64)
        runner.copy(3, 1, 64)
        assert book.held(1) == 1 and book.free == 5
        # Three rows of a prompt in a panel of four: the empty one is not written to a spare slot.
        runner.extend([Piece.whole(Request(np.concatenate(rows)[:130], 1), 2)])
        runner.release([2])
        kept = Request(rows[0], 40, kept=64)
        runner.extend([Piece.whole(kept, 1)])
        saved = runner.save(1, 64)
        found = [t for row in runner.decode(20).fetch() for t in row[:2].tolist()]
        assert found[::2] == found[1::2] == expected[0][1:21]
        runner.release([0, 1, 3])
        check_free(book)
        runner.restore(2, saved)
        token = runner.extend([Piece.whole(kept, 2)]).fetch()[0, 0]
        assert [token, *runner.decode(20).fetch()[:, 2].tolist()] == expected[0][:21]
        assert runner.lacks(20) == 0
        runner.release([2])
        with pytest.raises(OutOfMemoryError, match="blocks"):
            texts(runner, [Request(rows[0], 90), Request(rows[0], 90), Request(rows[0], 90)])
        runner.release(range(3))
        check_free(book)
        # Of pools that are not opened, one leaves what was there, and one leaves none.
        with pytest.raises(ArgumentError, match="take more"):
            runner.open(Pool(3, 256, blocks=3))
        assert runner.blocks is book and texts(runner, requests) == expected
        with pytest.raises(OutOfMemoryError, match="are free on"):
            runner.open(Pool(3, 256, blocks=10**10))
        assert runner.blocks is None and texts(runner, requests) == expected


def check_free(book: Blocks) -> None:
    for own in (book, book.near):
        assert own is None or (own.free == own.count and (own.table == own.count).all())


NEW = 140
# Each of a request, so that every one of them gives up its blocks in one way or another.
OPTIONS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "seed": 3, "temperature": 1.5, "top_k": 20},
    {"do_sample": False, "repetition_penalty": 1.5},
    {"do_sample": True, "seed": 4, "frequency_penalty": 0.5, "logprobs": 2},
    {"do_sample": False, "no_repeat_ngram_size": 2},
]


@pytest.fixture(scope="module", params=ON)
def engine(request):
    backend, _, name = request.param.partition(" ")
    model = make_model(name or "llama-gqa")
    with dualinfer.init_inference(model, backend=backend, **HOW) as engine:
        yield engine


def rows_of(engine: Any) -> list[list[int]]:
    """Prompts of which some begin alike."""
    vocab = engine.runner.spec.vocab
    first = random_ids(1, 100, seed=1, vocab=vocab)[0].tolist()
    others = [random_ids(1, n, seed=n, vocab=vocab)[0].tolist() for n in (7, 20, 50)]
    return [first, first[:70] + others[0], *others, first[:64] + others[1]]


async def all_of(engine: Any, rows: list[list[int]], together: bool, **how: Any) -> list[Any]:
    found = []
    for i, row in enumerate(rows):
        options = {"max_new_tokens": NEW - 30 * (i % 3), "eos_token_id": None}
        made = engine.generate_async(row, **options | OPTIONS[i % len(OPTIONS)] | how)
        found.append(made if together else await told(made))
        if together:
            await asyncio.sleep(0.003 * (i % 3))
    return [await told(made) for made in found] if together else found


async def told(made: Any) -> tuple[list[int], list[float]]:
    tokens = await made
    known = [made.logprobs_of(i).logprob for i in range(len(tokens))] if made._most else []
    return tokens, known


def check_texts(found: list[Any], expected: list[Any]) -> None:
    for (tokens, known), (others, told_alone) in zip(found, expected, strict=True):
        assert tokens == others
        assert known == pytest.approx(told_alone, abs=1e-4)


def check_over(engine: Any) -> None:
    """Nothing is under way, and every block is free once nothing is kept of prompts."""
    book, traffic = engine.runner.blocks, engine.traffic()
    assert traffic.live == traffic.waiting == 0 == traffic.cache
    assert book.free + book.kept == book.count
    engine._loop.check_idle()  # as weights are read again, of which nothing is kept
    check_free(book)


@pytest.fixture(scope="module")
def alone(engine):
    """Each text by itself, in slots with a place of their own."""
    engine.reserve(1, 250, prefix_cache=False)
    return asyncio.run(all_of(engine, rows_of(engine), together=False))


@pytest.mark.parametrize(
    ("shares", "swap_space"), [(True, 1), (False, 0)], ids=["prefixes", "read again"]
)
def test_texts_are_those_alone_though_blocks_run_out(engine, alone, shares, swap_space):
    how: dict[str, Any] = {"prefix_cache": shares, "swap_space": swap_space}
    given = engine.reserve(6, 250, cache_tokens=8 * GRAIN, **how)
    assert given.slots == 6 and given.cache_tokens == 8 * GRAIN
    assert any("share a cache of 512 tokens" in note for note in engine.report().notes)
    before = engine.traffic().preemptions
    check_texts(asyncio.run(all_of(engine, rows_of(engine), together=True)), alone)
    assert engine.traffic().preemptions > before
    assert bool(engine.prefix_counts().found) == shares
    check_over(engine)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("torch", "gemma3"),
        ("torch", "mistral-window"),
        pytest.param("jax", "gemma3", marks=pytest.mark.slow),
    ],
)
def test_layers_with_a_window_keep_the_last_tokens_alone(backend, name, monkeypatch):
    """Some or all see a window: with pauses, shared prompts, drafts and tokens that are chosen."""
    with dualinfer.init_inference(make_model(name), backend=backend, **HOW) as engine:
        runner, how = engine.runner, {"do_sample": False, "eos_token_id": None}
        lengths = (330, 7, 20, 64)
        first, *others = (random_ids(1, n, seed=n, vocab=90)[0].tolist() for n in lengths)
        rows = [first, first + others[0], *others, first[:200] + others[0]]
        engine.reserve(1, 440, prefix_cache=False)
        alone = asyncio.run(all_of(engine, rows, False, max_new_tokens=100))
        plain = np.asarray(engine.generate([first], max_new_tokens=80, **how))
        # Two answers of each of two prompts; one is longer than a pass reads of drafts.
        asked = [first[:20]] * 2 + [first[:9]] * 2, [first[:n] for n in (30, 9, 70, 6)]
        monkeypatch.setattr("dualinfer.engine.scoring._WORTH", 1)
        scores, widths, several = engine.score(*asked), [], runner.decode_several
        monkeypatch.setattr(
            runner, "decode_several", lambda *x: widths.append(x[1][0].shape[1]) or several(*x)
        )
        for swap_space in (1, 0) if name == "gemma3" else (1,):
            engine.reserve(4, 440, cache_tokens=9 * GRAIN, swap_space=swap_space)
            near, before = runner.blocks.near, engine.traffic().preemptions
            assert near is not None and runner.blocks.counts_alone == (name != "gemma3")
            fill_with_nan(runner)
            check_texts(asyncio.run(all_of(engine, rows, True, max_new_tokens=100)), alone)
            assert engine.prefix_counts().found >= 320
            assert engine.traffic().preemptions > before or name != "gemma3"
            if swap_space:
                how |= {"max_new_tokens": 80}
                for more in ({"no_repeat_ngram_size": 60}, {"prompt_lookup_num_tokens": 90}):
                    found = engine.generate([first], **how, **more)
                    np.testing.assert_array_equal(np.asarray(found), plain)
                found = [one.logprob for one in engine.score(*asked)]
                assert found == pytest.approx([one.logprob for one in scores], abs=1e-3)
                assert max(widths) <= AHEAD and {8, 29} & set(widths)
            check_over(engine)
        if backend == "torch":  # as many tokens as have room are counted by what both kinds take
            free = bytes_of(runner) + (1 << 14)
            monkeypatch.setattr(runner, "free_bytes", lambda: free)
            given = engine.reserve(4, 440, cache_tokens="auto", memory_fraction=1.0)
            assert given.cache_tokens >= 9 * GRAIN and bytes_of(runner) <= free


@on_torch
def test_calls_that_wait_for_each_other_come_to_their_end(engine, alone):
    """Whole calls, streams that stay open, and calls whose tokens the host chooses."""
    rows = rows_of(engine)
    engine.reserve(6, 250, cache_tokens=6 * GRAIN)
    book, how = engine.runner.blocks, {"max_new_tokens": NEW, "do_sample": False}
    before = engine._loop.yields
    stream = engine.stream([rows[0]], eos_token_id=None, **how)
    first = [next(stream) for _ in range(3)]
    made = np.asarray(engine.generate(rows[2:5] * 2, eos_token_id=None, pad_token_id=0, **how))
    found = made[:, max(map(len, rows[2:5])) :].tolist()
    assert found[:3] == found[3:]
    assert engine._loop.yields > before
    assert [*first, *stream] == alone[0][0]
    chosen = engine.generate([rows[4]], eos_token_id=None, no_repeat_ngram_size=2, **how)
    assert np.asarray(chosen)[0, len(rows[4]) :].tolist()[: len(alone[4][0])] == alone[4][0]
    with pytest.raises(LengthError, match=r"may come to need 9 blocks of cache, and 6"):
        engine.generate([rows[4]] * 3, no_repeat_ngram_size=2, **how)
    held = engine.stream([rows[4]], no_repeat_ngram_size=2, eos_token_id=None, **how)
    next(held)
    # It has its blocks to the end; others that need all the rest of them go on beside it.
    assert book.held(0) == 3
    beside = np.asarray(engine.generate([rows[2]], eos_token_id=None, **how))
    assert beside[0, len(rows[2]) :].tolist() == found[0]
    held.close()
    del made, chosen
    check_over(engine)


@on_torch
def test_steps_are_fewer_before_somebody_waits(engine, alone):
    """A sequence that ends soon leaves its blocks to another, which is not read again for it."""
    rows = rows_of(engine)
    engine.reserve(2, 250, cache_tokens=4 * GRAIN, prefix_cache=False)
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    expected = np.asarray(engine.generate([rows[1]], max_new_tokens=80, **how))
    before = engine._loop.yields
    soon = engine.stream([rows[4]], max_new_tokens=54, **how)  # it comes to have two blocks
    first = next(soon)
    # 32 steps would take the long one to a third, which is free once the other one has ended.
    found = np.asarray(engine.generate([rows[1]], max_new_tokens=80, **how))
    np.testing.assert_array_equal(found, expected)
    assert len([first, *soon]) == 54 and engine._loop.yields == before
    check_over(engine)


@on_torch
def test_urgent_ones_keep_their_blocks(engine, alone):
    """They begin where others have all blocks, and nobody gives way to those that came last."""
    rows = rows_of(engine)

    async def main():
        made = [engine.generate_async(row, max_new_tokens=NEW, do_sample=False) for row in rows[:3]]
        while made[0]._channel.count < 20:
            await asyncio.sleep(0)
        how = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
        urgent = engine.generate_async(rows[0], priority="high", **how)
        found = await urgent
        assert not all(one._channel.has_ended for one in made)
        for one in made:
            await one
        return found

    engine.reserve(6, 250, cache_tokens=5 * GRAIN)
    before = engine.traffic().preemptions
    assert asyncio.run(main()) == alone[0][0]
    assert engine.traffic().preemptions > before
    check_over(engine)


def test_what_was_saved_is_put_back_where_it_has_blocks_of_its_own(caplog, monkeypatch):
    """Of two that begin alike: others' blocks do not hold what was saved of the one that waits.

    With what it begins with it is not saved: the other one has that.
    """
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    with dualinfer.init_inference(make_model("llama-gqa"), **HOW) as engine:
        vocab = engine.runner.spec.vocab
        first, *others = (
            random_ids(1, n, seed=n, vocab=vocab)[0].tolist() for n in (256, 5, 69, 193)
        )
        a, b = first + others[0], first + others[1]
        expected = [
            np.asarray(engine.generate([row], max_new_tokens=100, **how))[0, len(row) :].tolist()
            for row in (a, b)
        ]
        save, saved = engine.runner.save, []
        monkeypatch.setattr(engine.runner, "save", lambda *x: saved.append(save(*x)) or saved[-1])
        for closes in (True, False):
            engine.reserve(6, 440, cache_tokens=12 * GRAIN)
            streams, texts = [], []
            for row, more in ((a, {}), (others[2], {"no_repeat_ngram_size": 2}), (b, {})):
                count = 64 if more else 100
                streams.append(engine.stream([row], max_new_tokens=count, **how, **more))
                texts.append([next(streams[-1])])
            while not engine._loop.yields:
                texts[0].append(next(streams[0]))
            if closes:  # as many blocks are free then as were saved, and not one more
                streams[1].close()
            texts[0] += streams[0]
            texts[1] += streams[1]
            texts[2] += streams[2]
            assert [texts[0], texts[2]] == expected
            assert engine._loop.yields == 1
            own = saved.pop()
            assert own.start == 256 < own.tokens and not saved
            assert own.nbytes == engine.runner.saved_bytes(own.tokens - 256)
            check_over(engine)
            engine._loop.yields = 0
    assert not caplog.records


@on_torch
def test_streams_go_on_beside_one_that_waits_for_all_of_its_blocks(engine, alone):
    """The host chooses tokens of two, and the second one must leave room for the long one."""
    rows = rows_of(engine)

    async def main():
        long = engine.generate_async(rows[0], max_new_tokens=NEW, do_sample=False)
        while long._channel.count < 3:
            await asyncio.sleep(0)
        how = {"max_new_tokens": 60, "eos_token_id": None, "no_repeat_ngram_size": 2}
        made = [engine.generate_async(rows[4], do_sample=False, **how) for _ in range(2)]
        while made[0]._channel.count < 20:
            await asyncio.sleep(0)
        assert not long._channel.has_ended and not made[1]._channel.count
        return await long, [await one for one in made]

    engine.reserve(6, 250, cache_tokens=7 * GRAIN)
    found, chosen = asyncio.run(main())
    assert found == alone[0][0] and chosen == [alone[4][0][:60]] * 2
    check_over(engine)


def test_a_grammar_goes_on_behind_a_pause():
    with dualinfer.init_inference(dualinfer.embedded_model(), dtype="fp32") as engine:
        rows = [random_ids(1, n, seed=n, vocab=200)[0].tolist() for n in (90, 7, 20)]
        ways: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "seed": 3}, {}]

        async def all_of() -> list[list[int]]:
            how = {"max_new_tokens": 120, "grammar": {"regex": "([a-z]{3,9} [0-9]+, )*"}}
            pairs = zip(rows, ways, strict=True)
            made = [engine.generate_async(row, **how, **way) for row, way in pairs]
            return [await one for one in made]

        engine.reserve(3, 250, prefix_cache=False)
        expected = asyncio.run(all_of())
        for swap_space in (0, 1):
            before = engine.traffic().preemptions
            engine.reserve(3, 250, cache_tokens=5 * GRAIN, swap_space=swap_space)
            assert asyncio.run(all_of()) == expected
            assert engine.traffic().preemptions > before
            check_over(engine)


def bytes_of(runner: Any) -> int:
    """What a torch runner has allocated for the cache, of which layers share a table, and state."""
    arrays = [x for layer in runner._slots.cache._layers for x in layer] + [
        *vars(runner._slots.state).values()
    ]
    arrays += [runner._slots._tokens, runner._slots._rows]
    return sum({id(x): x.nbytes for x in arrays if x is not None}.values())


def test_a_cache_of_as_much_as_has_room(monkeypatch):
    with dualinfer.init_inference(make_model("llama-gqa"), **HOW) as engine:
        runner, free = engine.runner, [1 << 40]
        monkeypatch.setattr(runner, "free_bytes", lambda: free[0])
        # No more than four sequences can come to need, and one for what is kept of prompts.
        assert engine.reserve(4, 250, cache_tokens="auto").cache_tokens == (4 + 1) * 4 * GRAIN
        whole = engine.reserve(4, 250, cache_tokens="auto", prefix_cache=False)
        assert whole.cache_tokens == 4 * 4 * GRAIN
        # One sequence of a last token that is not cached has the tokens that were asked for.
        alone = engine.reserve(1, GRAIN + 1, cache_tokens="auto", prefix_cache=False)
        assert (alone.tokens, alone.cache_tokens) == (GRAIN + 1, GRAIN)
        row = random_ids(1, 60, vocab=90)
        assert engine.generate(row, max_new_tokens=5, eos_token_id=None).shape[-1] == 65
        taken = {}
        for blocks in (6, 7):
            engine.reserve(4, 250, cache_tokens=blocks * GRAIN)
            taken[blocks] = bytes_of(runner)
        for share in (0.5, 1.0, None):
            how: dict[str, Any] = {"cache_tokens": "auto", "memory_fraction": share}
            free[0] = int((taken[7] - 1) / (share or 0.85))
            assert engine.reserve(4, 250, **how).cache_tokens == 6 * GRAIN
            assert bytes_of(runner) == taken[6] <= free[0] * (share or 0.85)
        free[0] = taken[6] - (taken[7] - taken[6]) * 3
        with pytest.raises(OutOfMemoryError, match="A cache of 249 tokens for 4 sequences has no"):
            engine.reserve(4, 250, cache_tokens="auto", memory_fraction=1)
        assert "4 sequences of 250 tokens" in engine.report().notes[-1]  # as before
        assert engine.reserve(4, 64, cache_tokens="auto").cache_tokens == 2 * GRAIN
        with pytest.raises(
            OutOfMemoryError, match=r"A cache of 1,000,000,000,000 tokens for .*'auto'"
        ):
            engine.reserve(4, 64, cache_tokens=10**12)
        monkeypatch.setattr(runner, "free_bytes", lambda: None)
        with pytest.raises(UnsupportedError, match="does not say how much"):
            engine.reserve(4, 250, cache_tokens="auto")
        for wrong in (0, 1.5, True, "0.9"):
            with pytest.raises(ArgumentError, match="memory_fraction"):
                engine.reserve(4, 250, memory_fraction=wrong)
        for flag in ("prepare", "prefix_cache"):
            with pytest.raises(ArgumentError, match=f"{flag}='no'.: expected True or False"):
                engine.reserve(4, 250, **{flag: "no"})  # pyright: ignore[reportArgumentType]
        for sized in ({"slots": 4}, {"cache_tokens": 250}, {"slots": 4, "cache_tokens": 250}):
            with pytest.raises(ArgumentError, match=r"memory_fraction=1e-09 .* says how much"):
                engine.reserve(tokens=250, memory_fraction=1e-9, **sized)


@pytest.mark.parametrize("backend", ON)
def test_steps_of_others_leave_the_window_of_a_sequence_whose_tokens_the_host_chooses(backend):
    with dualinfer.init_inference(make_model("mistral-window"), backend=backend, **HOW) as engine:

        def texts() -> list[int]:
            how = {"max_new_tokens": 200, "eos_token_id": None, "no_repeat_ngram_size": 40}
            stream = engine.stream([[5, 6, 7, 8]], **how)
            begun = [next(stream) for _ in range(66)]
            engine.generate([[9, 10, 11]], max_new_tokens=200, eos_token_id=None)
            return begun + list(stream)

        alone = texts()
        engine.reserve(2, 260, cache_tokens=8 * GRAIN)
        assert texts() == alone


def test_on_a_gpu_sequences_share_a_cache_that_nobody_sizes(monkeypatch):
    monkeypatch.setattr("dualinfer.engine.reserve.is_on_host", lambda runner: False)
    for name, shares in (("llama-gqa", True), ("mamba2", False), ("mistral-window", True)):
        with dualinfer.init_inference(make_model(name), **HOW) as engine:
            monkeypatch.setattr(engine.runner, "free_bytes", lambda: 1 << 27)
            given = engine.reserve(tokens=250, prepare=False)
            assert bool(given.cache_tokens) == shares
            assert engine.reserve(4, 250, prepare=False).cache_tokens == 0
            monkeypatch.setattr(engine.runner, "free_bytes", lambda: None)
            assert engine.reserve(tokens=250, prepare=False).cache_tokens == 0


def test_what_has_no_blocks_is_refused(engine):
    short = r"one sequence of 258 tokens must have room .* caches 257 .* would be 256\."
    with pytest.raises(ArgumentError, match=short):
        engine.reserve(4, 258, cache_tokens=256)
    for wrong in (0, True, 1.5, "all"):
        with pytest.raises(ArgumentError, match="cache_tokens"):
            engine.reserve(4, 250, cache_tokens=wrong)
    assert engine.reserve(4, cache_tokens=130).tokens == 130
    # Blocks are whole, and the last token is not cached: sequences that fit so are served.
    for tokens, cache_tokens in ((GRAIN + 1, GRAIN), (GRAIN + 1, 1), (2, 1)):
        given = engine.reserve(1, tokens, cache_tokens=cache_tokens, prefix_cache=False)
        assert (given.tokens, given.cache_tokens) == (tokens, GRAIN)
        row = random_ids(1, tokens - 1, vocab=90)
        assert engine.generate(row, max_new_tokens=1, eos_token_id=None).shape[-1] == tokens
        with pytest.raises(LengthError, match="longer than"):
            engine.generate(row, max_new_tokens=2, eos_token_id=None)
        with pytest.raises(LengthError, match="longer than"):
            asyncio.run(all_of(engine, [row[0].tolist()], False, max_new_tokens=2))
    made = dualinfer.init_inference(make_model("mamba2"), **HOW)
    with made as other, pytest.raises(UnsupportedError, match="keep states"):
        other.reserve(2, 64, cache_tokens=64)


def test_a_server_tells_how_full_its_cache_is():
    from dualinfer.serving.http.app import Server
    from dualinfer.serving.http.beside import served
    from dualinfer.serving.http.engines import LocalEngine

    def usage() -> float:
        with urllib.request.urlopen(f"{url}/metrics") as got:
            lines = got.read().decode().splitlines()
        (line,) = [x for x in lines if x.startswith("vllm:kv_cache_usage_perc{")]
        return float(line.split()[-1])

    with dualinfer.init_inference(dualinfer.embedded_model(), dtype="fp32") as engine:
        engine.reserve(6, 256, cache_tokens=8 * GRAIN)
        with served(Server(LocalEngine(engine), "small")) as url:
            body = {"model": "small", "prompt": list(range(100)), "max_tokens": 150}
            body |= {"temperature": 0, "stream": True, "ignore_eos": True}
            head, data = {"Content-Type": "application/json"}, json.dumps(body).encode()
            asked = urllib.request.Request(f"{url}/v1/completions", data, head)
            assert usage() == 0
            with urllib.request.urlopen(asked) as answer:
                answer.readline()
                assert usage() in (2 / 8, 3 / 8, 4 / 8)
                assert b"[DONE]" in answer.read()
            assert usage() == 0
        check_over(engine)


# Weights come from the host for each pass, and the cache is in codes.
STREAMED = {"keep_module_on_host": True, "resident_layers": 1, "kv_cache_dtype": "fp8_e4m3"}


def test_weights_that_are_streamed_and_codes():
    with dualinfer.init_inference(make_model("llama-gqa"), **HOW, **STREAMED) as engine:
        rows = rows_of(engine)[:3]
        engine.reserve(1, 250, prefix_cache=False)
        expected = asyncio.run(all_of(engine, rows, together=False))
        engine.reserve(3, 250, cache_tokens=5 * GRAIN)
        check_texts(asyncio.run(all_of(engine, rows, together=True)), expected)
        assert engine._loop.yields
        check_over(engine)


@pytest.mark.slow
@pytest.mark.parametrize("how", [STREAMED, {"tensor_parallel": {"tp_size": 2}}])
def test_any_requests_on_jax_by_the_programs_that_it_began_with(how):
    """Whatever the table has in it, as codes, streamed, and where two devices share the model."""
    with dualinfer.init_inference(make_model("llama-gqa"), backend="jax", **HOW, **how) as engine:
        rows = rows_of(engine)[:3]
        engine.reserve(3, 250, cache_tokens=6 * GRAIN, prepare=True)
        found = asyncio.run(all_of(engine, rows, together=True))
        count = engine.report().compilations
        assert [x for x, _ in asyncio.run(all_of(engine, rows[::-1], together=True, seed=9))]
        assert engine.report().compilations == count
        check_over(engine)
        engine.reserve(3, 250)
        check_texts(found, asyncio.run(all_of(engine, rows, together=True)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "torch gemma3", "jax"], indirect=True)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_requests_that_join_and_leave_have_the_texts_that_they_have_alone(engine, alone, data):
    rows = rows_of(engine)
    blocks, slots = data.draw(st.integers(5, 9)), data.draw(st.integers(1, 6))
    kinds = st.tuples(st.integers(0, len(rows) - 1), st.integers(1, NEW - 60), st.booleans())
    wanted = data.draw(st.lists(st.tuples(kinds, st.integers(0, 4), st.booleans()), max_size=9))
    shares, swap_space = data.draw(st.booleans()), data.draw(st.sampled_from((0, 1)))
    engine.reserve(
        slots, 258, cache_tokens=blocks * GRAIN, prefix_cache=shares, swap_space=swap_space
    )

    async def main():
        made = []
        for (i, count, leaves), pause, is_urgent in wanted:
            options = {"max_new_tokens": count, "eos_token_id": None} | OPTIONS[i % 5]
            how = {"priority": "high" if is_urgent else "normal"}
            made.append((i, count, leaves, engine.generate_async(rows[i], **options, **how)))
            for _ in range(pause):
                await asyncio.sleep(0.004)
        for i, count, leaves, one in made:
            if leaves:
                one.cancel()
            tokens = [token async for token in one]
            assert len(tokens) == count or leaves
            if "frequency_penalty" not in OPTIONS[i % 5]:
                assert tokens == alone[i][0][: len(tokens)]

    asyncio.run(main())
    check_over(engine)


def fill_with_nan(runner: Any) -> None:
    """Overwrite every key and value of the cache, as a sequence that overflowed may have."""
    if isinstance(runner.device, torch.device):
        with torch.inference_mode():
            held = [x for layer in runner._slots.cache._layers for x in layer if torch.is_tensor(x)]
            for x in filter(torch.is_floating_point, held):
                x.fill_(float("nan"))
        return

    def poisoned(x: Any) -> Any:
        full = np.full(x.shape, np.nan, x.dtype) if x.dtype.kind == "f" else x
        return jax.device_put(full, x.sharding)

    cache, state = runner._slots.cache, runner._slots.state
    runner._slots.hold(jax.tree.map(poisoned, cache), state)


@pytest.mark.parametrize("room", [{}, {"cache_tokens": 600}], ids=["slots", "blocks"])
@pytest.mark.parametrize("backend", ON)
def test_a_sequence_reads_nothing_of_what_another_left(backend, room):
    row = random_ids(1, 70, vocab=90)
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with dualinfer.init_inference(make_model("llama-gqa"), backend=backend, **HOW) as engine:
        expected = np.asarray(engine.generate(row, **how))
        engine.reserve(3, 200, **room)
        fill_with_nan(engine.runner)
        np.testing.assert_array_equal(np.asarray(engine.generate(row, **how)), expected)
