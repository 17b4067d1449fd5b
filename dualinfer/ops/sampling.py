"""Sample tokens: penalty and held EOS, temperature and filters, noise; of N rows at once.

Meaning and order are those of transformers' `generation/logits_process.py`. The noise is
threefry2x32 (Salmon et al., 2011), so that a seed gives the same text on every framework.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from .maths import Maths

Array: TypeAlias = Any
Filter = Callable[[Array, Array, Array, Array], Array]
WORDS = ("seed_low", "seed_high", "return_index")
TOP = 20  # candidates of which a step tells; OpenAI's API names as many


def sample(
    m: Maths,
    logits: Array,
    state: Any,
    position: Array,
    features: Any,
    keep: Filter | None = None,
) -> Array:
    """The next token [N] from float32 logits [N, V]; `position` [N] is the new token's own.

    See `scores`. The first token whose logit is NaN is chosen, if there is one: drawn or not, as
    HF's greedy one.
    """
    return m.argmax(scores(m, logits, state, position, features, keep))


def scores(
    m: Maths,
    logits: Array,
    state: Any,
    position: Array,
    features: Any,
    keep: Filter | None = None,
) -> Array:
    """Float32 scores [N, V] of which each row's best one is its next token.

    `state` has the columns of `backends.slots.sampling_rows` as attributes, `new` [N] and `seen`
    [N, V]; `features` are the `SamplingFeatures` that any row needs. `keep` takes the place of
    `filter_logits`.
    """
    logits = m.wide(logits)
    if features.penalty:
        logits = penalize(m, logits, state.seen, state.penalty)
    if features.hold_eos:
        logits = hold_eos(m, logits, state.eos, state.new, state.minimum)
    if not features.noise:
        return logits
    wrong = logits != logits  # NaN
    logits = m.where(wrong, -float("inf"), logits)
    # From the best one down, so that a tiny temperature gives -inf and no NaN.
    warm = (logits - m.most(logits)) / state.temperature[:, None]
    if features.filters:
        keep = keep or partial(filter_logits, m)
        warm = keep(warm, state.top_k, state.top_p, state.min_p)
    low, high, index = (getattr(state, name) for name in WORDS)
    noise = gumbel(m, low, high, index, position, logits.shape[-1])
    drawn = m.where(state.noise[:, None], warm + noise, logits)
    return m.where(wrong, float("nan"), drawn)


def penalize(m: Maths, logits: Array, seen: Array, penalty: Array) -> Array:
    """Logits [N, V] with those of the tokens `seen` [N, V] made less likely by penalty [N].

    Keskar et al., 2019, as HF's RepetitionPenaltyLogitsProcessor: each seen token once.
    """
    penalty = penalty[:, None]
    return m.where(seen, m.where(logits < 0, logits * penalty, logits / penalty), logits)


def hold_eos(m: Maths, logits: Array, eos: Array, new: Array, minimum: Array) -> Array:
    """Logits [N, V] with -inf at a row's `eos` ids while it has fewer new tokens than `minimum`.

    Of `eos` [N, any] negative ones are none. HF's MinNewTokensLengthLogitsProcessor.
    """
    is_eos = eos[..., None] == m.arange(logits.shape[-1], logits)
    held = (new < minimum)[:, None, None] & is_eos
    return m.where(held.any(1), -float("inf"), logits)


def filter_logits(m: Maths, logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Logits [N, V] with everything outside top-k, then top-p, then min-p at -inf.

    Each filter is a threshold, so that tied candidates stay or go together. Top-k 0, top-p 1 and
    min-p 0 [N] are off, and the best one always stays.
    """
    vocab, hidden = logits.shape[-1], -float("inf")
    ascending = m.sort(logits)
    k = m.where(top_k > 0, top_k, vocab).clip(max=vocab)
    floor = m.along(ascending, (vocab - k)[:, None])
    ascending = m.where(ascending < floor, hidden, ascending)
    below = m.softmax(ascending)[:, :-1].cumsum(-1) <= (1 - top_p)[:, None]
    dropped = (below & (top_p < 1)[:, None]).sum(-1)[:, None]
    floor = m.maximum(floor, m.along(ascending, dropped))
    floor = m.maximum(floor, ascending[:, -1:] + m.log(min_p)[:, None])
    return m.where(logits < floor, hidden, logits)


