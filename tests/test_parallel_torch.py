"""Tensor parallelism of fused mode on torch: real processes over gloo, each a rank."""

import functools
import os
import re
import threading
import time
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers

import dualinfer
from dualinfer.backends.base import Pool
from dualinfer.backends.torch import prompts
from dualinfer.backends.torch.parallel import Ranks, Split
from dualinfer.errors import DistributedError
from dualinfer.model.families import describe_model
from dualinfer.parallel.sharding import make_plan

from .cases import make_model
from .cases.decoders import ALL, GENERATING
from .checkpoints import write_byte_tokenizer, write_llama
from .models import PAD, random_ids, relative_rms
from .ranks import RankError

pytestmark = pytest.mark.xdist_group("ranks")

INJECT = {"dtype": "fp32", "replace_with_kernel_inject": True}
GREEDY = {"max_new_tokens": 6, "do_sample": False}
SAMPLED = {"max_new_tokens": 6, "do_sample": True, "top_k": 40, "temperature": 0.8, "seed": 7}

# One of each family, and what is odd: biases, norms of heads, positions, widths of their own.
SOME = (
    *("llama-gqa", "llama-mqa", "llama-bias", "mistral-window", "qwen3", "gpt2", "gpt2-inverse"),
    *("opt-post", "gptj", "gpt-neo", "neox", "bloom", "gemma2", "bert", "bert-masked"),
)

_model = functools.cache(make_model)


def _engine(name, tp, **fields):
    parallel = {"tp_size": tp, "timeout": 150, **fields.pop("tensor_parallel", {})}
    return dualinfer.init_inference(_model(name), tensor_parallel=parallel, **INJECT, **fields)


def _padded():
    ids, mask = random_ids(3, 11), np.ones((3, 11), np.int64)
    mask[1, :4], mask[2, :7] = 0, 0
    ids[mask == 0] = PAD
    return torch.from_numpy(ids), torch.from_numpy(mask)


def outputs_of(names, tp):
    """Of each model: forward's output over a padded batch, its error against HF's, and texts."""
    found = {}
    for name in names:
        ids, mask = _padded()
        with _engine(name, tp) as engine, torch.no_grad():
            with_mask = {"input_ids": ids, "attention_mask": mask}
            ours = engine(**with_mask)[0]
            theirs = _model(name)(**with_mask)[0]
            real = mask.bool()
            texts = []
            if name in GENERATING:
                with patch.object(prompts, "_MOST_AT_ONCE", 8):  # in pieces
                    texts = [engine.generate(**with_mask, **GREEDY).tolist()]
                engine.runner.open(Pool(3, 64))
                texts.append(engine.generate(**with_mask, **SAMPLED).tolist())
            layers = engine.runner.params.layers
            held = sum(prod(w.shape) for group in layers for w in group.values())
            found[name] = relative_rms(ours[real], theirs[real]), ours.numpy(), texts, held
    return found


@pytest.mark.parametrize(
    ("tp", "names"),
    [(2, ALL), pytest.param(3, SOME, marks=pytest.mark.slow), (4, SOME)],
    ids=["2", "3", "4"],
)
def test_every_model_computes_the_same_over_any_number_of_ranks(crew, engine_of, tp, names):
    by_rank = crew.run(outputs_of, names, tp, world=tp)
    ids, mask = _padded()
    for name in names:
        errors, outputs, texts, held = zip(*(rank[name] for rank in by_rank), strict=True)
        assert max(errors) < 1e-5, name
        assert all(np.array_equal(outputs[0], other) for other in outputs), name
        one = engine_of(name, "torch")
        whole = sum(prod(w.shape) for g in one.runner.params.layers for w in g.values())
        assert max(held) < 0.8 * whole, name
        if name in GENERATING:
            how = {"input_ids": ids, "attention_mask": mask}
            expected = [one.generate(**how, **kind).tolist() for kind in (GREEDY, SAMPLED)]
            assert all(text == expected for text in texts), name


