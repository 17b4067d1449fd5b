"""The slots' state on the JAX device, the book of their tokens, and filters without a sort.

How a token is chosen says `ops/sampling.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...ops import sampling
from ...ops.sampling import WORDS
from ..base import NO_TOKEN, Piece, Request, SamplingFeatures
from ..slots import WeightRows, bucket, sampling_rows
from .maths import MATHS

SMALLEST_PROMPT = 16
ALL = SamplingFeatures(noise=True, filters=True, penalty=True, hold_eos=True)
Filter: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
BEST, CHANGED, FILTERED = range(3)  # what a step does to logits before it takes the best: its mode


def mode_of(needs: SamplingFeatures) -> int:
    """The least mode that has what requests need.

    BEST is for rows whose logits stay as they are. CHANGED has noise, penalty and a held EOS as
    well, and FILTERED also top-k, top-p and min-p, each off in rows that do not ask for it.
    """
    if needs.filters:
        return FILTERED
    return CHANGED if needs.noise or needs.penalty or needs.hold_eos else BEST


class SlotState(NamedTuple):
    """Decode state, a row a slot. `last` is sampled but not yet in the cache.

    `length` counts cached tokens, `new` the sampled ones, `remaining` those still allowed; the
    others are the columns of `slots.sampling_rows`. `seen` [N, V] marks prompt and new tokens,
    those of a chunk of steps once it has ended. `hidden` [N, V] are those that are never chosen;
    None where every slot may choose all. `bias` and `counts` float32 [N, V] and `costs` [N, 2] are
    those of `sampling.weigh`; None where no slot has any.
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
    seen: jax.Array
    hidden: jax.Array | None = None
    bias: jax.Array | None = None
    counts: jax.Array | None = None
    costs: jax.Array | None = None

    @classmethod
    def make(
        cls, slots: int, eos_width: int, vocab: int, hides: bool = False, weighs: bool = False
    ) -> "SlotState":
        """All slots free, in host memory."""
        integers = ("last", "length", "new", "remaining", "minimum", "top_k")
        floats = ("temperature", "top_p", "min_p", "penalty")
        columns: dict[str, Any] = {
            "active": np.zeros(slots, bool),
            "noise": np.zeros(slots, bool),
            "eos": np.full((slots, eos_width), NO_TOKEN, np.int32),
            "seen": np.zeros((slots, vocab), bool),
            "hidden": np.zeros((slots, vocab), bool) if hides else None,
            "bias": np.zeros((slots, vocab), np.float32) if weighs else None,
            "counts": np.zeros((slots, vocab), np.float32) if weighs else None,
            "costs": np.zeros((slots, 2), np.float32) if weighs else None,
            **{name: np.zeros(slots, np.int32) for name in integers},
            **{name: np.zeros(slots, np.uint32) for name in WORDS},
            **{name: np.ones(slots, np.float32) for name in floats},
        }
        return cls(**columns)

    @property
    def has(self) -> tuple[bool, bool]:
        """Whether it hides tokens, and whether it weighs them: for some requests alone."""
        return self.hidden is not None, self.bias is not None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of these, for the keys of steps."""
        return tuple(n for n, there in zip(("hidden", "weighed"), self.has, strict=True) if there)

    def shown(self, logits: jax.Array) -> jax.Array:
        """Logits [N, V], weighed, and -inf where a token is hidden."""
        if self.hidden is not None:
            logits = jnp.where(self.hidden, -jnp.inf, logits)
        if self.bias is None:
            return logits
        return sampling.weigh(MATHS, logits, self.bias, self.counts, self.costs)

    def counted(self, moved: jax.Array) -> "SlotState":
        """With the `last` token counted in rows that bool `moved` [N] says."""
        if self.counts is None:
            return self
        where = jnp.arange(len(self.last)), self.last
        return self._replace(counts=self.counts.at[where].add(moved.astype(jnp.float32)))

    def weighing(self, rows: WeightRows) -> "SlotState":
        """With what `weight_rows` gives, of each row."""
        bias, counts, costs = _dense(rows, *self.seen.shape)
        return self._replace(bias=bias, counts=counts, costs=costs)


def without_ended(
    active: jax.Array, length: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two columns of a state without the slots that have ended, which bool `kept` [N] says.

    They have no length, as steps of others read what a slot seems to have.
    """
    return active & kept, jnp.where(kept, length, 0)


