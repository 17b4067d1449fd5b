"""Encoder-decoders in fused mode: tiny random models of transformers' are the oracle."""

import copy
import functools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.generation.utils import GenerationMixin

import dualinfer
from dualinfer.errors import ArgumentError, ConfigError, LengthError, ModelError, UnsupportedError
from dualinfer.model.families import describe_model
from dualinfer.model.spec import RelativeBias

from .cases import make_model
from .cases.covering import each
from .cases.pairs import BART, CASES, IMAGES, PAIR, SCORED, T5, VOCAB
from .models import BACKENDS, random_ids, relative_rms, slow_but
from .speech import make_sound, make_tokenizer


@pytest.fixture(autouse=True)
def _draws_little(request):
    """Families of which no test draws, since engines serve several."""
    case = getattr(request.node, "callspec", None)
    if case and case.params.get("name", QUICK[0]) not in QUICK:
        request.getfixturevalue("greedy")


QUICK = ("t5", "bart", "whisper")
OPTIONS: dict[str, Any] = {"dtype": "fp32", "replace_with_kernel_inject": True}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}
NAMES = each(n for n in CASES if not n.endswith("base"))


@functools.cache
def model_of(name: str) -> Any:
    """The case's model, one a process; not to be changed."""
    return make_model(name)


@functools.cache
def engine_of(name: str, backend: str) -> Any:
    return dualinfer.init_inference(model_of(name), backend=backend, **OPTIONS)