def choose(
    m: Maths,
    scores: Array,
    noise: Array,
    seed_low: Array,
    seed_high: Array,
    return_index: Array,
    position: Array,
) -> Array:
    """The best token [N] of scores [N, V], or in rows where `noise` [N] is true a drawn one."""
    drawn = gumbel(m, seed_low, seed_high, return_index, position, scores.shape[-1])
    return m.argmax(m.where(noise[:, None], scores + drawn, scores))


def warm(
    m: Maths,
    scores: Array,
    temperature: Array,
    filters: Sequence[Array],
    keep: Filter | None = None,
) -> Array:
    """Scores [N, V] over the temperature of each row, -inf outside of its filters.

    These are top-k, top-p and min-p; `keep` takes the place of `filter_logits`.
    """
    keep, temperature = keep or partial(filter_logits, m), temperature[:, None]
    kept = keep((scores - m.most(scores)) / temperature, *filters)
    hidden = -float("inf")
    return m.where(kept == hidden, hidden, scores / temperature)


def hide(m: Maths, scores: Array, hidden: Array, outweigh: int | None) -> Array:
    """See `base.Runner.hide`."""
    scores = m.where(hidden, -float("inf"), scores)
    if outweigh is None:
        return scores
    logs = m.log_softmax(scores)
    outweighed = m.log_sum(logs[:, outweigh:]) > m.most(logs[:, :outweigh])
    before = m.arange(scores.shape[-1], scores) < outweigh
    return m.where(outweighed & before, -float("inf"), scores)


def weigh(m: Maths, logits: Array, bias: Array, counts: Array, costs: Array) -> Array:
    """Logits [N, V] plus `bias` [N, V], less what a row's new tokens cost; -inf stays.

    `counts` [N, V] says how often each token is among them. `costs` [N, 2] are the presence
    penalty, for each that is there, and the frequency penalty, for each time; as in OpenAI's API.
    """
    there = m.where(counts > 0, costs[:, :1], 0.0)
    return logits + bias - there - costs[:, 1:] * counts


def tell(m: Maths, logits: Array, token: Array, likely: int = TOP) -> Array:
    """Log-probabilities float32 [N, 1 + 2 K] by logits [N, V], and what they are of.

    The first is that of `token` [N]. K ones of the likeliest tokens follow, K being `likely` or V,
    and then the ids of these.
    """
    logs = m.log_softmax(m.wide(logits))
    ids = m.largest(logs, min(likely, logits.shape[-1]))
    columns = [m.along(logs, token[:, None]), m.along(logs, ids), m.wide(ids)]
    return m.join(columns, -1)


def log_probs(m: Maths, scores: Array, tokens: Array, temperature: Any) -> Array:
    """See `base.Runner.log_probs`."""
    return m.along(m.log_softmax(scores * temperature), tokens[:, None])[:, 0]


def gumbel(
    m: Maths, seed_low: Array, seed_high: Array, return_index: Array, position: Array, vocab: int
) -> Array:
    """Standard Gumbel noise float32 [N, V], a function of its arguments only.

    A row's key is the block of (return_index, position) under the seed's two words; the noise of a
    token comes from the first word of the block of (its id, 0) under that key.
    """
    given = (m.words(a) for a in (seed_low, seed_high, return_index, position))
    key0, key1 = threefry2x32(m, *given)
    ids = m.words(m.arange(vocab, position))[None]
    bits, _ = threefry2x32(m, key0[:, None], key1[:, None], ids, 0)
    # 23 bits and a half, so that neither 0 nor 1 occurs in float32.
    return -m.log(-m.log((m.wide(bits >> 9) + 0.5) * 2.0**-23))


def threefry2x32(
    m: Maths, key0: Array, key1: Array, counter0: Array, counter1: Any
) -> tuple[Array, Array]:
    """Two random words of a key and a counter: twenty rounds on 32-bit words, of one shape."""
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x0, x1 = m.low(counter0 + keys[0]), m.low(counter1 + keys[1])
    for i in range(5):
        for r in rotations[i % 2]:
            x0 = m.low(x0 + x1)
            x1 = m.low(x1 << r | x1 >> (32 - r)) ^ x0
        x0 = m.low(x0 + keys[(i + 1) % 3])
        x1 = m.low(x1 + keys[(i + 2) % 3] + (i + 1))
    return x0, x1
