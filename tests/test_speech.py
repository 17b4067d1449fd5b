"""Whisper as people use it: transformers' own generate and speech pipeline are the oracle."""

import copy
import functools
import itertools
import re
import runpy
import sys
import warnings
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer.engine.driver import Driver
from dualinfer.engine.whisper import segments, settings, windows
from dualinfer.engine.whisper.alignment import token_times
from dualinfer.engine.whisper.rules import TokenRule
from dualinfer.errors import ArgumentError, LengthError, StepError, UnsupportedError

from .models import BACKENDS, slow_but
from .speech import POSITIONS, features_of, id_of, make_extractor, make_sound, make_tokenizer
from .speech import make_whisper as make_model

OPTIONS: dict[str, Any] = {"dtype": "fp32", "replace_with_kernel_inject": True}
NEW: dict[str, Any] = {"max_new_tokens": 20}
STAMPED = NEW | {"return_timestamps": True, "return_segments": True}
# Of outputs, what HF's alone hold.
LEFT_OUT = ("past_key_values", "cross_attentions", "encoder_attentions", "decoder_attentions")


@functools.cache
def model_of(seed: int = 0) -> Any:
    """Models that end, repeat and time their texts in different ways."""
    return make_model(seed, ends=3 if seed == 3 else 2, stamps=0 if seed == 3 else -1)


@functools.cache
def engine_of(backend: str, seed: int = 0) -> Any:
    return dualinfer.init_inference(model_of(seed), backend=backend, **OPTIONS)


@functools.cache
def sounds(name: str) -> dict[str, torch.Tensor]:
    """Features: of two sounds of one window, of one and of three long ones."""
    if name == "short":
        return features_of(make_sound(2, 1), make_sound(1.3, 2))
    if name == "long":
        return features_of(make_sound(4.6, 3), long=True)
    return features_of(make_sound(5, 1), make_sound(3.6, 2), make_sound(2.3, 4), long=True)


def plain(value: Any, left: tuple[str, ...] = LEFT_OUT) -> Any:
    """Outputs as dicts, lists and numbers."""
    if hasattr(value, "keys"):
        return {name: plain(value[name], left) for name in value if name not in left}
    if isinstance(value, list | tuple):
        return [plain(one, left) for one in value]
    return np.asarray(value).tolist()


