"""Tensor parallelism on real GPUs: NCCL, exchanges peer to peer, CUDA graphs. Two GPUs or more."""

import asyncio
import os

import numpy as np
import pytest
import torch

import dualinfer
from dualinfer.backends.torch.exchange import CAPACITY

from .cases import make_model
from .models import random_ids, relative_rms
from .ranks import RankError

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

GPUS = [n for n in (2, 4) if n <= torch.cuda.device_count()]
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SAMPLED = {"max_new_tokens": 24, "do_sample": True, "top_k": 40, "seed": 7}
NAMES = ("llama-gqa", "qwen3", "gpt2", "gptj", "bloom", "gemma2", "opt-post", "bert-masked")


def _engine(name, tp, dtype="fp32", **fields):
    parallel = {"tp_size": tp, "timeout": 60}
    how = {"dtype": dtype, "replace_with_kernel_inject": True, "tensor_parallel": parallel}
    return dualinfer.init_inference(make_model(name), **how, **fields)


def outputs_of(tp, dtype, graphs, names=NAMES, capacity=None):
    """Of each model: logits, greedy and sampled text, what sums; the second of two equal calls.

    With `capacity` exchanges peer to peer are of so few values that NCCL has most of them.
    """
    from dualinfer.backends.torch import exchange

    exchange.CAPACITY = capacity or CAPACITY
    found = {}
    for name in names:
        ids = torch.from_numpy(random_ids(3, 11))
        with _engine(name, tp, dtype, enable_cuda_graph=graphs) as engine:
            for _ in range(3):  # launched, captured, replayed
                logits = engine(ids).logits.float().cpu().numpy()
            texts = []
            if name != "bert-masked":
                for how in (GREEDY, SAMPLED):
                    twice = [engine.generate(ids, **how).tolist() for _ in range(3)]
                    assert twice[0] == twice[1] == twice[2]
                    texts.append(twice[0])
            found[name] = logits, texts, engine.report().ops.get("sum over ranks")
    return found


@pytest.fixture(scope="module")
def single():
    """What one GPU gives, by dtype."""
    made = {}

    def get(dtype):
        if dtype not in made:
            made[dtype] = outputs_of(1, dtype, False)
        return made[dtype]

    return get


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
@pytest.mark.parametrize("tp", GPUS)
def test_float32_over_several_gpus_equals_one(crew, single, tp, graphs):
    by_rank = crew.run(outputs_of, tp, "fp32", graphs, world=tp)
    for name in NAMES:
        logits, texts, _ = single("fp32")[name]
        for rank in by_rank:
            assert relative_rms(rank[name][0], logits) < 1e-5, name
            assert rank[name][1] == texts, name
            assert rank[name][2].startswith("Triton, peer to peer"), name


@pytest.mark.parametrize("tp", GPUS)
def test_sums_of_nccl_in_graphs_are_those_of_one(crew, single, tp):
    names = ("llama-gqa", "bloom")
    for rank in crew.run(outputs_of, tp, "fp32", True, names, 256, world=tp):
        for name in names:
            logits, texts, _ = single("fp32")[name]
            assert relative_rms(rank[name][0], logits) < 1e-5, name
            assert rank[name][1] == texts, name


@pytest.mark.parametrize("tp", GPUS)
def test_bfloat16_over_several_gpus_errs_as_one_does(crew, single, tp):
    by_rank = crew.run(outputs_of, tp, "bf16", None, world=tp)
    for name in NAMES:
        reference = single("fp32")[name][0]
        own = relative_rms(single("bf16")[name][0], reference)
        for rank in by_rank:
            assert np.array_equal(rank[name][0], by_rank[0][name][0]), name
            assert relative_rms(rank[name][0], reference) < 1.1 * own, name


