"""Prompts in pieces: any cut, and any order of pieces and steps, gives the texts of whole ones."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import dualinfer  # noqa: E402
from dualinfer.backends.base import Piece, Pool, Request, Sampling  # noqa: E402
from dualinfer.backends.slots import part_of, parts_of  # noqa: E402
from dualinfer.backends.torch import prompts  # noqa: E402
from dualinfer.engine import reading, slots  # noqa: E402
from dualinfer.errors import LengthError, StepError  # noqa: E402
from dualinfer.ops import caches  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import random_ids  # noqa: E402

HOW = {"dtype": "fp32", "replace_with_kernel_inject": True}
LENGTHS, NEW = (150, 40, 70), 5
# Windows and soft caps, biases of distances, codes, latent vectors, states beside attention.
CASES: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: make_model("gemma2"),
    "bloom": lambda: make_model("bloom"),
    "int8 codes": lambda: make_model("llama-gqa"),
    "blocks": lambda: make_model("llama-gqa"),
    "latent": lambda: make_model("youtu"),
    "falcon_h1": lambda: make_model("falcon_h1"),
    "lfm2_moe": lambda: make_model("lfm2_moe"),
    "jamba": lambda: make_model("jamba"),
}
ON_JAX = ("latent", "falcon_h1")


def cases() -> Iterator[Any]:
    """Each case on torch, and on JAX, which compiles, those that show what it has of its own."""
    for name in CASES:
        yield pytest.param((name, "torch"), id=f"{name}-torch")
    for name in ON_JAX:
        yield pytest.param((name, "jax"), id=f"{name}-jax", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=cases())
def engine(request) -> Iterator[tuple[Any, str]]:
    """An engine of one case, and its backend."""
    name, backend = request.param
    how = {"kv_cache_dtype": "int8"} if name == "int8 codes" else {}
    with pytest.MonkeyPatch.context() as patch:
        if name == "blocks":
            patch.setattr(caches, "kind_of", lambda a: "blocks")
        with dualinfer.init_inference(CASES[name](), backend=backend, **HOW, **how) as made:
            yield made, backend


def requests_of(engine: Any) -> list[Request]:
    vocab = engine.runner.spec.vocab
    rows = [random_ids(1, n, seed=n, vocab=vocab)[0].astype(np.int32) for n in LENGTHS]
    drawn = Sampling(do_sample=True, temperature=3.0, seed=5, repetition_penalty=1.3)
    if "int8" in engine.report().cache:  # a code may be the next one, by the last bit of a float
        drawn = Sampling()
    how = drawn, drawn, Sampling()
    return [Request(p, NEW, sampling=s) for p, s in zip(rows, how, strict=True)]


def texts_of(runner: Any, events: list[Piece | int]) -> dict[int, list[int]]:
    """The texts of requests, by slot, whose pieces are read in turns with so many steps."""
    found: dict[int, list[int]] = {}
    slots = {event.slot for event in events if isinstance(event, Piece)}
    try:
        for event in [*events, NEW]:
            if isinstance(event, Piece):
                tokens = runner.extend([event]).fetch()
                assert tokens.shape == (1, int(event.ends))
                found |= {event.slot: tokens[0].tolist()} if event.ends else {}
            elif found:
                for row in runner.decode(event).fetch():
                    for slot in slots:
                        if slot >= len(row) or row[slot] < 0:
                            continue
                        found[slot].append(int(row[slot]))
    finally:
        runner.release(sorted(slots))
    return found


@pytest.fixture(scope="module")
def whole(engine) -> dict[int, list[int]]:
    """The texts where each prompt is read whole, and alone."""
    made, _ = engine
    found: dict[int, list[int]] = {}
    for slot, request in enumerate(requests_of(made)):
        found[slot] = texts_of(made.runner, [Piece.whole(request, 0)])[0]
        assert len(found[slot]) == NEW
    return found


def schedules(requests: list[Request], grain: int) -> st.SearchStrategy[list[Piece | int]]:
    """Cuts at multiples of a grain, in any order that keeps each prompt's, and steps between."""

    @st.composite
    def drawn(draw: Callable[..., Any]) -> list[Piece | int]:
        queues = []
        for slot, request in enumerate(requests):
            size = len(request.prompt)
            cuts = draw(st.sets(st.sampled_from(range(grain, size, grain) or [size]), max_size=4))
            bounds = [0, *sorted(cuts - {size}), size]
            queues.append([Piece(request, slot, *pair) for pair in pairwise(bounds)])
        order = draw(st.permutations([i for i, queue in enumerate(queues) for _ in queue]))
        events: list[Piece | int] = []
        for slot in order:
            events += [queues[slot].pop(0), draw(st.sampled_from((0, 0, 1, 2)))]
        return [event for event in events if event != 0]

    return drawn()