def check_same(found: Any, wanted: Any, where: str = "") -> None:
    """Ids are equal, and numbers but for rounding."""
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), where
        for name in wanted:
            check_same(found[name], wanted[name], f"{where}.{name}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            check_same(one, other, f"{where}[{i}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4), where
    else:
        assert found == wanted, where


def check(backend: str, name: str, seed: int = 0, **how: Any) -> Any:
    """The engine's generate gives what HF's gives; what that is."""
    if forced := how.pop("forced", None):
        how["generation_config"] = copy.deepcopy(model_of(seed).generation_config)
        how["generation_config"].forced_decoder_ids = forced
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of HF's own np.repeat of a tensor
        wanted = copy.deepcopy(model_of(seed)).generate(**sounds(name), **how)
    found = engine_of(backend, seed).generate(**sounds(name), **how)
    scored = {"logprob_threshold", "return_token_timestamps"} & how.keys()
    left = (*LEFT_OUT, *("scores",) * bool(scored))  # which HF keeps without being asked
    check_same(plain(found, left), plain(wanted, left))
    return plain(wanted, left)


PROMPT = torch.tensor([id_of("<|startofprev|>"), 17, 33, 12])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a language that is heard": ("short", NEW),
    "no length": ("long", {}),
    "a language": ("short", NEW | {"language": "de"}),
    "languages and a task": (
        "short",
        NEW | {"language": ["<|fr|>", "english"], "task": "translate"},
    ),
    "a task": ("short", NEW | {"task": "translate"}),
    "forced ids": ("short", NEW | {"forced": [[1, 293], [2, 295], [3, 300]]}),
    "ids": ("short", NEW | {"decoder_input_ids": torch.tensor([[291, 292], [291, 294]])}),
    "timestamps": ("short", STAMPED),
    "timestamps, no length": ("short", {"return_timestamps": True, "language": "en"}),
    "windows": ("long", NEW),
    "windows of several": ("several", STAMPED),
    "windows that follow": ("several", STAMPED | {"condition_on_prev_tokens": True}),
    "a length that grows": (
        "several",
        {"max_length": 9, "return_timestamps": True, "condition_on_prev_tokens": True},
    ),
    "a prompt": ("short", NEW | {"prompt_ids": PROMPT}),
    "a prompt first": (
        "several",
        STAMPED | {"prompt_ids": PROMPT, "condition_on_prev_tokens": True},
    ),
    "a prompt of all": (
        "several",
        STAMPED
        | {"prompt_ids": PROMPT, "condition_on_prev_tokens": True}
        | {"prompt_condition_type": "all-segments"},
    ),
    "tokens' times": ("short", STAMPED | {"return_token_timestamps": True}),
    "tokens' times alone": ("short", NEW | {"return_token_timestamps": True}),
    "tokens' times of windows": (
        "several",
        STAMPED | {"return_token_timestamps": True, "condition_on_prev_tokens": True},
    ),
    "an output": ("short", NEW | {"return_dict_in_generate": True, "output_scores": True}),
    "outputs": ("short", STAMPED | {"return_dict_in_generate": True, "output_logits": True}),
    "one pass": ("short", NEW | {"force_unique_generate_call": True, "return_timestamps": True}),
    "likely enough": ("several", NEW | {"logprob_threshold": -1.0, "temperature": 0.0}),
    "a first token held back": (
        "short",
        NEW | {"begin_suppress_tokens": [261, 128], "logprob_threshold": -9.0, "temperature": 0.0},
    ),
    "silence": (
        "several",
        STAMPED | {"logprob_threshold": -0.5, "no_speech_threshold": 1e-3, "temperature": 0.0},
    ),
    "processors": ("short", STAMPED | {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
    "an early end held back": ("short", NEW | {"min_new_tokens": 9}),
    "other seconds": (
        "several",
        STAMPED | {"time_precision": 0.04, "time_precision_features": 0.02},
    ),
}
QUICK = (
    *("a language that is heard", "languages and a task", "forced ids", "one pass", "silence"),
    *("a first token held back", "a length that grows"),
    *("timestamps, no length", "windows that follow", "a prompt first", "an output", "processors"),
    "tokens' times of windows",
)
ON_JAX = ("a language that is heard", "tokens' times alone", "a prompt first", "silence")


@pytest.mark.parametrize(("name", "seed"), [*slow_but(QUICK, CASES, 0), *slow_but([], CASES, 3)])
def test_generate_gives_what_transformers_gives(name, seed):
    check("torch", CASES[name][0], seed, **CASES[name][1])


@pytest.mark.parametrize("name", slow_but(ON_JAX[:2], ON_JAX))
def test_generate_gives_what_transformers_gives_on_jax(name):
    check("jax", CASES[name][0], **CASES[name][1])


def make_pipe(model: Any) -> Any:
    how = {"tokenizer": make_tokenizer(), "feature_extractor": make_extractor()}
    return hf.pipeline("automatic-speech-recognition", model=model, **how)


KWARGS = {"generate_kwargs": {"num_beams": 1, **NEW}}
SHORT, LONG = (1.5, 2), (4.7,)
PIPES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "text": (SHORT[:1], {}),
    "timestamps": (SHORT, {"batch_size": 2, "return_timestamps": True}),
    "words": (SHORT, {"return_timestamps": "word"}),
    "a language that is told": (SHORT, {"return_timestamps": True, "return_language": True}),
    "windows": (LONG, {"return_timestamps": True}),
    "words of windows": (LONG, {"return_timestamps": "word"}),
    "chunks": (LONG, {"chunk_length_s": 2, "batch_size": 2}),
    "timestamps of chunks": (
        LONG,
        {"chunk_length_s": 2, "stride_length_s": (0.4, 0.2), "return_timestamps": True},
    ),
    "words of chunks": (LONG, {"chunk_length_s": 2, "return_timestamps": "word"}),
    "a task": (
        SHORT[:1],
        {"generate_kwargs": {**KWARGS["generate_kwargs"], "language": "de", "task": "translate"}},
    ),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *slow_but(["text", "timestamps", "words of windows", "words of chunks"], PIPES, "torch"),
        *slow_but(["timestamps"], ["timestamps", "words of windows", "chunks"], "jax"),
    ],
)
def test_pipelines_give_what_they_give_around_transformers(name, backend):
    lengths, how = PIPES[name]
    waves, how = [make_sound(length, i) for i, length in enumerate(lengths)], KWARGS | how

    def run(pipe: Any) -> Any:
        return pipe([wave.copy() for wave in waves], **copy.deepcopy(how))

    wanted = run(make_pipe(copy.deepcopy(model_of())))
    assert run(make_pipe(engine_of(backend))) == wanted
    assert all(one["text"] for one in wanted)