def source_of(name: str, padded: bool = True) -> dict[str, torch.Tensor]:
    """What an encoder reads, two rows; the second one is shorter."""
    if name == "whisper":
        torch.manual_seed(3)
        return {"input_features": torch.randn(2, 7, 46)}
    if name == "s2t":  # rows of 11 and 7 tokens, of which convolutions see more
        torch.manual_seed(3)
        mask = torch.ones(2, 43, dtype=torch.int64)
        mask[1, 26:] = 0
        return {"input_features": torch.randn(2, 43, 5), "attention_mask": mask}
    if name == "moonshine":  # rows of 11 and 7 tokens; all is normed by the same numbers
        torch.manual_seed(3)
        mask = torch.ones(2, 384 * 11 + 700, dtype=torch.int64)
        mask[1, 384 * 6 + 1 :] = 0
        return {"input_values": torch.randn(mask.shape) * mask, "attention_mask": mask}
    if name in IMAGES:
        torch.manual_seed(3)
        return {"pixel_values": torch.randn(2, 3, 18, 18)}
    ids = torch.tensor(random_ids(2, 19, vocab=VOCAB)).long()
    mask = torch.ones_like(ids)
    if padded:
        ids[1, 11:], mask[1, 11:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


SPLIT = (
    "switch-t5",
    "blenderbot-small",
    "fsmt",
    "trocr",
    "vit-gpt2",
    "nllb-moe",
    "s2t",
    "moonshine",
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", slow_but(list(SCORED)[:2], list(SCORED)))
def test_heads_for_labels_are_those_of_transformers(name, backend, tmp_path):
    """Of a folder; the decoder reads the encoder's ids, and a score stands at their last end."""
    torch.manual_seed(5)
    cls = getattr(hf, name)
    model = cls(cls.config_class(**SCORED[name])).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty_like(p).normal_(0, 0.2))
    model.save_pretrained(tmp_path)
    given = source_of("bart")
    ids = given["input_ids"]
    ids[ids == 2] = 3
    ids[:, 4] = ids[0, 18] = ids[1, 10] = 2
    labels = {"labels": torch.tensor([1, 0])} if "Sequence" in name else {}
    if "Question" in name:  # one end lies behind the text, where it counts for nothing
        labels = {"start_positions": torch.tensor([3, 0]), "end_positions": torch.tensor([4, 40])}
    with torch.no_grad():
        wanted = model(**given, **labels, output_hidden_states=True)
    with dualinfer.init_inference(tmp_path, backend=backend, **OPTIONS) as engine:
        found = engine(**given, **labels, output_hidden_states=True)
        assert list(found) == [key for key in wanted if key in found]
        for key in found:
            pairs = zip(found[key], wanted[key], strict=True) if key.endswith("states") else None
            # Whose attention gives zeros of what is padding.
            is_led = "LED" in name and key.startswith("encoder")
            shown = given["attention_mask"] > 0 if is_led else ...
            for x, y in pairs or [(found[key], wanted[key])]:
                assert relative_rms(x.float()[shown].numpy(), y[shown].numpy()) < 1e-5, key
        if "labels" in labels:
            ids[1, 4] = 3
            with pytest.raises(ArgumentError, match=r"have \[2, 1\].*as many in each row"):
                engine(**given)
            ids[1, 4] = 2
            with pytest.raises(ArgumentError, match="Leave decoder_input_ids out"):
                engine(**given, decoder_input_ids=ids[:, :5])


def text_of(model: Any, **arguments: Any) -> list[list[int]]:
    """HF's text."""
    return model.generate(**arguments).tolist()


@pytest.mark.parametrize(("name", "backend"), each(CASES))
def test_outputs_are_those_of_transformers(name, backend):
    model, engine = model_of(name), engine_of(name, backend)
    labels = torch.tensor(random_ids(2, 6, seed=1, vocab=VOCAB)).long()
    given = source_of(name) | {"decoder_input_ids": labels, "use_cache": False}
    with torch.no_grad():
        wanted = model(**given, output_hidden_states=True)
    found = engine(**given, output_hidden_states=True)
    assert list(found) == [key for key in wanted if key in found], (
        "HF's names in HF's order, the cache aside"
    )
    shape = found.encoder_last_hidden_state.shape[:2]
    real = given.get("attention_mask", torch.ones(shape)) > 0  # of others nobody reads anything
    real = real[:, :: {"s2t": 4, "moonshine": 384}.get(name, 1)][:, : shape[1]]
    for key in ("logits", "last_hidden_state"):
        if key in wanted:
            assert relative_rms(found[key], wanted[key]) < 1e-5, key
    ours, theirs = found.encoder_last_hidden_state[real], wanted.encoder_last_hidden_state[real]
    assert relative_rms(ours, theirs) < 1e-5
    for key, shown in (("encoder_hidden_states", real), ("decoder_hidden_states", ...)):
        pairs = zip(found[key], wanted[key], strict=True)
        assert all(relative_rms(a[shown], b[shown]) < 1e-5 for a, b in pairs), key
    if not model.can_generate():
        return
    begins, labels = labels, labels.clone()
    labels[0, 4:] = -100
    given = source_of(name) | {"labels": labels}
    if name == "fsmt":  # which in HF makes the decoder's ids of the encoder's
        with pytest.raises(ArgumentError, match="ids that the decoder reads\\."):
            engine(**given)
        given["decoder_input_ids"] = begins
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of EncoderDecoderModel
        wanted = model(**given)
    found = engine(**given)
    shown = labels != -100
    assert relative_rms(found.logits[shown], wanted.logits[shown]) < 1e-5
    assert math.isclose(float(found.loss), float(wanted.loss), rel_tol=1e-5)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *slow_but(["t5", "whisper"], QUICK, "torch"),
        *slow_but([], QUICK, "jax"),
        pytest.param("mbart", "torch", marks=pytest.mark.slow),
        pytest.param("trocr", "torch", marks=pytest.mark.slow),
        pytest.param("vit-gpt2", "jax", marks=pytest.mark.slow),
        pytest.param("s2t", "torch", marks=pytest.mark.slow),
    ],
)
def test_an_encoder_runs_once_for_several_calls(name, backend):
    """What HF's encoder gave, in each form, and what the engine's own gave."""
    model, engine, source = model_of(name), engine_of(name, backend), source_of(name)
    with torch.no_grad():
        given = model.get_encoder()(**source, output_hidden_states=True)
    mask = {n: x for n, x in source.items() if n == "attention_mask"}
    begins = torch.tensor(random_ids(2, 3, seed=4, vocab=VOCAB)).long()
    how = {**mask, "decoder_input_ids": begins, "output_hidden_states": True}
    with torch.no_grad():
        wanted = model(encoder_outputs=given, **how)
        text = text_of(model, encoder_outputs=given, **mask, **GREEDY)
    found = engine(encoder_outputs=given, **how)
    assert list(found) == [key for key in wanted if key in found]
    for key in found:
        pairs = zip(found[key], wanted[key], strict=True) if key.endswith("states") else None
        for x, y in pairs or [(found[key], wanted[key])]:
            assert relative_rms(x, y) < 1e-5, key
    assert engine.generate(encoder_outputs=given, **mask, **GREEDY).tolist() == text
    if backend == "jax":  # where each further size is compiled
        return
    assert engine.generate(**source, **GREEDY).tolist() == text
    own = engine(**source, decoder_input_ids=begins[:, :1])
    last = given.last_hidden_state
    for form in (given, own, (last,), last, last.numpy()):
        result = engine.generate(encoder_outputs=form, **mask, **GREEDY)
        assert result.tolist() == text, type(form)
        assert isinstance(result, np.ndarray if isinstance(form, np.ndarray) else torch.Tensor)
    drawn = {"do_sample": True, "max_new_tokens": 5, "seed": [3, 4], "num_return_sequences": 2}
    drawn["temperature"] = 0.9  # without which Whisper does not draw
    several = engine.generate(encoder_outputs=last, **mask, **drawn).tolist()
    assert several == engine.generate(**source, **drawn).tolist()
    alone = {n: x[:1] for n, x in mask.items()}
    assert engine.generate(encoder_outputs=last[:1], **alone, **GREEDY).tolist() == text[:1]


