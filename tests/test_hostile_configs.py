"""Whatever a folder's JSON files and a request hold: it holds no machine and runs no code."""

import json
import time

import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer import ArgumentError, CheckpointError, DualinferError, ModelError
from dualinfer.checkpoint.described.hf_config import read_config, read_generation_config
from dualinfer.config import make_config
from dualinfer.engine.options import make_options
from dualinfer.model.families.fields import GENERATION, INERT

from .models import A_SECOND, BACKENDS, VOCAB, random_ids

CAUSAL = "llama-mqa"
KINDS = {  # a case of each family, whose own fields are tried
    "llama": "llama-mqa",
    "qwen2": "qwen2-mixed",
    "gemma2": "gemma2",
    "gpt2": "gpt2",
    "gpt_neo": "gpt-neo",
    "gpt_neox": "neox",
    "gptj": "gptj",
    "opt": "opt",
    "bloom": "bloom",
    "bert": "bert",
}


@pytest.fixture(scope="module")
def folders(hf_model, tmp_path_factory):
    """A function from a family to a folder with a checkpoint, and its config as written."""
    made = {}

    def get(kind):
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            hf_model(KINDS[kind]).save_pretrained(path)
            made[kind] = path, json.loads((path / "config.json").read_text())
        return made[kind]

    return get


@pytest.fixture
def altered(folders):
    """A function that writes fields into a folder's config.json; it is put back at the end."""
    touched = []

    def change(kind, **fields):
        path, written = folders(kind)
        touched.append((path, written))
        (path / "config.json").write_text(json.dumps({**written, **fields}))
        return path

    yield change
    for path, written in touched:
        (path / "config.json").write_text(json.dumps(written))
        (path / "generation_config.json").unlink(missing_ok=True)