@pytest.mark.parametrize("conditions", slow_but([True], [True, False]))
@pytest.mark.parametrize(
    ("rule", "temperature"),
    [({"compression_ratio_threshold": 0.9}, 0.4), ({"logprob_threshold": -0.3}, 0.9)],
)
def test_windows_are_read_again_where_transformers_reads_them_again(rule, temperature, conditions):
    """With one candidate what is drawn is the best token, so that HF's text is comparable."""
    how = STAMPED | {"condition_on_prev_tokens": conditions}
    once = check("torch", "long", **how)
    again = check("torch", "long", **how, **rule, top_k=1, temperature=(0.0, temperature))
    follows = once["sequences"] == again["sequences"]
    assert follows == (not conditions or temperature < 0.5), "none follows a high temperature"


def test_silence_is_what_may_follow_the_start_of_a_transcript():
    """Behind a prompt, by a threshold a little below and above HF's probability."""
    model, engine = model_of(), engine_of("torch")
    features = sounds("short")["input_features"][:1]
    start = torch.tensor([[*PROMPT.tolist(), id_of("<|startoftranscript|>")]])
    with torch.no_grad():
        logits = model(features, decoder_input_ids=start).logits[0, -1]
    likely = float(logits.softmax(-1)[id_of("<|nospeech|>")])
    how = NEW | {"language": "de", "prompt_ids": PROMPT, "logprob_threshold": 0.0}
    for threshold, is_silent in ((0.99 * likely, True), (1.01 * likely, False)):
        found = engine.generate(features, **how, no_speech_threshold=threshold)
        assert (found.shape[1] == 0) == is_silent