def test_encoder_outputs_that_do_not_fit_are_refused():
    engine, audio = engine_of("t5", "torch"), engine_of("whisper", "torch")
    ids, states = random_ids(2, 5, vocab=VOCAB), np.zeros((2, 5, 36), np.float32)
    masks = {"attention_mask": np.eye(2, 5) * [[1], [0]]}
    for given, said in (
        ({"encoder_outputs": states[..., 1:]}, r"expected \[batch, tokens, 36\]"),
        ({"encoder_outputs": states[0]}, r"shape \(5, 36\)"),
        ({"encoder_outputs": states.astype(int)}, "expected floats"),
        ({"encoder_outputs": object()}, "is an object; expected the encoder's"),
        ({"encoder_outputs": states, "input_ids": ids}, "Leave input_ids out"),
        ({"encoder_outputs": states, "attention_mask": ids[:, :4] > 0}, r"\(2, 5\)"),
        ({"encoder_outputs": states, **masks}, "hides every token of row 1"),
        ({"encoder_outputs": states[:1], "decoder_input_ids": ids}, "they are pairs"),
    ):
        with pytest.raises(ArgumentError, match=said):
            engine(**{"decoder_input_ids": ids} | given)
        with pytest.raises(ArgumentError, match=said):
            engine.generate(**given)
    with pytest.raises(ArgumentError, match=r"expected \[batch, 23, 30\]"):
        audio.generate(encoder_outputs=np.zeros((2, 22, 30), np.float32))


@pytest.mark.parametrize(("name", "backend"), NAMES)
def test_text_is_that_of_transformers(name, backend):
    model, engine, source = model_of(name), engine_of(name, backend), source_of(name)
    whole = text_of(model, **source, **GREEDY)
    found = engine.generate(**source, **GREEDY)
    assert found.tolist() == whole and isinstance(found, torch.Tensor)
    assert len(set(map(tuple, whole))) == 2, "rows must differ"
    assert not any("one step at a time" in note for note in engine.report().notes)
    if backend == "jax" and name not in QUICK:
        return  # options are nothing of a family's, and each costs executables
    begins = torch.tensor(random_ids(2, 3, seed=4, vocab=VOCAB)).long()
    for more in (
        {"decoder_input_ids": begins},
        {"forced_bos_token_id": 11, "forced_eos_token_id": 7, "repetition_penalty": 1.3},
        {"max_length": 6, "max_new_tokens": None, "eos_token_id": whole[0][3], "min_length": 3},
    ):
        how = {"use_cache": False} if name == "fsmt" else {}  # else HF's sees later tokens
        wanted = text_of(model, **source, **GREEDY | more | how)
        assert engine.generate(**source, **GREEDY | more).tolist() == wanted, more
    assert not any("one step at a time" in note for note in engine.report().notes)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("t5", "jax"), *slow_but(["t5"], ["t5", "bart", "longt5", "t5gemma"], "torch")],
)
def test_a_row_alone_a_list_and_a_stream_give_the_same_text(name, backend):
    engine, source = engine_of(name, backend), source_of(name)
    both = engine.generate(**source, **GREEDY).tolist()
    rows = [source["input_ids"][0].tolist(), source["input_ids"][1, :11].tolist()]
    alone = engine.generate(np.array([rows[1]]), **GREEDY)
    assert isinstance(alone, np.ndarray) and alone.tolist() == both[1:]
    assert np.asarray(engine.generate(rows, **GREEDY)).tolist() == both
    left = torch.flip(source["input_ids"], [1]), torch.flip(source["attention_mask"], [1])
    left[0][1, 8:] = source["input_ids"][1, :11]  # padding on the left is as good
    left[0][0] = source["input_ids"][0]
    assert engine.generate(left[0], attention_mask=left[1], **GREEDY).tolist() == both
    streamed = list(engine.stream(rows, **GREEDY))
    assert [list(row) for row in zip(*streamed, strict=True)] == [row[1:] for row in both]
    drawn = {"do_sample": True, "max_new_tokens": 9, "seed": [3, 4], "num_return_sequences": 2}
    texts = engine.generate(**source, **drawn).tolist()
    assert texts == engine_of(name, "torch").generate(**source, **drawn).tolist()
    assert texts[0] != texts[1]