def test_any_cut_and_any_order_give_the_texts_of_whole_prompts(engine, whole):
    made, backend = engine
    requests = requests_of(made)
    on_jax = backend == "jax"  # where each size of a piece compiles

    @settings(
        max_examples=1 if on_jax else 6,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(schedules(requests, 64 if on_jax else 1))
    def check(events: list[Piece | int]) -> None:
        assert texts_of(made.runner, events) == whole

    check()
    runner = made.runner
    check_together(runner, requests, whole)
    runner.open(Pool(3, 160))
    try:
        check()
        check_together(runner, requests, whole)
    finally:
        runner.open(None)


def check_together(runner: Any, requests: list[Request], whole: dict[int, list[int]]) -> None:
    """Pieces of several prompts in one call give the texts of whole ones."""
    try:
        assert runner.extend([Piece(requests[0], 0, 0, 64)]).fetch().shape == (1, 0)
        found = {1: runner.extend([Piece(requests[1], 1, 0, 40)]).fetch()[0].tolist()}
        together = [Piece(requests[0], 0, 64, 150), Piece(requests[2], 2, 0, 70)]
        both = runner.extend(together).fetch()
        assert both.shape == (1, 2)  # in the order of the pieces, whatever goes first
        found |= {0: [int(both[0, 0])], 2: [int(both[0, 1])]}
        for row in runner.decode(NEW).fetch():
            for slot in found:
                found[slot] += [int(row[slot])] if row[slot] >= 0 else []
    finally:
        runner.release([0, 1, 2])
    assert found == whole


def serve(runner: Any, requests: list[Request], slots: int) -> list[list[int]]:
    """The texts of requests that take slots as these are free, two a turn, as a server's do."""
    waiting, texts = list(range(len(requests))), [[] for _ in requests]
    served: dict[int, int] = {}
    while waiting or served:
        free = [slot for slot in range(slots) if slot not in served][:2]
        joined = dict(zip(free, waiting, strict=False))
        waiting = waiting[len(joined) :]
        served |= joined
        if joined:
            pieces = [Piece.whole(requests[i], slot) for slot, i in joined.items()]
            for i, token in zip(joined.values(), runner.extend(pieces).fetch()[0], strict=True):
                texts[i].append(int(token))
        for row in runner.decode(3).fetch():
            for slot, i in served.items():
                texts[i] += [int(row[slot])] if row[slot] >= 0 else []
        ended = [s for s, i in served.items() if len(texts[i]) >= requests[i].max_new_tokens]
        runner.release(ended)
        served = {slot: i for slot, i in served.items() if slot not in ended}
    return texts


def test_steps_over_a_pool_have_few_sizes():
    """For kernels half of what a pool has, or more, is all of it."""
    assert {part.tokens for part in parts_of(caches.Room(1, 1024, 0))} == {512, 1024}
    for tokens, reaches in ((320, [320]), (1024, [1024]), (1088, [512, 1088])):
        found = parts_of(caches.Room(4, tokens, 0), coarse=True)
        assert found == [caches.Room(n, reach, 0) for n in (4, 2, 1) for reach in reversed(reaches)]
    found = {part.tokens for part in parts_of(caches.Room(1, 8192, 0))}
    assert found == {512, 2048, 8192}
    for part in parts_of(caches.Room(6, 8192, 0)):
        assert part_of(caches.Room(6, 8192, 0), part.slots, part.tokens) == part


def test_ragged_requests_in_a_pool_compile_few_programs(engine_of):
    """32 of any length; without a pool each (rows, width, room) was a program of its own."""
    random = np.random.default_rng(0)
    requests = [
        Request(random_ids(1, n, seed=n)[0].astype(np.int32), new)
        for n, new in random.integers((1, 1), (450, 9), (32, 2)).tolist()
    ]
    expected = serve(engine_of("llama-gqa", "torch").runner, requests, 4)
    runner = engine_of("llama-gqa", "jax").runner
    before = runner.report()["compilations"]
    runner.open(Pool(4, 500))
    try:
        assert serve(runner, requests, 4) == expected
        few = runner.report()["compilations"] - before
        assert few <= 3 + 3, few  # steps of 1, 2 and 4 slots, panels of 256, 512 and 1,024 tokens
        for slot, size in ((4, 10), (0, 499)):
            with pytest.raises(LengthError, match="in a pool of 4 slots of 512 tokens"):
                runner.prefill([Request(np.ones(size, np.int32), 40)], [slot])
        assert not len(runner._slots.live)
        runner.prefill(requests[:1], [0])
        with pytest.raises(StepError, match="under way"):
            runner.open(None)
    finally:
        runner.release([0])
        runner.open(None)


def calls_of(engine: Any, name: str) -> list[Any]:
    """What `generate` and streams give: batches, scores, hidden tokens, and noise."""
    vocab, how = engine.runner.spec.vocab, {"eos_token_id": None, "do_sample": False}
    if name == "t5":
        ids = random_ids(3, 20, vocab=vocab)
        return [np.asarray(engine.generate(x, max_new_tokens=5, **how)) for x in (ids, ids[:1])]
    how |= {"pad_token_id": 0, "max_new_tokens": 4}
    rows = [random_ids(1, n, seed=n, vocab=vocab)[0].tolist() for n in (70, 9, 118)]
    found = [np.asarray(engine.generate(rows, **how))]
    told = {"return_dict_in_generate": True, "output_scores": True}
    outputs = engine.generate(rows[:2], **how, **told)
    found += [np.asarray(outputs.sequences), *map(np.asarray, outputs.scores)]
    found += [np.asarray(engine.generate(rows, suppress_tokens=[int(found[0][0, -1])], **how))]
    drawn = {"do_sample": True, "seed": 3, "top_k": 5, "repetition_penalty": 1.4}
    found += [np.asarray(engine.generate(rows, **(how | drawn)))]
    return [*found, np.array(list(engine.stream(rows[0], **(how | {"pad_token_id": None}))))]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "torch") for name in ("gpt2", "gpt2 on the host", "t5")),
        *(
            pytest.param(name, "jax", marks=pytest.mark.slow)
            for name in ("gpt2 on two devices", "t5")
        ),
    ],
)
def test_calls_are_the_same_over_a_pool(name, backend):
    how: dict[str, Any] = {}
    if "host" in name:
        how = {"keep_module_on_host": True}
    elif "two" in name:
        how = {"tensor_parallel": {"tp_size": 2}}
    model = make_model("t5" if name == "t5" else "gpt2")
    with dualinfer.init_inference(model, backend=backend, **HOW, **how) as engine:
        expected = calls_of(engine, name)
        engine.runner.open(Pool(4, 160))
        for x, y in zip(expected, calls_of(engine, name), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@contextmanager
def noted(runner: Any) -> Iterator[list[Any]]:
    """What the runner is asked for: (starts and stops of pieces, or steps)."""
    made: list[Any] = []
    extend, decode = runner.extend, runner.decode

    def noting(name: str, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(given: Any) -> Any:
            made.append([(p.start, p.stop) for p in given] if name == "extend" else given)
            return own(given)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "extend", noting("extend", extend))
        patch.setattr(runner, "decode", noting("decode", decode))
        yield made


def test_a_long_prompt_lets_an_open_stream_go_on(engine_of, monkeypatch):
    engine = engine_of("llama-gqa", "torch")
    monkeypatch.setattr(reading, "PIECE", 128)
    rows = [random_ids(1, n, seed=n)[0].tolist() for n in (200, 10, 300)]
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with noted(engine.runner) as alone:
        expected = [engine.generate([row], **how).tolist()[0] for row in rows]
        streamed = list(engine.stream(rows[1], **how | {"max_new_tokens": 40}))
    assert [(0, 200)] in alone and [(0, 300)] in alone  # nobody waits
    stream = engine.stream(rows[1], **how | {"max_new_tokens": 40})
    found = [next(stream)]
    with noted(engine.runner) as made:
        texts = np.asarray(engine.generate(rows, **how)).tolist()
    for row, text, whole in zip(rows, texts, expected, strict=True):
        assert [x for x in text if x][-len(whole) :] == [x for x in whole if x], len(row)
    # Some of each first, so that all have their room; then in their order, with steps between.
    pieces = [x for x in made if isinstance(x, list)]
    assert pieces[0] == [(0, 64), (0, 10), (0, 64)]
    assert pieces[1:] == [[(64, 192)], [(192, 200), (64, 128)], [(128, 256)], [(256, 300)]]
    between = [b for a, b in pairwise(made) if isinstance(a, list)]
    assert all(isinstance(x, int) and x <= slots.BESIDE for x in between[:-1]), made
    assert found + list(stream) == streamed


def test_a_stream_that_ends_leaves_the_rest_of_a_prompt_to_one_pass(engine_of, monkeypatch):
    engine = engine_of("llama-gqa", "torch")
    monkeypatch.setattr(reading, "PIECE", 64)
    row = random_ids(1, 400)[0].tolist()
    how = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = list(engine.stream(row, **how))
    stream = engine.stream([5, 6, 7], **how | {"max_new_tokens": 4})
    next(stream)
    with noted(engine.runner) as made:
        other = engine.stream(row, **how)
        found = [next(other)]
    assert made[0] == [(0, 64)] and made[-1] != [(0, 400)]
    assert [x for x in made if isinstance(x, list)][-1][-1][1] == 400
    assert sum(isinstance(x, list) for x in made) < 7
    assert found + list(other) == expected
    assert len(list(stream)) == 3


def test_a_prompt_in_pieces_may_be_left_before_it_is_read(engine_of, monkeypatch):
    engine = engine_of("llama-gqa", "torch")
    monkeypatch.setattr(reading, "PIECE", 64)
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = list(engine.stream([5, 6, 7], **how))
    stream = engine.stream([5, 6, 7], **how)
    found = [next(stream)]
    lives = engine._loop.start([Request(random_ids(1, 300)[0].astype(np.int32), 4)])
    engine._loop.leave(lives)
    assert found + list(stream) == expected and not engine._loop._live


def test_ids_and_embeddings_in_pieces_are_read_apart(engine_of, hf_model, monkeypatch):
    engine = engine_of("llama-gqa", "torch")
    monkeypatch.setattr(reading, "PIECE", 64)
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    ids = [random_ids(1, n, seed=n) for n in (200, 150)]
    embeds = hf_model("llama-gqa").get_input_embeddings()(torch.from_numpy(ids[1]).long()).detach()
    expected = [list(engine.stream(ids[0][0].tolist(), **how))]
    expected.append(engine.generate(inputs_embeds=embeds, **how).tolist()[0])
    with ThreadPoolExecutor(2) as pool:
        stream = engine.stream([5, 6, 7], **how | {"max_new_tokens": 30})
        next(stream)
        lives = engine._loop.start([Request(ids[0][0].astype(np.int32), 4)])
        found = pool.submit(engine.generate, inputs_embeds=embeds, **how).result()
        engine._loop.fill(lives, 4, 1)
        assert lives[0].error is None and len(list(stream)) == 29
    assert [lives[0].tokens, found.tolist()[0]] == expected
    engine._loop.leave(lives)


def test_a_piece_that_fails_ends_its_own_sequence_alone(engine_of, monkeypatch):
    engine = engine_of("llama-gqa", "torch")
    monkeypatch.setattr(reading, "PIECE", 64)
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = list(engine.stream([5, 6, 7], **how))
    stream, extend = engine.stream([5, 6, 7], **how), engine.runner.extend
    found = [next(stream)]

    def failing(pieces: Any) -> Any:
        if pieces[0].start:
            raise MemoryError("no room")
        return extend(pieces)

    monkeypatch.setattr(engine.runner, "extend", failing)
    with pytest.raises(StepError, match=r"Reading a prompt failed.*no room"):
        engine.generate(random_ids(1, 300), **how)
    assert found + list(stream) == expected and not engine._loop._live


def test_who_loses_a_sequence_by_the_step_of_another_is_told_why(engine_of, monkeypatch):
    engine = engine_of("llama-gqa", "torch")
    one, other = (engine.stream([5, 6, 7], max_new_tokens=9, eos_token_id=None) for _ in range(2))
    assert next(one) == next(other)
    with monkeypatch.context() as failing:
        failing.setattr(engine.runner, "decode", None)
        with pytest.raises(TypeError) as raised:
            list(one)
    with pytest.raises(StepError, match="A step failed") as told:
        list(other)
    assert told.value.__cause__ is raised.value and not engine._loop._live


def test_of_a_prompt_in_pieces_its_own_tokens_are_seen(engine_of):
    runner = engine_of("llama-gqa", "jax").runner
    drawn = Sampling(repetition_penalty=1.3)
    request = Request(random_ids(1, 128)[0].astype(np.int32) % 50, 4, sampling=drawn)
    try:
        for start in (0, 64):
            runner.extend([Piece(request, 0, start, start + 64)]).fetch()
            seen = np.flatnonzero(np.asarray(runner._slots.state.seen)[0])
            wanted = set(request.tokens[: start + 64].tolist())
            assert len(set(seen) - wanted) == (start > 0) and wanted <= set(seen)
    finally:
        runner.release([0])


def test_a_rest_that_is_too_long_for_a_pass_is_cut(engine_of, monkeypatch):
    engine = engine_of("llama-gqa", "torch")
    request = Request(random_ids(1, 300)[0].astype(np.int32), 2)
    whole, sizes = texts_of(engine.runner, [Piece.whole(request, 0)]), []
    run = prompts.Prompts._pass
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 128)
    monkeypatch.setattr(
        prompts.Prompts,
        "_pass",
        lambda self, *args, **how: sizes.append(args[2].ids.shape[1]) or run(self, *args, **how),
    )
    assert texts_of(engine.runner, [Piece(request, 0, 0, 64), Piece(request, 0, 64, 300)]) == whole
    assert sizes == [64, 64, 64, 64, 44]


def test_a_piece_without_what_comes_before_is_refused():
    with dualinfer.init_inference(make_model("gpt2"), backend="torch", **HOW) as engine:
        request = Request(np.arange(3, 23, dtype=np.int32), 4)
        with pytest.raises(StepError, match="before the first"):
            engine.runner.extend([Piece(request, 0, 8, 20)])
