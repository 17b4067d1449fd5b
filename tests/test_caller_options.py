"""What HF's forward and generate take beside ids, in fused mode, against HF's own."""

import logging
import pickle
import sys
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from transformers.generation import MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

import dualinfer
from dualinfer.engine import fused
from dualinfer.errors import ArgumentError, UnsupportedError

from .cases import make_model, relatives
from .cases.covering import each
from .cases.decoders import GENERATING
from .models import BACKENDS, VOCAB, random_ids, relative_rms

INJECT: dict[str, Any] = {"dtype": "fp32", "replace_with_kernel_inject": True}
NAME, NEW = "gpt2", 7
QUICK = ("gpt2", "opt-post", "granite", "bert-masked")
# Families that differ in what they make of embeddings, and of the rest all.
FORWARD = [
    *QUICK,
    *(n for n in (*GENERATING, *relatives.CASES, "bert-masked-untied") if n not in QUICK),
]


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="session")
def engine(engine_of, backend):
    """The engine that most tests share."""
    return engine_of(NAME, backend)


@pytest.fixture(scope="session")
def model(hf_model):
    return hf_model(NAME)


def batch(side="left", rows=3, tokens=6):
    """Ids and mask [rows, tokens]; the first row has two tokens of padding."""
    ids, mask = torch.tensor(random_ids(rows, tokens)), torch.ones(rows, tokens, dtype=torch.long)
    mask[0, :2] = 0
    if side == "right":
        mask = mask.flip(1)
    return ids * mask, mask


def slow_forward():
    """Each case of FORWARD, the quick ones on both backends."""
    return [
        pytest.param(*own.values, marks=[] if own.values[0] in QUICK else [pytest.mark.slow])
        for own in each(FORWARD)
    ]


# --- forward --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), slow_forward())
def test_forward_takes_what_hf_takes(name, backend, hf_model, engine_of):
    """Embeddings, labels and logits_to_keep; each compiled once, for ids or embeddings."""
    theirs, ours = hf_model(name), engine_of(name, backend)
    ids, mask = batch("right")
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 3] = -100
    real = mask.bool()
    embeds = theirs.get_input_embeddings()(ids).detach() * 1.3  # no token's own
    # Each layer of Gemma 4 reads an embedding of its own of every id, which HF asks for, too.
    given = {"input_ids": ids} if name in ("gemma4", "gemma3n") else {"inputs_embeds": embeds}
    inputs = {**given, "attention_mask": mask, "labels": labels}
    with torch.no_grad():
        expected = theirs(**{k: v.clone() for k, v in inputs.items()})  # HF's CTRL writes to them
        found = ours(**inputs)
        assert list(found) == ["loss", "logits"]
        assert relative_rms(found.logits[real], expected.logits[real]) < 1e-5
        assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-5)
        if "bert" in name or (backend == "jax" and name not in QUICK):
            return  # which logits are kept is nothing of a family's: on JAX it costs a compile
        places = torch.tensor([0, -3, 1])
        some = {"attention_mask": mask, "labels": labels[:, places], "num_items_in_batch": 5}
        expected = theirs(ids, logits_to_keep=places, **some)
        found = ours(ids, logits_to_keep=places, **some)
        assert relative_rms(found.logits, expected.logits) < 1e-5
        assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-5)


@pytest.mark.parametrize("keep", [0, 1, 4, 100, np.int64(2), np.array([5, 5, 0])])
def test_logits_to_keep_are_those_of_all(keep, engine, model):
    ids, _ = batch()
    hidden = engine(ids, output_hidden_states=True, logits_to_keep=keep)
    expected = model(ids, logits_to_keep=torch.tensor(keep) if np.ndim(keep) else int(keep)).logits
    assert relative_rms(hidden.logits, expected.detach()) < 1e-5
    assert hidden.hidden_states[-1].shape == (3, 6, 60)