# What an encoder reads, and its mask, where ids and mask say different things of padding (1).
AT_ODDS = {
    "padding without a mask": ([[5, 13, 22, 1, 1]], None),
    "a token hidden inside": ([[5, 9, 13, 22, 3]], [[1, 0, 1, 1, 1]]),
    "padding that is shown": ([[5, 1, 13, 22, 3]], [[1, 1, 1, 1, 1]]),
    "padding before, hidden": ([[1, 1, 13, 22, 3]], [[0, 0, 1, 1, 1]]),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [("m2m_100", "jax"), *((n, "torch") for n in ("m2m_100", "fsmt", "s2t", "trocr-plain"))],
)
def test_positions_count_what_hf_counts_where_ids_and_mask_disagree(name, backend):
    """Ids that are no padding, of whole sequences and in text; the mask has no part in it."""
    model, engine = model_of(name), engine_of(name, backend)
    is_fsmt = name == "fsmt"  # whose decoder refuses padding without a mask
    begins = [[2, 8, 9]] if is_fsmt else [[2, 1, 9, 1, 1]]
    for what, (ids, mask) in AT_ODDS.items():
        given = {"input_ids": torch.tensor(ids)}
        given |= {} if mask is None else {"attention_mask": torch.tensor(mask)}
        if not hasattr(model.config, "encoder_ffn_dim") or name == "s2t":
            given = {k: v[:1] for k, v in source_of(name).items()}
        read = {**given, "decoder_input_ids": torch.tensor(begins)}
        with torch.no_grad():
            wanted = model(**read, use_cache=False).logits.numpy()
            text = GenerationMixin.generate(model, **given, **GREEDY).tolist()
        assert relative_rms(np.asarray(engine(**read).logits), wanted) < 1e-5, what
        assert np.asarray(engine.generate(**given, **GREEDY)).tolist() == text, what


@pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))
@pytest.mark.parametrize("name", ["moonshine", "s2t"])
def test_pipelines_of_speech_give_what_they_give_around_transformers(name, backend):
    """Of sounds of different lengths, and in chunks; Whisper's are in test_speech.py."""
    extractor = hf.Speech2TextFeatureExtractor(feature_size=5, num_mel_bins=5)
    if name == "moonshine":
        extractor = hf.Wav2Vec2FeatureExtractor()
    how = {"tokenizer": make_tokenizer(), "feature_extractor": extractor}
    pipe = hf.pipeline("automatic-speech-recognition", model=copy.deepcopy(model_of(name)), **how)
    waves = [make_sound(length, i) for i, length in enumerate((1.3, 1.1))]
    asked = {"num_beams": 1, **GREEDY, "forced_bos_token_id": 33}

    def run() -> Any:
        whole = pipe([wave.copy() for wave in waves], generate_kwargs=asked, batch_size=2)
        return whole, pipe(waves[0].copy(), chunk_length_s=0.8, batch_size=2, generate_kwargs=asked)

    wanted = run()
    pipe.model = engine_of(name, backend)
    assert run() == wanted and wanted[1]["text"]


@pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))
def test_logits_of_the_last_tokens_alone_where_hf_has_them(backend):
    given = {**source_of("t5gemma"), "decoder_input_ids": torch.tensor([[3, 5, 6, 7]] * 2)}
    with torch.no_grad():
        wanted = model_of("t5gemma")(**given, logits_to_keep=2).logits
    found = engine_of("t5gemma", backend)(**given, logits_to_keep=2).logits
    assert relative_rms(found, wanted) < 1e-5
    with pytest.raises(dualinfer.ArgumentError, match="logits_to_keep"):
        engine_of("t5", backend)(**given, logits_to_keep=2)


@pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))
def test_a_longer_source_beside_an_open_stream_changes_nothing_of_it(backend):
    engine, ids = engine_of("t5", backend), random_ids(2, 90, seed=2, vocab=VOCAB)
    short, long = ids[:1, :9], ids[1:]
    alone = [engine.generate(own, **GREEDY).tolist()[0] for own in (short, long)]
    # What comes after the first tokens depends on the source as well.
    emptied = {"encoder_outputs": np.zeros((1, 9, T5["d_model"]), np.float32)}
    begun = np.array([alone[0][:3]])
    assert (
        engine.generate(**emptied, decoder_input_ids=begun, **GREEDY).tolist()[0][:9]
        != alone[0][:9]
    )
    stream = engine.stream(short, **GREEDY)
    first = [next(stream), next(stream)]
    assert engine.generate(long, **GREEDY).tolist() == alone[1:]  # the cross cache grows
    hidden = GREEDY | {"suppress_tokens": alone[1][1:3], "begin_suppress_tokens": [5, 6, 7]}
    wanted = text_of(model_of("t5"), input_ids=torch.tensor(long).long(), **hidden)
    assert engine.generate(long, **hidden).tolist() == wanted != alone[1:]
    assert [alone[0][0], *first, *stream] == alone[0]
    assert engine.generate(short, **GREEDY).tolist() == alone[:1]  # and shows them again
    made = engine.report().compilations
    for tokens in (65, 80, 90):  # of one bucket, as the first was
        engine.generate(long[:, :tokens], **GREEDY)
        assert engine.report().compilations - made <= (backend == "jax"), tokens


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_what_the_host_does_with_logits_is_as_in_transformers(backend):
    model, engine, source = model_of("bart"), engine_of("bart", backend), source_of("bart")
    asked = GREEDY | {
        **{"no_repeat_ngram_size": 2, "forced_bos_token_id": 9, "min_new_tokens": 2},
        **{"return_dict_in_generate": True, "output_scores": True},
    }
    wanted = GenerationMixin.generate(model, **source, **asked)
    found = engine.generate(**source, **asked)
    assert found.sequences.tolist() == wanted.sequences.tolist()
    for ours, theirs in zip(found.scores, wanted.scores, strict=True):
        ours, theirs = np.asarray(ours), theirs.numpy()
        finite = np.isfinite(theirs)
        assert (np.isfinite(ours) == finite).all()
        np.testing.assert_allclose(ours[finite], theirs[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", slow_but(["t5"], ["t5", *SPLIT]))
def test_a_folder_runs_and_is_saved_as_transformers_has_it(name, backend, tmp_path):
    model, source = model_of(name), source_of(name)
    model.save_pretrained(tmp_path / "theirs")
    wanted = text_of(model, **source, **GREEDY)
    with dualinfer.init_inference(tmp_path / "theirs", backend=backend, dtype="fp32") as engine:
        assert engine.generate(**source, **GREEDY).tolist() == wanted
        assert engine.report().mode == "fused"
        engine.save_pretrained(tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours")
    own = again.state_dict()
    for name, tensor in model.state_dict().items():
        if "encoder.pooler" not in name:  # which a pair with a decoder does not read
            assert torch.equal(own[name], tensor), name


ALONE = ("T5EncoderModel", "UMT5EncoderModel", "LongT5EncoderModel", "T5GemmaEncoderModel")
ALONE += ("SwitchTransformersEncoderModel",)


@pytest.mark.parametrize("name", slow_but(ALONE[:2], ALONE))
def test_encoders_alone_are_base_models(name):
    torch.manual_seed(1)
    ids = torch.tensor(random_ids(2, 19, vocab=VOCAB)).long()
    fields = {
        "LongT5EncoderModel": {**T5, "local_radius": 4},
        "T5GemmaEncoderModel": {**PAIR, "is_encoder_decoder": False},
        "SwitchTransformersEncoderModel": {**T5, "num_experts": 2, "expert_capacity": 3},
    }
    cls = getattr(hf, name)
    model = cls(cls.config_class(**fields.get(name, T5))).eval()
    mask = torch.ones_like(ids)
    # Switch's experts have room for few tokens, which HF gives to padding on the left, too.
    real = slice(0, 12) if "Switch" in name else slice(7, None)
    mask[0] = 0
    mask[0, real] = 1
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).last_hidden_state
        alone = model(ids[1:, :9], attention_mask=mask[1:, :9]).last_hidden_state.mean(1)
    for backend in BACKENDS:
        with dualinfer.init_inference(model, backend=backend, **OPTIONS) as engine:
            found = engine(ids, attention_mask=mask).last_hidden_state
            assert relative_rms(found[0, real], wanted[0, real]) < 1e-5
            assert relative_rms(found[1], wanted[1]) < 1e-5
            assert not engine.can_generate()
            if "Switch" in name:  # as each row alone
                left = engine(ids.roll(7, 1), attention_mask=mask.roll(7, 1)).last_hidden_state
                assert relative_rms(left[0, 7:], wanted[0, real]) < 1e-5
            if name in ALONE[:2]:
                continue
            texts = [ids[1, :9].tolist(), ids[0, :5].tolist()]
            assert relative_rms(engine.embed(texts)[:1], alone) < 1e-5


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (10, 12), (64, 100), (6, 7)])
def test_buckets_of_distances_are_those_of_transformers(buckets, most, both_ways):
    from transformers.models.t5.modeling_t5 import T5Attention

    away = torch.arange(-most, most + 1)
    wanted = T5Attention._relative_position_bucket(away, both_ways, buckets, most)
    assert list(RelativeBias(buckets, most, both_ways).by_distance) == wanted.tolist()
    beyond = torch.tensor([-10 * most, 10 * most])
    ends = T5Attention._relative_position_bucket(beyond, both_ways, buckets, most).tolist()
    assert ends == wanted[[0, -1]].tolist(), "the ends stand for what is farther"