def collectives_of(name, tp):
    counts = {"sum": 0, "join_last": 0, "exchange": 0}
    with _engine(name, tp) as engine:
        peers = engine._turns.peers

        def counting(kind):
            work = getattr(peers, kind)

            def call(*args):
                counts[kind] += 1
                return work(*args)

            setattr(peers, kind, call)

        for kind in counts:
            counting(kind)
        prompt = torch.tensor([[5, 6, 7]])
        engine.generate(prompt, max_new_tokens=1, do_sample=False)
        first = dict(counts)
        engine.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        return len(engine.runner.spec.layers), first, counts


def room_of_one(tp, when):
    """What each rank's error says where rank 1 has no room, by the check or by the allocation."""
    from dualinfer.backends.torch import cache

    prompt = torch.tensor([[5, 6, 7]])
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with _engine("llama-gqa", tp) as engine:
        rank = engine._turns.peers.rank
        stream = engine.stream(prompt, max_new_tokens=3, do_sample=False)
        next(stream)
        free, grown = cache.free_bytes, cache.KINDS["full"].grown
        if rank == 1 and when == "checked":
            cache.free_bytes = lambda device: 1000
        elif rank == 1:

            def fail(*args):
                raise torch.OutOfMemoryError("in pieces")

            cache.KINDS["full"].grown = fail
        held = engine.report().cache_bytes
        try:
            engine.generate(prompt.repeat(4, 1), **how)
        except dualinfer.DualinferError as error:
            told = type(error).__name__, str(error)
        finally:
            cache.free_bytes, cache.KINDS["full"].grown = free, grown
        assert engine.report().cache_bytes == held
        rest = list(stream)
        return told, rest, engine.generate(prompt, **how).tolist()


@pytest.mark.parametrize("when", ["checked", "allocated"])
def test_a_cache_that_one_rank_has_no_room_for_is_refused_by_all(crew, engine_of, when):
    ranks = crew.run(room_of_one, 2, when)
    (first, said), (second, own) = (rank[0] for rank in ranks)
    assert second == "OutOfMemoryError" and "of rank 1" in own
    if when == "checked":
        assert first == "OutOfMemoryError" and "1,000 (0.00 GiB) are free on cpu of rank 1" in said
    else:
        assert first == "DistributedError" and "failed elsewhere. rank 1: OutOfMemory" in said
    one = engine_of("llama-gqa", "torch")
    prompt = torch.tensor([[5, 6, 7]])
    tokens = list(one.stream(prompt, max_new_tokens=3, do_sample=False))
    text = one.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist()
    assert all(rank[1:] == (tokens[1:], text) for rank in ranks)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gptj"])
def test_a_token_takes_two_sums_a_layer_one_for_its_embedding_and_one_gather(crew, name):
    """And a call three messages, however many tokens it makes, two more if the cache grows."""
    for layers, first, total in crew.run(collectives_of, name, 2):
        assert first == {"sum": 2 * layers + 1, "join_last": 1, "exchange": 5}
        assert total == {"sum": 5 * (2 * layers + 1), "join_last": 5, "exchange": 8}


def degrees_in_one_job():
    ids = torch.from_numpy(random_ids(2, 9))
    two, four = _engine("llama-gqa", 2), _engine("gpt2", 4)
    results = [two(ids).logits, four(ids).logits, two(ids).logits]
    two.close()
    results.append(four(ids).logits)
    texts = four.generate(ids, **GREEDY)
    four.close()
    one = _engine("llama-gqa", 1)
    results.append(one(ids).logits)
    return [r.numpy() for r in results], texts.tolist()