def test_a_fallback_draws_by_the_seed():
    how = STAMPED | {"logprob_threshold": 0.0, "temperature": (0.0, 0.5, 1.5)}  # which none reaches
    how["max_new_tokens"] = 8
    engine, given = engine_of("torch"), sounds("long")
    texts = [engine.generate(**given, **how, seed=n)["sequences"].tolist() for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    both = {n: torch.cat([x, x]) for n, x in given.items()}
    rows = engine.generate(**both, **how, seed=[1, 2])["sequences"].tolist()
    for row, alone in zip(rows, (texts[0][0], texts[2][0]), strict=True):
        assert row[: len(alone)] == alone, "a sound's text does not depend on others'"
    way: Any = windows.Windows(*(None,) * 5, [7, 8], 2, *(None,) * 7)  # of two sounds, twice each
    seeds = {way._seed(*where) for where in itertools.product(range(4), range(3), range(3))}
    assert len(seeds) == 36 and [way._seed(row, 0, 0) for row in (0, 2)] == [7, 8]
    several = NEW | {"temperature": 1.0, "num_return_sequences": 2, "seed": 5}
    drawn = engine.generate(**sounds("short"), **several).tolist()
    assert drawn[0] != drawn[1] and drawn == engine.generate(**sounds("short"), **several).tolist()
    alone = engine.generate(**sounds("short"), **NEW, temperature=1.0, seed=5).tolist()
    assert alone == drawn[::2]


def test_jax_without_torch_draws_what_torch_draws(monkeypatch):
    features = sounds("long")["input_features"]
    how = STAMPED | {"logprob_threshold": -0.3, "temperature": (0.0, 0.6), "seed": 3}
    wanted = engine_of("torch").generate(input_features=features, **how)
    engine, features = engine_of("jax"), features.numpy()
    monkeypatch.setitem(sys.modules, "torch", None)
    found = engine.generate(input_features=features, **how)
    assert isinstance(found["sequences"], np.ndarray)
    assert found["sequences"].tolist() == wanted["sequences"].tolist()
    times = [(s["start"], s["end"]) for s in found["segments"][0]]
    assert times == [(float(s["start"]), float(s["end"])) for s in wanted["segments"][0]]


def test_a_transcript_without_timestamps_is_the_devices():
    engine = dualinfer.init_inference(model_of(), backend="torch", **OPTIONS)
    engine.generate(**sounds("short"), **NEW, language="de", compression_ratio_threshold=9.0)
    assert not any("one step at a time" in note for note in engine.report().notes)
    engine.generate(**sounds("short"), **STAMPED)
    assert "what the host does: return_timestamps" in engine.report().notes[-1]


def test_a_transcript_beside_a_stream_is_the_drivers(monkeypatch):
    """It is made at once, whatever the steps at a time; a stream's thread takes its own."""
    monkeypatch.setattr("dualinfer.engine.preparing._WHOLE_CHUNK", 1)
    submit, jobs = Driver.submit, []
    monkeypatch.setattr(Driver, "submit", lambda own, new: jobs.extend(new) or submit(own, new))
    engine, how = engine_of("torch"), sounds("short") | NEW | {"language": "de"}
    alone = engine.generate(**how)
    stream = engine.stream(**how)
    next(stream)
    assert not jobs
    assert engine.generate(**how).tolist() == alone.tolist() and len(jobs) == len(alone)
    stream.close()


def test_forms_of_a_call():
    model, engine, given = model_of(), engine_of("torch"), sounds("short")
    features = given["input_features"]
    wanted = model.generate(**given, **NEW).tolist()
    for form in (features.numpy(), features.tolist(), hf.BatchFeature(given)):
        found = engine.generate(form, **NEW)
        assert np.asarray(found).tolist() == wanted
        assert isinstance(found, np.ndarray if isinstance(form, np.ndarray) else torch.Tensor)
    assert engine.generate(inputs=features, **NEW).tolist() == wanted
    languages = model.detect_language(features).tolist()
    assert engine.detect_language(features).tolist() == languages
    assert engine.detect_language(sounds("several")["input_features"]).tolist()[1:] != []
    encoded = model.get_encoder()(features)
    assert engine.generate(encoder_outputs=encoded, **NEW).tolist() == wanted
    assert engine.detect_language(encoder_outputs=encoded).tolist() == languages
    rows = [list(row) for row in zip(*engine.stream(features, **NEW), strict=True)]
    for row, text in zip(rows, wanted, strict=True):
        tokens = [token for token in row if token is not None]
        assert [token for token in tokens if token != model.config.eos_token_id] == [
            token for token in text if token != model.config.pad_token_id
        ]
    short = features[..., :150]  # which is filled up with silence
    how = NEW | {"language": "en"}
    assert engine.generate(short, **how).tolist() == model.generate(short, **how).tolist()
    seen, theirs = ([], [])
    how = STAMPED | {"return_segments": False}
    engine.generate(**sounds("several"), **how, monitor_progress=lambda x: seen.append(x.tolist()))
    model.generate(**sounds("several"), **how, monitor_progress=lambda x: theirs.append(x.tolist()))
    assert seen == theirs and len(seen) > 2


def test_the_example_tells_what_is_said_and_when(tmp_path, monkeypatch, capsys):
    for part in (model_of(), make_tokenizer(), make_extractor()):
        part.save_pretrained(tmp_path)
    samples = (make_sound(4.6, 3) * 32767).clip(-32768, 32767).astype(np.int16)
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    monkeypatch.setattr(
        sys, "argv", ["", str(tmp_path), str(tmp_path / "sound.wav"), "--backend", "torch"]
    )
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "speech.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and all(" to " in line for line in lines)


class Streamed:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Any) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def test_a_streamer_gets_each_window():
    streams = Streamed(), Streamed()
    for model, streamer in zip((model_of(), engine_of("torch")), streams, strict=True):
        model.generate(**sounds("long"), return_timestamps=True, streamer=streamer, **NEW)
    assert streams[0].got == streams[1].got and streams[0].got.count("end") > 2


