"""The kernels' ops over two ranks, interpreted: real processes that write to each other's memory.

A file that both map stands for the memory that GPUs share.
"""

import functools
import os

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import dualinfer  # noqa: E402

from .models import make_model, relative_rms  # noqa: E402
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
        words=mapped[rank].view(2, size, CAPACITY),
        peers=torch.tensor([words.data_ptr() for words in mapped]),
        state=torch.zeros(3, dtype=torch.int32),
        patience=100_000,
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
