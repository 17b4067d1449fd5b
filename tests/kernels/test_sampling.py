"""filter_logits and sample."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dualinfer.backends.base import Request, Sampling, SamplingFeatures
from dualinfer.backends.slots import sampling_rows

from . import oracles
from .implementations import meaning

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERS = {
    "off": [OFF],
    "top-k": [OFF | {"top_k": k} for k in (1, 2, 50, 999, 1000, 5000)],
    "top-p": [OFF | {"top_p": p} for p in (0.0, 0.01, 0.5, 0.9, 0.999)],
    "min-p": [OFF | {"min_p": p} for p in (0.001, 0.1, 0.5, 1.0)],
    "all": [
        {"top_k": k, "top_p": p, "min_p": m}
        for k in (3, 40, 900)
        for p in (0.3, 0.95)
        for m in (0.02, 0.3)
    ],
}
FILTERS["different rows"] = [row for rows in FILTERS.values() for row in rows]


def columns(rows: list[dict]) -> list[np.ndarray]:
    types = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    return [np.array([row[name] for row in rows], t) for name, t in types.items()]


def logits_without_ties(seed: int, rows: int, vocab: int) -> np.ndarray:
    """Normal, times 3: a few likely tokens and a long tail."""
    rng = np.random.default_rng(seed)
    many = rng.standard_normal((rows, vocab + 10)).astype(np.float32) * 3
    return np.stack([rng.permutation(np.unique(row))[:vocab] for row in many])


def processed_by_hf(
    logits: np.ndarray, row: dict, prompt: list[int] = (), new: list[int] = ()
) -> np.ndarray:
    """One row of logits [V] through HF's processors, in the order of `generate`."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    processors = []
    if row.get("repetition_penalty", 1.0) != 1:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(row["repetition_penalty"]))
    if row.get("min_new_tokens", 0) > 0:
        processors.append(
            hf.MinNewTokensLengthLogitsProcessor(
                len(prompt), row["min_new_tokens"], list(row["eos_ids"])
            )
        )
    if row.get("do_sample", True):
        processors.append(hf.TemperatureLogitsWarper(row.get("temperature", 1.0)))
        if row["top_k"] > 0:
            processors.append(hf.TopKLogitsWarper(row["top_k"]))
        if row["top_p"] < 1:
            processors.append(hf.TopPLogitsWarper(row["top_p"]))
        if row["min_p"] > 0:
            processors.append(hf.MinPLogitsWarper(row["min_p"]))
    ids = torch.tensor([[*prompt, *new]], dtype=torch.int64)
    scores = torch.from_numpy(logits[None].copy())
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0].numpy()


@pytest.mark.parametrize("vocab", [1, 63, 1000])
@pytest.mark.parametrize("rows", FILTERS.values(), ids=FILTERS)
def test_filters_keep_the_tokens_that_hf_keeps(maths, rows, vocab):
    rows = rows * 3
    logits = logits_without_ties(1, len(rows), vocab)
    expected = np.stack([processed_by_hf(x, row) for x, row in zip(logits, rows, strict=True)])
    np.testing.assert_array_equal(oracles.filter_logits(logits, *columns(rows)), expected)
    found = maths.filter_logits(logits, *columns(rows))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found).any(-1).all(), "a row is left without a token"


def test_filters_that_are_off_change_nothing(maths):
    """Not even where most probabilities are too small for float32."""
    logits = 100 * logits_without_ties(2, 3, 1000)
    found = maths.filter_logits(logits, *columns([OFF] * 3))
    np.testing.assert_array_equal(found, logits)


def test_filters_treat_equal_logits_alike(maths):
    rows = FILTERS["different rows"]
    logits = np.random.default_rng(2).integers(-4, 5, (len(rows), 63)).astype(np.float32)
    logits[0] = 0
    found = maths.filter_logits(logits, *columns(rows))
    np.testing.assert_array_equal(found, oracles.filter_logits(logits, *columns(rows)))


def test_filters_leave_what_is_already_hidden(maths):
    """A held EOS comes in as -inf; top-k may ask for more tokens than are left."""
    rows = FILTERS["different rows"]
    logits = logits_without_ties(3, len(rows), 63)
    logits[:, 5:] = -np.inf
    found = maths.filter_logits(logits, *columns(rows))
    np.testing.assert_array_equal(found, oracles.filter_logits(logits, *columns(rows)))
    assert not np.isnan(found).any()