def test_the_rules_of_timestamps_are_those_of_transformers():
    """Of random texts, and of texts that obey them, on both backends."""
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    config, vocab = copy.deepcopy(model_of().generation_config), len(make_tokenizer())
    config.max_initial_timestamp_index = 7
    rule = TokenRule(make_settings_of(config), (), (), config.eos_token_id)
    random = np.random.default_rng(0)
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=0)
    for count in (0, 1, 2, 3, 9):
        ids = random.integers(0, vocab, (40, count))
        ids[::2] = random.integers(vocab - 101, vocab, ids[::2].shape)  # mostly timestamps
        ids[::4] = np.sort(ids[::4], axis=1)
        scores = random.standard_normal((40, vocab)).astype(np.float32) * 3
        wanted = theirs(torch.tensor(ids), torch.tensor(scores)).numpy()
        for backend in BACKENDS:
            runner = engine_of(backend).runner
            own = torch.tensor(scores) if backend == "torch" else scores
            found = np.asarray(runner.hide(own, rule.hidden(ids), rule.outweigh))
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"language": "klingon"}, "none that Whisper knows"),
        ({"language": "ja"}, r"no <\|ja\|> in lang_to_id"),
        ({"language": ["de"]}, "1 names for 2 sounds"),
        ({"language": [1, 2]}, "expected a str"),
        ({"task": "sing"}, "translate, transcribe"),
        ({"return_timestamps": "word"}, "return_token_timestamps=True"),
        ({"langauge": "de"}, "Did you mean language"),
        ({"is_multilingual": False, "task": "translate"}, "of English alone"),
        ({"temperature": (0.0, -1.0)}, "a number from 0"),
        ({"temperature": []}, "temperature is empty"),
        ({"logprob_threshold": "high"}, "expected a number"),
        ({"no_speech_threshold": 0.6}, "logprob_threshold"),
        ({"prompt_ids": [[1, 2], [3, 4]]}, "expected one row"),
        ({"prompt_ids": [9999]}, "outside the vocabulary"),
        ({"prompt_condition_type": "all-segments"}, "needs condition_on_prev_tokens=True"),
        ({"prompt_condition_type": "none"}, "first-segment or all-segments"),
        ({"forced_decoder_ids": [[1, 293], [3, 300]]}, "leave a place out"),
        ({"forced_decoder_ids": 7}, "pairs of a place"),
        ({"max_new_tokens": 100}, "Shorten|shorten"),
        ({"prompt_ids": [7] * POSITIONS}, "stand in front"),
        ({"num_return_sequences": 2}, "same text several times|text several times"),
        ({"alignment_heads": [[9, 9]], "return_token_timestamps": True}, "pairs of a layer"),
        ({"suppress_tokens": "all", "return_timestamps": True}, "a list of ids"),
        ({"monitor_progress": 3}, "expected a function"),
        ({"time_precision": 0}, "above 0"),
        ({"inputs_embeds": [[1.0]]}, "reads input_features alone"),
        ({"assistant_model": object()}, "needs no second model"),
        ({"num_beams": 5}, "num_beams=1"),
        ({"input_features": np.zeros((2, 3, 200), np.float32)}, r"\[batch, 20, frames\]"),
        ({"decoder_input_ids": [[291]]}, "they are pairs"),
        ({"lang_to_id": {"<|en|>": "first"}}, "a dict of names to ids"),
        ({"no_timestamps_token_id": 9999}, "an id of the vocabulary"),
    ],
)
def test_what_is_wrong_or_not_served_is_told(given, said):
    with pytest.raises((ArgumentError, UnsupportedError, LengthError), match=said):
        engine_of("torch").generate(**sounds("short") | given)