def test_only_the_kept_logits_are_computed(model, monkeypatch):
    from dualinfer.backends.torch.ops.plain import PlainOps

    with dualinfer.init_inference(model, backend="torch", **INJECT) as engine:
        ids, _ = batch()
        product, rows = PlainOps.linear, []

        def linear(ops, x, weight, *how):
            if weight.shape[0] == VOCAB:
                rows.append(x.numel() // x.shape[-1])
            return product(ops, x, weight, *how)

        monkeypatch.setattr(PlainOps, "linear", linear)
        engine(ids, logits_to_keep=2)
        engine(ids)
    assert rows == [6, 18]


def test_forward_says_what_does_not_fit(engine, engine_of, backend):
    ids, mask = batch()
    embeds = torch.zeros(3, 6, 60)
    for arguments, message in (
        ({"inputs_embeds": embeds}, "input_ids and inputs_embeds were given"),
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_ids": None, "inputs_embeds": embeds[..., :59]}, r"\[batch, tokens, 60\]"),
        ({"input_ids": None, "inputs_embeds": embeds.bool()}, "dtype bool"),
        ({"labels": ids[:, 1:]}, r"labels has shape \(3, 5\)"),
        ({"labels": ids + VOCAB}, r"labels\[0, 0\] is"),
        ({"labels": ids, "logits_to_keep": 2}, r"expected integers \(3, 2\)"),
        ({"labels": ids, "num_items_in_batch": 0}, "a number above 0"),
        ({"logits_to_keep": -1}, "logits_to_keep=-1"),
        ({"logits_to_keep": torch.tensor([6])}, "outside of the 6 tokens"),
        ({"logits_to_keep": torch.zeros(1, 2)}, r"shape \(1, 2\) and dtype float32"),
        ({"attention_mask": mask[:, None, None].expand(3, 1, 6, 6)}, "of its own for each query"),
        ({"past_key_values": ((),)}, "the cache is the engine's own"),
        ({"output_attentions": True}, "attention is fused"),
    ):
        with pytest.raises(ArgumentError, match=message):
            engine(**{"input_ids": ids, **arguments})
    bert = engine_of("bert-masked", backend)
    with pytest.raises(ArgumentError, match="logits_to_keep=1"):
        bert(ids, logits_to_keep=1)
    losses = [bert(ids, labels=ids, **more).loss for more in ({}, {"num_items_in_batch": 2})]
    assert float(losses[0]) == float(losses[1])  # HF's class passes it over


# --- generate: embeddings -------------------------------------------------------------------------


def test_a_first_token_is_forced_behind_one_embedding(engine, model):
    """It is read by its id, of which a prompt of embeddings has no row."""
    ids, _ = batch()
    given = {"inputs_embeds": model.get_input_embeddings()(ids[:, :1]).detach()}
    given |= {"input_ids": ids[:, :1], "max_new_tokens": 3, "do_sample": False}
    given |= {"forced_bos_token_id": 9, "attention_mask": torch.ones(3, 1, dtype=torch.long)}
    assert torch.equal(engine.generate(**given), model.generate(**given))


# Places that are learned, turned, and scaled tokens.
ON_JAX = (NAME, "gpt2-inverse", "opt", "gemma3")


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, back, marks=[] if name == NAME else [pytest.mark.slow])
        for name in dict.fromkeys((NAME, *GENERATING, "granite"))
        for back in BACKENDS
        if back == "torch" or name in ON_JAX  # of others forward takes embeddings there, above
    ],
)
def test_embeddings_generate_as_in_hf(name, backend, hf_model, engine_of):
    theirs, ours = hf_model(name), engine_of(name, backend)
    ids, mask = batch()
    embeds = theirs.get_input_embeddings()(ids).detach() * 1.1
    how = {"inputs_embeds": embeds, "attention_mask": mask, "max_new_tokens": NEW}
    expected = theirs.generate(**how, do_sample=False)
    found = ours.generate(**how)
    assert torch.equal(found, expected) and found.shape[1] <= NEW
    assert found.shape == (3, NEW) or 2 in found
    right = {"inputs_embeds": embeds.clone(), "attention_mask": mask.clone()}
    right["inputs_embeds"][0] = embeds[0].roll(-2, 0)
    right["attention_mask"][0] = mask[0].roll(-2)
    assert torch.equal(ours.generate(**right, max_new_tokens=NEW), expected)
    both = theirs.generate(ids, **how, repetition_penalty=1.3, do_sample=False)
    assert torch.equal(ours.generate(ids, **how, repetition_penalty=1.3), both)
    # Of a padded row HF's penalty passes over as many new tokens as there is padding.
    found = ours.generate(**how, repetition_penalty=3.0)
    alone = {"inputs_embeds": embeds[:1, 2:], "max_new_tokens": NEW, "repetition_penalty": 3.0}
    alone = theirs.generate(**alone, do_sample=False)[0]
    assert torch.equal(found[0, : len(alone)], alone)