def state_of(
    requests: list[Request], seen: np.ndarray, new: np.ndarray | None = None
) -> SimpleNamespace:
    """Slot state as both runners make it from requests."""
    count = len(requests)
    zeros = np.zeros(count, np.int32)
    width = max(1, *(len(r.eos_ids) for r in requests))
    return SimpleNamespace(
        active=np.ones(count, bool),
        last=zeros,
        length=zeros,
        new=zeros if new is None else new,
        seen=seen,
        **sampling_rows(requests, width),
    )


def mixed_rows() -> list[dict]:
    """Rows of a batch, each with its own way to be sampled."""
    ways = [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.7, "min_new_tokens": 4, "eos_ids": (2,)},
        {"temperature": 0.7},
        {"temperature": 2.5, "top_k": 40, "repetition_penalty": 1.2},
        {"top_p": 0.8, "repetition_penalty": 0.6, "min_new_tokens": 9, "eos_ids": (2, 7, 0)},
        {"min_p": 0.05, "top_k": 100, "top_p": 0.95, "temperature": 1.3},
        {"min_new_tokens": 1, "eos_ids": (5,)},
    ]
    base = {"do_sample": True, "repetition_penalty": 1.0, "temperature": 1.0, **OFF}
    return [base | {"min_new_tokens": 0, "eos_ids": ()} | way for way in ways] * 9


def request_of(row: dict, prompt: list[int], index: int) -> Request:
    options = {k: v for k, v in row.items() if k not in ("min_new_tokens", "eos_ids")}
    return Request(
        tokens=np.array(prompt, np.int32),
        max_new_tokens=50,
        min_new_tokens=row["min_new_tokens"],
        eos_ids=row["eos_ids"],
        sampling=Sampling(**options, seed=(index << 40) + 12345, return_index=index % 3),
    )


def chosen(scores: np.ndarray, state: Any, position: np.ndarray) -> np.ndarray:
    """The best tokens of HF's scores, with noise in the rows that are drawn; see test_random.py."""
    words = state.seed_low, state.seed_high, state.return_index
    noise = meaning.gumbel(*words, position, scores.shape[-1])
    return np.where(state.noise[:, None], scores + noise, scores).argmax(-1)


@pytest.mark.parametrize("vocab", [63, 1000])
def test_sample_takes_the_token_that_hf_scores_and_the_noise_choose(maths, vocab):
    rng = np.random.default_rng(4)
    rows = mixed_rows()
    logits = logits_without_ties(5, len(rows), vocab)
    logits[:, [2, 5]] += 8  # an EOS that is held, or penalized, would have won
    logits[:, [0, -1]] += 8  # where only those are held: no EOS must not be taken for an id
    prompts = [rng.integers(0, vocab, 20).tolist() for _ in rows]
    fresh = [rng.integers(0, vocab, i % 11).tolist() for i in range(len(rows))]
    requests = [request_of(row, prompts[i], i) for i, row in enumerate(rows)]
    seen = np.zeros((len(rows), vocab), bool)
    for i in range(len(rows)):
        seen[i, prompts[i] + fresh[i]] = True
    state = state_of(requests, seen, np.array([len(f) for f in fresh], np.int32))
    position = np.array([20 + len(f) for f in fresh], np.int32)

    each = zip(logits, rows, prompts, fresh, strict=True)
    expected = chosen(np.stack([processed_by_hf(*row) for row in each]), state, position)
    features = SamplingFeatures.of(requests)
    assert features == SamplingFeatures(True, True, True, True)
    np.testing.assert_array_equal(maths.sample(logits, state, position, features), expected)


@pytest.mark.parametrize(
    "way",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.7},
        {"do_sample": False, "min_new_tokens": 3, "eos_ids": (2, 5)},
        {"do_sample": False, "min_new_tokens": 1, "eos_ids": (2,)},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.2, "temperature": 5.0},
        {"min_p": 0.5, "temperature": 5.0},
    ],
    ids=str,
)
def test_sample_needs_only_the_features_of_its_requests(maths, way):
    base = {"do_sample": True, "min_new_tokens": 0, "eos_ids": ()}
    row = {"repetition_penalty": 1.0, "temperature": 1.0, **OFF, **base, **way}
    requests = [request_of(row, [1, 2], i) for i in range(9)]
    logits = logits_without_ties(6, 9, 63)
    logits[:, 2] += 8
    seen = np.zeros((9, 63), bool)
    seen[:, [1, 2]] = True
    features = SamplingFeatures.of(requests)
    state = state_of(requests, seen)
    position = np.arange(9, dtype=np.int32)
    found = maths.sample(logits, state, position, features)
    scores = np.stack([processed_by_hf(own, row, [1, 2]) for own in logits])
    np.testing.assert_array_equal(found, chosen(scores, state, position))


