"""Log-probabilities, logit_bias, presence and frequency penalties: OpenAI's, by a loop over HF."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

from dualinfer.errors import ArgumentError  # noqa: E402

from .models import random_ids  # noqa: E402

NEW = 12
TELLS: dict[str, Any] = {"return_dict_in_generate": True, "logprobs": 3}
COSTS = {"presence_penalty": 9.0, "frequency_penalty": 7.0}


@pytest.fixture(params=["torch", "jax"])
def engine(request, engine_of):
    return engine_of("llama-gqa", request.param)


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    return [random_ids(1, n, seed=n, vocab=99)[0].tolist() for n in (7, 3, 19)]


def reference(
    model: Any,
    prompt: list[int],
    bias: dict[int, float] | None = None,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> tuple[list[int], np.ndarray]:
    """NEW greedy tokens and the model's own log-probabilities [NEW, V], by the API's formula."""
    ids, logs = list(prompt), []
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        logs.append(logits.log_softmax(-1).numpy())
        for token, more in (bias or {}).items():
            logits[token] += more
        new = ids[len(prompt) :]
        for token in set(new):
            logits[token] -= presence + frequency * new.count(token)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], np.array(logs)


def check(result: Any, rows: list[list[int]], wanted: list[tuple[list[int], np.ndarray]]) -> None:
    """The tokens are the reference's, and what is told of them what HF's logits say."""
    told, top, ids = (np.asarray(result[name]) for name in ("logprobs", "top_logprobs", "top_ids"))
    assert told.shape == (len(rows), NEW) and top.shape == ids.shape == (len(rows), NEW, 3)
    for i, (tokens, logs) in enumerate(wanted):
        assert np.asarray(result.sequences)[i, -NEW:].tolist() == tokens
        np.testing.assert_allclose(told[i], logs[range(NEW), tokens], atol=1e-4)
        best = np.sort(logs)[:, ::-1][:, :3]
        np.testing.assert_allclose(top[i], best, atol=1e-4)
        np.testing.assert_allclose(np.take_along_axis(logs, ids[i], 1), best, atol=1e-4)


def likeliest(model: Any, prompt: list[int]) -> int:
    """A token that the model would choose."""
    return reference(model, prompt)[0][2]


@pytest.mark.parametrize("stepwise", [False, True], ids=["on the device", "by the host"])
def test_weights_and_what_is_told_are_those_of_the_api(engine, hf_model, rows, stepwise):
    model = hf_model("llama-gqa")
    bias = {likeliest(model, row): -100.0 for row in rows} | dict.fromkeys((11, 12, 13), 60.0)
    # A processor has the host choose each token.
    how: dict[str, Any] = {"logits_processor": [lambda ids, x: x]} if stepwise else {}
    how |= {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    plain = engine.generate(rows, **how, **TELLS)
    check(plain, rows, [reference(model, row) for row in rows])
    changed = engine.generate(rows, **how, **TELLS, **COSTS, logit_bias=bias)
    wanted = [reference(model, row, bias, 9.0, 7.0) for row in rows]
    some = (reference(model, rows[0], bias, *costs)[0] for costs in ((0, 0), (9, 0), (0, 7)))
    assert wanted[0][0] not in [*some, reference(model, rows[0])[0]]
    check(changed, rows, wanted)


def test_a_request_that_weighs_leaves_those_beside_it_alone(engine, hf_model, rows):
    model, how = hf_model("llama-gqa"), {"max_new_tokens": NEW, "eos_token_id": None}
    stream = engine.stream([rows[1]], **how)
    tokens = [next(stream) for _ in range(3)]
    result = engine.generate([rows[0]], **how, **TELLS, **COSTS)
    check(result, rows[:1], [reference(model, rows[0], None, 9.0, 7.0)])
    tokens += list(stream)
    assert tokens == reference(model, rows[1])[0]


@pytest.mark.parametrize(
    "engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)], indirect=True
)
def test_rows_that_end_early_tell_no_more(engine, hf_model, rows):
    tokens, logs = reference(hf_model("llama-gqa"), rows[0])
    end = tokens[4]
    count = tokens.index(end) + 1
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": end, "pad_token_id": 0}
    result = engine.generate([rows[0], rows[1]], **how, return_dict_in_generate=True, logprobs=0)
    told = np.asarray(result.logprobs)[0]
    np.testing.assert_allclose(told[:count], logs[range(count), tokens[:count]], atol=1e-4)
    assert not told[count:].any() and np.asarray(result.top_ids).shape[-1] == 0


def test_a_sequence_that_begins_anew_goes_on_counting(engine, hf_model, rows):
    """As one does that turns to other angles, or is computed again after it had to leave."""
    from dualinfer.backends.base import Request, Sampling

    bias = dict.fromkeys((11, 12, 13), 60.0)  # which take turns, each as often as the others
    tokens, logs = reference(hf_model("llama-gqa"), rows[0], bias, 9.0, 7.0)
    costs = Sampling(presence_penalty=9.0, frequency_penalty=7.0, bias=tuple(bias.items()))
    requests = [
        Request(
            np.array([*rows[0], *tokens[:n]], np.int32), 1, sampling=costs, generated=n, tells=True
        )
        for n in (4, 5, 6, 7)
    ]
    pending = engine.runner.prefill(requests, range(4))
    assert pending.fetch()[0].tolist() == tokens[4:8]
    wanted = logs[range(4, 8), tokens[4:8]]
    np.testing.assert_allclose(pending.told()[0, :, 0], wanted, atol=1e-4)
    engine.runner.release(range(4))


@pytest.mark.parametrize(
    "engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)], indirect=True
)
def test_a_pool_weighs_and_tells_as_the_library_does(engine, hf_model, rows):
    from dualinfer.backends.base import Pool

    bias = dict.fromkeys((11, 12, 13), 60.0)
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    engine.runner.open(Pool(4, 128))
    try:
        plain = engine.generate(rows, **how, **TELLS)
        changed = engine.generate(rows, **how, **TELLS, **COSTS, logit_bias=bias)
    finally:
        engine.runner.open(None)
    check(plain, rows, [reference(hf_model("llama-gqa"), row) for row in rows])
    check(changed, rows, [reference(hf_model("llama-gqa"), row, bias, 9.0, 7.0) for row in rows])


WRONG = {
    "logprobs": [(21, "at most 20"), (-1, "at least 0"), ("x", "expected an int")],
    "presence_penalty": [("x", "expected a number"), (float("inf"), "expected a number")],
    "frequency_penalty": [(float("nan"), "expected a number")],
    "logit_bias": [
        ([1], "expected a dict"),
        ({10**6: 1.0}, "within the vocabulary"),
        ({1: "much"}, "expected a number"),
        ({"1": 1.0, 1: 2.0}, "names an id twice"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_name(engine_of, name):
    engine = engine_of("llama-gqa", "torch")
    for value, why in WRONG[name]:
        with pytest.raises(ArgumentError, match=why) as caught:
            engine.generate([[1, 2]], return_dict_in_generate=True, **{name: value})
        assert name in str(caught.value)


def test_what_gives_no_output_says_where_log_probabilities_are(engine_of):
    engine = engine_of("llama-gqa", "torch")
    with pytest.raises(ArgumentError, match="return_dict_in_generate=True"):
        engine.generate([[1, 2]], logprobs=0)
    with pytest.raises(ArgumentError, match=r"logprobs is generate\(\)'s"):
        engine.stream([[1, 2]], logprobs=0)