def test_embeddings_that_do_not_fit_generate_are_refused(engine):
    ids, mask = batch()
    embeds = torch.zeros(3, 6, 60)
    with pytest.raises(ArgumentError, match="the ids must be those of the embeddings"):
        engine.generate(ids[:, 1:], inputs_embeds=embeds)
    with pytest.raises(ArgumentError, match="Prompt 1 is empty"):
        engine.generate(inputs_embeds=embeds, attention_mask=mask * torch.tensor([[1], [0], [1]]))


def test_a_forced_token_that_is_suppressed_is_refused(engine):
    how = {"forced_eos_token_id": [2, 5], "suppress_tokens": [5, 7, 2]}
    with pytest.raises(
        ArgumentError, match=r"forced_eos_token_id=\[2, 5\] is among suppress_tokens"
    ):
        engine.generate([[4, 5]], **how)


# --- generate: what the host does -----------------------------------------------------------------

PROCESSED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "n-grams": {"no_repeat_ngram_size": 2},
    "tokens": {
        "bad_words_ids": [[5], [312, 10]],
        "suppress_tokens": [3, 583],
        "begin_suppress_tokens": [9],
    },
    "ends": {
        "forced_eos_token_id": 2,
        "exponential_decay_length_penalty": (3, 1.5),
        "min_new_tokens": 3,
    },
    "a bias": {
        "sequence_bias": {(11,): 8.0, (12, 13): -3.0},
        "repetition_penalty": 1.4,
        "remove_invalid_values": True,
        "renormalize_logits": True,
    },
    "a least length": {"min_length": 11, "eos_token_id": [2, 300], "repetition_penalty": 0.8},
    "prefixes": {"prefix_allowed_tokens_fn": lambda row, ids: [5 + row, len(ids)]},
    "a function": {"logits_processor": [lambda ids, scores: -scores]},
    "a processor": {"logits_processor": [SuppressTokensLogitsProcessor([3, 10])]},
    "a processor in the place of HF's own": {
        "min_length": 9,
        "logits_processor": [MinLengthLogitsProcessor(30, torch.tensor([2]))],
    },
}
OUTPUT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def assert_same_generation(found, expected):
    """Ids are equal, and scores and logits of every step, -inf where HF has it."""
    np.testing.assert_array_equal(np.asarray(found.sequences), expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            one, other = np.asarray(one), np.asarray(other)
            gone = np.isneginf(other)
            np.testing.assert_array_equal(np.isneginf(one), gone)
            if other[~gone].any():  # else one token was forced
                assert relative_rms(one[~gone], other[~gone]) < 1e-5


@pytest.mark.filterwarnings("ignore:Passing")
@pytest.mark.filterwarnings("ignore:.*custom logits processor")
@pytest.mark.parametrize("case", PROCESSED)
def test_scores_and_ids_equal_hfs(case, engine, model):
    ids, mask = batch()
    how = {"attention_mask": mask, "max_new_tokens": NEW, **OUTPUT, **PROCESSED[case]}
    expected = model.generate(ids, **how, do_sample=False)
    found = engine.generate(ids, **how)
    assert_same_generation(found, expected)
    assert found.past_key_values is None and found.attentions is None
    plain = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    changed = PROCESSED[case] and case != "a processor in the place of HF's own"
    assert torch.equal(found.sequences, plain) != bool(changed) or case == "n-grams"
    embeds = model.get_input_embeddings()(ids).detach()
    if case in ("tokens", "ends"):
        assert_same_generation(
            engine.generate(inputs_embeds=embeds, **how),
            model.generate(inputs_embeds=embeds, **how, do_sample=False),
        )


def test_rows_that_end_early_go_on_as_in_hf(engine, model):
    """Their scores are those of the padding behind them, and the result ends with the last."""
    ids, mask = batch()
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    how = {
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "eos_token_id": int(plain[1, 7]),
        **OUTPUT,
    }
    how |= {"pad_token_id": 0}
    expected = model.generate(ids, **how, do_sample=False)
    assert (expected.sequences[:, 6:] == 0).any()
    assert_same_generation(engine.generate(ids, **how), expected)


def test_what_the_device_draws_the_host_draws(engine):
    ids, mask = batch()
    ids, mask = ids[:2], mask[:2]  # four rows, as others have it here: executables serve all tests
    how = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": True, "seed": [1, 2]}
    how |= {"num_return_sequences": 2, "top_p": 0.9, "top_k": 30, "temperature": 1.2}
    how |= {"repetition_penalty": 1.2, "min_p": 0.01}
    drawn = engine.generate(ids, **how, return_dict_in_generate=True)
    found = engine.generate(ids, **how, **OUTPUT)
    assert torch.equal(found.sequences, drawn.sequences)
    assert (
        drawn.scores is None and len(found.scores) == NEW and len({*drawn[0][:, -1].tolist()}) > 2
    )
    kept = np.isfinite(np.asarray(found.scores[0])).sum(1)
    assert (kept <= 30).all() and (kept > 1).any()


@pytest.mark.parametrize("name", ["typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"])
def test_what_shapes_sampling_is_hfs(name, engine, model):
    """The first step's scores, which do not depend on what is drawn."""
    ids, mask = batch()
    value = {"typical_p": 0.6, "top_h": 0.6}.get(name, 0.01)
    how = {"attention_mask": mask, "max_new_tokens": 1, "do_sample": True, "temperature": 2.0}
    how |= {"top_k": 0, name: value, **OUTPUT}
    found, expected = engine.generate(ids, **how, seed=1), model.generate(ids, **how)
    found.sequences = expected.sequences
    assert_same_generation(found, expected)
    assert np.isneginf(np.asarray(found.scores[0])).any()
    greedy = {**how, "do_sample": False, "output_scores": False, "output_logits": False}
    assert engine.generate(ids, **greedy).scores is None  # as in HF, it does nothing then


def test_criteria_end_rows_and_lengths(engine, model, backend):
    ids, mask = batch()

    def until(row_lengths):
        def criterion(ids, scores):
            done = [len(row) - 6 >= n for row, n in zip(ids, row_lengths, strict=True)]
            return torch.tensor(done) if isinstance(ids, torch.Tensor) else np.array(done)

        return criterion

    how = {"attention_mask": mask, "max_new_tokens": NEW, "stopping_criteria": [until((2, 5, 3))]}
    expected = model.generate(ids, **how, do_sample=False)
    assert expected.shape == (3, 11)
    assert torch.equal(engine.generate(ids, **how), expected)
    assert list(zip(*engine.stream(ids, **how), strict=True)) == [
        (*(int(t) for t in row[6 : 6 + n]), *(None,) * (5 - n))
        for row, n in zip(expected, (2, 5, 3), strict=True)
    ]
    longest = {"stopping_criteria": hf.StoppingCriteriaList([MaxLengthCriteria(9)])}
    assert engine.generate(ids, attention_mask=mask, **longest).shape == (3, 9)
    for late in ({"max_time": 0.0}, {"stopping_criteria": [MaxTimeCriteria(0.0)]}):
        assert engine.generate(ids, attention_mask=mask, **late).shape == (3, 7)


def test_functions_get_what_hf_gives_them(engine, backend):
    """Padded ids that grow, and float32 logits: of torch, or of JAX; HF's own classes get torch."""
    ids, mask = batch()
    seen = []

    def note(ids, scores):
        seen.append((type(ids), type(scores), ids.shape, str(scores.dtype), np.asarray(ids)))
        return scores

    class Hf(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert isinstance(input_ids, torch.Tensor) and input_ids.dtype == torch.int64
            scores[:, 5] = 1e4  # in place
            return scores

    how = {"attention_mask": mask, "max_new_tokens": 2, **OUTPUT}
    found = engine.generate(ids, logits_processor=[note, Hf(), note], **how)
    kind = torch.Tensor if backend == "torch" else jax.Array
    assert all(issubclass(a, kind) and issubclass(b, kind) for a, b, *_ in seen)
    assert [shape[1] for *_, shape, _, _ in seen] == [6, 6, 7, 7]
    assert "float32" in seen[0][3]
    np.testing.assert_array_equal(seen[0][4], ids)
    np.testing.assert_array_equal(seen[2][4], found.sequences[:, :7])
    assert (found.sequences[:, 6:] == 5).all()
    assert (np.asarray(found.logits[0])[:, 5] < 1e3).all()  # the raw ones stay as they were


def test_a_function_may_give_numpy_scores(engine):
    ids, mask = batch()
    how = {"attention_mask": mask, "max_new_tokens": 2}
    functions = [lambda ids, scores: -np.asarray(scores, np.float64)]
    found = engine.generate(ids, logits_processor=functions, **how)
    like = engine.generate(ids, logits_processor=[lambda ids, scores: -scores], **how)
    np.testing.assert_array_equal(found, like)


def test_a_stream_goes_on_beside_what_the_host_chooses(engine):
    """Its slots are others': steps of either leave the other's cache and tokens alone."""
    ids, mask = batch()
    how = {"attention_mask": mask, "max_new_tokens": NEW}
    plain = engine.generate(ids, **how)
    stepwise = engine.stream(ids, **how, no_repeat_ngram_size=40)
    rows = [next(stepwise)]
    stream = engine.stream(ids[1:2], max_new_tokens=NEW - 1)
    beside = [(next(stepwise), next(stream)) for _ in range(2)]
    beside += zip(stepwise, stream, strict=True)
    rows += [one for one, _ in beside]
    np.testing.assert_array_equal(np.array(rows).T, plain[:, 6:])
    np.testing.assert_array_equal([other for _, other in beside], plain[1, 6:-1])


def test_lists_strings_and_streamers_go_the_same_way(engine, model):
    ids, mask = batch()
    rows = [row[keep == 1].tolist() for row, keep in zip(ids, mask, strict=True)]
    how = {"max_new_tokens": NEW, "bad_words_ids": [[3]], "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **how, do_sample=False)
    np.testing.assert_array_equal(np.asarray(engine.generate(rows, **how)), expected)

    class Streamer:
        def __init__(self):
            self.values, self.ended = [], False

        def put(self, value):
            self.values.append(np.asarray(value))

        def end(self):
            self.ended = True

    class Letters:
        def decode(self, ids, **how):
            return "".join(f"<{i}>" for i in ids)

    streamer = Streamer()
    result = engine.generate(ids, attention_mask=mask, streamer=streamer, **how)
    assert streamer.ended and len(streamer.values) == NEW + 1
    np.testing.assert_array_equal(np.column_stack(streamer.values), result)
    stop = {"stop_strings": f"<{int(expected[1, 8])}>", "tokenizer": Letters()}
    ended = engine.generate(ids, attention_mask=mask, **stop, **how)
    assert torch.equal(ended[::2], expected[::2])
    assert ended[1].tolist() == [*expected[1, :9].tolist(), *[0] * (NEW - 3)]


def test_a_plain_call_is_not_the_hosts(engine, monkeypatch, caplog):
    ids, mask = batch()
    how = {"attention_mask": mask, "max_new_tokens": 2}
    with caplog.at_level(logging.INFO, "dualinfer"):
        engine.generate(ids, **how, no_repeat_ngram_size=2)
    assert "one step at a time, for what the host does: no_repeat_ngram_size" in caplog.text
    assert "one step at a time" in engine.report().notes[-1]
    monkeypatch.setattr(fused, "Stepwise", None)
    for more in (
        {"repetition_penalty": 1.2, "min_new_tokens": 1, "return_dict_in_generate": True},
        {"no_repeat_ngram_size": 0, "suppress_tokens": [], "forced_bos_token_id": 5},
        {"typical_p": 0.5, "renormalize_logits": True, "logits_processor": []},
    ):
        engine.generate(ids, **how, **more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits_processor": [lambda ids, scores: scores[:, :-1]]}, "expected scores of shape"),
        ({"logits_processor": [lambda ids, scores: None]}, "returned a NoneType"),
        ({"logits_processor": len}, "a list of functions"),
        ({"stopping_criteria": [3]}, "a list of functions"),
        ({"stopping_criteria": [lambda ids, scores: 1.5]}, "expected a bool, or bools of shape"),
        ({"bad_words_ids": [5]}, r"do not take bad_words_ids=\[5\]"),
        ({"suppress_tokens": "x"}, "suppress_tokens='x'"),
        ({"sequence_bias": {5: 1.0}}, "sequence_bias"),
        ({"sequence_bias": {(3, VOCAB): 1.0}}, f"sequence_bias has the id {VOCAB}, outside"),
        ({"bad_words_ids": [[VOCAB]]}, f"bad_words_ids has the id {VOCAB}, outside"),
        ({"forced_eos_token_id": VOCAB}, f"forced_eos_token_id has the id {VOCAB}, outside"),
        ({"prefix_allowed_tokens_fn": 5}, "expected a function of a prompt's number"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size=1.5"),
        ({"typical_p": 1.5, "do_sample": True}, "typical_p=1.5"),
        ({"max_time": -1}, "max_time=-1"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attention is fused"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden_states=True"),
        ({"past_key_values": ((1,),)}, "the cache is the engine's own"),
        ({"prompt_lookup_num_tokens": -1}, "prompt_lookup_num_tokens=-1"),
        (
            {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 0},
            "max_matching_ngram_size=0",
        ),
        ({"encoder_no_repeat_ngram_size": 3}, "use no_repeat_ngram_size"),
        ({"guidance_scale": 2.0}, "twice a step"),
    ],
)
def test_what_is_wrong_or_not_served_is_told(arguments, message, engine):
    ids, _ = batch()
    with pytest.raises(ArgumentError, match=message):
        engine.generate(ids, max_new_tokens=2, **arguments)
    assert engine.generate(ids, max_new_tokens=1).shape == (3, 7)  # nothing is held


def test_outputs_are_given_where_they_are_asked_for(engine):
    ids, _ = batch()
    with pytest.warns(UserWarning, match="output_scores is given in HF's output alone"):
        assert torch.is_tensor(engine.generate(ids, max_new_tokens=1, output_scores=True))
    with pytest.raises(ArgumentError, match=r"stream returns no HF output"):
        engine.stream(ids, return_dict_in_generate=True)
    found = engine.generate(ids.tolist(), max_new_tokens=2, **OUTPUT)
    assert type(found.scores[0]) is type(found.sequences)
    assert repr(found).startswith("GenerateOutputs(sequences=")
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is type(found) and len(again.logits) == 2


def test_outputs_are_pytrees(engine_of):

    found = engine_of(NAME, "jax").generate(random_ids(3, 6).tolist(), max_new_tokens=2, **OUTPUT)
    shapes = jax.tree.map(lambda x: x.shape, found)
    assert shapes.sequences == (3, 8) and shapes.scores == ((3, VOCAB),) * 2


def test_hfs_processors_without_torch_say_so(engine_of, monkeypatch):
    engine, ids = engine_of(NAME, "jax"), random_ids(3, 6)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"need torch.*dualinfer\[torch\]"):
        engine.generate(ids, no_repeat_ngram_size=2, max_new_tokens=2)
    own = [lambda ids, scores: scores.at[:, 5].set(1e4)]
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 3, "min_p": 0.01, "seed": 1}
    for how in ({}, drawn):
        found = engine.generate(ids, logits_processor=own, max_new_tokens=2, **how)
        assert (np.asarray(found)[:, 6:] == 5).all()


@pytest.mark.filterwarnings("ignore:Passing")
def test_module_mode_takes_the_same(model, engine_of):
    ids, mask = batch()
    how = {"attention_mask": mask, "max_new_tokens": NEW, **OUTPUT, "no_repeat_ngram_size": 2}
    embeds = model.get_input_embeddings()(ids).detach()
    with dualinfer.init_inference(make_model(NAME), dtype="fp32") as module:
        assert module.report().mode == "module"
        fused_mode = engine_of(NAME, "torch")
        expected = module.generate(ids, **how, do_sample=False)
        assert_same_generation(fused_mode.generate(ids, **how), expected)
        for arguments in (
            {"input_ids": ids, "labels": ids.tolist(), "logits_to_keep": 0},
            {"inputs_embeds": embeds, "attention_mask": mask.numpy()},
        ):
            ours, theirs = fused_mode(**arguments), module(**arguments)
            seen = mask.bool() if "attention_mask" in arguments else ...
            assert relative_rms(ours.logits[seen], theirs.logits[seen]) < 1e-5
            assert (ours.loss is None) == (theirs.loss is None)


# --- several devices, kernels, layers on the host -------------------------------------------------


def rank_choices(rank_of_noise):
    """What a rank generates where the processor of one rank differs from the others'."""
    import os

    ids, mask = batch()
    rank = int(os.environ["RANK"])

    def noisy(ids, scores):
        return -scores if rank == rank_of_noise else scores

    parallel = {"tp_size": 2, "timeout": 150}
    with dualinfer.init_inference(make_model(NAME), tensor_parallel=parallel, **INJECT) as engine:
        how = {"attention_mask": mask, "max_new_tokens": NEW, "no_repeat_ngram_size": 2}
        found = engine.generate(ids, **how, **OUTPUT)
        agreed = engine.generate(ids, **how, logits_processor=[noisy])
        embeds = make_model(NAME).get_input_embeddings()(ids).detach()
        of_embeds = engine.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW)
        loss = engine(ids, labels=ids, logits_to_keep=0).loss
        error = ""
        try:
            engine.generate(ids, **how, logits_processor=[lambda ids, scores: scores * (1 / rank)])
        except Exception as wrong:
            error = f"{type(wrong).__name__}: {wrong}"
    scores = [one.numpy() for one in found.scores]
    return found.sequences, scores, agreed, of_embeds, float(loss), error