def test_what_does_not_fit_is_refused_by_name(hf_model):
    engine, audio = engine_of("t5", "torch"), engine_of("whisper", "torch")
    ids = random_ids(2, 5, vocab=VOCAB)
    llama = dualinfer.init_inference(hf_model("llama-gqa"), backend="torch", **OPTIONS)
    for call, error, said in (
        (lambda: engine(ids), ArgumentError, "decoder_input_ids is missing"),
        (lambda: engine(ids, decoder_input_ids=ids[:1]), ArgumentError, "1 rows and input_ids 2"),
        (
            lambda: engine(ids, attention_mask=np.eye(2, 5) * [[1], [0]], decoder_input_ids=ids),
            ArgumentError,
            "hides every token of row 1",
        ),
        (lambda: engine.generate(), ArgumentError, "input_ids is missing"),
        (lambda: engine.generate(ids, num_beams=4), UnsupportedError, "num_beams=1"),
        (lambda: engine.embed(ids), UnsupportedError, "has an encoder and a decoder"),
        (lambda: engine.generate(ids, input_features=ids), ArgumentError, "reads ids"),
        (
            lambda: engine.generate(ids, decoder_input_ids=ids[:1]),
            ArgumentError,
            "1 rows and input_ids 2",
        ),
        (lambda: engine.generate(ids, decoder_start_token_id=VOCAB), ArgumentError, "0 to 100"),
        (lambda: llama.generate(ids, decoder_input_ids=ids), ArgumentError, "has no encoder"),
        (lambda: engine.generate(pixel_values=ids), ArgumentError, "reads input_ids"),
        (lambda: audio.generate(input_values=ids), ArgumentError, "reads input_features"),
        (lambda: audio.generate(ids), ArgumentError, r"expected floats \[batch, 7, frames\]"),
        (lambda: audio.generate(), ArgumentError, "input_features is missing"),
        (
            lambda: engine_of("bart", "torch").generate(random_ids(1, 91, vocab=VOCAB)),
            LengthError,
            "91 tokens, but the encoder has 90 positions",
        ),
    ):
        with pytest.raises(error, match=said):
            call()
    on_jax = engine_of("t5", "jax")
    with pytest.raises(ArgumentError, match="decoder_input_ids is missing"):
        on_jax.apply(on_jax.params, ids)
    with pytest.raises(ArgumentError, match=r"has 1 rows and what .* 2; they are pair"):
        on_jax.apply(on_jax.params, ids, decoder_input_ids=ids[:1])
    sizes = {"batch_sizes": [1], "prompt_lengths": [4], "new_tokens": 2}
    with pytest.raises(UnsupportedError, match="lengths of both sequences"):
        on_jax.compile(compile_kwargs=sizes)
    with pytest.raises(ConfigError, match="keep_module_on_host"):
        dualinfer.init_inference(
            model_of("t5"), backend="torch", **OPTIONS, keep_module_on_host=True
        )


def test_a_model_that_asks_for_beams_says_how_to_go_on():
    model = model_of("marian")
    old, model.generation_config.num_beams = model.generation_config.num_beams, 4
    try:
        with dualinfer.init_inference(model, backend="torch", **OPTIONS) as engine:
            with pytest.raises(UnsupportedError, match="pass num_beams=1 to generate"):
                engine.generate(**source_of("marian"), **GREEDY)
            found = engine.generate(**source_of("marian"), **GREEDY, num_beams=1).tolist()
    finally:
        model.generation_config.num_beams = old
    assert found == text_of(model, **source_of("marian"), **GREEDY)


# On JAX these launch what others launch there; see `tests.launched`.
LAUNCHED_AS_OTHERS = {"trocr", "vit-gpt2", "s2t", "blenderbot-small", "moonshine"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for the CPU")
@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("t5", "torch"),
        pytest.param("t5", "jax", marks=pytest.mark.slow),
        pytest.param("bart", "torch", marks=pytest.mark.slow),
        pytest.param("bart", "jax", marks=pytest.mark.slow),
        *(
            pytest.param(name, b, marks=pytest.mark.slow)
            for name in SPLIT
            for b in BACKENDS
            if b == "torch" or name not in LAUNCHED_AS_OTHERS
        ),
    ],
)
def test_kernels_give_what_plain_ops_give(name, backend, monkeypatch):
    """Interpreted: a bias in prompts and in steps, a token's attention across, and norms behind."""
    pytest.importorskip("triton")
    torch.manual_seed(2)
    if name == "t5":
        small = T5 | {"d_model": 24, "d_ff": 33, "num_heads": 2, "num_layers": 1}
        config = hf.T5Config(**small | {"num_decoder_layers": 1})
        model = hf.T5ForConditionalGeneration(config).eval()
    elif name in SPLIT:  # tokens that are normed before positions, experts that are full
        model = copy.deepcopy(model_of(name))
    else:
        small = {"d_model": 24, "encoder_attention_heads": 2, "encoder_layers": 1}
        model = hf.BartForConditionalGeneration(hf.BartConfig(**BART | small)).eval()
    with torch.no_grad():
        for p in () if name in SPLIT else model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.1 if p.ndim == 1 else 0.7)
    if backend == "torch":
        from dualinfer.backends import torch as package
        from dualinfer.backends.torch.ops.kernels import KernelOps

        def make_ops(config, spec, device, _):
            return KernelOps(device)
    else:
        from dualinfer.backends import jax as package

        from .kernels.jax_ops import interpreted_ops

        def make_ops(*_):
            return interpreted_ops()

    options = OPTIONS | {"backend": backend}
    rows = 2 if name == "t5" else 1  # a norm behind a sub-layer goes with a single row
    ids = source_of("t5")["input_ids"][:rows]
    source = {n: x[:rows, :13] for n, x in source_of("t5").items()}
    if name in IMAGES or name in ("s2t", "moonshine"):
        source = {n: x[:rows] for n, x in source_of(name).items()}
    how = GREEDY | {"max_new_tokens": 4, "eos_token_id": None}
    # Torch's plain ops give what JAX's give, and compile nothing.
    with dualinfer.init_inference(model, **OPTIONS, backend="torch") as plain:
        wanted = plain.generate(**source, **how).tolist()
        logits = plain(**source, decoder_input_ids=ids[:, :5]).logits
        assert "Triton" not in plain.report().ops["cross_attention"]
    monkeypatch.setattr(package, "_make_ops", make_ops)
    with dualinfer.init_inference(model, **options) as fast:
        ops = fast.report().ops
        names = "attention", "decode_attention", "cross_attention"
        assert all("Triton" in ops[name] and not ops[name].startswith("plain") for name in names)
        found = fast(**source, decoder_input_ids=ids[:, :5]).logits
        assert relative_rms(found, logits) < 1e-5
        assert fast.generate(**source, **how).tolist() == wanted


