"""The slots' state on the torch device, and the book of their tokens, in place.

How a token is chosen says `ops/sampling.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ...ops import sampling
from ...ops.sampling import WORDS
from ..base import NO_TOKEN, Request, SamplingFeatures
from ..slots import StateSize, WeightRows, weight_rows
from .device import upload
from .maths import MATHS
from .profiling import named


@dataclass
class SlotState:
    """Static buffers of decoding, a row a slot. `last` is sampled but not yet in the cache.

    `length` counts cached tokens, `new` the sampled ones, `remaining` those still allowed; the
    others are the columns of `slots.sampling_rows`. `seen` [N, V] marks prompt and new tokens, and
    `hidden` [N, V] those that are never chosen; None where every slot may choose all. `bias` and
    `counts` float32 [N, V] and `costs` [N, 2] are those of `sampling.weigh`; None where no slot has
    any.
    """

    active: torch.Tensor
    last: torch.Tensor
    length: torch.Tensor
    new: torch.Tensor
    remaining: torch.Tensor
    minimum: torch.Tensor
    eos: torch.Tensor
    noise: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    penalty: torch.Tensor
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    return_index: torch.Tensor
    seen: torch.Tensor
    hidden: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    costs: torch.Tensor | None = None

    @classmethod
    def make(
        cls,
        slots: int,
        eos_width: int,
        vocab: int,
        device: torch.device,
        hides: bool = False,
        weighs: bool = False,
    ) -> "SlotState":
        """All slots free."""

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        integers = ("last", "length", "new", "remaining", "minimum", "top_k")
        floats = ("temperature", "top_p", "min_p", "penalty")
        return cls(
            active=zeros(torch.bool),
            noise=zeros(torch.bool),
            eos=zeros(torch.int64, eos_width) + NO_TOKEN,
            seen=zeros(torch.bool, vocab),
            hidden=zeros(torch.bool, vocab) if hides else None,
            bias=zeros(torch.float32, vocab) if weighs else None,
            counts=zeros(torch.float32, vocab) if weighs else None,
            costs=zeros(torch.float32, 2) if weighs else None,
            **{name: zeros(torch.int64) for name in (*integers, *WORDS)},
            **{name: zeros(torch.float32) + 1 for name in floats},
        )

    @property
    def size(self) -> StateSize:
        """The size of these buffers."""
        slots, eos = self.eos.shape
        return StateSize(slots, eos, self.hidden is not None, self.bias is not None)

    def view(self, slots: int) -> "SlotState":
        """The first `slots` rows, sharing memory."""
        return self.take(slice(slots))

    def take(self, rows: slice | torch.Tensor) -> "SlotState":
        """Some rows: those of a slice share memory, those of an index [N] are copies."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        taken: dict[str, Any] = {n: None if x is None else x[rows] for n, x in columns.items()}
        return SlotState(**taken)

    def write(self, slots: torch.Tensor, rows: dict[str, np.ndarray]) -> None:
        """Set columns of `slots` in place."""
        for name, column in rows.items():
            buffer = getattr(self, name)
            value = upload(column, buffer.device, buffer.dtype)
            if name == "eos":
                buffer.index_fill_(0, slots, NO_TOKEN)
                buffer[slots, : value.shape[1]] = value
            else:
                buffer[slots] = value

    def see(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Mark tokens [N] of `slots` [N], or of one [], as seen, in place."""
        self.seen.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.bool))

    def copy_from(self, other: "SlotState") -> None:
        """Take over the rows of a smaller state."""
        for f in fields(self):
            old = getattr(other, f.name)
            if old is not None:
                getattr(self, f.name)[tuple(slice(n) for n in old.shape)] = old

    def hide(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Choose none of these `tokens` in `slots`, in place; an empty one shows all again."""
        if self.hidden is None:
            return
        for slot, ids in zip(slots, tokens, strict=True):
            self.hidden[slot] = False
            if len(ids):
                index = upload(list(ids), self.hidden.device)
                self.hidden[slot].index_fill_(0, index, True)

    def weigh(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Set what `sampling.weigh` takes of these `slots`, in place."""
        if self.bias is None or self.counts is None or self.costs is None:
            return
        rows = upload(slots, self.bias.device)
        vocab = self.bias.shape[1]
        bias, counts, costs = dense(weight_rows(requests), vocab, self.bias.device)
        self.bias[rows], self.counts[rows], self.costs[rows] = bias, counts, costs

    def weighed(self, logits: torch.Tensor) -> torch.Tensor:
        """See `sampling.weigh`."""
        if self.bias is None:
            return logits
        return sampling.weigh(MATHS, logits, self.bias, self.counts, self.costs)

    def count(self, moved: torch.Tensor) -> None:
        """Count the `last` token of the slots that bool `moved` [N] says, in place."""
        if self.counts is not None:
            once = moved[:, None].to(self.counts.dtype)
            self.counts.scatter_add_(1, self.last[:, None], once)

    def shown(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [N, V], -inf where a token is hidden."""
        return logits if self.hidden is None else logits.masked_fill(self.hidden, -torch.inf)


def dense(rows: WeightRows, vocab: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Bias and counts float32 [B, V], and costs [B, 2], of what `weight_rows` gives."""
    made = []
    for ids, values in ((rows.ids, rows.values), (rows.new, np.ones(rows.new.shape, np.float32))):
        where = upload(ids, device, torch.int64)
        # One place more takes what is no token.
        whole = torch.zeros(len(ids), vocab + 1, device=device)
        where = where.where(where >= 0, vocab)
        whole.scatter_add_(1, where, upload(values, device))
        made.append(whole[:, :vocab])
    return *made, upload(rows.costs, device)


def unpacked(words: np.ndarray, vocab: int, device: torch.device) -> torch.Tensor:
    """bool [B, V] of the bits of uint32 `words` [B, V / 32], the lowest one first."""
    given = upload(np.ascontiguousarray(words).view(np.int32), device)
    bits = given[..., None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
    return bits.flatten(-2)[..., :vocab] != 0


@named("sampling")
def sample(
    logits: torch.Tensor, state: SlotState, position: torch.Tensor, features: SamplingFeatures
) -> torch.Tensor:
    """See `sampling.sample`."""
    return sampling.sample(MATHS, logits, state, position, features)


def advance(
    logits: torch.Tensor,
    state: SlotState,
    features: SamplingFeatures,
    out: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """Choose each active slot's next token and book it, all in place: ready for capture.

    Row step[n] of `out` int64 [R, N] gets slot n's token, NO_TOKEN for one that is not active, and
    `step` [N] grows by one. A slot's `length` is the position of the token before, which is in the
    cache by now.
    """
    token = sample(logits, state, state.length + 1, features)
    out.scatter_(0, step[None], torch.where(state.active, token, NO_TOKEN)[None])
    step.add_(1)
    state.last.copy_(torch.where(state.active, token, state.last))
    state.length.add_(state.active)
    state.seen.scatter_(1, state.last[:, None], True)
    count(state, token)


def count(state: SlotState, token: torch.Tensor) -> None:
    """Book a sampled token, in place; a slot ends at its EOS or its last allowed token."""
    state.new.add_(state.active)
    state.remaining.sub_(state.active.to(state.remaining.dtype))
    is_eos = (token[:, None] == state.eos).any(-1)
    state.active.logical_and_(~is_eos & (state.remaining > 0))