def prompt_rows(
    pieces: Sequence[Piece], free: int, eos_width: int, shape: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray, SlotState]:
    """Pieces of prompts as a step takes them: ids, the slots of the rows, their state.

    Ids have this `shape`, or are in buckets.

    The rows' lengths are what a slot has then. Prompts of embeddings have NO_TOKEN for an id that
    is not known. What they have seen is for the step to tell. Rows beyond the pieces go to slot
    `free`, which there is not: they are dropped.
    """
    longest = max(p.stop - p.start for p in pieces)
    ids = np.zeros(shape or (bucket(len(pieces)), bucket(longest, SMALLEST_PROMPT)), np.int32)
    count = len(ids)
    lengths, active = np.ones(count, np.int32), np.ones(count, bool)
    where = np.full(count, free, np.int32)
    where[: len(pieces)] = [p.slot for p in pieces]
    for i, p in enumerate(pieces):
        tokens = p.request.tokens
        own = tokens[p.start : p.stop] if len(tokens) else NO_TOKEN
        ids[i, : p.stop - p.start], lengths[i], active[i] = own, p.stop, p.ends
    requests = {id(p.request): p.request for p in pieces}  # of which rows of a prompt have one
    numbers = {own: i for i, own in enumerate(requests)}
    at = np.zeros(count, np.intp)  # rows beyond the pieces are as the first one
    at[: len(pieces)] = [numbers[id(p.request)] for p in pieces]
    columns = sampling_rows(list(requests.values()), eos_width)
    columns = {name: column[at] for name, column in columns.items()}
    columns |= {name: columns[name].astype(np.uint32) for name in WORDS}
    rows = SlotState.make(count, 1, 0)._replace(active=active, length=lengths, **columns)
    return ids, where, rows