def split_text(name: str) -> Any:
    """On a rank of several: text, logits, and what of the model it holds."""
    options = OPTIONS | {"tensor_parallel": {"tp_size": 2}}
    with dualinfer.init_inference(model_of(name), backend="torch", **options) as engine:
        begins = torch.tensor(random_ids(2, 3, seed=4, vocab=VOCAB)).long()
        outputs = engine(**source_of(name), decoder_input_ids=begins)
        logits, mask = outputs.logits, source_of(name).get("attention_mask")
        text = engine.generate(**source_of(name), **GREEDY).tolist()
        again = engine.generate(encoder_outputs=outputs, attention_mask=mask, **GREEDY)
        assert again.tolist() == text
        held = [tuple(layer.k.shape) for layer in engine.runner._slots.cache._layers]
        return np.asarray(logits), text, held


@pytest.mark.parametrize(
    "name", slow_but(["t5"], ["t5", "whisper", "led", "t5gemma", "bert2bert", *SPLIT])
)
def test_two_devices_give_what_one_gives(name, crew):
    begins = torch.tensor(random_ids(2, 3, seed=4, vocab=VOCAB)).long()
    how = {"decoder_input_ids": begins, "use_cache": False}
    with torch.no_grad():
        wanted = model_of(name)(**source_of(name), **how).logits
    text = text_of(model_of(name), **source_of(name), **GREEDY)
    for rank, (logits, found, held) in enumerate(crew.run(split_text, name, world=2)):
        assert relative_rms(logits, wanted) < 1e-5 and found == text
        heads = {"t5": (3, 2), "switch-t5": (3, 2), "t5gemma": (1, 1), "moonshine": (2, 2)}
        heads = heads.get(name, (2, 1))[rank]
        assert {shape[1] for shape in held} == {heads} and len(held) == 4
    if name not in ("t5", "whisper", "t5gemma", "nllb-moe"):  # JAX shares others by the same plan
        return
    options = OPTIONS | {"tensor_parallel": {"tp_size": 2}}
    with dualinfer.init_inference(model_of(name), backend="jax", **options) as engine:
        logits = engine(**source_of(name), decoder_input_ids=begins).logits
        assert relative_rms(logits, wanted) < 1e-5
        assert engine.generate(**source_of(name), **GREEDY).tolist() == text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", slow_but(["marian"], ["marian", "pegasus", "m2m_100", "fsmt", "t5gemma"])
)
def test_embeddings_in_half_precision_are_those_of_transformers(name, backend, tmp_path):
    """Bit for bit: tables of sines are rounded, the scale of tokens only where HF rounds it."""
    model_of(name).save_pretrained(tmp_path)
    model = type(model_of(name)).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    ids, begins = (torch.tensor(random_ids(2, n, seed=3, vocab=VOCAB)).long() for n in (19, 6))
    given = {"input_ids": ids.clamp(min=3), "decoder_input_ids": begins.clamp(min=3)}
    with torch.no_grad():
        wanted = model(**given, output_hidden_states=True, use_cache=False)
    fields = OPTIONS | {"dtype": "bf16", "backend": backend}
    with dualinfer.init_inference(tmp_path, **fields) as engine:
        found = engine(**given, output_hidden_states=True)
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert torch.equal(torch.as_tensor(found[name][0]), wanted[name][0])


def rounded_inputs(backend: str, quant: str, tp: int) -> Any:
    """Logits of a mixture whose products' inputs are quantized, for eight sequences."""
    options = OPTIONS | {"tensor_parallel": {"tp_size": tp}, "quant": quant, "backend": backend}
    with dualinfer.init_inference(model_of("nllb-moe"), **options) as engine:
        ids, begins = (torch.tensor(random_ids(8, n, seed=4, vocab=VOCAB)).long() for n in (9, 3))
        return np.asarray(engine(input_ids=ids, decoder_input_ids=begins).logits)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quant", ["fp8_w8a8", "int8_w8a8"])
