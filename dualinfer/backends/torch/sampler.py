"""Choosing the next token on the torch device; the same arithmetic as backends/jax/sampler.py.

Meaning and order of the filters: transformers `generation/logits_process.py`. The noise is
threefry2x32 (Salmon et al., 2011), so that a seed gives the same text on either backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ..base import NO_TOKEN, SamplingFeatures
from .profiling import named

_WORD = 0xFFFFFFFF


@dataclass
class SlotState:
    """Static buffers of decoding, a row a slot. `last` is sampled but not yet in the cache.

    `length` counts cached tokens, `new` the sampled ones, `remaining` those still allowed; the
    others are the columns of `slots.sampling_rows`. `seen` [N, V] marks prompt and new tokens, and
    `hidden` [N, V] those that are never chosen; None where every slot may choose all.
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

    @classmethod
    def make(
        cls, slots: int, eos_width: int, vocab: int, device: torch.device, hides: bool = False
    ) -> "SlotState":
        """All slots free."""

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        integers = ("last", "length", "new", "remaining", "minimum", "top_k")
        words = ("seed_low", "seed_high", "return_index")
        floats = ("temperature", "top_p", "min_p", "penalty")
        return cls(
            active=zeros(torch.bool),
            noise=zeros(torch.bool),
            eos=zeros(torch.int64, eos_width) + NO_TOKEN,
            seen=zeros(torch.bool, vocab),
            hidden=zeros(torch.bool, vocab) if hides else None,
            **{name: zeros(torch.int64) for name in (*integers, *words)},
            **{name: zeros(torch.float32) + 1 for name in floats},
        )

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
            value = torch.as_tensor(column, dtype=buffer.dtype, device=buffer.device)
            if name == "eos":
                buffer[slots] = NO_TOKEN
                buffer[slots, : value.shape[1]] = value
            else:
                buffer[slots] = value

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
            self.hidden[slot, list(ids)] = True

    def shown(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [N, V], -inf where a token is hidden."""
        return logits if self.hidden is None else logits.masked_fill(self.hidden, -torch.inf)


@named("sampling")
def sample(
    logits: torch.Tensor, state: SlotState, position: torch.Tensor, features: SamplingFeatures
) -> torch.Tensor:
    """The next token [N] from float32 logits [N, V]; `position` [N] is the new token's own.

    The first token whose logit is NaN is chosen, if there is one: drawn or not, as HF's greedy one.
    """
    if features.penalty:
        penalty = state.penalty[:, None]
        punished = torch.where(logits < 0, logits * penalty, logits / penalty)
        logits = torch.where(state.seen, punished, logits)
    if features.hold_eos:
        held = (state.new < state.minimum)[:, None] & (state.eos != NO_TOKEN)
        blocked = torch.zeros_like(logits).scatter_add(1, state.eos.clamp(min=0), held.float())
        logits = logits.masked_fill(blocked > 0, -torch.inf)
    if not features.noise:
        return logits.argmax(-1)
    wrong = logits.isnan()
    logits = logits.masked_fill(wrong, -torch.inf)
    # From the best one down, so that a tiny temperature gives -inf and no NaN.
    logits = (logits - logits.amax(-1, keepdim=True)) / state.temperature[:, None]
    if features.filters:
        logits = filter_logits(logits, state.top_k, state.top_p, state.min_p)
    noise = gumbel(state.seed_low, state.seed_high, state.return_index, position, logits.shape[-1])
    drawn = torch.where(state.noise[:, None], logits + noise, logits)
    return drawn.masked_fill(wrong, torch.nan).argmax(-1)


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


def filter_logits(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Logits [N, V] with everything outside top-k, then top-p, then min-p at -inf.

    Each filter is a threshold, so that tied candidates stay or go together.
    """
    vocab = logits.shape[-1]
    ascending = logits.sort(-1).values
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    floor = ascending.gather(-1, (vocab - k)[:, None])
    ascending = ascending.masked_fill(ascending < floor, -torch.inf)
    below = ascending.softmax(-1).cumsum(-1) <= (1 - top_p)[:, None]
    below[:, -1] = False
    below &= (top_p < 1)[:, None]
    floor = torch.maximum(floor, ascending.gather(-1, below.sum(-1, keepdim=True)))
    floor = torch.maximum(floor, ascending[:, -1:] + min_p[:, None].log())
    return logits.masked_fill(logits < floor, -torch.inf)


def warm(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Scores [N, V] over the temperature of each row, -inf outside of its filters."""
    below = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]
    kept = filter_logits(below, top_k, top_p, min_p)
    return (scores / temperature[:, None]).masked_fill(kept == -torch.inf, -torch.inf)


def hide(scores: torch.Tensor, hidden: torch.Tensor, outweigh: int | None) -> torch.Tensor:
    """See `base.Runner.hide`."""
    scores = scores.masked_fill(hidden, -torch.inf)
    if outweigh is None:
        return scores
    logs = scores.log_softmax(-1)
    least = logs[:, outweigh:].logsumexp(-1, keepdim=True)
    outweighed = least > logs[:, :outweigh].amax(-1, keepdim=True)
    before = torch.arange(scores.shape[-1], device=scores.device) < outweigh
    return scores.masked_fill(outweighed & before, -torch.inf)


def log_probs(scores: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """See `base.Runner.log_probs`."""
    return (scores * temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def gumbel(
    seed_low: torch.Tensor,
    seed_high: torch.Tensor,
    return_index: torch.Tensor,
    position: torch.Tensor,
    vocab: int,
) -> torch.Tensor:
    """Standard Gumbel noise float32 [N, V], a function of its arguments only."""
    key = threefry2x32(seed_low, seed_high, return_index, position)
    ids = torch.arange(vocab, device=position.device)[None]
    bits, _ = threefry2x32(key[0][:, None], key[1][:, None], ids, torch.zeros_like(ids))
    # 23 bits and a half, so that neither 0 nor 1 occurs in float32.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def threefry2x32(
    key0: torch.Tensor, key1: torch.Tensor, counter0: torch.Tensor, counter1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty rounds on 32-bit words held in int64, broadcast together."""
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x0, x1 = (counter0 + keys[0]) & _WORD, (counter1 + keys[1]) & _WORD
    for i in range(5):
        for r in rotations[i % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = ((x1 << r | x1 >> (32 - r)) & _WORD) ^ x0
        x0 = (x0 + keys[(i + 1) % 3]) & _WORD
        x1 = (x1 + keys[(i + 2) % 3] + i + 1) & _WORD
    return x0, x1