TASKS = {"transcribe": id_of("<|transcribe|>"), "translate": id_of("<|translate|>")}
# The call, what its message says, and the calls that do so; of a model whose config names nothing
# where the first word is "bare".
WAYS: list[tuple[str, dict[str, Any], str, list[dict[str, Any]]]] = [
    (
        "short",
        {"language": ["de"]},
        "one for each, or one str for all",
        [{"language": ["de", "fr"]}, {"language": "de"}],
    ),
    (
        "short",
        {"is_multilingual": False, "task": "translate"},
        "Leave it out, or pass is_multilingual=True",
        [{"is_multilingual": False}, {"is_multilingual": True, "task": "translate"}],
    ),
    (
        "short",
        {"language": "de", "task_to_id": {"translate": TASKS["translate"]}},
        "Pass task=",
        [{"language": "de", "task_to_id": TASKS, "task": "translate"}],
    ),
    (
        "short",
        {"no_speech_threshold": 0.6, "temperature": 0.0},
        "Pass that too; Whisper's own values are 0.6 and -1.0",
        [{"no_speech_threshold": 0.6, "logprob_threshold": -1.0, "temperature": 0.0}],
    ),
    (
        "short",
        {"num_return_sequences": 2},
        "Set temperature, or num_return_sequences=1",
        [
            {"num_return_sequences": 2, "temperature": 0.5, "do_sample": True},
            {"num_return_sequences": 1},
        ],
    ),
    ("short", {"return_timestamps": "word"}, "True", [{"return_token_timestamps": True}]),
    (
        "long",
        {"return_timestamps": False},
        "Pass return_timestamps=True, or a sound of one window",
        [{"return_timestamps": True}],
    ),
    (
        "bare",
        {"language": "de"},
        "or pass decoder_input_ids",
        [{"decoder_input_ids": torch.tensor([[291, 292], [291, 294]])}],
    ),
    (
        "bare",
        {"return_timestamps": True},
        "or set it",
        [{"return_timestamps": True, "no_timestamps_token_id": id_of("<|notimestamps|>")}],
    ),
    (
        "bare",
        {"no_speech_threshold": 0.6, "logprob_threshold": -1.0, "temperature": 0.0},
        "Set it, or leave the threshold out",
        [{"logprob_threshold": -1.0, "temperature": 0.0}],
    ),
    (
        "bare",
        {"return_token_timestamps": True},
        "or set them",
        [{"return_token_timestamps": True, "alignment_heads": [[0, 0]]}],
    ),
]


@functools.cache
def bare_engine() -> Any:
    """An engine of a model whose generation config names no languages, tasks and timestamps."""
    bare = copy.deepcopy(model_of())
    for name in ("lang_to_id", "task_to_id", "no_timestamps_token_id", "alignment_heads"):
        delattr(bare.generation_config, name)
    return dualinfer.init_inference(bare, backend="torch", **OPTIONS)


@pytest.mark.parametrize(("sound", "given", "said", "ways"), WAYS, ids=[x[2] for x in WAYS])
def test_ways_on_that_messages_name_work(sound, given, said, ways):
    engine = bare_engine() if sound == "bare" else engine_of("torch")
    heard = sounds("short" if sound == "bare" else sound)
    with pytest.raises(ArgumentError, match=re.escape(said)):
        engine.generate(**heard, **NEW | given)
    for way in ways:
        texts = engine.generate(**heard, **NEW | way)
        rows = len(heard["input_features"]) * way.get("num_return_sequences", 1)
        assert len(texts["sequences"] if isinstance(texts, dict) else texts) == rows
    if sound == "long":
        assert len(engine.generate(**sounds("short"), **NEW | given)) == 2


