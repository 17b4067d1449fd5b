"""Encoders and heads for labels against HF's own classes, on both backends."""

import numpy as np
import pytest
import torch

import dualinfer
from dualinfer.errors import ArgumentError, CheckpointError, LengthError

from .encoders import BASES, CASES, HEADS, PAD, VOCAB, make
from .models import BACKENDS, relative_rms

LIMIT = 1e-5
# The others show on JAX what these show, since both backends share the families.
ON_JAX = {
    *("roberta", "electra-masked", "albert", "modernbert", "bert-choice", "camembert-span"),
    *("modernbert-sequence", "eurobert-late", "llama-sequence", "electra-wide"),
}


def on_both(cases):
    return [
        pytest.param(case, name, marks=[] if name == "torch" or case in ON_JAX else [pytest.mark.slow])
        for case in cases
        for name in BACKENDS
    ]


def batch(case, tokens=13):
    """Ids and a mask [3, T], padded on the left and on the right; of choices, two of each."""
    rng = np.random.default_rng(5)
    rows = 6 if "choice" in case else 3
    ids = rng.integers(3, VOCAB, (rows, tokens))
    mask = np.ones_like(ids)
    if case != "modernbert-cls":  # which reads the first token, padding that sees padding alone
        mask[1, :4] = 0
    mask[2, -5:] = 0
    ids = np.where(mask == 1, ids, PAD)
    if "choice" in case:
        return ids.reshape(3, 2, tokens), mask.reshape(3, 2, tokens)
    return ids, mask


def of_hf(model, ids, **given):
    with torch.no_grad():
        given = {n: torch.tensor(v) for n, v in given.items()}
        out = model(torch.tensor(ids), output_hidden_states=True, **given)
    return {n: v for n, v in out.items() if n != "past_key_values"}


def compare(ours, theirs, mask=None):
    """Every output, at the real tokens where it has one for each."""
    real = ... if mask is None else mask.reshape(-1, mask.shape[-1]) == 1
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        pairs = zip(ours[name], value, strict=True) if isinstance(value, tuple) else [(ours[name], value)]
        for one, other in pairs:
            one, other = np.asarray(one), np.asarray(other)
            by_token = mask is not None and other.shape[:2] == real.shape
            assert one.shape == other.shape, name
            assert relative_rms(*((x[real] for x in (one, other)) if by_token else (one, other))) < LIMIT, name


@pytest.mark.parametrize(("case", "backend"), on_both(CASES))
def test_a_model_gives_what_hf_gives(case, backend):
    model = make(case)
    engine = dualinfer.init_inference(model, backend=backend, dtype="fp32", replace_with_kernel_inject=True)
    ids, mask = batch(case)
    compare(engine(ids, output_hidden_states=True), of_hf(model, ids))
    masked = of_hf(model, ids, attention_mask=mask)
    compare(engine(ids, attention_mask=mask, output_hidden_states=True), masked, mask)
    assert engine.report().architecture == type(model).__name__


LENGTHS = (9, 40, 3, 17, 1, 61, 12, 5, 30, 8)
POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def texts_of(lengths=LENGTHS):
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


def pooled(hidden, pooling):
    """sentence-transformers' pooling of one text's hidden states [T, E]."""
    steps = np.arange(1, len(hidden) + 1)[:, None]
    return {
        "cls": lambda: hidden[0],
        "mean": lambda: hidden.mean(0),
        "max": lambda: hidden.max(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": lambda: (hidden * steps).sum(0) / steps.sum(),
        "lasttoken": lambda: hidden[-1],
    }[pooling]()


def hidden_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, name, marks=[] if quick else [pytest.mark.slow])
        for case, quick in {
            **dict.fromkeys(("roberta", "modernbert", "qwen3-reward"), True),
            **dict.fromkeys(("nomic_bert", "albert", "gpt2-token", "bloom-token"), False),
        }.items()
        for name in BACKENDS
    ],
)
def test_vectors_of_packed_texts_are_those_of_each_alone(case, backend):
    model, texts = make(case), texts_of()
    hidden = [hidden_of(model, text) for text in texts]
    engine = dualinfer.init_inference(model, backend=backend, dtype="fp32", replace_with_kernel_inject=True)
    for pooling in POOLINGS:
        expected = np.stack([pooled(h, pooling) for h in hidden])
        vectors = engine.embed(texts, pooling=pooling)
        assert vectors.dtype == np.float32 and relative_rms(vectors, expected) < LIMIT
    unit = engine.embed(texts, normalize=True, batch_size=3)
    mean = np.stack([h.mean(0) for h in hidden])
    assert relative_rms(unit, mean / np.linalg.norm(mean, axis=1, keepdims=True)) < LIMIT