def test_the_first_score_of_nan_is_chosen(maths):
    """Drawn or not, with every filter: as argmax has it, by which HF's greedy search goes."""
    requests = [request_of(row, [1], i) for i, row in enumerate(mixed_rows())]
    logits = logits_without_ties(7, len(requests), 1000)
    first = np.arange(len(requests)) * 13 + 100
    for row, at in enumerate(first):
        logits[row, [at, 990]] = np.nan
    logits[-1] = np.nan
    position = np.arange(len(requests), dtype=np.int32)
    state = state_of(requests, np.zeros(logits.shape, bool))
    expected = [*first[:-1], 0]
    for features in (SamplingFeatures(noise=True, hold_eos=True), SamplingFeatures.of(requests)):
        assert maths.sample(logits, state, position, features).tolist() == expected


def test_sample_does_not_depend_on_the_batch(maths):
    requests = [request_of(row, [1], i) for i, row in enumerate(mixed_rows())]
    logits = logits_without_ties(7, len(requests), 1000)
    position = np.arange(len(requests), dtype=np.int32)
    features = SamplingFeatures(noise=True, filters=True, hold_eos=True)
    seen = np.zeros(logits.shape, bool)
    together = maths.sample(logits, state_of(requests, seen), position, features)
    some = [40, 3, 17]
    state = state_of([requests[i] for i in some], seen[some])
    apart = maths.sample(logits[some], state, position[some], features)
    np.testing.assert_array_equal(apart, together[some])


DRAWS, VOCAB = 20_000, 7
# Chance of a chi-square beyond it, at 3, 6 and 48 degrees of freedom: 1 in 10000.
CRITICAL = {3: 21.11, 6: 27.86, 48: 93.17}


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("varied", ["position", "seed_low", "seed_high", "return_index"])
def test_sampled_tokens_have_the_frequencies_of_the_distribution(maths, varied):
    logits = np.random.default_rng(8).standard_normal(VOCAB).astype(np.float32)
    request = request_of({"do_sample": True, "min_new_tokens": 0, "eos_ids": ()}, [1], 1)
    state = state_of([request] * DRAWS, np.zeros((DRAWS, VOCAB), bool))
    position = np.full(DRAWS, 9, np.int32)
    if varied == "position":
        position = np.arange(DRAWS, dtype=np.int32)
    else:
        setattr(state, varied, np.arange(DRAWS, dtype=np.int64))
    features = SamplingFeatures(noise=True)
    tokens = maths.sample(np.tile(logits, (DRAWS, 1)), state, position, features)
    probability = np.exp(logits.astype(np.float64))
    probability /= probability.sum()
    counts = np.bincount(tokens, minlength=VOCAB)
    assert chi_square(counts, DRAWS * probability) < CRITICAL[6]
    # Neighbours are independent: pairs have the product of the frequencies.
    pairs = np.bincount(tokens[::2] * VOCAB + tokens[1::2], minlength=VOCAB**2)
    expected = DRAWS / 2 * np.outer(probability, probability).ravel()
    assert chi_square(pairs, expected) < CRITICAL[48]


def test_filtered_tokens_are_never_drawn(maths):
    logits = np.random.default_rng(9).standard_normal(VOCAB).astype(np.float32)
    way = {"do_sample": True, "temperature": 0.7, "top_k": 4, "min_new_tokens": 0, "eos_ids": ()}
    state = state_of([request_of(way, [1], 1)] * DRAWS, np.zeros((DRAWS, VOCAB), bool))
    position = np.arange(DRAWS, dtype=np.int32)
    features = SamplingFeatures(noise=True, filters=True)
    tokens = maths.sample(np.tile(logits, (DRAWS, 1)), state, position, features)
    best = np.argsort(-logits)[:4]
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[best].sum() == DRAWS
    probability = np.exp(logits[best].astype(np.float64) / 0.7)
    assert chi_square(counts[best], DRAWS * probability / probability.sum()) < CRITICAL[3]