def test_what_a_model_or_a_call_has_not_is_told(hf_model):
    engine = engine_of("torch")
    with pytest.raises(ArgumentError, match="attention_mask is missing"):
        engine.generate(sounds("several")["input_features"])
    with pytest.raises(ArgumentError, match="longer than one window"):
        engine.generate(**sounds("long"), return_timestamps=False)
    with pytest.raises(UnsupportedError, match=r"generate\(streamer=...\)"):
        engine.stream(**sounds("short"), return_timestamps=True)
    bare = bare_engine()
    bare.generate(**sounds("short"), **NEW)
    for given, said in (
        ({"language": "de"}, "no lang_to_id"),
        ({"task": "translate"}, "no task_to_id"),
        ({"return_timestamps": True}, "needs no_timestamps_token_id"),
        ({"return_token_timestamps": True}, "needs alignment_heads"),
    ):
        with pytest.raises(ArgumentError, match=said):
            bare.generate(**sounds("short"), **given)
    with pytest.raises(ArgumentError, match="no lang_to_id"):
        bare.detect_language(sounds("short")["input_features"])
    llama = dualinfer.init_inference(hf_model("llama-gqa"), backend="torch", **OPTIONS)
    with pytest.raises(ArgumentError, match=r"language='de' .* \(Whisper\)"):
        llama.generate([[1, 2]], language="de")
    llama.generate([[1, 2]], max_new_tokens=1, language=None, return_timestamps=False)
    with pytest.raises(UnsupportedError, match="does not transcribe"):
        llama.detect_language()


def test_a_window_that_ends_where_it_begins_is_told():
    """In HF it is read again without end."""
    first = id_of("<|0.00|>")
    engine = engine_of("torch")

    def twice(ids: Any, scores: Any) -> Any:
        scores[:, first] += 1e4
        return scores

    with pytest.raises(StepError, match="return_timestamps=True"):
        engine.generate(**sounds("short"), **NEW, logits_processor=[twice])


def test_times_of_tokens_are_those_of_transformers():
    """The cheapest path, of ties and of numbers that are none too."""
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    from dualinfer.engine.whisper.alignment import _path

    random = np.random.default_rng(0)
    for rows, columns in ((1, 1), (1, 9), (5, 3), (20, 30)):
        whole = random.standard_normal((rows, columns))
        for matrix in (whole, np.round(whole), np.full_like(whole, np.nan)):
            for one, other in zip(_dynamic_time_warping(matrix), _path(matrix), strict=True):
                np.testing.assert_array_equal(one, other)
    nothing = token_times(np.zeros((0, 2, 9), np.float32), None, 3, 0.02, 7)
    assert nothing.tolist() == [0.0] * 4


def test_how_a_text_repeats_itself_is_told_by_zlib():
    again, random = np.full(60, 7), np.random.default_rng(0).integers(0, 400, 60)
    wanted = hf.WhisperForConditionalGeneration._retrieve_compression_ratio
    for tokens in (again, random):
        found = windows.compression_ratio(tokens, 402)
        assert found == wanted(torch.tensor(tokens), 402)


SPLIT: dict[str, Any] = STAMPED | {
    **{"condition_on_prev_tokens": True, "logprob_threshold": -2.5, "temperature": (0.0, 0.6)},
    "seed": 3,
}


def split_text() -> Any:
    """On a rank of several: a transcript of which some is drawn, and seeds that nobody names."""
    options = OPTIONS | {"tensor_parallel": {"tp_size": 2}}
    with dualinfer.init_inference(model_of(), backend="torch", **options) as engine:
        text = engine.generate(**sounds("several"), **SPLIT)["sequences"].tolist()
        drawn = engine.generate(**sounds("short"), **NEW, temperature=1.0).tolist()
        with pytest.raises(UnsupportedError, match="of which each of several devices"):
            engine.generate(**sounds("short"), return_token_timestamps=True)
        return text, drawn


@pytest.mark.slow
def test_two_devices_give_what_one_gives(crew):
    wanted = engine_of("torch").generate(**sounds("several"), **SPLIT)["sequences"].tolist()
    one, other = crew.run(split_text, world=2)
    assert one == other and one[0] == wanted
    options = OPTIONS | {"tensor_parallel": {"tp_size": 2}}
    with dualinfer.init_inference(model_of(), backend="jax", **options) as engine:
        found = engine.generate(**sounds("several"), **SPLIT)["sequences"].tolist()
        assert found == wanted


def make_settings_of(config: Any, **given: Any) -> Any:
    """Settings of a generation_config and arguments."""
    start, vocab = config.decoder_start_token_id, len(make_tokenizer())
    given = {"return_timestamps": True, **given}
    fields = config.to_dict()
    return settings.make_settings(fields, given, start=start, vocab=vocab, is_long=False)


