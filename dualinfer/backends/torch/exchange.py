"""Exchanges between the GPUs of a host that need no NCCL: memory that every rank can write to."""

import math
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ...errors import DistributedError
from ...kernels.triton.exchange import Mailbox, gather_ranks, sum_ranks
from .parallel import Ranks, Split

CAPACITY = 1 << 17  # float32 values of one rank in one exchange over two; see `capacity_over`
_POLLS = 1_000_000  # a second, at least: each reads memory

_rendezvous = 0  # of this process, in all its engines


def capacity_over(ranks: int) -> int:
    """Up to how many values of each of so many ranks an exchange beats NCCL.

    It moves as many words to each rank as all have; benchmarks/README.md has the figures.
    """
    return 2 * CAPACITY // max(ranks, 2)


class Exchange:
    """Small sums and gathers over the ranks of one runner, each one launch, ready for capture.

    `serves` tells which; larger ones are NCCL's.
    """

    def __init__(self, mailbox: Mailbox, split: Split) -> None:
        self._mailbox, self._split = mailbox, split
        firsts = [*accumulate(split.vocab, initial=0)]
        self._firsts = torch.tensor(firsts, dtype=torch.int32, device=mailbox.words.device)

    @property
    def capacity(self) -> int:
        """Values of each rank that an exchange can take."""
        return self._mailbox.capacity

    def serves(self, values: int) -> bool:
        """True if an exchange of so many values of each rank fits."""
        return 0 < values <= self.capacity

    def sum(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        dtype: torch.dtype,
        pdl: bool,
    ) -> torch.Tensor:
        """residual + the sum of every rank's x + bias, in `dtype`; see `sum_ranks`."""
        return sum_ranks(x.contiguous(), self._mailbox, bias, residual, dtype, pdl=pdl)

    def gather_vocab(self, x: torch.Tensor, pdl: bool) -> torch.Tensor:
        """Logits [..., V] of every rank's share [..., width]."""
        widths: Sequence[int] = self._split.vocab
        return gather_ranks(x.contiguous(), self._mailbox, self._firsts, widths, pdl=pdl)

    @property
    def given_up(self) -> torch.Tensor:
        """int32 [1] on the device: not 0 once another rank did not come to an exchange."""
        return self._mailbox.state[2:]

    def error(self) -> DistributedError:
        """The error to raise when a rank gave up an exchange."""
        ranks = self._split.ranks
        return DistributedError(
            f"Rank {ranks.rank} of {ranks.size} gave up an exchange on the GPU: another rank did "
            f"not come to it within about {ranks.timeout:.0f} seconds. What was computed since is "
            "wrong. The other's own output says why; make the engines anew."
        )


def open_exchange(split: Split) -> Exchange:
    """An exchange over the ranks' GPUs; all ranks must call it.

    Raises RuntimeError, on all ranks, where they cannot write into each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    ranks = split.ranks
    _check_history(ranks)
    # torch makes a multicast object beside the memory unless told not to.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with torch.cuda.device(ranks.device):
        return _open(split, symmetric_memory)


def _check_history(ranks: Ranks) -> None:
    """Raise RuntimeError, on all ranks, where they have met others before in different numbers.

    torch's rendezvous tells its calls apart by their number in each process, and would wait without
    end (pytorch#196082).
    """
    global _rendezvous
    counts = ranks.tell("Counting what ranks have shared", count=_rendezvous)["count"]
    if len(set(counts)) > 1:
        raise RuntimeError(f"the ranks have shared {counts} models before, which torch cannot tell")
    _rendezvous += 1


def _open(split: Split, symmetric_memory: Any) -> Exchange:
    ranks = split.ranks
    error, words, addresses = None, None, []
    shape = 2, ranks.size, capacity_over(ranks.size)
    count = math.prod(shape)
    try:
        words = symmetric_memory.empty(count, dtype=torch.int64, device=ranks.device)
        words.zero_()
        torch.cuda.synchronize(ranks.device)
        handle: Any = symmetric_memory.rendezvous(words, ranks.group)
        buffers = [handle.get_buffer(r, (count,), torch.int64) for r in range(ranks.size)]
        addresses = [buffer.data_ptr() for buffer in buffers]
    except Exception as raised:  # of the driver: no peer-to-peer, no handles to share
        error = raised
    text = "" if error is None else f"{type(error).__name__}: {error}"
    errors = ranks.tell("Sharing memory of the GPUs", error=text)["error"]
    if any(errors):
        raise RuntimeError(next(text for text in errors if text))
    assert words is not None
    mailbox = Mailbox(
        rank=ranks.rank,
        size=ranks.size,
        capacity=shape[-1],
        patience=min(int(ranks.timeout * _POLLS), 2**31 - 1),
        peers=torch.tensor(addresses, dtype=torch.int64, device=ranks.device),
        words=words,
        state=torch.zeros(3, dtype=torch.int32, device=ranks.device),
    )
    return Exchange(mailbox, split)