def exchanges(rows, width, dtype_name):
    """Sums and gathers by the kernel and by NCCL, as launched and as replayed many times."""
    from dualinfer.backends.torch import rank_device
    from dualinfer.backends.torch.exchange import open_exchange
    from dualinfer.backends.torch.parallel import Split
    from dualinfer.backends.torch.process_groups import join
    from dualinfer.config.nested import TensorParallelConfig

    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    device, dtype = rank_device(), getattr(torch, dtype_name)
    torch.cuda.set_device(device)
    ranks = join(TensorParallelConfig(tp_size=size, timeout=60), device)
    widths = tuple(width + 3 * r for r in range(size))
    exchange = open_exchange(Split(ranks, 0, widths))
    torch.manual_seed(rank)
    x = torch.randn(rows, width, device=device)
    share = torch.randn(rows, widths[rank], device=device)
    torch.manual_seed(9)
    bias, residual = (torch.randn(n, device=device, dtype=dtype) for n in (width, rows * width))
    residual = residual.view(rows, width)
    everyone = torch.empty(size, rows, width, device=device)
    torch.distributed.all_gather_into_tensor(everyone.view(-1), x.view(-1), group=ranks.group)
    expected = (bias.float() + everyone.sum(0) + residual.float()).to(dtype)
    joined = ranks.join_last(share, widths)
    how = bias, residual, dtype
    results = [exchange.sum(x, *how, pdl) for pdl in (False, True)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(5):
            summed = exchange.sum(y, *how, True)
            gathered = exchange.gather_vocab(share, True)
            y = x * 1
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2}[dtype_name]
    for found in (*results, summed):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(found, results[0])
    assert torch.equal(gathered, joined)
    assert not exchange.given_up.any()
    result = summed.float().cpu().numpy()
    ranks.close()
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 63), (1, 4096), (2, 1000), (8, 8192)])
@pytest.mark.parametrize("tp", GPUS)
def test_exchanges_equal_nccl_and_give_all_ranks_the_same_bits(crew, tp, rows, width, dtype):
    first, *others = crew.run(exchanges, rows, width, dtype, world=tp)
    assert all(np.array_equal(first, other) for other in others)


def waits_for_a_rank_that_is_gone():
    engine = _engine("llama-gqa", 2)
    ids = torch.tensor([[5, 6, 7]])
    engine.generate(ids, **GREEDY)
    if os.environ["RANK"] == "1":
        os._exit(3)
    engine.generate(ids, **GREEDY)


def test_a_rank_that_dies_is_told_to_the_others(crew):
    with pytest.raises(RankError, match="lost the others: a process ended") as caught:
        crew.run(waits_for_a_rank_that_is_gone)
    assert caught.value.kinds == ["DistributedError", "Gone"]


def module_outputs(tp):
    model = make_model("llama-gqa")
    ids = torch.from_numpy(random_ids(2, 9))
    parallel = {"tp_size": tp, "timeout": 60}
    with dualinfer.init_inference(model, dtype="fp32", tensor_parallel=parallel) as engine:
        on_device = ids.to(engine.device)
        return (
            engine(input_ids=on_device).logits.float().cpu().numpy(),
            engine.generate(input_ids=on_device, **GREEDY).tolist(),
        )


async def _many(engine, prompts):
    how = {"max_new_tokens": 24, "eos_token_id": None}
    made = [
        engine.generate_async(ids, do_sample=bool(i % 2), seed=i, **how)
        for i, ids in enumerate(prompts)
    ]
    return [await one for one in made]


def led_texts(tp):
    """What many calls at once give, twice, in room that is reserved: rank 0 drives the others."""
    prompts = [row.tolist() for row in random_ids(6, 11)]
    with _engine("llama-gqa", tp) as engine:
        if tp > 1 and os.environ["RANK"] != "0":
            engine.follow()
            return None
        engine.lead()
        engine.reserve(4, 128)
        return [asyncio.run(_many(engine, prompts)) for _ in range(2)]


@pytest.mark.parametrize("tp", GPUS)
def test_one_process_drives_those_of_the_other_gpus(crew, tp):
    assert crew.run(led_texts, tp, world=tp)[0] == led_texts(1)


def test_module_mode_over_two_gpus_equals_one(crew):
    logits, text = module_outputs(1)
    for found, found_text in crew.run(module_outputs, 2):
        assert relative_rms(found, logits) < 1e-5
        assert found_text == text
