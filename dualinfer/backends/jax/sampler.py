"""Choosing the next token on the JAX device; the same arithmetic as backends/torch/sampler.py.

Meaning and order of the filters: transformers `generation/logits_process.py`. The noise is
threefry2x32 (Salmon et al., 2011), so that a seed gives the same text on either backend.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..base import NO_TOKEN, Request, SamplingFeatures
from ..slots import bucket, sampling_rows

SMALLEST_PROMPT = 16
WORDS = ("seed_low", "seed_high", "return_index")


class SlotState(NamedTuple):
    """Decode state, a row a slot. `last` is sampled but not yet in the cache.

    `length` counts cached tokens, `new` the sampled ones, `remaining` those still allowed; the
    others are the columns of `slots.sampling_rows`. `seen` [N, V] marks prompt and new tokens.
    """

    active: jax.Array
    last: jax.Array
    length: jax.Array
    new: jax.Array
    remaining: jax.Array
    minimum: jax.Array
    eos: jax.Array
    noise: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    penalty: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array
    return_index: jax.Array
    seen: jax.Array | None = None

    @classmethod
    def make(cls, slots: int, eos_width: int, vocab: int, penalty: bool) -> "SlotState":
        """All slots free, in host memory; `seen` only where a penalty needs it."""
        integers = ("last", "length", "new", "remaining", "minimum", "top_k")
        floats = ("temperature", "top_p", "min_p", "penalty")
        columns: dict[str, Any] = {
            "active": np.zeros(slots, bool),
            "noise": np.zeros(slots, bool),
            "eos": np.full((slots, eos_width), NO_TOKEN, np.int32),
            "seen": np.zeros((slots, vocab), bool) if penalty else None,
            **{name: np.zeros(slots, np.int32) for name in integers},
            **{name: np.zeros(slots, np.uint32) for name in WORDS},
            **{name: np.ones(slots, np.float32) for name in floats},
        }
        return cls(**columns)

    def fits(self, slots: int, eos_width: int, penalty: bool) -> bool:
        """Whether `make` of these would give arrays of the same shapes."""
        return self.eos.shape == (slots, eos_width) and (self.seen is not None) == penalty


def prompt_rows(
    requests: Sequence[Request], slots: Sequence[int], free: int, eos_width: int, vocab: int
) -> tuple[np.ndarray, np.ndarray, SlotState]:
    """Prompts as a step takes them, in buckets: ids, the slots of the rows, their state.

    Rows beyond the requests go to slot `free`, which there is not: they are dropped.
    """
    count = bucket(len(requests))
    longest = max(len(r.tokens) for r in requests)
    ids = np.zeros((count, bucket(longest, SMALLEST_PROMPT)), np.int32)
    lengths = np.ones(count, np.int32)
    where = np.full(count, free, np.int32)
    where[: len(slots)] = slots
    for i, r in enumerate(requests):
        ids[i, : len(r.tokens)] = r.tokens
        lengths[i] = len(r.tokens)
    padded = [*requests, *[requests[0]] * (count - len(requests))]
    columns = sampling_rows(padded, eos_width)
    columns |= {name: columns[name].astype(np.uint32) for name in WORDS}
    penalty = SamplingFeatures.of(requests).penalty
    rows = SlotState.make(count, 1, vocab, penalty)._replace(
        active=np.ones(count, bool), length=lengths, **columns
    )
    if rows.seen is not None:
        for i, r in enumerate(requests):
            rows.seen[i, r.tokens] = True
    return ids, where, rows


def book(state: SlotState, token: jax.Array) -> SlotState:
    """Book a sampled token; a slot ends at its EOS or its last allowed token."""
    active = state.active
    remaining = state.remaining - active.astype(jnp.int32)
    is_eos = (token[:, None] == state.eos).any(-1)
    seen = state.seen
    if seen is not None:
        rows = jnp.arange(token.shape[0])
        seen = seen.at[rows, token].max(active)
    return state._replace(
        active=active & ~is_eos & (remaining > 0),
        last=jnp.where(active, token, state.last),
        new=state.new + active.astype(jnp.int32),
        remaining=remaining,
        seen=seen,
    )


def advance(
    logits: jax.Array,
    state: SlotState,
    features: SamplingFeatures,
    out: jax.Array,
    step: jax.Array,
) -> tuple[SlotState, jax.Array]:
    """Choose each active slot's next token and book it; row `step` of `out` int32 [R, N] has it."""
    token = sample(logits, state, state.length + 1, features)
    shown = jnp.where(state.active, token, NO_TOKEN)
    length = state.length + state.active.astype(jnp.int32)
    return book(state._replace(length=length), token), out.at[step].set(shown)


