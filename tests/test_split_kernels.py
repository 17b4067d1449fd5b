"""The kernels' ops over two ranks, interpreted: real processes that write to each other's memory.

A file that both map stands for the memory that GPUs share.
"""

import functools
import os
import random
import time

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import dualinfer  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import relative_rms  # noqa: E402
from .test_kernel_ops import CASES, VOCAB, batch  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted"),
]
NAMES = ("llama-gqa", "gpt2", "gemma2", "bert-types")
WITHOUT_EXCHANGE = ("gpt2", "opt-post")
_BERT = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}


def _mailbox(folder, split, name):
    """Both ranks' words, mapped; the addresses are this process's own."""
    from dualinfer.backends.torch.exchange import CAPACITY
    from dualinfer.kernels.triton.exchange import Mailbox

    size, rank, count = split.ranks.size, split.ranks.rank, 2 * split.ranks.size * CAPACITY
    mapped = [
        torch.from_file(f"{folder}/{name}-{r}", shared=True, size=count, dtype=torch.int64)
        for r in range(size)
    ]
    split.ranks.exchange(b"mapped")
    box = Mailbox(
        rank=rank,
        size=size,
        capacity=CAPACITY,
        patience=100_000,
        peers=torch.tensor([words.data_ptr() for words in mapped]),
        words=mapped[rank],
        state=torch.zeros(3, dtype=torch.int32),
    )
    return box, mapped


def outputs_of(cases, folder):
    """Of each model, with exchanges or by gloo alone: logits, greedy text, and what sums."""
    from dualinfer.backends import torch as backend
    from dualinfer.backends.torch.exchange import Exchange
    from dualinfer.backends.torch.ops.split import SplitKernelOps
    from dualinfer.kernels.triton.tuning import Configurations

    kept, found = [], {}

    def make_ops(config, spec, device, split, exchanging, name):
        exchange = None
        if exchanging:
            box, mapped = _mailbox(folder, split, name)
            kept.append(mapped)
            exchange = Exchange(box, split)
        return SplitKernelOps(device, Configurations(), split, exchange)

    original = backend._make_ops
    try:
        for name, exchanging in cases:
            backend._make_ops = functools.partial(make_ops, exchanging=exchanging, name=name)
            changes = CASES.get(name, _BERT)
            with dualinfer.init_inference(
                make_model(name, vocab_size=VOCAB, **changes),
                dtype="fp32",
                replace_with_kernel_inject=True,
                tensor_parallel={"tp_size": 2},
            ) as engine:
                call = {n: torch.from_numpy(a) for n, a in batch(6).items()}
                logits = engine(**call)[0].numpy()
                text = None
                if engine.can_generate():
                    text = engine.generate(
                        call["input_ids"][:1], max_new_tokens=3, do_sample=False
                    ).tolist()
                ops = engine.report().ops["sum over ranks"]
                found[name, exchanging] = logits, text, ops
    finally:
        backend._make_ops = original
    return found


_ROUNDS, _SHAPES = 18, ((1, 700), (2, 40), (1, 1, 1300))


def _values(size):
    """What each rank sends in each exchange."""
    chance = np.random.default_rng(0)
    shapes = [(size, *_SHAPES[i % 3]) for i in range(_ROUNDS)]
    return [chance.standard_normal(shape, np.float32) for shape in shapes]


def exchanged_by_rows(folder, size):
    """Sums and gathers by turns of a rank that runs ahead and falls behind, by its row alone."""
    from dualinfer.kernels.triton.exchange import Mailbox, gather_ranks, row, sum_ranks

    capacity, rank, found = 1300, int(os.environ["RANK"]), []
    count = 2 * size * capacity
    words = [
        torch.from_file(f"{folder}/{r}", shared=True, size=count, dtype=torch.int64)
        for r in range(size)
    ]
    state = torch.zeros(3, dtype=torch.int32)
    peers = torch.tensor(row(rank, [w.data_ptr() for w in words], state.data_ptr()))
    box = Mailbox(None, size, capacity, 100_000, peers.view(torch.int32))
    chance = random.Random(rank)
    for i, values in enumerate(_values(size)):
        time.sleep(chance.choice((0, 0, 0.05)) * chance.random())
        x = torch.from_numpy(values[rank])
        if i % 2:
            widths = [x.shape[-1]] * (size - 1) + [x.shape[-1] - 7]
            firsts = torch.tensor(np.cumsum([0, *widths]), dtype=torch.int32)
            found.append(gather_ranks(x, box, firsts, widths).numpy())
        else:
            found.append(sum_ranks(x, box).numpy())
    return found, state.tolist()


def test_every_rank_gets_the_same_whatever_the_order(crew, tmp_path):
    size = 3
    by_rank = crew.run(exchanged_by_rows, str(tmp_path), size, world=size)
    for i, values in enumerate(_values(size)):
        joined = np.concatenate(values, axis=-1)[..., :-7]
        for found, state in by_rank:
            assert state == [_ROUNDS, 0, 0]
            np.testing.assert_array_equal(found[i], by_rank[0][0][i])
            expected = joined if i % 2 else values.sum(0)
            np.testing.assert_allclose(found[i], expected, rtol=1e-6, atol=1e-6)


def test_split_kernels_give_what_one_process_gives(crew, tmp_path):
    cases = [(name, True) for name in NAMES] + [(name, False) for name in WITHOUT_EXCHANGE]
    by_rank = crew.run(outputs_of, cases, str(tmp_path))
    call = {n: torch.from_numpy(a) for n, a in batch(6).items()}
    seen = call["attention_mask"].bool()
    for name, exchanging in cases:
        model = make_model(name, vocab_size=VOCAB, **CASES.get(name, _BERT))
        with torch.no_grad():
            expected = model(**call)[0]
        for rank in by_rank:
            logits, text, ops = rank[name, exchanging]
            assert relative_rms(logits[seen], expected[seen]) < 3e-6
            assert text == by_rank[0][name, exchanging][1]
            assert ops.startswith("Triton, peer to peer" if exchanging else "NCCL")