def test_engines_of_several_degrees_live_in_one_job(crew, engine_of):
    ids = torch.from_numpy(random_ids(2, 9))
    llama, gpt2 = (engine_of(n, "torch")(ids).logits.numpy() for n in ("llama-gqa", "gpt2"))
    texts = engine_of("gpt2", "torch").generate(ids, **GREEDY).tolist()
    for results, text in crew.run(degrees_in_one_job, world=4):
        for ours, theirs in zip(results, (llama, gpt2, llama, gpt2, llama), strict=True):
            assert relative_rms(ours, theirs) < 1e-5
        assert text == texts


def copies_with_inputs_of_their_own():
    rank = int(os.environ["RANK"])
    ids = torch.from_numpy(random_ids(1, 5, seed=rank // 2))
    with _engine("llama-gqa", 2) as engine:
        return engine.generate(ids, **GREEDY).tolist(), engine._turns.peers.members


def test_a_job_of_twice_as_many_ranks_runs_two_copies(crew, engine_of):
    found = crew.run(copies_with_inputs_of_their_own, world=4)
    for rank, (text, members) in enumerate(found):
        ids = torch.from_numpy(random_ids(1, 5, seed=rank // 2))
        assert text == engine_of("llama-gqa", "torch").generate(ids, **GREEDY).tolist()
        assert members == ((0, 1) if rank < 2 else (2, 3))


def groups_of_the_callers():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]

    class Unit:
        def get_model_parallel_world_size(self):
            return 2

        def get_model_parallel_group(self):
            return mine

    ids = torch.from_numpy(random_ids(1, 5))
    found = []
    for fields in ({"tp_group": mine}, {"mpu": Unit()}, {"tp_group": mine, "tp_size": 2}):
        given = {"tp_size": 1, **fields}
        with dualinfer.init_inference(_model("gpt2"), tensor_parallel=given, **INJECT) as engine:
            found.append((engine.generate(ids, **GREEDY).tolist(), engine._turns.peers.members))
    assert dist.get_world_size(mine) == 2  # theirs still
    return found


def test_groups_and_units_of_the_caller_say_who_shares_the_model(crew, engine_of):
    text = engine_of("gpt2", "torch").generate(torch.from_numpy(random_ids(1, 5)), **GREEDY)
    for rank, found in enumerate(crew.run(groups_of_the_callers, world=4)):
        assert found == [(text.tolist(), (rank % 2, rank % 2 + 2))] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_each_token_is_in_the_share_of_one_rank(size):
    _, table = describe_model(make_model("llama-gqa").config.to_dict())
    plan = make_plan(table, size)
    ids, weight = torch.arange(1001), torch.randn(1001, 4)
    total, places = torch.zeros(1001, 4), torch.zeros(1001, dtype=torch.int64)
    for rank in range(size):
        split = Split.of(Ranks(range(size), rank, None, None, torch.device("cpu")), plan)
        rows, here = split.is_here(ids)
        own = weight[plan.shards[rank].share("vocab").start :][: split.vocab[rank]]
        total += own[rows] * here[:, None]
        places += here
    assert (places == 1).all() and torch.equal(total, weight)


def models_that_differ():
    """Of one config and different weights, as without a seed."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = make_model("llama-gqa")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    try:
        dualinfer.init_inference(
            model, dtype="fp32", replace_with_kernel_inject=True, tensor_parallel={"tp_size": 2}
        ).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_models_that_differ_are_refused_by_all(crew):
    for error in crew.run(models_that_differ):
        assert error is not None
        assert error.startswith("DistributedError: The models and configs differ: rank 1")


class _Failing:
    """A streamer of rank 0 that fails at its call number `at`."""

    def __init__(self, at):
        self.left = at

    def put(self, _):
        self.left -= 1
        if self.left < 0:
            raise KeyError("mine")

    def end(self):
        pass


def streamers_that_fail():
    ids, found = torch.from_numpy(random_ids(1, 5)), []
    with _engine("llama-gqa", 2) as engine:
        for at in (0, 3):
            streamer = _Failing(at) if os.environ["RANK"] == "0" else None
            try:
                found.append(engine.generate(ids, streamer=streamer, **GREEDY).tolist())
            except KeyError as error:
                found.append(str(error))
        return found, engine.generate(ids, **GREEDY).tolist()


def test_a_streamer_that_fails_in_one_rank_leaves_the_engine_to_all(crew):
    first, second = crew.run(streamers_that_fail)
    assert first == (["'mine'"] * 2, second[1])
    assert second[0] == [second[1]] * 2


def inputs_that_differ(what):
    rank = int(os.environ["RANK"])
    ids = torch.from_numpy(random_ids(2, 5))
    with _engine("llama-gqa", 2) as engine:
        try:
            if what == "values":
                engine(ids + rank)
            elif what == "shapes":
                engine(ids[:, : 5 - rank])
            elif what == "arguments":
                engine.generate(ids, max_new_tokens=3 + rank, do_sample=False)
            elif what == "seeds":
                engine.generate(ids, max_new_tokens=3, do_sample=True, seed=rank)
            elif what == "an error":
                engine.generate(ids if rank else [[1, "x"]], max_new_tokens=3)
            elif what == "a text":
                engine.generate(ids if rank else "text", max_new_tokens=3)
            elif what == "images":
                engine(ids, pixel_values=None if rank else ids)
        except Exception as error:
            return f"{type(error).__name__}: {error}", engine(ids).logits.numpy()
    return None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("values", "The arguments of forward() differ: rank 1 from rank 0"),
        ("shapes", "The arguments of forward() differ: rank 1 from rank 0"),
        ("arguments", "The arguments of generate() differ: rank 1 from rank 0"),
        ("seeds", "The arguments of generate() differ: rank 1 from rank 0"),
    ],
)
def test_inputs_that_differ_are_refused_by_all(crew, engine_of, what, message):
    one = engine_of("llama-gqa", "torch")(torch.from_numpy(random_ids(2, 5))).logits
    for error, logits in crew.run(inputs_that_differ, what):
        assert error.startswith("DistributedError: ")
        assert message in error
        assert relative_rms(logits, one) < 1e-5  # and the engine works on


@pytest.mark.parametrize("what", ["an error", "a text", "images"])
def test_what_fails_in_one_rank_is_told_in_all(crew, what):
    first, second = (error for error, _ in crew.run(inputs_that_differ, what))
    assert first.startswith("ArgumentError: ")
    assert re.match(r"DistributedError: The arguments of \w+\(\) failed elsewhere. rank", second)
    assert "ArgumentError" in second


def calls_that_differ():
    rank = int(os.environ["RANK"])
    ids, found = torch.from_numpy(random_ids(2, 5)), []
    for fields in ({"replace_with_kernel_inject": True}, {}):
        with dualinfer.init_inference(
            make_model("llama-gqa"),
            dtype="fp32",
            tensor_parallel={"tp_size": 2, "timeout": 20},
            **fields,
        ) as engine:
            with pytest.raises(DistributedError) as caught:
                engine.generate(ids, **GREEDY) if rank else engine(ids)
            engine(ids)  # and works on
            found.append(str(caught.value))
    return found


def test_calls_that_differ_are_told_by_their_names(crew):
    for messages in crew.run(calls_that_differ):
        for message in messages:
            assert "not in the same call. rank 0: forward(); rank 1: generate()." in message


def interrupts_one():
    rank = int(os.environ["RANK"])
    from dualinfer.engine import readers

    engine, original = _engine("llama-gqa", 2), readers.make_forward_inputs

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    start = time.monotonic()
    if rank == 1:
        readers.make_forward_inputs = interrupted
    try:
        engine(torch.tensor([[5, 6, 7]]))
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        readers.make_forward_inputs = original
        engine.close()
    return None


def test_an_interrupt_of_one_rank_is_told_at_once(crew):
    (told, message, seconds), (own, _, _) = crew.run(interrupts_one)
    assert (told, own) == ("DistributedError", "KeyboardInterrupt")
    assert "lost the others: rank 1 left: KeyboardInterrupt." in message
    assert seconds < 30  # and not the timeout, 150


def made_anew_after_the_end():
    """Engines of one job before and after torch.distributed was shut down, by one store."""
    import torch.distributed as dist

    found = []
    for _ in range(3):
        with _engine("gpt2", 2) as engine:
            found.append(engine(torch.tensor([[5, 6, 7]])).logits.numpy())
        dist.destroy_process_group()
    return found


def test_a_store_that_outlives_torch_distributed_serves_engines_made_anew(crew):
    for found in crew.run(made_anew_after_the_end):
        assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "x"), ("RANK", "2"), ("MASTER_PORT", "70000")]
)
def test_an_environment_that_no_launcher_makes_is_refused(monkeypatch, name, value):
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for known, usual in (job | {name: value}).items():
        monkeypatch.setenv(known, usual)
    with pytest.raises(dualinfer.ConfigError, match=f"{name}='?{value}"):
        _engine("gpt2", 2)


def inputs_of_rank_0():
    rank = int(os.environ["RANK"])
    ids, mask = _padded()
    given = {"input_ids": ids, "attention_mask": mask} if rank == 0 else {}
    ragged = [[5, 6, 7, 8], [9, 10]] if rank == 0 else None
    torch.manual_seed(rank)  # only rank 0's counts
    with _engine("llama-gqa", 2) as engine:
        drawn = {"max_new_tokens": 5, "do_sample": True}
        return (
            engine(**given).logits.numpy() if rank == 0 else engine().logits.numpy(),
            engine.generate(**given, **GREEDY).tolist(),
            engine.generate(ragged, **GREEDY).tolist(),
            engine.generate(**given, **drawn).tolist(),
            list(engine.stream(ragged, **GREEDY)),
        )


def test_ranks_that_pass_none_take_rank_0s_inputs(crew, engine_of):
    ids, mask = _padded()
    one = engine_of("llama-gqa", "torch")
    torch.manual_seed(0)
    drawn = one.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=True)
    ragged = one.generate([[5, 6, 7, 8], [9, 10]], **GREEDY).tolist()
    streamed = list(one.stream([[5, 6, 7, 8], [9, 10]], **GREEDY))
    for logits, text, ragged_text, sampled, stream in crew.run(inputs_of_rank_0):
        real = mask.bool()
        assert relative_rms(logits[real], one(ids, mask).logits[real]) < 1e-5
        assert text == one.generate(ids, attention_mask=mask, **GREEDY).tolist()
        assert ragged_text == ragged
        assert sampled == drawn.tolist()
        assert stream == streamed


def texts_of_rank_0(folder):
    alone = os.environ["RANK"] == "0"
    said = []
    for module in (False, True):
        model = folder
        if module:
            model = transformers.LlamaForCausalLM.from_pretrained(folder)
        with dualinfer.init_inference(
            model, dtype="fp32", tensor_parallel={"tp_size": 2}
        ) as engine:
            options = {"max_new_tokens": 5, "do_sample": False}
            said.append(engine.generate_text(["one", "a longer one"] if alone else None, **options))
            said.append("".join(engine.stream_text("one" if alone else None, **options)))
            with pytest.raises(dualinfer.DualinferError, match="The prompt is empty"):
                engine.generate_text("" if alone else None, **options)
    return said


def test_ranks_that_pass_none_take_rank_0s_text(crew, tmp_path):
    """In both modes; what is wrong with it is raised in all of them."""
    write_llama(tmp_path, write_byte_tokenizer(tmp_path))
    with dualinfer.init_inference(tmp_path, dtype="fp32") as engine:
        options = {"max_new_tokens": 5, "do_sample": False}
        texts = engine.generate_text(["one", "a longer one"], **options)
    for said in crew.run(texts_of_rank_0, tmp_path):
        assert said == [texts, texts[0]] * 2


def inputs_of_rank_0_as_they_are(kind):
    rank = int(os.environ["RANK"])
    ids, mask = random_ids(2, 6).astype(np.int32), np.ones((2, 6), np.float32)
    mask[0, :2] = 0
    if kind == "torch":
        ids, mask = torch.from_numpy(ids), torch.from_numpy(mask).bfloat16()
    given = {"input_ids": ids, "attention_mask": mask} if rank == 0 else {}
    with _engine("llama-gqa", 2) as engine:
        text = engine.generate(**given, **GREEDY)
        fused = type(text).__name__, np.asarray(text).tolist()
    with dualinfer.init_inference(
        make_model("llama-gqa"), dtype="fp32", tensor_parallel={"tp_size": 2}
    ) as engine:
        given = {"input_ids": torch.from_numpy(random_ids(2, 6)).int()} if rank == 0 else {}
        return fused, engine(**given).logits.numpy(), _embedded(engine, rank)


def _embedded(engine, rank):
    x = torch.randn(1, 4, engine.config.hidden_size, generator=torch.Generator().manual_seed(3))
    return engine(**({"inputs_embeds": x} if rank == 0 else {})).logits.numpy()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_rank_0_hands_over_keeps_its_framework_and_dtype(crew, kind):
    first, second = crew.run(inputs_of_rank_0_as_they_are, kind)
    assert first[0] == second[0]
    assert first[0][0] == ("ndarray" if kind == "numpy" else "Tensor")
    for ours, theirs in zip(first[1:], second[1:], strict=True):
        assert np.array_equal(ours, theirs)


def generations_out_of_step(what):
    rank = int(os.environ["RANK"])
    ids = [torch.from_numpy(random_ids(1, 5, seed=seed)) for seed in (1, 2)]
    with _engine("llama-gqa", 2, tensor_parallel={"timeout": 8}) as engine:
        streams = [engine.stream(x, **GREEDY) for x in ids]
        try:
            if what == "order":
                next(streams[rank])
            elif what == "left":
                next(streams[0])
                if rank == 0:
                    streams[0].close()
                engine.generate(ids[0], **GREEDY)
            else:
                next(streams[0])
                thread = threading.Thread(target=lambda: errors.append(_error_of(streams[1])))
                errors = []
                thread.start()
                thread.join()
                return errors[0]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def _error_of(stream):
    try:
        next(stream)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("what", ["order", "left"])
def test_generations_that_ranks_begin_or_end_differently_are_refused(crew, what):
    for error in crew.run(generations_out_of_step, what):
        assert error.startswith("DistributedError: What is begun and what is open differ")


def test_two_threads_with_open_generations_are_refused(crew):
    for error in crew.run(generations_out_of_step, "threads"):
        assert error.startswith("UnsupportedError: Several processes share this model")


class _Collecting:
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value)

    def end(self):
        self.got.append("end")


def streamed_by_one_rank():
    rank = int(os.environ["RANK"])
    streamer = _Collecting() if rank == 0 else None
    with _engine("gpt2", 2) as engine:
        ids = torch.from_numpy(random_ids(1, 5))
        text = engine.generate(ids, streamer=streamer, **GREEDY).tolist()
        return text, len(streamer.got) if streamer else 0


def test_a_streamer_on_one_rank_alone_is_served(crew):
    (text, count), (other, none) = crew.run(streamed_by_one_rank)
    assert text == other
    assert (count, none) == (8, 0)  # the prompt, six tokens, the end


def made_with(tp, fields):
    engine = _engine("llama-gqa", tp, **fields)
    engine.close()


def test_a_world_that_does_not_fit_is_refused_by_all(crew):
    with pytest.raises(
        RankError, match=r"tp_size=2, but 3 processes run in this job\. Start 2 \(or"
    ):
        crew.run(made_with, 2, {}, world=3)
    with pytest.raises(RankError, match="tp_size=3, but 2 processes"):
        crew.run(made_with, 3, {}, world=2)


def test_one_process_alone_is_told_how_to_start_others(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(dualinfer.ConfigError, match=r"dualinfer launch --tp 2 SCRIPT.*torchrun"):
        _engine("gpt2", 2)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_an_environment_without_numbers_is_named(name, monkeypatch):
    places = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**places, name: "x"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(dualinfer.ConfigError, match=f"{name}='x'"):
        _engine("gpt2", 2)


def degrees_that_differ():
    made_with(2 if os.environ["RANK"] == "0" else 4, {})


def test_degrees_that_differ_between_ranks_are_refused_by_all(crew):
    with pytest.raises(RankError, match=r"tp_size differs .* rank 0: 2, rank 1: 4") as caught:
        crew.run(degrees_that_differ, world=4)
    assert set(caught.value.kinds) == {"ConfigError"}


def configs_that_differ():
    rank = int(os.environ["RANK"])
    made_with(2, {"max_out_tokens": 50 + rank})


def test_configs_that_differ_between_ranks_are_refused_by_all(crew):
    with pytest.raises(RankError, match="The models and configs differ: rank 1") as caught:
        crew.run(configs_that_differ)
    assert set(caught.value.kinds) == {"DistributedError"}


def models_of_which_one_is_missing():
    model = _model("gpt2") if os.environ["RANK"] == "0" else "/nowhere"
    dualinfer.init_inference(model, tensor_parallel={"tp_size": 2}, **INJECT)


def test_a_model_that_one_rank_lacks_ends_all(crew):
    with pytest.raises(
        RankError, match=r"failed elsewhere\. rank 1: .*'/nowhere' does not"
    ) as caught:
        crew.run(models_of_which_one_is_missing)
    assert caught.value.kinds == ["DistributedError", "CheckpointNotFoundError"]


def dies_in_generate():
    engine = _engine("llama-gqa", 2)
    if os.environ["RANK"] == "1":
        os._exit(3)
    engine.generate(torch.tensor([[5, 6, 7]]), **GREEDY)


def test_a_rank_that_dies_is_told_to_the_others(crew):
    with pytest.raises(RankError, match="lost the others: a process ended") as caught:
        crew.run(dies_in_generate)
    assert caught.value.kinds == ["DistributedError", "Gone"]


def shuts_torch_distributed_down():
    import torch.distributed as dist

    engine, said = _engine("llama-gqa", 2), []
    dist.destroy_process_group()
    for _ in range(2):
        with pytest.raises(DistributedError) as caught:
            engine.generate(torch.tensor([[5, 6, 7]]), **GREEDY)
        said.append(str(caught.value))
    engine.close()
    return said


def test_an_engine_without_torch_distributed_says_so(crew):
    for first, second in crew.run(shuts_torch_distributed_down):
        assert "torch.distributed was shut down" in first
        assert "Make the engines anew" in second


def waits_for_one_that_never_makes_an_engine():
    import time

    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        time.sleep(4)
        return
    _engine("gpt2", 2, tensor_parallel={"timeout": 2})


def test_a_rank_that_makes_no_engine_is_named_within_the_timeout(crew):
    with pytest.raises(RankError, match=r"waited 2 seconds for rank 1 to make") as caught:
        crew.run(waits_for_one_that_never_makes_an_engine)
    assert caught.value.kinds == ["DistributedError", None]


def test_a_rank_that_never_starts_is_told_within_the_timeout(crew):
    fields = {"tensor_parallel": {"timeout": 2}}
    with pytest.raises(RankError, match=r"did not come together within 2 seconds") as caught:
        crew.run(made_with, 2, fields, alive=[0])
    assert caught.value.kinds == ["DistributedError"]
    crew.run(made_with, 2, fields)  # and the next job comes together