def copy_rows(old: SlotState, new: SlotState) -> SlotState:
    """`new` with the rows of a smaller `old`."""
    for name, column in old._asdict().items():
        if column is not None:
            getattr(new, name)[tuple(slice(n) for n in column.shape)] = np.asarray(column)
    return new


@jax.named_scope("sampling")
def sample(
    logits: jax.Array, state: SlotState, position: jax.Array, features: SamplingFeatures
) -> jax.Array:
    """The next token int32 [N] from float32 logits [N, V]; `position` [N] is the token's own."""
    if features.penalty:
        assert state.seen is not None
        penalty = state.penalty[:, None]
        punished = jnp.where(logits < 0, logits * penalty, logits / penalty)
        logits = jnp.where(state.seen, punished, logits)
    if features.hold_eos:
        held = (state.new < state.minimum)[:, None] & (state.eos != NO_TOKEN)
        rows = jnp.arange(logits.shape[0])[:, None]
        columns = jnp.where(held, state.eos, logits.shape[-1])
        logits = logits.at[rows, columns].set(-jnp.inf, mode="drop")
    if not features.noise:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # From the best one down, so that a tiny temperature gives -inf and no NaN.
    logits = (logits - logits.max(-1, keepdims=True)) / state.temperature[:, None]
    if features.filters:
        logits = filter_logits(logits, state.top_k, state.top_p, state.min_p)
    noise = gumbel(state.seed_low, state.seed_high, state.return_index, position, logits.shape[-1])
    scores = jnp.where(state.noise[:, None], logits + noise, logits)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def filter_logits(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Logits [N, V] with everything outside top-k, then top-p, then min-p at -inf.

    Each filter is a threshold, so that tied candidates stay or go together.
    """
    vocab = logits.shape[-1]
    ascending = jnp.sort(logits, axis=-1)
    k = jnp.minimum(jnp.where(top_k > 0, top_k, vocab), vocab)
    floor = jnp.take_along_axis(ascending, (vocab - k)[:, None], axis=-1)
    ascending = jnp.where(ascending < floor, -jnp.inf, ascending)
    below = jnp.cumsum(jax.nn.softmax(ascending, axis=-1), axis=-1) <= (1 - top_p)[:, None]
    below = below.at[:, -1].set(False) & (top_p < 1)[:, None]
    first = below.sum(-1, keepdims=True)
    floor = jnp.maximum(floor, jnp.take_along_axis(ascending, first, axis=-1))
    floor = jnp.maximum(floor, ascending[:, -1:] + jnp.log(min_p)[:, None])
    return jnp.where(logits < floor, -jnp.inf, logits)


def gumbel(
    seed_low: jax.Array,
    seed_high: jax.Array,
    return_index: jax.Array,
    position: jax.Array,
    vocab: int,
) -> jax.Array:
    """Standard Gumbel noise float32 [N, V], a function of its arguments only."""
    key = threefry2x32(seed_low, seed_high, return_index, position.astype(jnp.uint32))
    ids = jnp.arange(vocab, dtype=jnp.uint32)[None]
    bits, _ = threefry2x32(key[0][:, None], key[1][:, None], ids, jnp.zeros_like(ids))
    # 23 bits and a half, so that neither 0 nor 1 occurs in float32.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def threefry2x32(
    key0: jax.Array, key1: jax.Array, counter0: jax.Array, counter1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Twenty rounds on uint32 words, broadcast together."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for i in range(5):
        for r in rotations[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << r | x1 >> (32 - r)) ^ x0
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1