def random_text(random: np.random.Generator) -> np.ndarray:
    """A few tokens, of which many are timestamps, some of them that of 0 seconds."""
    text = random.integers(0, 290, random.integers(0, 12))
    stamps = id_of("<|0.00|>") + random.integers(0, 101, len(text)) * random.integers(
        0, 2, len(text)
    )
    return np.where(random.random(len(text)) < 0.6, stamps, text)


def test_windows_are_cut_as_transformers_cuts_them():
    random, whisper = np.random.default_rng(0), hf.WhisperForConditionalGeneration
    for i in range(300):
        precision = ((0.02, 0.01), (0.04, 0.02), (0.03, 0.007))[i % 3]
        names = "time_precision", "time_precision_features"
        how = dict(zip(names, precision, strict=True))
        own = make_settings_of(model_of().generation_config, **how)
        tokens, frames, seek, width = (
            random_text(random),
            int(random.integers(1, 201)),
            46 * i,
            i % 7,
        )
        offset = seek * precision[0] / 2
        theirs, moved = whisper._retrieve_segment(
            seek_sequence=torch.tensor(tokens),
            seek_outputs=["result"],
            time_offset=torch.tensor([offset], dtype=torch.float64),
            timestamp_begin=own.first_stamp,
            seek_num_frames=torch.tensor([frames]),
            time_precision=precision[0],
            time_precision_features=precision[1],
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, width),
        )
        ours, ended = segments.cut(own, tokens, frames, offset, width, "result")
        assert ended == int(moved)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.start, one.end) == (float(other["start"]), float(other["end"]))
            assert one.tokens.tolist() == other["tokens"].tolist()
            assert one.places == other["idxs"] and one.result == other["result"]


@pytest.mark.parametrize("prompt", [None, [298, 17, 33, 12], [17, 33]])
@pytest.mark.parametrize("previous", [298, None])
def test_what_a_window_follows_is_as_in_transformers(prompt, previous):
    """Segments of random lengths, of which some rows follow theirs and some do not."""
    random, config = np.random.default_rng(1), copy.deepcopy(model_of().generation_config)
    for i in range(40):
        kind = ("first-segment", "all-segments")[i % 2]
        how = {"condition_on_prev_tokens": True, "prompt_condition_type": kind}
        own = make_settings_of(config, prompt_ids=prompt, **how)
        texts = [[random_text(random) for _ in range(i % 9)] for _ in range(3)]
        follows, rows = random.integers(0, 2, 3).astype(bool).tolist(), [0, 1, 2][i % 3 :]
        if previous is None and not (prompt and kind == "all-segments"):
            follows = [True] * 3  # of nothing at all HF makes floats
            texts = [[*text, np.array([7])] for text in texts]
        config.prompt_condition_type, config.prev_sot_token_id = kind, previous
        first = torch.tensor([[291, 292, 296]] * 3)
        ids, kwargs = hf.WhisperForConditionalGeneration._prepare_decoder_input_ids(
            cur_bsz=len(rows),
            init_tokens=first,
            current_segments=[[{"tokens": torch.tensor(t)} for t in one] for one in texts],
            batch_idx_map=rows,
            do_condition_on_prev_tokens=follows,
            prompt_ids=None if prompt is None else torch.tensor(prompt),
            generation_config=config,
            config=model_of().config,
            device="cpu",
            suppress_tokens=None,
            timestamp_begin=own.first_stamp,
            kwargs={},
        )
        way: Any = windows.Windows(
            **{"settings": own, "begins": first.numpy(), "positions": POSITIONS, "fill": 290},
            **dict.fromkeys(("reader", "sounds", "given", "seeds", "most_new", "limit")),
            **{"previous": previous, "per_sound": 1, "most": 64, "ends": (290,)},
        )
        way._follows = follows
        found = way._begin(rows, [[segments.Segment(t) for t in one] for one in texts])
        assert found.ids.tolist() == ids.tolist()
        mask = kwargs.get("decoder_attention_mask")
        assert (None if found.mask is None else found.mask.tolist()) == (
            None if mask is None else mask.tolist()
        )