def hidden_words(requests: Sequence[Request], count: int, vocab: int) -> np.ndarray:
    """The tokens that `count` rows hide, for `bits_of`: always, and more at the first one.

    uint32 [2, B, V / 32]. As bool those of a panel took the host 30 ms to make and to move where V
    is 128,256.
    """
    words = np.zeros((2, count, -(-vocab // 32)), np.uint32)
    always, first = words
    for i, r in enumerate(requests):
        _mark(always[i], r.hidden)
        _mark(first[i], r.hidden_at_first)
        if r.allowed is not None:
            first[i] |= ~r.allowed
    return words


def _mark(words: np.ndarray, ids: Sequence[int]) -> None:
    """Set the bits of these ids."""
    if ids:
        at = np.asarray(ids, np.uint32)
        np.bitwise_or.at(words, at >> 5, np.uint32(1) << (at & 31))


def bits_of(words: jax.Array, vocab: int) -> jax.Array:
    """bool [B, V] of the bits of uint32 `words` [B, V / 32], the lowest one first."""
    bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bits.reshape(len(words), -1)[:, :vocab] != 0


def source_rows(
    requests: Sequence[Request], count: int, of_one_length: bool
) -> tuple[np.ndarray, np.ndarray] | tuple[()]:
    """Inputs of an encoder for `count` rows, in buckets, and how many places are real, [B].

    Ids [B, S], what an encoder gave [B, S, E], or spectrograms [B, 2 S, mel]; () for none. Those
    `of_one_length` are in no bucket.
    """
    sources = [r.source for r in requests if r.source is not None]
    if not sources:
        return ()
    longest, rest = max(map(len, sources)), sources[0].shape[1:]
    width = longest if of_one_length else bucket(longest, SMALLEST_PROMPT)
    given = np.zeros((count, width, *rest), np.float32 if rest else np.int32)
    lengths = np.ones(count, np.int32)
    for i, source in enumerate(sources):
        given[i, : len(source)], lengths[i] = source, requests[i].encoded
    return given, lengths


def piece_rows(pieces: Sequence[Piece], count: int, free: int) -> tuple[np.ndarray, ...]:
    """The starts of `count` rows, their prompts' lengths, and the slots whose state they become.

    [B] each; of several rows of a slot the last one becomes its state, and others that of `free`.
    """
    starts, wholes = np.zeros(count, np.int32), np.ones(count, np.int32)
    into, last = np.full(count, free, np.int32), {p.slot: i for i, p in enumerate(pieces)}
    for i, p in enumerate(pieces):
        starts[i], wholes[i] = p.start, len(p.request.prompt)
        into[i] = p.slot if last[p.slot] == i else free
    return starts, wholes, into


def prompt_embeds(pieces: Sequence[Piece], shape: tuple[int, ...]) -> np.ndarray | None:
    """The pieces' embeddings in the bucket `shape` [B, T]: [B, T, W]; None where they are ids."""
    embeds = pieces[0].request.embeds
    if embeds is None:
        return None
    padded = np.zeros((*shape, embeds.shape[1]), np.float32)
    for i, p in enumerate(pieces):
        padded[i, : p.stop - p.start] = p.request.prompt[p.start : p.stop]
    return padded


def book(state: SlotState, token: jax.Array) -> SlotState:
    """Book a sampled token; a slot ends at its EOS or its last allowed token."""
    active = state.active
    remaining = state.remaining - active.astype(jnp.int32)
    is_eos = (token[:, None] == state.eos).any(-1)
    return state._replace(
        active=active & ~is_eos & (remaining > 0),
        last=jnp.where(active, token, state.last),
        new=state.new + active.astype(jnp.int32),
        remaining=remaining,
    )


def advance(
    logits: jax.Array,
    state: SlotState,
    mode: jax.Array | int,
    out: jax.Array,
    step: jax.Array | int,
    filtered: Filter | None = None,
) -> tuple[SlotState, jax.Array]:
    """Choose each active slot's next token and book it; row `step` of `out` int32 [R, N] has it.

    `filtered` as in `sample`.
    """
    token = sample(logits, state, state.length + 1, mode, out, filtered)
    shown = jnp.where(state.active, token, NO_TOKEN)
    length = state.length + state.active.astype(jnp.int32)
    return book(state._replace(length=length), token), out.at[step].set(shown)


def copy_rows(old: SlotState, new: SlotState) -> SlotState:
    """`new` with the rows of a smaller `old`."""
    for name, column in old._asdict().items():
        if column is None:
            continue
        getattr(new, name)[tuple(slice(n) for n in column.shape)] = np.asarray(column)
    return new


def _summed(ids: Any, values: Any, count: int, vocab: int) -> jax.Array:
    """float32 [count, vocab] with `values` added at `ids` [count, any]; NO_TOKEN is none."""
    columns = jnp.where(ids == NO_TOKEN, vocab, ids)
    whole = jnp.zeros((count, vocab), jnp.float32)
    return whole.at[jnp.arange(count)[:, None], columns].add(values, mode="drop")


def _dense(rows: WeightRows, count: int, vocab: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bias and counts [count, vocab], and costs [count, 2], of what `weight_rows` gives."""
    bias = _summed(rows.ids, rows.values, count, vocab)
    counts = _summed(rows.new, jnp.ones(rows.new.shape, jnp.float32), count, vocab)
    return bias, counts, jnp.asarray(rows.costs)


def mark(seen: jax.Array, tokens: jax.Array) -> jax.Array:
    """`seen` [N, V] with `tokens` int32 [R, N], of which NO_TOKEN is none."""
    columns = jnp.where(tokens == NO_TOKEN, seen.shape[1], tokens)
    return seen.at[jnp.arange(len(seen)), columns].set(True, mode="drop")


def mark_in(seen: jax.Array, slots: jax.Array, tokens: jax.Array) -> jax.Array:
    """`seen` [N, V] with `tokens` int32 [B, T] in `slots` [B], which may be none or come twice."""
    columns = jnp.where(tokens == NO_TOKEN, seen.shape[1], tokens)
    return seen.at[slots[:, None], columns].set(True, mode="drop")


@jax.named_scope("sampling")
def sample(
    logits: jax.Array,
    state: SlotState,
    position: jax.Array,
    mode: jax.Array | int,
    unmarked: jax.Array | None = None,
    filtered: Filter | None = None,
) -> jax.Array:
    """The next token int32 [N] from float32 logits [N, V]; see `sampling.sample`.

    `mode` is the batch's, so that one executable serves every kind of request. `unmarked` [R, N]
    are tokens that `seen` lacks as yet. `filtered` takes the place of `filter_logits`.
    """
    logits = MATHS.wide(logits)

    def changed() -> jax.Array:
        traced = jnp.asarray(mode, jnp.int32)
        return _changed(logits, state, position, traced, unmarked, filtered or filter_logits)

    return MATHS.argmax(jax.lax.cond(mode == BEST, lambda: logits, changed))


# Traced once for all steps of a size: it is a third of what a small model's takes.
@partial(jax.jit, static_argnums=5)
def _changed(
    logits: jax.Array,
    state: SlotState,
    position: jax.Array,
    mode: jax.Array,
    unmarked: jax.Array | None,
    filtered: Filter,
) -> jax.Array:
    """See `sampling.scores`."""

    def keep(warm: jax.Array, *filters: jax.Array) -> jax.Array:
        return jax.lax.cond(mode == FILTERED, lambda: filtered(warm, *filters), lambda: warm)

    seen = state.seen if unmarked is None else mark(state.seen, unmarked)
    return sampling.scores(MATHS, logits, state._replace(seen=seen), position, ALL, keep)


@jax.jit
def choose(scores: jax.Array, columns: Mapping[str, Any], position: jax.Array) -> jax.Array:
    """See `sampling.choose`; `columns` as in SlotState."""
    noise, low, high, index = (columns[name] for name in ("noise", *WORDS))
    return sampling.choose(MATHS, scores, noise, low, high, index, position)


@jax.jit
def rows_of(scores: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows [B, V] of scores [N, V], by their numbers [B]: one program wherever they are."""
    return scores[rows]


@jax.jit
def warm(scores: jax.Array, columns: Mapping[str, Any]) -> jax.Array:
    """See `sampling.warm`; `columns` as in SlotState."""
    filters = [columns[name] for name in ("top_k", "top_p", "min_p")]
    return sampling.warm(MATHS, scores, columns["temperature"], filters, filter_logits)


@partial(jax.jit, static_argnums=2)
def hide(scores: jax.Array, hidden: jax.Array, outweigh: int | None) -> jax.Array:
    """See `base.Runner.hide`."""
    return sampling.hide(MATHS, scores, hidden, outweigh)


@jax.jit
def allow(hidden: jax.Array, slots: jax.Array, words: jax.Array) -> jax.Array:
    """`hidden` [N, V] with what `base.Runner.allow` says of slots [B]; N is none."""
    return hidden.at[slots].set(~bits_of(words, hidden.shape[1]), mode="drop")


@jax.jit
def weigh(scores: jax.Array, rows: WeightRows) -> jax.Array:
    """See `base.Runner.weigh`."""
    return sampling.weigh(MATHS, MATHS.wide(scores), *_dense(rows, *scores.shape))


@partial(jax.jit, static_argnums=2)
def tell(scores: jax.Array, tokens: jax.Array, likely: int) -> jax.Array:
    """See `base.Runner.tell`."""
    return sampling.tell(MATHS, scores, tokens, likely)


@jax.jit
def log_probs(scores: jax.Array, tokens: jax.Array, temperature: jax.Array) -> jax.Array:
    """See `base.Runner.log_probs`."""
    return sampling.log_probs(MATHS, scores, tokens, temperature)


def filter_logits(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """See `sampling.filter_logits`; thresholds are searched for."""
    vocab = logits.shape[-1]
    keys, best = _keys(logits), logits.max(-1, keepdims=True)
    k = jnp.minimum(jnp.where(top_k > 0, top_k, vocab), vocab)[:, None]
    floor = _threshold(keys, jnp.ones_like(logits), vocab - k)
    share = jax.nn.softmax(jnp.where(keys < floor, -jnp.inf, logits), axis=-1)
    nucleus = _threshold(keys, share, (1 - top_p)[:, None])
    nucleus = jnp.minimum(nucleus, keys.max(-1, keepdims=True))  # the best one stays
    floor = jnp.maximum(floor, jnp.where(top_p[:, None] < 1, nucleus, 0))
    dropped = (keys < floor) | (logits < best + jnp.log(min_p)[:, None])
    return jnp.where(dropped, -jnp.inf, logits)


def _keys(x: jax.Array) -> jax.Array:
    """uint32 in the order of float32 `x`: zeros are equal, NaN is the greatest."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, jnp.abs(x)), jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(jnp.isnan(x), ~jnp.uint32(0), jnp.where(x < 0, ~(bits | top), bits | top))


def _threshold(keys: jax.Array, weights: jax.Array, most: jax.Array) -> jax.Array:
    """The greatest uint32 [N, 1] below which keys [N, V] weigh at most `most` [N, 1].

    Found digit by digit, without a sort. A GPU counts for many digits at once, and its steps are
    laid out one after another, since a loop would have to ask the host.
    """

    def find(digit_bits: int, *arrays: jax.Array) -> jax.Array:
        keys, weights, most = arrays
        digits = jnp.arange(1, 1 << digit_bits, dtype=jnp.uint32)

        def narrow(shift: Any, found: jax.Array) -> jax.Array:
            tried = found | digits << shift
            below = jnp.where(keys[:, None] < tried[..., None], weights[:, None], 0).sum(-1)
            return found | (below <= most).sum(-1, keepdims=True, dtype=jnp.uint32) << shift

        found = jnp.zeros(most.shape, jnp.uint32)
        shifts = range(32 - digit_bits, -1, -digit_bits)
        if digit_bits > 1:
            for shift in shifts:
                found = narrow(jnp.uint32(shift), found)
            return found
        return jax.lax.fori_loop(
            0, 32, lambda i, found: narrow((31 - i).astype(jnp.uint32), found), found
        )

    arrays = keys, weights, most.astype(jnp.float32)
    ways = {"cpu": partial(find, 1), "default": partial(find, 4)}
    return jax.lax.platform_dependent(*arrays, **ways)