def test_two_devices_round_inputs_by_the_scales_of_whole_rows(quant, backend, crew):
    """Single codes may be others, those of int8 often: docs/quantization.md says why.

    With scales of a device's own columns no sequence would come out the same.
    """
    wanted = rounded_inputs(backend, quant, 1)
    if backend == "torch":
        found = crew.run(rounded_inputs, backend, quant, 2, world=2)
    else:
        found = [rounded_inputs(backend, quant, 2)]
    for logits in found:
        assert relative_rms(logits, wanted) < 5e-2
        same = [relative_rms(*rows) < 1e-5 for rows in zip(logits, wanted, strict=True)]
        assert sum(same) >= (6 if quant == "fp8_w8a8" else 1)


@pytest.mark.parametrize("name", slow_but(["bart"], ["bart", "t5"]))
def test_a_live_module_is_quantized_as_its_folder_is(name, tmp_path):
    """Where the module has the embedding that is the head by four names, and the file by one."""
    model, source = model_of(name), source_of(name)
    ids = torch.tensor(random_ids(2, 5, vocab=VOCAB))
    model.save_pretrained(tmp_path)
    found = []
    for where in (model, tmp_path):
        with dualinfer.init_inference(where, backend="torch", quant="int8", **OPTIONS) as engine:
            found.append(np.asarray(engine(**source, decoder_input_ids=ids).logits))
    np.testing.assert_array_equal(*found)


def test_a_head_of_its_own_leaves_the_embedding_plain(tmp_path):
    """FLAN-T5's files have a head, which transformers' config says is the embedding."""
    model = copy.deepcopy(model_of("t5"))
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 0.1)
    model.save_pretrained(tmp_path)
    for where in (model, tmp_path):
        with dualinfer.init_inference(where, backend="torch", quant="int8", **OPTIONS) as engine:
            outer = engine.runner.params.outer
            assert outer["embed.weight"].scheme is None and outer["head.weight"].scheme is not None


def test_sounds_and_images_that_do_not_fit_are_refused():
    heard, wave, seen = (engine_of(name, "torch") for name in ("s2t", "moonshine", "trocr"))
    frames, samples = np.zeros((2, 43, 5), np.float32), np.zeros((2, 4000), np.float32)
    mask = np.ones((2, 4000), np.int64)
    mask[0, :900] = 0
    for call, error, said in (
        (lambda: heard.generate(frames[..., :4]), ArgumentError, r"\[batch, frames, 5\]"),
        (lambda: heard.generate(), ArgumentError, "input_features is missing"),
        (lambda: heard.generate(np.zeros((1, 200, 5), "f4")), LengthError, "make 50 tokens"),
        (lambda: wave.generate(input_features=frames), ArgumentError, "reads input_values"),
        (lambda: wave.generate(samples[:, :600]), ArgumentError, "too short for a token"),
        (lambda: wave.generate(samples, attention_mask=mask), ArgumentError, "hides .* of row 0"),
        (lambda: wave.generate(samples, attention_mask=mask[:, :9]), ArgumentError, "that of"),
        (
            lambda: wave.generate(
                encoder_outputs={"last_hidden_state": frames, "attention_mask": mask[:, :9]}
            ),
            ArgumentError,
            "an attention_mask of its own",
        ),
        (lambda: seen.generate(input_features=frames), ArgumentError, "reads images"),
        (lambda: seen.generate(samples), ArgumentError, r"expected \[batch, 3, 18, 18\]\.$"),
        (
            lambda: seen(
                pixel_values=np.zeros((1, 3, 18, 18), "f4"), interpolate_pos_encoding=True
            ),
            ArgumentError,
            "own size alone",
        ),
    ):
        with pytest.raises(error, match=said):
            call()


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("nllb-moe", {"second_expert_policy": "sampling"}, "second_expert_policy='sampling'"),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.5}, "moe_eval_capacity_token_fraction"),
        ("nllb-moe", {"moe_token_dropout": 1.0}, "moe_token_dropout=1.0"),
        ("fsmt", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("s2t", {"num_conv_layers": 3}, "num_conv_layers=3"),
        ("s2t", {"conv_kernel_sizes": [5, 4]}, r"conv_kernel_sizes=\[5, 4\]"),
        ("moonshine", {"decoder_num_key_value_heads": 2}, "the numbers of one for the other"),
        ("trocr", {"decoder": {"cross_attention_hidden_size": 35}}, "hidden_size=35"),
        ("trocr", {"encoder": {"model_type": "swin"}}, "serves vit and deit there"),
    ],
)
def test_configs_that_are_not_honoured_are_refused(name, changes, said):
    config = model_of(name).config.to_dict()
    for field, value in changes.items():
        config[field] = config[field] | value if isinstance(value, dict) else value
    with pytest.raises(ModelError, match=said):
        describe_model(config)
