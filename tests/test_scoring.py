"""`engine.score` and the model for lm-evaluation-harness, beside transformers."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import dualinfer
from dualinfer.engine import scoring
from dualinfer.errors import ArgumentError, BackendNotAvailableError, LengthError, UnsupportedError
from dualinfer.evaluation import lm_eval_model


@pytest.fixture(scope="module")
def hf():
    module = transformers.AutoModelForCausalLM.from_pretrained(
        dualinfer.embedded_model(), dtype=torch.float32
    )
    return module.eval()


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def engine(request):
    model = dualinfer.embedded_model()
    with dualinfer.init_inference(model, backend=request.param, dtype="fp32") as engine:
        yield engine


def hf_score(hf, first, then):
    """Log-probabilities by HF, one pair at a time, and whether each is the likeliest."""
    ids = torch.tensor([[*first, *then]])
    with torch.no_grad():
        logs = hf(ids).logits[0].log_softmax(-1)
    rows = logs[len(first) - 1 : -1]
    found = rows.gather(1, torch.tensor(then)[:, None])[:, 0]
    return found.numpy(), bool((rows.argmax(-1) == torch.tensor(then)).all())


def check(hf, scores, pairs):
    assert len(scores) == len(pairs)
    for score, (first, then) in zip(scores, pairs, strict=True):
        expected, is_greedy = hf_score(hf, first, then)
        assert score.ids == list(then) and score.is_greedy == is_greedy
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-4, rtol=1e-4)
        assert score.logprob == pytest.approx(expected.sum(), rel=1e-4, abs=1e-4)


def test_scores_are_hfs_at_every_token(engine, hf, monkeypatch):
    monkeypatch.setattr(scoring, "_TOKENS", 600)  # several passes
    monkeypatch.setattr(scoring, "_LOGITS", 2048 * 300)
    random = np.random.default_rng(0)
    pairs = []
    for _ in range(12):
        n, k = random.integers(1, 90), random.integers(1, 12)
        ids = random.integers(3, 2048, n + k).tolist()
        pairs.append((ids[:n], ids[n:]))
    pairs += [(pairs[0][0], [int(x)]) for x in random.integers(3, 2048, 4)]  # of one prompt
    greedy = np.asarray(engine.generate([pairs[1][0]], max_new_tokens=5, do_sample=False))
    pairs.append((pairs[1][0], greedy[0, len(pairs[1][0]) :].tolist()))
    pairs.append(
        (pairs[2][0][:1], [*pairs[2][0][1:], *pairs[2][1]])
    )  # the same row, split elsewhere
    scores = engine.score([p for p, _ in pairs], [c for _, c in pairs])
    check(hf, scores, pairs)
    assert scores[-2].is_greedy and not scores[0].is_greedy
    read = []
    forward = engine.forward
    monkeypatch.setattr(
        engine, "forward", lambda ids, *a, **k: read.append(len(ids)) or forward(ids, *a, **k)
    )
    engine.score([pairs[0][0]] * 3, [[7], [8], [9]])
    assert read == [1]  # one row for all three


def test_a_prompt_of_several_continuations_is_read_once(engine, hf, monkeypatch):
    random = np.random.default_rng(1)
    pairs = []
    for length in (150, 140, 3, 90):
        first = random.integers(3, 2048, length).tolist()
        pairs += [(first, random.integers(3, 2048, n).tolist()) for n in (7, 1, 4, 1, 9)]
    greedy = np.asarray(engine.generate([pairs[0][0]], max_new_tokens=6, do_sample=False))
    pairs.append((pairs[0][0], greedy[0, len(pairs[0][0]) :].tolist()))
    pairs.append((pairs[7][0][:60], [5, 6]))  # alone
    read = []
    forward = engine.forward
    monkeypatch.setattr(
        engine, "forward", lambda ids, *a, **k: read.append(ids.shape) or forward(ids, *a, **k)
    )
    begun = []
    start = engine._loop.start_scores
    monkeypatch.setattr(
        engine._loop, "start_scores", lambda x, **k: begun.append(len(x)) or start(x, **k)
    )
    columns = [p for p, _ in pairs], [c for _, c in pairs]
    check(hf, engine.score(*columns), pairs)
    assert read == [(1, 61)] and begun == [4]
    engine.reserve(16, 200, cache_tokens=4096)
    try:
        check(hf, engine.score(*columns), pairs)
        assert begun == [4, 4]  # a quarter of the slots
        slow = engine.stream([[5]] * 13, max_new_tokens=40, eos_token_id=None)
        next(slow)
        check(hf, engine.score(*columns), pairs)  # the old way, since three slots are free
        assert begun == [4, 4, 4] and len([*slow]) == 39
    finally:
        engine.unreserve()
    read.clear()
    begun.clear()
    monkeypatch.setattr(scoring, "_PROMPTS", 2)
    monkeypatch.setattr(scoring, "_WORTH", 100)
    check(hf, engine.score(*columns), pairs)
    assert begun == [2] and read  # the shorter two are not worth it


def test_a_cache_that_rounds_changes_no_score(hf):
    model = dualinfer.embedded_model()
    first = np.random.default_rng(2).integers(3, 2048, 400).tolist()
    pairs = [(first, [7 + i, 20, 30]) for i in range(3)]
    with dualinfer.init_inference(model, dtype="fp32", kv_cache_dtype="int8") as engine:
        check(hf, engine.score([p for p, _ in pairs], [c for _, c in pairs]), pairs)


def test_texts_are_split_as_the_harness_does(engine, hf):
    tokenizer = engine.tokenizer
    texts = [("def copy(", "a, b):"), ("return  ", "x"), ("", "import os"), ("x = ", "1\n")]
    scores = engine.score([p for p, _ in texts], [c for _, c in texts])
    pairs = []
    for prompt, continuation in texts:
        n = len(prompt) - len(prompt.rstrip())
        if n:
            prompt, continuation = prompt[:-n], prompt[-n:] + continuation
        first = tokenizer(prompt)["input_ids"] if prompt else [tokenizer.bos_token_id]
        whole = tokenizer(prompt + continuation)["input_ids"]
        pairs.append((first, whole[len(first) if prompt else 0 :]))
    check(hf, scores, pairs)


@pytest.mark.parametrize(
    ("prompts", "continuations", "why"),
    [
        ("a", "b", "takes a list of prompts"),
        (5, ["b"], "takes a list of prompts"),
        (["a"], ["b", "c"], "got 1 prompts and 2 continuations"),
        (["a"], [""], "A continuation is empty"),
        ([[]], [[3]], "A prompt of ids is empty"),
        ([[3]], ["a"], "both texts, or both ids"),
        ([[3]], [[2048]], "There is no token 2048"),
        ([[3]], [[0.5]], "expected a text or a list of ids"),
        ([[3] * 1000], [[3] * 100], "are longer than the 1,025 that the model takes"),
    ],
)
def test_what_cannot_be_scored_is_refused(engine, prompts, continuations, why):
    with pytest.raises((ArgumentError, LengthError), match=why):
        engine.score(prompts, continuations)


def test_prompts_are_told_of_by_their_ids(engine):
    for wrong in ([5.7, 6.2], [[5, 6]]):
        with pytest.raises(ArgumentError, match="expected a text or a list of ids"):
            engine.prompt_logprobs(wrong)
    with pytest.raises(ArgumentError, match="logprobs=True; expected an int"):
        engine.prompt_logprobs([5, 6], True)
    assert engine.score(iter([[5]]), iter([[6]])) == engine.score([[5]], [[6]])


class StandIn:
    """lm_eval.api.model.LM, as far as a subclass needs it."""

    def __init__(self):
        self.cache_hook = SimpleNamespace(add_partial=lambda *args: None)


@pytest.fixture
def lm(engine, monkeypatch):
    """With the harness itself tests/lm_eval_task.py runs it."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = StandIn  # type: ignore[attr-defined]
    return lm_eval_model(engine, max_gen_toks=12)