@pytest.mark.xdist_group("ranks")  # whose processes serve several files
def test_two_ranks_choose_what_one_chooses(crew, engine_of):
    engine = engine_of(NAME, "torch")
    ids, mask = batch()
    how = {"attention_mask": mask, "max_new_tokens": NEW, "no_repeat_ngram_size": 2}
    expected = engine.generate(ids, **how, **OUTPUT)
    embeds = make_model(NAME).get_input_embeddings()(ids).detach()
    of_embeds = engine.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW)
    loss = float(engine(ids, labels=ids).loss)
    first, second = crew.run(rank_choices, 1)
    for found in (first, second):
        assert torch.equal(found[0], expected.sequences)
        for one, other in zip(found[1], expected.scores, strict=True):
            gone = np.isneginf(other.numpy())
            assert relative_rms(one[~gone], other.numpy()[~gone]) < 1e-5
        assert torch.equal(found[2], expected.sequences)  # rank 0's choice counts
        assert torch.equal(found[3], of_embeds)
        assert found[4] == pytest.approx(loss, rel=1e-5)
    assert first[5].startswith("ZeroDivisionError")
    assert "rank 0: ZeroDivisionError" in second[5]


@pytest.mark.parametrize("way", ["two devices", pytest.param("streamed", marks=pytest.mark.slow)])
def test_jax_over_devices_and_by_layers(way):
    fields, layers = {"tensor_parallel": {"tp_size": 2}}, 1
    if way == "streamed":
        fields, layers = {"keep_module_on_host": True, "resident_layers": 0}, 3
    model = make_model(NAME, n_layer=layers)
    ids, mask = batch("right")
    embeds = model.get_input_embeddings()(ids).detach()
    with dualinfer.init_inference(model, backend="jax", **fields, **INJECT) as engine:
        given = {"inputs_embeds": embeds, "attention_mask": mask, "labels": ids[:, 1:4]}
        found, expected = (
            one(**given, logits_to_keep=torch.tensor([1, 2, 3])) for one in (engine, model)
        )
        assert relative_rms(found.logits, expected.logits.detach()) < 1e-5
        assert float(found.loss) == pytest.approx(float(expected.loss.detach()), rel=1e-5)
        ids, mask = batch()
        embeds = model.get_input_embeddings()(ids).detach()
        how = {"inputs_embeds": embeds, "attention_mask": mask, "max_new_tokens": 4, **OUTPUT}
        how["no_repeat_ngram_size"] = 2
        expected = model.generate(ids, **how, do_sample=False)
        assert_same_generation(engine.generate(ids, **how), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Passing")
@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_serve_the_same(backend, monkeypatch):
    pytest.importorskip("triton")
    import importlib

    module = importlib.import_module(f"dualinfer.backends.{backend}")
    tiny = make_model(NAME, vocab_size=97, n_embd=24, n_head=2, n_layer=1)
    options = {**INJECT, "backend": backend}
    plain = dualinfer.init_inference(tiny, **options, use_triton=False)
    with monkeypatch.context() as patch:
        if backend == "jax":
            from .kernels.jax_ops import interpreted_ops

            patch.setattr(module, "_make_ops", lambda *args: interpreted_ops())
        else:
            from dualinfer.backends.torch.ops.kernels import KernelOps

            patch.setattr(module, "_make_ops", lambda config, spec, device, _: KernelOps(device))
        fast = dualinfer.init_inference(tiny, **options)
    assert "Triton" in fast.report().ops["matmul"]
    ids, mask = batch()
    ids %= 97
    embeds = tiny.get_input_embeddings()(ids).detach()
    given = {"inputs_embeds": embeds, "attention_mask": mask}
    how = {"max_new_tokens": 3, "no_repeat_ngram_size": 2, **OUTPUT}
    assert_same_generation(fast.generate(**given, **how), plain.generate(**given, **how))
    found, expected = (e(**given, logits_to_keep=2).logits for e in (fast, plain))
    assert relative_rms(found, expected) < 1e-5