def rope(kind, theta=1e4, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


HUGE = 2**63
HOSTILE = {
    "layers": ("llama", {"num_hidden_layers": 30_000_000}, "num_hidden_layers=30000000"),
    "layers beyond 64 bits": ("llama", {"num_hidden_layers": HUGE}, "num_hidden_layers"),
    "layers of windows": ("qwen2", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "layers by turns": ("gemma2", {"num_hidden_layers": 10**9, "layer_types": None}, "layers"),
    "layers of gpt2": ("gpt2", {"n_layer": 10**9}, "n_layer"),
    "layers of bert": ("bert", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "layers of neo": ("gpt_neo", {"num_layers": 10**9}, "num_layers"),
    "turns of neo": (
        "gpt_neo",
        {"attention_layers": None, "attention_types": [[["global"], 10**9]]},
        "attention_types",
    ),
    "turns that are none": ("gpt_neo", {"attention_types": [3]}, "attention_types"),
    "head_dim": ("llama", {"head_dim": 2**31}, "head_dim"),
    "head_dim within 32 bits": ("llama", {"head_dim": 2**30}, "head_dim"),
    "head_dim beyond 64 bits": ("llama", {"head_dim": HUGE}, "head_dim"),
    "head of the whole": ("gptj", {"n_embd": 2**30, "n_head": 1, "rotary_dim": 2**29}, "n_embd"),
    "one head": ("gpt_neox", {"hidden_size": 2**30, "num_attention_heads": 1}, "hidden_size"),
    "heads": ("bloom", {"hidden_size": 2**30, "n_head": 2**30}, "n_head"),
    "heads beyond 64 bits": ("llama", {"num_attention_heads": HUGE}, "num_attention_heads|heads"),
    "embed": ("gpt2", {"n_embd": HUGE}, "n_embd"),
    "ffn": ("opt", {"ffn_dim": HUGE}, "ffn_dim"),
    "ffn that no tensor has": ("opt", {"ffn_dim": 2**30}, "misshaped"),
    "vocabulary": ("llama", {"vocab_size": 2**40}, "vocab_size"),
    "vocabulary that no tensor has": ("llama", {"vocab_size": 2**30}, "misshaped"),
    "positions": ("bert", {"max_position_embeddings": HUGE}, "max_position_embeddings"),
    "token types": ("bert", {"type_vocab_size": 2**30}, "misshaped"),
    "width": ("opt", {"word_embed_proj_dim": HUGE}, "word_embed_proj_dim"),
    "rotary": ("gptj", {"rotary_dim": HUGE}, "rotary_dim"),
    "labels": ("llama", {"num_labels": 10**9}, "num_labels"),
    "labels of text": ("llama", {"num_labels": "x"}, "num_labels"),
    "labels that are no numbers": ("llama", {"id2label": {"a": "b"}}, "config"),
    "kinds of layers": ("qwen2", {"layer_types": [["full_attention"]]}, "layer_types|config"),
    "layers apart": ("llama", {"per_layer_config": {"0": {"head_dim": 2}}}, "per_layer_config"),
    "architectures, a number": ("llama", {"architectures": 3}, "architectures|config"),
    "architectures, a dict": ("llama", {"architectures": {"a": 1}}, "architectures|config"),
    "architectures, numbers": ("llama", {"architectures": [3]}, "architectures|config"),
    "dtype, a list": ("llama", {"dtype": []}, "dtype"),
    "dtype, a list of text": ("llama", {"dtype": ["a"]}, "dtype"),
    "dtype, a function": ("llama", {"torch_dtype": "save", "dtype": None}, "torch_dtype"),
    "dtype, a number": ("llama", {"dtype": 1e308}, "dtype"),
    "quantization of text": ("llama", {"quantization_config": "x"}, "quantization_config"),
    "quantization, a list": ("llama", {"quantization_config": [1]}, "quantization_config"),
    "a method": ("llama", {"to_dict": "x"}, "to_dict"),
    "a part of a class": ("llama", {"attribute_map": {"a": "b"}}, "attribute_map"),
    "a constructor": ("llama", {"__post_init__": 1}, "__post_init__"),
    "an activation": ("gpt2", {"activation_function": ["gelu"]}, "activation_function|config"),
    "theta of nothing": ("llama", rope("default", theta=0), "rope_theta=0"),
    "theta below": ("llama", rope("default", theta=-1.0), r"rope_theta=-1\.0"),
    "theta, no number": ("llama", rope("default", theta=float("nan")), "rope_theta=nan"),
    "theta without end": ("llama", rope("default", theta=float("inf")), "rope_theta=inf"),
    "theta of digits": ("llama", rope("default", theta=10**400), "rope_theta"),
    "theta of text": ("llama", rope("default", theta="1e4"), "rope_theta"),
    "theta near nothing": ("llama", rope("default", theta=1e-300), "finite"),
    "factor of nothing": ("llama", rope("linear", factor=0), "factor=0"),
    "factor, no number": ("llama", rope("linear", factor=float("nan")), "factor=nan"),
    "factor without end": ("llama", rope("linear", factor=float("inf")), "factor=inf"),
    "a bool for a number": ("llama", rope("linear", factor=True), "factor=True"),
    "kind of rope": ("llama", rope([]), "rope_type|rope"),
    "kinds of rope": ("llama", rope(["linear"]), "rope_type|rope"),
    "rope, a list": ("llama", {"rope_parameters": [1]}, "rope"),
    "llama3 without a band": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=5, high_freq_factor=4),
        "low_freq_factor=5",
    ),
    "llama3 of nothing": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=0, high_freq_factor=0),
        "freq_factor=0",
    ),
    "yarn of one": ("llama", rope("yarn", theta=1, factor=2.0), "yarn needs one above 1"),
    "yarn backwards": ("llama", rope("yarn", factor=2.0, beta_fast=-1), "beta_fast=-1"),
    "yarn far apart": (
        "llama",
        rope("yarn", factor=2.0, beta_fast=1e308, original_max_position_embeddings=1e-300),
        "finite",
    ),
    "partial rotary": ("gpt_neox", rope("default", partial_rotary_factor=float("nan")), "partial"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_config_is_refused_at_once(case, backend, altered, engines):
    kind, fields, message = HOSTILE[case]
    path = altered(kind, **fields)
    start = time.process_time()
    with pytest.raises(DualinferError, match=message) as error:
        dualinfer.init_inference(path, backend=backend, dtype="fp32")
    assert time.process_time() - start < A_SECOND
    assert len(str(error.value)) < 1500


def test_config_chooses_no_code(altered, monkeypatch):
    """HF fetches attention that it does not know from the hub, when a model is made."""
    path = altered("llama", _attn_implementation="attacker/kernel", attn_implementation="a/b")
    assert read_config(path)._attn_implementation is None


# --- fields that change nothing -------------------------------------------------------------------

HARMLESS = {
    "unsloth_fixed": True,
    "max_new_tokens": 3,
    "model_max_length": 64,
    "pad_token": "<pad>",
    "unk_token_id": 3,
    "sep_token_id": 5,
    "num_labels": 3,
    "trust_remote_code": True,
    "use_flash_attention_2": True,
    "keys_to_ignore_at_inference": ["past_key_values"],
    "max_window_layers": 28,
    "use_sliding_window": False,
    "custom_pipelines": {"text-generation": {"impl": "a.B", "pt": "C"}},
    "use_deepspeed_checkpointing": True,
    "is_causal": True,
    "torch_dtype": "half",
    "no_repeat_ngram_size": 0,
    "penalty_alpha": 0.6,
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_fields_that_models_of_the_hub_have_and_nobody_reads_are_taken(backend, altered, hf_model):
    path = altered("llama", **HARMLESS)
    (path / "generation_config.json").write_text("{}")
    ids = random_ids(1, 5)
    with dualinfer.init_inference(path, backend=backend, dtype="fp32") as engine:
        expected = hf_model(CAUSAL)(torch.tensor(ids)).logits.detach().numpy()
        np.testing.assert_allclose(np.asarray(engine(ids).logits), expected, atol=2e-4)
    live = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    dualinfer.init_inference(live, backend=backend, dtype="fp32", kernel_inject=True).close()


def test_generation_defaults_in_config_json_count_as_in_hf(altered, hf_model):
    path = altered("llama", max_new_tokens=3)
    (path / "generation_config.json").unlink(missing_ok=True)
    ids = torch.tensor(random_ids(1, 5))
    theirs = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with dualinfer.init_inference(path, dtype="fp32") as engine:
        ours = engine.generate(ids)
    assert ours.shape == (1, 8)
    torch.testing.assert_close(ours, theirs.generate(ids))


def test_names_of_generation_defaults_are_those_of_hf():
    known = set(hf.GenerationConfig().to_dict())
    known -= {"_from_model_config", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}
    known -= {"output_attentions", "output_hidden_states", "transformers_version"}
    assert known == GENERATION
    assert not GENERATION & INERT


def test_unknown_field_is_refused_with_both_ways_out(altered):
    path = altered("llama", mystery_scale=2.0)
    with pytest.raises(ModelError, match=r'args=\{"mystery_scale": None\}'):
        dualinfer.init_inference(path, dtype="fp32", kernel_inject=True)
    dualinfer.init_inference(path, dtype="fp32", args={"mystery_scale": None}).close()


# --- generation configs ---------------------------------------------------------------------------

IGNORED = {
    "chat_format": "chatml",
    "max_window_size": 6144,
    "output_hidden_states": True,
    "output_scores": True,
    "typical_p": 0.3,
    "epsilon_cutoff": 0.2,
    "eta_cutoff": 0.2,
    "top_h": 0.4,
    "top_k": 3,
    "num_beam_groups": 4,
    "diversity_penalty": 0.5,
    "forced_bos_token_id": 7,
    "temperature": 0.0,
    "_commit_hash": "abc",
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_generation_fields_that_hf_passes_over_are_passed_over(backend, altered):
    path = altered("llama")
    (path / "generation_config.json").write_text(json.dumps({**IGNORED, "eos_token_id": 2}))
    ids = torch.tensor(random_ids(1, 5))
    theirs = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected = theirs.generate(ids, max_new_tokens=4)
    own = hf.GenerationConfig.from_pretrained(path)
    own.max_new_tokens = 4
    with dualinfer.init_inference(path, backend=backend, dtype="fp32") as engine:
        torch.testing.assert_close(engine.generate(ids, max_new_tokens=4), expected)
        torch.testing.assert_close(engine.generate(ids, own), expected)
        short = engine.generate(ids, max_new_tokens=4, chat_format=None, forced_bos_token_id=None)
        torch.testing.assert_close(short, expected)
        forced = torch.tensor([[5]])  # what HF reads after a prompt of one token alone
        assert engine.generate(forced, max_new_tokens=2)[0, 1] == 7
        with pytest.raises(ArgumentError, match=r"typical_p=3\.0.*from 0\.0 to 1\.0"):
            engine.generate(ids, do_sample=True, temperature=1.0, top_h=None, typical_p=3.0)
        with pytest.raises(ArgumentError, match="chat_format is no argument"):
            engine.generate(ids, chat_format="raw")


WRONG = {
    "max_new_tokens": [0, -1, "x", [], 2.5, True],
    "num_return_sequences": ["x", float("inf"), 2],
    "pad_token_id": ["x", [1]],
    "eos_token_id": ["</s>", [2, "x"], {"a": 1}],
    "cache_implementation": ["x", []],
    "early_stopping": [[]],
    "temperature": ["hot", [1]],
    "top_k": ["many"],
    "do_sample": ["yes", 1],
    "stop_strings": [5, [5]],
    "watermarking_config": ["x", {"a": 1}],
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_generation_field_of_a_wrong_type_is_named_with_its_file(name, file, altered):
    for value in WRONG[name]:
        path = altered("llama", **({name: value} if file == "config.json" else {}))
        (path / "generation_config.json").unlink(missing_ok=True)
        if file != "config.json":
            (path / file).write_text(json.dumps({name: value}))
        with pytest.raises((CheckpointError, ModelError), match=rf"{file}(.|\n)*{name}"):
            dualinfer.init_inference(path, dtype="fp32")


def test_generation_config_overwrites_no_method(altered):
    path = altered("llama")
    (path / "generation_config.json").write_text('{"to_dict": 1, "self": 2, "top_k": 7}')
    config = read_generation_config(path, None)
    assert config.to_dict()["top_k"] == 7


# --- requests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(hf_model):
    made = {
        b: dualinfer.init_inference(hf_model(CAUSAL), backend=b, dtype="fp32", kernel_inject=True)
        for b in BACKENDS
    }
    yield made
    for engine in made.values():
        engine.close()


def _unusable():
    dense = torch.tensor([[5, 6, 7]])
    return {
        "meta": dense.to("meta"),
        "sparse": dense.to_sparse(),
        "nested": torch.nested.nested_tensor([torch.tensor([5, 6]), torch.tensor([7])]),
        "quantized": torch.quantize_per_tensor(dense.float(), 1.0, 0, torch.quint8),
        "meta in a list": [dense[0].to("meta")],
        "no axis in a list": [dense[0], torch.tensor(5)],
        "objects": np.array([[object()]]),
        "dates": np.array([["2026-11-22"]], dtype="datetime64[D]"),
    }


@pytest.mark.filterwarnings("ignore")  # torch's of nested tensors
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_without_plain_values_are_refused(backend, engines):
    engine, ids = engines[backend], random_ids(1, 3)
    for case, value in _unusable().items():
        for call in (engine, engine.generate):
            with pytest.raises(ArgumentError, match="input_ids"):
                call(value)
        if case == "objects":
            continue
        with pytest.raises(ArgumentError, match="attention_mask"):
            engine(ids, attention_mask=value)
        with pytest.raises(ArgumentError, match="token_type_ids"):
            engine(ids, token_type_ids=value)
        with pytest.raises(ArgumentError, match=r"eos_token_id"):
            engine.generate(ids, eos_token_id=value)


DIGITS = 10**5000  # more than Python writes out
REQUESTS = {
    "temperature": 10**400,
    "top_p": DIGITS,
    "top_k": -DIGITS,
    "max_new_tokens": DIGITS,
    "min_new_tokens": -DIGITS,
    "pad_token_id": 2**40,
    "num_return_sequences": 10**9,
    "typical_p": np.array([1, 2]),
    "num_beams": np.array([1, 2]),
    "seed": DIGITS,
    "generation_config": hf.GenerationConfig,
    "repetition_penalty": torch.ones((), device="meta"),
    "max_length": torch.ones((), device="meta", dtype=torch.int64),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REQUESTS)
def test_hostile_request_is_refused_at_once(name, backend, engines):
    start = time.process_time()
    options = {"do_sample": True, name: REQUESTS[name]}
    with pytest.raises(DualinferError, match=name):
        engines[backend].generate(random_ids(2, 4), **options)
    assert time.process_time() - start < A_SECOND


@pytest.mark.parametrize(
    "fields",
    [
        {"tp_size": DIGITS},
        {"max_out_tokens": DIGITS},
        {"min_out_tokens": -DIGITS},
        {"moe": {"ep_size": DIGITS}},
        {"timeout": 10**400},
        {"mystery": DIGITS},
        {"x" * 5000: 1},
        {"replace_with_kernel_inject": DIGITS},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
def test_hostile_value_of_inference_config_is_refused(fields):
    with pytest.raises(dualinfer.ConfigError) as error:
        make_config(fields, {})
    assert len(str(error.value)) < 1500


def test_an_eos_beyond_the_vocabulary_never_comes():
    options = make_options({}, None, {"eos_token_id": [VOCAB - 1, VOCAB, -1]}, VOCAB)
    assert options.eos_token_ids == (VOCAB - 1,)