def asked(*rows):
    return [SimpleNamespace(args=row) for row in rows]


def test_the_harness_gets_hfs_likelihoods(lm, engine, hf):
    tokenizer = engine.tokenizer
    ((likelihood, is_greedy),) = lm.loglikelihood(asked(("def copy(", "a, b):")))
    whole, first = (tokenizer(t)["input_ids"] for t in ("def copy(a, b):", "def copy("))
    expected, greedy = hf_score(hf, first, whole[len(first) :])
    assert likelihood == pytest.approx(expected.sum(), abs=1e-3) and is_greedy == greedy
    long = "def f(a):\n    return a\n" * 300
    ids = tokenizer(long)["input_ids"]
    assert len(ids) > 2048
    short, (cut, _) = lm.loglikelihood_rolling(asked(("x = 1",), (long,))), (None, None)
    own = tokenizer("x = 1")["input_ids"]
    assert short[0] == pytest.approx(hf_score(hf, [tokenizer.bos_token_id], own)[0].sum(), abs=1e-3)
    total, most = 0.0, 1024
    for begin in range(0, len(ids), most):  # windows that do not overlap, the last one moved back
        end = min(begin + most, len(ids))
        before = [tokenizer.bos_token_id] if begin == 0 else ids[end - most - 1 : begin]
        total += hf_score(hf, before, ids[begin:end])[0].sum()
    assert short[1] == pytest.approx(total, rel=1e-4)
    ((far, _),) = lm.loglikelihood(asked((long, " x")))  # loses its beginning
    then = tokenizer(long.rstrip() + "\n x")["input_ids"]
    assert np.isfinite(far) and cut is None and len(then) > 2048


def test_the_harness_gets_texts_up_to_what_ends_them(lm, engine):
    text = engine.generate_text("def copy(", max_new_tokens=12, do_sample=False)
    stop = text[3:5]
    how = {"until": [stop], "do_sample": False, "temperature": 0.0}
    found = lm.generate_until(asked(("def copy(", {"until": []}), ("def copy(", how)))
    assert found == [text, text[: text.index(stop)]]
    with pytest.raises(ArgumentError, match="generate_until does not take 'num_beams'"):
        lm.generate_until(asked(("x", {"num_beams": 4})))


def test_other_models_and_a_missing_harness_are_told(engine, monkeypatch, tmp_path):
    with pytest.raises(ArgumentError, match="expected an engine of fused mode"):
        lm_eval_model(7)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(BackendNotAvailableError, match="pip install lm-eval"):
        lm_eval_model(engine)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    with (
        dualinfer.init_inference(tmp_path, backend="torch") as encoder,
        pytest.raises(UnsupportedError, match="is for causal models"),
    ):
        encoder.score([[3]], [[4]])
